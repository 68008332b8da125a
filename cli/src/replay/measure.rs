//! Measurements of a replay per request and in total.
//!
//! `crate::report` writes and plots them. Modelled values are kept in separate fields named
//! `modelled`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::traffic::ReplayTraffic;
use crate::cluster::PeakMemory;

/// One completed request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestSample {
    /// Time since the first request started.
    pub at: Duration,
    /// Blocks requested.
    pub asked_blocks: u32,
    /// Blocks served from GPU memory, DRAM and SSD.
    pub hit_blocks: TierBlocks,
    /// Bytes received from nodes, used or not.
    pub fetched_bytes: u64,
    /// The part of `fetched_bytes` that was compared with the expected bytes and matched.
    pub verified_bytes: u64,
    /// The part of `fetched_bytes` that did not match or failed its checksum.
    pub wrong_bytes: u64,
    /// Blocks with wrong bytes.
    pub wrong_blocks: u32,
    /// The part of `fetched_bytes` behind a gap, and so neither usable nor compared.
    pub unused_bytes: u64,
    /// Bytes stored on nodes.
    pub saved_bytes: u64,
    /// Blocks stored on nodes.
    pub saved_blocks: u32,
    /// Blocks that the node already held.
    pub present_blocks: u32,
    /// Blocks that no node accepted.
    pub refused_blocks: u32,
    /// Duration of the successful route call.
    pub route_us: u64,
    /// Duration of the fetch, whatever its outcome; `None` if the request fetched no block.
    pub fetch_us: Option<u64>,
    /// Duration of the save, whatever its outcome; `None` if the request saved no block.
    pub save_us: Option<u64>,
    /// Duration from start to end as seen by the caller, including retries.
    pub total_us: u64,
    /// The instance that served the request.
    pub instance: u32,
    /// Predicted TTFT, in the time of the hardware profile.
    pub predicted_ttft_us: u64,
    /// The timed prefill, if instances simulate compute time.
    pub timed: Option<TimedPrefill>,
    /// Modelled, not measured.
    pub modelled: ModelledSample,
}

/// A prefill overlapping its KV load, as measured by an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimedPrefill {
    /// Time in the queue for the accelerator.
    pub queue_us: u64,
    /// From getting the accelerator to the last layer.
    pub prefill_us: u64,
    /// The part of `prefill_us` with compute idle.
    pub idle_us: u64,
    /// Compute time of the whole prompt without any cached block.
    pub recompute_us: u64,
    /// Blocks that were recomputed although a node held them.
    pub computed_blocks: u32,
    /// Bytes loaded before the prefill got the accelerator.
    pub read_buffer_bytes: u64,
    /// Blocks saved from slices that were sent while later layers were still being computed.
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
    /// Blocks of all tiers.
    #[must_use]
    pub fn sum(&self) -> u32 {
        self.gpu + self.dram + self.ssd
    }
}

/// What a request would take on the hardware described by the instance's profile; none of it is
/// measured. Queueing is left out: how many requests wait depends on how fast this machine moves
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelledSample {
    /// Transfer of the KV cache.
    pub transfer_us: u64,
    /// Prefill of the blocks that were not hits.
    pub prefill_us: u64,
    /// Prefill of the whole prompt without any cached block.
    pub prefill_uncached_us: u64,
}

impl ModelledSample {
    /// Modelled TTFT of a request that does not queue.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.transfer_us + self.prefill_us
    }
}

/// A fault that was carried out, with its cost.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultMark {
    /// Time since the first request started.
    pub at: Duration,
    /// `kill` or `restart`.
    pub kind: &'static str,
    /// The target as given on the command line: `node:2`, `router-leader`.
    pub target: String,
    /// The affected process: `node-2`, `router-1`.
    pub process: String,
    /// Number of requests started before the fault.
    pub at_request: usize,
    /// Milliseconds from SIGKILL until no router named the node any more.
    pub unrouted_ms: Option<f64>,
    /// Milliseconds from SIGKILL until a new leader committed a write.
    pub leader_ms: Option<f64>,
    /// Milliseconds from the start command until the process served.
    pub serving_ms: Option<f64>,
}

/// All measurements of a replay.
#[derive(Clone, Debug, Default)]
pub struct ReplayMeasurements {
    /// Completed requests, in order of completion.
    pub samples: Vec<RequestSample>,
    /// Faults, in order of execution.
    pub faults: Vec<FaultMark>,
    /// Requested faults that were not carried out, with the reason.
    pub faults_not_done: Vec<String>,
    /// Kills whose cost could not be measured.
    pub faults_not_measured: Vec<String>,
    /// Processes that exited unexpectedly, and how.
    pub crashed: Vec<String>,
    /// Why a router refused the whole replay.
    pub refused: Option<String>,
    /// Names of the hardware profiles used by the instances.
    pub profiles: BTreeSet<String>,
    /// Failed attempts by kind; a later attempt of the same request may have succeeded.
    pub errors: BTreeMap<String, u64>,
    /// Sources that did not deliver everything requested, by reason.
    pub misses: BTreeMap<String, u64>,
    /// Requests that never succeeded.
    pub failed: u64,
    /// From the first start to the last end of a request.
    pub wall: Duration,
    /// CPU time of all cluster processes; `None` for an external cluster.
    pub cluster_cpu: Option<Duration>,
    /// Bytes by transport path; empty for an external cluster.
    pub traffic: ReplayTraffic,
    /// Peak resident memory of the cluster processes; empty for an external cluster.
    pub memory: Vec<PeakMemory>,
    /// CPU time of this process.
    pub driver_cpu: Duration,
    /// Whether the replay was stopped early.
    pub interrupted: bool,
}

impl ReplayMeasurements {
    /// Sum of `of` over all samples.
    pub fn sum(&self, of: impl Fn(&RequestSample) -> u64) -> u64 {
        self.samples.iter().map(of).sum()
    }

    /// Hits over requested blocks; 0 if none were requested.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let asked = self.sum(|sample| sample.asked_blocks.into());
        let hits = self.sum(|sample| sample.hit_blocks.sum().into());
        ratio(hits, asked)
    }
}

/// `part / whole`, or 0 if `whole` is 0.
#[must_use]
pub fn ratio(part: u64, whole: u64) -> f64 {
    // Counts of a replay stay far below 2^52.
    #[expect(clippy::cast_precision_loss)]
    let ratio = part as f64 / whole.max(1) as f64;
    ratio
}

/// Percentiles by nearest rank.
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
    /// The smallest value that at least `share` (0 to 1) of all values do not exceed; 0 if there
    /// are none.
    #[must_use]
    pub fn at(&self, share: f64) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let rank = (share * self.sorted.len() as f64).ceil() as usize;
        self.sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// Number of values.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sorted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_observed_values() {
        let hundred: Percentiles = (1..=100).rev().collect();
        assert_eq!((hundred.at(0.5), hundred.at(0.99), hundred.at(1.0)), (50, 99, 100));
        assert_eq!(hundred.at(0.0), 1);
        assert_eq!(Percentiles::default().at(0.5), 0);
        assert_eq!([7].into_iter().collect::<Percentiles>().at(0.99), 7);
    }

    #[test]
    fn hit_rate_counts_blocks() {
        let sample = |asked_blocks, dram, ssd| RequestSample {
            asked_blocks,
            hit_blocks: TierBlocks { gpu: 0, dram, ssd },
            ..RequestSample::default()
        };
        let measured = ReplayMeasurements {
            samples: vec![sample(10, 3, 1), sample(2, 2, 0)],
            ..ReplayMeasurements::default()
        };
        assert!((measured.hit_rate() - 0.5).abs() < 1e-12);
        assert!(ReplayMeasurements::default().hit_rate().abs() < 1e-12);
    }
}
