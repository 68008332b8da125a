//! The keys of `report.json`. Scripts read them, so they change only by addition.

use std::collections::BTreeMap;

use kvfleet_sim::trace::Skipped;
use serde::Serialize;

use crate::cluster::PeakMemory;
use crate::replay::{
    FaultMark, PathBytes, Percentiles, ReplayMeasurements, RequestSample, TimedPrefill, ratio,
};

/// The trace and the settings of a replay.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Config {
    /// The trace file.
    pub trace: String,
    /// Number of requests to serve.
    pub trace_requests: u64,
    /// Distinct blocks in these requests.
    pub unique_blocks: u64,
    /// Lines skipped by lenient reading.
    pub skipped_lines: u64,
    /// Skipped lines by reason.
    pub skipped_lines_by_reason: Skipped,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes per block; 0 for an external cluster.
    pub block_bytes: u64,
    /// Number of routers.
    pub routers: u32,
    /// Number of storage nodes.
    pub nodes: u32,
    /// Number of emulated instances.
    pub instances: u32,
    /// DRAM per node as given on the command line.
    pub dram: String,
    /// SSD per node as given on the command line.
    pub ssd: String,
    /// DRAM per node in blocks.
    pub dram_blocks_per_node: u64,
    /// SSD per node in blocks.
    pub ssd_blocks_per_node: u64,
    /// Eviction policy.
    pub policy: String,
    /// Fill levels.
    pub watermarks: String,
    /// Concurrent requests; 1 means trace order.
    pub concurrency: u64,
    /// Whether requests ran strictly one after the other.
    pub sequential: bool,
    /// Speed of arrivals.
    pub speed: String,
    /// Ratio of emulated to modelled compute time; 0 if compute takes no time, or for an external
    /// cluster.
    pub time_scale: f64,
    /// Transport paths enabled for blocks; empty for an external cluster.
    pub transport: String,
    /// Tenant.
    pub tenant: u32,
    /// Kills as given on the command line.
    pub kill: Vec<String>,
    /// Restarts as given on the command line.
    pub restart: Vec<String>,
    /// Version of this program.
    pub version: String,
}

/// The configuration of a replay and the names that go with it.
#[derive(Clone, Debug)]
pub struct ReportSubject {
    /// Configuration of the replay.
    pub config: Config,
    /// Seed.
    pub seed: u64,
    /// Hardware profile of all modelled numbers.
    pub profile: String,
}

/// `report.json`. Everything outside `modelled` was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Number of requests to serve.
    pub requests: u64,
    /// Requests that succeeded, by hits or by recomputation.
    pub requests_ended: u64,
    /// Requests that never succeeded.
    pub requests_failed: u64,
    /// Whether the replay was stopped early.
    pub interrupted: bool,
    /// Blocks requested by completed requests.
    pub block_accesses: u64,
    /// The part of `block_accesses` served from the cache.
    pub block_hits: u64,
    /// `block_hits / block_accesses`.
    pub hit_rate: f64,
    /// Hits by tier.
    pub hits_by_tier: TierCounts,
    /// Payload bytes received from nodes: verified, wrong or unused.
    pub fetched_bytes: u64,
    /// The part of `fetched_bytes` that was compared with the expected bytes and matched.
    pub verified_bytes: u64,
    /// The part of `fetched_bytes` that did not match or failed its checksum. Anything but 0 is a
    /// defect.
    pub wrong_bytes: u64,
    /// Blocks with wrong bytes.
    pub wrong_blocks: u64,
    /// The part of `fetched_bytes` behind a gap, and so neither usable nor compared.
    pub unused_bytes: u64,
    /// Bytes stored on nodes.
    pub saved_bytes: u64,
    /// Blocks stored on nodes.
    pub saved_blocks: u64,
    /// Blocks offered to a node that already held them.
    pub present_blocks: u64,
    /// Blocks that no node accepted.
    pub refused_blocks: u64,
    /// Duration of route calls, microseconds.
    pub route_us: Latency,
    /// Duration of fetches, whatever their outcome, microseconds.
    pub fetch_us: Latency,
    /// Duration of saves, whatever their outcome, microseconds.
    pub save_us: Latency,
    /// Duration of requests as seen by the caller, microseconds.
    pub request_us: Latency,
    /// From the first start to the last end of a request, seconds.
    pub wall_s: f64,
    /// Completed requests over wall time.
    pub requests_per_s: f64,
    /// CPU time, seconds.
    pub cpu: Cpu,
    /// Encoded bytes of blocks by transport path, as counted by the instances running at the end;
    /// empty for an external cluster.
    pub paths: BTreeMap<String, PathTraffic>,
    /// The path each instance uses to each node at the end, with the reason.
    pub path_reasons: Vec<String>,
    /// Memory of each process; empty for an external cluster.
    pub memory: Vec<Memory>,
    /// Failed attempts by kind.
    pub errors: BTreeMap<String, u64>,
    /// Sources that did not deliver everything, by reason.
    pub misses: BTreeMap<String, u64>,
    /// Killed processes, with the cost of each kill.
    pub kills: Vec<FaultEntry>,
    /// Restarted processes.
    pub restarts: Vec<FaultEntry>,
    /// Requested faults that were not carried out, with the reason.
    pub faults_not_done: Vec<String>,
    /// Kills whose cost could not be measured: their number is null.
    pub faults_not_measured: Vec<String>,
    /// Processes that exited unexpectedly, and how.
    pub crashed: Vec<String>,
    /// Why a router refused to continue, if one did.
    pub refused: Option<String>,
    /// Seed of the delays between repeated route calls.
    pub seed: u64,
    /// The trace and the settings of the replay.
    pub config: Config,
    /// Timed prefills; absent if compute takes no time (`--time-scale 0`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Prefill>,
    /// Error of predicted TTFT, if compute takes time.
    pub prediction: Option<PredictionError>,
    /// Numbers of a hardware profile, never measured.
    pub modelled: Modelled,
}

/// Prefills with emulated compute: it takes the profile's time multiplied by `--time-scale`, one
/// prefill at a time per instance.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Prefill {
    /// Time in the queue for the accelerator, microseconds.
    pub queue_us: Latency,
    /// From getting the accelerator to the last layer, microseconds.
    pub prefill_us: Latency,
    /// Sum of prefill times over the sum of times for recomputing everything.
    pub over_recompute: f64,
    /// The largest such ratio of one request, among those that would take at least 0.1 s to
    /// recompute. It should not exceed 1.02, apart from delays by timers and other processes of the
    /// machine.
    pub over_recompute_max: Option<f64>,
    /// Share of prefill time with compute idle.
    pub idle_share: f64,
    /// Blocks recomputed although a node held them.
    pub computed_blocks: u64,
    /// Bytes loaded before the prefill got the accelerator.
    pub read_buffer_bytes: u64,
    /// Blocks saved from slices that were sent while later layers were still being computed.
    pub streamed_blocks: u64,
}

/// For shorter prefills, a timer that fires a millisecond late would dominate the ratio.
const WORST_RECOMPUTE_MIN_US: u64 = 100_000;

impl Prefill {
    fn of(samples: &[RequestSample]) -> Option<Prefill> {
        let timed: Vec<TimedPrefill> = samples.iter().filter_map(|sample| sample.timed).collect();
        let sum = |of: fn(&TimedPrefill) -> u64| timed.iter().map(of).sum::<u64>();
        let over = |one: &TimedPrefill| ratio(one.prefill_us, one.recompute_us);
        let long_enough = timed.iter().filter(|one| one.recompute_us >= WORST_RECOMPUTE_MIN_US);
        (!timed.is_empty()).then(|| Prefill {
            queue_us: Latency::of(timed.iter().map(|one| one.queue_us)),
            prefill_us: Latency::of(timed.iter().map(|one| one.prefill_us)),
            over_recompute: ratio(sum(|one| one.prefill_us), sum(|one| one.recompute_us)),
            over_recompute_max: long_enough.map(over).reduce(f64::max),
            idle_share: ratio(sum(|one| one.idle_us), sum(|one| one.prefill_us)),
            computed_blocks: sum(|one| one.computed_blocks.into()),
            read_buffer_bytes: sum(|one| one.read_buffer_bytes),
            streamed_blocks: sum(|one| one.streamed_blocks.into()),
        })
    }
}

/// Predicted against observed TTFT, except for the first requests: routers learn from them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictionError {
    /// Number of evaluated requests.
    pub requests: u64,
    /// Median of |predicted − observed| / observed.
    pub median: f64,
    /// Mean prediction over mean observation, minus 1.
    pub bias: f64,
}

/// Leading requests that are not evaluated, because routers still learn.
const WARMUP_REQUESTS: usize = 200;

impl PredictionError {
    #[expect(clippy::cast_precision_loss)]
    fn of(samples: &[RequestSample]) -> Option<PredictionError> {
        let pair = |sample: &RequestSample| {
            let timed = sample.timed?;
            let observed = (timed.queue_us + timed.prefill_us) as f64;
            Some((sample.predicted_ttft_us as f64, observed.max(1.0)))
        };
        let pairs: Vec<(f64, f64)> = samples.iter().skip(WARMUP_REQUESTS).filter_map(pair).collect();
        let mut relative: Vec<f64> =
            pairs.iter().map(|(predicted, observed)| (predicted - observed).abs() / observed).collect();
        relative.sort_by(f64::total_cmp);
        let median = *relative.get(relative.len() / 2)?;
        let (predicted, observed) =
            pairs.iter().fold((0.0, 0.0), |sums, pair| (sums.0 + pair.0, sums.1 + pair.1));
        Some(PredictionError { requests: pairs.len() as u64, median, bias: predicted / observed - 1.0 })
    }
}

/// Counts by tier.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TierCounts {
    /// GPU memory.
    pub gpu: u64,
    /// DRAM.
    pub dram: u64,
    /// SSD.
    pub ssd: u64,
}

/// Percentiles of a duration.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Largest.
    pub max: u64,
    /// Number of measured values.
    pub count: usize,
}

impl Latency {
    fn of(values: impl Iterator<Item = u64>) -> Self {
        let values: Percentiles = values.collect();
        Self {
            p50: values.at(0.5),
            p90: values.at(0.9),
            p99: values.at(0.99),
            max: values.at(1.0),
            count: values.count(),
        }
    }
}

/// CPU time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cpu {
    /// Routers, nodes and instances; absent for an external cluster.
    pub cluster_s: Option<f64>,
    /// This process.
    pub driver_s: f64,
    /// `cluster_s` over the gigabytes (10^9) of all `paths` together; the cost of a path if only
    /// one was used.
    pub cluster_s_per_gb: Option<f64>,
}

/// Encoded bytes of blocks transferred over a path.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PathTraffic {
    /// From nodes.
    pub fetched_bytes: u64,
    /// To nodes.
    pub saved_bytes: u64,
}

impl From<&PathBytes> for PathTraffic {
    fn from(bytes: &PathBytes) -> Self {
        Self { fetched_bytes: bytes.fetched, saved_bytes: bytes.saved }
    }
}

impl Cpu {
    fn of(measured: &ReplayMeasurements) -> Self {
        let cluster_s = measured.cluster_cpu.map(|cpu| cpu.as_secs_f64());
        #[expect(clippy::cast_precision_loss)]
        let gigabytes = measured.traffic.total_bytes() as f64 / 1e9;
        Self {
            cluster_s,
            driver_s: measured.driver_cpu.as_secs_f64(),
            cluster_s_per_gb: cluster_s.filter(|_| gigabytes > 0.0).map(|cpu| cpu / gigabytes),
        }
    }
}

/// A process may exceed its limit by 1/`MEMORY_MARGIN`, for memory that the allocator retains.
const MEMORY_MARGIN: u64 = 10;

/// Peak resident memory of a process.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// The process.
    pub process: String,
    /// Peak so far, in bytes.
    pub peak_bytes: u64,
    /// The limit that follows from its configuration, in bytes; null if there is none.
    pub bytes_max: Option<u64>,
    /// Whether the peak exceeds the limit by more than a tenth. `true` is a defect.
    pub is_over: bool,
}

impl From<&PeakMemory> for Memory {
    fn from(peak: &PeakMemory) -> Self {
        let is_over = |most: u64| peak.peak_bytes > most.saturating_add(most / MEMORY_MARGIN);
        Self {
            process: peak.process.clone(),
            peak_bytes: peak.peak_bytes,
            bytes_max: peak.bytes_max,
            is_over: peak.bytes_max.is_some_and(is_over),
        }
    }
}

/// A fault with its cost. Numbers that do not apply or could not be measured are null.
#[derive(Clone, Debug, Serialize)]
pub struct FaultEntry {
    /// Target as given on the command line.
    pub target: String,
    /// The affected process.
    pub process: String,
    /// Seconds into the replay.
    pub at_s: f64,
    /// Number of requests started before the fault.
    pub at_request: usize,
    /// Killed node: milliseconds until no router named it any more.
    pub unrouted_ms: Option<f64>,
    /// Killed leader: milliseconds until a new leader committed a write.
    pub leader_ms: Option<f64>,
    /// Restart: milliseconds until the process served.
    pub serving_ms: Option<f64>,
}

impl From<&FaultMark> for FaultEntry {
    fn from(mark: &FaultMark) -> Self {
        Self {
            target: mark.target.clone(),
            process: mark.process.clone(),
            at_s: mark.at.as_secs_f64(),
            at_request: mark.at_request,
            unrouted_ms: mark.unrouted_ms,
            leader_ms: mark.leader_ms,
            serving_ms: mark.serving_ms,
        }
    }
}

/// What the same requests would have taken on the hardware of the named profile.
#[derive(Clone, Debug, Serialize)]
pub struct Modelled {
    /// Name of the instances' hardware profile, or names if they differ.
    pub profile: String,
    /// A constant note, so that these numbers are not mistaken for measurements.
    pub note: &'static str,
    /// TTFT of requests that do not queue, microseconds.
    pub ttft_us: Latency,
    /// Prefill of blocks that were not hits, microseconds.
    pub prefill_us: Latency,
    /// Prefill of whole prompts without any cached block, microseconds.
    pub prefill_uncached_us: Latency,
    /// Share of all prefill time that the cache saved.
    pub prefill_saved_share: f64,
}

impl Report {
    /// The report of a replay.
    #[must_use]
    pub fn new(subject: ReportSubject, measured: &ReplayMeasurements) -> Self {
        let sum = |of: fn(&RequestSample) -> u64| measured.sum(of);
        let latency =
            |of: fn(&RequestSample) -> Option<u64>| Latency::of(measured.samples.iter().filter_map(of));
        let faults = |kind| {
            measured.faults.iter().filter(move |mark| mark.kind == kind).map(FaultEntry::from).collect()
        };
        let ended = measured.samples.len() as u64;
        let wall_s = measured.wall.as_secs_f64();
        #[expect(clippy::cast_precision_loss)]
        let requests_per_s = ended as f64 / wall_s.max(1e-9);
        Self {
            requests: subject.config.trace_requests,
            requests_ended: ended,
            requests_failed: measured.failed,
            interrupted: measured.interrupted,
            block_accesses: sum(|sample| sample.asked_blocks.into()),
            block_hits: sum(|sample| sample.hit_blocks.sum().into()),
            hit_rate: measured.hit_rate(),
            hits_by_tier: TierCounts {
                gpu: sum(|sample| sample.hit_blocks.gpu.into()),
                dram: sum(|sample| sample.hit_blocks.dram.into()),
                ssd: sum(|sample| sample.hit_blocks.ssd.into()),
            },
            fetched_bytes: sum(|sample| sample.fetched_bytes),
            verified_bytes: sum(|sample| sample.verified_bytes),
            wrong_bytes: sum(|sample| sample.wrong_bytes),
            wrong_blocks: sum(|sample| sample.wrong_blocks.into()),
            unused_bytes: sum(|sample| sample.unused_bytes),
            saved_bytes: sum(|sample| sample.saved_bytes),
            saved_blocks: sum(|sample| sample.saved_blocks.into()),
            present_blocks: sum(|sample| sample.present_blocks.into()),
            refused_blocks: sum(|sample| sample.refused_blocks.into()),
            route_us: latency(|sample| Some(sample.route_us)),
            fetch_us: latency(|sample| sample.fetch_us),
            save_us: latency(|sample| sample.save_us),
            request_us: latency(|sample| Some(sample.total_us)),
            wall_s,
            requests_per_s,
            cpu: Cpu::of(measured),
            paths: measured.traffic.bytes.iter().map(|(path, bytes)| (path.clone(), bytes.into())).collect(),
            path_reasons: measured.traffic.reasons.clone(),
            memory: measured.memory.iter().map(Memory::from).collect(),
            errors: measured.errors.clone(),
            misses: measured.misses.clone(),
            kills: faults("kill"),
            restarts: faults("restart"),
            faults_not_done: measured.faults_not_done.clone(),
            faults_not_measured: measured.faults_not_measured.clone(),
            crashed: measured.crashed.clone(),
            refused: measured.refused.clone(),
            seed: subject.seed,
            prefill: Prefill::of(&measured.samples),
            prediction: PredictionError::of(&measured.samples),
            modelled: Modelled::new(subject.profile, measured),
            config: subject.config,
        }
    }
}

impl Modelled {
    fn new(profile: String, measured: &ReplayMeasurements) -> Self {
        let latency = |of: fn(&RequestSample) -> u64| Latency::of(measured.samples.iter().map(of));
        let prefill = measured.sum(|sample| sample.modelled.prefill_us);
        let uncached = measured.sum(|sample| sample.modelled.prefill_uncached_us);
        Self {
            profile,
            note: "modelled under the named hardware profile without waiting for other requests, not measured",
            ttft_us: latency(|sample| sample.modelled.ttft_us()),
            prefill_us: latency(|sample| sample.modelled.prefill_us),
            prefill_uncached_us: latency(|sample| sample.modelled.prefill_uncached_us),
            prefill_saved_share: ratio(uncached.saturating_sub(prefill), uncached),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::replay::TierBlocks;

    fn measured() -> ReplayMeasurements {
        let sample = RequestSample {
            asked_blocks: 4,
            hit_blocks: TierBlocks { gpu: 0, dram: 2, ssd: 1 },
            fetched_bytes: 300,
            verified_bytes: 300,
            saved_bytes: 100,
            route_us: 10,
            fetch_us: Some(20),
            ..RequestSample::default()
        };
        let mark = FaultMark {
            at: std::time::Duration::from_millis(1500),
            kind: "kill",
            target: "node:2".into(),
            process: "node-2".into(),
            at_request: 1,
            unrouted_ms: Some(901.5),
            leader_ms: None,
            serving_ms: None,
        };
        ReplayMeasurements {
            samples: vec![sample.clone(), sample],
            faults: vec![mark],
            ..ReplayMeasurements::default()
        }
    }

    #[test]
    fn cpu_per_gb_counts_all_paths() {
        let bytes = [("quic", 1_500_000_000, 250_000_000), ("tcp", 250_000_000, 0)];
        let bytes = bytes.map(|(path, fetched, saved)| (path.to_owned(), PathBytes { fetched, saved }));
        let traffic = crate::replay::ReplayTraffic { bytes: bytes.into(), reasons: vec!["why".to_owned()] };
        let cluster_cpu = Some(std::time::Duration::from_secs(3));
        let subject = || ReportSubject { config: Config::default(), seed: 7, profile: String::new() };
        let json = |measured| serde_json::to_value(Report::new(subject(), &measured)).unwrap();
        let reported = json(ReplayMeasurements { traffic, cluster_cpu, ..measured() });
        assert_eq!(reported["cpu"]["cluster_s_per_gb"], 1.5);
        assert_eq!(reported["paths"]["quic"]["saved_bytes"], 250_000_000);
        assert_eq!(
            (&reported["paths"]["tcp"]["fetched_bytes"], &reported["path_reasons"][0]),
            (&250_000_000.into(), &"why".into())
        );
        assert!(json(ReplayMeasurements { cluster_cpu, ..measured() })["cpu"]["cluster_s_per_gb"].is_null());
    }

    #[test]
    fn has_the_stable_keys() {
        let subject = ReportSubject { config: Config::default(), seed: 7, profile: "laptop-emulated".into() };
        let json = serde_json::to_value(Report::new(subject, &measured())).unwrap();
        for key in [
            "requests",
            "requests_ended",
            "block_accesses",
            "block_hits",
            "hit_rate",
            "fetched_bytes",
            "verified_bytes",
            "wrong_bytes",
            "wrong_blocks",
            "unused_bytes",
            "saved_bytes",
            "kills",
            "faults_not_done",
            "faults_not_measured",
            "crashed",
            "refused",
            "seed",
            "config",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        for key in ["route_us", "fetch_us", "save_us"] {
            assert!(json[key]["p50"].is_u64() && json[key]["p99"].is_u64(), "{key}");
        }
        assert_eq!(json["hit_rate"], 0.75);
        assert_eq!(json["kills"][0]["unrouted_ms"], 901.5);
        let leader_ms = json["kills"][0].get("leader_ms");
        assert!(leader_ms.is_some_and(serde_json::Value::is_null), "no number is null, not an absent key");
        assert_eq!(json["seed"], 7);
        assert_eq!(json["save_us"]["count"], 0);
    }

    #[test]
    fn modelled_numbers_have_a_separate_object() {
        let subject = ReportSubject { config: Config::default(), seed: 7, profile: "h100-8b".into() };
        let json = serde_json::to_value(Report::new(subject, &measured())).unwrap();
        assert_eq!(json["modelled"]["profile"], "h100-8b");
        let outside =
            json.as_object().unwrap().keys().filter(|key| key.contains("ttft") || key.contains("prefill"));
        assert_eq!(outside.count(), 0);
    }

    #[test]
    fn prediction_error_skips_warmup_requests() {
        let sample = |predicted_ttft_us, queue_us, prefill_us| RequestSample {
            predicted_ttft_us,
            timed: Some(TimedPrefill { queue_us, prefill_us, ..TimedPrefill::default() }),
            ..RequestSample::default()
        };
        let mut samples = vec![sample(9_000, 1, 1); WARMUP_REQUESTS];
        samples.extend([sample(220, 120, 80), sample(300, 200, 200), sample(440, 0, 400)]);
        let error = PredictionError::of(&samples).unwrap();
        assert_eq!(error.requests, 3);
        assert!((error.median - 0.1).abs() < 1e-9 && (error.bias + 0.04).abs() < 1e-9, "{error:?}");
        assert_eq!(PredictionError::of(&samples[..WARMUP_REQUESTS]), None);
        let untimed =
            vec![RequestSample { predicted_ttft_us: 1, ..RequestSample::default() }; WARMUP_REQUESTS + 1];
        assert_eq!(PredictionError::of(&untimed), None, "compute takes no time");
    }
}
