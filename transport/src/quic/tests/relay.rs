//! What a network does between both ends: packets that it takes no longer, and addresses that change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::UdpSocket;
use tokio::sync::Notify;

use super::*;

/// The shortest packet of QUIC has a header, a number, and the sum of its cipher.
const PACKET_BYTES_MIN: usize = 20;

/// Passes packets between one client and a server.
struct Relay {
    /// Where the client finds it.
    at: SocketAddr,
    state: Arc<State>,
    passing: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct State {
    /// What is longer is lost without a word, in bytes; zero: nothing is.
    longest: AtomicUsize,
    /// Packets that were lost so.
    lost: AtomicUsize,
    /// The longest that came through to the client.
    seen: AtomicUsize,
    /// The server is to see another address from now on.
    moves: Notify,
    /// Packets of the client that left from the newest of them.
    from_newest: AtomicUsize,
}

impl State {
    fn passes(&self, bytes: usize) -> bool {
        let longest = self.longest.load(Ordering::SeqCst);
        let passes = longest == 0 || bytes <= longest;
        if !passes {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        passes
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.passing.abort();
    }
}

impl Relay {
    /// Loses what is `longer` than so many bytes from the first packet on; zero: nothing.
    async fn to(server: SocketAddr, longer: usize) -> Relay {
        let front = UdpSocket::bind(ANY).await.unwrap();
        let (at, state) = (front.local_addr().unwrap(), Arc::<State>::default());
        state.longest.store(longer, Ordering::SeqCst);
        let passing = tokio::spawn(pass(front, server, Arc::clone(&state)));
        Relay { at, state, passing }
    }
}

async fn pass(front: UdpSocket, server: SocketAddr, state: Arc<State>) {
    let mut back = UdpSocket::bind(ANY).await.unwrap();
    let mut client = None;
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            Ok((bytes, from)) = front.recv_from(&mut up) => {
                // What asks whether anybody is there comes of another socket, and is no packet of the connection.
                if bytes < PACKET_BYTES_MIN {
                    continue;
                }
                client = Some(from);
                if state.passes(bytes) {
                    state.from_newest.fetch_add(1, Ordering::SeqCst);
                    // What a full socket drops, a network drops.
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
                state.from_newest.store(0, Ordering::SeqCst);
            }
        }
    }
}

/// A node with these blocks, of 64 KiB each, behind a relay.
struct Relayed {
    relay: Relay,
    service: MemoryService,
    dialer: QuicDialer,
    _server: QuicServer,
}

impl Relayed {
    /// What is `longer` than so many bytes never passes.
    async fn new(blocks: u32, longer: usize) -> Relayed {
        let (authority, service) = (Authority::new(), MemoryService::default());
        (0..blocks).for_each(|number| service.hold(frame(hash(number), 64 << 10)));
        let server = QuicServer::bind(ANY, &authority.member(), Arc::new(service.clone())).unwrap();
        let relay = Relay::to(server.local_addr(), longer).await;
        let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
        Relayed { relay, service, dialer, _server: server }
    }

    async fn dial(&self) -> Result<Arc<dyn crate::Path>, PathError> {
        self.dialer.dial(self.relay.at.to_string()).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_takes_long_packets_no_more_costs_time_and_nothing_else() {
    let node = Relayed::new(64, 0).await;
    let (path, relay) = (node.dial().await.unwrap(), &node.relay);
    let all = || async { suite::fetch(path.as_ref(), fetch_request(&hashes(64))).await.unwrap() };
    // Until long packets are in use.
    while relay.state.seen.load(Ordering::SeqCst) <= 1400 {
        assert_eq!(all().await, FetchAnswer::Hit { tiers: in_dram(64) });
    }
    relay.state.longest.store(1400, Ordering::SeqCst);
    assert_eq!(all().await, FetchAnswer::Hit { tiers: in_dram(64) });
    assert!(relay.state.lost.load(Ordering::SeqCst) > 0, "long packets were in use");
    assert!(path.failure().is_none());
}

/// Networks that say nothing of what they do not pass, from the first packet on: both ends try longer ones, hear nothing of them, and
/// stay with what the standard has every network pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_never_took_long_packets_carries_blocks_both_ways() {
    let node = Relayed::new(64, usize::from(MTU_MIN)).await;
    let (path, state) = (node.dial().await.unwrap(), &node.relay.state);
    let fetched = || suite::fetch(path.as_ref(), fetch_request(&hashes(64)));
    let lost = || state.lost.load(Ordering::SeqCst);
    assert_eq!(fetched().await.unwrap(), FetchAnswer::Hit { tiers: in_dram(64) });
    // Until both ends, or one of them twice, tried longer ones.
    while lost() < 2 {
        assert_eq!(fetched().await.unwrap(), FetchAnswer::Hit { tiers: in_dram(64) });
    }
    let more: Vec<_> = (100..132).map(hash).collect();
    let saved = suite::save(path.as_ref(), save_request(&more), 64 << 10).await.unwrap();
    assert_eq!(suite::done(saved).stored_blocks, 32);
    assert!(path.failure().is_none() && state.seen.load(Ordering::SeqCst) <= usize::from(MTU_MIN));
}

/// What passes no packet that QUIC must send is no path, which the dial says and no request finds out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_takes_less_than_quic_needs_is_no_path() {
    let node = Relayed::new(1, usize::from(MTU_MIN) - 1).await;
    let error = node.dial().await.err().unwrap();
    let PathError::TimedOut { peer, .. } = &error else { panic!("{error}") };
    assert_eq!(*peer, node.relay.at.to_string());
    assert!(node.relay.state.lost.load(Ordering::SeqCst) > 0, "it was tried");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_whose_address_changes_goes_on_where_it_was() {
    let node = Relayed::new(16, 0).await;
    let (path, relay, service) = (node.dial().await.unwrap(), &node.relay, &node.service);
    service.set_gate(4);
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(16)));
    let moving = async {
        while service.deadlines().is_empty() {
            tokio::task::yield_now().await;
        }
        relay.state.moves.notify_one();
        while relay.state.from_newest.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        service.set_gate(100);
    };
    let (answer, ()) = tokio::join!(fetch, moving);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(16) });
    path.ping().await.unwrap();
    assert!(path.failure().is_none(), "it is the same connection");
}
