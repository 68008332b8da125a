//! Saves by layer through the tray: slices are put there as they come, and are copied into the blocks' slots before the next layer.
//!
//! The tray is a way for them and no store: a piece, which has some slices of one layer or some heads, is its client's again when the
//! node has copied it, so that a save of any size goes through, and what it holds of the tray between two layers is nothing. The order is that of
//! the paths over a network (`crate::layered`): a layer of all wanted blocks, then the next, then their heads. No slice and no head
//! is cut in two. Not here: packets and places (`link.rs`, `connection.rs`), and whole frames (`path.rs`, `serving.rs`).

use bytes::Bytes;
use kvfleet_proto::frame::{SliceLayout, Unsettled};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::held::Saving;
use super::link::{Asking, Reply};
use super::map::TrayFrame;
use super::packet::{ToClient, TrayPlace};
use super::path::ShmPath;
use super::serving::{SavePart, ServeError, Serving};
use super::{BLOCKS_PER_ASK_MAX, PLACE_ALIGN};
use crate::layered::{Handed, Patience, next_layer};
use crate::{LayerSource, PathError, SaveOffer, SaveRequest, Streamed, wire};

/// Bytes of one piece where slices are shorter: some ten microseconds of copying, so that both ends work at once.
const PIECE_BYTES: usize = 128 << 10;

/// Pieces of one save that a node may have to read: many more would be answered while the client does not read.
const PIECES_AT_ONCE_MAX: usize = 64;

/// Copies of so many bytes are a turn of a thread that serves others too: some ten microseconds.
const TURN_BYTES: usize = 256 << 10;

impl ShmPath {
    /// Saves blocks that are being computed. Where that is not to be, the whole frames are the caller's to save.
    pub(super) async fn save_by_layer(
        &self,
        request: SaveRequest,
        layers: &mut dyn LayerSource,
    ) -> Result<Streamed, PathError> {
        let blocks = request.hashes.len();
        if blocks > BLOCKS_PER_ASK_MAX {
            return Ok(Streamed::Nothing);
        }
        let asking = match self.link.begin(0, wire::save_layers_to_pb(&request, layers.slice_bytes())) {
            Ok(asking) => asking,
            // What no node would take may do without the lengths.
            Err(PathError::TooLarge { .. }) => return Ok(Streamed::Nothing),
            Err(error) => return Err(error),
        };
        let offer = match self.timed(asking.next()).await? {
            Reply::Offer(offer) => offer,
            other => return Err(self.unexpected(&other)),
        };
        let is_by_layer = offer.is_by_layer;
        let SaveOffer::Wanted(wanted) =
            wire::offer_from_pb(&offer, blocks).map_err(|error| self.protocol(&error))?
        else {
            // Who was busy or refused may not be when all is there.
            asking.finish();
            return Ok(Streamed::Nothing);
        };
        if !wanted.contains(&true) {
            return self.done(asking).await.map(Streamed::Answered);
        }
        if is_by_layer {
            return self.send_layers(asking, &wanted, layers).await;
        }
        // Leaves its place to others. Only a node that knows of layers answers an end before the first frame; what else is wrong is
        // heard of by whoever asks next.
        asking.end_puts();
        match self.timed(asking.next()).await {
            Ok(Reply::Done(_)) => asking.finish(),
            Ok(Reply::Ended) => {
                asking.finish();
                self.saves_frames.seems();
            }
            _ => return Ok(Streamed::Left),
        }
        Ok(Streamed::Nothing)
    }

    /// Bytes of the tray in which the pieces of all saves are: a half, so that a whole frame finds its place in the other one, however
    /// many stream. No slice is longer, since two frames fit into the tray.
    fn streaming_bytes(&self) -> u64 {
        self.tray_in_bytes.div_ceil(2).next_multiple_of(PLACE_ALIGN).min(self.tray_in_bytes)
    }

    /// Pieces of a save that the node may have to read, which have these slices: a quarter of the tray, so that others find their places
    /// there. Two at least, so that one is written while one is read, where others leave room for that.
    fn pieces_at_once(&self, layers: &dyn LayerSource) -> usize {
        let longest = layers.slice_bytes().iter().copied().max().unwrap_or(0) as usize;
        let quarter = usize::try_from(self.tray_in_bytes / 4).unwrap_or(usize::MAX);
        (quarter / longest.max(PIECE_BYTES)).clamp(2, PIECES_AT_ONCE_MAX)
    }

    async fn send_layers(
        &self,
        asking: Asking,
        wanted: &[bool],
        layers: &mut dyn LayerSource,
    ) -> Result<Streamed, PathError> {
        let mut patience = Patience::new(self.link.peer(), self.stall_timeout);
        let at_once = self.pieces_at_once(layers);
        let mut turn = Turn::default();
        for layer in 0.. {
            let slices = match self.next_layer(&asking, layers, (layer, wanted.len()), &patience).await? {
                Handed::Layer(slices) => slices,
                Handed::End => break,
                Handed::Slow => return Ok(Streamed::Left),
            };
            for piece in pieces(slices, wanted) {
                if patience.is_over() {
                    return Ok(Streamed::Left);
                }
                layers.sent(self.put_piece(&asking, &piece, (at_once, &mut turn)).await?);
                patience.heard();
            }
        }
        let head = |(position, wanted): (usize, &bool)| {
            if *wanted { layers.head(position) } else { Bytes::new() }
        };
        let heads = wanted.iter().enumerate().map(head).collect();
        for piece in pieces(heads, wanted) {
            layers.sent(self.put_piece(&asking, &piece, (at_once, &mut turn)).await?);
        }
        self.done(asking).await.map(Streamed::Answered)
    }

    /// The next layer. Meanwhile the places of what was put before come back: others need them.
    async fn next_layer(
        &self,
        asking: &Asking,
        layers: &mut dyn LayerSource,
        at: (usize, usize),
        patience: &Patience<'_>,
    ) -> Result<Handed, PathError> {
        while asking.puts() > 0 {
            tokio::select! {
                biased;
                handed = next_layer(layers, at, patience) => return handed,
                reply = asking.next() => match reply? {
                    Reply::Taken => {}
                    other => return Err(self.unexpected(&other)),
                },
            }
        }
        next_layer(layers, at, patience).await
    }

    /// Puts one piece once so few others are there: how many bytes it has.
    async fn put_piece(
        &self,
        asking: &Asking,
        piece: &[Bytes],
        (at_once, turn): (usize, &mut Turn),
    ) -> Result<usize, PathError> {
        let bytes = piece.iter().map(Bytes::len).sum();
        let put = async {
            while asking.puts() >= at_once {
                match asking.next().await? {
                    Reply::Taken => {}
                    other => return Err(self.unexpected(&other)),
                }
            }
            turn.before(bytes).await;
            self.put(asking, piece, self.streaming_bytes()).await
        };
        self.timed(put).await?;
        Ok(bytes)
    }
}

/// How much was copied in one turn of a thread. A copy waits for nothing, and neither does who is answered at once: without turns a
/// whole layer would be one.
#[derive(Default)]
pub(super) struct Turn {
    bytes: usize,
}

impl Turn {
    /// Before a copy of so many bytes: others have their turn if those before were enough for one.
    pub(super) async fn before(&mut self, bytes: usize) {
        if self.bytes >= TURN_BYTES {
            self.bytes = 0;
            tokio::task::yield_now().await;
        }
        self.bytes += bytes;
    }
}

/// What is wanted of these, as many in one piece as fit. Empty ones are nowhere.
fn pieces(whole: Vec<Bytes>, wanted: &[bool]) -> Vec<Vec<Bytes>> {
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

/// A save of these blocks that may come by layer, on the node.
pub(super) struct Layered {
    pub(super) op: u64,
    pub(super) wanted: Vec<bool>,
    pub(super) layout: SliceLayout,
    pub(super) parts: mpsc::Receiver<SavePart>,
    /// No frame is longer, in bytes.
    pub(super) len_max: u64,
}

impl Layered {
    /// Takes it up to its end, where copies are long. Dropped midway, it ends there as well.
    pub(super) async fn take(self, serving: &Serving, saving: Saving) -> Result<Saving, ServeError> {
        serving.aside(self.take_here(serving.clone(), saving)).await?
    }

    /// Offers to take slices where there is room for them, and frames elsewhere.
    async fn take_here(self, serving: Serving, mut saving: Saving) -> Result<Saving, ServeError> {
        let Layered { op, wanted, layout, parts, len_max } = self;
        let blocks = wanted.iter().filter(|wanted| **wanted).count();
        let fits = blocks > 0 && layout.frame_bytes() as u64 <= len_max;
        let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(wanted.clone()));
        let Some(room) = fits.then(|| saving.session.layers(&layout)).flatten() else {
            serving.lending.post(&ToClient::Offer { op, offer });
            return serving.take_coming(op, saving, &wanted, parts, (len_max, true)).await;
        };
        offer.is_by_layer = true;
        serving.lending.post(&ToClient::Offer { op, offer });
        let mut pieces = Pieces { serving, op, parts, piece: None };
        let mut turn = Turn::default();
        for (layer, slice_bytes) in layout.slice_bytes().iter().enumerate() {
            for position in 0..blocks {
                turn.before(*slice_bytes as usize).await;
                pieces.read(room.slice(position, layer).ok_or(ServeError::NoRoom)?).await?;
                room.came(position);
                // Slices may be short, and a million of them are there without a wait.
                tokio::task::consume_budget().await;
            }
        }
        for _ in 0..blocks {
            let mut head = vec![0; layout.head_bytes()];
            pieces.read(&mut head).await?;
            room.put_head(head.into()).await;
        }
        pieces.end(blocks).await?;
        Ok(saving)
    }
}

/// What a client puts into the tray, in its order.
struct Pieces {
    serving: Serving,
    op: u64,
    parts: mpsc::Receiver<SavePart>,
    /// The one that is read, and how far, in bytes.
    piece: Option<(TrayFrame, usize)>,
}

impl Pieces {
    /// Fills `to` with the next bytes, which are all in one piece. A piece that was read to its end is the client's again.
    async fn read(&mut self, to: &mut [u8]) -> Result<(), ServeError> {
        if to.is_empty() {
            return Ok(());
        }
        let (piece, read) = match self.piece.take() {
            Some(piece) => piece,
            None => (self.next().await?, 0),
        };
        let left = piece.len_bytes() - read;
        if left < to.len() {
            return Err(ServeError::Piece { wanted: to.len(), left });
        }
        piece.copy(read, to);
        if left == to.len() {
            self.serving.lending.post(&ToClient::Taken { op: self.op, frames: 1 });
            // A client that puts and does not read is not answered without an end.
            timeout(self.serving.stall_timeout, self.serving.lending.may_post()).await?;
        } else {
            self.piece = Some((piece, read + to.len()));
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<TrayFrame, ServeError> {
        match timeout(self.serving.stall_timeout, self.parts.recv()).await? {
            // The connection lets one at a time pass.
            Some(SavePart::Put(places)) => {
                let place = places.first().copied().unwrap_or(TrayPlace { at: 0, len: 0 });
                self.serving.there(place, u64::MAX)
            }
            Some(SavePart::Finish) | None => Err(ServeError::PiecesCut),
        }
    }

    /// Hears that nothing follows.
    async fn end(mut self, blocks: usize) -> Result<(), ServeError> {
        if self.piece.is_some() {
            return Err(ServeError::TooMany { wanted: blocks });
        }
        match timeout(self.serving.stall_timeout, self.parts.recv()).await? {
            Some(SavePart::Finish) => Ok(()),
            Some(SavePart::Put(_)) => Err(ServeError::TooMany { wanted: blocks }),
            None => Err(ServeError::PiecesCut),
        }
    }
}
