//! An arena for the suite: memory that other processes may map. It is allocated once from beginning
//! to end, and overwritten when its last holder on this side drops it.
//!
//! For tests only; the real one is `node/src/arena/mod.rs`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use crate::SharedArena;
use crate::shm::mapping::{Mapping, memory_file, reopen_read_only};

/// Memory that is allocated once.
#[derive(Debug)]
pub struct BumpArena {
    file: OwnedFd,
    memory: Arc<Mapping>,
    next: AtomicU64,
}

impl BumpArena {
    /// An arena of this many bytes.
    ///
    /// # Panics
    /// When the machine has too little memory.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<BumpArena> {
        let file = memory_file(bytes).expect("memory for a test");
        let memory = Mapping::read_write(&file, bytes).expect("a new file can be mapped");
        Arc::new(BumpArena { file, memory: Arc::new(memory), next: AtomicU64::new(0) })
    }

    /// Copies these bytes into the arena.
    ///
    /// # Panics
    /// When it is full.
    #[must_use]
    pub fn hold(&self, bytes: &[u8]) -> Bytes {
        let at = self.next.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.memory.write(at, bytes).expect("the suite's blocks fit its arena");
        let len = u32::try_from(bytes.len()).expect("a frame is shorter than 4 GiB");
        let spoilt = PoisonOnDrop { memory: Arc::clone(&self.memory), at, len };
        self.memory.granted_bytes(at, len, spoilt).expect("the range was written")
    }
}

/// Overwrites memory once it may be reused, so that a late reader notices.
struct PoisonOnDrop {
    memory: Arc<Mapping>,
    at: u64,
    len: u32,
}

impl Drop for PoisonOnDrop {
    fn drop(&mut self) {
        self.memory.write(self.at, &vec![0xDD; self.len as usize]).expect("the range lies in the arena");
    }
}

impl SharedArena for BumpArena {
    fn reader(&self) -> std::io::Result<OwnedFd> {
        reopen_read_only(&self.file)
    }

    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn offset_of(&self, bytes: &Bytes) -> Option<u64> {
        self.memory.offset_of(bytes)
    }
}
