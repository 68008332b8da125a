//! Sends the layers of a save: slices are streamed as they are put, if the path streams and a
//! permit is free. Otherwise, or on failure, whole frames follow after the last layer.
//!
//! Not here: accepting layers from the caller (`layer_save.rs`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Frame, FrameHead, KeyForm, SliceLayout, crc32c};
use kvfleet_transport::{BoxFuture, LayerSource, LayeredSaveOutcome, SaveAnswer, SaveDone, SaveRequest};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout_at};

use super::{LayerSaveAnswer, LayerSaveCall};
use crate::paths::AcquiredPath;
use crate::save::{deadline_after, log_save, timed_out};
use crate::{Client, SaveCall, SaveError};

/// Time for a node to notice an abandoned stream: a few round trips to a far one.
const ABANDONED_STREAM_DELAY: Duration = Duration::from_secs(1);

/// Bytes to checksum before yielding, since the thread serves other tasks too: some tens of
/// microseconds.
const CHECKSUM_CHUNK_BYTES: usize = 256 << 10;

/// A message of the caller.
#[derive(Debug)]
pub(super) enum PutMessage {
    Layer(LayerSlices),
    /// Slices in the caller's memory.
    Shared(Vec<Bytes>),
    /// The previous layer was the last.
    End,
}

/// One slice of a layer per block, and the checksums of a prefix of them.
#[derive(Debug)]
pub(super) struct LayerSlices {
    pub(super) slices: Vec<Bytes>,
    pub(super) checksums: Vec<u32>,
}

impl PutMessage {
    /// The layer of the message; `None` at the end.
    fn layer(self) -> Option<LayerSlices> {
        match self {
            PutMessage::Layer(layer) => Some(layer),
            // Checksummed later in this task, because the caller has another layer to compute.
            PutMessage::Shared(slices) => {
                Some(LayerSlices { checksums: Vec::with_capacity(slices.len()), slices })
            }
            PutMessage::End => None,
        }
    }
}

/// The layers received so far, all kept.
pub(super) struct PutLayers {
    identity: IdentityDigest,
    key_form: KeyForm,
    hashes: Vec<BlockHash>,
    layout: SliceLayout,
    puts: mpsc::UnboundedReceiver<PutMessage>,
    received: Vec<LayerSlices>,
    streamed: usize,
}

impl PutLayers {
    pub(super) fn new(
        call: &LayerSaveCall,
        layout: SliceLayout,
        puts: mpsc::UnboundedReceiver<PutMessage>,
    ) -> PutLayers {
        PutLayers {
            identity: call.asker.identity,
            key_form: call.key_form,
            hashes: call.hashes.clone(),
            layout,
            puts,
            received: Vec::new(),
            streamed: 0,
        }
    }

    /// Receives the remaining layers of a complete save.
    async fn receive_rest(&mut self) {
        self.checksum_last().await;
        while let Ok(put) = self.puts.try_recv() {
            self.received.extend(put.layer());
            self.checksum_last().await;
        }
    }

    /// Checksums the rest of the last layer, and yields between chunks for other tasks.
    /// Cancel-safe: it resumes where it stopped.
    async fn checksum_last(&mut self) {
        let Some(layer) = self.received.last_mut() else { return };
        let mut bytes = 0;
        while let Some(slice) = layer.slices.get(layer.checksums.len()) {
            layer.checksums.push(crc32c(slice));
            bytes += slice.len();
            if bytes >= CHECKSUM_CHUNK_BYTES {
                bytes = 0;
                yield_now().await;
            }
        }
    }

    fn head_of(&self, position: usize) -> FrameHead {
        let sums: Vec<u32> = self.received.iter().map(|layer| layer.checksums[position]).collect();
        FrameHead::new(self.identity, self.hashes[position], self.key_form, self.layout.slice_bytes(), &sums)
            .expect("the layout is a frame's, and every layer arrived")
    }

    /// The whole frame of the block at this position, after all layers arrived.
    fn frame(&self, position: usize) -> Frame {
        let slices: Vec<Bytes> = self.received.iter().map(|layer| layer.slices[position].clone()).collect();
        self.head_of(position).frame(&slices).expect("slices were validated when put")
    }
}

impl LayerSource for PutLayers {
    fn slice_bytes(&self) -> &[u32] {
        self.layout.slice_bytes()
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            if self.streamed == self.received.len() {
                match self.puts.recv().await.map(PutMessage::layer) {
                    Some(Some(layer)) => self.received.push(layer),
                    Some(None) => return None,
                    // The save was dropped; `run_save` notices that separately.
                    None => std::future::pending().await,
                }
            }
            self.checksum_last().await;
            self.streamed += 1;
            Some(self.received[self.streamed - 1].slices.clone())
        })
    }

    fn head(&self, position: usize) -> Bytes {
        self.head_of(position).bytes().clone()
    }
}

/// Receives the reservation of a save, which signals that all layers were put.
type FinishSignal = oneshot::Receiver<[OwnedSemaphorePermit; 2]>;

/// Sends the layers and the answer. Returns when its leases are released, or at once if the save is
/// dropped.
pub(super) async fn run_save(
    client: Client,
    call: LayerSaveCall,
    mut layers: PutLayers,
    mut finished: FinishSignal,
    answer_sender: oneshot::Sender<Result<LayerSaveAnswer, SaveError>>,
) {
    let mut streaming = Box::pin(stream_slices(&client, &call, &mut layers));
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
    let (until, late) = (deadline_after(call.deadline), timed_out(&call.address, call.deadline));
    let streamed = match streamed {
        Some(streamed) => {
            drop(streaming);
            Ok(streamed)
        }
        None => timeout_at(until, streaming).await,
    };
    let streamed_blocks = match &streamed {
        Ok(LayeredSaveOutcome::Answered(SaveAnswer::Done(done))) => done.stored_blocks,
        _ => 0,
    };
    let answered = match streamed {
        Ok(LayeredSaveOutcome::Answered(answer)) if is_all_stored(&answer, &call) => {
            // Free the slices before the reservation: they count against it and may be the caller's
            // memory.
            drop(layers);
            Ok(answer)
        }
        Ok(streamed) => {
            let call = whole_frames_call(&call, layers).await;
            let saved = save_whole(&client, &call, &streamed, until).await.unwrap_or(Err(late));
            merge_answers(streamed, saved)
        }
        Err(_) => {
            drop(layers);
            Err(late)
        }
    };
    log_save(&call.address, &answered);
    // An error means that the caller dropped the receiver.
    let _ = answer_sender.send(answered.map(|answer| LayerSaveAnswer { answer, streamed_blocks }));
    client.release_after(call.asker.lease, &call.address, call.then_release).await;
    drop(room);
}

/// Whether no block is left to offer. The first answer dates from the start: a present block may
/// have been an unfinished write of another save, and a full node may have space now.
fn is_all_stored(answer: &SaveAnswer, call: &LayerSaveCall) -> bool {
    matches!(answer, SaveAnswer::Done(done) if done.stored_blocks as usize >= call.hashes.len())
}

/// Saves whole frames after the stream; `None` if not answered in time.
async fn save_whole(
    client: &Client,
    call: &SaveCall,
    streamed: &LayeredSaveOutcome,
    until: Instant,
) -> Option<Result<SaveAnswer, SaveError>> {
    let saved = timeout_at(until, client.save_throttled(call)).await.ok()?;
    let done = match (&saved, streamed) {
        (Ok(SaveAnswer::Done(done)), LayeredSaveOutcome::Abandoned) if done.present_blocks > 0 => {
            done.clone()
        }
        _ => return Some(saved),
    };
    // The blocks may be those of the abandoned stream, which the node drops once it notices. Blocks
    // stored since then stay.
    let again = async {
        sleep(ABANDONED_STREAM_DELAY).await;
        client.save_throttled(call).await
    };
    match timeout_at(until, again).await {
        Ok(Ok(SaveAnswer::Done(again))) => Some(Ok(SaveAnswer::Done(merge_done(&done, &again)))),
        _ => Some(saved),
    }
}

/// Combines the answer to the stream with the answer to the whole frames.
fn merge_answers(
    streamed: LayeredSaveOutcome,
    saved: Result<SaveAnswer, SaveError>,
) -> Result<SaveAnswer, SaveError> {
    match (streamed, saved) {
        (LayeredSaveOutcome::Answered(SaveAnswer::Done(first)), Ok(SaveAnswer::Done(again))) => {
            Ok(SaveAnswer::Done(merge_done(&first, &again)))
        }
        // The first answer stands.
        (LayeredSaveOutcome::Answered(first @ SaveAnswer::Done(_)), _) => Ok(first),
        (_, saved) => saved,
    }
}

/// The combined result of two saves of the same blocks: blocks stored by the first are present for
/// the second.
fn merge_done(first: &SaveDone, second: &SaveDone) -> SaveDone {
    SaveDone {
        stored_blocks: first.stored_blocks + second.stored_blocks,
        present_blocks: second.present_blocks.saturating_sub(first.stored_blocks),
        refused_blocks: second.refused_blocks,
        stored_bytes: first.stored_bytes + second.stored_bytes,
        visible_at: second.visible_at.or(first.visible_at),
    }
}

/// A save of the same blocks as whole frames.
async fn whole_frames_call(call: &LayerSaveCall, mut layers: PutLayers) -> SaveCall {
    layers.receive_rest().await;
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

/// Streams slices, if the path and the node support it. After any failure whole blocks may be saved
/// again: stored blocks are unaffected.
async fn stream_slices(client: &Client, call: &LayerSaveCall, layers: &mut PutLayers) -> LayeredSaveOutcome {
    let epoch = Some(call.epoch);
    let Ok(AcquiredPath { path, .. }) = client.paths.get(&call.address, epoch).await else {
        return LayeredSaveOutcome::NotStreamed;
    };
    if call.hashes.is_empty() || !path.streams_saves() {
        return LayeredSaveOutcome::NotStreamed;
    }
    let Some(_turn) = client.saves.streaming_permit() else { return LayeredSaveOutcome::NotStreamed };
    let request = SaveRequest {
        context: call.asker.clone(),
        parent: call.parent,
        first_offset_blocks: call.first_offset_blocks,
        hashes: call.hashes.clone(),
        frame_bytes: layers.layout.frame_bytes() as u64,
    };
    match path.save_layers(request, layers).await {
        Ok(streamed) => streamed,
        Err(error) => {
            tracing::debug!(%error, address = call.address, "save failed while streaming");
            client.paths.note_failure(&call.address, epoch, &path, &error);
            LayeredSaveOutcome::Abandoned
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::task::{Context, Waker};

    use kvfleet_transport::suite::{EPOCH, IDENTITY, hash, request_context};

    use super::*;
    use crate::SAVE_DEADLINE;

    const BLOCKS: u32 = 8;
    const SLICES: [u32; 2] = [CHECKSUM_CHUNK_BYTES as u32, 10];

    fn slices(layer: u8) -> Vec<Bytes> {
        let slice = |block: u32| vec![layer ^ block as u8; SLICES[usize::from(layer)] as usize].into();
        (0..BLOCKS).map(slice).collect()
    }

    /// How often the task yields until the next layer is available, at most `most` times.
    fn yields_until_next(layers: &mut PutLayers, most: usize) -> usize {
        let mut next = layers.next();
        let mut context = Context::from_waker(Waker::noop());
        (0..most).take_while(|_| next.as_mut().poll(&mut context).is_pending()).count()
    }

    #[test]
    fn results_of_two_saves_of_same_blocks_are_merged() {
        let first = SaveDone { stored_blocks: 5, present_blocks: 3, stored_bytes: 50, ..SaveDone::default() };
        let second = SaveDone {
            stored_blocks: 2,
            present_blocks: 5,
            refused_blocks: 1,
            stored_bytes: 20,
            ..SaveDone::default()
        };
        let (told, blocks) = (merge_done(&first, &second), 8);
        assert_eq!((told.stored_blocks, told.present_blocks, told.refused_blocks), (7, 0, 1));
        assert_eq!(
            (told.stored_blocks + told.present_blocks + told.refused_blocks, told.stored_bytes),
            (blocks, 70)
        );
    }

    #[test]
    fn streamed_answer_stands_regardless_of_later_frames() {
        let some = SaveDone { stored_blocks: 5, present_blocks: 3, stored_bytes: 50, ..SaveDone::default() };
        let none = SaveDone { present_blocks: 8, ..SaveDone::default() };
        let streamed = || LayeredSaveOutcome::Answered(SaveAnswer::Done(some.clone()));
        let told = |streamed, saved| match merge_answers(streamed, saved) {
            Ok(SaveAnswer::Done(done)) => Some((done.stored_blocks, done.present_blocks)),
            _ => None,
        };
        assert_eq!(told(streamed(), Ok(SaveAnswer::Done(none.clone()))), Some((5, 3)));
        assert_eq!(told(streamed(), Err(SaveError::Stopped)), Some((5, 3)));
        assert_eq!(told(LayeredSaveOutcome::Abandoned, Ok(SaveAnswer::Done(none))), Some((0, 8)));
        assert_eq!(told(LayeredSaveOutcome::Abandoned, Err(SaveError::Stopped)), None);
    }

    #[test]
    fn shared_layer_is_checksummed_once_in_chunks() {
        let call = LayerSaveCall {
            asker: request_context(7),
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
        let mut layers = PutLayers::new(&call, SliceLayout::new(&SLICES).unwrap(), came);
        puts.send(PutMessage::Shared(slices(0))).unwrap();
        // Cancelled midway, as at the end of a save.
        assert_eq!(yields_until_next(&mut layers, 3), 3);
        assert_eq!(yields_until_next(&mut layers, 100), BLOCKS as usize - 3, "it resumes");
        puts.send(PutMessage::Shared(slices(1))).unwrap();
        assert_eq!(yields_until_next(&mut layers, 100), 0, "short slices need no yield");
        for position in 0..BLOCKS as usize {
            let frame = layers.frame(position);
            frame.verify(IDENTITY, hash(position as u32)).unwrap();
            assert_eq!(frame.slice(0).unwrap(), slices(0)[position]);
        }
    }
}
