//! Figures of the doors, in the process's own registry.
//!
//! Labels are of our own words only: nothing that a caller sends becomes one. Not here: what is counted when.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::prompt::Reading;

/// From a fast refusal to a long prefill.
const SECONDS: [f64; 14] =
    [0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// How prompts are read. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct PromptMetrics {
    prompts: IntCounterVec,
    unhashed: IntCounter,
}

impl PromptMetrics {
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<PromptMetrics> {
        Ok(PromptMetrics {
            prompts: counters(
                registry,
                "kvfleet_doors_prompts_total",
                "Prompts by how they were read: tokens as the engine has them, or text, by which no engine's blocks are known.",
                "read",
            )?,
            unhashed: counter(
                registry,
                "kvfleet_doors_prompts_unhashed_total",
                "Prompts without a hash: shorter than a block, or with a cache_salt that no tenant has.",
            )?,
        })
    }

    pub(crate) fn read(&self, reading: Reading, is_unhashed: bool) {
        self.prompts.with_label_values(&[reading.name()]).inc();
        self.unhashed.inc_by(u64::from(is_unhashed));
    }
}

/// How an OpenAI request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Outcome {
    /// The engine's answer went to its end.
    Answered,
    /// It could not be read.
    Refused,
    /// The router said not now.
    Busy,
    /// Nobody could take it, or too many are under way.
    Nobody,
    /// Every engine that was tried failed.
    Failed,
    /// The engine's answer broke off.
    Cut,
    /// The caller left.
    Left,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Outcome::Answered => "answered",
            Outcome::Refused => "refused",
            Outcome::Busy => "busy",
            Outcome::Nobody => "nobody",
            Outcome::Failed => "failed",
            Outcome::Cut => "cut",
            Outcome::Left => "left",
        }
    }
}

/// What the OpenAI door counts. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    requests: IntCounterVec,
    running: IntGauge,
    retries: IntCounterVec,
    exhausted: IntCounter,
    breakers_open: IntGauge,
    breaker_opened: IntCounter,
    compared: IntCounterVec,
    first_byte: Histogram,
    own: Histogram,
}

impl Metrics {
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<Metrics> {
        Ok(Metrics {
            requests: counters(
                registry,
                "kvfleet_doors_requests_total",
                "OpenAI requests by how they ended.",
                "outcome",
            )?,
            running: gauge(registry, "kvfleet_doors_requests_running", "OpenAI requests under way.")?,
            retries: counters(
                registry,
                "kvfleet_doors_retries_total",
                "Requests sent to another engine, by what the one before did.",
                "cause",
            )?,
            exhausted: counter(
                registry,
                "kvfleet_doors_retries_exhausted_total",
                "Requests that failed wherever they were sent.",
            )?,
            breakers_open: gauge(
                registry,
                "kvfleet_doors_breakers_open",
                "Engines that are left alone, or tried one request at a time.",
            )?,
            breaker_opened: counter(
                registry,
                "kvfleet_doors_breaker_opened_total",
                "Times that an engine began to be left alone.",
            )?,
            compared: counters(
                registry,
                "kvfleet_doors_prompt_tokens_compared_total",
                "Prompts whose tokens the engine counted as the door did (equal), or not (differs): then its blocks have other hashes.",
                "result",
            )?,
            first_byte: histogram(
                registry,
                "kvfleet_doors_first_byte_seconds",
                "From a request's last byte to the first of its answer.",
            )?,
            own: histogram(
                registry,
                "kvfleet_doors_own_seconds",
                "From a request's last byte until it was sent to an engine.",
            )?,
        })
    }

    pub(crate) fn began(&self) {
        self.running.inc();
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        self.running.dec();
        self.requests.with_label_values(&[outcome.name()]).inc();
    }

    /// One came, and there was no place for it.
    pub(crate) fn turned_away(&self) {
        self.requests.with_label_values(&[Outcome::Nobody.name()]).inc();
    }

    pub(crate) fn retried(&self, cause: &'static str) {
        self.retries.with_label_values(&[cause]).inc();
    }

    pub(crate) fn exhausted(&self) {
        self.exhausted.inc();
    }

    pub(crate) fn breakers_open(&self, count: usize) {
        self.breakers_open.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn breaker_opened(&self) {
        self.breaker_opened.inc();
    }

    pub(crate) fn compared(&self, is_equal: bool) {
        self.compared.with_label_values(&[if is_equal { "equal" } else { "differs" }]).inc();
    }

    pub(crate) fn first_byte(&self, took: Duration) {
        self.first_byte.observe(took.as_secs_f64());
    }

    pub(crate) fn sent(&self, took: Duration) {
        self.own.observe(took.as_secs_f64());
    }
}

fn counters(registry: &Registry, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
    let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
    registry.register(Box::new(counters.clone()))?;
    Ok(counters)
}

fn counter(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntCounter> {
    let counter = IntCounter::new(name, help)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntGauge> {
    let gauge = IntGauge::new(name, help)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

fn histogram(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Histogram> {
    let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(SECONDS.to_vec()))?;
    registry.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}
