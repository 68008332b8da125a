//! What a router counts of the events of engines.
//!
//! Not here: what instances say of themselves, and how many blocks they have in the end (`crate::metrics`).

use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::id::InstanceId;
use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::aliases::LeftOut;

/// What becomes of a message.
const OUTCOMES: &[&str] = &["applied", "before", "malformed", "unreadable", "other_rank"];

/// What becomes of a gap.
const GAP_OUTCOMES: &[&str] = &["filled", "lost"];

/// Why a block has no place.
const LEFT_OUT_REASONS: &[&str] =
    &["orphan", "opaque", "odd_size", "other_group", "unknown_salt", "over_limit", "no_room"];

/// Handles; clones share them.
#[derive(Clone)]
pub(crate) struct EngineMetrics {
    messages: IntCounterVec,
    gaps: IntCounterVec,
    restarts: IntCounterVec,
    unknown_events: IntCounterVec,
    left_out: IntCounterVec,
    connected: IntGaugeVec,
    lag: GaugeVec,
}

impl EngineMetrics {
    /// Registers all of them.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<EngineMetrics> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let connected = IntGaugeVec::new(
            Opts::new("kvfleet_engine_connected", "1 while the events of an engine are heard"),
            &["instance"],
        )?;
        registry.register(Box::new(connected.clone()))?;
        let lag = GaugeVec::new(
            Opts::new(
                "kvfleet_engine_lag_seconds",
                "Time from when an engine made the last message that came live, by its clock, until it was read here",
            ),
            &["instance"],
        )?;
        registry.register(Box::new(lag.clone()))?;
        let instance_and = |label| ["instance", label];
        Ok(EngineMetrics {
            messages: counter(
                "kvfleet_engine_messages_total",
                "Messages of an engine by what became of them",
                &instance_and("outcome"),
            )?,
            gaps: counter(
                "kvfleet_engine_gaps_total",
                "Times that messages of an engine were missing, by whether a replay brought them",
                &instance_and("outcome"),
            )?,
            restarts: counter(
                "kvfleet_engine_restarts_total",
                "Times that an engine was, or may have been, another process, and what it had said became void",
                &["instance"],
            )?,
            unknown_events: counter(
                "kvfleet_engine_unknown_events_total",
                "Events of kinds that this release does not know",
                &["instance"],
            )?,
            left_out: counter(
                "kvfleet_engine_left_out_blocks_total",
                "Blocks of an engine that have no place in the index, by reason",
                &instance_and("reason"),
            )?,
            connected,
            lag,
        })
    }

    /// Shows those of one rank no more.
    pub(super) fn forget(&self, instance: InstanceId) {
        let name = instance.0.to_string();
        let EngineMetrics { messages, gaps, restarts, unknown_events, left_out, connected, lag } = self;
        // What was never counted is not there.
        for (counter, values) in [(messages, OUTCOMES), (gaps, GAP_OUTCOMES), (left_out, LEFT_OUT_REASONS)] {
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

    /// Those of one rank.
    pub(super) fn of(&self, instance: InstanceId) -> RankMetrics {
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
    pub(super) fn message(&self, outcome: &str) {
        self.all.messages.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn gap(&self, outcome: &str) {
        self.all.gaps.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn restarted(&self) {
        self.all.restarts.with_label_values(&[&self.name]).inc();
    }

    pub(super) fn unknown_events(&self, count: u32) {
        if count > 0 {
            self.all.unknown_events.with_label_values(&[&self.name]).inc_by(count.into());
        }
    }

    pub(super) fn left_out(&self, left_out: LeftOut) {
        let LeftOut { orphans, opaque, odd_size, other_group, unknown_salt, over_limit } = left_out;
        let reasons = [
            ("orphan", orphans),
            ("opaque", opaque),
            ("odd_size", odd_size),
            ("other_group", other_group),
            ("unknown_salt", unknown_salt),
            ("over_limit", over_limit),
        ];
        for (reason, blocks) in reasons.into_iter().filter(|(_, blocks)| *blocks > 0) {
            self.all.left_out.with_label_values(&[&self.name, reason]).inc_by(blocks);
        }
    }

    pub(super) fn no_room(&self, blocks: u64) {
        if blocks > 0 {
            self.all.left_out.with_label_values(&[&self.name, "no_room"]).inc_by(blocks);
        }
    }

    pub(super) fn connected(&self, is_connected: bool) {
        self.connected.set(is_connected.into());
    }

    /// When the message just read was made, in seconds since 1970 by the engine's clock.
    pub(super) fn made_at(&self, at_s: f64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if at_s.is_finite() {
            self.lag.set(now.as_secs_f64() - at_s);
        }
    }
}
