//! What becomes of the layers of a save: slices on their way as they come, where the path streams and few others do, and whole frames
//! behind the last layer where that is not so or failed.
//!
//! Not here: who hands layers over (`layer_save.rs`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Frame, FrameHead, KeyForm, SliceLayout, crc32c};
use kvfleet_transport::{BoxFuture, LayerSource, SaveAnswer, SaveDone, SaveRequest, Streamed};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout_at};

use super::{LayerSaveCall, LayersAnswer};
use crate::paths::Found;
use crate::save::{deadline_of, said, too_late};
use crate::{Client, SaveCall, SaveError};

/// How long a node may need to hear that a stream was left: a few round trips of a far one.
const LEFT_FOR: Duration = Duration::from_secs(1);

/// To sum so many bytes is a turn of a thread that serves others too: some ten microseconds.
const TURN_BYTES: usize = 256 << 10;

/// What a caller says.
#[derive(Debug)]
pub(super) enum Put {
    Layer(Layer),
    /// Slices in memory that is the caller's.
    Shared(Vec<Bytes>),
    /// That was the last.
    End,
}

/// Slices of one layer, one for each block, and the sums of them or of the first of them.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) slices: Vec<Bytes>,
    pub(super) sums: Vec<u32>,
}

impl Put {
    /// The layer that was put; nothing at the end.
    fn layer(self) -> Option<Layer> {
        match self {
            Put::Layer(layer) => Some(layer),
            // Summed here and not where they were put: its caller has another layer to compute.
            Put::Shared(slices) => Some(Layer { sums: Vec::with_capacity(slices.len()), slices }),
            Put::End => None,
        }
    }
}

/// The layers that were put so far, all of which are kept.
pub(super) struct Layers {
    identity: IdentityDigest,
    key_form: KeyForm,
    hashes: Vec<BlockHash>,
    layout: SliceLayout,
    puts: mpsc::UnboundedReceiver<Put>,
    came: Vec<Layer>,
    given: usize,
}

impl Layers {
    pub(super) fn new(
        call: &LayerSaveCall,
        layout: SliceLayout,
        puts: mpsc::UnboundedReceiver<Put>,
    ) -> Layers {
        Layers {
            identity: call.asker.identity,
            key_form: call.key_form,
            hashes: call.hashes.clone(),
            layout,
            puts,
            came: Vec::new(),
            given: 0,
        }
    }

    /// Takes what is still to come of a save that was put to its end.
    async fn complete(&mut self) {
        self.sum().await;
        while let Ok(put) = self.puts.try_recv() {
            self.came.extend(put.layer());
            self.sum().await;
        }
    }

    /// Sums what is not summed yet of the layer that came last, in turns, since others need the thread. Dropped midway it goes on from
    /// there.
    async fn sum(&mut self) {
        let Some(layer) = self.came.last_mut() else { return };
        let mut bytes = 0;
        while let Some(slice) = layer.slices.get(layer.sums.len()) {
            layer.sums.push(crc32c(slice));
            bytes += slice.len();
            if bytes >= TURN_BYTES {
                bytes = 0;
                yield_now().await;
            }
        }
    }

    fn head_of(&self, position: usize) -> FrameHead {
        let sums: Vec<u32> = self.came.iter().map(|layer| layer.sums[position]).collect();
        FrameHead::of(self.identity, self.hashes[position], self.key_form, self.layout.slice_bytes(), &sums)
            .expect("the layout is that of a frame, and every layer came")
    }

    /// The whole frame of the block at this position, when all layers came.
    fn frame(&self, position: usize) -> Frame {
        let slices: Vec<Bytes> = self.came.iter().map(|layer| layer.slices[position].clone()).collect();
        self.head_of(position).frame(&slices).expect("each slice was looked at when it was put")
    }
}

impl LayerSource for Layers {
    fn slice_bytes(&self) -> &[u32] {
        self.layout.slice_bytes()
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            if self.given == self.came.len() {
                match self.puts.recv().await.map(Put::layer) {
                    Some(Some(layer)) => self.came.push(layer),
                    Some(None) => return None,
                    // Given up, which is noticed beside this.
                    None => std::future::pending().await,
                }
            }
            self.sum().await;
            self.given += 1;
            Some(self.came[self.given - 1].slices.clone())
        })
    }

    fn head(&self, position: usize) -> Bytes {
        self.head_of(position).bytes().clone()
    }
}

/// The room of a save, which says that it was put to its end.
type Finished = oneshot::Receiver<[OwnedSemaphorePermit; 2]>;

/// Sends what is put, and tells what was answered; returns when its leases are released, or at once when it is given up.
pub(super) async fn send(
    client: Client,
    call: LayerSaveCall,
    mut layers: Layers,
    (mut finished, told): (Finished, oneshot::Sender<Result<LayersAnswer, SaveError>>),
) {
    let mut streaming = Box::pin(stream(&client, &call, &mut layers));
    let early = tokio::select! {
        biased;
        end = &mut finished => Err(end),
        streamed = &mut streaming => Ok(streamed),
    };
    let (end, streamed) = match early {
        Err(end) => (end, None),
        Ok(streamed) => (finished.await, Some(streamed)),
    };
    let Ok(room) = end else { return };
    let (until, late) = (deadline_of(call.deadline), too_late(&call.address, call.deadline));
    let streamed = match streamed {
        Some(streamed) => {
            drop(streaming);
            Ok(streamed)
        }
        None => timeout_at(until, streaming).await,
    };
    let streamed_blocks = match &streamed {
        Ok(Streamed::Answered(SaveAnswer::Done(done))) => done.stored_blocks,
        _ => 0,
    };
    let answered = match streamed {
        Ok(Streamed::Answered(answer)) if is_all_stored(&answer, &call) => {
            // Before its room: the memory counts until it is free, and may be the caller's.
            drop(layers);
            Ok(answer)
        }
        Ok(streamed) => {
            let call = whole(&call, layers).await;
            let saved = save_whole(&client, &call, &streamed, until).await.unwrap_or(Err(late));
            behind(streamed, saved)
        }
        Err(_) => {
            drop(layers);
            Err(late)
        }
    };
    said(&call.address, &answered);
    // Whoever does not want to know has dropped its end.
    let _ = told.send(answered.map(|answer| LayersAnswer { answer, streamed_blocks }));
    client.release_after(call.asker.lease, &call.address, call.then_release).await;
    drop(room);
}

/// Whether nothing is left to offer. What was answered at the begin is as old as the computation: a block that was present was perhaps
/// only being written, by a save that was given up since, and where there was no room there may be some now.
fn is_all_stored(answer: &SaveAnswer, call: &LayerSaveCall) -> bool {
    matches!(answer, SaveAnswer::Done(done) if done.stored_blocks as usize >= call.hashes.len())
}

/// Saves whole frames, behind what became of their slices; nothing when it was not answered in time.
async fn save_whole(
    client: &Client,
    call: &SaveCall,
    streamed: &Streamed,
    until: Instant,
) -> Option<Result<SaveAnswer, SaveError>> {
    let saved = timeout_at(until, client.save_in_turn(call)).await.ok()?;
    let done = match (&saved, streamed) {
        (Ok(SaveAnswer::Done(done)), Streamed::Left) if done.present_blocks > 0 => done.clone(),
        _ => return Some(saved),
    };
    // Perhaps by what was left, which the node gives up once it knows. What was stored meanwhile is stored.
    let again = async {
        sleep(LEFT_FOR).await;
        client.save_in_turn(call).await
    };
    match timeout_at(until, again).await {
        Ok(Ok(SaveAnswer::Done(again))) => Some(Ok(SaveAnswer::Done(both(&done, &again)))),
        _ => Some(saved),
    }
}

/// What a save came to whose blocks were offered once more as whole frames.
fn behind(streamed: Streamed, saved: Result<SaveAnswer, SaveError>) -> Result<SaveAnswer, SaveError> {
    match (streamed, saved) {
        (Streamed::Answered(SaveAnswer::Done(first)), Ok(SaveAnswer::Done(again))) => {
            Ok(SaveAnswer::Done(both(&first, &again)))
        }
        // What was answered first stands.
        (Streamed::Answered(first @ SaveAnswer::Done(_)), _) => Ok(first),
        (_, saved) => saved,
    }
}

/// What two saves of the same blocks came to: what the first stored was present for the second.
fn both(first: &SaveDone, second: &SaveDone) -> SaveDone {
    SaveDone {
        stored_blocks: first.stored_blocks + second.stored_blocks,
        present_blocks: second.present_blocks.saturating_sub(first.stored_blocks),
        refused_blocks: second.refused_blocks,
        stored_bytes: first.stored_bytes + second.stored_bytes,
        visible_at: second.visible_at.or(first.visible_at),
    }
}

/// The same blocks as whole frames.
async fn whole(call: &LayerSaveCall, mut layers: Layers) -> SaveCall {
    layers.complete().await;
    SaveCall {
        asker: call.asker.clone(),
        address: call.address.clone(),
        epoch: call.epoch,
        parent: call.parent,
        first_offset_blocks: call.first_offset_blocks,
        hashes: call.hashes.clone(),
        frame_bytes: layers.layout.frame_bytes() as u64,
        frame: Arc::new(move |position| layers.frame(position)),
        deadline: call.deadline,
    }
}

/// Streams slices, if the path and the node do. Whatever breaks on the way, what is whole may be saved once more: blocks that are there
/// are there.
async fn stream(client: &Client, call: &LayerSaveCall, layers: &mut Layers) -> Streamed {
    let epoch = Some(call.epoch);
    let Ok(Found { path, .. }) = client.paths.get(&call.address, epoch).await else {
        return Streamed::Nothing;
    };
    if call.hashes.is_empty() || !path.streams_saves() {
        return Streamed::Nothing;
    }
    let Some(_turn) = client.saves.streaming_turn() else { return Streamed::Nothing };
    let request = SaveRequest {
        asker: call.asker.clone(),
        parent: call.parent,
        first_offset_blocks: call.first_offset_blocks,
        hashes: call.hashes.clone(),
        frame_bytes: layers.layout.frame_bytes() as u64,
    };
    match path.save_layers(request, layers).await {
        Ok(streamed) => streamed,
        Err(error) => {
            tracing::debug!(%error, address = call.address, "a save ended while it streamed");
            client.paths.failed(&call.address, epoch, &path, &error);
            Streamed::Left
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::task::{Context, Waker};

    use kvfleet_transport::suite::{EPOCH, IDENTITY, asker, hash};

    use super::*;
    use crate::SAVE_DEADLINE;

    const BLOCKS: u32 = 8;
    const SLICES: [u32; 2] = [TURN_BYTES as u32, 10];

    fn slices(layer: u8) -> Vec<Bytes> {
        let slice = |block: u32| vec![layer ^ block as u8; SLICES[usize::from(layer)] as usize].into();
        (0..BLOCKS).map(slice).collect()
    }

    /// How often others have their turn until the next layer is there, at most so often.
    fn turns(layers: &mut Layers, most: usize) -> usize {
        let mut next = layers.next();
        let mut context = Context::from_waker(Waker::noop());
        (0..most).take_while(|_| next.as_mut().poll(&mut context).is_pending()).count()
    }

    #[test]
    fn two_saves_of_the_same_blocks_are_told_as_one() {
        let first = SaveDone { stored_blocks: 5, present_blocks: 3, stored_bytes: 50, ..SaveDone::default() };
        let second = SaveDone {
            stored_blocks: 2,
            present_blocks: 5,
            refused_blocks: 1,
            stored_bytes: 20,
            ..SaveDone::default()
        };
        let (told, blocks) = (both(&first, &second), 8);
        assert_eq!((told.stored_blocks, told.present_blocks, told.refused_blocks), (7, 0, 1));
        assert_eq!(
            (told.stored_blocks + told.present_blocks + told.refused_blocks, told.stored_bytes),
            (blocks, 70)
        );
    }

    #[test]
    fn what_was_answered_of_slices_counts_whatever_becomes_of_the_frames_behind_them() {
        let some = SaveDone { stored_blocks: 5, present_blocks: 3, stored_bytes: 50, ..SaveDone::default() };
        let none = SaveDone { present_blocks: 8, ..SaveDone::default() };
        let streamed = || Streamed::Answered(SaveAnswer::Done(some.clone()));
        let told = |streamed, saved| match behind(streamed, saved) {
            Ok(SaveAnswer::Done(done)) => Some((done.stored_blocks, done.present_blocks)),
            _ => None,
        };
        assert_eq!(told(streamed(), Ok(SaveAnswer::Done(none.clone()))), Some((5, 3)));
        assert_eq!(told(streamed(), Err(SaveError::Stopped)), Some((5, 3)));
        assert_eq!(told(Streamed::Left, Ok(SaveAnswer::Done(none))), Some((0, 8)));
        assert_eq!(told(Streamed::Left, Err(SaveError::Stopped)), None);
    }

    #[test]
    fn a_layer_that_is_shared_is_summed_in_turns_and_once() {
        let call = LayerSaveCall {
            asker: asker(7),
            address: "node:0".to_owned(),
            epoch: EPOCH,
            parent: None,
            first_offset_blocks: 0,
            hashes: (0..BLOCKS).map(hash).collect(),
            key_form: KeyForm::Rotated,
            slice_bytes: SLICES.to_vec(),
            then_release: Vec::new(),
            deadline: SAVE_DEADLINE,
        };
        let (puts, came) = mpsc::unbounded_channel();
        let mut layers = Layers::new(&call, SliceLayout::new(&SLICES).unwrap(), came);
        puts.send(Put::Shared(slices(0))).unwrap();
        // Given up in its middle, as beside the end of a save.
        assert_eq!(turns(&mut layers, 3), 3);
        assert_eq!(turns(&mut layers, 100), BLOCKS as usize - 3, "it goes on");
        puts.send(Put::Shared(slices(1))).unwrap();
        assert_eq!(turns(&mut layers, 100), 0, "short ones are one turn");
        for position in 0..BLOCKS as usize {
            let frame = layers.frame(position);
            frame.verify(IDENTITY, hash(position as u32)).unwrap();
            assert_eq!(frame.slice(0).unwrap(), slices(0)[position]);
        }
    }
}
