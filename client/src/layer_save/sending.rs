//! What becomes of the layers of a save: slices on their way as they come, where the path streams and few others do, and whole frames
//! behind the last layer where that is not so or failed.
//!
//! Not here: who hands layers over (`layer_save.rs`).

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Frame, FrameHead, KeyForm, SliceLayout};
use kvfleet_transport::{BoxFuture, LayerSource, SaveAnswer, SaveRequest};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::timeout_at;

use super::LayerSaveCall;
use crate::paths::Found;
use crate::save::{deadline_of, said, too_late};
use crate::{Client, SaveCall};

/// What a caller says.
#[derive(Debug)]
pub(super) enum Put {
    Layer(Layer),
    /// That was the last.
    End,
}

/// Slices of one layer, one for each block, and their sums.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) slices: Vec<Bytes>,
    pub(super) sums: Vec<u32>,
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
    fn complete(&mut self) {
        while let Ok(Put::Layer(layer)) = self.puts.try_recv() {
            self.came.push(layer);
        }
    }

    fn head_of(&self, position: usize) -> FrameHead {
        let sums: Vec<u32> = self.came.iter().map(|layer| layer.sums[position]).collect();
        FrameHead::of(self.identity, self.hashes[position], self.key_form, self.layout.slice_bytes(), &sums)
            .expect("the layout is that of a frame, and every layer came")
    }
}

impl LayerSource for Layers {
    fn slice_bytes(&self) -> &[u32] {
        self.layout.slice_bytes()
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            if self.given == self.came.len() {
                match self.puts.recv().await {
                    Some(Put::Layer(layer)) => self.came.push(layer),
                    Some(Put::End) => return None,
                    // Given up, which is noticed beside this.
                    None => std::future::pending().await,
                }
            }
            self.given += 1;
            Some(self.came[self.given - 1].slices.clone())
        })
    }

    fn head(&self, position: usize) -> Bytes {
        self.head_of(position).bytes().clone()
    }

    fn frame(&self, position: usize) -> Frame {
        let slices: Vec<Bytes> = self.came.iter().map(|layer| layer.slices[position].clone()).collect();
        self.head_of(position).frame(&slices).expect("each slice was looked at when it was put")
    }
}

/// The room of a save, which says that it was put to its end.
type Finished = oneshot::Receiver<[OwnedSemaphorePermit; 2]>;

/// Sends what is put; returns when that was answered and its leases are released, or at once when it is given up.
pub(super) async fn send(client: Client, call: LayerSaveCall, mut layers: Layers, mut finished: Finished) {
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
    let answered = match streamed {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => {
            let call = whole(&call, layers);
            timeout_at(until, client.save_in_turn(&call)).await.unwrap_or(Err(late))
        }
        Err(_) => Err(late),
    };
    said(&call.address, &answered);
    client.release_after(call.asker.lease, &call.address, call.then_release).await;
    drop(room);
}

/// The same blocks as whole frames.
fn whole(call: &LayerSaveCall, mut layers: Layers) -> SaveCall {
    layers.complete();
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

/// Streams slices, if the path and the node do. Nothing when it did not come to a good end: what is whole may be saved once more,
/// for blocks that are there are there.
async fn stream(client: &Client, call: &LayerSaveCall, layers: &mut Layers) -> Option<SaveAnswer> {
    let epoch = Some(call.epoch);
    let Found { path, .. } = client.paths.get(&call.address, epoch).await.ok()?;
    if call.hashes.is_empty() || !path.streams_saves() {
        return None;
    }
    let _turn = client.saves.streaming_turn()?;
    let request = SaveRequest {
        asker: call.asker.clone(),
        parent: call.parent,
        first_offset_blocks: call.first_offset_blocks,
        hashes: call.hashes.clone(),
        frame_bytes: layers.layout.frame_bytes() as u64,
    };
    match path.save_layers(request, layers).await {
        Ok(answer) => Some(answer),
        Err(error) => {
            tracing::debug!(%error, address = call.address, "a save ended while it streamed");
            client.paths.failed(&call.address, epoch, &path, &error);
            None
        }
    }
}
