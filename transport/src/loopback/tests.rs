//! The suite over the loopback, and the effects of its faults.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::behaviour_suite;
use crate::suite::{
    self, ComputedBlocks, MemoryService, SuitePath, fetch_request, frame, hash, hashes, in_dram, save_request,
};

const ADDRESS: &str = "node:1";

async fn pair_on(network: &Loopback, service: Arc<dyn BlockService>) -> SuitePath {
    network.serve(ADDRESS, service);
    let path = network.dial(ADDRESS.to_owned()).await.unwrap();
    SuitePath { path, keep: Box::new(()) }
}

async fn pair(service: Arc<dyn BlockService>) -> SuitePath {
    pair_on(&Loopback::default(), service).await
}

behaviour_suite!(pair);
behaviour_suite!(pair; MemoryService::default(); slices_leave_before_the_last_layer);

fn holding(blocks: u32) -> Arc<MemoryService> {
    let service = MemoryService::default();
    (0..blocks).for_each(|number| service.hold(frame(hash(number), 4000)));
    Arc::new(service)
}

async fn faulty(faults: Faults, service: &Arc<MemoryService>) -> (Loopback, Arc<dyn Path>) {
    println!("seed {}", faults.seed);
    let network = Loopback::new(faults);
    let path = pair_on(&network, service.clone()).await.path;
    (network, path)
}

/// Number of leading blocks that arrived complete and in place.
async fn usable(path: &dyn Path, blocks: u32) -> (FetchAnswer, usize) {
    let mut frames = Vec::new();
    let answer = path.fetch(fetch_request(&hashes(blocks)), &mut |frame| frames.push(frame)).await.unwrap();
    assert_eq!(frames.len(), answer.tiers().len());
    let good = |(number, frame): (u32, Frame)| frame.verify(suite::IDENTITY, hash(number)).is_ok();
    (answer, (0..).zip(frames).take_while(|pair| good(pair.clone())).count())
}

#[tokio::test]
async fn frames_before_a_cut_stay_valid() {
    let faults = Faults { cut_after: Some(2), ..Faults::default() };
    let service = holding(5);
    let (network, path) = faulty(faults, &service).await;
    let expected = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NodeLost };
    assert_eq!(usable(path.as_ref(), 5).await, (expected, 2));
    let (save, empty) = (save_request(&hashes(9)), holding(0));
    network.serve(ADDRESS, empty.clone());
    let error = suite::save(path.as_ref(), save, 100).await.unwrap_err();
    assert!(matches!(error, PathError::Broken { .. }), "{error}");
    assert!(!empty.holds(hash(0)), "a cut save left a block");
}

#[tokio::test]
async fn every_corruption_is_detected() {
    let service = holding(8);
    let mut seen = 0;
    for seed in 0..200 {
        let (_, path) = faulty(Faults { seed, corrupt: 0.3, ..Faults::default() }, &service).await;
        let (answer, good) = usable(path.as_ref(), 8).await;
        assert!(good <= answer.tiers().len());
        seen += usize::from(good < 8);
    }
    assert!(seen > 100, "too few corruptions: {seen} of 200");
}

#[tokio::test]
async fn corrupt_saves_are_refused_block_by_block() {
    for seed in 0..50 {
        let service = holding(0);
        let (network, path) = faulty(Faults { seed, corrupt: 0.5, ..Faults::default() }, &service).await;
        let result = suite::save(path.as_ref(), save_request(&hashes(8)), 4000).await;
        network.set_faults(Faults::default());
        let stored = (0..8).filter(|number| service.holds(hash(*number))).count();
        match result {
            Ok(answer) => assert_eq!(suite::done(answer).stored_blocks as usize, stored),
            Err(_) => assert_eq!(stored, 0),
        }
    }
}

#[tokio::test]
async fn reordered_frames_fail_verification() {
    let service = holding(8);
    let mut disturbed = 0;
    for seed in 0..100 {
        let (_, path) = faulty(Faults { seed, reorder: 0.2, ..Faults::default() }, &service).await;
        let (answer, good) = usable(path.as_ref(), 8).await;
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(8) }, "a frame was lost");
        disturbed += usize::from(good < 8);
    }
    assert!(disturbed > 30, "too few reorderings: {disturbed} of 100");
}

#[tokio::test]
async fn a_lost_operation_times_out() {
    let service = holding(2);
    let lost_after = Duration::from_millis(1);
    let (_, path) = faulty(Faults { loss: 1.0, timeout: lost_after, ..Faults::default() }, &service).await;
    let request = FetchRequest { deadline: lost_after, ..fetch_request(&hashes(2)) };
    let answer = suite::fetch(path.as_ref(), request).await.unwrap();
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::TooLate });
    assert!(matches!(path.ping().await, Err(PathError::TimedOut { after, .. }) if after == lost_after));
    assert!(matches!(path.release(LeaseId(1)).await, Err(PathError::TimedOut { .. })));
    let save = suite::save(path.as_ref(), save_request(&hashes(1)), 10).await;
    assert!(matches!(save, Err(PathError::TimedOut { .. })));
}

#[tokio::test]
async fn operations_take_their_delay() {
    let service = holding(1);
    let delay = Duration::from_millis(3);
    let (_, path) = faulty(Faults { delay, ..Faults::default() }, &service).await;
    assert!(path.ping().await.unwrap() >= delay);
}

#[tokio::test]
async fn a_stopped_node_is_lost() {
    let service = holding(3);
    let (network, path) = faulty(Faults::default(), &service).await;
    network.stop(ADDRESS);
    let mut nothing = |_| panic!("a frame came from a stopped node");
    let error = path.fetch(fetch_request(&hashes(3)), &mut nothing).await.unwrap_err();
    assert!(matches!(error, PathError::Broken { .. }), "{error}");
    let error = network.dial(ADDRESS.to_owned()).await.err().unwrap();
    assert!(matches!(error, PathError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn equal_seeds_give_equal_runs() {
    let service = holding(8);
    let mut runs = Vec::new();
    for _ in 0..2 {
        let faults = Faults { seed: 11, corrupt: 0.1, reorder: 0.1, ..Faults::default() };
        let (_, path) = faulty(faults, &service).await;
        let mut results = Vec::new();
        for _ in 0..20 {
            results.push(usable(path.as_ref(), 8).await);
        }
        runs.push(results);
    }
    assert_eq!(runs[0], runs[1]);
}

/// A node with a stall timeout of 10 s receives no bytes of empty layers, however many are
/// computed.
#[tokio::test(start_paused = true)]
async fn empty_layers_do_not_reset_the_stall_timeout() {
    let lost_after = Duration::from_secs(10);
    let service = Arc::new(MemoryService::default());
    let (_network, path) = faulty(Faults { timeout: lost_after, ..Faults::default() }, &service).await;
    for (every, is_saved) in [(Duration::from_secs(4), false), (Duration::from_millis(800), true)] {
        // Six layers from one with bytes to the next.
        let slices = [100, 0, 0, 0, 0, 0, 50, 0, 0, 0, 0, 0, 70];
        let mut some = ComputedBlocks::new(&hashes(2), &slices).with_layers(0);
        let gate = some.gate();
        let frame_bytes = suite::frame_of(hash(0), &slices).bytes.len() as u64;
        let request = SaveRequest { frame_bytes, ..save_request(&hashes(2)) };
        let computing = async {
            loop {
                gate.add_permits(1);
                sleep(every).await;
            }
        };
        let saved = tokio::select! {
            saved = path.save_layers(request, &mut some) => saved.unwrap(),
            () = computing => unreachable!("the computation has no end"),
        };
        assert_eq!(saved.answer().is_some(), is_saved, "one layer every {every:?}");
    }
}
