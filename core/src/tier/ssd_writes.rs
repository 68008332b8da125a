//! Limits on writes to SSD.
//!
//! Not here: the choice of the blocks that are written (`pressure.rs`).

/// How much is written to SSD.
#[derive(Debug)]
pub(super) struct SsdWriteLimits {
    /// Minimum reuse probability of a written block.
    reuse_min: f64,
    /// Maximum number of queued blocks.
    queue_max: usize,
    /// Demotions that may be queued or started before a prefetch adds one.
    demotions_max: usize,
}

impl Default for SsdWriteLimits {
    fn default() -> SsdWriteLimits {
        SsdWriteLimits { reuse_min: 0.0, queue_max: usize::MAX, demotions_max: usize::MAX }
    }
}

impl SsdWriteLimits {
    pub(super) fn reuse_min(&self) -> f64 {
        self.reuse_min
    }

    pub(super) fn set_reuse_min(&mut self, reuse_min: f64) {
        self.reuse_min = reuse_min;
    }

    pub(super) fn set_queue_max(&mut self, blocks: usize) {
        self.queue_max = blocks;
    }

    pub(super) fn set_demotions_max(&mut self, blocks: usize) {
        self.demotions_max = blocks;
    }

    /// Whether one more block may join `queued` ones.
    pub(super) fn accepts(&self, queued: usize) -> bool {
        queued < self.queue_max
    }

    /// Whether one more block may join `queued` ones because of a prefetch.
    pub(super) fn accepts_for_prefetch(&self, queued: usize) -> bool {
        queued < self.demotions_max.min(self.queue_max)
    }
}
