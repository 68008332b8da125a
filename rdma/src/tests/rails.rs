//! Several rails, and operations with a failing rail: each block arrives once, in order, over
//! another rail or connection.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex};

use kvfleet_proto::frame::Frame;
use kvfleet_transport::pick::BreakerRules;
use kvfleet_transport::{BoxFuture, Caller, SaveOffer, SaveRequest, SaveSession};

use super::super::link::{EPOCH_WORD_BYTES, PROBE_BYTES};
use super::*;

/// Numbers of the node's cards.
pub(super) const NODE: [u8; 2] = [1, 3];
/// Numbers of the client's cards, in the same order.
const CLIENT: [u8; 2] = [2, 4];
/// Numbers of a third card at each end: node, client.
const THIRD: [u8; 2] = [5, 6];

/// Both ends of some rails.
pub(super) struct TestRails {
    pub(super) world: RdmaWorld,
    pub(super) clients: Vec<Arc<Rdma>>,
    tcp: TcpConfig,
}

/// A node and a client with these numbers of rails.
fn rails(service: impl BlockService + Clone, counts: (usize, usize), config: &RdmaConfig) -> TestRails {
    rails_of(|_| service, counts, config)
}

/// The same with a service that has blocks in this arena.
pub(super) fn rails_of<S: BlockService>(
    service: impl FnOnce(Arc<RdmaBufferPool>) -> S,
    (ours, theirs): (usize, usize),
    config: &RdmaConfig,
) -> TestRails {
    rails_over(service, (ours, theirs), config, TcpConfig::default())
}

fn rails_over<S: BlockService>(
    service: impl FnOnce(Arc<RdmaBufferPool>) -> S,
    (ours, theirs): (usize, usize),
    config: &RdmaConfig,
    tcp: TcpConfig,
) -> TestRails {
    let fabric = Fabric::default();
    let open = |number: &u8| Rdma::from_rail(fabric.rail(*number), config).unwrap();
    let nodes: Vec<_> = NODE.iter().chain(&THIRD[..1]).take(theirs).map(open).collect();
    let clients: Vec<_> = CLIENT.iter().chain(&THIRD[1..]).take(ours).map(open).collect();
    let memory = Arc::new(RdmaMemory::zeroed(64 << 20).unwrap());
    let offer = RdmaServer::with_rails(&nodes, Some(&memory)).unwrap();
    let arena = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
    let authority = TestAuthority::new();
    let identity = authority.member();
    let service = Arc::new(service(Arc::clone(&arena)));
    let server = bind(&identity, &tcp, Arc::clone(&offer), service);
    let (node, client) = (Arc::clone(&nodes[0]), Arc::clone(&clients[0]));
    TestRails {
        world: RdmaWorld { fabric, server, identity, authority, rdma_server: offer, node, client, arena },
        clients,
        tcp,
    }
}

/// Failed rails are probed again soon.
fn retry_soon() -> RdmaConfig {
    let [open_min, open_max] = [20, 80].map(Duration::from_millis);
    RdmaConfig { cool_down: BreakerRules { open_min, open_max, ..small().cool_down }, ..small() }
}

/// Failed rails are not probed again during a test.
pub(super) fn never_retry() -> RdmaConfig {
    let [open_min, open_max] = [600, 600].map(Duration::from_secs);
    RdmaConfig { cool_down: BreakerRules { open_min, open_max, ..small().cool_down }, ..small() }
}

impl TestRails {
    pub(super) async fn path(&self) -> Arc<dyn kvfleet_transport::Path> {
        let identity = self.world.authority.member();
        let dialer = RdmaDialer::with_rails(&self.clients, &identity, self.tcp.clone()).unwrap();
        dialer.dial(self.world.address()).await.unwrap()
    }

    /// Bytes that each client rail has read.
    pub(super) fn read_bytes(&self) -> Vec<u64> {
        self.clients.iter().map(|rdma| rdma.stats().read_bytes).collect()
    }

    /// Number of rails that moved block bytes since that transfer. Epoch words and probes do not
    /// count, because links are made and probed at any time.
    pub(super) fn rails_used(&self, since: usize) -> usize {
        let transfers = self.world.fabric.transfers().split_off(since);
        let moved =
            transfers.iter().filter(|transfer| ![EPOCH_WORD_BYTES, PROBE_BYTES].contains(&transfer.len));
        // Each rail registers its memory under its own key.
        let keys = moved.map(|transfer| transfer.local_key);
        keys.collect::<BTreeSet<_>>().len()
    }
}

/// Fetches `blocks` blocks and calls `interrupt` once the first has arrived; the service delivers
/// the others afterwards. All must arrive, once and in order.
pub(super) async fn fetch_interrupted(
    path: &dyn kvfleet_transport::Path,
    service: &MemoryService,
    blocks: u32,
    interrupt: impl FnOnce(),
) {
    service.set_gate(1);
    let (first, came) = tokio::sync::oneshot::channel();
    let (mut first, mut frames) = (Some(first), Vec::new());
    let mut sink = |frame: Frame| {
        frames.push(frame);
        if let Some(first) = first.take() {
            first.send(()).unwrap();
        }
    };
    let wanted = hashes(blocks);
    let fetch = path.fetch(fetch_request(&wanted), &mut sink);
    let interrupted = async {
        came.await.unwrap();
        interrupt();
        service.set_gate(1000);
    };
    let (answer, ()) = tokio::join!(fetch, interrupted);
    assert_eq!(answer.unwrap(), FetchAnswer::Hit { tiers: in_dram(blocks as usize) });
    assert_eq!(frames.len(), blocks as usize);
    for (frame, hash) in frames.iter().zip(wanted) {
        frame.verify(suite::IDENTITY, hash).unwrap();
    }
}

#[tokio::test]
async fn a_fetch_continues_over_the_connection_when_its_only_rail_fails() {
    let service = service_with_blocks(9, 1000);
    let rails = rails(service.clone(), (1, 1), &never_retry());
    let path = rails.path().await;
    let before = rails.world.server.traffic().sent_bytes();
    fetch_interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(NODE[0])).await;
    let sent = rails.world.server.traffic().sent_bytes() - before;
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    assert_eq!(sent, 8 * frame_bytes, "delivered blocks must not be sent again");
    assert!(path.failure().is_none(), "the node is not gone");
    rails.world.wait_until("the broken link is dropped", |world| world.fabric.queues().is_empty()).await;
}

#[tokio::test]
async fn a_fetch_continues_over_the_other_rail() {
    for dead in [NODE[0], CLIENT[0]] {
        let service = service_with_blocks(9, 1000);
        let rails = rails(service.clone(), (2, 2), &never_retry());
        let path = rails.path().await;
        let before = rails.read_bytes();
        fetch_interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(dead)).await;
        let (after, frame_bytes) = (rails.read_bytes(), frame(hash(0), 1000).bytes.len() as u64);
        assert!(
            after[0] - before[0] < 2 * frame_bytes,
            "one block, and the epoch word: {before:?} {after:?}"
        );
        assert!(after[1] - before[1] >= 8 * frame_bytes, "all other blocks: {before:?} {after:?}");
        assert_eq!(rails.world.server.traffic().sent_bytes(), 0, "no block used the connection");
        // Later fetches do not try the dead rail.
        let failed = rails.clients[0].stats().failed;
        for _ in 0..3 {
            suite::fetch(path.as_ref(), fetch_request(&hashes(9))).await.unwrap();
        }
        assert_eq!(rails.clients[0].stats().failed, failed);
    }
}

#[tokio::test]
async fn a_revoked_link_does_not_cut_a_fetch_short() {
    let service = service_with_blocks(9, 1000);
    let rails = rails(service.clone(), (2, 2), &never_retry());
    let path = rails.path().await;
    // The epoch word is revoked, as when the node ends a link.
    fetch_interrupted(path.as_ref(), &service, 9, || rails.world.rdma_server.revoke_all()).await;
    assert_eq!(rails.clients[0].stats().failed, 0);
}

#[tokio::test]
async fn a_failed_rail_is_probed_by_a_dedicated_link_and_reused() {
    let service = service_with_blocks(3, 1000);
    let rails = rails(service.clone(), (1, 1), &retry_soon());
    let path = rails.path().await;
    fetch_interrupted(path.as_ref(), &service, 3, || rails.world.fabric.kill(NODE[0])).await;
    // Probes fail repeatedly, and no request is affected.
    let failed = || rails.clients[0].stats().failed;
    let first = failed();
    rails.world.wait_until("two more probes failed", |_| failed() >= first + 2).await;
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(3) });
    rails.world.fabric.revive(NODE[0]);
    let tried = rails.world.client.stats().read_bytes;
    rails.world.wait_until("tried", |world| world.client.stats().read_bytes > tried).await;
    let fetched = async {
        let blocks = 3 * frame(hash(0), 1000).bytes.len() as u64;
        loop {
            let before = rails.read_bytes()[0];
            suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
            if rails.read_bytes()[0] >= before + blocks {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, fetched).await.expect("the rail must be used again");
}

/// Fetches three blocks with this deadline.
async fn fetch_within(path: &dyn kvfleet_transport::Path, millis: u64) -> FetchAnswer {
    let deadline = Duration::from_millis(millis);
    suite::fetch(path, FetchRequest { deadline, ..fetch_request(&hashes(3)) }).await.unwrap()
}

#[tokio::test]
async fn a_silent_rail_is_detected_before_its_card_reports() {
    let rails = rails(service_with_blocks(3, 1000), (2, 2), &never_retry());
    let path = rails.path().await;
    rails.world.fabric.silence(NODE[0]);
    let late = fetch_within(path.as_ref(), 200).await;
    assert_eq!(late.tiers().len(), 0, "no packet passes: {late:?}");
    // Its link is dropped, and a new one is probed without any request.
    let fabric = &rails.world.fabric;
    let first = fabric.stalled_queues();
    rails
        .world
        .wait_until("a new link is probed", |_| {
            fabric.stalled_queues().iter().any(|queue| !first.contains(queue))
        })
        .await;
    // Meanwhile the other rail is preferred.
    let before = rails.read_bytes();
    assert_eq!(fetch_within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
    assert!(rails.read_bytes()[1] > before[1] + 3000, "{before:?} {:?}", rails.read_bytes());
    fabric.time_out(NODE[0]);
    rails.world.wait_until("its card reports the failure", |_| rails.clients[0].stats().failed > 0).await;
    rails
        .world
        .wait_until("its queue pairs are destroyed", |world| world.fabric.stalled_queues().is_empty())
        .await;
    let begun = fabric.transfers().len();
    for _ in 0..3 {
        assert_eq!(fetch_within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
    }
    let failed = rails.clients[0].stats().failed;
    assert!(fabric.transfers().len() > begun && failed == 1, "the rail must stay suspended: {failed}");
    assert_eq!(rails.world.server.traffic().sent_bytes(), 0);
}

#[tokio::test]
async fn a_dropped_fetch_marks_a_silent_rail_as_suspect() {
    let rails = rails(service_with_blocks(3, 1000), (1, 1), &never_retry());
    let path = rails.path().await;
    let fabric = &rails.world.fabric;
    fabric.silence(NODE[0]);
    tokio::select! {
        _ = fetch_within(path.as_ref(), 60_000) => panic!("no packet passes"),
        () = rails.world.wait_until("a read is in flight", |_| !fabric.stalled_queues().is_empty()) => {}
    }
    let first = fabric.stalled_queues();
    rails
        .world
        .wait_until("a new link is probed", |_| {
            fabric.stalled_queues().iter().any(|queue| !first.contains(queue))
        })
        .await;
}

#[tokio::test]
async fn a_link_made_too_late_serves_the_next_fetch() {
    let service = service_with_blocks(3, 1000);
    let rails = rails(service.clone(), (1, 1), &never_retry());
    let path = rails.path().await;
    // The first fetch occupies the only link.
    service.set_gate(0);
    let first = fetch_within(path.as_ref(), 60_000);
    let then = async {
        rails.world.wait_until("the node receives the request", |_| service.deadlines().len() == 1).await;
        rails.world.fabric.hold();
        let before = rails.read_bytes()[0];
        let late = fetch_within(path.as_ref(), 100).await;
        assert_eq!(late, FetchAnswer::Miss { reason: MissReason::TooLate });
        assert_eq!(service.deadlines().len(), 2, "the second half of its time goes to the connection");
        rails.world.wait_until("the link is probed", |world| world.fabric.held() > 0).await;
        while rails.read_bytes()[0] < before + 8192 {
            rails.world.fabric.release();
            tokio::task::yield_now().await;
        }
        let sent = rails.world.server.traffic().sent_bytes();
        service.set_gate(1000);
        assert_eq!(fetch_within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
        assert_eq!(rails.world.server.traffic().sent_bytes(), sent, "the new link serves the fetch");
    };
    let (first, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(first, then) }).await.unwrap();
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn spare_rail_pairs_do_not_raise_the_link_limit() {
    let config = RdmaConfig { links_per_peer: 1, ..never_retry() };
    let service = service_with_blocks(3, 1000);
    let rails = rails(service.clone(), (1, 2), &config);
    let path = rails.path().await;
    service.set_gate(0);
    let first = fetch_within(path.as_ref(), 60_000);
    let then = async {
        rails.world.wait_until("the node receives the request", |_| service.deadlines().len() == 1).await;
        let late = fetch_within(path.as_ref(), 100).await;
        assert_eq!(late, FetchAnswer::Miss { reason: MissReason::TooLate });
        assert_eq!(service.deadlines().len(), 1, "one link allows one operation");
        service.set_gate(1000);
    };
    let (first, ()) = tokio::join!(first, then);
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn a_dead_first_rail_does_not_prevent_rdma() {
    let service = service_with_blocks(3, 1000);
    let rails = rails(service, (2, 2), &never_retry());
    rails.world.fabric.kill(CLIENT[0]);
    let path = rails.path().await;
    let before = rails.read_bytes();
    suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
    let after = rails.read_bytes();
    assert!(after[0] == before[0] && after[1] > before[1] + 3000, "{before:?} {after:?}");
    rails.world.fabric.kill(CLIENT[1]);
    let dialer =
        RdmaDialer::with_rails(&rails.clients, &rails.world.authority.member(), TcpConfig::default());
    let error = dialer.unwrap().dial(rails.world.address()).await.err().unwrap().to_string();
    assert_eq!(error.matches("RDMA packets do not pass").count(), 2, "one per rail: {error}");
}

#[tokio::test]
async fn surplus_rails_of_one_end_are_spares() {
    for (ours, theirs) in [(1, 2), (2, 1)] {
        let service = service_with_blocks(9, 1000);
        let rails = rails(service.clone(), (ours, theirs), &never_retry());
        let path = rails.path().await;
        let dead = if ours == 1 { NODE[0] } else { CLIENT[0] };
        fetch_interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(dead)).await;
        assert_eq!(rails.world.server.traffic().sent_bytes(), 0, "the spare rail must bring the blocks");
    }
}

#[tokio::test]
async fn operations_side_by_side_take_different_rails() {
    let service = service_with_blocks(4, 1000);
    let rails = rails(service.clone(), (2, 2), &never_retry());
    let path = rails.path().await;
    let before = rails.read_bytes();
    service.set_gate(0);
    let request = || suite::fetch(path.as_ref(), fetch_request(&hashes(4)));
    let open = async {
        rails.world.wait_until("both requests are in flight", |_| service.deadlines().len() == 2).await;
        service.set_gate(100);
    };
    let (first, second, ()) = tokio::join!(request(), request(), open);
    assert_eq!((first.unwrap().tiers().len(), second.unwrap().tiers().len()), (4, 4));
    let after = rails.read_bytes();
    assert!(after[0] - before[0] > 4000 && after[1] - before[1] > 4000, "{before:?} {after:?}");
}

#[tokio::test]
async fn a_rail_that_cannot_register_memory_is_skipped() {
    let fabric = Fabric::default();
    let [first, second] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &small()).unwrap());
    fabric.refuse_register_of(1, libc::ENOMEM);
    let both = [first, second];
    let local = LocalRail::register_all(&both).unwrap();
    assert_eq!((local.len(), local[0].rdma.device()), (1, "fake2"));
    let memory = Arc::new(RdmaMemory::zeroed(1 << 20).unwrap());
    assert_eq!(
        format!("{:?}", RdmaServer::with_rails(&both, Some(&memory)).unwrap()).matches("fake").count(),
        1
    );
    fabric.refuse_register(libc::ENOMEM);
    let error = LocalRail::register_all(&both).err().unwrap().to_string();
    assert!(error.contains("fake1"), "the error of the first rail: {error}");
}

/// Two rails at each end, which a fetch of about twenty frames uses together for granted blocks.
fn both(service: &MemoryService) -> TestRails {
    let lending = |arena| SharedArenaService { inner: service.clone(), arena, may_map: true };
    rails_of(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never_retry() })
}

/// A path with a link on each rail that knows the frame size.
async fn warm(rails: &TestRails) -> Arc<dyn kvfleet_transport::Path> {
    let path = rails.path().await;
    large_fetch_over_both(rails, path.as_ref()).await;
    path
}

/// Repeats `fetch` until it was read over all rails.
pub(super) async fn wait_all_rails_used(rails: &TestRails, fetch: impl AsyncFnMut()) {
    let all: Vec<usize> = (0..rails.clients.len()).collect();
    // The probe of a link reads less.
    wait_rails_used(rails, &all, 40_001, fetch).await;
}

/// Repeats `fetch` until each of these rails has read at least `bytes_min` bytes of it.
pub(super) async fn wait_rails_used(
    rails: &TestRails,
    these: &[usize],
    bytes_min: u64,
    mut fetch: impl AsyncFnMut(),
) {
    let help = async {
        loop {
            let before = rails.read_bytes();
            fetch().await;
            let after = rails.read_bytes();
            if these.iter().all(|at| after[*at] - before[*at] >= bytes_min) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, help).await.unwrap();
}

/// Repeats a large fetch until it was read over all rails.
async fn large_fetch_over_both(rails: &TestRails, path: &dyn kvfleet_transport::Path) {
    wait_all_rails_used(rails, async || drop(suite::fetch(path, fetch_request(&hashes(100))).await.unwrap()))
        .await;
}

#[tokio::test]
async fn a_large_fetch_uses_all_rails_and_arrives_in_order() {
    let service = service_with_blocks(100, 4000);
    let rails = both(&service);
    let path = warm(&rails).await;
    let before = (rails.read_bytes(), service.deadlines().len(), rails.world.fabric.transfers().len());
    let mut frames = Vec::new();
    let mut sink = |frame: Frame| frames.push(frame);
    let answer = path.fetch(fetch_request(&hashes(100)), &mut sink).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(100) });
    for (frame, hash) in frames.iter().zip(hashes(100)) {
        frame.verify(suite::IDENTITY, hash).unwrap();
    }
    assert_eq!((frames.len(), service.deadlines().len() - before.1), (100, 1));
    let read: Vec<u64> =
        rails.read_bytes().iter().zip(before.0).map(|(after, before)| after - before).collect();
    assert!(read.iter().all(|read| *read > 100 * 4000 / 4), "both rails must read a part: {read:?}");
    let frame_bytes = u32::try_from(frame(hash(0), 4000).bytes.len()).unwrap();
    let transfers = rails.world.fabric.transfers().split_off(before.2);
    assert_eq!(
        transfers.iter().filter(|transfer| transfer.len == frame_bytes).count(),
        100,
        "each block once"
    );
    assert_eq!(rails.rails_used(before.2), 2);
    // A small fetch leaves the other rail free.
    let before = rails.world.fabric.transfers().len();
    suite::fetch(path.as_ref(), fetch_request(&hashes(15))).await.unwrap();
    assert_eq!(rails.rails_used(before), 1);
}

/// A helper link carries no requests, so the node considers it idle.
#[tokio::test]
async fn a_helper_link_is_closed_before_the_node_closes_it() {
    let service = service_with_blocks(100, 4000);
    service.make_frames_ready();
    let lending = |arena| SharedArenaService { inner: service.clone(), arena, may_map: true };
    // The node closes a link after three times this long without requests.
    let tcp = TcpConfig { idle_timeout: Duration::from_millis(600), ..TcpConfig::default() };
    let rails = rails_over(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never_retry() }, tcp);
    let path = warm(&rails).await;
    let began = tokio::time::Instant::now();
    while began.elapsed() < Duration::from_millis(1400) {
        large_fetch_over_both(&rails, path.as_ref()).await;
    }
    // This fetch would outlast the node's timeout if its helper were the link that helped first
    // above.
    let (count, mut came) = (rails.world.fabric.transfers().len(), 0);
    rails.world.fabric.hold_from(count + 30);
    let mut sink = |_| came += 1;
    let fetch = path.fetch(fetch_request(&hashes(100)), &mut sink);
    let later = async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        rails.world.fabric.release();
    };
    let (answer, ()) = tokio::join!(fetch, later);
    assert_eq!((answer.unwrap(), came), (FetchAnswer::Hit { tiers: in_dram(100) }, 100));
    let failed: Vec<u64> = rails.clients.iter().map(|rdma| rdma.stats().failed).collect();
    assert_eq!(failed, [0, 0], "the node closed a link in use");
}

#[tokio::test]
async fn a_large_fetch_of_copied_blocks_uses_one_rail() {
    let service = service_with_blocks(100, 4000);
    let lending = |arena| SharedArenaService { inner: service.clone(), arena, may_map: false };
    let rails = rails_of(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never_retry() });
    let path = rails.path().await;
    for _ in 0..3 {
        let before = rails.read_bytes();
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(100) });
        let read =
            rails.read_bytes().into_iter().zip(before).filter(|(after, before)| after - before > 100_000);
        assert_eq!(read.count(), 1, "only its own link reaches a bounce buffer");
    }
}

#[tokio::test]
async fn a_large_fetch_ends_at_the_first_missing_block() {
    for missing in [0, 5, 50, 99] {
        let service = service_with_blocks(100, 4000);
        let rails = both(&service);
        let path = warm(&rails).await;
        service.forget(hash(missing));
        let answer = suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap();
        let hit = FetchAnswer::Hit { tiers: in_dram(100) };
        assert_eq!(answer, hit.clone().cut_short(missing as usize, MissReason::NotHeld));
        service.hold(frame(hash(missing), 4000));
        assert_eq!(suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap(), hit);
    }
}

#[tokio::test]
async fn a_large_fetch_loses_no_block_with_a_rail() {
    for dead in NODE {
        let service = service_with_blocks(100, 4000);
        let rails = both(&service);
        let path = warm(&rails).await;
        let failed = |rails: &TestRails| rails.clients.iter().map(|rdma| rdma.stats().failed).sum::<u64>();
        fetch_interrupted(path.as_ref(), &service, 100, || rails.world.fabric.kill(dead)).await;
        assert!(failed(&rails) > 0, "the rail was in use");
        assert_eq!(
            rails.world.server.traffic().sent_bytes(),
            0,
            "the other rail must bring the remaining blocks"
        );
        // With both rails dead, the connection brings the blocks that were held back.
        fetch_interrupted(path.as_ref(), &service, 100, || {
            NODE.iter().for_each(|rail| rails.world.fabric.kill(*rail));
        })
        .await;
        let frame_bytes = frame(hash(0), 4000).bytes.len() as u64;
        assert_eq!(rails.world.server.traffic().sent_bytes(), 99 * frame_bytes);
    }
}

#[tokio::test]
async fn a_large_fetch_ends_at_its_deadline() {
    let service = service_with_blocks(100, 4000);
    let rails = both(&service);
    let path = warm(&rails).await;
    service.set_gate(0);
    let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(100)) };
    let late = tokio::time::timeout(PATIENCE, suite::fetch(path.as_ref(), request)).await.unwrap();
    assert_eq!(late.unwrap(), FetchAnswer::Miss { reason: MissReason::TooLate });
}

#[tokio::test]
async fn a_dropped_large_fetch_releases_everything() {
    let service = service_with_blocks(100, 4000);
    service.make_frames_ready();
    let rails = both(&service);
    let path = warm(&rails).await;
    let made = rails.world.fabric.queues_made();
    // If each round lost any memory, all of the client's memory would be lost several times.
    for _ in 0..60 {
        large_fetch_over_both(&rails, path.as_ref()).await;
        rails.world.fabric.hold();
        let mut ignored = |_| {};
        tokio::select! {
            _ = path.fetch(fetch_request(&hashes(100)), &mut ignored) => panic!("the reads are held back"),
            () = rails.world.wait_until("reads are in flight", |world| world.fabric.held() > 10) => {}
        }
        rails.world.fabric.release();
    }
    // Each operation drops its own link, with two queue pairs at each end; its helper link is
    // reused.
    let made = rails.world.fabric.queues_made() - made;
    assert!(made <= 60 * 6, "{made} queue pairs");
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(100) });
    drop(path);
    rails.world.wait_until("ended", |world| world.fabric.queues().is_empty()).await;
}

/// A service like a real one: a block being written counts as present in other offers.
#[derive(Clone)]
struct ReservingService {
    inner: MemoryService,
    saves: SaveCounts,
}

/// Saves in progress, and offers so far.
type SaveCounts = Arc<(Mutex<(usize, usize)>, Condvar)>;

struct ReservingSession {
    inner: Box<dyn SaveSession>,
    _writes: ActiveWrite,
}

/// Delays the end of an aborted save until a second offer comes or a timeout: a premature offer
/// would come now.
struct ActiveWrite(SaveCounts);

impl Drop for ActiveWrite {
    fn drop(&mut self) {
        let (saves, offered) = &*self.0;
        let early = |(_, offers): &mut (usize, usize)| *offers < 2;
        let waited = offered.wait_timeout_while(saves.lock().unwrap(), Duration::from_millis(200), early);
        waited.unwrap().0.0 -= 1;
    }
}

impl SaveSession for ReservingSession {
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        self.inner.put(frame)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, kvfleet_transport::SaveDone> {
        self.inner.finish()
    }
}

impl BlockService for ReservingService {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, kvfleet_transport::FetchReply> {
        self.inner.fetch(request)
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        Box::pin(async move {
            let is_taken = {
                let (saves, offered) = &*self.saves;
                let mut saves = saves.lock().unwrap();
                *saves = (saves.0 + 1, saves.1 + 1);
                offered.notify_all();
                saves.0 > 1
            };
            let _writes = ActiveWrite(Arc::clone(&self.saves));
            let blocks = request.hashes.len();
            let (offer, session) = self.inner.save(request).await;
            let offer = if is_taken { SaveOffer::Wanted(vec![false; blocks]) } else { offer };
            let session =
                session.map(|inner| Box::new(ReservingSession { inner, _writes }) as Box<dyn SaveSession>);
            (offer, session)
        })
    }

    fn release(&self, lease: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn admit(&self, _: &Caller) -> kvfleet_transport::CallerAdmission {
        kvfleet_transport::CallerAdmission::Scoped { service: Arc::new(self.clone()), may_map: true }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_save_is_offered_again_after_the_node_aborted_it() {
    for several in [1, 2] {
        let inner = MemoryService::default();
        let service = ReservingService { inner: inner.clone(), saves: Arc::default() };
        let rails = rails(service, (several, several), &never_retry());
        let path = rails.path().await;
        inner.set_gate(0);
        let request = SaveRequest { frame_bytes: 300_000, ..save_request(&hashes(6)) };
        let save = suite::save(path.as_ref(), request, 290_000);
        let fail = async {
            inner.wait_for_puts(1).await;
            rails.world.fabric.kill(NODE[0]);
            // It takes the first frame, so that its slot is written again, and does not finish the
            // second.
            inner.set_gate(1);
            let failed = || rails.clients[0].stats().failed > 0;
            rails.world.wait_until("a transfer failed", |_| failed()).await;
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
            inner.set_gate(1000);
        };
        let (saved, ()) = tokio::join!(save, fail);
        let done = suite::done(saved.unwrap());
        assert_eq!((done.stored_blocks, done.present_blocks), (6, 0), "no block may count as present");
        assert!((0..6).all(|number| inner.holds(hash(number))));
        inner.wait_for_aborts(1).await;
        let by_card = rails.clients.last().unwrap().stats().written_bytes;
        assert_eq!(by_card >= 6 * 290_000, several == 2, "over the other rail, or the connection: {by_card}");
    }
}
