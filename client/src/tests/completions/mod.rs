//! Submitted and polled operations: each ends once in every case, and only after its buffers are
//! released.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::content;
use kv_core::id::{Category, InstanceId, LeaseId, RequestId, TenantId};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_transport::loopback::{Faults, Loopback};
use kvfleet_transport::suite::{EPOCH, IDENTITY, PATIENCE, frame, hash, hashes, request_context};
use kvfleet_transport::{MissReason, SaveAnswer};

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{
    AdmitDecodeCall, ClientError, Completion, CompletionQueue, DecodeAdmission, FetchCall,
    FetchLayersOperation, HeldLease, LayerFetchCall, Operation, OperationEnd, OperationOutcome, Progress,
    QueueError, QueueLimits, RejectedBatch, RouteCall, SAVE_DEADLINE, SaveCall, SliceBuffer, Submission,
    SubmitError,
};

mod seeded;

/// A block's two slices, as the suite makes them.
type QueueBuffer = Vec<Box<[u8]>>;

const SLICE_BYTES: [u32; 2] = [CONTENT_BYTES / 2, CONTENT_BYTES - CONTENT_BYTES / 2];

/// Time during which no completion may appear.
const QUIET_PERIOD: Duration = Duration::from_millis(60);

fn queue_buffer() -> QueueBuffer {
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

/// An operation that fetches all blocks of the sources into these buffers and starts now.
fn layers_operation<R>(fetch: FetchCall, buffers: Vec<R>) -> Operation<R> {
    let call = LayerFetchCall {
        fetch,
        frame_bytes: 1 << 20,
        read_buffer_bytes: 0,
        in_flight_bytes_max: u64::MAX,
        layers_per_request: u32::MAX,
        arrival_order: ArrivalOrder::ByBlock,
    };
    Operation::FetchLayers(FetchLayersOperation { call, buffers, start_now: true, each_block: false })
}

fn save_call(blocks: std::ops::Range<u32>) -> SaveCall {
    SaveCall {
        asker: request_context(7),
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

fn admit_decode_call() -> AdmitDecodeCall {
    AdmitDecodeCall { request: RequestId(1), instance: InstanceId(1), tbt_max_us: 1 }
}

fn queue_with<R: SliceBuffer>(network: &Loopback, limits: QueueLimits) -> CompletionQueue<R> {
    CompletionQueue::with_threads(2, limits, || Ok(client_on(network))).unwrap()
}

fn queue<R: SliceBuffer>(network: &Loopback) -> CompletionQueue<R> {
    queue_with(network, QueueLimits::default())
}

fn submit<R: SliceBuffer + std::fmt::Debug>(queue: &CompletionQueue<R>, tag: u64, operation: Operation<R>) {
    queue.submit(vec![Submission { tag, operation }]).unwrap();
}

/// The next completion.
fn next<R: SliceBuffer>(queue: &CompletionQueue<R>) -> Completion<R> {
    let mut into = [Completion::default()];
    assert_eq!(queue.wait(&mut into, PATIENCE), 1, "no completion arrived");
    let [completion] = into;
    completion
}

fn operation_end<R: SliceBuffer + std::fmt::Debug>(queue: &CompletionQueue<R>, tag: u64) -> OperationEnd<R> {
    match next(queue) {
        Completion { tag: of, progress: Progress::Ended(ended) } if of == tag => *ended,
        other => panic!("{other:?}"),
    }
}

/// All progress up to the end of the only operation in flight, and the end.
fn drain<R: SliceBuffer>(queue: &CompletionQueue<R>) -> (Vec<Progress<R>>, OperationEnd<R>) {
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
fn layers_are_reported_when_all_blocks_are_in_their_buffers() {
    let (network, _) = network(2, 9);
    let queue = queue(&network);
    let rooms = (0..9).map(|_| queue_buffer()).collect();
    submit(&queue, 3, layers_operation(fetch_call(9, vec![source(0, 0, 4), source(1, 4, 5)]), rooms));
    let (before, end) = drain(&queue);
    let told: Vec<_> = before
        .iter()
        .map(|progress| match progress {
            Progress::Layer { layer, end_block } => (*layer, *end_block),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, [(0, 9), (1, 9)]);
    let OperationOutcome::LayersFetched(Ok(came)) = end.outcome else { panic!("{:?}", end.outcome) };
    assert_eq!((came.end_block, came.arrived, came.misses.len()), (9, vec![true; 9], 0));
    assert_eq!(end.buffers.len(), 9);
    for (at, (block, room)) in (0..).zip(&end.buffers) {
        assert!(*block == at && content::matches(hash(at), &room.concat()));
    }
    assert_eq!(end.leases, [held(0, 5), held(1, 5)]);
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn missing_blocks_are_reported_before_layers() {
    let (network, services) = network(2, 9);
    services[0].forget(hash(2));
    let queue = queue(&network);
    let rooms = (0..9).map(|_| queue_buffer()).collect();
    let call = fetch_call(9, vec![source(0, 0, 4), source(1, 4, 5)]);
    let Operation::FetchLayers(operation) = layers_operation(call, rooms) else { unreachable!() };
    submit(&queue, 3, Operation::FetchLayers(FetchLayersOperation { each_block: true, ..operation }));
    let (before, end) = drain(&queue);
    let (mut blocks, mut told) = (Vec::new(), Vec::new());
    for progress in before {
        match progress {
            Progress::Arrived { block, buffer: room } => {
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
    assert_eq!(end.buffers.iter().map(|(block, _)| *block).collect::<Vec<_>>(), [2, 3]);
    let OperationOutcome::LayersFetched(Ok(came)) = end.outcome else { panic!("{:?}", end.outcome) };
    assert_eq!((came.end_block, came.misses[0].reason), (2, MissReason::NotHeld));
    assert_eq!(came.arrived.iter().filter(|came| **came).count(), 7);
}

#[test]
fn every_operation_completes_under_its_tag() {
    let (network, services) = network(2, 4);
    let queue = queue::<QueueBuffer>(&network);
    submit(&queue, 1, Operation::Fetch(fetch_call(4, vec![source(0, 0, 4)])));
    let end = operation_end(&queue, 1);
    assert!(matches!(end.outcome, OperationOutcome::Fetched(Ok(outcome)) if outcome.blocks.len() == 4));
    assert_eq!(end.leases, [held(0, 5)]);
    submit(&queue, 2, Operation::Save(save_call(4..6)));
    let end = operation_end(&queue, 2);
    assert!(
        matches!(end.outcome, OperationOutcome::Saved(Ok(SaveAnswer::Done(done))) if done.stored_blocks == 2)
    );
    assert_eq!(end.leases, [held(0, 7)]);
    submit(&queue, 3, Operation::Release(vec![held(0, 7), held(1, 5)]));
    let end = operation_end(&queue, 3);
    assert!(matches!(end.outcome, OperationOutcome::Released(failed) if failed.is_empty()));
    assert_eq!(services[0].released(), [LeaseId(7)]);
    submit(&queue, 4, Operation::Route(route_call()));
    let end = operation_end(&queue, 4);
    assert!(matches!(end.outcome, OperationOutcome::Routed(Err(_))), "no router is reachable");
    submit(&queue, 6, Operation::AdmitDecode(admit_decode_call()));
    let end = operation_end(&queue, 6);
    assert!(
        matches!(end.outcome, OperationOutcome::DecodeAdmission(DecodeAdmission::Admitted)),
        "without an answer decode is admitted"
    );
    let backwards = fetch_call(1, vec![source(0, 1, 1)]);
    submit(&queue, 5, layers_operation(backwards, vec![queue_buffer()]));
    let end = operation_end(&queue, 5);
    assert!(matches!(end.outcome, OperationOutcome::LayersFetched(Err(_))) && end.leases.is_empty());
    assert_eq!(end.buffers.len(), 1, "a failed fetch returns its buffer");
}

#[test]
fn fetch_waits_for_prefill_start() {
    let (network, _) = network(1, 3);
    let queue = queue(&network);
    let rooms = (0..3).map(|_| queue_buffer()).collect();
    let Operation::FetchLayers(operation) = layers_operation(fetch_call(3, vec![source(0, 0, 3)]), rooms)
    else {
        unreachable!()
    };
    submit(&queue, 8, Operation::FetchLayers(FetchLayersOperation { start_now: false, ..operation }));
    assert_eq!(queue.wait(&mut [Completion::default()], QUIET_PERIOD), 0);
    assert!(queue.begin(8) && !queue.begin(9));
    assert!(
        matches!(drain(&queue).1.outcome, OperationOutcome::LayersFetched(Ok(came)) if came.end_block == 3)
    );
    assert!(!queue.begin(8), "its end was polled");
}

#[test]
fn full_queue_rejects_batches_until_an_end_is_polled() {
    let (network, services) = network(1, 8);
    services[0].set_gate(0);
    let limits = QueueLimits { operations_max: 3, blocks_max: 8 };
    let queue = queue_with::<QueueBuffer>(&network, limits);
    let one = |tag, blocks| Submission {
        tag,
        operation: Operation::Fetch(fetch_call(blocks, vec![source(0, 0, blocks)])),
    };
    let refused = |batch: Vec<Submission<QueueBuffer>>| {
        let count = batch.len();
        let RejectedBatch { error: why, batch } = queue.submit(batch).unwrap_err();
        assert_eq!(batch.len(), count, "the whole batch is returned");
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
    assert!(matches!(operation_end(&queue, 2).outcome, OperationOutcome::Cancelled));
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

/// Number of completions of a wait, and its duration.
fn timed_wait(queue: &CompletionQueue<QueueBuffer>, timeout: Duration) -> (usize, Duration) {
    let begun = Instant::now();
    (queue.wait(&mut [Completion::default()], timeout), begun.elapsed())
}

#[test]
fn wait_blocks_on_an_idle_queue() {
    let (network, _) = network(1, 2);
    let queue = queue::<QueueBuffer>(&network);
    let (count, took) = timed_wait(&queue, QUIET_PERIOD);
    assert!(count == 0 && took >= QUIET_PERIOD, "wait returned early: {took:?}");
    submit(&queue, 1, Operation::Fetch(fetch_call(2, vec![source(0, 0, 2)])));
    assert!(matches!(operation_end(&queue, 1).outcome, OperationOutcome::Fetched(Ok(_))));
    let (count, took) = timed_wait(&queue, QUIET_PERIOD);
    assert!(count == 0 && took >= QUIET_PERIOD, "{took:?}");
    assert!(!queue.is_finished());
}

#[test]
fn waiting_threads_return_when_a_closed_queue_is_drained() {
    let (network, services) = network(1, 2);
    services[0].set_gate(0);
    let queue = queue::<QueueBuffer>(&network);
    submit(&queue, 1, Operation::Fetch(fetch_call(2, vec![source(0, 0, 2)])));
    let waited = std::thread::scope(|scope| {
        let wait = || scope.spawn(|| timed_wait(&queue, PATIENCE));
        let waiting = [wait(), wait()];
        assert!(queue.close(PATIENCE));
        waiting.map(|one| one.join().unwrap())
    });
    assert_eq!(waited.iter().map(|(count, _)| count).sum::<usize>(), 1, "exactly one thread gets the end");
    assert!(waited.iter().all(|(_, took)| *took < PATIENCE), "the other thread returned too: {waited:?}");
    assert!(queue.is_finished());
    let (count, took) = timed_wait(&queue, PATIENCE);
    assert!(count == 0 && took < PATIENCE, "wait blocked on a finished queue: {took:?}");
    let idle = self::queue::<QueueBuffer>(&network);
    let (count, took) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| timed_wait(&idle, PATIENCE));
        assert_eq!(idle.wait(&mut [], QUIET_PERIOD), 0, "the other thread waits by then");
        assert!(idle.close(PATIENCE));
        waiting.join().unwrap()
    });
    assert!(count == 0 && took < PATIENCE, "the close did not wake the waiting thread: {took:?}");
}

#[tokio::test]
async fn client_error_is_returned_when_called_on_a_runtime() {
    let (network, _) = network(1, 2);
    let made = CompletionQueue::<QueueBuffer>::with_threads(1, QueueLimits::default(), || {
        drop(client_on(&network));
        Err(ClientError::NoRouters)
    });
    assert!(matches!(made, Err(QueueError::Client(ClientError::NoRouters))));
}

/// A buffer that signals when it is written, and blocks the writer until released.
#[derive(Debug)]
struct GatedBuffer {
    buffer: QueueBuffer,
    entered: Sender<()>,
    may_go_on: Receiver<()>,
    /// Set when the caller has its memory back.
    freed: Arc<AtomicBool>,
    written_after: Arc<AtomicUsize>,
}

// A receiver serves one thread at a time, and so does a buffer.
impl SliceBuffer for GatedBuffer {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        if layer == 1 {
            self.entered.send(()).ok()?;
            self.may_go_on.recv().ok()?;
        }
        if self.freed.load(Ordering::SeqCst) {
            self.written_after.fetch_add(1, Ordering::SeqCst);
        }
        self.buffer.get_mut(layer).map(|slice| &mut slice[..])
    }
}

#[test]
fn no_end_is_reported_while_a_buffer_is_written() {
    let (network, _) = network(1, 1);
    for closes in [false, true] {
        let queue = queue(&network);
        let ((entered, is_entered), (go_on, may_go_on)) = (channel(), channel());
        let (freed, written_after) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let slow = GatedBuffer {
            buffer: queue_buffer(),
            entered,
            may_go_on,
            freed: Arc::clone(&freed),
            written_after: Arc::clone(&written_after),
        };
        submit(&queue, 1, layers_operation(fetch_call(1, vec![source(0, 0, 1)]), vec![slow]));
        // The first two calls come from the length query and from the check of the block's lengths;
        // the third one writes.
        for _ in 0..2 {
            is_entered.recv().unwrap();
            go_on.send(()).unwrap();
        }
        is_entered.recv().unwrap();
        if closes {
            assert!(!queue.close(QUIET_PERIOD), "a buffer is still being written");
        } else {
            assert!(queue.cancel(1));
            assert_eq!(
                queue.wait(&mut [Completion::default()], QUIET_PERIOD),
                0,
                "a buffer is still being written"
            );
        }
        go_on.send(()).unwrap();
        if closes {
            assert!(queue.close(PATIENCE));
        }
        let (_, end) = drain(&queue);
        freed.store(true, Ordering::SeqCst);
        assert!(matches!(end.outcome, OperationOutcome::Cancelled), "{:?}", end.outcome);
        assert_eq!((end.buffers.len(), written_after.load(Ordering::SeqCst)), (1, 0));
        assert_eq!(end.leases, [held(0, 5)], "the node may hold the lease");
    }
}

/// A buffer in memory that its owner may free; no access may follow.
#[derive(Clone, Debug)]
struct FreeableBuffer {
    freed: Arc<AtomicBool>,
    violations: Arc<AtomicUsize>,
    buffer: QueueBuffer,
}

impl SliceBuffer for FreeableBuffer {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        if self.freed.load(Ordering::SeqCst) {
            self.violations.fetch_add(1, Ordering::SeqCst);
        }
        self.buffer.get_mut(layer).map(|slice| &mut slice[..])
    }
}

#[test]
fn no_buffer_is_written_after_close() {
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
        let lent =
            FreeableBuffer { freed: Arc::default(), violations: Arc::default(), buffer: queue_buffer() };
        let (freed, violations) = (Arc::clone(&lent.freed), Arc::clone(&lent.violations));
        submit(&queue, 1, layers_operation(fetch_call(6, vec![source(0, 0, 6)]), vec![lent; 6]));
        assert!(queue.close(PATIENCE));
        freed.store(true, Ordering::SeqCst);
        services[0].set_gate(1000);
        // Another fetch shows that all work of the first one has passed; threads of the first still
        // exist.
        let other = self::queue(&network);
        submit(&other, 1, Operation::<QueueBuffer>::Fetch(fetch_call(6, vec![source(0, 0, 6)])));
        assert!(matches!(operation_end(&other, 1).outcome, OperationOutcome::Fetched(Ok(_))));
        assert_eq!(violations.load(Ordering::SeqCst), 0);
        drop(queue);
    }
}

#[test]
fn save_ends_after_its_frame_source_is_dropped() {
    let (network, services) = network(1, 0);
    services[0].set_gate(1);
    let queue = queue::<QueueBuffer>(&network);
    let call = save_call(0..4);
    let kept = Arc::clone(&call.frame);
    submit(&queue, 1, Operation::Save(call));
    assert_eq!(queue.wait(&mut [Completion::default()], QUIET_PERIOD), 0);
    assert!(queue.cancel(1));
    let end = operation_end(&queue, 1);
    assert!(matches!(end.outcome, OperationOutcome::Cancelled));
    assert_eq!((Arc::strong_count(&kept), end.leases), (1, vec![held(0, 7)]));
}

/// A buffer that panics.
#[derive(Debug)]
struct PanickingBuffer(Arc<Mutex<u32>>);

impl SliceBuffer for PanickingBuffer {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let mut asked = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *asked += 1;
        assert!(*asked < 2, "deliberate panic of the buffer");
        (layer > 0).then_some(&mut [])
    }
}

#[test]
fn panicking_operation_ends_as_lost_and_returns_buffers() {
    let (network, _) = network(1, 2);
    let queue = queue(&network);
    let rooms = || {
        let asked = Arc::<Mutex<u32>>::default();
        vec![PanickingBuffer(Arc::clone(&asked)), PanickingBuffer(asked)]
    };
    submit(&queue, 1, layers_operation(fetch_call(2, vec![source(0, 0, 2)]), rooms()));
    let end = operation_end(&queue, 1);
    assert!(matches!(end.outcome, OperationOutcome::Lost), "{:?}", end.outcome);
    assert_eq!((end.buffers.len(), end.leases), (2, vec![held(0, 5)]));
}

#[test]
fn operation_without_runtime_ends_as_lost() {
    let (network, _) = network(1, 2);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = {
        let _inside = runtime.enter();
        client_on(&network)
    };
    let queue = CompletionQueue::new(client, QueueLimits::default(), runtime.handle().clone());
    runtime.shutdown_background();
    submit(
        &queue,
        1,
        layers_operation(fetch_call(2, vec![source(0, 0, 2)]), vec![queue_buffer(), queue_buffer()]),
    );
    let end = operation_end(&queue, 1);
    assert!(matches!(end.outcome, OperationOutcome::Lost));
    assert_eq!(
        end.buffers.iter().map(|(block, _)| *block).collect::<Vec<_>>(),
        [0, 1],
        "buffers are returned"
    );
    assert!(queue.close(PATIENCE));
}

#[test]
fn dropping_a_queue_stops_its_operations() {
    let (network, _) = network(1, 2);
    // The runtime outlives the queue, so that only the drop of the queue ends operations.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = {
        let _inside = runtime.enter();
        client_on(&network)
    };
    let queue = CompletionQueue::new(client, QueueLimits::default(), runtime.handle().clone());
    let lent = FreeableBuffer { freed: Arc::default(), violations: Arc::default(), buffer: queue_buffer() };
    let kept = Arc::downgrade(&lent.freed);
    // Never started, so it does not end by itself.
    let Operation::FetchLayers(operation) =
        layers_operation(fetch_call(1, vec![source(0, 0, 1)]), vec![lent])
    else {
        unreachable!()
    };
    submit(&queue, 1, Operation::FetchLayers(FetchLayersOperation { start_now: false, ..operation }));
    assert_eq!(queue.wait(&mut [Completion::default()], QUIET_PERIOD), 0);
    drop(queue);
    let begun = Instant::now();
    while kept.strong_count() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the operation still runs without its queue");
        std::thread::yield_now();
    }
}

/// Reports by tag, for [`seeded`].
type ReportsByTag = BTreeMap<u64, Vec<Progress<QueueBuffer>>>;
