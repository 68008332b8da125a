//! Layer-wise saves through the bounce buffer: slices are written there as they are computed, and
//! copied into the blocks' slots before the next layer.
//!
//! The bounce buffer only passes slices on. A piece holds some slices of one layer, or some heads.
//! Its range is free again once the node has copied it, so a save of any size fits, and it occupies
//! no space between two layers. The order is that of the network paths (`crate::layered`): a layer
//! of all wanted blocks, then the next, then their heads. No slice and no head is split. Not here:
//! packets and ranges (`link.rs`, `connection.rs`), and whole frames (`path.rs`, `serving.rs`).

use bytes::Bytes;
use kvfleet_proto::frame::{SliceLayout, VolatileBytes};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::link::{Reply, ShmOperation};
use super::mapping::ShmBounceFrame;
use super::packet::{BounceRange, NodePacket};
use super::path::ShmPath;
use super::save_guard::GuardedSession;
use super::serving::{OperationContext, SavePart, ShmServeError};
use super::{BLOCKS_PER_OPERATION_MAX, BOUNCE_ALIGN_BYTES};
use crate::layered::{LayerWait, NextLayer, next_layer};
use crate::{LayerSource, LayeredSaveOutcome, PathError, SaveOffer, SaveRequest, wire};

/// Bytes of one piece if slices are shorter: some ten microseconds of copying, so that both ends
/// work at once.
const PIECE_BYTES: usize = 128 << 10;

/// Maximum unread pieces of one save: further ones would be answered while the client does not
/// read.
const PIECES_IN_FLIGHT_MAX: usize = 64;

/// Copied bytes after which a shared thread yields: about ten microseconds.
const YIELD_BYTES: usize = 256 << 10;

impl ShmPath {
    /// Saves blocks while they are computed. On `Streamed::Nothing` the caller saves the whole
    /// frames.
    pub(super) async fn save_by_layer(
        &self,
        request: SaveRequest,
        layers: &mut dyn LayerSource,
    ) -> Result<LayeredSaveOutcome, PathError> {
        let blocks = request.hashes.len();
        if blocks > BLOCKS_PER_OPERATION_MAX {
            return Ok(LayeredSaveOutcome::NotStreamed);
        }
        let asking = match self.link.begin(0, wire::save_layers_to_pb(&request, layers.slice_bytes())) {
            Ok(asking) => asking,
            // The slice lengths make the request too large; a save of frames may fit.
            Err(PathError::TooLarge { .. }) => return Ok(LayeredSaveOutcome::NotStreamed),
            Err(error) => return Err(error),
        };
        let offer = match self.within_stall_timeout(asking.next()).await? {
            Reply::Offer(offer) => offer,
            other => return Err(self.unexpected(&other)),
        };
        let is_by_layer = offer.is_by_layer;
        let SaveOffer::Wanted(wanted) =
            wire::offer_from_pb(&offer, blocks).map_err(|error| self.malformed(&error))?
        else {
            // The node may accept once the whole frames are available.
            asking.finish();
            return Ok(LayeredSaveOutcome::NotStreamed);
        };
        if !wanted.contains(&true) {
            return self.finish_save(asking).await.map(LayeredSaveOutcome::Answered);
        }
        if is_by_layer {
            return self.send_layers(asking, &wanted, layers).await;
        }
        // Frees the slot for others. Only a node that supports layers accepts an end before the
        // first frame; other errors are reported to the next operation.
        asking.finish_puts();
        match self.within_stall_timeout(asking.next()).await {
            Ok(Reply::Done(_)) => asking.finish(),
            Ok(Reply::Ended) => {
                asking.finish();
                self.saves_frames.mark_unsupported();
            }
            _ => return Ok(LayeredSaveOutcome::Abandoned),
        }
        Ok(LayeredSaveOutcome::NotStreamed)
    }

    /// Bytes of the bounce buffer for the pieces of all layer-wise saves: half of it, so that a
    /// whole frame always fits into the other half. No slice is longer, because two frames fit into
    /// the buffer.
    fn streaming_bytes(&self) -> u64 {
        self.bounce_in_bytes.div_ceil(2).next_multiple_of(BOUNCE_ALIGN_BYTES).min(self.bounce_in_bytes)
    }

    /// Maximum unread pieces of a save with these slices: a quarter of the bounce buffer, so that
    /// other saves find space. At least two, so that one is written while one is read, if there is
    /// space.
    fn pieces_in_flight_max(&self, layers: &dyn LayerSource) -> usize {
        let longest = layers.slice_bytes().iter().copied().max().unwrap_or(0) as usize;
        let quarter = usize::try_from(self.bounce_in_bytes / 4).unwrap_or(usize::MAX);
        (quarter / longest.max(PIECE_BYTES)).clamp(2, PIECES_IN_FLIGHT_MAX)
    }

    async fn send_layers(
        &self,
        asking: ShmOperation,
        wanted: &[bool],
        layers: &mut dyn LayerSource,
    ) -> Result<LayeredSaveOutcome, PathError> {
        let mut patience = LayerWait::new(self.link.peer(), self.stall_timeout);
        let at_once = self.pieces_in_flight_max(layers);
        let mut turn = CopyBudget::default();
        for layer in 0.. {
            let slices = match self.next_layer(&asking, layers, layer, wanted.len(), &patience).await? {
                NextLayer::Layer(slices) => slices,
                NextLayer::End => break,
                NextLayer::Slow => return Ok(LayeredSaveOutcome::Abandoned),
            };
            for piece in group_pieces(slices, wanted) {
                if patience.is_expired() {
                    return Ok(LayeredSaveOutcome::Abandoned);
                }
                layers.sent(self.put_piece(&asking, &piece, at_once, &mut turn).await?);
                patience.record_progress();
            }
        }
        let head = |(position, wanted): (usize, &bool)| {
            if *wanted { layers.head(position) } else { Bytes::new() }
        };
        let heads = wanted.iter().enumerate().map(head).collect();
        for piece in group_pieces(heads, wanted) {
            layers.sent(self.put_piece(&asking, &piece, at_once, &mut turn).await?);
        }
        self.finish_save(asking).await.map(LayeredSaveOutcome::Answered)
    }

    /// The next layer. Ranges of earlier pieces are freed meanwhile, because others need them.
    async fn next_layer(
        &self,
        asking: &ShmOperation,
        layers: &mut dyn LayerSource,
        layer: usize,
        blocks: usize,
        patience: &LayerWait<'_>,
    ) -> Result<NextLayer, PathError> {
        while asking.pending_puts() > 0 {
            tokio::select! {
                biased;
                handed = next_layer(layers, layer, blocks, patience) => return handed,
                reply = asking.next() => match reply? {
                    Reply::Taken => {}
                    other => return Err(self.unexpected(&other)),
                },
            }
        }
        next_layer(layers, layer, blocks, patience).await
    }

    /// Writes one piece once few enough are unread; returns its bytes.
    async fn put_piece(
        &self,
        asking: &ShmOperation,
        piece: &[Bytes],
        at_once: usize,
        turn: &mut CopyBudget,
    ) -> Result<usize, PathError> {
        let bytes = piece.iter().map(Bytes::len).sum();
        let put = async {
            while asking.pending_puts() >= at_once {
                match asking.next().await? {
                    Reply::Taken => {}
                    other => return Err(self.unexpected(&other)),
                }
            }
            turn.charge(bytes).await;
            self.put_when_free(asking, piece, self.streaming_bytes()).await
        };
        self.within_stall_timeout(put).await?;
        Ok(bytes)
    }
}

/// Bytes copied since the last yield of a thread. A copy never waits, and neither does an operation
/// that is answered at once, so a whole layer would otherwise run without a yield.
#[derive(Default)]
pub(super) struct CopyBudget {
    bytes: usize,
}

impl CopyBudget {
    /// Call before a copy of `bytes` bytes: yields first if the copies before used up the budget.
    pub(super) async fn charge(&mut self, bytes: usize) {
        if self.bytes >= YIELD_BYTES {
            self.bytes = 0;
            tokio::task::yield_now().await;
        }
        self.bytes += bytes;
    }
}

/// Groups the wanted parts into pieces of at most `PIECE_BYTES` each. Empty parts are skipped.
fn group_pieces(whole: Vec<Bytes>, wanted: &[bool]) -> Vec<Vec<Bytes>> {
    let (mut pieces, mut bytes) = (Vec::<Vec<Bytes>>::new(), 0);
    let whole = whole.into_iter().zip(wanted).filter(|(part, wanted)| **wanted && !part.is_empty());
    for (part, _) in whole {
        bytes += part.len();
        match pieces.last_mut() {
            Some(piece) if bytes <= PIECE_BYTES => piece.push(part),
            _ => {
                bytes = part.len();
                pieces.push(vec![part]);
            }
        }
    }
    pieces
}

/// A save at the node that may arrive by layer.
pub(super) struct LayeredSave {
    pub(super) op: u64,
    pub(super) wanted: Vec<bool>,
    pub(super) layout: SliceLayout,
    pub(super) parts: mpsc::Receiver<SavePart>,
    /// Maximum length of a frame, in bytes.
    pub(super) len_max: u64,
}

impl LayeredSave {
    /// Receives the save to its end on the bulk runtime. If dropped midway, it ends there as well.
    pub(super) async fn receive(
        self,
        serving: &OperationContext,
        saving: GuardedSession,
    ) -> Result<GuardedSession, ShmServeError> {
        serving.run_on_bulk(self.receive_inline(serving.clone(), saving)).await?
    }

    /// Offers to receive slices if the session has a buffer for them, and frames otherwise.
    async fn receive_inline(
        self,
        serving: OperationContext,
        mut saving: GuardedSession,
    ) -> Result<GuardedSession, ShmServeError> {
        let LayeredSave { op, wanted, layout, parts, len_max } = self;
        let blocks = wanted.iter().filter(|wanted| **wanted).count();
        let fits = blocks > 0 && layout.frame_bytes() as u64 <= len_max;
        let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(wanted.clone()));
        let Some(room) = fits.then(|| saving.session.layer_buffers(&layout)).flatten() else {
            serving.grants.post(&NodePacket::Offer { op, offer });
            return serving.receive_wanted(op, saving, &wanted, parts, len_max, true).await;
        };
        offer.is_by_layer = true;
        serving.grants.post(&NodePacket::Offer { op, offer });
        let mut pieces = PieceReader { context: serving, op, parts, piece: None };
        let mut turn = CopyBudget::default();
        for (layer, slice_bytes) in layout.slice_bytes().iter().enumerate() {
            for position in 0..blocks {
                turn.charge(*slice_bytes as usize).await;
                pieces.read(room.slice(position, layer).ok_or(ShmServeError::NoSliceBuffer)?).await?;
                room.slice_written(position);
                // Slices may be short, and a million of them can arrive without a wait.
                tokio::task::consume_budget().await;
            }
        }
        for _ in 0..blocks {
            let mut head = vec![0; layout.head_bytes()];
            pieces.read(&mut head).await?;
            room.put_head(head.into()).await;
        }
        pieces.expect_end(blocks).await?;
        Ok(saving)
    }
}

/// Reads a client's pieces in order.
struct PieceReader {
    context: OperationContext,
    op: u64,
    parts: mpsc::Receiver<SavePart>,
    /// The current piece, and the bytes read from it.
    piece: Option<(ShmBounceFrame, usize)>,
}

impl PieceReader {
    /// Fills `to` with the next bytes, which must all be in one piece. A completely read piece is
    /// returned to the client.
    async fn read(&mut self, to: &mut [u8]) -> Result<(), ShmServeError> {
        if to.is_empty() {
            return Ok(());
        }
        let (piece, read) = match self.piece.take() {
            Some(piece) => piece,
            None => (self.next().await?, 0),
        };
        let left = piece.len_bytes() - read;
        if left < to.len() {
            return Err(ShmServeError::Piece { wanted: to.len(), left });
        }
        piece.copy(read, to);
        if left == to.len() {
            self.context.grants.post(&NodePacket::Taken { op: self.op, frames: 1 });
            // A client that writes without reading must not get endless replies.
            timeout(self.context.stall_timeout, self.context.grants.wait_backlog()).await?;
        } else {
            self.piece = Some((piece, read + to.len()));
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<ShmBounceFrame, ShmServeError> {
        match timeout(self.context.stall_timeout, self.parts.recv()).await? {
            // The connection lets only one range at a time pass.
            Some(SavePart::Put(places)) => {
                let place = places.first().copied().unwrap_or(BounceRange { at: 0, len: 0 });
                self.context.frame_at(place, u64::MAX)
            }
            Some(SavePart::Finish) | None => Err(ShmServeError::MissingPieces),
        }
    }

    /// Expects that no further piece follows.
    async fn expect_end(mut self, blocks: usize) -> Result<(), ShmServeError> {
        if self.piece.is_some() {
            return Err(ShmServeError::TooMany { wanted: blocks });
        }
        match timeout(self.context.stall_timeout, self.parts.recv()).await? {
            Some(SavePart::Finish) => Ok(()),
            Some(SavePart::Put(_)) => Err(ShmServeError::TooMany { wanted: blocks }),
            None => Err(ShmServeError::MissingPieces),
        }
    }
}
