//! Several rails, and what becomes of operations whose rail fails: each block comes once, in order, another way.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex};

use kvfleet_proto::frame::Frame;

use super::super::link::{BOARD_BYTES, TRIAL_BYTES};
use super::*;
use crate::pick::BreakerRules;
use crate::{BoxFuture, Caller, SaveOffer, SaveRequest, SaveSession};

/// Numbers of the node's cards.
pub(super) const NODE: [u8; 2] = [1, 3];
/// Numbers of the client's, in the same order.
const CLIENT: [u8; 2] = [2, 4];
/// The same of a third rail at each end.
const THIRD: [u8; 2] = [5, 6];

/// Both ends of some rails.
pub(super) struct Rails {
    pub(super) world: World,
    pub(super) clients: Vec<Arc<Rdma>>,
    tcp: TcpConfig,
}

/// A node with so many rails, and a client.
fn rails(service: impl BlockService + Clone, counts: (usize, usize), config: &RdmaConfig) -> Rails {
    rails_of(|_| service, counts, config)
}

/// The same, of a node whose service has blocks in this arena.
pub(super) fn rails_of<S: BlockService>(
    service: impl FnOnce(Arc<Pool>) -> S,
    (ours, theirs): (usize, usize),
    config: &RdmaConfig,
) -> Rails {
    rails_over(service, (ours, theirs), config, TcpConfig::default())
}

fn rails_over<S: BlockService>(
    service: impl FnOnce(Arc<Pool>) -> S,
    (ours, theirs): (usize, usize),
    config: &RdmaConfig,
    tcp: TcpConfig,
) -> Rails {
    let fabric = Fabric::default();
    let open = |number: &u8| Rdma::over(fabric.rail(*number), config).unwrap();
    let nodes: Vec<_> = NODE.iter().chain(&THIRD[..1]).take(theirs).map(open).collect();
    let clients: Vec<_> = CLIENT.iter().chain(&THIRD[1..]).take(ours).map(open).collect();
    let memory = Arc::new(Memory::zeroed(64 << 20).unwrap());
    let offer = RdmaOffer::over(&nodes, Some(&memory)).unwrap();
    let arena = Pool::new(&memory, 0..memory.len_bytes());
    let authority = Authority::new();
    let identity = authority.member();
    let service = Arc::new(service(Arc::clone(&arena)));
    let server = bind(&identity, &tcp, Arc::clone(&offer), service);
    let (node, client) = (Arc::clone(&nodes[0]), Arc::clone(&clients[0]));
    Rails { world: World { fabric, server, identity, authority, offer, node, client, arena }, clients, tcp }
}

/// Rails that are tried again soon.
fn soon() -> RdmaConfig {
    let [open_min, open_max] = [20, 80].map(Duration::from_millis);
    RdmaConfig { cool_down: BreakerRules { open_min, open_max, ..small().cool_down }, ..small() }
}

/// Rails that are not tried again while a test runs.
pub(super) fn never() -> RdmaConfig {
    let [open_min, open_max] = [600, 600].map(Duration::from_secs);
    RdmaConfig { cool_down: BreakerRules { open_min, open_max, ..small().cool_down }, ..small() }
}

impl Rails {
    pub(super) async fn path(&self) -> Arc<dyn crate::Path> {
        let identity = self.world.authority.member();
        let dialer = RdmaDialer::over(&self.clients, &identity, self.tcp.clone()).unwrap();
        dialer.dial(self.world.address()).await.unwrap()
    }

    /// Bytes that each of our rails read.
    pub(super) fn read(&self) -> Vec<u64> {
        self.clients.iter().map(|rdma| rdma.numbers().read_bytes).collect()
    }

    /// How many rails took part in what was read or written from that transfer on, boards and trials of links left out: links are made and tried whenever
    /// that is due.
    pub(super) fn took_part(&self, since: usize) -> usize {
        let transfers = self.world.fabric.transfers().split_off(since);
        let moved = transfers.iter().filter(|transfer| ![BOARD_BYTES, TRIAL_BYTES].contains(&transfer.len));
        // Each rail has its memory registered under a key of its own.
        let keys = moved.map(|transfer| transfer.local_key);
        keys.collect::<BTreeSet<_>>().len()
    }
}

/// Fetches so many blocks, and does something once the first of them came; the service lets the others pass after that. All of them
/// come, each once and in order.
pub(super) async fn interrupted(
    path: &dyn crate::Path,
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
async fn a_fetch_whose_only_rail_fails_goes_on_over_the_connection() {
    let service = holding(9, 1000);
    let rails = rails(service.clone(), (1, 1), &never());
    let path = rails.path().await;
    let before = rails.world.server.carried().sent_bytes();
    interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(NODE[0])).await;
    let sent = rails.world.server.carried().sent_bytes() - before;
    let frame_bytes = frame(hash(0), 1000).bytes.len() as u64;
    assert_eq!(sent, 8 * frame_bytes, "what had come was not sent again");
    assert!(path.failure().is_none(), "the node is not gone");
    rails.world.until("the broken link is ended", |world| world.fabric.queues().is_empty()).await;
}

#[tokio::test]
async fn a_fetch_whose_rail_fails_goes_on_over_the_other() {
    for dead in [NODE[0], CLIENT[0]] {
        let service = holding(9, 1000);
        let rails = rails(service.clone(), (2, 2), &never());
        let path = rails.path().await;
        let before = rails.read();
        interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(dead)).await;
        let (after, frame_bytes) = (rails.read(), frame(hash(0), 1000).bytes.len() as u64);
        assert!(after[0] - before[0] < 2 * frame_bytes, "one block, and the board: {before:?} {after:?}");
        assert!(after[1] - before[1] >= 8 * frame_bytes, "all others: {before:?} {after:?}");
        assert_eq!(rails.world.server.carried().sent_bytes(), 0, "nothing went over the connection");
        // Those that come later do not try it.
        let failed = rails.clients[0].numbers().failed;
        for _ in 0..3 {
            suite::fetch(path.as_ref(), fetch_request(&hashes(9))).await.unwrap();
        }
        assert_eq!(rails.clients[0].numbers().failed, failed);
    }
}

#[tokio::test]
async fn a_lost_connection_of_a_link_does_not_cut_its_fetch_short() {
    let service = holding(9, 1000);
    let rails = rails(service.clone(), (2, 2), &never());
    let path = rails.path().await;
    // The board says that everything is taken back: the node ends links so.
    interrupted(path.as_ref(), &service, 9, || rails.world.offer.take_back()).await;
    assert_eq!(rails.clients[0].numbers().failed, 0);
}

#[tokio::test]
async fn a_rail_that_failed_is_tried_by_a_link_of_its_own_and_used_again() {
    let service = holding(3, 1000);
    let rails = rails(service.clone(), (1, 1), &soon());
    let path = rails.path().await;
    interrupted(path.as_ref(), &service, 3, || rails.world.fabric.kill(NODE[0])).await;
    // Trials fail one after the other, and no request hears of it.
    let failed = || rails.clients[0].numbers().failed;
    let first = failed();
    rails.world.until("tried in vain", |_| failed() >= first + 2).await;
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(3) });
    rails.world.fabric.revive(NODE[0]);
    let tried = rails.world.client.numbers().read_bytes;
    rails.world.until("tried", |world| world.client.numbers().read_bytes > tried).await;
    let fetched = async {
        let blocks = 3 * frame(hash(0), 1000).bytes.len() as u64;
        loop {
            let before = rails.read()[0];
            suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
            if rails.read()[0] >= before + blocks {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, fetched).await.expect("it is used again");
}

/// Three blocks, for somebody who has this long.
async fn within(path: &dyn crate::Path, millis: u64) -> FetchAnswer {
    let deadline = Duration::from_millis(millis);
    suite::fetch(path, FetchRequest { deadline, ..fetch_request(&hashes(3)) }).await.unwrap()
}

#[tokio::test]
async fn a_silent_rail_is_found_out_though_nobody_waits_as_long_as_its_card() {
    let rails = rails(holding(3, 1000), (2, 2), &never());
    let path = rails.path().await;
    rails.world.fabric.silence(NODE[0]);
    let late = within(path.as_ref(), 200).await;
    assert_eq!(late.tiers().len(), 0, "nothing passes: {late:?}");
    // The link that it had is gone, and another is tried without any request.
    let fabric = &rails.world.fabric;
    let first = fabric.waiting();
    rails
        .world
        .until("another is tried", |_| fabric.waiting().iter().any(|queue| !first.contains(queue)))
        .await;
    // Meanwhile the other rail comes first.
    let before = rails.read();
    assert_eq!(within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
    assert!(rails.read()[1] > before[1] + 3000, "{before:?} {:?}", rails.read());
    fabric.give_up(NODE[0]);
    rails.world.until("its card says so", |_| rails.clients[0].numbers().failed > 0).await;
    rails.world.until("its queue pairs are gone", |world| world.fabric.waiting().is_empty()).await;
    let begun = fabric.transfers().len();
    for _ in 0..3 {
        assert_eq!(within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
    }
    let failed = rails.clients[0].numbers().failed;
    assert!(fabric.transfers().len() > begun && failed == 1, "it is left alone: {failed}");
    assert_eq!(rails.world.server.carried().sent_bytes(), 0);
}

#[tokio::test]
async fn who_is_dropped_midway_leaves_a_silent_rail_in_doubt() {
    let rails = rails(holding(3, 1000), (1, 1), &never());
    let path = rails.path().await;
    let fabric = &rails.world.fabric;
    fabric.silence(NODE[0]);
    tokio::select! {
        _ = within(path.as_ref(), 60_000) => panic!("nothing passes"),
        () = rails.world.until("it reads", |_| !fabric.waiting().is_empty()) => {}
    }
    let first = fabric.waiting();
    rails
        .world
        .until("another is tried", |_| fabric.waiting().iter().any(|queue| !first.contains(queue)))
        .await;
}

#[tokio::test]
async fn a_link_that_takes_longer_than_anybody_waits_is_there_for_the_next() {
    let service = holding(3, 1000);
    let rails = rails(service.clone(), (1, 1), &never());
    let path = rails.path().await;
    // The first has the only link.
    service.set_gate(0);
    let first = within(path.as_ref(), 60_000);
    let then = async {
        rails.world.until("it is asked", |_| service.deadlines().len() == 1).await;
        rails.world.fabric.hold();
        let before = rails.read()[0];
        let late = within(path.as_ref(), 100).await;
        assert_eq!(late, FetchAnswer::Miss { reason: MissReason::TooLate });
        assert_eq!(service.deadlines().len(), 2, "in the half that was left it asked over the connection");
        rails.world.until("it is tried", |world| world.fabric.held() > 0).await;
        while rails.read()[0] < before + 8192 {
            rails.world.fabric.let_go();
            tokio::task::yield_now().await;
        }
        let sent = rails.world.server.carried().sent_bytes();
        service.set_gate(1000);
        assert_eq!(within(path.as_ref(), 5_000).await, FetchAnswer::Hit { tiers: in_dram(3) });
        assert_eq!(rails.world.server.carried().sent_bytes(), sent, "over the link that nobody waited for");
    };
    let (first, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(first, then) }).await.unwrap();
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn spare_lanes_are_no_reason_for_more_links() {
    let config = RdmaConfig { links_per_peer: 1, ..never() };
    let service = holding(3, 1000);
    let rails = rails(service.clone(), (1, 2), &config);
    let path = rails.path().await;
    service.set_gate(0);
    let first = within(path.as_ref(), 60_000);
    let then = async {
        rails.world.until("it is asked", |_| service.deadlines().len() == 1).await;
        let late = within(path.as_ref(), 100).await;
        assert_eq!(late, FetchAnswer::Miss { reason: MissReason::TooLate });
        assert_eq!(service.deadlines().len(), 1, "one link is one operation at once");
        service.set_gate(1000);
    };
    let (first, ()) = tokio::join!(first, then);
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(3) });
}

#[tokio::test]
async fn a_first_rail_over_which_nothing_passes_is_no_reason_to_do_without() {
    let service = holding(3, 1000);
    let rails = rails(service, (2, 2), &never());
    rails.world.fabric.kill(CLIENT[0]);
    let path = rails.path().await;
    let before = rails.read();
    suite::fetch(path.as_ref(), fetch_request(&hashes(3))).await.unwrap();
    let after = rails.read();
    assert!(after[0] == before[0] && after[1] > before[1] + 3000, "{before:?} {after:?}");
    rails.world.fabric.kill(CLIENT[1]);
    let dialer = RdmaDialer::over(&rails.clients, &rails.world.authority.member(), TcpConfig::default());
    let error = dialer.unwrap().dial(rails.world.address()).await.err().unwrap().to_string();
    assert_eq!(error.matches("RDMA packets do not pass").count(), 2, "of each rail: {error}");
}

#[tokio::test]
async fn what_one_end_has_more_rails_of_is_spare() {
    for (ours, theirs) in [(1, 2), (2, 1)] {
        let service = holding(9, 1000);
        let rails = rails(service.clone(), (ours, theirs), &never());
        let path = rails.path().await;
        let dead = if ours == 1 { NODE[0] } else { CLIENT[0] };
        interrupted(path.as_ref(), &service, 9, || rails.world.fabric.kill(dead)).await;
        assert_eq!(rails.world.server.carried().sent_bytes(), 0, "the spare one brought them");
    }
}

#[tokio::test]
async fn operations_side_by_side_take_different_rails() {
    let service = holding(4, 1000);
    let rails = rails(service.clone(), (2, 2), &never());
    let path = rails.path().await;
    let before = rails.read();
    service.set_gate(0);
    let request = || suite::fetch(path.as_ref(), fetch_request(&hashes(4)));
    let open = async {
        rails.world.until("both under way", |_| service.deadlines().len() == 2).await;
        service.set_gate(100);
    };
    let (first, second, ()) = tokio::join!(request(), request(), open);
    assert_eq!((first.unwrap().tiers().len(), second.unwrap().tiers().len()), (4, 4));
    let after = rails.read();
    assert!(after[0] - before[0] > 4000 && after[1] - before[1] > 4000, "{before:?} {after:?}");
}

#[tokio::test]
async fn a_rail_that_cannot_register_is_left_out() {
    let fabric = Fabric::default();
    let [first, second] = [1, 2].map(|number| Rdma::over(fabric.rail(number), &small()).unwrap());
    fabric.refuse_register_of(1, libc::ENOMEM);
    let both = [first, second];
    let local = Local::of(&both).unwrap();
    assert_eq!((local.len(), local[0].rdma.device()), (1, "fake2"));
    let memory = Arc::new(Memory::zeroed(1 << 20).unwrap());
    assert_eq!(format!("{:?}", RdmaOffer::over(&both, Some(&memory)).unwrap()).matches("fake").count(), 1);
    fabric.refuse_register(libc::ENOMEM);
    let error = Local::of(&both).err().unwrap().to_string();
    assert!(error.contains("fake1"), "the first one's: {error}");
}

/// Two rails at each end, over both of which a fetch of twenty frames or so is read, as far as blocks are lent.
fn both(service: &MemoryService) -> Rails {
    let lending = |arena| LendingService { inner: service.clone(), arena, maps: true };
    rails_of(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never() })
}

/// The path, with a link on each rail, which knows how large frames are.
async fn warm(rails: &Rails) -> Arc<dyn crate::Path> {
    let path = rails.path().await;
    large_fetch_over_both(rails, path.as_ref()).await;
    path
}

/// Fetches until what is fetched was read over all rails.
pub(super) async fn both_help(rails: &Rails, fetch: impl AsyncFnMut()) {
    let all: Vec<usize> = (0..rails.clients.len()).collect();
    // A link is tried with less.
    these_help(rails, &all, 40_001, fetch).await;
}

/// The same over these, so many bytes at least over each.
pub(super) async fn these_help(rails: &Rails, these: &[usize], bytes_min: u64, mut fetch: impl AsyncFnMut()) {
    let help = async {
        loop {
            let before = rails.read();
            fetch().await;
            let after = rails.read();
            if these.iter().all(|at| after[*at] - before[*at] >= bytes_min) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, help).await.unwrap();
}

/// The same of a large fetch.
async fn large_fetch_over_both(rails: &Rails, path: &dyn crate::Path) {
    both_help(rails, async || drop(suite::fetch(path, fetch_request(&hashes(100))).await.unwrap())).await;
}

#[tokio::test]
async fn a_large_fetch_is_read_over_all_rails_under_one_lease_and_comes_in_order() {
    let service = holding(100, 4000);
    let rails = both(&service);
    let path = warm(&rails).await;
    let before = (rails.read(), service.deadlines().len(), rails.world.fabric.transfers().len());
    let mut frames = Vec::new();
    let mut sink = |frame: Frame| frames.push(frame);
    let answer = path.fetch(fetch_request(&hashes(100)), &mut sink).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(100) });
    for (frame, hash) in frames.iter().zip(hashes(100)) {
        frame.verify(suite::IDENTITY, hash).unwrap();
    }
    assert_eq!((frames.len(), service.deadlines().len() - before.1), (100, 1));
    let read: Vec<u64> = rails.read().iter().zip(before.0).map(|(after, before)| after - before).collect();
    assert!(read.iter().all(|read| *read > 100 * 4000 / 4), "both brought some: {read:?}");
    let frame_bytes = u32::try_from(frame(hash(0), 4000).bytes.len()).unwrap();
    let transfers = rails.world.fabric.transfers().split_off(before.2);
    assert_eq!(transfers.iter().filter(|transfer| transfer.len == frame_bytes).count(), 100, "each once");
    assert_eq!(rails.took_part(before.2), 2);
    // What is small leaves the other rail to others.
    let before = rails.world.fabric.transfers().len();
    suite::fetch(path.as_ref(), fetch_request(&hashes(15))).await.unwrap();
    assert_eq!(rails.took_part(before), 1);
}

/// Nothing is asked over a link that only helps others, so to the node it is idle.
#[tokio::test]
async fn a_link_that_only_helps_is_ended_before_the_node_does() {
    let service = holding(100, 4000);
    service.lie_ready();
    let lending = |arena| LendingService { inner: service.clone(), arena, maps: true };
    // The node ends what it was asked nothing over for three times as long.
    let tcp = TcpConfig { idle_timeout: Duration::from_millis(600), ..TcpConfig::default() };
    let rails = rails_over(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never() }, tcp);
    let path = warm(&rails).await;
    let began = tokio::time::Instant::now();
    while began.elapsed() < Duration::from_millis(1400) {
        large_fetch_over_both(&rails, path.as_ref()).await;
    }
    // One that lasts until after that, if what helps it were the one that helped the first of those above.
    let (count, mut came) = (rails.world.fabric.transfers().len(), 0);
    rails.world.fabric.hold_from(count + 30);
    let mut sink = |_| came += 1;
    let fetch = path.fetch(fetch_request(&hashes(100)), &mut sink);
    let later = async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        rails.world.fabric.let_go();
    };
    let (answer, ()) = tokio::join!(fetch, later);
    assert_eq!((answer.unwrap(), came), (FetchAnswer::Hit { tiers: in_dram(100) }, 100));
    let failed: Vec<u64> = rails.clients.iter().map(|rdma| rdma.numbers().failed).collect();
    assert_eq!(failed, [0, 0], "the node ended one that was in use");
}

#[tokio::test]
async fn a_large_fetch_of_what_is_not_lent_comes_over_one_rail() {
    let service = holding(100, 4000);
    let lending = |arena| LendingService { inner: service.clone(), arena, maps: false };
    let rails = rails_of(lending, (2, 2), &RdmaConfig { large_bytes: 80_000, ..never() });
    let path = rails.path().await;
    for _ in 0..3 {
        let before = rails.read();
        let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap();
        assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(100) });
        let read = rails.read().into_iter().zip(before).filter(|(after, before)| after - before > 100_000);
        assert_eq!(read.count(), 1, "a tray is reached by its own link alone");
    }
}

#[tokio::test]
async fn a_large_fetch_ends_at_the_first_block_that_is_not_there() {
    for missing in [0, 5, 50, 99] {
        let service = holding(100, 4000);
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
async fn a_large_fetch_loses_nothing_with_a_rail() {
    for dead in NODE {
        let service = holding(100, 4000);
        let rails = both(&service);
        let path = warm(&rails).await;
        let failed = |rails: &Rails| rails.clients.iter().map(|rdma| rdma.numbers().failed).sum::<u64>();
        interrupted(path.as_ref(), &service, 100, || rails.world.fabric.kill(dead)).await;
        assert!(failed(&rails) > 0, "it was in use");
        assert_eq!(rails.world.server.carried().sent_bytes(), 0, "the other rail brought all the rest");
        // With both gone, the connection brings what was held back.
        interrupted(path.as_ref(), &service, 100, || {
            NODE.iter().for_each(|rail| rails.world.fabric.kill(*rail));
        })
        .await;
        let frame_bytes = frame(hash(0), 4000).bytes.len() as u64;
        assert_eq!(rails.world.server.carried().sent_bytes(), 99 * frame_bytes);
    }
}

#[tokio::test]
async fn a_large_fetch_is_over_at_its_deadline() {
    let service = holding(100, 4000);
    let rails = both(&service);
    let path = warm(&rails).await;
    service.set_gate(0);
    let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(100)) };
    let late = tokio::time::timeout(PATIENCE, suite::fetch(path.as_ref(), request)).await.unwrap();
    assert_eq!(late.unwrap(), FetchAnswer::Miss { reason: MissReason::TooLate });
}

#[tokio::test]
async fn a_large_fetch_that_is_dropped_midway_gives_everything_back() {
    let service = holding(100, 4000);
    service.lie_ready();
    let rails = both(&service);
    let path = warm(&rails).await;
    let made = rails.world.fabric.queues_made();
    // All memory of the client is lost several times, if any is.
    for _ in 0..60 {
        large_fetch_over_both(&rails, path.as_ref()).await;
        rails.world.fabric.hold();
        let mut ignored = |_| {};
        tokio::select! {
            _ = path.fetch(fetch_request(&hashes(100)), &mut ignored) => panic!("reads are held back"),
            () = rails.world.until("reads are under way", |world| world.fabric.held() > 10) => {}
        }
        rails.world.fabric.let_go();
    }
    // Of each operation its own link goes, with four ends; one that was read over beside it is of use to the next.
    let made = rails.world.fabric.queues_made() - made;
    assert!(made <= 60 * 6, "{made} queue pairs");
    let hit = suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap();
    assert_eq!(hit, FetchAnswer::Hit { tiers: in_dram(100) });
    drop(path);
    rails.world.until("ended", |world| world.fabric.queues().is_empty()).await;
}

/// A node's service as real ones are: what is being written is present to whoever else offers it.
#[derive(Clone)]
struct Reserving {
    inner: MemoryService,
    saves: Saves,
}

/// How many saves are written, and how many were offered.
type Saves = Arc<(Mutex<(usize, usize)>, Condvar)>;

struct Writing {
    inner: Box<dyn SaveSession>,
    _writes: Writes,
}

/// Takes its time to give up, as long as no second offer comes: one that comes too early comes now.
struct Writes(Saves);

impl Drop for Writes {
    fn drop(&mut self) {
        let (saves, offered) = &*self.0;
        let early = |(_, offers): &mut (usize, usize)| *offers < 2;
        let waited = offered.wait_timeout_while(saves.lock().unwrap(), Duration::from_millis(200), early);
        waited.unwrap().0.0 -= 1;
    }
}

impl SaveSession for Writing {
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        self.inner.put(frame)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, crate::SaveDone> {
        self.inner.finish()
    }
}

impl BlockService for Reserving {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, crate::FetchReply> {
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
            let _writes = Writes(Arc::clone(&self.saves));
            let blocks = request.hashes.len();
            let (offer, session) = self.inner.save(request).await;
            let offer = if is_taken { SaveOffer::Wanted(vec![false; blocks]) } else { offer };
            let session = session.map(|inner| Box::new(Writing { inner, _writes }) as Box<dyn SaveSession>);
            (offer, session)
        })
    }

    fn release(&self, lease: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn admit(&self, _: &Caller) -> crate::Admission {
        crate::Admission::Scoped { service: Arc::new(self.clone()), maps: true }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_save_whose_rail_fails_is_offered_again_once_the_node_gave_it_up() {
    for several in [1, 2] {
        let inner = MemoryService::default();
        let service = Reserving { inner: inner.clone(), saves: Arc::default() };
        let rails = rails(service, (several, several), &never());
        let path = rails.path().await;
        inner.set_gate(0);
        let request = SaveRequest { frame_bytes: 300_000, ..save_request(&hashes(6)) };
        let save = suite::save(path.as_ref(), request, 290_000);
        let fail = async {
            inner.puts_seen(1).await;
            rails.world.fabric.kill(NODE[0]);
            // It takes the first, whose slot is written again, and does not come to an end with the second.
            inner.set_gate(1);
            let failed = || rails.clients[0].numbers().failed > 0;
            rails.world.until("the card failed", |_| failed()).await;
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
            inner.set_gate(1000);
        };
        let (saved, ()) = tokio::join!(save, fail);
        let done = suite::done(saved.unwrap());
        assert_eq!((done.stored_blocks, done.present_blocks), (6, 0), "nothing was taken for another's");
        assert!((0..6).all(|number| inner.holds(hash(number))));
        inner.aborts_seen(1).await;
        let by_card = rails.clients.last().unwrap().numbers().written_bytes;
        assert_eq!(by_card >= 6 * 290_000, several == 2, "over the other rail, or the connection: {by_card}");
    }
}
