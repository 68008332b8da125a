//! Grants: their duration, and the resources that their end frees.

use super::*;
use crate::suite::{IDENTITY, request_context};
use crate::{MissReason, SaveAnswer};
use kv_core::id::Epoch;
use kvfleet_proto::frame::Frame;

struct GrantCase {
    service: Arc<MemoryService>,
    node: ShmTestNode,
}

fn case(config: ShmServerConfig) -> GrantCase {
    let arena = BumpArena::new(ARENA_BYTES);
    let service = Arc::new(MemoryService::new(Some(Arc::clone(&arena))));
    (0..8).for_each(|number| service.hold(frame(hash(number), 1000)));
    let node = ShmTestNode::start(service.clone(), Some(arena), config, true);
    GrantCase { service, node }
}

/// Fetches the leading blocks of the suite and keeps them.
async fn fetch_retained(path: &dyn Path, blocks: u32) -> (FetchAnswer, Vec<Frame>) {
    let mut frames = Vec::new();
    let answer = path.fetch(fetch_request(&hashes(blocks)), &mut |frame| frames.push(frame)).await.unwrap();
    (answer, frames)
}

fn are_intact(frames: &[Frame]) -> bool {
    frames.iter().zip(0..).all(|(frame, number)| frame.verify(IDENTITY, hash(number)).is_ok())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_lasts_until_its_last_bytes_are_dropped() {
    let GrantCase { node, .. } = case(server_config());
    let path = node.dial().await.unwrap();
    let (answer, mut frames) = fetch_retained(path.as_ref(), 4).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(4) });
    let bytes: u64 = frames.iter().map(|frame| frame.bytes.len() as u64).sum();
    assert_eq!((node.stats().grants, node.stats().granted_bytes), (4, bytes));
    let kept = frames[3].payload();
    frames.clear();
    // One block is still read: the other grants wait for it, or return with the next packet.
    path.ping().await.unwrap();
    assert!(node.stats().grants >= 1);
    drop(kept);
    node.until(|numbers| numbers.grants == 0 && numbers.granted_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_outlive_path_and_node() {
    let GrantCase { mut node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = fetch_retained(path.as_ref(), 4).await;
    drop(path);
    // From here on only the grants keep the blocks.
    (0..8).for_each(|number| service.forget(hash(number)));
    assert!(are_intact(&frames));
    assert_eq!(node.stats().grants, 4, "blocks that are read stay granted without the path");
    node.server.take().unwrap().close().await;
    assert!(are_intact(&frames));
    drop(node);
    assert!(are_intact(&frames));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_client_returns_all_grants() {
    let GrantCase { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = fetch_retained(path.as_ref(), 4).await;
    assert_eq!(node.stats().connections, 1);
    drop((path, frames));
    node.until(|numbers| numbers == ShmStats::default()).await;
    assert_eq!(service.released(), [LeaseId(1)], "and its leases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_takes_effect_when_reading_ends() {
    let GrantCase { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, frames) = fetch_retained(path.as_ref(), 4).await;
    path.release(LeaseId(1)).await.unwrap();
    assert!(service.released().is_empty(), "four of its blocks are still read");
    drop(frames);
    let patience = tokio::time::Instant::now() + crate::suite::PATIENCE;
    while service.released() != [LeaseId(1)] {
        assert!(tokio::time::Instant::now() < patience, "{:?}", service.released());
        path.ping().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_above_its_grant_limit_gets_copies() {
    let bytes = frame(hash(0), 1000).bytes.len() as u64;
    let GrantCase { node, service } =
        case(ShmServerConfig { granted_bytes_max: 6 * bytes, ..server_config() });
    let (hoarder, other) = (node.dial().await.unwrap(), node.dial().await.unwrap());
    let (answer, kept) = fetch_retained(hoarder.as_ref(), 8).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(8) });
    assert_eq!(
        (node.stats().grants, node.stats().granted_bytes),
        (3, 3 * bytes),
        "half of the limit, the rest is copied"
    );
    let (answer, lent) = fetch_retained(other.as_ref(), 3).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(3) });
    assert_eq!((node.stats().grants, node.stats().granted_bytes), (6, 6 * bytes));
    (0..8).for_each(|number| service.forget(hash(number)));
    assert!(are_intact(&kept) && are_intact(&lent));
    drop((kept, lent));
    node.until(|numbers| (numbers.grants, numbers.granted_bytes) == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_retained_block_counts_for_its_whole_lease() {
    let bytes = frame(hash(0), 1000).bytes.len() as u64;
    let GrantCase { node, .. } = case(server_config());
    let path = node.dial().await.unwrap();
    let (_, mut frames) = fetch_retained(path.as_ref(), 8).await;
    frames.truncate(1);
    path.ping().await.unwrap();
    let more = fetch_retained(path.as_ref(), 8).await.1;
    drop(more);
    path.ping().await.unwrap();
    assert!(node.stats().granted_bytes >= 8 * bytes, "{:?}", node.stats());
    drop(frames);
    node.until(|numbers| (numbers.grants, numbers.granted_bytes) == (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_longer_than_one_operation_are_split() {
    let arena = BumpArena::new(ARENA_BYTES);
    let service = Arc::new(MemoryService::new(Some(Arc::clone(&arena))));
    let node = ShmTestNode::start(service.clone(), Some(arena), server_config(), true);
    let path = node.dial().await.unwrap();
    let blocks = BLOCKS_PER_OPERATION_MAX as u32 * 2 + 5;
    let saved = path.save(crate::suite::save_request(&hashes(blocks)), &|position| {
        frame(hash(u32::try_from(position).unwrap()), 100)
    });
    let SaveAnswer::Done(done) = saved.await.unwrap() else { panic!("the save must complete") };
    assert_eq!((done.stored_blocks, done.present_blocks), (blocks, 0));
    let answer = fetch(path.as_ref(), fetch_request(&hashes(blocks))).await.unwrap();
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(blocks as usize) });
    service.forget(hash(blocks - 2));
    let answer = fetch(path.as_ref(), fetch_request(&hashes(blocks))).await.unwrap();
    let tiers = in_dram(blocks as usize - 2);
    assert_eq!(answer, FetchAnswer::Partial { tiers, reason: MissReason::NotHeld });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_fetch_keeps_no_grants() {
    let GrantCase { node, service } = case(server_config());
    let path = node.dial().await.unwrap();
    service.set_gate(2);
    let (sender, mut came) = tokio::sync::mpsc::unbounded_channel();
    let mut sink = |frame: Frame| sender.send(frame).unwrap();
    tokio::select! {
        answer = path.fetch(fetch_request(&hashes(8)), &mut sink) => panic!("the gate is closed: {answer:?}"),
        () = async { for _ in 0..2 { drop(came.recv().await.unwrap()); } } => {}
    }
    node.until(|numbers| numbers.grants == 0).await;
    service.set_gate(100);
    assert_eq!(
        fetch_retained(path.as_ref(), 8).await.0,
        FetchAnswer::Hit { tiers: in_dram(8) },
        "the path must stay usable"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_larger_than_the_bounce_buffer_run_side_by_side() {
    let config = ShmServerConfig { frame_bytes_max: 2 << 20, ..server_config() };
    let service = Arc::new(MemoryService::default());
    let node = ShmTestNode::start(service.clone(), None, config, true);
    let path = node.dial().await.unwrap();
    let save = |first: u32| {
        let hashes: Vec<_> = (first..first + 8).map(hash).collect();
        let mut request = crate::suite::save_request(&hashes);
        request.frame_bytes = 2 << 20;
        request.context = request_context(u64::from(first));
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

/// A fetch with too many blocks for one operation is split, and the node answers each part
/// separately.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_parts_of_a_fetch_have_one_epoch() {
    let at_once = u32::try_from(BLOCKS_PER_OPERATION_MAX).unwrap();
    for maps in [true, false] {
        let arena = maps.then(|| BumpArena::new(ARENA_BYTES));
        let service = Arc::new(MemoryService::new(arena));
        let hold = |bytes| (0..at_once + 5).for_each(|number| service.hold(frame(hash(number), bytes)));
        hold(300);
        let node = ShmTestNode::serving(service.clone());
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
            let _ = seen.subscribe().wait_for(|seen| *seen > 50).await; // the sender is alive
            service.set_epoch(newer);
            hold(200);
            service.set_gate(10_000);
        };
        let answer = tokio::join!(fetch, ends).0.unwrap();
        let first = in_dram(BLOCKS_PER_OPERATION_MAX);
        assert_eq!(answer, FetchAnswer::Partial { tiers: first, reason: MissReason::StaleEpoch });
        assert_eq!(frames.len(), BLOCKS_PER_OPERATION_MAX);
        assert!(are_intact(&frames) && frames.iter().all(|frame| frame.payload().len() == 300));
    }
}
