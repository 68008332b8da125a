//! Saves whose slices leave as they are computed: a layer of all wanted blocks before the next, then the heads of their frames.
//!
//! [`LayerSource`] is the saver, who knows the head of a frame only behind its last layer; [`LayerRoom`] is the node's memory, in
//! which nothing is a block before its head came and proved it. On a stream there is nothing between slices: both ends know who is
//! wanted and how long each slice is. Not here: what is asked and answered before (`ask.rs`, `serve.rs`), and whole frames.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::frame::SliceLayout;
use tokio::time::{Instant, timeout_at};

use crate::serve::TIMES;
use crate::stream::{ItemError, Source};
use crate::{BoxFuture, PathError};

/// Slices of all blocks of a save that comes by layer, and their sums, which a node keeps until the heads come: 4 MiB of sums.
pub(crate) const SLICES_AT_ONCE_MAX: usize = 1 << 20;

/// Blocks that are being computed, layer by layer.
pub trait LayerSource: Send + Sync {
    /// Length of each layer's slice in bytes, which is that of every block.
    fn slice_bytes(&self) -> &[u32];

    /// Waits for the next layer: a slice of each block of the save, in its order. Nothing behind the last one, once no more is
    /// to come. Never returns when the blocks are not computed to their end: whoever gives up drops the operation. Loses
    /// nothing when the future is dropped.
    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>>;

    /// The header of the frame of the block at this position. Asked when all layers came.
    fn head(&self, position: usize) -> Bytes;

    /// So many encoded bytes went, as slices or heads.
    fn sent(&mut self, _bytes: usize) {}
}

/// How long a node that seems to know of frames only is not asked for layers: each time costs a save an offer.
pub(crate) const FRAMES_ONLY: Duration = Duration::from_secs(300);

/// Whether a node seems to know of frames only. Not for ever: a connection that broke at that moment looks the same.
#[derive(Debug, Default)]
pub(crate) struct FramesOnly(Mutex<Option<Instant>>);

impl FramesOnly {
    /// It ended a save by layer as those do that know of none.
    pub(crate) fn seems(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn is_so(&self) -> bool {
        let seen = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|seen| seen.elapsed() < FRAMES_ONLY)
    }
}

/// A node's memory for the wanted blocks of one save, all of it taken at once. Positions count from the first wanted block. What is
/// dropped before its head came was nothing.
pub trait LayerRoom: Send {
    /// Memory for a slice, whose layers come in order.
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]>;

    /// A slice is in its memory.
    fn came(&mut self, position: usize);

    /// The head of the next wanted block, all of whose slices came: uses up its turn whatever it is.
    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()>;
}

/// For so long a save may go on as it comes, well within what a node bounds a save by in all: what is left then is a layer under way,
/// the heads, and a node that began to count when it was asked.
const STREAM_TIME_MAX: Duration = TIMES.save_max.saturating_sub(Duration::from_secs(30));

/// What a saver hands over is not what it announced.
fn other_slices(peer: &str) -> PathError {
    let cause =
        "given up here: the layers that were handed over are not those that were announced".to_owned();
    PathError::Broken { peer: peer.to_owned(), cause }
}

/// What a saver hands over next.
pub(crate) enum Handed {
    /// A slice of each block.
    Layer(Vec<Bytes>),
    /// The last layer came before.
    End,
    /// Nothing for so long, or all of it takes so long, that the node would end the operation. That is the computation's doing, and says
    /// nothing of the path.
    Slow,
}

/// For how long a node still awaits the next bytes, and the save.
pub(crate) struct Patience<'p> {
    peer: &'p str,
    stall_timeout: Duration,
    begun: Instant,
    /// When it had some.
    heard: Instant,
}

impl Patience<'_> {
    /// Of a node that waits for `stall_timeout` from now on.
    pub(crate) fn new(peer: &str, stall_timeout: Duration) -> Patience<'_> {
        let begun = Instant::now();
        Patience { peer, stall_timeout, begun, heard: begun }
    }

    /// Bytes went. Of a layer whose slices are empty it hears nothing.
    pub(crate) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// Whether the node would not wait for all of it any more, however fast the next bytes are.
    pub(crate) fn is_over(&self) -> bool {
        self.begun.elapsed() >= STREAM_TIME_MAX
    }

    /// Until when the next layer is waited for: well before the node stops.
    fn until(&self) -> Instant {
        (self.heard + self.stall_timeout / 2).min(self.begun + STREAM_TIME_MAX)
    }
}

/// The next layer's slices, one for each block, or the end behind the last.
pub(crate) async fn next_layer(
    source: &mut dyn LayerSource,
    (layer, blocks): (usize, usize),
    patience: &Patience<'_>,
) -> Result<Handed, PathError> {
    if patience.is_over() {
        return Ok(Handed::Slow);
    }
    let Ok(next) = timeout_at(patience.until(), source.next()).await else { return Ok(Handed::Slow) };
    match (next, source.slice_bytes().get(layer)) {
        (None, None) => Ok(Handed::End),
        (Some(slices), Some(&bytes))
            if slices.len() == blocks && slices.iter().all(|slice| slice.len() == bytes as usize) =>
        {
            Ok(Handed::Layer(slices))
        }
        _ => Err(other_slices(patience.peer)),
    }
}

/// Reads one slice into the node's memory. `behind` is how much follows in its layer, in bytes. `Ok(None)` when there is no
/// memory for it.
pub(crate) async fn read_slice(
    source: &mut impl Source,
    room: &mut dyn LayerRoom,
    (position, layer): (usize, usize),
    behind: usize,
) -> Result<Option<usize>, ItemError> {
    let Some(slice) = room.slice(position, layer) else { return Ok(None) };
    let bytes = slice.len();
    if bytes > 0 && !source.read_into(slice, behind).await? {
        return Err(ItemError::Cut);
    }
    room.came(position);
    Ok(Some(bytes))
}

/// Reads the head of a frame of this layout, whatever it says.
pub(crate) async fn read_head(
    source: &mut impl Source,
    layout: &SliceLayout,
    behind: usize,
) -> Result<Bytes, ItemError> {
    let mut head = vec![0; layout.head_bytes()];
    if source.read_into(&mut head, behind).await? { Ok(head.into()) } else { Err(ItemError::Cut) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::time::sleep;

    use super::*;

    /// Layers that take so long each.
    struct Slow(Duration, [u32; 100]);

    impl LayerSource for Slow {
        fn slice_bytes(&self) -> &[u32] {
            &self.1
        }

        fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
            Box::pin(async {
                sleep(self.0).await;
                Some(vec![Bytes::from_static(b"slice")])
            })
        }

        fn head(&self, _: usize) -> Bytes {
            Bytes::new()
        }
    }

    /// How long such a computation streams to a node that waits for ten seconds.
    async fn streamed(layer: Duration) -> Duration {
        let (mut source, stall_timeout) = (Slow(layer, [5; 100]), Duration::from_secs(10));
        let begun = Instant::now();
        let mut patience = Patience::new("a node", stall_timeout);
        for layer in 0.. {
            match next_layer(&mut source, (layer, 1), &patience).await.unwrap() {
                Handed::Layer(_) => patience.heard(),
                Handed::Slow => break,
                Handed::End => panic!("it has more layers"),
            }
        }
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_computation_is_left_before_the_node_ends_it() {
        assert_eq!(streamed(Duration::from_secs(6)).await, Duration::from_secs(5), "by a layer that is late");
        // Each is in time, and all of them take longer than a node lets a save take.
        let took = streamed(Duration::from_secs(4)).await;
        assert!(took * 100 > TIMES.save_max * 85 && took <= STREAM_TIME_MAX, "{took:?}");
        assert!(took + 2 * Duration::from_secs(10) < TIMES.save_max, "what is under way has its time");
    }
}
