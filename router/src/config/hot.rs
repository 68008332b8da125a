//! What an operator can set for copies of hot prefixes.
//!
//! Not here: what is worth a copy (`kv_core::place::hot`).

use std::ops::RangeInclusive;
use std::time::Duration;

use kv_core::place::hot::HotRules;
use serde::{Deserialize, Serialize};

use super::{ConfigError, refuse};

/// Copies of prefixes to nodes next to where they are asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HotCopiesConfig {
    /// Bytes that this router has copied a second, in the long run; 0 for none: then nothing is counted either.
    pub bytes_per_second: u64,
    /// Bytes that it has copied at once. Nothing is copied of blocks that are larger.
    pub burst_bytes: u64,
    /// Time constant with which heat fades, milliseconds: a copy must save more within it than it takes.
    pub decay_ms: u64,
    /// Copies under way at once.
    pub copies_max: u32,
}

impl Default for HotCopiesConfig {
    fn default() -> Self {
        HotCopiesConfig { bytes_per_second: 0, burst_bytes: 1 << 30, decay_ms: 60_000, copies_max: 4 }
    }
}

/// A tebibyte: more goes over no link, and counts stay exact.
const BYTES_MAX: u64 = 1 << 40;

/// What is used less than once in a look says nothing of the next, and what was hot hours ago neither.
const DECAYS_MS: RangeInclusive<u64> = 1_000..=3_600_000;

/// Half of what a router has under way for nodes that drain and these together.
const COPIES_MAX: u32 = 32;

impl HotCopiesConfig {
    /// What bounds the copying, if there is to be any.
    pub(crate) fn rules(&self, segments_max: usize) -> Option<HotRules> {
        (self.bytes_per_second > 0).then(|| HotRules {
            decay: Duration::from_millis(self.decay_ms),
            bytes_per_second: self.bytes_per_second,
            burst_bytes: self.burst_bytes,
            segments_max,
        })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.bytes_per_second > BYTES_MAX {
            return refuse(
                "hot_copies.bytes_per_second",
                format!(
                    "{} is above {BYTES_MAX}; a tenth of a link is usual, and 0 is never",
                    self.bytes_per_second
                ),
            );
        }
        if !(1..=BYTES_MAX).contains(&self.burst_bytes) {
            return refuse(
                "hot_copies.burst_bytes",
                format!("{} is outside 1 to {BYTES_MAX}; give room for some blocks", self.burst_bytes),
            );
        }
        if !DECAYS_MS.contains(&self.decay_ms) {
            let (least, most) = (DECAYS_MS.start(), DECAYS_MS.end());
            return refuse(
                "hot_copies.decay_ms",
                format!("{} is outside {least} to {most}; 60000 is usual", self.decay_ms),
            );
        }
        if !(1..=COPIES_MAX).contains(&self.copies_max) {
            return refuse(
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
