//! A pool of read buffers.
//!
//! Not here: reading (`stream.rs`).

use std::sync::{Mutex, PoisonError};

use super::record::RECORD_BYTES_MAX;

/// Size of a large buffer in bytes. Half as much costs more system calls; twice as much does not
/// stay in a core's own cache until it is decrypted and copied.
const LARGE_BYTES: usize = 128 << 10;

/// Size of a small buffer in bytes: enough for a single request.
const SMALL_BYTES: usize = RECORD_BYTES_MAX + 1024;

/// Unused buffers kept of each size.
const POOLED_MAX: usize = 64;

/// Buffer size that a reader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BufferSize {
    Small,
    Large,
}

impl BufferSize {
    pub(super) const fn bytes(self) -> usize {
        match self {
            BufferSize::Small => SMALL_BYTES,
            BufferSize::Large => LARGE_BYTES,
        }
    }
}

/// Unused buffers of one server or dialer.
#[derive(Debug, Default)]
pub(super) struct BufferPool {
    small: Mutex<Vec<Vec<u8>>>,
    large: Mutex<Vec<Vec<u8>>>,
}

impl BufferPool {
    pub(super) fn take(&self, size: BufferSize) -> Vec<u8> {
        let kept = match size {
            BufferSize::Small => &self.small,
            BufferSize::Large => &self.large,
        };
        let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.unwrap_or_else(|| vec![0; size.bytes()])
    }

    pub(super) fn put_back(&self, buffer: Vec<u8>) {
        let kept = match buffer.len() {
            SMALL_BYTES => &self.small,
            LARGE_BYTES => &self.large,
            _ => return,
        };
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < POOLED_MAX {
            kept.push(buffer);
        }
    }
}
