//! Reassignment of a request that runs on another instance than decided: its load is moved from the
//! first instance to the second.
//!
//! The frontend may find that an instance does not take a request, and use another one. Until the
//! router learns of it, the first looks as busy as if it had the request, and the second looks
//! idle. Not here: in-flight and inferred prefixes (`in_flight_prefixes.rs`,
//! `inferred_prefixes.rs`), and the detection (the gateway).

use crate::id::{InstanceId, Timestamp};
use crate::schedule::explain::decision::Decision;
use crate::schedule::fleet::Fleet;
use crate::schedule::fleet::load::LoadInstant;

/// The recorded amounts of a decision: all that is needed to retract it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteRecord {
    /// The instance.
    pub instance: InstanceId,
    /// Its decode partner, if another instance decodes.
    pub partner: Option<InstanceId>,
    /// Prompt tokens to compute.
    pub tokens: u32,
    /// Its priority deadline.
    pub priority_deadline: Timestamp,
    /// Time of the recording.
    pub recorded_at: Timestamp,
    /// Predicted time until its prompt is computed, in microseconds.
    pub prefill_done_us: u64,
    /// Same, including the handover, in microseconds.
    pub ttft_us: u64,
}

impl RouteRecord {
    /// The record of a decision, with its load and prefixes recorded at this time.
    #[must_use]
    pub fn of(decision: &Decision, recorded_at: Timestamp) -> RouteRecord {
        RouteRecord {
            instance: decision.instance,
            partner: decision.handover.map(|handover| handover.instance),
            tokens: decision.recompute_tokens,
            priority_deadline: decision.priority_deadline,
            recorded_at,
            prefill_done_us: decision.predicted.ttft_us(),
            ttft_us: decision.ttft_us(),
        }
    }
}

impl Fleet {
    /// Retracts the load that [`Fleet::record`] added for a request that does not run there.
    /// Amounts that a report has replaced since stay as reported.
    pub fn retract(&mut self, route: &RouteRecord, now: Timestamp) {
        let reported_at = |fleet: &Fleet, id| fleet.instance(id).map(|known| known.reported_at);
        if let Some(reported_at) = reported_at(self, route.instance)
            && let Some(load) = self.load_mut(route.instance)
        {
            load.retract(route, LoadInstant { now, reported_at });
        }
        if let Some(partner) = route.partner
            && reported_at(self, partner).is_some_and(|reported_at| reported_at <= route.recorded_at)
            && let Some(load) = self.load_mut(partner)
        {
            load.routed = load.routed.saturating_sub(1);
        }
    }

    /// Records a decision for a request that was recorded elsewhere before: it adds to the load of
    /// its instance, but not to fleet statistics.
    pub fn record_reassigned(&mut self, decision: &Decision, now: Timestamp) {
        let kept_us = self.limits.tbt_limit_floor_us;
        let reported_at = self.instance(decision.instance).map(|known| known.reported_at);
        if let Some(reported_at) = reported_at
            && let Some(load) = self.load_mut(decision.instance)
        {
            load.record(decision, LoadInstant { now, reported_at });
            if decision.handover.is_none() {
                load.tightest_limit.record(decision, kept_us, now);
            }
        }
        let partner = decision.handover.map(|handover| handover.instance);
        if let Some(load) = partner.and_then(|partner| self.load_mut(partner)) {
            load.routed = load.routed.saturating_add(1);
            load.tightest_limit.record(decision, kept_us, now);
        }
    }
}
