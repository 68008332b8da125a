//! Extracts an engine's load from its metrics, checks plausibility, and detects restarts.
//!
//! Pure. Not here: the text format (`prometheus_text.rs`), and the request (`http_probe.rs`).

use super::prometheus_text::{self, TextError};
use crate::endpoints::EngineLoad;

/// Most plausible running or waiting requests.
const REQUESTS_MAX: f64 = 1_000_000.0;

/// Longest plausible prompt.
const PROMPT_TOKENS_MAX: f64 = 16_777_216.0;

/// Least share of queued prompt tokens that is assumed to be computed, since waiting requests are
/// never free.
const COMPUTED_MIN: f64 = 0.01;

/// Latest plausible start time: the year 2100, in seconds since 1970.
const STARTED_S_MAX: f64 = 4_102_444_800.0;

/// Largest plausible count; integers are exact in f64 up to here.
const COUNT_MAX: f64 = 9_007_199_254_740_992.0;

/// Naming scheme of an engine's metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricsDialect {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// Names of the metrics that are read, for one dialect.
struct MetricNames {
    dialect: MetricsDialect,
    running: &'static str,
    waiting: &'static str,
    usage: &'static str,
    /// KV capacity in tokens, if a single metric reports it.
    kv_tokens_max: Option<&'static str>,
    /// Sum and count of times between tokens, in seconds; the first available pair is used.
    token_latency: [[&'static str; 2]; 2],
    /// Sum of prompt tokens and count of requests; the first available pair is used.
    prompts: [[&'static str; 2]; 2],
    /// Prompt tokens found in the prefix cache, and prompt tokens looked up.
    cached: [&'static str; 2],
}

const VLLM: MetricNames = MetricNames {
    dialect: MetricsDialect::Vllm,
    running: "vllm:num_requests_running",
    waiting: "vllm:num_requests_waiting",
    usage: "vllm:kv_cache_usage_perc",
    kv_tokens_max: None,
    token_latency: [
        ["vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count"],
        ["vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count"],
    ],
    prompts: [
        ["vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count"],
        ["vllm:prompt_tokens_total", "vllm:request_success_total"],
    ],
    cached: ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"],
};

const SGLANG: MetricNames = MetricNames {
    dialect: MetricsDialect::Sglang,
    running: "sglang:num_running_reqs",
    waiting: "sglang:num_queue_reqs",
    usage: "sglang:token_usage",
    kv_tokens_max: Some("sglang:max_total_num_tokens"),
    token_latency: [
        ["sglang:inter_token_latency_seconds_sum", "sglang:inter_token_latency_seconds_count"],
        ["sglang:time_per_output_token_seconds_sum", "sglang:time_per_output_token_seconds_count"],
    ],
    prompts: [
        ["sglang:prompt_tokens_histogram_sum", "sglang:prompt_tokens_histogram_count"],
        ["sglang:prompt_tokens_total", "sglang:num_requests_total"],
    ],
    cached: ["sglang:cached_tokens_total", "sglang:prompt_tokens_total"],
};

/// Exported by Prometheus's standard process collector.
const PROCESS_START: &str = "process_start_time_seconds";

/// vLLM reports the size of its KV memory, in blocks, as labels of this metric.
const VLLM_CACHE: &str = "vllm:cache_config_info";

/// Largest plausible KV capacity in tokens.
const KV_TOKENS_MAX: u64 = 1 << 40;

/// Why metrics are rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum LoadParseError {
    /// The text is not in Prometheus format.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The metrics are not of a known engine.
    #[error(
        "the metrics have neither {} nor {}: is it the port of vLLM, or of SGLang with --enable-metrics?",
        VLLM.running, SGLANG.running
    )]
    UnknownEngine,
    /// A required metric is missing.
    #[error("the metrics lack {0}, which is required")]
    MissingMetric(&'static str),
    /// A value is implausible.
    #[error("{name} is {value}, but {expected} was expected")]
    Implausible {
        /// Name of the metric.
        name: &'static str,
        /// Its value.
        value: f64,
        /// Plausible values.
        expected: &'static str,
    },
}

/// Values from one answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadSample {
    /// Dialect of the metrics.
    pub(crate) dialect: MetricsDialect,
    /// Load of the engine.
    pub(crate) load: EngineLoad,
    /// Start time of the process, in microseconds since 1970; `None` if not reported.
    started_us: Option<u64>,
    /// Finished requests so far; never decreases within one process.
    finished_requests: Option<f64>,
    /// Sum and count of times between tokens so far, in seconds.
    pub(crate) token_latency: Option<[f64; 2]>,
}

impl LoadSample {
    /// Mean time between tokens since an earlier sample, in microseconds; 0 if unknown.
    pub(crate) fn tbt_us(&self, before: Option<[f64; 2]>) -> u32 {
        let (Some([sum, count]), Some([sum_before, count_before])) = (self.token_latency, before) else {
            return 0;
        };
        let (seconds, tokens) = (sum - sum_before, count - count_before);
        // The counts of a restarted engine begin at zero.
        if tokens <= 0.0 || seconds < 0.0 { 0 } else { (seconds / tokens * 1e6) as u32 }
    }
}

/// Sums of metrics over their series, one per rank or model. Usage shares and start times use the
/// maximum.
#[derive(Default)]
struct MetricSums(Vec<(&'static str, f64)>);

impl MetricSums {
    fn add(&mut self, name: &'static str, value: f64) -> Result<(), LoadParseError> {
        let nonsense = |expected| LoadParseError::Implausible { name, value, expected };
        let is_share = [VLLM.usage, SGLANG.usage].contains(&name);
        let is_besides = is_optional(name);
        let (most, expected) = if is_share {
            (1.0, "")
        } else if name == PROCESS_START {
            (STARTED_S_MAX, "a time in seconds since 1970")
        } else if [VLLM.running, VLLM.waiting, SGLANG.running, SGLANG.waiting].contains(&name) {
            (REQUESTS_MAX, "0 to 1000000 requests")
        } else {
            (COUNT_MAX, "a count")
        };
        // The range check also rejects NaN. Invalid usage shares and optional metrics are ignored.
        if !(0.0..=most).contains(&value) {
            if is_share || is_besides {
                return Ok(());
            }
            return Err(nonsense(expected));
        }
        let Some((_, sum)) = self.0.iter_mut().find(|(known, _)| *known == name) else {
            self.0.push((name, value));
            return Ok(());
        };
        *sum = if is_share || name == PROCESS_START { sum.max(value) } else { *sum + value };
        if *sum > most && !is_besides { Err(nonsense(expected)) } else { Ok(()) }
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, sum)| *sum)
    }
}

/// Whether the load can be computed without the metric of this name.
fn is_optional(name: &str) -> bool {
    [&VLLM, &SGLANG].iter().any(|names| {
        let is_cached = names.cached.contains(&name) && !names.prompts.as_flattened().contains(&name);
        names.kv_tokens_max == Some(name) || is_cached || names.token_latency.as_flattened().contains(&name)
    })
}

/// KV capacity of vLLM in tokens, summed over ranks: blocks times block size, from labels; 0 if not
/// reported.
fn cache_tokens(body: &[u8]) -> u64 {
    let lines = body.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let infos = lines.filter_map(|line| line.trim_start().strip_prefix(VLLM_CACHE)?.strip_prefix('{'));
    let label = |labels: &str, name: &str| {
        let (_, tail) = labels.split_once(&format!("{name}=\""))?;
        tail.split_once('"')?.0.parse::<u64>().ok()
    };
    let tokens = |labels: &str| label(labels, "num_gpu_blocks")?.checked_mul(label(labels, "block_size")?);
    infos.filter_map(tokens).fold(0, u64::saturating_add)
}

/// Parses an engine's answer to `/metrics`. Before its first finished request, prompts count as
/// `prompt_tokens` long.
pub(crate) fn parse(body: &[u8], prompt_tokens: u32) -> Result<LoadSample, LoadParseError> {
    let mut wanted = vec![PROCESS_START];
    for names in [&VLLM, &SGLANG] {
        wanted.extend([names.running, names.waiting, names.usage]);
        wanted.extend(names.kv_tokens_max);
        wanted.extend(names.token_latency.as_flattened());
        wanted.extend(names.prompts.as_flattened());
        wanted.extend(names.cached);
    }
    let (mut sums, mut wrong) = (MetricSums::default(), Ok(()));
    prometheus_text::parse(body, &wanted, |name, value| {
        if wrong.is_ok() {
            wrong = sums.add(name, value);
        }
    })?;
    wrong?;
    let names = [&VLLM, &SGLANG].into_iter().find(|names| sums.get(names.running).is_some());
    let names = names.ok_or(LoadParseError::UnknownEngine)?;
    let part = |name: &'static str| sums.get(name).ok_or(LoadParseError::MissingMetric(name));
    let (running, waiting) = (part(names.running)?, part(names.waiting)?);
    let pair = |[tokens, requests]: [&'static str; 2]| Some((tokens, sums.get(tokens)?, sums.get(requests)?));
    let prompts = names.prompts.into_iter().find_map(pair);
    let mean = match prompts {
        Some((_, tokens, requests)) if requests >= 1.0 => tokens / requests,
        _ => f64::from(prompt_tokens),
    };
    if mean > PROMPT_TOKENS_MAX {
        let name = prompts.map_or(names.waiting, |(name, ..)| name);
        let expected = "a mean prompt length of at most 16777216 tokens";
        return Err(LoadParseError::Implausible { name, value: mean, expected });
    }
    // Assume that waiting prompts have the same cache hit rate as earlier ones.
    let [hits, asked] = names.cached.map(|name| sums.get(name).unwrap_or_default());
    let computed = if asked >= 1.0 { (1.0 - hits / asked).clamp(COMPUTED_MIN, 1.0) } else { 1.0 };
    let heard = EngineLoad {
        running: running as u32,
        waiting: waiting as u32,
        queue_tokens: (waiting * mean * computed).round() as u64,
        usage: sums.get(names.usage),
        kv_tokens_max: match names.kv_tokens_max {
            Some(name) => sums.get(name).map_or(0, |tokens| tokens as u64),
            None => cache_tokens(body),
        }
        .min(KV_TOKENS_MAX),
    };
    let paces =
        names.token_latency.into_iter().find_map(|[sum, count]| Some([sums.get(sum)?, sums.get(count)?]));
    let started_us =
        sums.get(PROCESS_START).map(|seconds| (seconds * 1e6) as u64).filter(|started| *started > 0);
    Ok(LoadSample {
        dialect: names.dialect,
        load: heard,
        started_us,
        finished_requests: prompts.map(|(_, _, requests)| requests),
        token_latency: paces,
    })
}

/// Identity of an engine process, as far as its metrics reveal it. Reports are sequenced by its
/// start time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessIdentity {
    started_us: u64,
    finished_requests: Option<f64>,
    has_sample: bool,
}

impl ProcessIdentity {
    /// Identity for a new engine of the instance; its start time is later than any before.
    pub(crate) fn successor(self) -> ProcessIdentity {
        ProcessIdentity { started_us: self.started_us + 1, finished_requests: None, has_sample: false }
    }

    /// Start time that is reported to routers, in microseconds since 1970.
    pub(crate) fn started_us(&self) -> u64 {
        self.started_us
    }

    /// Applies a sample. Returns whether it comes from another process than the previous sample.
    ///
    /// The start time never decreases, because routers ignore reports of earlier processes. If the
    /// engine does not report it, it is zero at first, and becomes the current time when counts
    /// decrease.
    pub(crate) fn observe(&mut self, reading: &LoadSample, now_us: u64) -> bool {
        let finished = (self.finished_requests, reading.finished_requests);
        let fell = matches!(finished, (Some(before), Some(now)) if now < before);
        let said = reading.started_us.filter(|said| *said > self.started_us);
        let was_heard = std::mem::replace(&mut self.has_sample, true);
        let is_other = was_heard && (fell || said.is_some());
        self.finished_requests = reading.finished_requests.or(self.finished_requests);
        match said {
            Some(said) => self.started_us = said,
            None if fell => self.started_us = now_us.max(self.started_us + 1),
            None => {}
        }
        is_other
    }
}

#[cfg(test)]
mod tests;
