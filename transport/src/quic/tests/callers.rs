//! Whom a server answers, and by whom: the certificate of the connection says it, and nothing else.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kv_core::id::LeaseId;

use super::*;
use crate::{Admission, Caller, FetchReply, FetchRequest, SaveSession};

/// Gives each caller a service of its own, and refuses the one that comes after so many.
struct Door {
    rooms: Mutex<BTreeMap<Vec<u8>, MemoryService>>,
    rooms_max: usize,
}

impl Door {
    fn of(rooms_max: usize) -> Arc<Door> {
        Arc::new(Door { rooms: Mutex::default(), rooms_max })
    }

    /// The service of the caller with this certificate.
    fn room(&self, identity: &Identity) -> MemoryService {
        self.rooms.lock().unwrap()[&leaf(identity)].clone()
    }
}

fn leaf(identity: &Identity) -> Vec<u8> {
    let tls = identity.quic_client();
    let key = tls.client_auth_cert_resolver.resolve(&[], &[rustls::SignatureScheme::ECDSA_NISTP256_SHA256]);
    key.unwrap().cert[0].to_vec()
}

impl BlockService for Door {
    fn fetch(&self, _: FetchRequest) -> crate::BoxFuture<'_, FetchReply> {
        panic!("nobody is served at the door")
    }

    fn save(&self, _: SaveRequest) -> crate::BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("nobody is served at the door")
    }

    fn release(&self, _: LeaseId) -> crate::BoxFuture<'_, ()> {
        panic!("nobody is served at the door")
    }

    fn admit(&self, caller: &Caller) -> Admission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        let mut rooms = self.rooms.lock().unwrap();
        if rooms.len() >= self.rooms_max && !rooms.contains_key(&**leaf) {
            return Admission::Refused;
        }
        let room = rooms.entry(leaf.to_vec()).or_default().clone();
        Admission::Scoped { service: Arc::new(room), maps: false }
    }
}

async fn dial(server: &QuicServer, identity: &Identity) -> Arc<dyn crate::Path> {
    let dialer = QuicDialer::new(identity, QuicConfig::default());
    dialer.dial(server.local_addr().to_string()).await.unwrap()
}

#[tokio::test]
async fn a_caller_is_answered_by_the_service_it_was_admitted_to_on_all_its_connections() {
    let (authority, door) = (Authority::new(), Door::of(2));
    let server = QuicServer::bind(ANY, &authority.member(), door.clone()).unwrap();
    let (ours, theirs) = (authority.member(), authority.member());
    let (first, again, other) =
        (dial(&server, &ours).await, dial(&server, &ours).await, dial(&server, &theirs).await);
    let saved = suite::done(suite::save(&*first, save_request(&hashes(2)), 1000).await.unwrap());
    assert_eq!(saved.stored_blocks, 2);
    assert!(door.room(&ours).holds(hash(0)) && !door.room(&theirs).holds(hash(0)));
    let answer = suite::fetch(&*again, fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(2) }, "another connection of the same caller");
    let answer = suite::fetch(&*other, fetch_request(&hashes(2))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    other.release(LeaseId(7)).await.unwrap();
    assert_eq!((door.room(&ours).released(), door.room(&theirs).released()), (vec![], vec![LeaseId(7)]));
}

#[tokio::test]
async fn a_caller_that_is_refused_is_told_so_and_the_others_are_served() {
    let (authority, door) = (Authority::new(), Door::of(1));
    let server = QuicServer::bind(ANY, &authority.member(), door.clone()).unwrap();
    let ours = authority.member();
    let path = dial(&server, &ours).await;
    let error = dial_error(&server, &authority.member()).await;
    says("a caller that a node does not serve", &error, &[&server.local_addr().to_string()]);
    path.ping().await.unwrap();
    dial(&server, &ours).await.ping().await.unwrap();
}
