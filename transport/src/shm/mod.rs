//! The path within one host: the client maps a node's memory and reads it in place.
//!
//! A socket carries packets (`shm/packet.rs`) and file descriptors of memory. A client reads
//! fetched blocks in the node's arena, under the rules of `kv_core::lend`. Blocks that may not be
//! read in place, and all saves, are copied through a bounce buffer: memory of one connection that
//! both ends write. The service decides which clients may map the arena
//! ([`crate::BlockService::admit`]), because a mapping shows the bytes of every tenant. This file
//! holds the constants of both ends. The node's end is `shm/server.rs`, `shm/connection.rs`,
//! `shm/serving.rs` and `shm/grants.rs`; the client's is `shm/dialer.rs`, `shm/path.rs` and
//! `shm/link.rs`. Both ends of a layer-wise save are in `shm/layered_save.rs`. Not here: the choice
//! of a path, and the arena itself (`node/`).

use std::path::{Path, PathBuf};
use std::time::Duration;

mod adaptive_toggle;
mod connection;
mod cpu_migration;
mod dialer;
mod grants;
mod layered_save;
mod link;
pub(crate) mod mapping;
mod packet;
mod path;
mod save_guard;
mod seqpacket;
mod server;
mod serving;
mod spin_wait;
#[cfg(test)]
pub(crate) mod tests;

pub use dialer::{ShmConfig, ShmDialer};
pub use mapping::MapError;
pub use server::{OldestGrant, ShmBindError, ShmRuntimes, ShmServer, ShmServerConfig, ShmStats};

/// Longest packet in bytes. The default socket buffer holds three of them.
pub const PACKET_BYTES_MAX: usize = 64 << 10;

/// Maximum blocks of one operation. The client splits longer requests.
pub const BLOCKS_PER_OPERATION_MAX: usize = packet::ROWS_MAX;

/// Maximum connections of a node: one for each client process of its host.
pub const CONNECTIONS_MAX: usize = 32;

/// Maximum connections of one process, if the kernel identifies it.
pub const CONNECTIONS_PER_PROCESS_MAX: usize = CONNECTIONS_MAX / 2;

/// Maximum concurrent operations of one connection; further ones are answered `Busy`. Releases and
/// pings always pass.
pub const OPERATIONS_MAX: usize = 64;

/// Maximum grants of one connection: a million tokens in blocks of 16.
pub const GRANTS_MAX: usize = 1 << 16;

/// Maximum grants over all connections of a node, not counting copies. Each costs the node about a
/// hundred bytes.
pub const GRANTS_TOTAL_MAX: usize = 1 << 17;

/// Maximum leases in use by one connection; all connections together use half of the node's leases.
pub const LEASES_MAX: usize = 1024;

/// Maximum concurrent saves of one connection.
pub const SAVES_MAX: usize = 16;

/// When a refused client should retry: about the duration of one operation.
pub const RETRY_AFTER: Duration = Duration::from_millis(5);

/// Limits in blocks and bytes of an eager save, which sends its frames with the offer. Unwanted
/// frames are written in vain, which costs a few times as long as asking first.
const EAGER_BLOCKS_MAX: usize = 64;
const EAGER_BYTES_MAX: u64 = 2 << 20;

/// How long to spin for the other end: about the cost of two wake-ups, so that a failed spin at
/// most doubles the cost.
pub const SPIN_WAIT: Duration = Duration::from_micros(50);

/// Smallest part of a bounce buffer, in bytes: several blocks of a common size, so that one is
/// written while one is read.
const BOUNCE_PART_BYTES_MIN: u64 = 4 << 20;

/// Ranges in bounce buffers begin at cache lines.
const BOUNCE_ALIGN_BYTES: u64 = 64;

/// Socket path of the node that serves others at `address`, in the directory that the host shares.
#[must_use]
pub fn socket_path(dir: &Path, address: &str) -> PathBuf {
    dir.join(format!("{}.sock", address.replace([':', '/'], "_")))
}

/// Bytes of one connection's bounce buffer for frames of at most `frame_bytes_max`.
#[must_use]
pub fn bounce_bytes(frame_bytes_max: u32) -> u64 {
    2 * bounce_part_bytes(frame_bytes_max)
}

/// Bytes of each part of a bounce buffer.
fn bounce_part_bytes(frame_bytes_max: u32) -> u64 {
    (2 * u64::from(frame_bytes_max)).max(BOUNCE_PART_BYTES_MIN).next_multiple_of(4096)
}
