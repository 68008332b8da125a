//! The keys of `report.json`. They are a contract: scripts read them, so they change only by addition.

use std::collections::BTreeMap;

use kvfleet_sim::trace::Skipped;
use serde::Serialize;

use crate::cluster::PeakMemory;
use crate::replay::{FaultMark, Measured, PathBytes, Percentiles, Sample, TimedPrefill, ratio};

/// What was replayed and how.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Config {
    /// The trace's file.
    pub trace: String,
    /// Requests in the file that were to be served.
    pub trace_requests: u64,
    /// Distinct blocks among them.
    pub unique_blocks: u64,
    /// Lines that lenient reading skipped.
    pub skipped_lines: u64,
    /// The same by reason.
    pub skipped_lines_by_reason: Skipped,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Bytes of one block; 0 when the cluster was someone else's.
    pub block_bytes: u64,
    /// Routers, nodes, instances.
    pub routers: u32,
    /// Storage nodes.
    pub nodes: u32,
    /// Stand-in instances.
    pub instances: u32,
    /// DRAM per node as asked for.
    pub dram: String,
    /// SSD per node as asked for.
    pub ssd: String,
    /// The same in blocks.
    pub dram_blocks_per_node: u64,
    /// The same in blocks.
    pub ssd_blocks_per_node: u64,
    /// Eviction policy.
    pub policy: String,
    /// Fill levels.
    pub watermarks: String,
    /// Requests at a time; 1 means in the trace's order.
    pub concurrency: u64,
    /// Whether requests ran strictly one after the other.
    pub sequential: bool,
    /// Speed.
    pub speed: String,
    /// Share of the modelled compute time that computing took; 0 for none, or when the cluster was someone else's.
    pub time_scale: f64,
    /// Paths that block bytes were to take; empty when the cluster was someone else's.
    pub transport: String,
    /// Tenant.
    pub tenant: u32,
    /// Kills as asked for.
    pub kill: Vec<String>,
    /// Restarts as asked for.
    pub restart: Vec<String>,
    /// Version of this program.
    pub version: String,
}

/// What the report is about: its configuration and the names that go with it.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Configuration of the replay.
    pub config: Config,
    /// Seed.
    pub seed: u64,
    /// Hardware profile of everything modelled.
    pub profile: String,
}

/// `report.json`. Everything outside `modelled` was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Requests that were to be served.
    pub requests: u64,
    /// Requests that ended, by hit or by recompute.
    pub requests_ended: u64,
    /// Requests that never ended well.
    pub requests_failed: u64,
    /// Whether it was stopped before its end.
    pub interrupted: bool,
    /// Blocks asked for by ended requests.
    pub block_accesses: u64,
    /// Of these, served from the cache.
    pub block_hits: u64,
    /// `block_hits / block_accesses`.
    pub hit_rate: f64,
    /// Hits by tier.
    pub hits_by_tier: TierCounts,
    /// Payload bytes that came from nodes, whatever became of them: verified, wrong or unused.
    pub fetched_bytes: u64,
    /// Of these, compared with what they must be, and right.
    pub verified_bytes: u64,
    /// Of these, compared and wrong, or refused by their checks. Anything but 0 is a defect.
    pub wrong_bytes: u64,
    /// Blocks of the wrong bytes.
    pub wrong_blocks: u64,
    /// Of the fetched bytes, those behind a gap: of no use to the request, and so not compared.
    pub unused_bytes: u64,
    /// Bytes stored on nodes.
    pub saved_bytes: u64,
    /// Blocks stored on nodes.
    pub saved_blocks: u64,
    /// Blocks offered that a node had already.
    pub present_blocks: u64,
    /// Blocks that no node took.
    pub refused_blocks: u64,
    /// Time of route calls, microseconds.
    pub route_us: Latency,
    /// Time of fetches, however they ended, microseconds.
    pub fetch_us: Latency,
    /// Time of saves, however they ended, microseconds.
    pub save_us: Latency,
    /// Time of requests as their caller sees them, microseconds.
    pub request_us: Latency,
    /// From the first start to the last end of a request, seconds.
    pub wall_s: f64,
    /// Ended requests over wall time.
    pub requests_per_s: f64,
    /// Processor time, seconds.
    pub cpu: Cpu,
    /// Encoded bytes of blocks by the path they went over, as the instances that run at the end count them; empty when
    /// the cluster was someone else's.
    pub paths: BTreeMap<String, PathTraffic>,
    /// Which path each instance takes to each node at the end, and why.
    pub path_reasons: Vec<String>,
    /// Memory of each process; empty when the cluster was someone else's.
    pub memory: Vec<Memory>,
    /// Failed attempts by kind.
    pub errors: BTreeMap<String, u64>,
    /// Sources that did not deliver everything, by reason.
    pub misses: BTreeMap<String, u64>,
    /// Processes killed, with what each kill cost.
    pub kills: Vec<Fault>,
    /// Processes started again.
    pub restarts: Vec<Fault>,
    /// Faults asked for that were not carried out, and why.
    pub faults_not_done: Vec<String>,
    /// Kills whose cost could not be measured: their number is null.
    pub faults_not_measured: Vec<String>,
    /// Processes that ended although nobody asked them to, and how.
    pub crashed: Vec<String>,
    /// Why a router refused to serve on, if one did.
    pub refused: Option<String>,
    /// Seed of the pauses between repeated route calls.
    pub seed: u64,
    /// What was replayed and how.
    pub config: Config,
    /// Prefills beside their load; absent where compute took no time (`--time-scale 0`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Prefill>,
    /// How far predicted times to first token were off, where compute takes time.
    pub prediction: Option<PredictionError>,
    /// What a hardware profile says, never measured.
    pub modelled: Modelled,
}

/// Prefills of which compute took the time that the profile says, times `--time-scale`, one at a time on each instance.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Prefill {
    /// Waiting for the accelerator, microseconds.
    pub queue_us: Latency,
    /// From a request's turn to its last layer, microseconds.
    pub prefill_us: Latency,
    /// Time of all of them over what computing everything would have taken.
    pub over_recompute: f64,
    /// The same of the request that did worst, of those whose computing would have taken a tenth of a second: it is never to be above
    /// 1.02, but for what timers and other processes of the machine add.
    pub over_recompute_max: Option<f64>,
    /// Share of the time in which compute had nothing to do.
    pub idle_share: f64,
    /// Blocks that were computed although a node had them.
    pub computed_blocks: u64,
    /// Bytes that were loaded before their request's turn.
    pub read_buffer_bytes: u64,
    /// Blocks stored from slices that left while later layers were computed.
    pub streamed_blocks: u64,
}

/// Below this, a timer that wakes a millisecond late is a share of the time that says nothing of waiting.
const TELLING_US: u64 = 100_000;

impl Prefill {
    fn of(samples: &[Sample]) -> Option<Prefill> {
        let timed: Vec<TimedPrefill> = samples.iter().filter_map(|sample| sample.timed).collect();
        let sum = |of: fn(&TimedPrefill) -> u64| timed.iter().map(of).sum::<u64>();
        let over = |one: &TimedPrefill| ratio(one.prefill_us, one.recompute_us);
        let telling = timed.iter().filter(|one| one.recompute_us >= TELLING_US);
        (!timed.is_empty()).then(|| Prefill {
            queue_us: Latency::of(timed.iter().map(|one| one.queue_us)),
            prefill_us: Latency::of(timed.iter().map(|one| one.prefill_us)),
            over_recompute: ratio(sum(|one| one.prefill_us), sum(|one| one.recompute_us)),
            over_recompute_max: telling.map(over).reduce(f64::max),
            idle_share: ratio(sum(|one| one.idle_us), sum(|one| one.prefill_us)),
            computed_blocks: sum(|one| one.computed_blocks.into()),
            read_buffer_bytes: sum(|one| one.read_buffer_bytes),
            streamed_blocks: sum(|one| one.streamed_blocks.into()),
        })
    }
}

/// Predicted against observed times to first token, behind the requests by which routers learn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictionError {
    /// Requests that were judged.
    pub requests: u64,
    /// Median of |predicted − observed| / observed.
    pub median: f64,
    /// Mean of what was predicted over the mean of what was observed, less 1.
    pub bias: f64,
}

/// Requests that are not judged: what a router has to learn first.
const LEARNING: usize = 200;

impl PredictionError {
    #[expect(clippy::cast_precision_loss)]
    fn of(samples: &[Sample]) -> Option<PredictionError> {
        let pair = |sample: &Sample| {
            let timed = sample.timed?;
            let observed = (timed.queue_us + timed.prefill_us) as f64;
            Some((sample.predicted_ttft_us as f64, observed.max(1.0)))
        };
        let pairs: Vec<(f64, f64)> = samples.iter().skip(LEARNING).filter_map(pair).collect();
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

/// Percentiles of a time.
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
    /// How many were measured.
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

/// Processor time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cpu {
    /// Routers, nodes and instances; absent when the cluster was someone else's.
    pub cluster_s: Option<f64>,
    /// This process.
    pub driver_s: f64,
    /// `cluster_s` over the gigabytes (10^9) of all `paths` together: the price of a path where all went over one.
    pub cluster_s_per_gb: Option<f64>,
}

/// What went over a path, in encoded bytes.
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
    fn of(measured: &Measured) -> Self {
        let cluster_s = measured.cluster_cpu.map(|cpu| cpu.as_secs_f64());
        #[expect(clippy::cast_precision_loss)]
        let gigabytes = measured.carried.total_bytes() as f64 / 1e9;
        Self {
            cluster_s,
            driver_s: measured.driver_cpu.as_secs_f64(),
            cluster_s_per_gb: cluster_s.filter(|_| gigabytes > 0.0).map(|cpu| cpu / gigabytes),
        }
    }
}

/// Part of its bound by which a process may exceed it: what the allocator keeps between pieces that are in use.
const MEMORY_MARGIN: u64 = 10;

/// Memory that a process had in place at most.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// The process.
    pub process: String,
    /// Most of it so far, in bytes.
    pub peak_bytes: u64,
    /// What it may take with its configuration, in bytes; null where no configuration says.
    pub bytes_max: Option<u64>,
    /// Whether it took more than that and a tenth. `true` is a defect.
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

/// A fault with what was lost by it. A number that does not apply, or has none, is null.
#[derive(Clone, Debug, Serialize)]
pub struct Fault {
    /// As asked for.
    pub target: String,
    /// The process it was.
    pub process: String,
    /// Seconds into the replay.
    pub at_s: f64,
    /// Requests started by then.
    pub at_request: usize,
    /// Killed node: milliseconds until no router named it any more.
    pub unrouted_ms: Option<f64>,
    /// Killed leader: milliseconds until a new one had committed a write.
    pub leader_ms: Option<f64>,
    /// Restart: milliseconds until it served.
    pub serving_ms: Option<f64>,
}

impl From<&FaultMark> for Fault {
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

/// What the named profile says the same requests would have taken on that hardware.
#[derive(Clone, Debug, Serialize)]
pub struct Modelled {
    /// Name of the instances' hardware profile; names, where they differ.
    pub profile: String,
    /// Always the same words, so that nobody takes these numbers for measurements.
    pub note: &'static str,
    /// Time to first token of requests that wait for no other, microseconds.
    pub ttft_us: Latency,
    /// Prefill of what was not cached, microseconds.
    pub prefill_us: Latency,
    /// Prefill of whole prompts, had nothing been cached, microseconds.
    pub prefill_uncached_us: Latency,
    /// Share of all prefill time that the cache saved.
    pub prefill_saved_share: f64,
}

impl Report {
    /// Adds a replay up.
    #[must_use]
    pub fn new(subject: Subject, measured: &Measured) -> Self {
        let sum = |of: fn(&Sample) -> u64| measured.sum(of);
        let latency = |of: fn(&Sample) -> Option<u64>| Latency::of(measured.samples.iter().filter_map(of));
        let faults =
            |kind| measured.faults.iter().filter(move |mark| mark.kind == kind).map(Fault::from).collect();
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
            paths: measured.carried.bytes.iter().map(|(path, bytes)| (path.clone(), bytes.into())).collect(),
            path_reasons: measured.carried.reasons.clone(),
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
    fn new(profile: String, measured: &Measured) -> Self {
        let latency = |of: fn(&Sample) -> u64| Latency::of(measured.samples.iter().map(of));
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

    fn measured() -> Measured {
        let sample = Sample {
            asked_blocks: 4,
            hit_blocks: TierBlocks { gpu: 0, dram: 2, ssd: 1 },
            fetched_bytes: 300,
            verified_bytes: 300,
            saved_bytes: 100,
            route_us: 10,
            fetch_us: Some(20),
            ..Sample::default()
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
        Measured { samples: vec![sample.clone(), sample], faults: vec![mark], ..Measured::default() }
    }

    #[test]
    fn processor_time_is_set_against_all_that_went_over_paths() {
        let bytes = [("quic", 1_500_000_000, 250_000_000), ("tcp", 250_000_000, 0)];
        let bytes = bytes.map(|(path, fetched, saved)| (path.to_owned(), PathBytes { fetched, saved }));
        let carried = crate::replay::Carried { bytes: bytes.into(), reasons: vec!["why".to_owned()] };
        let cluster_cpu = Some(std::time::Duration::from_secs(3));
        let subject = || Subject { config: Config::default(), seed: 7, profile: String::new() };
        let json = |measured| serde_json::to_value(Report::new(subject(), &measured)).unwrap();
        let told = json(Measured { carried, cluster_cpu, ..measured() });
        assert_eq!(told["cpu"]["cluster_s_per_gb"], 1.5);
        assert_eq!(told["paths"]["quic"]["saved_bytes"], 250_000_000);
        assert_eq!(
            (&told["paths"]["tcp"]["fetched_bytes"], &told["path_reasons"][0]),
            (&250_000_000.into(), &"why".into())
        );
        assert!(json(Measured { cluster_cpu, ..measured() })["cpu"]["cluster_s_per_gb"].is_null());
    }

    #[test]
    fn the_stable_keys_are_there() {
        let subject = Subject { config: Config::default(), seed: 7, profile: "laptop-emulated".into() };
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
    fn modelled_numbers_live_in_their_own_object() {
        let subject = Subject { config: Config::default(), seed: 7, profile: "h100-8b".into() };
        let json = serde_json::to_value(Report::new(subject, &measured())).unwrap();
        assert_eq!(json["modelled"]["profile"], "h100-8b");
        let outside =
            json.as_object().unwrap().keys().filter(|key| key.contains("ttft") || key.contains("prefill"));
        assert_eq!(outside.count(), 0);
    }

    #[test]
    fn predictions_are_judged_behind_what_routers_learn_from() {
        let sample = |predicted_ttft_us, queue_us, prefill_us| Sample {
            predicted_ttft_us,
            timed: Some(TimedPrefill { queue_us, prefill_us, ..TimedPrefill::default() }),
            ..Sample::default()
        };
        let mut samples = vec![sample(9_000, 1, 1); LEARNING];
        samples.extend([sample(220, 120, 80), sample(300, 200, 200), sample(440, 0, 400)]);
        let error = PredictionError::of(&samples).unwrap();
        assert_eq!(error.requests, 3);
        assert!((error.median - 0.1).abs() < 1e-9 && (error.bias + 0.04).abs() < 1e-9, "{error:?}");
        assert_eq!(PredictionError::of(&samples[..LEARNING]), None);
        let untimed = vec![Sample { predicted_ttft_us: 1, ..Sample::default() }; LEARNING + 1];
        assert_eq!(PredictionError::of(&untimed), None, "compute takes no time");
    }
}
