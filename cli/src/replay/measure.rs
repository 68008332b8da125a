//! What a replay measures, request by request, and what it adds up to.
//!
//! Not here: how it is written and drawn (`crate::report`). Modelled numbers are kept in fields of
//! their own that say so.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::carried::Carried;
use crate::cluster::PeakMemory;

/// One request that ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time since the first request was started.
    pub at: Duration,
    /// Blocks asked for.
    pub asked_blocks: u32,
    /// Blocks served from GPU memory, DRAM, SSD.
    pub hit_blocks: TierBlocks,
    /// Bytes that came from nodes, whatever became of them.
    pub fetched_bytes: u64,
    /// Of these, compared with what they must be, and right.
    pub verified_bytes: u64,
    /// Of these, compared and wrong, or refused by their checks.
    pub wrong_bytes: u64,
    /// Blocks of the wrong bytes.
    pub wrong_blocks: u32,
    /// Of the bytes that came, those behind a gap: of no use, and so not compared.
    pub unused_bytes: u64,
    /// Bytes stored on nodes.
    pub saved_bytes: u64,
    /// Blocks stored on nodes.
    pub saved_blocks: u32,
    /// Blocks that a node had already.
    pub present_blocks: u32,
    /// Blocks that no node took.
    pub refused_blocks: u32,
    /// Time of the successful route call.
    pub route_us: u64,
    /// Time of the fetch, however it ended; nothing when there was nothing to fetch.
    pub fetch_us: Option<u64>,
    /// Time of the save, however it ended; nothing when there was nothing to save.
    pub save_us: Option<u64>,
    /// Time from start to end as the caller sees it, retries included.
    pub total_us: u64,
    /// The instance that served it.
    pub instance: u32,
    /// Predicted until its first token, in the time of the profile.
    pub predicted_ttft_us: u64,
    /// The prefill, where instances let compute take time.
    pub timed: Option<TimedPrefill>,
    /// Modelled, not measured.
    pub modelled: ModelledSample,
}

/// A prefill beside its load, as an instance measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimedPrefill {
    /// Waiting for the accelerator.
    pub queue_us: u64,
    /// From its turn to its last layer.
    pub prefill_us: u64,
    /// Of that, time in which compute had nothing to do.
    pub idle_us: u64,
    /// What computing everything would have taken.
    pub recompute_us: u64,
    /// Blocks that were computed although a node had them.
    pub computed_blocks: u32,
    /// Bytes that were loaded before its turn.
    pub read_buffer_bytes: u64,
    /// Blocks stored from slices that left while later layers were computed.
    pub streamed_blocks: u32,
}

/// Blocks by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierBlocks {
    /// From GPU memory.
    pub gpu: u32,
    /// From DRAM.
    pub dram: u32,
    /// From SSD.
    pub ssd: u32,
}

impl TierBlocks {
    /// All tiers together.
    #[must_use]
    pub fn sum(&self) -> u32 {
        self.gpu + self.dram + self.ssd
    }
}

/// What the instance's hardware profile says a request would take on that hardware. Nothing here was
/// measured. Waiting behind other requests is left out: how many wait here depends on how fast this machine
/// moves bytes, and that is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelledSample {
    /// Moving the KV.
    pub transfer_us: u64,
    /// Computing the rest.
    pub prefill_us: u64,
    /// Computing the whole prompt, had nothing been cached.
    pub prefill_uncached_us: u64,
}

impl ModelledSample {
    /// Modelled time to first token of a request that waits for no other.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.transfer_us + self.prefill_us
    }
}

/// A fault that was carried out, with what was lost by it.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultMark {
    /// Time since the first request was started.
    pub at: Duration,
    /// `kill` or `restart`.
    pub kind: &'static str,
    /// As typed: `node:2`, `router-leader`.
    pub target: String,
    /// The process it was: `node-2`, `router-1`.
    pub process: String,
    /// Requests that had been started by then.
    pub at_request: usize,
    /// Milliseconds from SIGKILL until no router named the node any more.
    pub unrouted_ms: Option<f64>,
    /// Milliseconds from SIGKILL until a new leader had committed a write.
    pub leader_ms: Option<f64>,
    /// Milliseconds from the start command until the process served.
    pub serving_ms: Option<f64>,
}

/// Everything a replay measured.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Ended requests in the order of their ends.
    pub samples: Vec<Sample>,
    /// Faults in the order of their moments.
    pub faults: Vec<FaultMark>,
    /// Faults asked for that were not carried out, and why.
    pub faults_not_done: Vec<String>,
    /// Kills whose cost could not be measured.
    pub faults_not_measured: Vec<String>,
    /// Processes that ended although nobody asked them to, and how.
    pub crashed: Vec<String>,
    /// Why a router refused to serve this replay at all.
    pub refused: Option<String>,
    /// Names of the profiles under which instances modelled their compute.
    pub profiles: BTreeSet<String>,
    /// Failed attempts by kind; the request behind one may have ended well later.
    pub errors: BTreeMap<String, u64>,
    /// Sources that did not deliver all they were asked for, by reason.
    pub misses: BTreeMap<String, u64>,
    /// Requests that never ended well.
    pub failed: u64,
    /// From the first start to the last end of a request.
    pub wall: Duration,
    /// Processor time of all processes of the cluster; nothing for a cluster of someone else.
    pub cluster_cpu: Option<Duration>,
    /// What went over which path; nothing of a cluster of someone else.
    pub carried: Carried,
    /// Memory that the processes of the cluster had in place at most; nothing of a cluster of someone else.
    pub memory: Vec<PeakMemory>,
    /// Processor time of this process.
    pub driver_cpu: Duration,
    /// Whether it was stopped before its end.
    pub interrupted: bool,
}

impl Measured {
    /// Sum of one quantity over all samples.
    pub fn sum(&self, of: impl Fn(&Sample) -> u64) -> u64 {
        self.samples.iter().map(of).sum()
    }

    /// Hits over accesses, 0 when nothing was asked.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let asked = self.sum(|sample| sample.asked_blocks.into());
        let hits = self.sum(|sample| sample.hit_blocks.sum().into());
        ratio(hits, asked)
    }
}

/// `part / whole`, 0 for an empty whole.
#[must_use]
pub fn ratio(part: u64, whole: u64) -> f64 {
    // Counts of a replay stay far below 2^52.
    #[expect(clippy::cast_precision_loss)]
    let ratio = part as f64 / whole.max(1) as f64;
    ratio
}

/// Percentiles of a set of numbers, by the nearest rank.
#[derive(Clone, Debug, Default)]
pub struct Percentiles {
    sorted: Vec<u64>,
}

impl FromIterator<u64> for Percentiles {
    fn from_iter<T: IntoIterator<Item = u64>>(values: T) -> Self {
        let mut sorted: Vec<u64> = values.into_iter().collect();
        sorted.sort_unstable();
        Self { sorted }
    }
}

impl Percentiles {
    /// The value that `share` (0 to 1) of all values do not exceed; 0 when there are none.
    #[must_use]
    pub fn at(&self, share: f64) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let rank = (share * self.sorted.len() as f64).ceil() as usize;
        self.sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// How many values there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sorted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let hundred: Percentiles = (1..=100).rev().collect();
        assert_eq!((hundred.at(0.5), hundred.at(0.99), hundred.at(1.0)), (50, 99, 100));
        assert_eq!(hundred.at(0.0), 1);
        assert_eq!(Percentiles::default().at(0.5), 0);
        assert_eq!([7].into_iter().collect::<Percentiles>().at(0.99), 7);
    }

    #[test]
    fn the_hit_rate_is_over_blocks() {
        let sample = |asked_blocks, dram, ssd| Sample {
            asked_blocks,
            hit_blocks: TierBlocks { gpu: 0, dram, ssd },
            ..Sample::default()
        };
        let measured = Measured { samples: vec![sample(10, 3, 1), sample(2, 2, 0)], ..Measured::default() };
        assert!((measured.hit_rate() - 0.5).abs() < 1e-12);
        assert!(Measured::default().hit_rate().abs() < 1e-12);
    }
}
