//! Memory that sockets are read into, kept for the next reader.
//!
//! Not here: what is read (`stream.rs`).

use std::sync::{Mutex, PoisonError};

use super::record::RECORD_BYTES_MAX;

/// Bytes of a large buffer. Half as much costs more system calls, twice as much does not stay in a core's own cache
/// until it is opened and copied.
const LARGE_BYTES: usize = 128 << 10;

/// Bytes of a small one: a request that comes by itself.
const SMALL_BYTES: usize = RECORD_BYTES_MAX + 1024;

/// Buffers of each size that are kept while nobody reads.
const KEPT_MAX: usize = 64;

/// Which buffer a reader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Small,
    Large,
}

impl Size {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Size::Small => SMALL_BYTES,
            Size::Large => LARGE_BYTES,
        }
    }
}

/// Buffers of one server or dialer.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    small: Mutex<Vec<Vec<u8>>>,
    large: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    pub(super) fn take(&self, size: Size) -> Vec<u8> {
        let kept = match size {
            Size::Small => &self.small,
            Size::Large => &self.large,
        };
        let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(|| vec![0; size.bytes()])
    }

    pub(super) fn give(&self, buffer: Vec<u8>) {
        let kept = match buffer.len() {
            SMALL_BYTES => &self.small,
            LARGE_BYTES => &self.large,
            _ => return,
        };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_MAX {
            kept.push(buffer);
        }
    }
}
