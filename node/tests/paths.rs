//! A node over both network paths: one service, one caller, one limit, and a common end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::world::*;
use kv_core::id::{LeaseId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::{Identity, Role};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, Path, PathError};
use prometheus::Registry;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;

async fn dial_tcp(world: &TestCluster, address: SocketAddr) -> Arc<dyn Path> {
    TcpDialer::new(&world.identity, TcpConfig::default()).dial(address.to_string()).await.unwrap()
}

/// Value of this metric for a path, as the metrics endpoint shows it.
fn figure(registry: &Registry, name: &str, path: &str) -> u64 {
    labelled(registry, name, ("path", path))
}

fn labelled(registry: &Registry, name: &str, (label, value): (&str, &str)) -> u64 {
    let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let start = format!("{name}{{{label}=\"{value}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
}

#[tokio::test]
async fn blocks_saved_over_one_path_are_read_over_the_other_and_bytes_are_counted() {
    let (world, registry) = (TestCluster::new(), Registry::new());
    let node = Node::start(world.config(&[]), &registry).await.unwrap();
    let quic = world.dial(node.data_addr()).await;
    let tcp = dial_tcp(&world, node.data_addr()).await;
    assert_eq!(save(&*tcp, 1, 0..5).await.stored_blocks, 5);
    let hit = |blocks| FetchAnswer::Hit { tiers: vec![Tier::Dram; blocks] };
    assert_eq!(fetch(&*quic, 2, 0, &hashes(0..5)).await, (hit(5), 5));
    assert_eq!(fetch(&*tcp, 3, 0, &hashes(0..2)).await, (hit(2), 2));
    let frame = frame(hash(0)).bytes.len() as u64;
    let sent = |path| figure(&registry, "kvfleet_node_path_sent_bytes", path);
    let received = |path| figure(&registry, "kvfleet_node_path_received_bytes", path);
    assert_eq!((sent("quic"), sent("tcp")), (5 * frame, 2 * frame));
    assert_eq!((received("quic"), received("tcp")), (0, 5 * frame));
    let of_class = |class| {
        ["admitted_operations", "refused_operations", "in_flight_bytes"]
            .map(|what| labelled(&registry, &format!("kvfleet_node_class_{what}"), ("class", class)))
    };
    assert_eq!(["fetch", "save", "prefetch"].map(of_class), [[2, 0, 0], [1, 0, 0], [0, 0, 0]]);
    node.shutdown().await;
}

#[tokio::test]
async fn lease_of_one_path_is_released_over_the_other() {
    let world = TestCluster::new();
    let node = start(&NodeConfig { dram_blocks: Some(1), ..world.config(&[]) }).await;
    let quic = world.dial(node.data_addr()).await;
    let tcp = dial_tcp(&world, node.data_addr()).await;
    assert_eq!(save(&*quic, 1, 0..1).await.stored_blocks, 1);
    fetch(&*quic, 2, 0, &hashes(0..1)).await;
    let held = tcp.save(save_request(3, 9, &hashes(9..10)), &|_| frame(hash(9))).await.unwrap();
    assert!(matches!(held, kvfleet_transport::SaveAnswer::Refused(_)), "{held:?}");
    tcp.release(LeaseId(2)).await.unwrap();
    assert_eq!(save(&*tcp, 3, 9..10).await.stored_blocks, 1, "the lease of the same caller ended");
}

#[tokio::test]
async fn stopped_node_serves_on_no_path() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let address = node.data_addr();
    let (quic, tcp) = (world.dial(address).await, dial_tcp(&world, address).await);
    node.shutdown().await;
    assert!(quic.ping().await.is_err() && tcp.ping().await.is_err());
    let listener = std::net::TcpListener::bind(address);
    assert!(listener.is_ok(), "the port is free again: {listener:?}");
    assert!(std::net::UdpSocket::bind(address).is_ok());
}

#[tokio::test]
async fn taken_tcp_port_is_reported_and_tcp_can_be_disabled() {
    let world = TestCluster::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = NodeConfig { data_listen: address.clone(), ..world.config(&[]) };
    let error = Node::start(config.clone(), &Registry::new()).await.unwrap_err();
    says("a port in use, of a node's data over TCP", &error, &[&address]);
    // The QUIC port was released after the error.
    let node = start_again(&NodeConfig { data_tcp: false, ..config }).await;
    world.dial(node.data_addr()).await.ping().await.unwrap();
    let dialer = TcpDialer::new(&world.identity, TcpConfig::default());
    let none = start(&NodeConfig { data_tcp: false, ..world.config(&[]) }).await;
    assert!(dialer.dial(none.data_addr().to_string()).await.is_err());
}

/// A clock in the year 2200.
#[derive(Debug)]
struct ClockInYear2200;

impl TimeProvider for ClockInYear2200 {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(7_258_118_400)))
    }
}

/// The role of the node in this test.
const NODE: Role = Role::Node(None);

/// An authority that issues certificates with an expiry year.
struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    fn new() -> TestAuthority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        TestAuthority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn issue(&self, role: &Role, until_year: i32) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(role.dns_names()).unwrap();
        params.not_after = date_time_ymd(until_year, 1, 1);
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

fn write((cert, key): (String, String), files: &TlsSection) {
    std::fs::write(&files.cert, cert).unwrap();
    std::fs::write(&files.key, key).unwrap();
}

#[tokio::test]
async fn node_presents_renewed_certificates_and_logs_unusable_ones() {
    let (world, issuer, log) = (TestCluster::new(), TestAuthority::new(), Log::start());
    let config = NodeConfig { tls_renew_ms: 5, ..world.config(&[]) };
    std::fs::write(&config.tls.ca, issuer.0.pem()).unwrap();
    write(issuer.issue(&NODE, 2100), &config.tls);
    let node = start(&config).await;
    let address = node.data_addr().to_string();
    // For this client the node's certificate expired long ago.
    let (cert, key) = issuer.issue(&Role::Instance(None), 4000);
    let [ca, cert, key] = [issuer.0.pem(), cert, key].map(String::into_bytes);
    let identity = Identity::from_pem_at(&ca, &cert, &key, Arc::new(ClockInYear2200)).unwrap();
    let quic = QuicDialer::new(&identity, QuicConfig::default());
    let tcp = TcpDialer::new(&identity, TcpConfig::default());
    let is_untrusted = |dialled: Result<_, _>| matches!(dialled.err(), Some(PathError::Untrusted { .. }));
    assert!(is_untrusted(quic.dial(address.clone()).await) && is_untrusted(tcp.dial(address.clone()).await));

    write(TestAuthority::new().issue(&NODE, 4000), &config.tls);
    let here = world.dir.path().display().to_string();
    // A check between the two writes finds a mismatched pair, and logs that too.
    let said = async || (log.count("BadSignature") > 0).then(|| log.line("BadSignature"));
    let line = eventually("the failure is logged", said).await;
    says("a node with a renewed certificate of another authority", &line, &[&here]);
    assert!(is_untrusted(quic.dial(address.clone()).await), "the previous certificate stays in use");

    write(issuer.issue(&NODE, 4000), &config.tls);
    let path =
        eventually("the new certificate is presented", async || quic.dial(address.clone()).await.ok()).await;
    path.ping().await.unwrap();
    tcp.dial(address).await.unwrap().ping().await.unwrap();
    node.shutdown().await;
}
