//! A node restarts at its address during a fetch, with another epoch and other bytes of the same
//! blocks, over both network paths and within one host.
//!
//! A client receives a node's answer over one connection, which ends with the process that
//! answered. So the epoch cannot change within an answer: the received blocks are a prefix of one
//! answer, the rest is lost with a reason, and no block of the new process follows. An RDMA card
//! reads memory without the node's involvement, so RDMA has epoch words (`rdma/src/tests/fences.rs`).
//! The suite tests an epoch that ends while its node lives (`fetch_over_the_end_of_an_epoch`).
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use kv_core::id::Epoch;
use kv_core::pipeline::ArrivalOrder;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::quic::tests::TestAuthority;
use crate::quic::{QuicConfig, QuicDialer, QuicServer};
use crate::shm::tests::ShmTestNode;
use crate::suite::{
    BumpArena, CheckedSlices, EPOCH, IDENTITY, MemoryService, PATIENCE, fetch, fetch_request, frame_of, hash,
    hashes, in_dram,
};
use crate::tcp::{TcpConfig, TcpDialer, TcpServer};
use crate::{Dialer, FetchAnswer, FetchRequest, LayerRequest, MissReason, Path, PathError};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Slices of each block, before and after.
const OLD: [u32; 3] = [20_000, 100, 40_000];
const NEW: [u32; 3] = [100, 20_000, 40_000];

const ARENA_BYTES: u64 = 4 << 20;

/// A node's server on any path.
enum Server {
    Quic(QuicServer, TestAuthority),
    Tcp(TcpServer, TestAuthority),
    Shm(ShmTestNode),
}

/// The path, and for shared memory whether its blocks are read in place.
#[derive(Clone, Copy, Debug)]
enum PathCase {
    Quic,
    Tcp,
    Shm { may_map: bool },
}

fn holding(kind: PathCase, slices: &[u32]) -> Arc<MemoryService> {
    let arena = matches!(kind, PathCase::Shm { may_map: true }).then(|| BumpArena::new(ARENA_BYTES));
    let service = MemoryService::new(arena);
    (0..5).for_each(|number| service.hold(frame_of(hash(number), slices)));
    Arc::new(service)
}

impl Server {
    fn start(kind: PathCase, service: &Arc<MemoryService>) -> Server {
        let (service, authority) = (Arc::clone(service), TestAuthority::new());
        match kind {
            PathCase::Quic => {
                let server = QuicServer::bind(ANY, &authority.member(), service).unwrap();
                Server::Quic(server, authority)
            }
            PathCase::Tcp => {
                let server = TcpServer::bind(ANY, &authority.member(), service).unwrap();
                Server::Tcp(server, authority)
            }
            PathCase::Shm { .. } => Server::Shm(ShmTestNode::serving(service)),
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

    /// Stops, and starts again at the same address with this service.
    async fn restart(self, service: &Arc<MemoryService>) -> Server {
        let service = Arc::clone(service);
        match self {
            Server::Quic(server, authority) => {
                let at = server.local_addr();
                server.close().await;
                Server::Quic(
                    retry_bind(|| QuicServer::bind(at, &authority.member(), service.clone())).await,
                    authority,
                )
            }
            Server::Tcp(server, authority) => {
                let at = server.local_addr();
                server.close().await;
                Server::Tcp(
                    retry_bind(|| TcpServer::bind(at, &authority.member(), service.clone())).await,
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

/// The old socket may live a moment longer.
async fn retry_bind<T, E: std::fmt::Display>(bind: impl Fn() -> Result<T, E>) -> T {
    let bound = async {
        loop {
            match bind() {
                Ok(server) => return server,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    timeout(PATIENCE, bound).await.expect("the address stays in use")
}

/// The node restarts after two of five blocks arrived.
async fn restart_during_fetch(kind: PathCase, by_layer: bool) {
    let (old, new) = (holding(kind, &OLD), holding(kind, &NEW));
    new.set_epoch(Epoch(EPOCH.0 + 1));
    let server = Server::start(kind, &old);
    let path = server.dial().await;
    old.set_gate(2);
    let wanted = hashes(5);
    let (seen, mut frames) = (watch::Sender::new(0), Vec::new());
    let mut rooms = CheckedSlices::new(&wanted, 0..3);
    let (mut came, all) = if by_layer { (rooms.slice_count(), 2 * 3) } else { (seen.subscribe(), 2) };
    let fetching = async {
        let request = fetch_request(&wanted);
        if by_layer {
            let asked = LayerRequest { layers: 0..3, arrive: ArrivalOrder::ByLayer };
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
    let (answer, server) = timeout(PATIENCE, both).await.expect("the fetch does not end");
    let lost = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost };
    assert_eq!(answer.unwrap(), lost, "{kind:?}");
    // All received bytes are of one answer.
    if by_layer {
        rooms.check();
        assert_eq!(rooms.layers_received()[..2], [3, 3], "{kind:?}");
        assert!(rooms.slice_bytes().iter().all(|slices| slices[..] == OLD) && rooms.wrong.is_empty());
    } else {
        assert_eq!(frames.len(), 2);
        for (frame, hash) in frames.iter().zip(&wanted) {
            frame.verify(IDENTITY, *hash).unwrap();
            assert_eq!(frame.slice(0).map(|slice| slice.len()), Some(OLD[0] as usize), "{kind:?}");
        }
    }
    assert_failed(path.as_ref()).await;
    assert_stale_then_hit(server.dial().await.as_ref()).await;
}

/// The path reports the lost peer and the cause, and returns no block of the new process.
async fn assert_failed(path: &dyn Path) {
    let failed = async {
        loop {
            match path.failure() {
                Some(failure) => return failure,
                None => tokio::task::yield_now().await,
            }
        }
    };
    let failure = timeout(PATIENCE, failed).await.expect("the path does not report its failure");
    let (PathError::Broken { peer, cause } | PathError::Unreachable { peer, cause }) = &failure else {
        panic!("{failure}")
    };
    assert!(!peer.is_empty() && !cause.is_empty(), "{failure}");
    let next = fetch(path, fetch_request(&hashes(5))).await.unwrap_err();
    assert_eq!(next.to_string(), failure.to_string());
}

/// Over a path to the new process, the old epoch is a miss.
async fn assert_stale_then_hit(path: &dyn Path) {
    let stale = fetch(path, fetch_request(&hashes(5))).await.unwrap();
    assert_eq!(stale, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
    let request = FetchRequest { epoch: Epoch(EPOCH.0 + 1), ..fetch_request(&hashes(5)) };
    assert_eq!(fetch(path, request).await.unwrap(), FetchAnswer::Hit { tiers: in_dram(5) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_during_a_quic_fetch_mixes_no_answers() {
    restart_during_fetch(PathCase::Quic, false).await;
    restart_during_fetch(PathCase::Quic, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_during_a_tcp_fetch_mixes_no_answers() {
    restart_during_fetch(PathCase::Tcp, false).await;
    restart_during_fetch(PathCase::Tcp, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_during_a_shm_fetch_mixes_no_answers() {
    for may_map in [true, false] {
        restart_during_fetch(PathCase::Shm { may_map }, false).await;
        restart_during_fetch(PathCase::Shm { may_map }, true).await;
    }
}
