//! What an operation does: the client's verb, beside the caller's word that it should end.
//!
//! Everything that may touch what the caller gave holds the operation ([`Operating`]), and so holds back its end:
//! each room ([`LentRoom`]), the frame source, and the task itself.
//!
//! Not here: the verbs.

use std::sync::Arc;

use kv_core::pipeline::Arrive;

use super::arrivals::{Arrivals, Told};
use super::state::{LentRoom, Operating};
use super::{LayersCame, LayersOperation, MayDecodeCall, Operation, Outcome, Progress};
use crate::{
    BlockRoom, Client, FetchCall, FrameSource, HeldLease, LayerEvent, LayerFetch, SaveCall, SourceEnd,
};

/// Binds all that the caller gave to the operation, before anything may drop it: whatever becomes of it from here on,
/// rooms come back, and the end is told after them.
pub(super) fn bind<R: BlockRoom>(operation: Operation<R>, of: &Arc<Operating<R>>) -> Operation<LentRoom<R>> {
    match operation {
        Operation::Route(call) => Operation::Route(call),
        Operation::Fetch(call) => Operation::Fetch(call),
        Operation::Release(leases) => Operation::Release(leases),
        Operation::MayDecode(call) => Operation::MayDecode(call),
        Operation::FetchLayers(LayersOperation { call, rooms, begins, each_block }) => {
            let first = call.fetch.resident_blocks;
            let lend = |(position, room)| LentRoom::new(first.saturating_add(position), room, Arc::clone(of));
            let rooms = (0..).zip(rooms).map(lend).collect();
            Operation::FetchLayers(LayersOperation { call, rooms, begins, each_block })
        }
        Operation::Save(mut call) => {
            call.frame = lent_frames(call.frame, Arc::clone(of));
            Operation::Save(call)
        }
    }
}

/// A frame source that holds its operation.
fn lent_frames<R: Send + 'static>(source: FrameSource, of: Arc<Operating<R>>) -> FrameSource {
    /// The source goes first: the end is told when nothing of it is left.
    struct Lent<R> {
        source: FrameSource,
        _holds: Arc<Operating<R>>,
    }
    let lent = Lent { source, _holds: of };
    Arc::new(move |position| {
        // All of it, or the closure would take its parts, in an order of its own.
        let lent = &lent;
        (lent.source)(position)
    })
}

/// Runs an operation. Its end is told when this and all that it lent are dropped.
pub(super) async fn run<R: BlockRoom>(
    client: Client,
    operation: Operation<LentRoom<R>>,
    of: Arc<Operating<R>>,
) {
    let outcome = match operation {
        Operation::Route(call) => {
            unless_cancelled(&of, async { Outcome::Routed(client.route(call).await) }).await
        }
        Operation::Fetch(call) => fetch(&client, call, &of).await,
        Operation::FetchLayers(layers) => fetch_layers(&client, layers, &of).await,
        Operation::Save(call) => save(&client, call, &of).await,
        Operation::Release(leases) => {
            unless_cancelled(&of, async { Outcome::Released(client.release(&leases).await) }).await
        }
        Operation::MayDecode(MayDecodeCall { request, instance, tbt_max_us }) => {
            let asked = client.may_decode(request, instance, tbt_max_us);
            unless_cancelled(&of, async { Outcome::MayDecode(asked.await) }).await
        }
    };
    of.conclude(outcome);
}

/// The outcome of `work`, or that it was cancelled, with which it is dropped.
async fn unless_cancelled<R>(of: &Operating<R>, work: impl Future<Output = Outcome>) -> Outcome {
    tokio::select! {
        biased;
        () = of.signals.cancel.notified() => Outcome::Cancelled,
        outcome = work => outcome,
    }
}

async fn fetch<R>(client: &Client, call: FetchCall, of: &Operating<R>) -> Outcome {
    of.may_hold(leases_of(&call));
    unless_cancelled(of, async {
        let fetched = client.fetch(call).await;
        of.may_hold(fetched.as_ref().map(|outcome| outcome.leases.clone()).unwrap_or_default());
        Outcome::Fetched(fetched)
    })
    .await
}

async fn save<R>(client: &Client, call: SaveCall, of: &Operating<R>) -> Outcome {
    of.may_hold(if call.hashes.is_empty() { Vec::new() } else { vec![call.lease()] });
    unless_cancelled(of, async { Outcome::Saved(client.save(&call).await) }).await
}

async fn fetch_layers<R: BlockRoom>(
    client: &Client,
    layers: LayersOperation<LentRoom<R>>,
    of: &Operating<R>,
) -> Outcome {
    let LayersOperation { call, rooms, begins, each_block } = layers;
    let first = call.fetch.resident_blocks;
    let blocks = rooms.len();
    let leases = leases_of(&call.fetch);
    let sources = call.fetch.sources.len();
    let by_layer = call.arrive == Arrive::ByLayer;
    let fetch = match client.fetch_layers(call, rooms) {
        Ok(fetch) => fetch,
        Err(error) => return Outcome::Layers(Err(error)),
    };
    of.may_hold(leases);
    if begins {
        fetch.begin();
    }
    let arrivals = Arrivals::new(first, blocks, fetch.layers(), by_layer);
    Filling { of, each_block, arrivals, came: LayersCame::default(), leases: Vec::new(), sources }
        .run(fetch)
        .await
}

/// A fetch whose rooms are being filled.
struct Filling<'a, R> {
    of: &'a Operating<R>,
    each_block: bool,
    arrivals: Arrivals,
    came: LayersCame,
    leases: Vec<HeldLease>,
    /// Sources that did not end yet.
    sources: usize,
}

impl<R: BlockRoom> Filling<'_, R> {
    async fn run(mut self, mut fetch: LayerFetch<LentRoom<R>>) -> Outcome {
        loop {
            tokio::select! {
                biased;
                () = self.of.signals.cancel.notified() => return Outcome::Cancelled,
                () = self.of.signals.begin.notified() => fetch.begin(),
                event = fetch.next() => match event {
                    Some(LayerEvent::Slices { block, layers }) => {
                        let told = self.arrivals.slices(block, layers.end);
                        self.tell(told);
                    }
                    Some(LayerEvent::Arrived { block, room }) => self.arrived(block, room),
                    // Told with the source's end.
                    Some(LayerEvent::Short { .. }) => {}
                    Some(LayerEvent::Ended(end)) => self.ended(*end),
                    None => break,
                },
            }
        }
        if self.sources > 0 {
            // A source's task ended without a word, so nobody knows what it would have been.
            return Outcome::Lost;
        }
        self.leases.sort();
        self.of.may_hold(self.leases);
        (self.came.end_block, self.came.came) = self.arrivals.into_parts();
        Outcome::Layers(Ok(self.came))
    }

    fn arrived(&mut self, block: u32, room: LentRoom<R>) {
        let told = self.arrivals.arrived(block);
        if let Some(room) = self.each_block.then(|| room.take()).flatten() {
            self.of.tell([Progress::Arrived { block, room }]);
        }
        self.tell(told);
    }

    fn ended(&mut self, end: SourceEnd<LentRoom<R>>) {
        self.sources = self.sources.saturating_sub(1);
        for back in &end.absent {
            self.arrivals.missing(back.block).into_iter().for_each(|told| self.tell(told));
        }
        self.came.misses.extend(end.miss);
        self.came.received_bytes += end.received_bytes;
        self.came.wrong_blocks += end.wrong_blocks;
        self.leases.extend(end.lease.filter(|lease| !self.leases.contains(lease)));
    }

    fn tell(&self, told: Option<Told>) {
        match told {
            Some(Told::Recompute(from_block)) => self.of.tell([Progress::Recompute { from_block }]),
            Some(Told::Layers { layers, end }) => {
                self.of.tell(layers.map(|layer| Progress::Layer { layer, end_block: end }));
            }
            None => {}
        }
    }
}

/// What nodes may hold once they were asked.
fn leases_of(call: &FetchCall) -> Vec<HeldLease> {
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

    use super::super::state::Shared;
    use super::super::{Completion, QueueLimits, Submission};
    use super::*;

    type Room = Vec<Box<[u8]>>;

    /// Part of a frame source: counts what was told of the operation when it goes.
    struct Witness(Arc<Shared<Room>>, Arc<AtomicUsize>);

    impl Drop for Witness {
        fn drop(&mut self) {
            let told = self.0.poll(&mut [Completion::default()]);
            self.1.fetch_add(10 + told, Ordering::SeqCst);
        }
    }

    #[test]
    fn the_end_of_a_save_is_told_behind_the_last_of_its_frame_source() {
        let shared = Shared::<Room>::new(QueueLimits::default());
        let batch = [Submission { tag: 1, operation: Operation::Release(Vec::new()) }];
        let of = shared.enter(&batch).unwrap().pop().unwrap();
        let gone = Arc::<AtomicUsize>::default();
        let witness = Witness(Arc::clone(&shared), Arc::clone(&gone));
        let lent = lent_frames(
            Arc::new(move |_| -> Frame { unreachable!("{}", witness.1.load(Ordering::SeqCst)) }),
            of,
        );
        let another = Arc::clone(&lent);
        drop(lent);
        assert_eq!(shared.poll(&mut [Completion::default()]), 0, "somebody still has it");
        drop(another);
        assert_eq!(gone.load(Ordering::SeqCst), 10, "it went while nothing was told");
        let mut told = [Completion::default()];
        assert_eq!(shared.poll(&mut told), 1);
        assert!(matches!(told[0].progress, Progress::Ended(_)));
    }
}
