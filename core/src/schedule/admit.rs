//! Whom to turn away when not all can be served in time, before anything is computed for them.
//!
//! A request that would come too late wherever it ran is of no use to its caller. One that would come in time is let in if what it waits for is
//! predicted within a part of the time that its own transfer and prefill leave of its limit: the rest is room for those that have a better claim. The part is larger for a tenant that was let in with less than
//! its share of late, and smaller for one with more, so that tenants have equal shares by weight as soon as there is not enough for all of them; one
//! alone, or one among such as ask for little, has all that they leave. Where prefill takes more of a limit less is left of it, so that within a tenant those go
//! first that cost least, by which most are served; some of what a tenant is let in with is kept for dear ones, so that a long prompt waits
//! its turn and is not refused for ever.
//!
//! The same of the time between tokens: what would come too far apart wherever it ran is turned away, and so is what would make those that decode break their
//! limits. Of the room up to a limit as much is kept free as answers show to be needed (`margin.rs`), and some more for tenants that have less than their share. There it is room itself that is shared, and not a queue: what nobody is let into stands idle.
//! Where nobody runs or waits none of this is asked: what was learnt may be wrong by now, and is learnt anew only from who is let in.
//!
//! Mooncake (FAST '25, Algorithm 1) turns away by the predicted TTFT, all alike and at the limit. A shorter queue serves more: what was planned when a request
//! came is still true when its turn comes. Not here: the prediction (`cost.rs`), and what a caller does who is turned away.

use std::collections::BTreeMap;
use std::time::Duration;

use super::decision::{Decision, RejectReason, Rejection};
use super::decoding::{Beside, Pacing};
use super::fair::Backlogs;
use super::fleet::Fleet;
use super::turn::Standing;
use crate::id::{TenantId, Timestamp};

/// Of the time that a request's own transfer and prefill leave of its limit, the part that others may take where its tenant has just its share.
const PART: f64 = 0.6;

/// The least such part: below it instances would run out of work between two requests.
const PART_MIN: f64 = 0.15;

/// Part of the limit that a queue may have and nobody be turned away: who comes then keeps nobody waiting for long.
const CALM: f64 = 0.05;

/// Of the room between the time that a token takes alone and its limit, what tenants have that were let in with more than their share. Others have all
/// of it: what is kept from one that is alone stands idle.
const PACE_PART_OVER: f64 = 0.8;

/// What those have that go behind all others.
const PACE_PART_LAST: f64 = 0.7;

/// So much more than its share is still just that: shares move with each request.
const JUST: f64 = 1.1;

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
    /// What it waits for besides that is its own: blocks on their way, in microseconds.
    pub transfer_us: u64,
    /// Of the best candidate: until its first token, in microseconds.
    pub ttft_us: u64,
    /// Until when its first token must be out, in microseconds; nothing where that does not matter.
    pub ttft_max_us: Option<u64>,
    /// Of the best candidate: time between two of its tokens, in microseconds.
    pub tbt_us: u64,
    /// What was predicted of its decoding there.
    pub pacing: Pacing,
}

impl Offer {
    /// What was decided, for this tenant.
    #[must_use]
    pub fn of(decision: &Decision, (tenant, priority): (TenantId, i32), ttft_max_us: Option<u64>) -> Offer {
        Offer {
            tenant,
            priority,
            cost_us: decision.predicted.prefill_us,
            transfer_us: decision.predicted.transfer_us,
            ttft_us: decision.ttft_us(),
            ttft_max_us,
            tbt_us: decision.predicted.tbt_us,
            pacing: decision.pacing,
        }
    }

    /// Turns it away, until what decodes is down from `tbt_us` to `within_us`: as much of it ends in that share of the time that a request decodes.
    fn beyond_pace(&self, reason: RejectReason, (tbt_us, within_us): (u64, u64)) -> Rejection {
        let share = 1.0 - within_us as f64 / tbt_us.max(1) as f64;
        let retry_after = Duration::from_micros(self.pacing.decode_us).mul_f64(share.clamp(0.0, 1.0));
        Rejection { reason, retry_after: retry_after.clamp(RETRY_MIN, RETRY_MAX) }
    }
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
    backlogs: Backlogs,
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
    /// [`Rejection`] with [`RejectReason::TooLate`], [`RejectReason::Crowded`], [`RejectReason::TooSlow`], [`RejectReason::Slows`] or
    /// [`RejectReason::CrowdedPace`].
    pub fn admit(&mut self, offer: &Offer, now: Timestamp) -> Result<(), Rejection> {
        self.decay(now);
        let cost_us = offer.cost_us.max(1) as f64;
        let ttft_max_us = offer.ttft_max_us.filter(|limit| *limit > 0);
        if ttft_max_us.is_none() && offer.pacing.limit_us == 0 {
            self.charge(offer);
            return Ok(());
        }
        possible(offer, ttft_max_us)?;
        let fair_us = self.cost_us / self.weight.max(f64::MIN_POSITIVE);
        let tenant = self.tenant(offer.tenant);
        let claim = tenant.claim(fair_us);
        let beyond = ttft_max_us
            .and_then(|limit_us| crowded(offer, limit_us, claim))
            .or_else(|| crowded_pace(offer, claim));
        if let Some(rejection) = beyond {
            let is_spared = tenant.is_dear(cost_us) && offer.priority >= 0 && tenant.spared_us >= cost_us;
            if !is_spared {
                return Err(rejection);
            }
            tenant.spared_us -= cost_us;
        }
        self.charge(offer);
        Ok(())
    }

    /// Where a request of this tenant and priority stands among those of others that wait.
    #[must_use]
    pub fn standing(&self, tenant: TenantId, priority: i32, fleet: &Fleet, now: Timestamp) -> Standing {
        let tenant = self.place(tenant);
        if !self.backlogs.has_others(tenant) {
            return Standing { lead: Duration::ZERO, priority };
        }
        let lead = self.backlogs.lead(tenant, fleet.waiting_tokens(), now);
        Standing { lead, priority }
    }

    /// A tenant's request was sent of which so many tokens are computed, as far as they were counted into the load of its instance, where so many waited in all
    /// ([`Fleet::waiting_tokens`]).
    pub fn sent(&mut self, tenant: TenantId, tokens: u32, waiting: u64, now: Timestamp) {
        let place = self.place(tenant);
        let weight = self.weights.get(&place).copied().unwrap_or(1.0);
        self.backlogs.send((place, weight), tokens, waiting, now);
    }

    /// Counts what a tenant was let in with.
    fn charge(&mut self, offer: &Offer) {
        let cost_us = offer.cost_us.max(1) as f64;
        self.cost_us += cost_us;
        let tenant = self.tenant(offer.tenant);
        tenant.cost_us += cost_us;
        tenant.requests += 1.0;
        // As much as was let in of late, and no more.
        tenant.spared_us = (tenant.spared_us + cost_us * SPARED).min(tenant.cost_us);
    }

    /// Itself, or who stands for all those that find no place.
    fn place(&self, id: TenantId) -> TenantId {
        let has_place = self.tenants.contains_key(&id) || self.tenants.len() < TENANTS_MAX;
        if has_place || self.weights.contains_key(&id) { id } else { TenantId(u32::MAX) }
    }

    fn tenant(&mut self, id: TenantId) -> &mut Tenant {
        let id = self.place(id);
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

/// Whether it could keep its limits at all.
fn possible(offer: &Offer, ttft_max_us: Option<u64>) -> Result<(), Rejection> {
    if let Some(limit_us) = ttft_max_us {
        let (ttft, limit) = (Duration::from_micros(offer.ttft_us), Duration::from_micros(limit_us));
        if ttft > limit {
            let retry_after = (ttft - limit).clamp(RETRY_MIN, RETRY_MAX);
            return Err(Rejection { reason: RejectReason::TooLate { ttft, limit }, retry_after });
        }
    }
    let (tbt_us, limit_us) = (offer.tbt_us, offer.pacing.limit_us);
    // Where nobody is, only what was learnt speaks against it, and with nobody let in nothing else would ever be learnt.
    if limit_us > 0 && tbt_us > limit_us && !offer.pacing.is_trial {
        let (tbt, limit) = (Duration::from_micros(tbt_us), Duration::from_micros(limit_us));
        return Err(offer.beyond_pace(RejectReason::TooSlow { tbt, limit }, (tbt_us, limit_us)));
    }
    Ok(())
}

/// Why others go before it by the time until its first token, if they do.
fn crowded(offer: &Offer, limit_us: u64, claim: f64) -> Option<Rejection> {
    let (ttft, limit) = (Duration::from_micros(offer.ttft_us), Duration::from_micros(limit_us));
    // Neither its own prefill nor its blocks on their way are what anybody goes before it for.
    let own = Duration::from_micros(offer.cost_us.saturating_add(offer.transfer_us)).min(limit);
    let within = own + (limit - own).mul_f64(part(claim, offer.priority));
    // Where hardly anybody waits, nobody goes before a long prompt.
    let queue = ttft.saturating_sub(own);
    (ttft > within && queue > limit.mul_f64(CALM)).then(|| {
        let retry_after = (ttft - within).clamp(RETRY_MIN, RETRY_MAX);
        Rejection { reason: RejectReason::Crowded { ttft, within, limit }, retry_after }
    })
}

/// The same by the time between tokens: its own, and that of those that decode beside it.
fn crowded_pace(offer: &Offer, claim: f64) -> Option<Rejection> {
    let Pacing { limit_us, kept_us, alone_us, beside, is_trial, .. } = offer.pacing;
    if limit_us == 0 || is_trial {
        return None;
    }
    // Who goes before others may slow them.
    let slowed = beside.filter(|beside| offer.priority <= 0 && beside.tbt_us > beside.within_us);
    if let Some(Beside { tbt_us, within_us, limit_us }) = slowed {
        let [tbt, within, limit] = [tbt_us, within_us, limit_us].map(Duration::from_micros);
        let reason = RejectReason::Slows { tbt, within, limit };
        return Some(offer.beyond_pace(reason, (tbt_us, within_us)));
    }
    let used_us = if offer.priority > 0 { limit_us } else { limit_us.saturating_sub(kept_us) };
    let room_us = used_us.saturating_sub(alone_us) as f64 * pace_part(claim, offer.priority);
    let within_us = used_us.min(alone_us).saturating_add(room_us as u64);
    let [tbt, within, limit] = [offer.tbt_us, within_us, limit_us].map(Duration::from_micros);
    let reason = RejectReason::CrowdedPace { tbt, within, limit };
    (tbt > within).then(|| offer.beyond_pace(reason, (offer.tbt_us, within_us)))
}

/// Which part of what its own transfer and prefill leave of its limit a request may wait that is of a tenant with such a claim.
fn part(claim: f64, priority: i32) -> f64 {
    if priority > 0 {
        return 1.0;
    }
    let part = (PART / claim.max(f64::MIN_POSITIVE)).clamp(PART_MIN, 1.0);
    if priority < 0 { part / 2.0 } else { part }
}

/// The same of the room that decoding has.
fn pace_part(claim: f64, priority: i32) -> f64 {
    match priority {
        0 if claim > JUST => PACE_PART_OVER,
        0.. => 1.0,
        _ => PACE_PART_LAST,
    }
}

impl Tenant {
    /// Whether a request costs more than twice as much as those that were let in.
    fn is_dear(&self, cost_us: f64) -> bool {
        cost_us * self.requests > 2.0 * self.cost_us
    }

    /// What it was let in with, as a part of its share, where `fair_us` is that of a weight of 1.
    fn claim(&self, fair_us: f64) -> f64 {
        // One that was let in with nothing of late is taken for one that has its share, or a new name for each request would be a claim.
        if self.cost_us > 0.0 { self.cost_us / (fair_us * self.weight).max(f64::MIN_POSITIVE) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_US: u64 = 10_000_000;

    fn offer(tenant: u32, cost_us: u64, ttft_us: u64) -> Offer {
        Offer {
            tenant: TenantId(tenant),
            priority: 0,
            cost_us,
            transfer_us: 0,
            ttft_us,
            ttft_max_us: Some(LIMIT_US),
            tbt_us: 0,
            pacing: Pacing::default(),
        }
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
            Err(Duration::from_micros(3_999_600))
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
            assert!(admission.admit(&offer(name, 100_000, 6_100_000), at(0)).is_err(), "{name}");
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
        assert_eq!((first, usual, last), (100, 64, 37));
        // Where nobody waits, what is asked for is no matter.
        let idle = Offer { priority: -1, ..offer(1, 9_000_000, 9_400_000) };
        assert_eq!(admission.admit(&idle, at(0)), Ok(()));
    }

    /// One that decodes so, of requests that may take 20 ms a token and take 10 alone.
    fn decodes(tenant: u32, tbt_us: u64) -> Offer {
        let pacing = Pacing { limit_us: 20_000, alone_us: 10_000, decode_us: 8_000_000, ..Pacing::default() };
        Offer { ttft_max_us: None, tbt_us, pacing, ..offer(tenant, 1_000, 1_000) }
    }

    /// Those that would have so much between tokens, and may have 10.8 ms of the 12 that are their limit.
    fn beside(tbt_us: u64) -> Option<Beside> {
        Some(Beside { tbt_us, within_us: 10_800, limit_us: 12_000 })
    }

    #[test]
    fn who_would_be_too_slow_or_make_others_so_is_told_when_to_come_again() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&decodes(1, 19_000), at(0)), Ok(()));
        let slow =
            admission.admit(&Offer { priority: 9, ..decodes(1, 40_000) }, at(0)).expect_err("it is slow");
        assert!(matches!(slow.reason, RejectReason::TooSlow { .. }), "{slow}");
        assert_eq!(
            slow.retry_after,
            Duration::from_secs(4),
            "half of what decodes has to end, which takes it 8 s"
        );
        let pacing = Pacing { beside: beside(16_000), ..decodes(1, 0).pacing };
        let slows =
            admission.admit(&Offer { pacing, ..decodes(1, 11_000) }, at(0)).expect_err("it slows others");
        assert!(matches!(slows.reason, RejectReason::Slows { .. }), "{slows}");
        assert_eq!(slows.retry_after, Duration::from_millis(2_600), "down to nine tenths of 12 ms");
        let pacing = Pacing { beside: beside(10_801), ..pacing };
        assert!(admission.admit(&Offer { pacing, ..decodes(1, 11_000) }, at(0)).is_err());
        let pacing = Pacing { beside: beside(10_800), ..pacing };
        assert_eq!(admission.admit(&Offer { pacing, ..decodes(1, 11_000) }, at(0)), Ok(()));
        let pacing = Pacing { beside: beside(16_000), ..pacing };
        let first = Offer { pacing, priority: 1, ..decodes(1, 11_000) };
        assert_eq!(admission.admit(&first, at(0)), Ok(()), "it goes before them");
        let pacing = Pacing { limit_us: 0, ..pacing };
        for ttft_max_us in [None, Some(LIMIT_US)] {
            let free = Offer { pacing, ttft_max_us, ..decodes(1, 11_000) };
            assert_eq!(admission.admit(&free, at(0)), Ok(()), "it has no limit of that kind");
        }
    }

    #[test]
    fn where_nobody_is_one_is_let_in_whatever_was_learnt() {
        for (tbt_us, beside) in [(40_000, None), (19_500, None), (11_000, beside(16_000))] {
            let offer = |is_trial| {
                let pacing = Pacing { beside, is_trial, ..decodes(1, 0).pacing };
                Offer { pacing, priority: -1, ..decodes(1, tbt_us) }
            };
            let mut admission = Admission::default();
            assert!(admission.admit(&offer(false), at(0)).is_err(), "{tbt_us}");
            assert_eq!(admission.admit(&offer(true), at(0)), Ok(()), "{tbt_us}");
        }
        let late = Offer { ttft_us: LIMIT_US + 1, ttft_max_us: Some(LIMIT_US), ..decodes(1, 1) };
        let pacing = Pacing { is_trial: true, ..late.pacing };
        let late = Admission::default().admit(&Offer { pacing, ..late }, at(0));
        assert!(late.is_err(), "its first token has a limit as ever");
    }

    #[test]
    fn what_is_kept_of_a_limit_is_for_nobody_but_who_goes_before_others() {
        let offer = |priority, tbt_us| {
            let pacing = Pacing { kept_us: 1_500, ..decodes(1, tbt_us).pacing };
            Offer { pacing, priority, ..decodes(1, tbt_us) }
        };
        let admit = |priority, tbt_us| Admission::default().admit(&offer(priority, tbt_us), at(0));
        assert_eq!(admit(0, 18_500), Ok(()));
        let rejection = admit(0, 18_501).expect_err("beyond what is used of its limit");
        assert!(matches!(rejection.reason, RejectReason::CrowdedPace { .. }), "{rejection}");
        assert_eq!(admit(1, 20_000), Ok(()));
    }

    #[test]
    fn who_waits_for_blocks_of_its_own_waits_for_nobody() {
        // A tenant with twice its share, of which a queue of no more than a third of the limit is let in.
        let mut admission = Admission::default();
        (0..2).for_each(|_| assert_eq!(admission.admit(&offer(1, 500_000, 500_000), at(0)), Ok(())));
        assert_eq!(admission.admit(&offer(2, 100_000, 100_000), at(0)), Ok(()));
        let fetches = |transfer_us, ttft_us| Offer { transfer_us, ..offer(1, 100_000, ttft_us) };
        assert_eq!(admission.admit(&fetches(5_000_000, 5_100_000), at(0)), Ok(()));
        assert!(admission.admit(&fetches(0, 5_100_000), at(0)).is_err(), "as long behind others");
    }

    #[test]
    fn room_to_decode_is_shared_and_one_alone_has_all_of_it() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&decodes(1, 20_000), at(0)), Ok(()), "alone");
        (0..10).for_each(|_| assert_eq!(admission.admit(&decodes(1, 15_000), at(0)), Ok(())));
        assert_eq!(admission.admit(&decodes(2, 20_000), at(0)), Ok(()), "with less than its share");
        let more = admission.admit(&decodes(1, 18_500), at(0)).expect_err("with more");
        assert!(matches!(more.reason, RejectReason::CrowdedPace { .. }), "{more}");
        assert!(more.retry_after >= RETRY_MIN);
        assert_eq!(admission.admit(&decodes(1, 18_000), at(0)), Ok(()));
        let last = |tbt_us| Offer { priority: -1, ..decodes(2, tbt_us) };
        assert!(admission.admit(&last(17_500), at(0)).is_err());
        assert_eq!(admission.admit(&last(17_000), at(0)), Ok(()));
        assert_eq!(admission.admit(&Offer { priority: 1, ..decodes(1, 20_000) }, at(0)), Ok(()));
    }

    #[test]
    fn who_floods_what_decodes_gets_what_the_others_leave() {
        // One that decodes adds 0.1 ms to each step and lasts 10 s, so that ninety have room, and eighty of a tenant with more than its share.
        let (mut admission, mut runs, mut sums) = (Admission::default(), Vec::new(), [0_u64; 3]);
        for ms in 0..600_000_u64 {
            runs.retain(|until| *until > ms);
            for (tenant, every_ms) in [(1, 250), (2, 10)] {
                let tbt_us = 10_000 + 100 * (runs.len() as u64 + 1);
                if ms % every_ms == 0 && admission.admit(&decodes(tenant, tbt_us), at(ms)).is_ok() {
                    runs.push(ms + 10_000);
                    sums[tenant as usize] += 1;
                }
            }
        }
        let [_, modest, flood] = sums.map(|sum| sum as f64 / 600.0);
        assert!(modest > 3.8, "all of its four a second: {modest}");
        assert!(flood > 3.8, "nothing is left idle but what is kept: {flood}");
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
