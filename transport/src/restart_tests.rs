//! A node that starts anew at its address while a fetch is under way, under another epoch and with other bytes of the same blocks, over
//! both network paths and within one host.
//!
//! What a client has of a node's answer comes over one connection, which ends with the process that answered: an epoch cannot
//! change behind it. So what came before is a prefix of one answer, the rest is lost with a reason, and nothing of the node that
//! started since is put behind it. RDMA, whose card reads memory without the node's doing, has boards for that
//! (`rdma/tests/fences.rs`). An epoch that ends while its node lives is the suite's (`fetch_over_the_end_of_an_epoch`).
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use kv_core::id::Epoch;
use kv_core::pipeline::Arrive;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::quic::tests::Authority;
use crate::quic::{QuicConfig, QuicDialer, QuicServer};
use crate::shm::tests::Node;
use crate::suite::{
    BumpArena, EPOCH, IDENTITY, MemoryService, PATIENCE, Rooms, fetch, fetch_request, frame_of, hash, hashes,
    in_dram,
};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{AskedLayers, Dialer, FetchAnswer, FetchRequest, MissReason, Path, PathError};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Slices of each block, before and after.
const OLD: [u32; 3] = [20_000, 100, 40_000];
const NEW: [u32; 3] = [100, 20_000, 40_000];

const ARENA_BYTES: u64 = 4 << 20;

/// A node's server, whichever it is.
enum Server {
    Quic(QuicServer, Authority),
    Tcp(TcpServer, Authority),
    Shm(Node),
}

/// Which, and for shared memory whether its blocks are read in place.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Quic,
    Tcp,
    Shm { maps: bool },
}

fn holding(kind: Kind, slices: &[u32]) -> Arc<MemoryService> {
    let arena = matches!(kind, Kind::Shm { maps: true }).then(|| BumpArena::new(ARENA_BYTES));
    let service = MemoryService::new(arena);
    (0..5).for_each(|number| service.hold(frame_of(hash(number), slices)));
    Arc::new(service)
}

impl Server {
    fn start(kind: Kind, service: &Arc<MemoryService>) -> Server {
        let (service, authority) = (Arc::clone(service), Authority::new());
        match kind {
            Kind::Quic => {
                let server = QuicServer::bind(ANY, &authority.member(), service).unwrap();
                Server::Quic(server, authority)
            }
            Kind::Tcp => {
                let server = TcpServer::bind(ANY, &authority.member(), service).unwrap();
                Server::Tcp(server, authority)
            }
            Kind::Shm { .. } => Server::Shm(Node::holding(service)),
        }
    }

    async fn dial(&self) -> Arc<dyn Path> {
        match self {
            Server::Quic(server, authority) => {
                let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
                dialer.dial(server.local_addr().to_string()).await
            }
            Server::Tcp(server, authority) => {
                let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
                dialer.dial(server.local_addr().to_string()).await
            }
            Server::Shm(node) => node.dial().await,
        }
        .unwrap()
    }

    /// Ends, and starts at the same address with this.
    async fn restart(self, service: &Arc<MemoryService>) -> Server {
        let service = Arc::clone(service);
        match self {
            Server::Quic(server, authority) => {
                let at = server.local_addr();
                server.close().await;
                Server::Quic(
                    again(|| QuicServer::bind(at, &authority.member(), service.clone())).await,
                    authority,
                )
            }
            Server::Tcp(server, authority) => {
                let at = server.local_addr();
                server.close().await;
                Server::Tcp(
                    again(|| TcpServer::bind(at, &authority.member(), service.clone())).await,
                    authority,
                )
            }
            Server::Shm(mut node) => {
                node.restart(service).await;
                Server::Shm(node)
            }
        }
    }
}

/// The socket of before may live a moment longer.
async fn again<T, E: std::fmt::Display>(bind: impl Fn() -> Result<T, E>) -> T {
    let bound = async {
        loop {
            match bind() {
                Ok(server) => return server,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    timeout(PATIENCE, bound).await.expect("its address is free again")
}

/// Two of five blocks came when the node starts anew.
async fn restarts_in_mid_fetch(kind: Kind, by_layer: bool) {
    let (old, new) = (holding(kind, &OLD), holding(kind, &NEW));
    new.set_epoch(Epoch(EPOCH.0 + 1));
    let server = Server::start(kind, &old);
    let path = server.dial().await;
    old.set_gate(2);
    let wanted = hashes(5);
    let (seen, mut frames) = (watch::Sender::new(0), Vec::new());
    let mut rooms = Rooms::new(&wanted, 0..3);
    let (mut came, all) = if by_layer { (rooms.count(), 2 * 3) } else { (seen.subscribe(), 2) };
    let fetching = async {
        let request = fetch_request(&wanted);
        if by_layer {
            let asked = AskedLayers { layers: 0..3, arrive: Arrive::ByLayer };
            return path.fetch_layers(request, asked, &mut rooms).await;
        }
        let mut sink = |frame| {
            frames.push(frame);
            seen.send_replace(frames.len());
        };
        path.fetch(request, &mut sink).await
    };
    let restarting = async {
        let _ = came.wait_for(|came| *came == all).await; // the senders are here
        let server = server.restart(&new).await;
        old.set_gate(100);
        server
    };
    let both = async { tokio::join!(fetching, restarting) };
    let (answer, server) = timeout(PATIENCE, both).await.expect("it comes to an end");
    let lost = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost };
    assert_eq!(answer.unwrap(), lost, "{kind:?}");
    // What came is of one answer, to the last byte.
    if by_layer {
        rooms.check();
        assert_eq!(rooms.layers_there()[..2], [3, 3], "{kind:?}");
        assert!(rooms.slice_bytes().iter().all(|slices| slices[..] == OLD) && rooms.wrong.is_empty());
    } else {
        assert_eq!(frames.len(), 2);
        for (frame, hash) in frames.iter().zip(&wanted) {
            frame.verify(IDENTITY, *hash).unwrap();
            assert_eq!(frame.slice(0).map(|slice| slice.len()), Some(OLD[0] as usize), "{kind:?}");
        }
    }
    is_over(path.as_ref()).await;
    stale_at_first(server.dial().await.as_ref()).await;
}

/// The path says who was lost and why, and brings nothing of the node that is there now.
async fn is_over(path: &dyn Path) {
    let failed = async {
        loop {
            match path.failure() {
                Some(failure) => return failure,
                None => tokio::task::yield_now().await,
            }
        }
    };
    let failure = timeout(PATIENCE, failed).await.expect("the path knows that it failed");
    let (PathError::Broken { peer, cause } | PathError::Unreachable { peer, cause }) = &failure else {
        panic!("{failure}")
    };
    assert!(!peer.is_empty() && !cause.is_empty(), "{failure}");
    let next = fetch(path, fetch_request(&hashes(5))).await.unwrap_err();
    assert_eq!(next.to_string(), failure.to_string());
}

/// Over a path to the node that is there now, whoever still means the one before hears so.
async fn stale_at_first(path: &dyn Path) {
    let stale = fetch(path, fetch_request(&hashes(5))).await.unwrap();
    assert_eq!(stale, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
    let request = FetchRequest { epoch: Epoch(EPOCH.0 + 1), ..fetch_request(&hashes(5)) };
    assert_eq!(fetch(path, request).await.unwrap(), FetchAnswer::Hit { tiers: in_dram(5) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_quic_nothing_of_a_node_that_started_anew_is_put_behind_what_came() {
    restarts_in_mid_fetch(Kind::Quic, false).await;
    restarts_in_mid_fetch(Kind::Quic, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tcp_nothing_of_a_node_that_started_anew_is_put_behind_what_came() {
    restarts_in_mid_fetch(Kind::Tcp, false).await;
    restarts_in_mid_fetch(Kind::Tcp, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn within_one_host_nothing_of_a_node_that_started_anew_is_put_behind_what_came() {
    for maps in [true, false] {
        restarts_in_mid_fetch(Kind::Shm { maps }, false).await;
        restarts_in_mid_fetch(Kind::Shm { maps }, true).await;
    }
}
