//! An arena for the suite: memory that other processes may map, given out once from its beginning to its end, and spoilt when
//! nobody on this side holds it any more.
//!
//! For tests only; the real one is `node/src/arena.rs`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use crate::SharedArena;
use crate::shm::map::{Mapping, memory_file, read_only};

/// Memory that is filled once.
#[derive(Debug)]
pub struct BumpArena {
    file: OwnedFd,
    memory: Arc<Mapping>,
    next: AtomicU64,
}

impl BumpArena {
    /// So many bytes.
    ///
    /// # Panics
    /// When the machine does not have them.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<BumpArena> {
        let file = memory_file(bytes).expect("the machine has memory for a test");
        let memory = Mapping::to_write(&file, bytes).expect("a fresh file can be mapped");
        Arc::new(BumpArena { file, memory: Arc::new(memory), next: AtomicU64::new(0) })
    }

    /// These bytes, from now on in the arena.
    ///
    /// # Panics
    /// When it is full.
    #[must_use]
    pub fn hold(&self, bytes: &[u8]) -> Bytes {
        let at = self.next.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.memory.write(at, bytes).expect("the suite's blocks fit its arena");
        let len = u32::try_from(bytes.len()).expect("a frame is shorter");
        let spoilt = Spoilt { memory: Arc::clone(&self.memory), at, len };
        self.memory.lent(at, len, spoilt).expect("they were written there")
    }
}

/// Overwrites memory as soon as it may be used again: who reads it still sees that.
struct Spoilt {
    memory: Arc<Mapping>,
    at: u64,
    len: u32,
}

impl Drop for Spoilt {
    fn drop(&mut self) {
        self.memory.write(self.at, &vec![0xDD; self.len as usize]).expect("it lies in the arena");
    }
}

impl SharedArena for BumpArena {
    fn reader(&self) -> std::io::Result<OwnedFd> {
        read_only(&self.file)
    }

    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn offset_of(&self, bytes: &Bytes) -> Option<u64> {
        self.memory.offset_of(bytes)
    }
}
