//! What is lent, how long, and what its end sets free.

use super::*;
use crate::suite::{IDENTITY, asker};
use crate::{MissReason, SaveAnswer};
use kv_core::id::Epoch;
use kvfleet_proto::frame::Frame;

struct Case {
    service: Arc<MemoryService>,
    node: Node,
}

fn case(config: ShmServerConfig) -> Case {
    let arena = BumpArena::new(ARENA_BYTES);
    let service = Arc::new(MemoryService::new(Some(Arc::clone(&arena))));
    (0..8).for_each(|number| service.hold(frame(hash(number), 1000)));
    let node = Node::start(service.clone(), Some(arena), config, true);
    Case { service, node }
}

/// The leading blocks of the suite, kept.
async fn held(path: &dyn Path, blocks: u32) -> (FetchAnswer, Vec<Frame>) {
    let mut frames = Vec::new();
    let answer = path.fetch(fetch_request(&hashes(blocks)), &mut |frame| frames.push(frame)).await.unwrap();
    (answer, frames)
}

fn are_whole(frames: &[Frame]) -> bool {
    frames.iter().zip(0..).all(|(frame, number)| frame.verify(IDENTITY, hash(number)).is_ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loan_lasts_until_its_last_bytes_are_dropped() {
    let Case { node, .. } = case(server_config());
    let path = node.dial().await.unwrap();
    let (answer, mut frames) = held(path.as_ref(), 4).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(4) });
    let bytes: u64 = frames.iter().map(|frame| frame.bytes.len() as u64).sum();
    assert_eq!((node.numbers().loans, node.numbers().lent_bytes), (4, bytes));
    let kept = frames[3].payload();
    frames.clear();
    // One is still read: the others wait with it, or come back with what is said next.
    path.ping().await.unwrap();
    assert!(node.numbers().loans >= 1);
    drop(kept);
    node.until(|numbers| numbers.loans == 0 && numbers.lent_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_outlive_path_and_node() {
    let Case { mut node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = held(path.as_ref(), 4).await;
    drop(path);
    // From here on only the loans keep it.
    (0..8).for_each(|number| service.forget(hash(number)));
    assert!(are_whole(&frames));
    assert_eq!(node.numbers().loans, 4, "what is read is lent, whatever became of the path");
    node.server.take().unwrap().close().await;
    assert!(are_whole(&frames));
    drop(node);
    assert!(are_whole(&frames));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_client_gives_everything_back() {
    let Case { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = held(path.as_ref(), 4).await;
    assert_eq!(node.numbers().connections, 1);
    drop((path, frames));
    node.until(|numbers| numbers == ShmNumbers::default()).await;
    assert_eq!(service.released(), [LeaseId(1)], "and its leases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_told_when_nothing_is_read_any_more() {
    let Case { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = held(path.as_ref(), 4).await;
    path.release(LeaseId(1)).await.unwrap();
    assert!(service.released().is_empty(), "four blocks of it are read");
    drop(frames);
    let patience = tokio::time::Instant::now() + crate::suite::PATIENCE;
    while service.released() != [LeaseId(1)] {
        assert!(tokio::time::Instant::now() < patience, "{:?}", service.released());
        path.ping().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_keeps_half_of_what_may_be_lent_gets_copies_and_stops_nobody_else() {
    let bytes = frame(hash(0), 1000).bytes.len() as u64;
    let Case { node, service } = case(ShmServerConfig { lent_bytes_max: 6 * bytes, ..server_config() });
    let (hoarder, other) = (node.dial().await.unwrap(), node.dial().await.unwrap());
    let (answer, kept) = held(hoarder.as_ref(), 8).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(8) });
    assert_eq!(
        (node.numbers().loans, node.numbers().lent_bytes),
        (3, 3 * bytes),
        "half of all, the rest is copied"
    );
    let (answer, lent) = held(other.as_ref(), 3).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(3) });
    assert_eq!((node.numbers().loans, node.numbers().lent_bytes), (6, 6 * bytes));
    (0..8).for_each(|number| service.forget(hash(number)));
    assert!(are_whole(&kept) && are_whole(&lent));
    drop((kept, lent));
    node.until(|numbers| (numbers.loans, numbers.lent_bytes) == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_block_that_is_kept_counts_for_all_that_its_lease_keeps() {
    let bytes = frame(hash(0), 1000).bytes.len() as u64;
    let Case { node, .. } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, mut frames) = held(path.as_ref(), 8).await;
    frames.truncate(1);
    path.ping().await.unwrap();
    let more = held(path.as_ref(), 8).await.1;
    drop(more);
    path.ping().await.unwrap();
    assert!(node.numbers().lent_bytes >= 8 * bytes, "{:?}", node.numbers());
    drop(frames);
    node.until(|numbers| (numbers.loans, numbers.lent_bytes) == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_longer_than_one_operation_are_cut() {
    let arena = BumpArena::new(ARENA_BYTES);
    let service = Arc::new(MemoryService::new(Some(Arc::clone(&arena))));
    let node = Node::start(service.clone(), Some(arena), server_config(), true);
    let path = node.dial().await.unwrap();
    let blocks = BLOCKS_PER_ASK_MAX as u32 * 2 + 5;
    let saved = path.save(crate::suite::save_request(&hashes(blocks)), &|position| {
        frame(hash(u32::try_from(position).unwrap()), 100)
    });
    let SaveAnswer::Done(done) = saved.await.unwrap() else { panic!("the save runs to its end") };
    assert_eq!((done.stored_blocks, done.present_blocks), (blocks, 0));
    let answer = fetch(path.as_ref(), fetch_request(&hashes(blocks))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(blocks as usize) });
    service.forget(hash(blocks - 2));
    let answer = fetch(path.as_ref(), fetch_request(&hashes(blocks))).await.unwrap();
    let tiers = in_dram(blocks as usize - 2);
    assert_eq!(answer, FetchAnswer::Partial { tiers, reason: MissReason::NotHeld });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_that_is_dropped_keeps_nothing() {
    let Case { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    service.set_gate(2);
    let (sender, mut came) = tokio::sync::mpsc::unbounded_channel();
    let mut sink = |frame: Frame| sender.send(frame).unwrap();
    tokio::select! {
        answer = path.fetch(fetch_request(&hashes(8)), &mut sink) => panic!("the gate is closed: {answer:?}"),
        () = async { for _ in 0..2 { drop(came.recv().await.unwrap()); } } => {}
    }
    node.until(|numbers| numbers.loans == 0).await;
    service.set_gate(100);
    assert_eq!(held(path.as_ref(), 8).await.0, FetchAnswer::Hit { tiers: in_dram(8) }, "the path goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_larger_than_the_tray_run_side_by_side() {
    let config = ShmServerConfig { frame_bytes_max: 2 << 20, ..server_config() };
    let service = Arc::new(MemoryService::default());
    let node = Node::start(service.clone(), None, config, true);
    let path = node.dial().await.unwrap();
    let save = |first: u32| {
        let hashes: Vec<_> = (first..first + 8).map(hash).collect();
        let mut request = crate::suite::save_request(&hashes);
        request.frame_bytes = 2 << 20;
        request.asker = asker(u64::from(first));
        let path = &path;
        async move { path.save(request, &|position| frame(hashes[position], 1_900_000)).await.unwrap() }
    };
    let (a, b, c) = tokio::join!(save(0), save(10), save(20));
    for answer in [a, b, c] {
        assert!(matches!(answer, SaveAnswer::Done(ref done) if done.stored_blocks == 8), "{answer:?}");
    }
    let mut request = crate::suite::save_request(&hashes(1));
    request.hashes = vec![hash(99)];
    let answer = path.save(request, &|_| frame(hash(99), 9 << 20)).await;
    assert!(matches!(answer, Err(crate::PathError::TooLarge { .. })), "{answer:?}");
    path.ping().await.unwrap();
}

/// What does not fit one ask is asked in several, each of which the node answers anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_asks_of_one_fetch_are_of_one_epoch() {
    let at_once = u32::try_from(BLOCKS_PER_ASK_MAX).unwrap();
    for maps in [true, false] {
        let arena = maps.then(|| BumpArena::new(ARENA_BYTES));
        let service = Arc::new(MemoryService::new(arena));
        let hold = |bytes| (0..at_once + 5).for_each(|number| service.hold(frame(hash(number), bytes)));
        hold(300);
        let node = Node::holding(service.clone());
        let path = node.dial().await.unwrap();
        service.set_gate(100);
        let newer = Epoch(crate::suite::EPOCH.0 + 1);
        let (seen, mut frames) = (tokio::sync::watch::Sender::new(0), Vec::new());
        let mut sink = |frame: Frame| {
            frames.push(frame);
            seen.send_replace(frames.len());
        };
        let fetch = path.fetch(fetch_request(&hashes(at_once + 5)), &mut sink);
        let ends = async {
            let _ = seen.subscribe().wait_for(|seen| *seen > 50).await; // the sender is here
            service.set_epoch(newer);
            hold(200);
            service.set_gate(10_000);
        };
        let answer = tokio::join!(fetch, ends).0.unwrap();
        let first = in_dram(BLOCKS_PER_ASK_MAX);
        assert_eq!(answer, FetchAnswer::Partial { tiers: first, reason: MissReason::StaleEpoch });
        assert_eq!(frames.len(), BLOCKS_PER_ASK_MAX);
        assert!(are_whole(&frames) && frames.iter().all(|frame| frame.payload().len() == 300));
    }
}
