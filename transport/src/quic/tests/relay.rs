//! Network changes between both ends: a smaller MTU, and a new client address.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::UdpSocket;
use tokio::sync::Notify;

use super::*;

/// The shortest QUIC packet has a header, a packet number and an authentication tag.
const PACKET_BYTES_MIN: usize = 20;

/// Forwards packets between one client and a server.
struct LossyRelay {
    /// Address for the client.
    address: SocketAddr,
    state: Arc<RelayState>,
    passing: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct RelayState {
    /// Longer packets are silently dropped; in bytes, 0 means no limit.
    bytes_max: AtomicUsize,
    /// Packets dropped for their length.
    lost: AtomicUsize,
    /// Longest packet forwarded to the client, in bytes.
    seen: AtomicUsize,
    /// Makes the server see another client address from now on.
    moves: Notify,
    /// Client packets sent from the newest address.
    sent_since_move: AtomicUsize,
}

impl RelayState {
    fn passes(&self, bytes: usize) -> bool {
        let longest = self.bytes_max.load(Ordering::SeqCst);
        let passes = longest == 0 || bytes <= longest;
        if !passes {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        passes
    }
}

impl Drop for LossyRelay {
    fn drop(&mut self) {
        self.passing.abort();
    }
}

impl LossyRelay {
    /// Drops packets `longer` than this many bytes; 0 means none.
    async fn start(server: SocketAddr, longer: usize) -> LossyRelay {
        let front = UdpSocket::bind(ANY).await.unwrap();
        let (at, state) = (front.local_addr().unwrap(), Arc::<RelayState>::default());
        state.bytes_max.store(longer, Ordering::SeqCst);
        let passing = tokio::spawn(pass(front, server, Arc::clone(&state)));
        LossyRelay { address: at, state, passing }
    }
}

async fn pass(front: UdpSocket, server: SocketAddr, state: Arc<RelayState>) {
    let mut back = UdpSocket::bind(ANY).await.unwrap();
    let mut client = None;
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            Ok((bytes, from)) = front.recv_from(&mut up) => {
                // Probes of the port come from another socket and are not packets of the
                // connection.
                if bytes < PACKET_BYTES_MIN {
                    continue;
                }
                client = Some(from);
                if state.passes(bytes) {
                    state.sent_since_move.fetch_add(1, Ordering::SeqCst);
                    // A full socket drops packets like a network.
                    let _ = back.send_to(&up[..bytes], server).await;
                }
            }
            Ok(bytes) = back.recv(&mut down) => {
                let Some(client) = client.filter(|_| state.passes(bytes)) else { continue };
                state.seen.fetch_max(bytes, Ordering::SeqCst);
                let _ = front.send_to(&down[..bytes], client).await;
            }
            () = state.moves.notified() => {
                back = UdpSocket::bind(ANY).await.unwrap();
                state.sent_since_move.store(0, Ordering::SeqCst);
            }
        }
    }
}

/// A node with blocks of 64 KiB each, behind a relay.
struct RelayedNode {
    relay: LossyRelay,
    service: MemoryService,
    dialer: QuicDialer,
    _server: QuicServer,
}

impl RelayedNode {
    /// Packets `longer` than this many bytes are always dropped.
    async fn new(blocks: u32, longer: usize) -> RelayedNode {
        let (authority, service) = (TestAuthority::new(), MemoryService::default());
        (0..blocks).for_each(|number| service.hold(frame(hash(number), 64 << 10)));
        let server = QuicServer::bind(ANY, &authority.member(), Arc::new(service.clone())).unwrap();
        let relay = LossyRelay::start(server.local_addr(), longer).await;
        let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
        RelayedNode { relay, service, dialer, _server: server }
    }

    async fn dial(&self) -> Result<Arc<dyn crate::Path>, PathError> {
        self.dialer.dial(self.relay.address.to_string()).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetches_survive_a_shrinking_path_mtu() {
    let node = RelayedNode::new(64, 0).await;
    let (path, relay) = (node.dial().await.unwrap(), &node.relay);
    let all = || async { suite::fetch(path.as_ref(), fetch_request(&hashes(64))).await.unwrap() };
    // Until long packets are in use.
    while relay.state.seen.load(Ordering::SeqCst) <= 1400 {
        assert_eq!(all().await, FetchAnswer::Hit { tiers: in_dram(64) });
    }
    relay.state.bytes_max.store(1400, Ordering::SeqCst);
    assert_eq!(all().await, FetchAnswer::Hit { tiers: in_dram(64) });
    assert!(relay.state.lost.load(Ordering::SeqCst) > 0, "no long packet was dropped");
    assert!(path.failure().is_none());
}

/// A network that silently drops long packets from the start: both ends probe longer ones without
/// success, and stay at the minimum of the standard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_with_the_minimal_mtu_carries_blocks_both_ways() {
    let node = RelayedNode::new(64, usize::from(MTU_MIN)).await;
    let (path, state) = (node.dial().await.unwrap(), &node.relay.state);
    let fetched = || suite::fetch(path.as_ref(), fetch_request(&hashes(64)));
    let lost = || state.lost.load(Ordering::SeqCst);
    assert_eq!(fetched().await.unwrap(), FetchAnswer::Hit { tiers: in_dram(64) });
    // Until both ends, or one of them twice, probed longer packets.
    while lost() < 2 {
        assert_eq!(fetched().await.unwrap(), FetchAnswer::Hit { tiers: in_dram(64) });
    }
    let more: Vec<_> = (100..132).map(hash).collect();
    let saved = suite::save(path.as_ref(), save_request(&more), 64 << 10).await.unwrap();
    assert_eq!(suite::done(saved).stored_blocks, 32);
    assert!(path.failure().is_none() && state.seen.load(Ordering::SeqCst) <= usize::from(MTU_MIN));
}

/// If the network drops packets that QUIC must send, the dial fails, before any request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dialing_fails_below_the_minimal_mtu() {
    let node = RelayedNode::new(1, usize::from(MTU_MIN) - 1).await;
    let error = node.dial().await.err().unwrap();
    let PathError::TimedOut { peer, .. } = &error else { panic!("{error}") };
    assert_eq!(*peer, node.relay.address.to_string());
    assert!(node.relay.state.lost.load(Ordering::SeqCst) > 0, "no packet was dropped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_survives_a_change_of_the_clients_address() {
    let node = RelayedNode::new(16, 0).await;
    let (path, relay, service) = (node.dial().await.unwrap(), &node.relay, &node.service);
    service.set_gate(4);
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(16)));
    let moving = async {
        while service.deadlines().is_empty() {
            tokio::task::yield_now().await;
        }
        relay.state.moves.notify_one();
        while relay.state.sent_since_move.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        service.set_gate(100);
    };
    let (answer, ()) = tokio::join!(fetch, moving);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(16) });
    path.ping().await.unwrap();
    assert!(path.failure().is_none(), "the path failed");
}
