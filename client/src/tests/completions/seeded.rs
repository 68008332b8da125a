//! Random operations with random faults and cancellation: each ends once, and keeps no reference.

use kvfleet_transport::SaveAnswer;

use super::*;
use crate::FrameSource;

/// A small seeded generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % end
    }

    fn number(&mut self, end: u64) -> u32 {
        u32::try_from(self.below(end)).unwrap()
    }
}

/// Expectations for a submitted operation.
struct SubmittedOperation {
    /// Number of buffers given.
    buffers: usize,
    /// The caller's own reference to the frame source.
    frames: Option<FrameSource>,
}

fn faults(random: &mut Random, seed: u64) -> Faults {
    Faults {
        seed,
        delay: Duration::from_micros(random.below(400)),
        loss: [0.0, 0.1][usize::from(random.below(3) == 0)],
        timeout: Duration::from_millis(10),
        cut_after: (random.below(4) == 0).then(|| random.number(4)),
        corrupt: [0.0, 0.05][usize::from(random.below(2) == 0)],
        reorder: [0.0, 0.1][usize::from(random.below(2) == 0)],
    }
}

/// A fetch from two of four nodes; the last node does not exist.
fn any_fetch(random: &mut Random) -> FetchCall {
    let (first, second) = (random.number(5), random.number(5));
    let sources = vec![source(random.number(4), 0, first), source(random.number(4), first, second)];
    FetchCall { deadline: Duration::from_millis(10), ..fetch_call(first + second, sources) }
}

fn any_operation(random: &mut Random) -> (Operation<QueueBuffer>, SubmittedOperation) {
    let mut known = SubmittedOperation { buffers: 0, frames: None };
    let operation = match random.below(9) {
        0 => Operation::Route(route_call()),
        1 => Operation::Fetch(any_fetch(random)),
        2 | 3 => {
            let call = save_call(random.number(4)..4 + random.number(6));
            let call = SaveCall { address: format!("node:{}", random.below(4)), ..call };
            known.frames = Some(Arc::clone(&call.frame));
            Operation::Save(call)
        }
        4 => Operation::Release(vec![held(random.number(4), 5), held(random.number(4), 7)]),
        5 => Operation::AdmitDecode(admit_decode_call()),
        _ => {
            let call = any_fetch(random);
            known.buffers = call.sources.iter().map(|source| source.len_blocks as usize).sum();
            // Sometimes one too many, which is refused.
            known.buffers += usize::from(random.below(10) == 0);
            let Operation::FetchLayers(operation) =
                layers_operation(call, (0..known.buffers).map(|_| queue_buffer()).collect())
            else {
                unreachable!()
            };
            let (begins, each_block) = (random.below(4) > 0, random.below(2) == 0);
            Operation::FetchLayers(FetchLayersOperation { start_now: begins, each_block, ..operation })
        }
    };
    (operation, known)
}

/// Checks all reports of one operation.
fn check(known: &SubmittedOperation, told: &[Progress<QueueBuffer>]) -> &'static str {
    let (Some(Progress::Ended(end)), before) = (told.last(), &told[..told.len() - 1]) else {
        panic!("the last report must be the end: {told:?}");
    };
    let (mut rooms, mut layers, mut from) = (end.buffers.len(), 0, u32::MAX);
    for progress in before {
        match progress {
            Progress::Arrived { block, buffer: room } => {
                assert!(layers == 0 || *block >= from, "block was already covered by a reported layer");
                assert!(content::matches(hash(*block), &room.concat()), "wrong bytes");
                rooms += 1;
            }
            Progress::Recompute { from_block } => {
                assert!(layers == 0 && *from_block < from, "ends only decrease, and never after a layer");
                from = *from_block;
            }
            Progress::Layer { layer, end_block } => {
                assert!(*layer == layers && *end_block <= from);
                from = *end_block;
                layers += 1;
            }
            Progress::Ended(_) | Progress::Empty => panic!("an operation ended more than once: {told:?}"),
        }
    }
    assert_eq!(rooms, known.buffers, "each buffer must be returned once");
    assert!(
        known.frames.as_ref().is_none_or(|kept| Arc::strong_count(kept) == 1),
        "a reference to the frames is left"
    );
    if let OperationOutcome::LayersFetched(Ok(came)) = &end.outcome {
        assert!(layers == 2 || came.end_block == 0, "layers of arrived blocks were not reported");
        assert!(layers == 0 || came.end_block >= from);
        for (block, room) in end.buffers.iter().filter(|(block, _)| came.arrived[*block as usize]) {
            assert!(content::matches(hash(*block), &room.concat()), "wrong bytes");
        }
    }
    match &end.outcome {
        OperationOutcome::Cancelled => "cancelled",
        OperationOutcome::Lost => panic!("no fault should lose the operation"),
        OperationOutcome::LayersFetched(Ok(came)) if came.misses.is_empty() => "layers",
        OperationOutcome::LayersFetched(Ok(_)) => "layers with misses",
        OperationOutcome::LayersFetched(Err(_)) => "layers refused",
        OperationOutcome::Saved(Ok(SaveAnswer::Done(_))) => "saved",
        OperationOutcome::Saved(_) => "not saved",
        OperationOutcome::Fetched(_) => "fetched",
        OperationOutcome::Released(_) => "released",
        OperationOutcome::Routed(_) => "routed",
        OperationOutcome::DecodeAdmission(_) => "may decode",
    }
}

fn poll(queue: &CompletionQueue<QueueBuffer>, told: &mut ReportsByTag, waits: bool) -> usize {
    let mut into: [Completion<QueueBuffer>; 5] = std::array::from_fn(|_| Completion::default());
    let count = if waits { queue.wait(&mut into, PATIENCE) } else { queue.poll(&mut into) };
    for Completion { tag, progress } in into.into_iter().take(count) {
        told.entry(tag).or_default().push(progress);
    }
    count
}

fn run(seed: u64, seen: &mut BTreeMap<&'static str, u32>) {
    let mut random = Random(seed);
    let (network, _) = network(3, 10);
    let queue = queue_with::<QueueBuffer>(&network, QueueLimits { operations_max: 12, blocks_max: 60 });
    let (mut known, mut told) = (BTreeMap::new(), ReportsByTag::new());
    let mut busy = 0;
    for tag in 0..60 {
        network.set_faults(faults(&mut random, seed));
        let (operation, of) = any_operation(&mut random);
        let mut batch = vec![Submission { tag, operation }];
        while let Err(refused) = queue.submit(batch) {
            assert!(matches!(refused.error, SubmitError::Busy { .. }), "{}", refused.error);
            busy += 1;
            batch = refused.batch;
            // A fetch that is not started would never end.
            (0..tag).for_each(|tag| _ = queue.begin(tag));
            (0..tag).filter(|_| random.below(12) == 0).for_each(|tag| _ = queue.cancel(tag));
            poll(&queue, &mut told, true);
        }
        known.insert(tag, of);
        match random.below(4) {
            0 => drop(queue.cancel(random.below(tag + 1))),
            1 => _ = queue.begin(random.below(tag + 1)),
            2 => _ = poll(&queue, &mut told, false),
            _ => {}
        }
        assert!(queue.in_flight() <= 12);
    }
    if random.below(2) == 0 {
        assert!(queue.close(PATIENCE));
    } else {
        (0..60).for_each(|tag| _ = queue.begin(tag));
    }
    while queue.in_flight() > 0 {
        assert!(poll(&queue, &mut told, true) > 0, "an operation never ended");
    }
    assert_eq!(told.len(), known.len(), "every operation ended");
    for (tag, known) in &known {
        *seen.entry(check(known, &told[tag])).or_default() += 1;
    }
    *seen.entry("busy").or_default() += busy;
}

#[test]
fn every_operation_ends_exactly_once() {
    let mut seen = BTreeMap::new();
    for seed in 0..25 {
        println!("seed {seed}");
        run(seed, &mut seen);
    }
    println!("{seen:?}");
    let kinds =
        ["cancelled", "layers", "layers with misses", "layers refused", "saved", "not saved", "fetched"];
    for kind in kinds.into_iter().chain(["released", "busy"]) {
        assert!(seen.get(kind).is_some_and(|times| *times > 3), "{kind} was not seen: {seen:?}");
    }
}
