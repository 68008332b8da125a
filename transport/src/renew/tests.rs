//! Expired and renewed certificates over both network paths. The tests set the clock.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::{Identity, Role};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;
use tokio::time::timeout;

use crate::quic::{QuicConfig, QuicDialer, QuicServer};
use crate::suite::{self, MemoryService, fetch_request, frame, hash, hashes, in_dram};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{
    BlockService, BoxFuture, Caller, CallerAdmission, Dialer, FetchAnswer, FetchReply, FetchRequest,
    PathError, SaveOffer, SaveRequest, SaveSession,
};

/// Far above the duration of any step here, and below a test's limit.
const SOON: Duration = Duration::from_secs(20);

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Half an hour before and after the end of January 2030, in seconds since 1970. Close enough for a
/// session to be resumed.
const JANUARY: u64 = 1_896_134_400 - 1_800;
const FEBRUARY: u64 = JANUARY + 3_600;

#[derive(Debug)]
struct ManualClock(AtomicU64);

impl TimeProvider for ManualClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.load(Ordering::Relaxed))))
    }
}

/// An authority, and the common clock.
struct CertFixture {
    authority: CertifiedIssuer<'static, KeyPair>,
    clock: Arc<ManualClock>,
}

impl CertFixture {
    fn new() -> CertFixture {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        CertFixture { authority, clock: Arc::new(ManualClock(AtomicU64::new(JANUARY))) }
    }

    /// A certificate valid from January until the first of this month, and its key.
    fn issue(&self, role: &Role, until_month: u8) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(role.dns_names()).unwrap();
        params.not_before = date_time_ymd(2030, 1, 1);
        params.not_after = date_time_ymd(2030, until_month, 1);
        (params.signed_by(&key, &self.authority).unwrap().pem(), key.serialize_pem())
    }

    fn member(&self, until_month: u8) -> Identity {
        self.holder(&Role::Node(None), until_month)
    }

    fn holder(&self, role: &Role, until_month: u8) -> Identity {
        let (cert, key) = self.issue(role, until_month);
        let clock = Arc::clone(&self.clock) as Arc<dyn TimeProvider>;
        Identity::from_pem_at(self.authority.pem().as_bytes(), cert.as_bytes(), key.as_bytes(), clock)
            .unwrap()
    }

    fn renew(&self, identity: &Identity) {
        let (cert, key) = self.issue(&Role::Node(None), 12);
        assert!(identity.renew(cert.as_bytes(), key.as_bytes()).unwrap());
    }
}

/// A server of one of the paths, and a dialer of the same.
struct ServerAndDialer {
    address: String,
    dialer: Box<dyn Dialer>,
    _server: Box<dyn std::any::Any>,
}

fn start_pair(
    is_quic: bool,
    server: &Identity,
    client: &Identity,
    service: Arc<dyn BlockService>,
) -> ServerAndDialer {
    if is_quic {
        let server = QuicServer::bind(ANY, server, service).unwrap();
        let dialer = Box::new(QuicDialer::new(client, QuicConfig::default()));
        ServerAndDialer { address: server.local_addr().to_string(), dialer, _server: Box::new(server) }
    } else {
        let server = TcpServer::bind(ANY, server, service).unwrap();
        let dialer = Box::new(TcpDialer::new(client, TcpConfig::default()));
        ServerAndDialer { address: server.local_addr().to_string(), dialer, _server: Box::new(server) }
    }
}

impl ServerAndDialer {
    async fn refusal(&self) -> PathError {
        let error = self.dialer.dial(self.address.clone()).await.err().unwrap();
        assert!(matches!(error, PathError::Untrusted { .. }), "{error}");
        error
    }
}

fn hit() -> FetchAnswer {
    FetchAnswer::Hit { tiers: in_dram(2) }
}

/// A certificate of either side expires: running operations at a node go on, new connections are
/// refused, open ones end, and the same server and dialer accept a new certificate.
async fn expire_during_fetch(is_quic: bool, is_servers: bool) -> (PathError, String) {
    let world = CertFixture::new();
    let (server, client) = match is_servers {
        true => (world.member(2), world.member(12)),
        false => (world.member(12), world.member(2)),
    };
    let service = MemoryService::default();
    (0..2).for_each(|number| service.hold(frame(hash(number), 4000)));
    let ends = start_pair(is_quic, &server, &client, Arc::new(service.clone()));
    let path = ends.dialer.dial(ends.address.clone()).await.unwrap();
    service.set_gate(1);
    let seen = tokio::sync::watch::Sender::new(0);
    let mut came = seen.subscribe();
    let fetching = async {
        let mut sink = |_| seen.send_modify(|seen| *seen += 1);
        path.fetch(fetch_request(&hashes(2)), &mut sink).await
    };
    let running_out = async {
        came.wait_for(|seen| *seen == 1).await.unwrap();
        world.clock.0.store(FEBRUARY, Ordering::Relaxed);
        let refusal = ends.refusal().await;
        service.set_gate(10);
        refusal
    };
    let (answer, refusal) = tokio::join!(fetching, running_out);
    if !is_servers {
        assert_eq!(answer.unwrap(), hit(), "the operation in progress did not finish");
    }
    let ended = async {
        while path.ping().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, ended).await.expect("a connection outlives its certificate");
    world.renew(if is_servers { &server } else { &client });
    let again = ends.dialer.dial(ends.address.clone()).await.unwrap();
    assert_eq!(suite::fetch(&*again, fetch_request(&hashes(2))).await.unwrap(), hit());
    (refusal, ends.address)
}

#[tokio::test]
async fn an_expired_client_certificate_is_refused_over_quic() {
    let (error, address) = expire_during_fetch(true, false).await;
    says("a client's certificate that ran out, over QUIC", &error, &[&address]);
}

#[tokio::test]
async fn an_expired_node_certificate_is_refused_over_quic() {
    let (error, address) = expire_during_fetch(true, true).await;
    says("a node's certificate that ran out, over QUIC", &error, &[&address]);
}

#[tokio::test]
async fn an_expired_client_certificate_is_refused_over_tcp() {
    let (error, address) = expire_during_fetch(false, false).await;
    says("a client's certificate that ran out, over TCP", &error, &[&address]);
}

#[tokio::test]
async fn an_expired_node_certificate_is_refused_over_tcp() {
    let (error, address) = expire_during_fetch(false, true).await;
    says("a node's certificate that ran out, over TCP", &error, &[&address]);
}

/// A process of another role that answers at a node's address gets no request for blocks.
#[tokio::test]
async fn a_server_that_is_no_node_is_refused() {
    let world = CertFixture::new();
    for is_quic in [true, false] {
        let instance = world.holder(&Role::Instance(None), 12);
        let ends = start_pair(is_quic, &instance, &world.member(12), Arc::new(MemoryService::default()));
        let refusal = ends.refusal().await;
        if is_quic {
            says("a server that is no node, over QUIC", &refusal, &[&ends.address]);
        } else {
            says("a server that is no node, over TCP", &refusal, &[&ends.address]);
        }
    }
}

/// Records the callers' certificates.
#[derive(Default)]
struct AdmissionLog {
    service: MemoryService,
    leaves: Mutex<Vec<Arc<[u8]>>>,
}

impl BlockService for AdmissionLog {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        panic!("the unscoped service was called")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("the unscoped service was called")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        panic!("the unscoped service was called")
    }

    fn admit(&self, caller: &Caller) -> CallerAdmission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        self.leaves.lock().unwrap().push(Arc::clone(leaf));
        CallerAdmission::Scoped { service: Arc::new(self.service.clone()), may_map: false }
    }
}

#[tokio::test]
async fn connections_after_a_renewal_use_the_new_certificate() {
    for is_quic in [true, false] {
        let world = CertFixture::new();
        let (client, gate) = (world.member(12), Arc::new(AdmissionLog::default()));
        let ends = start_pair(is_quic, &world.member(12), &client, gate.clone());
        let dial = async || ends.dialer.dial(ends.address.clone()).await.unwrap();
        let (first, second) = (dial().await, dial().await);
        world.renew(&client);
        let third = dial().await;
        for path in [&first, &second, &third] {
            path.ping().await.unwrap();
        }
        let leaves = gate.leaves.lock().unwrap().clone();
        let (before, since) = leaves.split_at(2);
        assert!(before[0] == before[1] && !since.is_empty(), "quic: {is_quic}");
        assert!(since.iter().all(|leaf| *leaf == since[0] && *leaf != before[0]), "quic: {is_quic}");
    }
}
