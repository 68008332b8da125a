//! A request that runs elsewhere than it was sent: what was counted where it was sent is taken back, and counted where it runs.
//!
//! Whoever sends requests may find that an instance does not take one, and go to another. Until that is told, the first looks as busy as if it had it, and
//! the second idle. Not here: the prefixes that were to come (`coming.rs`, `guessed.rs`), and who finds it out (the doors).

use super::decision::Decision;
use super::fleet::Fleet;
use super::load::Moment;
use crate::id::{InstanceId, Timestamp};

/// What of a decision was counted, and when: as much as it takes to take it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Where.
    pub instance: InstanceId,
    /// Who was to go on, where that is another one.
    pub partner: Option<InstanceId>,
    /// Prompt tokens to compute.
    pub tokens: u32,
    /// When its turn was.
    pub turn: Timestamp,
    /// When it was counted.
    pub at: Timestamp,
    /// Predicted until its prompt is computed, in microseconds.
    pub computed_us: u64,
    /// The same with the way to who goes on, in microseconds.
    pub ttft_us: u64,
}

impl Counted {
    /// Of a decision that was recorded, and whose prefixes were entered, at this time.
    #[must_use]
    pub fn of(decision: &Decision, at: Timestamp) -> Counted {
        Counted {
            instance: decision.instance,
            partner: decision.handover.map(|handover| handover.instance),
            tokens: decision.recompute_tokens,
            turn: decision.turn,
            at,
            computed_us: decision.predicted.ttft_us(),
            ttft_us: decision.ttft_us(),
        }
    }
}

impl Fleet {
    /// Takes back what [`Fleet::record`] counted of a request that does not run there. What a report has told since is as it says.
    pub fn take_back(&mut self, counted: &Counted, now: Timestamp) {
        let reported_at = |fleet: &Fleet, id| fleet.instance(id).map(|known| known.reported_at);
        if let Some(reported_at) = reported_at(self, counted.instance)
            && let Some(load) = self.load_mut(counted.instance)
        {
            load.take_back(counted, Moment { now, reported_at });
        }
        if let Some(partner) = counted.partner
            && reported_at(self, partner).is_some_and(|reported_at| reported_at <= counted.at)
            && let Some(load) = self.load_mut(partner)
        {
            load.routed = load.routed.saturating_sub(1);
        }
    }

    /// Counts a decision for a request that was counted elsewhere before: where it runs there is one more, and in the fleet there is not.
    pub fn record_moved(&mut self, decision: &Decision, now: Timestamp) {
        let kept_us = self.limits.tbt_kept_us;
        let reported_at = self.instance(decision.instance).map(|known| known.reported_at);
        if let Some(reported_at) = reported_at
            && let Some(load) = self.load_mut(decision.instance)
        {
            load.record(decision, Moment { now, reported_at });
            if decision.handover.is_none() {
                load.strictest.sent(decision, kept_us, now);
            }
        }
        let partner = decision.handover.map(|handover| handover.instance);
        if let Some(load) = partner.and_then(|partner| self.load_mut(partner)) {
            load.routed = load.routed.saturating_add(1);
            load.strictest.sent(decision, kept_us, now);
        }
    }
}
