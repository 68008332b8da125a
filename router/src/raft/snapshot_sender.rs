//! Sends a snapshot: its file as a stream of parts, read while the receiver takes them.
//!
//! Memory per stream: one chunk, the queued parts and the connection's buffers; the number of
//! streams is bounded per router. Every chunk is checked before it leaves, so that damage on this
//! router's disk is not blamed on the network. Not here: the call (`network.rs`), the receiver
//! (`service.rs`).

use std::sync::Arc;

use futures_util::Stream;
use kv_core::index::is_valid_chunk;
use kvfleet_proto::pb;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::network::Envelope;
use super::snapshot_file::{ChunkError, SnapshotFile};

/// Snapshots that a router sends at once, over all groups: two keep the network busy while one is
/// opened or installed.
pub(crate) const SENDING_MAX: usize = 2;

/// Bytes of one part: small enough not to delay heartbeats on the same connection.
pub(crate) const PART_BYTES: usize = 1 << 20;

/// Parts that wait for the connection.
const PARTS_WAITING_MAX: usize = 4;

/// The parts of a snapshot, head first. Damage of the file ends them early and is recorded in
/// `stored`.
pub(super) fn parts(
    envelope: &Envelope,
    head: Vec<u8>,
    stored: Arc<SnapshotFile>,
) -> impl Stream<Item = pb::SnapshotPart> + use<> {
    let (cluster, shards) = (envelope.cluster.name.clone(), envelope.cluster.shards.into());
    let (group, crc32c) = (envelope.group.into(), crc32c::crc32c(&head));
    let first = pb::SnapshotPart { group, head, data: Vec::new(), crc32c, cluster, shards };
    let (parts, waiting) = mpsc::channel(PARTS_WAITING_MAX);
    tokio::task::spawn_blocking(move || {
        if let Err(what) = read(&stored, group, &parts) {
            tracing::error!(group, %what, "a snapshot on this router cannot be sent; the disk may be failing");
        }
    });
    tokio_stream::once(first).chain(ReceiverStream::new(waiting))
}

/// Reads chunks until the receiver is gone.
fn read(stored: &SnapshotFile, group: u32, parts: &mpsc::Sender<pb::SnapshotPart>) -> Result<(), String> {
    for (number, chunk) in stored.chunks().enumerate() {
        let chunk = match chunk {
            Ok(chunk) if is_valid_chunk(&chunk) => chunk,
            Ok(_) => {
                stored.mark_damaged();
                return Err(format!("the checksum of chunk {number} on disk does not match"));
            }
            Err(ChunkError::Damaged(what)) => {
                stored.mark_damaged();
                return Err(what);
            }
            Err(ChunkError::Io(error)) => return Err(format!("it cannot be read: {error}")),
        };
        let length = (chunk.len() as u32).to_le_bytes();
        let mut data = Vec::with_capacity(PART_BYTES.min(chunk.len() + length.len()));
        data.extend_from_slice(&length);
        for piece in chunk.chunks(PART_BYTES - length.len()) {
            data.extend_from_slice(piece);
            let part =
                pb::SnapshotPart { group, data: std::mem::take(&mut data), ..pb::SnapshotPart::default() };
            if parts.blocking_send(part).is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}
