//! Runs an operation: the client's call, beside the caller's request to cancel it.
//!
//! Everything that may touch the caller's memory holds the [`InFlightOperation`] and so delays its
//! end: each buffer ([`GuardedBuffer`]), the frame source, and the task itself.
//!
//! Not here: the calls themselves.

use std::sync::Arc;

use kv_core::pipeline::ArrivalOrder;

use super::arrivals::{ArrivalEvent, ArrivalTracker};
use super::state::{GuardedBuffer, InFlightOperation};
use super::{AdmitDecodeCall, FetchLayersOperation, LayerFetchResult, Operation, OperationOutcome, Progress};
use crate::{
    Client, FetchCall, FrameSource, HeldLease, LayerEvent, LayerFetch, SaveCall, SliceBuffer, SourceEnd,
};

/// Ties the caller's buffers and frame source to the operation, before anything may drop them. From
/// here on buffers are always returned, and the end is reported after them.
pub(super) fn bind<R: SliceBuffer>(
    operation: Operation<R>,
    in_flight: &Arc<InFlightOperation<R>>,
) -> Operation<GuardedBuffer<R>> {
    match operation {
        Operation::Route(call) => Operation::Route(call),
        Operation::Fetch(call) => Operation::Fetch(call),
        Operation::Release(leases) => Operation::Release(leases),
        Operation::AdmitDecode(call) => Operation::AdmitDecode(call),
        Operation::FetchLayers(FetchLayersOperation {
            call,
            buffers: rooms,
            start_now: begins,
            each_block,
        }) => {
            let first = call.fetch.resident_blocks;
            let guard = |(position, room)| {
                GuardedBuffer::new(first.saturating_add(position), room, Arc::clone(in_flight))
            };
            let rooms = (0..).zip(rooms).map(guard).collect();
            Operation::FetchLayers(FetchLayersOperation {
                call,
                buffers: rooms,
                start_now: begins,
                each_block,
            })
        }
        Operation::Save(mut call) => {
            call.frame = guarded_source(call.frame, Arc::clone(in_flight));
            Operation::Save(call)
        }
    }
}

/// A frame source that holds its operation.
fn guarded_source<R: Send + 'static>(source: FrameSource, of: Arc<InFlightOperation<R>>) -> FrameSource {
    /// Field order matters: the source is dropped before the operation can report its end.
    struct GuardedSource<R> {
        source: FrameSource,
        _operation: Arc<InFlightOperation<R>>,
    }
    let lent = GuardedSource { source, _operation: of };
    Arc::new(move |position| {
        // Captures the whole struct; capturing its fields would drop them in another order.
        let lent = &lent;
        (lent.source)(position)
    })
}

/// Runs an operation. Its end is reported when this task and all guarded memory are dropped.
pub(super) async fn run<R: SliceBuffer>(
    client: Client,
    operation: Operation<GuardedBuffer<R>>,
    in_flight: Arc<InFlightOperation<R>>,
) {
    let outcome = match operation {
        Operation::Route(call) => {
            unless_cancelled(&in_flight, async { OperationOutcome::Routed(client.route(call).await) }).await
        }
        Operation::Fetch(call) => fetch(&client, call, &in_flight).await,
        Operation::FetchLayers(layers) => fetch_layers(&client, layers, &in_flight).await,
        Operation::Save(call) => save(&client, call, &in_flight).await,
        Operation::Release(leases) => {
            unless_cancelled(&in_flight, async { OperationOutcome::Released(client.release(&leases).await) })
                .await
        }
        Operation::AdmitDecode(AdmitDecodeCall { request, instance, tbt_max_us }) => {
            let asked = client.admit_decode(request, instance, tbt_max_us);
            unless_cancelled(&in_flight, async { OperationOutcome::DecodeAdmission(asked.await) }).await
        }
    };
    in_flight.set_outcome(outcome);
}

/// The outcome of `work`; on cancellation drops `work` and returns `Cancelled`.
async fn unless_cancelled<R>(
    of: &InFlightOperation<R>,
    work: impl Future<Output = OperationOutcome>,
) -> OperationOutcome {
    tokio::select! {
        biased;
        () = of.signals.cancel.notified() => OperationOutcome::Cancelled,
        outcome = work => outcome,
    }
}

async fn fetch<R>(client: &Client, call: FetchCall, of: &InFlightOperation<R>) -> OperationOutcome {
    of.set_leases(possible_leases(&call));
    unless_cancelled(of, async {
        let fetched = client.fetch(call).await;
        of.set_leases(fetched.as_ref().map(|outcome| outcome.leases.clone()).unwrap_or_default());
        OperationOutcome::Fetched(fetched)
    })
    .await
}

async fn save<R>(client: &Client, call: SaveCall, of: &InFlightOperation<R>) -> OperationOutcome {
    of.set_leases(if call.hashes.is_empty() { Vec::new() } else { vec![call.lease()] });
    unless_cancelled(of, async { OperationOutcome::Saved(client.save(&call).await) }).await
}

async fn fetch_layers<R: SliceBuffer>(
    client: &Client,
    layers: FetchLayersOperation<GuardedBuffer<R>>,
    of: &InFlightOperation<R>,
) -> OperationOutcome {
    let FetchLayersOperation { call, buffers: rooms, start_now: begins, each_block } = layers;
    let first = call.fetch.resident_blocks;
    let blocks = rooms.len();
    let leases = possible_leases(&call.fetch);
    let sources = call.fetch.sources.len();
    let by_layer = call.arrival_order == ArrivalOrder::ByLayer;
    let fetch = match client.fetch_layers(call, rooms) {
        Ok(fetch) => fetch,
        Err(error) => return OperationOutcome::LayersFetched(Err(error)),
    };
    of.set_leases(leases);
    if begins {
        fetch.begin();
    }
    let arrivals = ArrivalTracker::new(first, blocks, fetch.layers(), by_layer);
    LayerFetchTask {
        in_flight: of,
        each_block,
        arrivals,
        result: LayerFetchResult::default(),
        leases: Vec::new(),
        open_sources: sources,
    }
    .run(fetch)
    .await
}

/// A running fetch into the caller's buffers.
struct LayerFetchTask<'a, R> {
    in_flight: &'a InFlightOperation<R>,
    each_block: bool,
    arrivals: ArrivalTracker,
    result: LayerFetchResult,
    leases: Vec<HeldLease>,
    /// Number of sources that have not ended.
    open_sources: usize,
}

impl<R: SliceBuffer> LayerFetchTask<'_, R> {
    async fn run(mut self, mut fetch: LayerFetch<GuardedBuffer<R>>) -> OperationOutcome {
        loop {
            tokio::select! {
                biased;
                () = self.in_flight.signals.cancel.notified() => return OperationOutcome::Cancelled,
                () = self.in_flight.signals.begin.notified() => fetch.begin(),
                event = fetch.next() => match event {
                    Some(LayerEvent::Slices { block, layers }) => {
                        let told = self.arrivals.record_slices(block, layers.end);
                        self.report(told);
                    }
                    Some(LayerEvent::Arrived { block, buffer }) => self.handle_arrived(block, buffer),
                    // Reported with the source's end.
                    Some(LayerEvent::Unavailable { .. }) => {}
                    Some(LayerEvent::SourceEnded(end)) => self.handle_source_end(*end),
                    None => break,
                },
            }
        }
        if self.open_sources > 0 {
            // A source's task ended without a report, so the result is unknown.
            return OperationOutcome::Lost;
        }
        self.leases.sort();
        self.in_flight.set_leases(self.leases);
        (self.result.end_block, self.result.arrived) = self.arrivals.into_parts();
        OperationOutcome::LayersFetched(Ok(self.result))
    }

    fn handle_arrived(&mut self, block: u32, room: GuardedBuffer<R>) {
        let told = self.arrivals.record_block(block);
        if let Some(room) = self.each_block.then(|| room.take()).flatten() {
            self.in_flight.report([Progress::Arrived { block, buffer: room }]);
        }
        self.report(told);
    }

    fn handle_source_end(&mut self, end: SourceEnd<GuardedBuffer<R>>) {
        self.open_sources = self.open_sources.saturating_sub(1);
        for back in &end.incomplete {
            self.arrivals.record_missing(back.block).into_iter().for_each(|told| self.report(told));
        }
        self.result.misses.extend(end.miss);
        self.result.received_bytes += end.received_bytes;
        self.result.wrong_blocks += end.wrong_blocks;
        self.leases.extend(end.lease.filter(|lease| !self.leases.contains(lease)));
    }

    fn report(&self, told: Option<ArrivalEvent>) {
        match told {
            Some(ArrivalEvent::Recompute(from_block)) => {
                self.in_flight.report([Progress::Recompute { from_block }]);
            }
            Some(ArrivalEvent::Layers { layers, end }) => {
                self.in_flight.report(layers.map(|layer| Progress::Layer { layer, end_block: end }));
            }
            None => {}
        }
    }
}

/// Leases that nodes may hold once they are asked.
fn possible_leases(call: &FetchCall) -> Vec<HeldLease> {
    let held = |address: &String| HeldLease { address: address.clone(), lease: call.lease };
    let mut leases: Vec<_> = call.sources.iter().map(|source| held(&source.address)).collect();
    leases.sort();
    leases.dedup();
    leases
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kvfleet_proto::frame::Frame;

    use super::super::state::SharedQueue;
    use super::super::{Completion, QueueLimits, Submission};
    use super::*;

    type OperationBuffer = Vec<Box<[u8]>>;

    /// Part of a frame source: when dropped, it counts the completions available at that moment.
    struct DropProbe(Arc<SharedQueue<OperationBuffer>>, Arc<AtomicUsize>);

    impl Drop for DropProbe {
        fn drop(&mut self) {
            let told = self.0.poll(&mut [Completion::default()]);
            self.1.fetch_add(10 + told, Ordering::SeqCst);
        }
    }

    #[test]
    fn save_end_is_reported_after_its_frame_source_is_dropped() {
        let shared = SharedQueue::<OperationBuffer>::new(QueueLimits::default());
        let batch = [Submission { tag: 1, operation: Operation::Release(Vec::new()) }];
        let of = shared.admit(&batch).unwrap().pop().unwrap();
        let gone = Arc::<AtomicUsize>::default();
        let witness = DropProbe(Arc::clone(&shared), Arc::clone(&gone));
        let lent = guarded_source(
            Arc::new(move |_| -> Frame { unreachable!("{}", witness.1.load(Ordering::SeqCst)) }),
            of,
        );
        let another = Arc::clone(&lent);
        drop(lent);
        assert_eq!(shared.poll(&mut [Completion::default()]), 0, "a clone of the source is still alive");
        drop(another);
        assert_eq!(gone.load(Ordering::SeqCst), 10, "the source was dropped before the end was reported");
        let mut told = [Completion::default()];
        assert_eq!(shared.poll(&mut told), 1);
        assert!(matches!(told[0].progress, Progress::Ended(_)));
    }
}
