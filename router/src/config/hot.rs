//! Configuration of hot-prefix copies.
//!
//! Not here: the decision which prefix is worth a copy (`kv_core::place::hot`).

use std::ops::RangeInclusive;
use std::time::Duration;

use kv_core::place::hot_prefixes::ReplicationLimits;
use serde::{Deserialize, Serialize};

use super::{ConfigError, invalid};

/// Copies of hot prefixes to nodes near the instances that read them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HotCopiesConfig {
    /// Long-run rate at which this router orders copies, bytes per second; 0 disables copies and
    /// their accounting.
    pub bytes_per_second: u64,
    /// Burst allowance of copies, bytes. Larger blocks are never copied.
    pub burst_bytes: u64,
    /// Time constant of heat decay, milliseconds. A copy must save more time within it than it
    /// costs.
    pub decay_ms: u64,
    /// Concurrent copies.
    pub copies_max: u32,
}

impl Default for HotCopiesConfig {
    fn default() -> Self {
        HotCopiesConfig { bytes_per_second: 0, burst_bytes: 1 << 30, decay_ms: 60_000, copies_max: 4 }
    }
}

/// A tebibyte: above any link's speed, and counts stay exact.
const BYTES_MAX: u64 = 1 << 40;

/// Range of `decay_ms`: shorter decays forget between two checks, and longer ones keep heat that is
/// hours old.
const DECAYS_MS: RangeInclusive<u64> = 1_000..=3_600_000;

/// Half of the concurrent copies that a router runs, drains included.
const COPIES_MAX: u32 = 32;

impl HotCopiesConfig {
    /// Bounds of copying, or `None` if it is disabled.
    pub(crate) fn rules(&self, segments_max: usize) -> Option<ReplicationLimits> {
        (self.bytes_per_second > 0).then(|| ReplicationLimits {
            decay: Duration::from_millis(self.decay_ms),
            bytes_per_second: self.bytes_per_second,
            burst_bytes: self.burst_bytes,
            segments_max,
        })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.bytes_per_second > BYTES_MAX {
            return invalid(
                "hot_copies.bytes_per_second",
                format!(
                    "{} is above {BYTES_MAX}; a tenth of a link is usual, and 0 is never",
                    self.bytes_per_second
                ),
            );
        }
        if !(1..=BYTES_MAX).contains(&self.burst_bytes) {
            return invalid(
                "hot_copies.burst_bytes",
                format!("{} is outside 1 to {BYTES_MAX}; give room for some blocks", self.burst_bytes),
            );
        }
        if !DECAYS_MS.contains(&self.decay_ms) {
            let (least, most) = (DECAYS_MS.start(), DECAYS_MS.end());
            return invalid(
                "hot_copies.decay_ms",
                format!("{} is outside {least} to {most}; 60000 is usual", self.decay_ms),
            );
        }
        if !(1..=COPIES_MAX).contains(&self.copies_max) {
            return invalid(
                "hot_copies.copies_max",
                format!(
                    "{} is outside 1 to {COPIES_MAX}; 4 is usual, and bytes_per_second = 0 switches copies off",
                    self.copies_max
                ),
            );
        }
        Ok(())
    }
}
