//! Operations that are submitted and polled: each ends once, whatever happens, and not before its rooms are let go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::id::{Category, InstanceId, LeaseId, RequestId, TenantId};
use kv_core::pipeline::Arrive;
use kvfleet_errors_doc::says;
use kvfleet_proto::{content, pb};
use kvfleet_transport::loopback::{Faults, Loopback};
use kvfleet_transport::suite::{EPOCH, IDENTITY, PATIENCE, asker, frame, hash, hashes};
use kvfleet_transport::{MissReason, SaveAnswer};

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{
    BlockRoom, ClientError, Completion, CompletionQueue, Ended, FetchCall, HeldLease, LayersCall,
    LayersOperation, MayDecode, MayDecodeCall, Operation, Outcome, Progress, QueueError, QueueLimits,
    Refused, RouteCall, SAVE_DEADLINE, SaveCall, Submission, SubmitError,
};

mod seeded;

/// A block's two slices, as the suite makes them.
type Room = Vec<Box<[u8]>>;

const SLICE_BYTES: [u32; 2] = [CONTENT_BYTES / 2, CONTENT_BYTES - CONTENT_BYTES / 2];

/// So long nothing may happen that must not.
const A_WHILE: Duration = Duration::from_millis(60);

fn room() -> Room {
    SLICE_BYTES.map(|bytes| vec![0; bytes as usize].into()).to_vec()
}

fn source(node: u32, start_blocks: u32, len_blocks: u32) -> pb::Source {
    pb::Source { node, epoch: EPOCH.0, address: format!("node:{node}"), start_blocks, len_blocks, tier: 1 }
}

fn fetch_call(blocks: u32, sources: Vec<pb::Source>) -> FetchCall {
    FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: hashes(blocks),
        resident_blocks: 0,
        sources,
        deadline: PATIENCE,
        class: None,
    }
}

/// All blocks of the sources into these rooms, from now on.
fn layers<R>(fetch: FetchCall, rooms: Vec<R>) -> Operation<R> {
    let call = LayersCall {
        fetch,
        frame_bytes: 1 << 20,
        read_buffer_bytes: 0,
        in_flight_bytes_max: u64::MAX,
        layers_at_once: u32::MAX,
        arrive: Arrive::ByBlock,
    };
    Operation::FetchLayers(LayersOperation { call, rooms, begins: true, each_block: false })
}

fn save_call(blocks: std::ops::Range<u32>) -> SaveCall {
    SaveCall {
        asker: asker(7),
        address: "node:0".to_owned(),
        epoch: EPOCH,
        parent: None,
        first_offset_blocks: blocks.start,
        hashes: blocks.clone().map(hash).collect(),
        frame_bytes: 1 << 20,
        frame: Arc::new(move |position| {
            frame(hash(blocks.start + u32::try_from(position).unwrap()), CONTENT_BYTES)
        }),
        deadline: SAVE_DEADLINE,
    }
}

fn route_call() -> RouteCall {
    RouteCall {
        request: RequestId(1),
        tenant: TenantId(0),
        category: Category::default(),
        hashes: hashes(2),
        block_tokens: 16,
        input_tokens: 32,
        output_tokens: 0,
        tbt_max_us: 0,
        identity: IDENTITY,
        after: Vec::new(),
        fresh: false,
    }
}

fn may_decode_call() -> MayDecodeCall {
    MayDecodeCall { request: RequestId(1), instance: InstanceId(1), tbt_max_us: 1 }
}

fn queue_with<R: BlockRoom>(network: &Loopback, limits: QueueLimits) -> CompletionQueue<R> {
    CompletionQueue::with_threads(2, limits, || Ok(client_on(network))).unwrap()
}

fn queue<R: BlockRoom>(network: &Loopback) -> CompletionQueue<R> {
    queue_with(network, QueueLimits::default())
}

fn submit<R: BlockRoom + std::fmt::Debug>(queue: &CompletionQueue<R>, tag: u64, operation: Operation<R>) {
    queue.submit(vec![Submission { tag, operation }]).unwrap();
}

/// The next thing that becomes of anything.
fn next<R: BlockRoom>(queue: &CompletionQueue<R>) -> Completion<R> {
    let mut into = [Completion::default()];
    assert_eq!(queue.wait(&mut into, PATIENCE), 1, "nothing became of it");
    let [completion] = into;
    completion
}

fn ended<R: BlockRoom + std::fmt::Debug>(queue: &CompletionQueue<R>, tag: u64) -> Ended<R> {
    match next(queue) {
        Completion { tag: of, progress: Progress::Ended(ended) } if of == tag => *ended,
        other => panic!("{other:?}"),
    }
}

/// Everything up to the end of the only operation in flight.
fn all<R: BlockRoom>(queue: &CompletionQueue<R>) -> (Vec<Progress<R>>, Ended<R>) {
    let mut before = Vec::new();
    loop {
        match next(queue).progress {
            Progress::Ended(ended) => return (before, *ended),
            progress => before.push(progress),
        }
    }
}

fn held(node: u32, lease: u64) -> HeldLease {
    HeldLease { address: format!("node:{node}"), lease: LeaseId(lease) }
}

#[test]
fn layers_are_told_when_all_blocks_are_in_the_callers_rooms() {
    let (network, _) = network(2, 9);
    let queue = queue(&network);
    let rooms = (0..9).map(|_| room()).collect();
    submit(&queue, 3, layers(fetch_call(9, vec![source(0, 0, 4), source(1, 4, 5)]), rooms));
    let (before, end) = all(&queue);
    let told: Vec<_> = before
        .iter()
        .map(|progress| match progress {
            Progress::Layer { layer, end_block } => (*layer, *end_block),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, [(0, 9), (1, 9)]);
    let Outcome::Layers(Ok(came)) = end.outcome else { panic!("{:?}", end.outcome) };
    assert_eq!((came.end_block, came.came, came.misses.len()), (9, vec![true; 9], 0));
    assert_eq!(end.rooms.len(), 9);
    for (at, (block, room)) in (0..).zip(&end.rooms) {
        assert!(*block == at && content::matches(hash(at), &room.concat()));
    }
    assert_eq!(end.leases, [held(0, 5), held(1, 5)]);
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn what_does_not_come_is_told_before_the_layers_of_what_came() {
    let (network, services) = network(2, 9);
    services[0].forget(hash(2));
    let queue = queue(&network);
    let rooms = (0..9).map(|_| room()).collect();
    let call = fetch_call(9, vec![source(0, 0, 4), source(1, 4, 5)]);
    let Operation::FetchLayers(operation) = layers(call, rooms) else { unreachable!() };
    submit(&queue, 3, Operation::FetchLayers(LayersOperation { each_block: true, ..operation }));
    let (before, end) = all(&queue);
    let (mut blocks, mut told) = (Vec::new(), Vec::new());
    for progress in before {
        match progress {
            Progress::Arrived { block, room } => {
                assert!(content::matches(hash(block), &room.concat()));
                blocks.push(block);
            }
            Progress::Recompute { from_block } => told.push((0, from_block)),
            Progress::Layer { layer, end_block } => told.push((layer + 1, end_block)),
            other => panic!("{other:?}"),
        }
    }
    blocks.sort_unstable();
    assert_eq!(blocks, [0, 1, 4, 5, 6, 7, 8]);
    assert_eq!(told, [(0, 2), (1, 2), (2, 2)]);
    assert_eq!(end.rooms.iter().map(|(block, _)| *block).collect::<Vec<_>>(), [2, 3]);
    let Outcome::Layers(Ok(came)) = end.outcome else { panic!("{:?}", end.outcome) };
    assert_eq!((came.end_block, came.misses[0].reason), (2, MissReason::NotHeld));
    assert_eq!(came.came.iter().filter(|came| **came).count(), 7);
}

#[test]
fn every_verb_answers_under_its_tag() {
    let (network, services) = network(2, 4);
    let queue = queue::<Room>(&network);
    submit(&queue, 1, Operation::Fetch(fetch_call(4, vec![source(0, 0, 4)])));
    let end = ended(&queue, 1);
    assert!(matches!(end.outcome, Outcome::Fetched(Ok(outcome)) if outcome.blocks.len() == 4));
    assert_eq!(end.leases, [held(0, 5)]);
    submit(&queue, 2, Operation::Save(save_call(4..6)));
    let end = ended(&queue, 2);
    assert!(matches!(end.outcome, Outcome::Saved(Ok(SaveAnswer::Done(done))) if done.stored_blocks == 2));
    assert_eq!(end.leases, [held(0, 7)]);
    submit(&queue, 3, Operation::Release(vec![held(0, 7), held(1, 5)]));
    let end = ended(&queue, 3);
    assert!(matches!(end.outcome, Outcome::Released(failed) if failed.is_empty()));
    assert_eq!(services[0].released(), [LeaseId(7)]);
    submit(&queue, 4, Operation::Route(route_call()));
    let end = ended(&queue, 4);
    assert!(matches!(end.outcome, Outcome::Routed(Err(_))), "nobody answers there");
    submit(&queue, 6, Operation::MayDecode(may_decode_call()));
    let end = ended(&queue, 6);
    assert!(matches!(end.outcome, Outcome::MayDecode(MayDecode::Begins)), "nobody says that it may not");
    let backwards = fetch_call(1, vec![source(0, 1, 1)]);
    submit(&queue, 5, layers(backwards, vec![room()]));
    let end = ended(&queue, 5);
    assert!(matches!(end.outcome, Outcome::Layers(Err(_))) && end.leases.is_empty());
    assert_eq!(end.rooms.len(), 1, "the room of a fetch that did not begin comes back");
}

#[test]
fn a_fetch_waits_for_its_turn() {
    let (network, _) = network(1, 3);
    let queue = queue(&network);
    let rooms = (0..3).map(|_| room()).collect();
    let Operation::FetchLayers(operation) = layers(fetch_call(3, vec![source(0, 0, 3)]), rooms) else {
        unreachable!()
    };
    submit(&queue, 8, Operation::FetchLayers(LayersOperation { begins: false, ..operation }));
    assert_eq!(queue.wait(&mut [Completion::default()], A_WHILE), 0);
    assert!(queue.begin(8) && !queue.begin(9));
    assert!(matches!(all(&queue).1.outcome, Outcome::Layers(Ok(came)) if came.end_block == 3));
    assert!(!queue.begin(8), "its end was polled");
}

#[test]
fn a_full_queue_says_so_and_has_room_again_when_an_end_was_polled() {
    let (network, services) = network(1, 8);
    services[0].set_gate(0);
    let limits = QueueLimits { operations_max: 3, blocks_max: 8 };
    let queue = queue_with::<Room>(&network, limits);
    let one = |tag, blocks| Submission {
        tag,
        operation: Operation::Fetch(fetch_call(blocks, vec![source(0, 0, blocks)])),
    };
    let refused = |batch: Vec<Submission<Room>>| {
        let count = batch.len();
        let Refused { why, batch } = queue.submit(batch).unwrap_err();
        assert_eq!(batch.len(), count, "all of it comes back");
        why
    };
    queue.submit(vec![one(1, 2), one(2, 3)]).unwrap();
    let busy = |operations, blocks| SubmitError::Busy { operations, blocks, in_flight: 2 };
    assert_eq!(refused(vec![one(3, 1), one(4, 1)]), busy(2, 2), "too many operations");
    says("a queue: full", &busy(2, 2), &[]);
    assert_eq!(refused(vec![one(3, 4)]), busy(1, 4), "too many blocks");
    let never = refused(vec![one(3, 9)]);
    assert_eq!(never, SubmitError::TooLarge { operations: 1, blocks: 9, limits });
    says("a queue: a batch that never fits", &never, &[]);
    let used = refused(vec![one(2, 1)]);
    assert_eq!(used, SubmitError::TagInUse { tag: 2 });
    says("a queue: a tag in flight", &used, &[]);
    queue.submit(vec![one(3, 3)]).unwrap();
    assert!(queue.cancel(2));
    assert!(matches!(ended(&queue, 2).outcome, Outcome::Cancelled));
    assert!(!queue.cancel(2));
    assert_eq!(
        refused(vec![one(7, 1), one(7, 1)]),
        SubmitError::Busy { operations: 2, blocks: 2, in_flight: 2 }
    );
    queue.submit(vec![one(2, 3)]).unwrap();
    services[0].set_gate(100);
    let mut tags: Vec<u64> = (0..3).map(|_| next(&queue).tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [1, 2, 3]);
    assert_eq!(refused(vec![one(7, 1), one(7, 1)]), SubmitError::TagInUse { tag: 7 }, "twice in a batch");
    assert!(queue.close(PATIENCE));
    let closed = refused(vec![one(1, 1)]);
    assert_eq!(closed, SubmitError::Closed);
    says("a queue: closed", &closed, &[]);
}

/// What a wait gives, and how long it took.
fn timed(queue: &CompletionQueue<Room>, timeout: Duration) -> (usize, Duration) {
    let begun = Instant::now();
    (queue.wait(&mut [Completion::default()], timeout), begun.elapsed())
}

#[test]
fn a_thread_that_polls_an_idle_queue_waits() {
    let (network, _) = network(1, 2);
    let queue = queue::<Room>(&network);
    let (count, took) = timed(&queue, A_WHILE);
    assert!(count == 0 && took >= A_WHILE, "it would turn and turn: {took:?}");
    submit(&queue, 1, Operation::Fetch(fetch_call(2, vec![source(0, 0, 2)])));
    assert!(matches!(ended(&queue, 1).outcome, Outcome::Fetched(Ok(_))));
    let (count, took) = timed(&queue, A_WHILE);
    assert!(count == 0 && took >= A_WHILE, "{took:?}");
    assert!(!queue.is_over());
}

#[test]
fn threads_that_poll_go_on_when_a_queue_is_closed_and_all_was_polled() {
    let (network, services) = network(1, 2);
    services[0].set_gate(0);
    let queue = queue::<Room>(&network);
    submit(&queue, 1, Operation::Fetch(fetch_call(2, vec![source(0, 0, 2)])));
    let waited = std::thread::scope(|scope| {
        let wait = || scope.spawn(|| timed(&queue, PATIENCE));
        let waiting = [wait(), wait()];
        assert!(queue.close(PATIENCE));
        waiting.map(|one| one.join().unwrap())
    });
    assert_eq!(waited.iter().map(|(count, _)| count).sum::<usize>(), 1, "one of them has the end");
    assert!(waited.iter().all(|(_, took)| *took < PATIENCE), "the other one went on: {waited:?}");
    assert!(queue.is_over());
    let (count, took) = timed(&queue, PATIENCE);
    assert!(count == 0 && took < PATIENCE, "nothing comes any more: {took:?}");
    let idle = self::queue::<Room>(&network);
    let (count, took) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| timed(&idle, PATIENCE));
        assert_eq!(idle.wait(&mut [], A_WHILE), 0, "the other one waits by then");
        assert!(idle.close(PATIENCE));
        waiting.join().unwrap()
    });
    assert!(count == 0 && took < PATIENCE, "it was told that nothing comes: {took:?}");
}

#[tokio::test]
async fn a_queue_whose_client_cannot_be_made_is_an_error_also_on_a_runtime() {
    let (network, _) = network(1, 2);
    let made = CompletionQueue::<Room>::with_threads(1, QueueLimits::default(), || {
        drop(client_on(&network));
        Err(ClientError::NoRouters)
    });
    assert!(matches!(made, Err(QueueError::Client(ClientError::NoRouters))));
}

/// A room that says when it is written, and stays in the writer's hands until it may go on.
#[derive(Debug)]
struct Slow {
    room: Room,
    entered: Sender<()>,
    may_go_on: Receiver<()>,
    /// Set when the caller has its memory back.
    freed: Arc<AtomicBool>,
    written_after: Arc<AtomicUsize>,
}

// A receiver can be used by one thread at a time, which is how a room is used.
impl BlockRoom for Slow {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        if layer == 1 {
            self.entered.send(()).ok()?;
            self.may_go_on.recv().ok()?;
        }
        if self.freed.load(Ordering::SeqCst) {
            self.written_after.fetch_add(1, Ordering::SeqCst);
        }
        self.room.get_mut(layer).map(|slice| &mut slice[..])
    }
}

#[test]
fn no_end_is_told_while_a_room_is_written() {
    let (network, _) = network(1, 1);
    for closes in [false, true] {
        let queue = queue(&network);
        let ((entered, is_entered), (go_on, may_go_on)) = (channel(), channel());
        let (freed, written_after) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let slow = Slow {
            room: room(),
            entered,
            may_go_on,
            freed: Arc::clone(&freed),
            written_after: Arc::clone(&written_after),
        };
        submit(&queue, 1, layers(fetch_call(1, vec![source(0, 0, 1)]), vec![slow]));
        // The room is asked for its layers before it is lent, and whether the block fits; the third time it is written.
        for _ in 0..2 {
            is_entered.recv().unwrap();
            go_on.send(()).unwrap();
        }
        is_entered.recv().unwrap();
        if closes {
            assert!(!queue.close(A_WHILE), "a room is still written");
        } else {
            assert!(queue.cancel(1));
            assert_eq!(queue.wait(&mut [Completion::default()], A_WHILE), 0, "a room is still written");
        }
        go_on.send(()).unwrap();
        if closes {
            assert!(queue.close(PATIENCE));
        }
        let (_, end) = all(&queue);
        freed.store(true, Ordering::SeqCst);
        assert!(matches!(end.outcome, Outcome::Cancelled), "{:?}", end.outcome);
        assert_eq!((end.rooms.len(), written_after.load(Ordering::SeqCst)), (1, 0));
        assert_eq!(end.leases, [held(0, 5)], "the node may hold it");
    }
}

/// A room in memory that its owner may free: nothing may look at it then.
#[derive(Clone, Debug)]
struct Lent {
    freed: Arc<AtomicBool>,
    violations: Arc<AtomicUsize>,
    room: Room,
}

impl BlockRoom for Lent {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        if self.freed.load(Ordering::SeqCst) {
            self.violations.fetch_add(1, Ordering::SeqCst);
        }
        self.room.get_mut(layer).map(|slice| &mut slice[..])
    }
}

#[test]
fn after_closing_nothing_is_written_whatever_still_comes() {
    let (network, services) = network(1, 6);
    for round in 0..20 {
        println!("seed {round}");
        network.set_faults(Faults {
            seed: round,
            delay: Duration::from_micros(50 * round),
            ..Faults::default()
        });
        services[0].set_gate(usize::try_from(round % 7).unwrap());
        let queue = queue(&network);
        let lent = Lent { freed: Arc::default(), violations: Arc::default(), room: room() };
        let (freed, violations) = (Arc::clone(&lent.freed), Arc::clone(&lent.violations));
        submit(&queue, 1, layers(fetch_call(6, vec![source(0, 0, 6)]), vec![lent; 6]));
        assert!(queue.close(PATIENCE));
        freed.store(true, Ordering::SeqCst);
        services[0].set_gate(1000);
        // Another fetch goes the way that the first one would have gone on, with the threads of the first still there.
        let other = self::queue(&network);
        submit(&other, 1, Operation::<Room>::Fetch(fetch_call(6, vec![source(0, 0, 6)])));
        assert!(matches!(ended(&other, 1).outcome, Outcome::Fetched(Ok(_))));
        assert_eq!(violations.load(Ordering::SeqCst), 0);
        drop(queue);
    }
}

#[test]
fn a_save_ends_after_its_frame_source_is_let_go() {
    let (network, services) = network(1, 0);
    services[0].set_gate(1);
    let queue = queue::<Room>(&network);
    let call = save_call(0..4);
    let kept = Arc::clone(&call.frame);
    submit(&queue, 1, Operation::Save(call));
    assert_eq!(queue.wait(&mut [Completion::default()], A_WHILE), 0);
    assert!(queue.cancel(1));
    let end = ended(&queue, 1);
    assert!(matches!(end.outcome, Outcome::Cancelled));
    assert_eq!((Arc::strong_count(&kept), end.leases), (1, vec![held(0, 7)]));
}

/// A room whose owner made a mistake.
#[derive(Debug)]
struct Panics(Arc<Mutex<u32>>);

impl BlockRoom for Panics {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let mut asked = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *asked += 1;
        assert!(*asked < 2, "the room breaks on purpose");
        (layer > 0).then_some(&mut [])
    }
}

#[test]
fn an_operation_that_breaks_ends_as_lost_with_its_rooms() {
    let (network, _) = network(1, 2);
    let queue = queue(&network);
    let rooms = || {
        let asked = Arc::<Mutex<u32>>::default();
        vec![Panics(Arc::clone(&asked)), Panics(asked)]
    };
    submit(&queue, 1, layers(fetch_call(2, vec![source(0, 0, 2)]), rooms()));
    let end = ended(&queue, 1);
    assert!(matches!(end.outcome, Outcome::Lost), "{:?}", end.outcome);
    assert_eq!((end.rooms.len(), end.leases), (2, vec![held(0, 5)]));
}

#[test]
fn an_operation_without_a_runtime_ends_as_lost() {
    let (network, _) = network(1, 2);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = {
        let _inside = runtime.enter();
        client_on(&network)
    };
    let queue = CompletionQueue::new(client, QueueLimits::default(), runtime.handle().clone());
    runtime.shutdown_background();
    submit(&queue, 1, layers(fetch_call(2, vec![source(0, 0, 2)]), vec![room(), room()]));
    let end = ended(&queue, 1);
    assert!(matches!(end.outcome, Outcome::Lost));
    assert_eq!(end.rooms.iter().map(|(block, _)| *block).collect::<Vec<_>>(), [0, 1], "they come back");
    assert!(queue.close(PATIENCE));
}

#[test]
fn a_queue_that_is_dropped_stops_its_operations() {
    let (network, _) = network(1, 2);
    // Threads that go on without the queue, so that nothing but its word ends what is in flight.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = {
        let _inside = runtime.enter();
        client_on(&network)
    };
    let queue = CompletionQueue::new(client, QueueLimits::default(), runtime.handle().clone());
    let lent = Lent { freed: Arc::default(), violations: Arc::default(), room: room() };
    let kept = Arc::downgrade(&lent.freed);
    // Its turn never comes, so it does not end by itself.
    let Operation::FetchLayers(operation) = layers(fetch_call(1, vec![source(0, 0, 1)]), vec![lent]) else {
        unreachable!()
    };
    submit(&queue, 1, Operation::FetchLayers(LayersOperation { begins: false, ..operation }));
    assert_eq!(queue.wait(&mut [Completion::default()], A_WHILE), 0);
    drop(queue);
    let begun = Instant::now();
    while kept.strong_count() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the operation goes on without its queue");
        std::thread::yield_now();
    }
}

/// What one operation was told, for [`seeded`].
type Told = BTreeMap<u64, Vec<Progress<Room>>>;
