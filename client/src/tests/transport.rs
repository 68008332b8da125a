//! Kinds of paths that a client uses, over both real network paths.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use kv_core::id::{Category, LeaseId, RequestId, TenantId};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Identity;
use kvfleet_proto::pb;
use kvfleet_transport::BlockService;
use kvfleet_transport::pick::PickReason;
use kvfleet_transport::quic::QuicServer;
use kvfleet_transport::shm::{SPIN_WAIT, ShmConfig, ShmRuntimes, ShmServer, ShmServerConfig, socket_path};
use kvfleet_transport::suite::{EPOCH, IDENTITY, MemoryService, PATIENCE, frame, hash, hashes};
use kvfleet_transport::tcp::TcpServer;
use tokio::runtime::Handle;

use super::authority::{Authority, config};
use crate::{Client, ClientConfig, FetchCall, NetworkPreference, Transport};

/// Both servers of a node, on one port.
fn serve(identity: &Identity, service: &Arc<dyn BlockService>) -> (SocketAddr, (QuicServer, TcpServer)) {
    loop {
        let any = "127.0.0.1:0".parse().unwrap();
        let quic = QuicServer::bind(any, identity, Arc::clone(service)).unwrap();
        if let Ok(tcp) = TcpServer::bind(quic.local_addr(), identity, Arc::clone(service)) {
            return (quic.local_addr(), (quic, tcp));
        }
    }
}

/// Shared memory with the same node, by copies.
fn serve_host(dir: &Path, at: SocketAddr, service: &Arc<dyn BlockService>) -> ShmServer {
    let config = ShmServerConfig {
        address: at.to_string(),
        frame_bytes_max: 1 << 20,
        granted_bytes_max: 0,
        bounce_bytes_max: 64 << 20,
        lease: PATIENCE,
        stall_timeout: PATIENCE,
        spin_wait: SPIN_WAIT,
        serves_other_users: false,
    };
    let ends = ShmRuntimes { event_loop: Handle::current(), may_move: false, bulk: Handle::current() };
    ShmServer::bind(&socket_path(dir, &at.to_string()), config, None, Arc::clone(service), ends).unwrap()
}

fn call(address: String) -> FetchCall {
    let source = pb::Source { node: 0, epoch: EPOCH.0, address, start_blocks: 0, len_blocks: 4, tier: 1 };
    FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: hashes(4),
        resident_blocks: 0,
        sources: vec![source],
        deadline: PATIENCE,
        class: None,
    }
}

#[tokio::test]
async fn client_uses_its_transport_and_counts_bytes_per_path() {
    let (authority, service) = (Authority::new(), MemoryService::default());
    (0..4).for_each(|number| service.hold(frame(hash(number), 2000)));
    let service: Arc<dyn BlockService> = Arc::new(service);
    let (at, _servers) = serve(&authority.member(), &service);
    let dir = tempfile::tempdir().unwrap();
    let _near = serve_host(dir.path(), at, &service);
    for transport in Transport::ALL.into_iter().filter(|transport| *transport != Transport::Rdma) {
        let config = config(vec!["127.0.0.1:1".to_owned()], authority.member());
        let shm = Some(ShmConfig::new(dir.path().to_owned()));
        let client = Client::new(ClientConfig { transport, shm, ..config }).unwrap();
        let outcome = client.fetch(call(at.to_string())).await.unwrap();
        assert_eq!((outcome.blocks.len(), outcome.wrong_blocks), (4, 0), "{transport}");
        let carried = client.carried();
        assert_eq!(carried.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), transport.kinds());
        assert_eq!(carried[0].1.received_bytes(), outcome.bytes, "{transport}: the first kind must be used");
        let reports = client.path_reports();
        assert_eq!((reports.len(), reports[0].used), (1, transport.kinds()[0]));
        let why = if transport == Transport::Auto { "same host" } else { "the only configured path" };
        assert_eq!(reports[0].to_string(), format!("{at} over {}: {why}", transport.kinds()[0]));
    }
}

#[tokio::test]
async fn auto_prefers_the_configured_network_path() {
    let (authority, service) = (Authority::new(), MemoryService::default());
    (0..4).for_each(|number| service.hold(frame(hash(number), 2000)));
    let service: Arc<dyn BlockService> = Arc::new(service);
    let (at, _servers) = serve(&authority.member(), &service);
    for network in [NetworkPreference::Tcp, NetworkPreference::Quic] {
        let config = config(vec!["127.0.0.1:1".to_owned()], authority.member());
        let client = Client::new(ClientConfig { network, ..config }).unwrap();
        assert_eq!(client.fetch(call(at.to_string())).await.unwrap().blocks.len(), 4);
        let report = client.path_reports().pop().unwrap();
        assert_eq!((report.used, report.reason), (network.kind(), PickReason::Preferred));
    }
}

#[tokio::test]
async fn shared_memory_needs_a_directory_but_auto_does_not() {
    let authority = Authority::new();
    let refused = |transport| {
        let config = config(vec!["127.0.0.1:1".to_owned()], authority.member());
        Client::new(ClientConfig { transport, ..config }).err()
    };
    says("a client: transport shm without a directory", &refused(Transport::Shm).unwrap(), &[]);
    assert_eq!(refused(Transport::Auto), None);
}

#[tokio::test]
#[cfg(feature = "rdma")]
async fn rdma_error_names_missing_device_and_auto_falls_back() {
    let (authority, service) = (Authority::new(), MemoryService::default());
    (0..4).for_each(|number| service.hold(frame(hash(number), 2000)));
    let service: Arc<dyn BlockService> = Arc::new(service);
    let (at, _servers) = serve(&authority.member(), &service);
    let client = |transport| {
        let rdma = crate::RdmaSettings { device: Some("no such device".to_owned()), ..Default::default() };
        let config = config(vec!["127.0.0.1:1".to_owned()], authority.member());
        Client::new(ClientConfig { transport, rdma, ..config })
    };
    let refused = client(Transport::Rdma).err().unwrap().to_string();
    // Without the library the error comes before the search for devices.
    let there = refused.split("there is: ").nth(1).and_then(|rest| rest.split("; bring").next());
    says("a client: transport rdma without a device", &refused, &[there.unwrap()]);
    let auto = client(Transport::Auto).unwrap();
    let outcome = auto.fetch(call(at.to_string())).await.unwrap();
    assert_eq!((outcome.blocks.len(), outcome.wrong_blocks), (4, 0));
    let reports = auto.path_reports();
    assert_eq!(reports[0].used, kvfleet_transport::pick::PathKind::Tcp);
    let why = reports[0].to_string();
    assert!(why.contains("; rdma, last failure: ") && why.contains("no such device"), "{why}");
}
