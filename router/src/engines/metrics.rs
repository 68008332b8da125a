//! Metrics of engine events.
//!
//! Not here: reports of instances themselves, and the number of resident blocks (`crate::metrics`).

use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::id::InstanceId;
use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::aliases::UnmappedBlocks;

/// Outcomes of a message.
const OUTCOMES: &[&str] = &["applied", "before", "malformed", "unreadable", "other_rank"];

/// Outcomes of a gap.
const GAP_OUTCOMES: &[&str] = &["filled", "lost"];

/// Reasons why a block is not indexed.
const UNMAPPED_REASONS: &[&str] =
    &["orphan", "opaque", "odd_size", "other_group", "unknown_salt", "over_limit", "no_room"];

/// Handles; clones share them.
#[derive(Clone)]
pub(crate) struct EngineMetrics {
    messages: IntCounterVec,
    gaps: IntCounterVec,
    restarts: IntCounterVec,
    unknown_events: IntCounterVec,
    unmapped: IntCounterVec,
    connected: IntGaugeVec,
    lag: GaugeVec,
}

impl EngineMetrics {
    /// Registers all metrics.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<EngineMetrics> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let connected = IntGaugeVec::new(
            Opts::new("kvfleet_engine_connected", "1 while the router is connected to an engine's events"),
            &["instance"],
        )?;
        registry.register(Box::new(connected.clone()))?;
        let lag = GaugeVec::new(
            Opts::new(
                "kvfleet_engine_lag_seconds",
                "Time in seconds from creation of the last live message, by the engine's clock, until it was read",
            ),
            &["instance"],
        )?;
        registry.register(Box::new(lag.clone()))?;
        let instance_and = |label| ["instance", label];
        Ok(EngineMetrics {
            messages: counter(
                "kvfleet_engine_messages_total",
                "Messages of an engine by outcome",
                &instance_and("outcome"),
            )?,
            gaps: counter(
                "kvfleet_engine_gaps_total",
                "Gaps in the messages of an engine, by whether a replay filled them",
                &instance_and("outcome"),
            )?,
            restarts: counter(
                "kvfleet_engine_restarts_total",
                "Engine restarts detected or assumed; each one invalidates the engine's resident blocks",
                &["instance"],
            )?,
            unknown_events: counter(
                "kvfleet_engine_unknown_events_total",
                "Events of kinds unknown to this release",
                &["instance"],
            )?,
            unmapped: counter(
                "kvfleet_engine_unmapped_blocks_total",
                "Blocks of an engine that are not indexed, by reason",
                &instance_and("reason"),
            )?,
            connected,
            lag,
        })
    }

    /// Removes the metrics of one rank.
    pub(super) fn remove(&self, instance: InstanceId) {
        let name = instance.0.to_string();
        let EngineMetrics { messages, gaps, restarts, unknown_events, unmapped: left_out, connected, lag } =
            self;
        // A value that was never counted does not exist.
        for (counter, values) in [(messages, OUTCOMES), (gaps, GAP_OUTCOMES), (left_out, UNMAPPED_REASONS)] {
            for value in values {
                let _ = counter.remove_label_values(&[&name, *value]);
            }
        }
        for counter in [restarts, unknown_events] {
            let _ = counter.remove_label_values(&[&name]);
        }
        let _ = connected.remove_label_values(&[&name]);
        let _ = lag.remove_label_values(&[&name]);
    }

    /// Metrics of one rank.
    pub(super) fn for_rank(&self, instance: InstanceId) -> RankMetrics {
        let name = instance.0.to_string();
        let (connected, lag) =
            (self.connected.with_label_values(&[&name]), self.lag.with_label_values(&[&name]));
        RankMetrics { all: self.clone(), connected, lag, name }
    }
}

/// Handles for one rank.
#[derive(Clone)]
pub(super) struct RankMetrics {
    all: EngineMetrics,
    connected: IntGauge,
    lag: Gauge,
    name: String,
}

impl RankMetrics {
    pub(super) fn count_message(&self, outcome: &str) {
        self.all.messages.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn count_gap(&self, outcome: &str) {
        self.all.gaps.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn count_restart(&self) {
        self.all.restarts.with_label_values(&[&self.name]).inc();
    }

    pub(super) fn count_unknown_events(&self, count: u32) {
        if count > 0 {
            self.all.unknown_events.with_label_values(&[&self.name]).inc_by(count.into());
        }
    }

    pub(super) fn unmapped(&self, left_out: UnmappedBlocks) {
        let UnmappedBlocks { orphans, opaque, odd_size, other_group, unknown_salt, over_limit } = left_out;
        let reasons = [
            ("orphan", orphans),
            ("opaque", opaque),
            ("odd_size", odd_size),
            ("other_group", other_group),
            ("unknown_salt", unknown_salt),
            ("over_limit", over_limit),
        ];
        for (reason, blocks) in reasons.into_iter().filter(|(_, blocks)| *blocks > 0) {
            self.all.unmapped.with_label_values(&[&self.name, reason]).inc_by(blocks);
        }
    }

    pub(super) fn count_no_room(&self, blocks: u64) {
        if blocks > 0 {
            self.all.unmapped.with_label_values(&[&self.name, "no_room"]).inc_by(blocks);
        }
    }

    pub(super) fn set_connected(&self, is_connected: bool) {
        self.connected.set(is_connected.into());
    }

    /// Records the lag of a live message, made at this time in seconds since 1970 by the engine's
    /// clock.
    pub(super) fn record_lag(&self, at_s: f64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if at_s.is_finite() {
            self.lag.set(now.as_secs_f64() - at_s);
        }
    }
}
