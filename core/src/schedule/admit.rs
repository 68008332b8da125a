//! Whom to turn away when not all can be served in time, before anything is computed for them.
//!
//! A request that would come too late wherever it ran is of no use to its caller. One that would come in time is let in if its first token is
//! predicted within a part of its limit: the rest is room for those that have a better claim. The part is larger for a tenant that was let in with less than
//! its share of late, and smaller for one with more, so that tenants have equal shares by weight as soon as there is not enough for all of them; one
//! alone, or one among such as ask for little, has all that they leave. A prediction counts the request's own prefill, so that within a tenant those go
//! first that cost least, by which most are served; some of what a tenant is let in with is kept for dear ones, so that a long prompt waits
//! its turn and is not refused for ever.
//!
//! Mooncake (FAST '25, Algorithm 1) turns away by the predicted TTFT, all alike and at the limit. A shorter queue serves more: what was planned when a request
//! came is still true when its turn comes. Not here: the prediction (`cost.rs`), and what a caller does who is turned away.

use std::collections::BTreeMap;
use std::time::Duration;

use super::decision::{RejectReason, Rejection};
use crate::id::{TenantId, Timestamp};

/// Part of the limit within which a tenant with just its share is let in.
const PART: f64 = 0.4;

/// The least such part: below it instances would run out of work between two requests.
const PART_MIN: f64 = 0.15;

/// Part of the limit that a queue may have and nobody be turned away: who comes then keeps nobody waiting for long.
const CALM: f64 = 0.05;

/// Of what a tenant is let in with, how much dear requests get besides.
const SPARED: f64 = 0.05;

/// Time after which what was let in counts half.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// Tenants that are told apart; those beyond have one share together.
const TENANTS_MAX: usize = 1_024;

/// Longest that who is turned away is told to stay away: what is so far ahead is guesswork.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Shortest such time.
const RETRY_MIN: Duration = Duration::from_millis(100);

/// A request that could be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Whose it is.
    pub tenant: TenantId,
    /// Above 0: let in whenever it can be in time. Below: within half of the part of others.
    pub priority: i32,
    /// What it costs its instance: prefill, in microseconds.
    pub cost_us: u64,
    /// Of the best candidate: until its first token, in microseconds.
    pub ttft_us: u64,
    /// Until when its first token must be out, in microseconds; nothing where that does not matter.
    pub ttft_max_us: Option<u64>,
}

/// What one tenant was let in with lately.
#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
    weight: f64,
    /// Microseconds of prefill, decayed.
    cost_us: f64,
    /// How many, decayed.
    requests: f64,
    /// What dear requests may still be let in with.
    spared_us: f64,
}

/// Turns requests away. One a router, with shares of what comes by it; what others let in shows in the queues alone.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    tenants: BTreeMap<TenantId, Tenant>,
    weights: BTreeMap<TenantId, f64>,
    decayed_at: Option<Timestamp>,
    /// Of all tenants.
    cost_us: f64,
    weight: f64,
}

impl Admission {
    /// Tenants that have another weight than 1; what is not above zero is none.
    #[must_use]
    pub fn with_weights(weights: impl IntoIterator<Item = (TenantId, f64)>) -> Admission {
        let weights = weights.into_iter().filter(|(_, weight)| *weight > 0.0 && weight.is_finite());
        Admission { weights: weights.collect(), ..Admission::default() }
    }

    /// Lets a request in, or says why not and when to come again.
    ///
    /// # Errors
    /// [`Rejection`] with [`RejectReason::TooLate`] or [`RejectReason::Crowded`].
    pub fn admit(&mut self, offer: &Offer, now: Timestamp) -> Result<(), Rejection> {
        self.decay(now);
        let cost_us = offer.cost_us.max(1) as f64;
        let Some(limit_us) = offer.ttft_max_us.filter(|limit| *limit > 0) else {
            self.charge(offer.tenant, cost_us);
            return Ok(());
        };
        let (ttft, limit) = (Duration::from_micros(offer.ttft_us), Duration::from_micros(limit_us));
        if ttft > limit {
            let retry_after = (ttft - limit).clamp(RETRY_MIN, RETRY_MAX);
            return Err(Rejection { reason: RejectReason::TooLate { ttft, limit }, retry_after });
        }
        let fair_us = self.cost_us / self.weight.max(f64::MIN_POSITIVE);
        let tenant = self.tenant(offer.tenant);
        let within = limit.mul_f64(tenant.part(fair_us, offer.priority));
        // Where hardly anybody waits, nobody goes before a long prompt.
        let queue = ttft.saturating_sub(Duration::from_micros(offer.cost_us));
        let is_beyond = ttft > within && queue > limit.mul_f64(CALM);
        let is_spared = tenant.is_dear(cost_us) && offer.priority >= 0 && tenant.spared_us >= cost_us;
        if is_beyond && !is_spared {
            let retry_after = (ttft - within).clamp(RETRY_MIN, RETRY_MAX);
            return Err(Rejection { reason: RejectReason::Crowded { ttft, within, limit }, retry_after });
        }
        if is_beyond {
            tenant.spared_us -= cost_us;
        }
        self.charge(offer.tenant, cost_us);
        Ok(())
    }

    /// Counts what a tenant was let in with.
    fn charge(&mut self, tenant: TenantId, cost_us: f64) {
        self.cost_us += cost_us;
        let tenant = self.tenant(tenant);
        tenant.cost_us += cost_us;
        tenant.requests += 1.0;
        // As much as was let in of late, and no more.
        tenant.spared_us = (tenant.spared_us + cost_us * SPARED).min(tenant.cost_us);
    }

    fn tenant(&mut self, id: TenantId) -> &mut Tenant {
        let has_place = self.tenants.contains_key(&id) || self.tenants.len() < TENANTS_MAX;
        let is_known = has_place || self.weights.contains_key(&id);
        let id = if is_known { id } else { TenantId(u32::MAX) };
        let weight = self.weights.get(&id).copied().unwrap_or(1.0);
        self.tenants.entry(id).or_insert_with(|| {
            self.weight += weight;
            Tenant { weight, ..Tenant::default() }
        })
    }

    fn decay(&mut self, now: Timestamp) {
        let since = self.decayed_at.map_or(Duration::ZERO, |at| now.since(at));
        // Often enough to matter, rarely enough to cost nothing.
        if self.decayed_at.is_some() && since < HALF_LIFE / 64 {
            return;
        }
        self.decayed_at = Some(now);
        let factor = (-since.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
        self.tenants.retain(|_, tenant| {
            tenant.cost_us *= factor;
            tenant.requests *= factor;
            tenant.cost_us >= 1.0
        });
        let all = self.tenants.values();
        (self.cost_us, self.weight) =
            all.fold((0.0, 0.0), |sum, tenant| (sum.0 + tenant.cost_us, sum.1 + tenant.weight));
    }
}

impl Tenant {
    /// Whether a request costs more than twice as much as those that were let in.
    fn is_dear(&self, cost_us: f64) -> bool {
        cost_us * self.requests > 2.0 * self.cost_us
    }

    /// Within which part of its limit a request is let in, where `fair_us` is what each weight of 1 was let in with.
    fn part(&self, fair_us: f64, priority: i32) -> f64 {
        if priority > 0 {
            return 1.0;
        }
        let used = self.cost_us / (fair_us * self.weight).max(f64::MIN_POSITIVE);
        // One that was let in with nothing of late is taken for one that has its share, or a new name for each request would be a claim.
        let used = if self.cost_us > 0.0 { used } else { 1.0 };
        let part = (PART / used.max(f64::MIN_POSITIVE)).clamp(PART_MIN, 1.0);
        if priority < 0 { part / 2.0 } else { part }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_US: u64 = 10_000_000;

    fn offer(tenant: u32, cost_us: u64, ttft_us: u64) -> Offer {
        Offer { tenant: TenantId(tenant), priority: 0, cost_us, ttft_us, ttft_max_us: Some(LIMIT_US) }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000)
    }

    #[test]
    fn without_a_limit_everything_is_let_in() {
        let mut admission = Admission::default();
        for limit in [None, Some(0)] {
            let offer = Offer { ttft_max_us: limit, ..offer(1, u64::MAX, u64::MAX) };
            assert_eq!(admission.admit(&offer, at(0)), Ok(()));
        }
    }

    #[test]
    fn what_comes_too_late_is_told_by_how_much() {
        let mut admission = Admission::default();
        let late = Offer { priority: 9, ..offer(1, 1_000, LIMIT_US + 2_000_000) };
        let rejection = admission.admit(&late, at(0)).expect_err("it is late");
        assert_eq!(rejection.retry_after, Duration::from_secs(2));
        assert!(matches!(rejection.reason, RejectReason::TooLate { .. }), "{rejection}");
        assert_eq!(admission.admit(&offer(1, 1_000, LIMIT_US), at(0)).map_err(|no| no.retry_after), {
            Err(Duration::from_secs(6))
        });
    }

    /// Serves tenants on one instance: each asks for so many requests a second of this cost. What each was served with, in microseconds.
    fn served(admission: &mut Admission, offers: &[(u32, u64, u64)], seconds: u64) -> BTreeMap<u32, u64> {
        let (mut busy_until, mut sums) = (0, BTreeMap::new());
        for ms in 0..seconds * 1_000 {
            let now = ms * 1_000;
            for (tenant, per_s, cost_us) in offers {
                if ms * per_s / 1_000 == (ms + 1) * per_s / 1_000 {
                    continue;
                }
                let start = now.max(busy_until);
                let ttft_us = start - now + cost_us;
                if admission.admit(&offer(*tenant, *cost_us, ttft_us), at(ms)).is_ok() {
                    assert!(ttft_us <= LIMIT_US);
                    busy_until = start + cost_us;
                    *sums.entry(*tenant).or_default() += cost_us;
                }
            }
        }
        sums
    }

    #[test]
    fn who_floods_gets_what_the_others_leave() {
        // 0.1 of the instance each, beside one that asks for twice of all there is.
        let mut admission = Admission::default();
        let sums = served(&mut admission, &[(1, 1, 100_000), (2, 1, 100_000), (3, 20, 100_000)], 300);
        let [one, two, flood] = [1, 2, 3].map(|tenant| sums[&tenant] as f64 / 300e6);
        assert!(one > 0.099 && two > 0.099, "{one} {two}");
        assert!(flood > 0.78, "nothing is left idle: {flood}");
    }

    #[test]
    fn floods_share_by_weight() {
        let mut admission = Admission::with_weights([(TenantId(1), 3.0), (TenantId(9), 0.0)]);
        let sums = served(&mut admission, &[(1, 20, 100_000), (2, 20, 100_000)], 600);
        let ratio = sums[&1] as f64 / sums[&2] as f64;
        assert!((2.4..3.6).contains(&ratio), "{ratio}");
        assert!((sums[&1] + sums[&2]) as f64 > 0.97 * 600e6, "nothing is left idle");
    }

    #[test]
    fn long_prompts_wait_their_turn_and_are_not_refused_for_ever() {
        // Small ones alone are more than there is; a long one takes three seconds.
        let mut alone = Admission::default();
        let (mut long, mut busy_until, mut waited, mut longest) = (0u64, 0u64, 0u64, 0u64);
        for ms in 0..600_000u64 {
            let start = (ms * 1_000).max(busy_until);
            let mut ask = |cost_us: u64| {
                let ttft_us = start - ms * 1_000 + cost_us;
                let is_in = alone.admit(&offer(1, cost_us, ttft_us), at(ms)).is_ok();
                busy_until = if is_in { start + cost_us } else { busy_until };
                is_in
            };
            if ms % 33 == 0 {
                ask(100_000);
            }
            if ms % 1_000 == 500 {
                let is_in = ask(3_000_000);
                long += u64::from(is_in);
                waited = if is_in { 0 } else { waited + 1 };
                longest = longest.max(waited);
            }
        }
        assert!(long >= 6, "{long} of 600");
        assert!(longest <= 120, "one waited {longest} s");
    }

    #[test]
    fn on_an_idle_fleet_every_prompt_that_can_be_in_time_is_let_in() {
        let mut admission = Admission::default();
        for second in 0..60 {
            // Each takes more than its part of the limit, alone and beside another tenant that asks for little.
            assert_eq!(admission.admit(&offer(1, 7_000_000, 7_000_000), at(second * 20_000)), Ok(()));
            assert_eq!(admission.admit(&offer(2, 1_000, 7_000), at(second * 20_000)), Ok(()));
        }
    }

    #[test]
    fn a_new_name_for_each_request_is_no_better_claim() {
        let mut admission = Admission::default();
        (0..50).for_each(|_| assert_eq!(admission.admit(&offer(1, 100_000, 100_000), at(0)), Ok(())));
        for name in 100..200 {
            assert!(admission.admit(&offer(name, 100_000, 4_100_000), at(0)).is_err(), "{name}");
        }
    }

    #[test]
    fn priorities_go_first_and_last() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&offer(1, 1_000_000, 1_000_000), at(0)), Ok(()));
        let [first, usual, last] = [1, 0, -1].map(|priority| {
            let within = |ttft_us: u64| {
                let mut admission = admission.clone();
                admission.admit(&Offer { priority, ..offer(1, 1_000_000, ttft_us) }, at(0)).is_ok()
            };
            (0..=100).rev().find(|tenth| within(tenth * 100_000)).expect("some")
        });
        assert_eq!((first, usual, last), (100, 40, 20));
        // Where nobody waits, what is asked for is no matter.
        let idle = Offer { priority: -1, ..offer(1, 9_000_000, 9_400_000) };
        assert_eq!(admission.admit(&idle, at(0)), Ok(()));
    }

    #[test]
    fn tenants_are_bounded_and_forgotten() {
        let mut admission = Admission::default();
        for tenant in 0..10_000 {
            assert_eq!(admission.admit(&offer(tenant, 1_000, 1_000), at(0)), Ok(()));
        }
        assert!(admission.tenants.len() <= TENANTS_MAX + 1);
        assert_eq!(admission.admit(&offer(1, 1_000, 1_000), at(3_600_000)), Ok(()));
        assert_eq!(admission.tenants.len(), 1);
    }
}
