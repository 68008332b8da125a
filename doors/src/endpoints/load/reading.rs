//! What an engine's metrics say of its load: which of them that is, what is believed, and whether it is the process that spoke before.
//!
//! Pure. Not here: the text (`text.rs`), and how it comes (`ask.rs`).

use super::text::{self, TextError};
use crate::endpoints::Heard;

/// More requests than any engine runs or has waiting.
const REQUESTS_MAX: f64 = 1_000_000.0;

/// Longer than any prompt.
const PROMPT_TOKENS_MAX: f64 = 16_777_216.0;

/// Least share of prompts that is taken to be computed: who waits is not nothing.
const COMPUTED_MIN: f64 = 0.01;

/// The year 2100: clocks of engines may be wrong, but not without end.
const STARTED_S_MAX: f64 = 4_102_444_800.0;

/// Larger counts than any engine reaches; whole numbers are exact up to here.
const COUNT_MAX: f64 = 9_007_199_254_740_992.0;

/// What an engine is, as its metrics are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// Metrics that say the same of either.
struct Names {
    make: Make,
    running: &'static str,
    waiting: &'static str,
    usage: &'static str,
    /// Tokens that its KV memory holds, where one number says it.
    kv_tokens_max: Option<&'static str>,
    /// Seconds between two tokens, summed up, and how many such times: the first pair that is there.
    paces: [[&'static str; 2]; 2],
    /// Prompt tokens of all requests so far, and how many requests those were: the first pair that is there.
    prompts: [[&'static str; 2]; 2],
    /// Prompt tokens that were there already, and those that were looked for.
    cached: [&'static str; 2],
}

const VLLM: Names = Names {
    make: Make::Vllm,
    running: "vllm:num_requests_running",
    waiting: "vllm:num_requests_waiting",
    usage: "vllm:kv_cache_usage_perc",
    kv_tokens_max: None,
    paces: [
        ["vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count"],
        ["vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count"],
    ],
    prompts: [
        ["vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count"],
        ["vllm:prompt_tokens_total", "vllm:request_success_total"],
    ],
    cached: ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"],
};

const SGLANG: Names = Names {
    make: Make::Sglang,
    running: "sglang:num_running_reqs",
    waiting: "sglang:num_queue_reqs",
    usage: "sglang:token_usage",
    kv_tokens_max: Some("sglang:max_total_num_tokens"),
    paces: [
        ["sglang:inter_token_latency_seconds_sum", "sglang:inter_token_latency_seconds_count"],
        ["sglang:time_per_output_token_seconds_sum", "sglang:time_per_output_token_seconds_count"],
    ],
    prompts: [
        ["sglang:prompt_tokens_histogram_sum", "sglang:prompt_tokens_histogram_count"],
        ["sglang:prompt_tokens_total", "sglang:num_requests_total"],
    ],
    cached: ["sglang:cached_tokens_total", "sglang:prompt_tokens_total"],
};

/// Of every process that the usual client library measures.
const STARTED: &str = "process_start_time_seconds";

/// A vLLM says the size of its KV memory in labels of this, in blocks.
const VLLM_CACHE: &str = "vllm:cache_config_info";

/// More tokens than any KV memory holds.
const KV_TOKENS_MAX: u64 = 1 << 40;

/// Why a load is not believed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ReadingError {
    /// It is no text of metrics.
    #[error(transparent)]
    Text(#[from] TextError),
    /// It is, of something else.
    #[error(
        "the metrics have neither {} nor {}: is it the port of a vLLM or an SGLang, the latter with --enable-metrics?",
        VLLM.running, SGLANG.running
    )]
    OfNothing,
    /// A part is missing.
    #[error("the metrics have no {0}, without which its load is not known")]
    Missing(&'static str),
    /// A number that cannot be.
    #[error("the metrics say {name} is {value}, which cannot be: {expected} was expected")]
    Nonsense {
        /// Which.
        name: &'static str,
        /// What was said.
        value: f64,
        /// What can be.
        expected: &'static str,
    },
}

/// What one text of metrics says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reading {
    /// What the engine is.
    pub(crate) make: Make,
    /// Its load.
    pub(crate) heard: Heard,
    /// When its process started, in microseconds since 1970, where it says so.
    started_us: Option<u64>,
    /// Requests that ended so far: this never falls within one process.
    ended: Option<f64>,
    /// Seconds between two tokens so far, summed up, and how many such times.
    pub(crate) paces: Option<[f64; 2]>,
}

impl Reading {
    /// Mean time between two tokens since an earlier reading, in microseconds; 0 where none came, or that cannot be told.
    pub(crate) fn tbt_us(&self, before: Option<[f64; 2]>) -> u32 {
        let (Some([sum, count]), Some([sum_before, count_before])) = (self.paces, before) else { return 0 };
        let (seconds, tokens) = (sum - sum_before, count - count_before);
        // Whoever started anew counts from nothing.
        if tokens <= 0.0 || seconds < 0.0 { 0 } else { (seconds / tokens * 1e6) as u32 }
    }
}

/// Sums of what has several lines, one for each rank or model; of shares the largest.
#[derive(Default)]
struct Sums(Vec<(&'static str, f64)>);

impl Sums {
    fn add(&mut self, name: &'static str, value: f64) -> Result<(), ReadingError> {
        let nonsense = |expected| ReadingError::Nonsense { name, value, expected };
        let is_share = [VLLM.usage, SGLANG.usage].contains(&name);
        let is_besides = is_besides(name);
        let (most, expected) = if is_share {
            (1.0, "")
        } else if name == STARTED {
            (STARTED_S_MAX, "a time in seconds since 1970")
        } else if [VLLM.running, VLLM.waiting, SGLANG.running, SGLANG.waiting].contains(&name) {
            (REQUESTS_MAX, "0 to 1000000 requests")
        } else {
            (COUNT_MAX, "a count")
        };
        // Not a number is in no range. The load is known without the share, and without what is of decoding.
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
        *sum = if is_share || name == STARTED { sum.max(value) } else { *sum + value };
        if *sum > most && !is_besides { Err(nonsense(expected)) } else { Ok(()) }
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, sum)| *sum)
    }
}

/// Whether a load is known without what has this name.
fn is_besides(name: &str) -> bool {
    [&VLLM, &SGLANG].iter().any(|names| {
        let is_cached = names.cached.contains(&name) && !names.prompts.as_flattened().contains(&name);
        names.kv_tokens_max == Some(name) || is_cached || names.paces.as_flattened().contains(&name)
    })
}

/// Tokens that the KV memory of a vLLM holds, of all ranks together: blocks times their size, as labels say; 0 where they do not.
fn cache_tokens(body: &[u8]) -> u64 {
    let lines = body.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let infos = lines.filter_map(|line| line.trim_start().strip_prefix(VLLM_CACHE)?.strip_prefix('{'));
    let label = |labels: &str, name: &str| {
        let (_, behind) = labels.split_once(&format!("{name}=\""))?;
        behind.split_once('"')?.0.parse::<u64>().ok()
    };
    let tokens = |labels: &str| label(labels, "num_gpu_blocks")?.checked_mul(label(labels, "block_size")?);
    infos.filter_map(tokens).fold(0, u64::saturating_add)
}

/// Reads what an engine answers at `/metrics`. Until it has ended a request, its prompts count as `prompt_tokens` long.
pub(crate) fn read(body: &[u8], prompt_tokens: u32) -> Result<Reading, ReadingError> {
    let mut wanted = vec![STARTED];
    for names in [&VLLM, &SGLANG] {
        wanted.extend([names.running, names.waiting, names.usage]);
        wanted.extend(names.kv_tokens_max);
        wanted.extend(names.paces.as_flattened());
        wanted.extend(names.prompts.as_flattened());
        wanted.extend(names.cached);
    }
    let (mut sums, mut wrong) = (Sums::default(), Ok(()));
    text::read(body, &wanted, |name, value| {
        if wrong.is_ok() {
            wrong = sums.add(name, value);
        }
    })?;
    wrong?;
    let names = [&VLLM, &SGLANG].into_iter().find(|names| sums.get(names.running).is_some());
    let names = names.ok_or(ReadingError::OfNothing)?;
    let part = |name: &'static str| sums.get(name).ok_or(ReadingError::Missing(name));
    let (running, waiting) = (part(names.running)?, part(names.waiting)?);
    let pair = |[tokens, requests]: [&'static str; 2]| Some((tokens, sums.get(tokens)?, sums.get(requests)?));
    let prompts = names.prompts.into_iter().find_map(pair);
    let mean = match prompts {
        Some((_, tokens, requests)) if requests >= 1.0 => tokens / requests,
        _ => f64::from(prompt_tokens),
    };
    if mean > PROMPT_TOKENS_MAX {
        let name = prompts.map_or(names.waiting, |(name, ..)| name);
        let expected = "a sum of prompts of at most 16777216 tokens each";
        return Err(ReadingError::Nonsense { name, value: mean, expected });
    }
    // Of those that wait as many tokens are there already as of those before them.
    let [hits, asked] = names.cached.map(|name| sums.get(name).unwrap_or_default());
    let computed = if asked >= 1.0 { (1.0 - hits / asked).clamp(COMPUTED_MIN, 1.0) } else { 1.0 };
    let heard = Heard {
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
    let paces = names.paces.into_iter().find_map(|[sum, count]| Some([sums.get(sum)?, sums.get(count)?]));
    let started_us = sums.get(STARTED).map(|seconds| (seconds * 1e6) as u64).filter(|started| *started > 0);
    Ok(Reading {
        make: names.make,
        heard,
        started_us,
        ended: prompts.map(|(_, _, requests)| requests),
        paces,
    })
}

/// Which process an instance is, as far as its metrics tell: what reports are numbered under.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Life {
    started_us: u64,
    ended: Option<f64>,
    is_heard: bool,
}

impl Life {
    /// Of whoever is the instance now: whatever it says, it started after what was there before.
    pub(crate) fn next(self) -> Life {
        Life { started_us: self.started_us + 1, ended: None, is_heard: false }
    }

    /// The start that routers are told.
    pub(crate) fn started_us(&self) -> u64 {
        self.started_us
    }

    /// Hears a reading; whether it is of another process than the one before.
    ///
    /// A start never goes back, because routers ignore what they are told of an earlier one. An engine that does not tell its start has one that is
    /// made up: as early as can be at first, and the present once its counts fell.
    pub(crate) fn hear(&mut self, reading: &Reading, now_us: u64) -> bool {
        let fell = matches!((self.ended, reading.ended), (Some(before), Some(now)) if now < before);
        let said = reading.started_us.filter(|said| *said > self.started_us);
        let was_heard = std::mem::replace(&mut self.is_heard, true);
        let is_other = was_heard && (fell || said.is_some());
        self.ended = reading.ended.or(self.ended);
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
