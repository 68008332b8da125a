//! The path within one host: a node's memory is mapped by the client and read in place.
//!
//! A socket carries packets (`shm/packet.rs`), descriptors of memory travel beside them. What a client fetches it reads where it
//! lies in the node's arena, under the rules of `kv_core::lend`; what may not be lent, and what is saved, is copied
//! through a tray, memory of one connection that both ends write. Who may map the arena is the service's to say
//! ([`crate::BlockService::admit`]); it sees the bytes of every tenant. This file holds what both ends share. The node's
//! end is `shm/server.rs`, `shm/connection.rs`, `shm/serving.rs` and `shm/lending.rs`; the client's is `shm/dialer.rs`,
//! `shm/path.rs` and `shm/link.rs`; both ends of a save that comes by layer are in `shm/layered.rs`.
//! Not here: which path a client takes, and the arena itself (`node/`).

use std::path::{Path, PathBuf};
use std::time::Duration;

mod aside;
mod awake;
mod connection;
mod dialer;
mod guess;
mod held;
mod layered;
mod lending;
mod link;
pub(crate) mod map;
mod packet;
mod path;
mod seqpacket;
mod server;
mod serving;
#[cfg(test)]
pub(crate) mod tests;

pub use dialer::{ShmConfig, ShmDialer};
pub use map::MapRefused;
pub use server::{OldestLoan, ShmBindError, ShmEnds, ShmNumbers, ShmServer, ShmServerConfig};

/// Longest packet: what a socket takes at once by default holds three of them.
pub const PACKET_BYTES_MAX: usize = 64 << 10;

/// Blocks of one operation. Longer requests are cut by the client.
pub const BLOCKS_PER_ASK_MAX: usize = packet::ROWS_MAX;

/// Connections a node keeps: one for each process of its host that asks.
pub const CONNECTIONS_MAX: usize = 32;

/// Connections of one process, where the kernel says which it is.
pub const CONNECTIONS_OF_ONE_MAX: usize = CONNECTIONS_MAX / 2;

/// Operations of one connection at one time; above, a client hears `Busy`. Releases and pings always pass.
pub const OPERATIONS_MAX: usize = 64;

/// Loans of one connection at one time: a million tokens in blocks of 16.
pub const LOANS_MAX: usize = 1 << 16;

/// Loans of all connections of a node at one time, not counting copies. Each costs the node some hundred bytes.
pub const LOANS_OF_ALL_MAX: usize = 1 << 17;

/// Leases that one connection may have in use: all together half of what a node keeps.
pub const LEASES_MAX: usize = 1024;

/// Saves of one connection at one time.
pub const SAVES_MAX: usize = 16;

/// When a refused client should ask again: about the time that one operation of another takes.
pub const RETRY_AFTER: Duration = Duration::from_millis(5);

/// Blocks and bytes of a save whose frames go with the offer: what is not wanted of them was written in vain, which takes a
/// few times as long as asking does.
const AT_ONCE_BLOCKS_MAX: usize = 64;
const AT_ONCE_BYTES_MAX: u64 = 2 << 20;

/// How long to wait for the other end without sleeping: what two wake-ups take, so that at worst as much is spent as they cost.
pub const AWAKE: Duration = Duration::from_micros(50);

/// The smallest part of a tray, in bytes: several blocks of a common size, so that one is written while one is read.
const TRAY_PART_BYTES_MIN: u64 = 4 << 20;

/// Places in trays begin at cache lines.
const PLACE_ALIGN: u64 = 64;

/// Name of the socket of the node that serves others at `address`, in the directory that host shares.
#[must_use]
pub fn socket_path(dir: &Path, address: &str) -> PathBuf {
    dir.join(format!("{}.sock", address.replace([':', '/'], "_")))
}

/// Bytes of one connection's tray, where no frame is longer than `frame_bytes_max`.
#[must_use]
pub fn tray_bytes(frame_bytes_max: u32) -> u64 {
    2 * tray_part_bytes(frame_bytes_max)
}

/// Bytes of each part of a tray.
fn tray_part_bytes(frame_bytes_max: u32) -> u64 {
    (2 * u64::from(frame_bytes_max)).max(TRAY_PART_BYTES_MIN).next_multiple_of(4096)
}
