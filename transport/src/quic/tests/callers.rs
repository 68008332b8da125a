//! The certificate of a connection alone determines its service.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kv_core::id::LeaseId;

use super::*;
use crate::{Caller, CallerAdmission, FetchReply, FetchRequest, SaveSession};

/// Gives each caller its own service, up to a maximum, and refuses later callers.
struct PerCallerServices {
    services: Mutex<BTreeMap<Vec<u8>, MemoryService>>,
    services_max: usize,
}

impl PerCallerServices {
    fn new(rooms_max: usize) -> Arc<PerCallerServices> {
        Arc::new(PerCallerServices { services: Mutex::default(), services_max: rooms_max })
    }

    /// The service of the caller with this certificate.
    fn service(&self, identity: &Identity) -> MemoryService {
        self.services.lock().unwrap()[&leaf(identity)].clone()
    }
}

fn leaf(identity: &Identity) -> Vec<u8> {
    let tls = identity.quic_client();
    let key = tls.client_auth_cert_resolver.resolve(&[], &[rustls::SignatureScheme::ECDSA_NISTP256_SHA256]);
    key.unwrap().cert[0].to_vec()
}

impl BlockService for PerCallerServices {
    fn fetch(&self, _: FetchRequest) -> crate::BoxFuture<'_, FetchReply> {
        panic!("the unscoped service was called")
    }

    fn save(&self, _: SaveRequest) -> crate::BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("the unscoped service was called")
    }

    fn release(&self, _: LeaseId) -> crate::BoxFuture<'_, ()> {
        panic!("the unscoped service was called")
    }

    fn admit(&self, caller: &Caller) -> CallerAdmission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        let mut rooms = self.services.lock().unwrap();
        if rooms.len() >= self.services_max && !rooms.contains_key(&**leaf) {
            return CallerAdmission::Refused;
        }
        let room = rooms.entry(leaf.to_vec()).or_default().clone();
        CallerAdmission::Scoped { service: Arc::new(room), may_map: false }
    }
}

async fn dial(server: &QuicServer, identity: &Identity) -> Arc<dyn crate::Path> {
    let dialer = QuicDialer::new(identity, QuicConfig::default());
    dialer.dial(server.local_addr().to_string()).await.unwrap()
}

#[tokio::test]
async fn a_callers_connections_share_its_service() {
    let (authority, gate) = (TestAuthority::new(), PerCallerServices::new(2));
    let server = QuicServer::bind(ANY, &authority.member(), gate.clone()).unwrap();
    let (ours, theirs) = (authority.member(), authority.member());
    let (first, again, other) =
        (dial(&server, &ours).await, dial(&server, &ours).await, dial(&server, &theirs).await);
    let saved = suite::done(suite::save(&*first, save_request(&hashes(2)), 1000).await.unwrap());
    assert_eq!(saved.stored_blocks, 2);
    assert!(gate.service(&ours).holds(hash(0)) && !gate.service(&theirs).holds(hash(0)));
    let answer = suite::fetch(&*again, fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) }, "another connection of the same caller");
    let answer = suite::fetch(&*other, fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    other.release(LeaseId(7)).await.unwrap();
    assert_eq!(
        (gate.service(&ours).released(), gate.service(&theirs).released()),
        (vec![], vec![LeaseId(7)])
    );
}

#[tokio::test]
async fn refused_callers_get_an_error_and_others_are_served() {
    let (authority, gate) = (TestAuthority::new(), PerCallerServices::new(1));
    let server = QuicServer::bind(ANY, &authority.member(), gate.clone()).unwrap();
    let ours = authority.member();
    let path = dial(&server, &ours).await;
    let error = dial_error(&server, &authority.member()).await;
    says("a caller that a node does not serve", &error, &[&server.local_addr().to_string()]);
    path.ping().await.unwrap();
    dial(&server, &ours).await.ping().await.unwrap();
}
