//! Layer-wise saves: the slices of one layer of all wanted blocks before the next layer, then the
//! frame headers.
//!
//! [`LayerSource`] is the saver, which knows a frame's header only after the last layer.
//! [`LayerBuffers`] is the node's memory; its content becomes a block only when the header arrives
//! and matches. A stream carries no separators between slices: both sides know the wanted blocks
//! and the slice lengths. Not here: the request and the offer (`client_ops.rs`, `serve.rs`), and whole frames.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::frame::SliceLayout;
use tokio::time::{Instant, timeout_at};

use crate::serve::TIMES;
use crate::stream::{ItemError, Source};
use crate::{BoxFuture, PathError};

/// Most slices of one layer-wise save. The node keeps their checksums, 4 MiB, until the headers
/// come.
pub(crate) const SLICES_AT_ONCE_MAX: usize = 1 << 20;

/// Blocks that are being computed, layer by layer.
pub trait LayerSource: Send + Sync {
    /// Length of each layer's slice in bytes, the same for every block.
    fn slice_bytes(&self) -> &[u32];

    /// Waits for the next layer: one slice for each block of the save, in order. `None` after the
    /// last layer. Never returns if the computation is abandoned; the caller then drops the
    /// operation. Cancel safe.
    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>>;

    /// Header of the frame at this position. Called after all layers.
    fn head(&self, position: usize) -> Bytes;

    /// Counts encoded bytes sent, as slices or headers.
    fn sent(&mut self, _bytes: usize) {}
}

/// For how long a node that seems not to support layers is sent frames only. Every failed attempt
/// costs an offer.
pub(crate) const LAYERS_RETRY_AFTER: Duration = Duration::from_secs(300);

/// When a node last seemed not to support layer-wise saves. This expires, because a failing
/// connection looks the same.
#[derive(Debug, Default)]
pub(crate) struct LayerSupport(Mutex<Option<Instant>>);

impl LayerSupport {
    /// Records that a layer-wise save ended as at a node without support.
    pub(crate) fn mark_unsupported(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn is_unsupported(&self) -> bool {
        let seen = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|seen| seen.elapsed() < LAYERS_RETRY_AFTER)
    }
}

/// A node's memory for the wanted blocks of one save, taken all at once. Positions count from the
/// first wanted block. A block without its header is discarded.
pub trait LayerBuffers: Send {
    /// Memory for a slice. The layers come in order.
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]>;

    /// Records that the next slice of this block is in its memory.
    fn slice_written(&mut self, position: usize);

    /// Takes the header of the next wanted block, after all its slices. A bad header also uses up
    /// that block's position.
    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()>;
}

/// Longest time for streaming slices, well below a node's limit for a save. The rest covers a layer
/// in transit, the headers, and the node's earlier start of its clock.
const STREAM_TIME_MAX: Duration = TIMES.save_max.saturating_sub(Duration::from_secs(30));

/// The error for slices that differ from the announced lengths.
fn mismatched_slices(peer: &str) -> PathError {
    let cause = "aborted here: the computed slices differ from the announced lengths".to_owned();
    PathError::Broken { peer: peer.to_owned(), cause }
}

/// The saver's next layer.
pub(crate) enum NextLayer {
    /// One slice of each block.
    Layer(Vec<Bytes>),
    /// All layers were sent.
    End,
    /// The computation is too slow: the node would time out. This says no more about the path.
    Slow,
}

/// How long the node still waits for the next bytes and for the whole save.
pub(crate) struct LayerWait<'p> {
    peer: &'p str,
    stall_timeout: Duration,
    begun: Instant,
    /// When bytes were last sent.
    last_progress: Instant,
}

impl LayerWait<'_> {
    /// For a node with this stall timeout, starting now.
    pub(crate) fn new(peer: &str, stall_timeout: Duration) -> LayerWait<'_> {
        let begun = Instant::now();
        LayerWait { peer, stall_timeout, begun, last_progress: begun }
    }

    /// Records that bytes were sent. A layer of empty slices sends none.
    pub(crate) fn record_progress(&mut self) {
        self.last_progress = Instant::now();
    }

    /// Whether the whole save has exceeded its time.
    pub(crate) fn is_expired(&self) -> bool {
        self.begun.elapsed() >= STREAM_TIME_MAX
    }

    /// Until when to wait for the next layer: well before the node's stall timeout.
    fn deadline(&self) -> Instant {
        (self.last_progress + self.stall_timeout / 2).min(self.begun + STREAM_TIME_MAX)
    }
}

/// The next layer's slices, one per block, or the end after the last.
pub(crate) async fn next_layer(
    source: &mut dyn LayerSource,
    layer: usize,
    blocks: usize,
    patience: &LayerWait<'_>,
) -> Result<NextLayer, PathError> {
    if patience.is_expired() {
        return Ok(NextLayer::Slow);
    }
    let Ok(next) = timeout_at(patience.deadline(), source.next()).await else { return Ok(NextLayer::Slow) };
    match (next, source.slice_bytes().get(layer)) {
        (None, None) => Ok(NextLayer::End),
        (Some(slices), Some(&bytes))
            if slices.len() == blocks && slices.iter().all(|slice| slice.len() == bytes as usize) =>
        {
            Ok(NextLayer::Layer(slices))
        }
        _ => Err(mismatched_slices(patience.peer)),
    }
}

/// Reads one slice into the node's memory. `behind` is the number of bytes that follow in its
/// layer. `Ok(None)` if there is no memory for it.
pub(crate) async fn read_slice(
    source: &mut impl Source,
    room: &mut dyn LayerBuffers,
    position: usize,
    layer: usize,
    behind: usize,
) -> Result<Option<usize>, ItemError> {
    let Some(slice) = room.slice(position, layer) else { return Ok(None) };
    let bytes = slice.len();
    if bytes > 0 && !source.read_into(slice, behind).await? {
        return Err(ItemError::Truncated);
    }
    room.slice_written(position);
    Ok(Some(bytes))
}

/// Reads a frame header of this layout, without checking it.
pub(crate) async fn read_head(
    source: &mut impl Source,
    layout: &SliceLayout,
    behind: usize,
) -> Result<Bytes, ItemError> {
    let mut head = vec![0; layout.head_bytes()];
    if source.read_into(&mut head, behind).await? { Ok(head.into()) } else { Err(ItemError::Truncated) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::time::sleep;

    use super::*;

    /// Layers with a fixed computing time each.
    struct SlowSource(Duration, [u32; 100]);

    impl LayerSource for SlowSource {
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

    /// How long such a computation streams to a node with a stall timeout of ten seconds.
    async fn streaming_time(layer: Duration) -> Duration {
        let (mut source, stall_timeout) = (SlowSource(layer, [5; 100]), Duration::from_secs(10));
        let begun = Instant::now();
        let mut patience = LayerWait::new("a node", stall_timeout);
        for layer in 0.. {
            match next_layer(&mut source, layer, 1, &patience).await.unwrap() {
                NextLayer::Layer(_) => patience.record_progress(),
                NextLayer::Slow => break,
                NextLayer::End => panic!("the source ended early"),
            }
        }
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_save_is_abandoned_before_the_node_times_out() {
        assert_eq!(
            streaming_time(Duration::from_secs(6)).await,
            Duration::from_secs(5),
            "a late layer was not detected"
        );
        // Each layer is in time, but together they exceed the node's limit.
        let took = streaming_time(Duration::from_secs(4)).await;
        assert!(took * 100 > TIMES.save_max * 85 && took <= STREAM_TIME_MAX, "{took:?}");
        assert!(
            took + 2 * Duration::from_secs(10) < TIMES.save_max,
            "no time is left for the layer in transit"
        );
    }
}
