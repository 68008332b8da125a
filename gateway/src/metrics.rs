//! Metrics of the gateway, in the process's own registry.
//!
//! Label values come from fixed sets, never from what a caller sends. Not here: where each metric
//! is updated.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::prompt::PromptForm;

/// Buckets from a fast refusal to a long prefill, in seconds.
const SECONDS: [f64; 14] =
    [0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// Metrics of reading prompts. Clones share the counters.
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
                "kvfleet_gateway_prompts_total",
                "Prompts by how they were read: as the engine's tokens, or as text that matches no engine's blocks.",
                "read",
            )?,
            unhashed: counter(
                registry,
                "kvfleet_gateway_prompts_unhashed_total",
                "Prompts without a block hash: shorter than a block, or with a cache_salt that no tenant has.",
            )?,
        })
    }

    pub(crate) fn prompt_read(&self, reading: PromptForm, is_unhashed: bool) {
        self.prompts.with_label_values(&[reading.name()]).inc();
        self.unhashed.inc_by(u64::from(is_unhashed));
    }
}

/// How an OpenAI request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RequestOutcome {
    /// The engine's answer was relayed to its end.
    Completed,
    /// The request had no valid API key.
    Unauthenticated,
    /// The request could not be read.
    Refused,
    /// The router answered busy, or a limit of the API key is reached.
    Busy,
    /// No instance could take it, or too many requests are in flight.
    Unavailable,
    /// Every engine that was tried failed.
    Failed,
    /// The engine's answer broke off.
    Truncated,
    /// The caller disconnected.
    ClientClosed,
}

impl RequestOutcome {
    fn name(self) -> &'static str {
        match self {
            RequestOutcome::Completed => "answered",
            RequestOutcome::Unauthenticated => "unauthenticated",
            RequestOutcome::Refused => "refused",
            RequestOutcome::Busy => "busy",
            RequestOutcome::Unavailable => "nobody",
            RequestOutcome::Failed => "failed",
            RequestOutcome::Truncated => "cut",
            RequestOutcome::ClientClosed => "left",
        }
    }
}

/// Metrics of the OpenAI API. Clones share the counters.
#[derive(Clone, Debug)]
pub(crate) struct OpenAiMetrics {
    requests: IntCounterVec,
    running: IntGauge,
    retries: IntCounterVec,
    retries_exhausted: IntCounter,
    breakers_open: IntGauge,
    breaker_opened: IntCounter,
    prompt_tokens_compared: IntCounterVec,
    first_byte: Histogram,
    overhead: Histogram,
}

impl OpenAiMetrics {
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<OpenAiMetrics> {
        Ok(OpenAiMetrics {
            requests: counters(
                registry,
                "kvfleet_gateway_requests_total",
                "OpenAI requests by outcome.",
                "outcome",
            )?,
            running: gauge(registry, "kvfleet_gateway_requests_running", "OpenAI requests in flight.")?,
            retries: counters(
                registry,
                "kvfleet_gateway_retries_total",
                "Requests sent again to another engine, by the cause of the previous failure.",
                "cause",
            )?,
            retries_exhausted: counter(
                registry,
                "kvfleet_gateway_retries_exhausted_total",
                "Requests that failed on every engine that was tried.",
            )?,
            breakers_open: gauge(
                registry,
                "kvfleet_gateway_breakers_open",
                "Engines with an open or half-open circuit breaker.",
            )?,
            breaker_opened: counter(
                registry,
                "kvfleet_gateway_breaker_opened_total",
                "Times that an engine's circuit breaker opened.",
            )?,
            prompt_tokens_compared: counters(
                registry,
                "kvfleet_gateway_prompt_tokens_compared_total",
                "Prompts by whether the engine's token count equals the gateway's (equal) or not (differs). \
                 If it differs, block hashes do not match either.",
                "result",
            )?,
            first_byte: histogram(
                registry,
                "kvfleet_gateway_first_byte_seconds",
                "Seconds from a request's last byte to the first byte of its answer.",
            )?,
            overhead: histogram(
                registry,
                "kvfleet_gateway_overhead_seconds",
                "Seconds from a request's last byte until it was sent to an engine.",
            )?,
        })
    }

    pub(crate) fn request_started(&self) {
        self.running.inc();
    }

    pub(crate) fn request_ended(&self, outcome: RequestOutcome) {
        self.running.dec();
        self.requests.with_label_values(&[outcome.name()]).inc();
    }

    /// Counts a request that was refused before it counted as running.
    pub(crate) fn request_rejected(&self, outcome: RequestOutcome) {
        self.requests.with_label_values(&[outcome.name()]).inc();
    }

    pub(crate) fn request_retried(&self, cause: &'static str) {
        self.retries.with_label_values(&[cause]).inc();
    }

    pub(crate) fn retries_exhausted(&self) {
        self.retries_exhausted.inc();
    }

    pub(crate) fn breakers_open(&self, count: usize) {
        self.breakers_open.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn breaker_opened(&self) {
        self.breaker_opened.inc();
    }

    pub(crate) fn prompt_tokens_compared(&self, is_equal: bool) {
        self.prompt_tokens_compared.with_label_values(&[if is_equal { "equal" } else { "differs" }]).inc();
    }

    pub(crate) fn first_byte(&self, took: Duration) {
        self.first_byte.observe(took.as_secs_f64());
    }

    pub(crate) fn request_sent(&self, took: Duration) {
        self.overhead.observe(took.as_secs_f64());
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
