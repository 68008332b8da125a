//! Admission: sheds load if not all requests can meet their limits, before anything is computed for
//! them.
//!
//! A request that would miss its TTFT limit on every instance is of no use to its caller and is
//! rejected. Otherwise it is admitted if its predicted wait fits a share of the slack that its own
//! transfer and prefill leave of the limit. The rest of the slack is reserved for requests with a
//! better claim. The share is larger for a tenant that used less than its fair share lately, and
//! smaller for one that used more. So tenants get equal parts by weight as soon as capacity is
//! short; a lone tenant, or one among light ones, gets all that is left. A longer prefill leaves
//! less slack, so within a tenant cheap requests go first, which serves the most requests. A part
//! of each tenant's usage becomes burst credit for expensive requests, so that long prompts are
//! delayed and not rejected for ever.
//!
//! Inter-token limits work alike: a request is rejected if it would miss its limit on every
//! instance, or if it would make decoding requests miss theirs. A learned part of the range up to a
//! limit stays free (`slo_margin.rs`), and some more is reserved for tenants below their fair
//! share. This shares capacity itself and not a queue: unadmitted capacity stays idle. An idle
//! instance admits without these checks: learned values may be outdated, and only admitted requests
//! can correct them.
//!
//! Mooncake (FAST '25, Algorithm 1) rejects by predicted TTFT at the limit, alike for all. A
//! shorter queue serves more: a plan made at arrival is still valid when the request starts. Not
//! here: the prediction (`cost.rs`), and the caller's reaction to a rejection.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::{TenantId, Timestamp};
use crate::schedule::explain::decision::{Decision, RejectReason, Rejection};
use crate::schedule::fairness::fair_queue::FairQueue;
use crate::schedule::fairness::priority_deadline::QueuePriority;
use crate::schedule::fleet::Fleet;
use crate::schedule::predict::decode_forecast::{DecodePrediction, NeighbourTbt};

/// Share of a request's slack (limit minus own transfer and prefill) that its wait may take, for a
/// tenant exactly at its fair share.
const WAIT_SHARE: f64 = 0.6;

/// Smallest such share: below it instances would run out of work between two requests.
const WAIT_SHARE_MIN: f64 = 0.15;

/// A queue below this share of the limit is light and admits every request: waiting there delays no
/// other request for long.
const LIGHT_QUEUE_SHARE: f64 = 0.05;

/// Usable share of the range between lone time and inter-token limit for a tenant above its fair
/// share. Others use the full range: capacity kept from a lone tenant would stay idle.
const TBT_SHARE_OVER: f64 = 0.8;

/// Same for requests of negative priority.
const TBT_SHARE_LOW_PRIORITY: f64 = 0.7;

/// Tolerance above the fair share, because usage moves with each request.
const FAIR_SHARE_TOLERANCE: f64 = 1.1;

/// Part of a tenant's usage that becomes burst credit for expensive requests.
const BURST_CREDIT_SHARE: f64 = 0.05;

/// Time after which usage counts half.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// Tenants tracked separately; further ones share one entry.
const TENANTS_MAX: usize = 1_024;

/// Longest retry hint: a longer forecast is guesswork.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Shortest retry hint.
const RETRY_MIN: Duration = Duration::from_millis(100);

/// A request to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRequest {
    /// Its tenant.
    pub tenant: TenantId,
    /// Above 0: admitted whenever it can meet its limits. Below 0: gets half of the usual wait
    /// share.
    pub priority: i32,
    /// Predicted prefill time, in microseconds: its cost to the instance.
    pub cost_us: u64,
    /// Predicted transfer of its own blocks, in microseconds.
    pub transfer_us: u64,
    /// TTFT on the best candidate, in microseconds.
    pub ttft_us: u64,
    /// Limit on its TTFT, in microseconds; `None` for no limit.
    pub ttft_max_us: Option<u64>,
    /// Time between its tokens on the best candidate, in microseconds.
    pub tbt_us: u64,
    /// Its decode prediction there.
    pub decode: DecodePrediction,
}

impl AdmissionRequest {
    /// The request of this decision, for a tenant with a priority.
    #[must_use]
    pub fn of(
        decision: &Decision,
        tenant: TenantId,
        priority: i32,
        ttft_max_us: Option<u64>,
    ) -> AdmissionRequest {
        AdmissionRequest {
            tenant,
            priority,
            cost_us: decision.predicted.prefill_us,
            transfer_us: decision.predicted.transfer_us,
            ttft_us: decision.ttft_us(),
            ttft_max_us,
            tbt_us: decision.predicted.tbt_us,
            decode: decision.decode,
        }
    }

    /// Rejects it until the time between tokens has dropped from `tbt_us` to `within_us`: in that
    /// share of a decode duration, that share of the decoding requests ends.
    fn reject_by_tbt(&self, reason: RejectReason, tbt_us: u64, within_us: u64) -> Rejection {
        let share = 1.0 - within_us as f64 / tbt_us.max(1) as f64;
        let retry_after = Duration::from_micros(self.decode.decode_us).mul_f64(share.clamp(0.0, 1.0));
        Rejection { reason, retry_after: retry_after.clamp(RETRY_MIN, RETRY_MAX) }
    }
}

/// Recent usage of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct TenantUsage {
    weight: f64,
    /// Microseconds of admitted prefill, decayed.
    cost_us: f64,
    /// Admitted requests, decayed.
    requests: f64,
    /// Unused credit for expensive requests, in microseconds of prefill.
    burst_credit_us: f64,
}

/// Admission state of one router, by the requests that pass through it; requests admitted by other
/// routers show only in the queues.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    tenants: BTreeMap<TenantId, TenantUsage>,
    weights: BTreeMap<TenantId, f64>,
    decayed_at: Option<Timestamp>,
    fair_queue: FairQueue,
    /// Sum over all tenants.
    cost_us: f64,
    weight: f64,
}

impl Admission {
    /// Sets tenant weights other than 1; a weight that is not positive and finite is ignored.
    #[must_use]
    pub fn with_weights(weights: impl IntoIterator<Item = (TenantId, f64)>) -> Admission {
        let weights = weights.into_iter().filter(|(_, weight)| *weight > 0.0 && weight.is_finite());
        Admission { weights: weights.collect(), ..Admission::default() }
    }

    /// Admits a request, or returns the reason and a retry hint.
    ///
    /// # Errors
    /// [`Rejection`] with [`RejectReason::TooLate`], [`RejectReason::Overloaded`],
    /// [`RejectReason::TooSlow`], [`RejectReason::SlowsOthers`] or [`RejectReason::DecodeOverloaded`].
    pub fn admit(&mut self, offer: &AdmissionRequest, now: Timestamp) -> Result<(), Rejection> {
        self.decay(now);
        let cost_us = offer.cost_us.max(1) as f64;
        let ttft_max_us = offer.ttft_max_us.filter(|limit| *limit > 0);
        if ttft_max_us.is_none() && offer.decode.limit_us == 0 {
            self.charge(offer);
            return Ok(());
        }
        check_feasible(offer, ttft_max_us)?;
        let fair_us = self.cost_us / self.weight.max(f64::MIN_POSITIVE);
        let tenant = self.tenant(offer.tenant);
        let usage_ratio = tenant.usage_ratio(fair_us);
        let rejection = ttft_max_us
            .and_then(|limit_us| check_queue(offer, limit_us, usage_ratio))
            .or_else(|| check_tbt(offer, usage_ratio));
        if let Some(rejection) = rejection {
            let uses_credit =
                tenant.is_expensive(cost_us) && offer.priority >= 0 && tenant.burst_credit_us >= cost_us;
            if !uses_credit {
                return Err(rejection);
            }
            tenant.burst_credit_us -= cost_us;
        }
        self.charge(offer);
        Ok(())
    }

    /// Queue priority of a request of this tenant and priority among waiting requests of others.
    #[must_use]
    pub fn queue_priority(
        &self,
        tenant: TenantId,
        priority: i32,
        fleet: &Fleet,
        now: Timestamp,
    ) -> QueuePriority {
        let tenant = self.tracked_tenant(tenant);
        if !self.fair_queue.has_others(tenant) {
            return QueuePriority { lead: Duration::ZERO, priority };
        }
        let lead = self.fair_queue.lead(tenant, fleet.waiting_tokens(), now);
        QueuePriority { lead, priority }
    }

    /// Records a sent request with the tokens that were added to its instance's load; `waiting` is
    /// the total of waiting tokens ([`Fleet::waiting_tokens`]).
    pub fn record(&mut self, tenant: TenantId, tokens: u32, waiting: u64, now: Timestamp) {
        let place = self.tracked_tenant(tenant);
        let weight = self.weights.get(&place).copied().unwrap_or(1.0);
        self.fair_queue.record(place, weight, tokens, waiting, now);
    }

    /// Adds an admitted request to its tenant's usage.
    fn charge(&mut self, offer: &AdmissionRequest) {
        let cost_us = offer.cost_us.max(1) as f64;
        self.cost_us += cost_us;
        let tenant = self.tenant(offer.tenant);
        tenant.cost_us += cost_us;
        tenant.requests += 1.0;
        // Credit is capped at the recent usage.
        tenant.burst_credit_us = (tenant.burst_credit_us + cost_us * BURST_CREDIT_SHARE).min(tenant.cost_us);
    }

    /// The tenant itself, or the shared entry if no separate one is left.
    fn tracked_tenant(&self, id: TenantId) -> TenantId {
        let has_place = self.tenants.contains_key(&id) || self.tenants.len() < TENANTS_MAX;
        if has_place || self.weights.contains_key(&id) { id } else { TenantId(u32::MAX) }
    }

    fn tenant(&mut self, id: TenantId) -> &mut TenantUsage {
        let id = self.tracked_tenant(id);
        let weight = self.weights.get(&id).copied().unwrap_or(1.0);
        self.tenants.entry(id).or_insert_with(|| {
            self.weight += weight;
            TenantUsage { weight, ..TenantUsage::default() }
        })
    }

    fn decay(&mut self, now: Timestamp) {
        let since = self.decayed_at.map_or(Duration::ZERO, |at| now.since(at));
        // Often enough to matter, rarely enough to be cheap.
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

/// Checks whether the request could meet its limits at all.
fn check_feasible(offer: &AdmissionRequest, ttft_max_us: Option<u64>) -> Result<(), Rejection> {
    if let Some(limit_us) = ttft_max_us {
        let (ttft, limit) = (Duration::from_micros(offer.ttft_us), Duration::from_micros(limit_us));
        if ttft > limit {
            let retry_after = (ttft - limit).clamp(RETRY_MIN, RETRY_MAX);
            return Err(Rejection { reason: RejectReason::TooLate { ttft, limit }, retry_after });
        }
    }
    let (tbt_us, limit_us) = (offer.tbt_us, offer.decode.limit_us);
    // On an idle instance only learned values speak against it; without an admitted request they
    // would never be corrected.
    if limit_us > 0 && tbt_us > limit_us && !offer.decode.is_trial {
        let (tbt, limit) = (Duration::from_micros(tbt_us), Duration::from_micros(limit_us));
        return Err(offer.reject_by_tbt(RejectReason::TooSlow { tbt, limit }, tbt_us, limit_us));
    }
    Ok(())
}

/// Rejects the request if the queue exceeds its wait share of the TTFT limit.
fn check_queue(offer: &AdmissionRequest, limit_us: u64, usage_ratio: f64) -> Option<Rejection> {
    let (ttft, limit) = (Duration::from_micros(offer.ttft_us), Duration::from_micros(limit_us));
    // Its own prefill and transfer are no wait for other requests.
    let own = Duration::from_micros(offer.cost_us.saturating_add(offer.transfer_us)).min(limit);
    let within = own + (limit - own).mul_f64(wait_share(usage_ratio, offer.priority));
    // In a light queue, no other request goes before a long prompt.
    let queue = ttft.saturating_sub(own);
    (ttft > within && queue > limit.mul_f64(LIGHT_QUEUE_SHARE)).then(|| {
        let retry_after = (ttft - within).clamp(RETRY_MIN, RETRY_MAX);
        Rejection { reason: RejectReason::Overloaded { ttft, within, limit }, retry_after }
    })
}

/// Same by the time between tokens: its own, and that of decoding neighbours.
fn check_tbt(offer: &AdmissionRequest, usage_ratio: f64) -> Option<Rejection> {
    let DecodePrediction {
        limit_us,
        slo_margin_us: kept_us,
        alone_tbt_us: alone_us,
        neighbours: beside,
        is_trial,
        ..
    } = offer.decode;
    if limit_us == 0 || is_trial {
        return None;
    }
    // A request with positive priority may slow others.
    let slowed = beside.filter(|beside| offer.priority <= 0 && beside.tbt_us > beside.allowed_us);
    if let Some(NeighbourTbt { tbt_us, allowed_us: within_us, limit_us }) = slowed {
        let [tbt, within, limit] = [tbt_us, within_us, limit_us].map(Duration::from_micros);
        let reason = RejectReason::SlowsOthers { tbt, within, limit };
        return Some(offer.reject_by_tbt(reason, tbt_us, within_us));
    }
    let used_us = if offer.priority > 0 { limit_us } else { limit_us.saturating_sub(kept_us) };
    let room_us = used_us.saturating_sub(alone_us) as f64 * tbt_share(usage_ratio, offer.priority);
    let within_us = used_us.min(alone_us).saturating_add(room_us as u64);
    let [tbt, within, limit] = [offer.tbt_us, within_us, limit_us].map(Duration::from_micros);
    let reason = RejectReason::DecodeOverloaded { tbt, within, limit };
    (tbt > within).then(|| offer.reject_by_tbt(reason, offer.tbt_us, within_us))
}

/// Share of its slack that the wait of a request may take, given its tenant's usage ratio.
fn wait_share(usage_ratio: f64, priority: i32) -> f64 {
    if priority > 0 {
        return 1.0;
    }
    let part = (WAIT_SHARE / usage_ratio.max(f64::MIN_POSITIVE)).clamp(WAIT_SHARE_MIN, 1.0);
    if priority < 0 { part / 2.0 } else { part }
}

/// Same for the usable range up to the inter-token limit.
fn tbt_share(usage_ratio: f64, priority: i32) -> f64 {
    match priority {
        0 if usage_ratio > FAIR_SHARE_TOLERANCE => TBT_SHARE_OVER,
        0.. => 1.0,
        _ => TBT_SHARE_LOW_PRIORITY,
    }
}

impl TenantUsage {
    /// Whether a request costs more than twice the mean of the tenant's admitted requests.
    fn is_expensive(&self, cost_us: f64) -> bool {
        cost_us * self.requests > 2.0 * self.cost_us
    }

    /// Usage relative to the fair share; `fair_us` is the fair share at a weight of 1.
    fn usage_ratio(&self, fair_us: f64) -> f64 {
        // Without recent usage a tenant counts as exactly at its fair share. Otherwise a new tenant
        // name for each request would improve the claim.
        if self.cost_us > 0.0 { self.cost_us / (fair_us * self.weight).max(f64::MIN_POSITIVE) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT_US: u64 = 10_000_000;

    fn request(tenant: u32, cost_us: u64, ttft_us: u64) -> AdmissionRequest {
        AdmissionRequest {
            tenant: TenantId(tenant),
            priority: 0,
            cost_us,
            transfer_us: 0,
            ttft_us,
            ttft_max_us: Some(LIMIT_US),
            tbt_us: 0,
            decode: DecodePrediction::default(),
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000)
    }

    #[test]
    fn admits_everything_without_a_limit() {
        let mut admission = Admission::default();
        for limit in [None, Some(0)] {
            let offer = AdmissionRequest { ttft_max_us: limit, ..request(1, u64::MAX, u64::MAX) };
            assert_eq!(admission.admit(&offer, at(0)), Ok(()));
        }
    }

    #[test]
    fn late_request_gets_retry_hint() {
        let mut admission = Admission::default();
        let late = AdmissionRequest { priority: 9, ..request(1, 1_000, LIMIT_US + 2_000_000) };
        let rejection = admission.admit(&late, at(0)).expect_err("it misses its limit");
        assert_eq!(rejection.retry_after, Duration::from_secs(2));
        assert!(matches!(rejection.reason, RejectReason::TooLate { .. }), "{rejection}");
        assert_eq!(admission.admit(&request(1, 1_000, LIMIT_US), at(0)).map_err(|no| no.retry_after), {
            Err(Duration::from_micros(3_999_600))
        });
    }

    /// Serves tenants on one instance: each sends this many requests a second of this cost. Returns
    /// the served time per tenant, in microseconds.
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
                if admission.admit(&request(*tenant, *cost_us, ttft_us), at(ms)).is_ok() {
                    assert!(ttft_us <= LIMIT_US);
                    busy_until = start + cost_us;
                    *sums.entry(*tenant).or_default() += cost_us;
                }
            }
        }
        sums
    }

    #[test]
    fn flooding_tenant_gets_only_spare_capacity() {
        // Two tenants use 0.1 of the instance each; a third asks for twice its capacity.
        let mut admission = Admission::default();
        let sums = served(&mut admission, &[(1, 1, 100_000), (2, 1, 100_000), (3, 20, 100_000)], 300);
        let [one, two, flood] = [1, 2, 3].map(|tenant| sums[&tenant] as f64 / 300e6);
        assert!(one > 0.099 && two > 0.099, "{one} {two}");
        assert!(flood > 0.78, "capacity stays idle: {flood}");
    }

    #[test]
    fn flooding_tenants_share_by_weight() {
        let mut admission = Admission::with_weights([(TenantId(1), 3.0), (TenantId(9), 0.0)]);
        let sums = served(&mut admission, &[(1, 20, 100_000), (2, 20, 100_000)], 600);
        let ratio = sums[&1] as f64 / sums[&2] as f64;
        assert!((2.4..3.6).contains(&ratio), "{ratio}");
        assert!((sums[&1] + sums[&2]) as f64 > 0.97 * 600e6, "capacity stays idle");
    }

    #[test]
    fn long_prompts_are_delayed_and_not_rejected_for_ever() {
        // Short requests alone exceed capacity; a long one takes three seconds.
        let mut alone = Admission::default();
        let (mut long, mut busy_until, mut waited, mut longest) = (0u64, 0u64, 0u64, 0u64);
        for ms in 0..600_000u64 {
            let start = (ms * 1_000).max(busy_until);
            let mut ask = |cost_us: u64| {
                let ttft_us = start - ms * 1_000 + cost_us;
                let is_in = alone.admit(&request(1, cost_us, ttft_us), at(ms)).is_ok();
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
    fn idle_fleet_admits_every_feasible_prompt() {
        let mut admission = Admission::default();
        for second in 0..60 {
            // Each takes more than its share of the limit, alone and beside another light tenant.
            assert_eq!(admission.admit(&request(1, 7_000_000, 7_000_000), at(second * 20_000)), Ok(()));
            assert_eq!(admission.admit(&request(2, 1_000, 7_000), at(second * 20_000)), Ok(()));
        }
    }

    #[test]
    fn new_tenant_names_give_no_advantage() {
        let mut admission = Admission::default();
        (0..50).for_each(|_| assert_eq!(admission.admit(&request(1, 100_000, 100_000), at(0)), Ok(())));
        for name in 100..200 {
            assert!(admission.admit(&request(name, 100_000, 6_100_000), at(0)).is_err(), "{name}");
        }
    }

    #[test]
    fn priority_scales_the_wait_share() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&request(1, 1_000_000, 1_000_000), at(0)), Ok(()));
        let [first, usual, last] = [1, 0, -1].map(|priority| {
            let within = |ttft_us: u64| {
                let mut admission = admission.clone();
                admission
                    .admit(&AdmissionRequest { priority, ..request(1, 1_000_000, ttft_us) }, at(0))
                    .is_ok()
            };
            (0..=100).rev().find(|tenth| within(tenth * 100_000)).expect("some")
        });
        assert_eq!((first, usual, last), (100, 64, 37));
        // In an empty queue the priority does not matter.
        let idle = AdmissionRequest { priority: -1, ..request(1, 9_000_000, 9_400_000) };
        assert_eq!(admission.admit(&idle, at(0)), Ok(()));
    }

    /// A request with this time between tokens, a limit of 20 ms and a lone time of 10 ms.
    fn decode_request(tenant: u32, tbt_us: u64) -> AdmissionRequest {
        let pacing = DecodePrediction {
            limit_us: 20_000,
            alone_tbt_us: 10_000,
            decode_us: 8_000_000,
            ..DecodePrediction::default()
        };
        AdmissionRequest { ttft_max_us: None, tbt_us, decode: pacing, ..request(tenant, 1_000, 1_000) }
    }

    /// Neighbours with this time between tokens; up to 10.8 ms are allowed under a limit of 12 ms.
    fn neighbours(tbt_us: u64) -> Option<NeighbourTbt> {
        Some(NeighbourTbt { tbt_us, allowed_us: 10_800, limit_us: 12_000 })
    }

    #[test]
    fn tbt_rejection_gives_retry_hint() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&decode_request(1, 19_000), at(0)), Ok(()));
        let slow = admission
            .admit(&AdmissionRequest { priority: 9, ..decode_request(1, 40_000) }, at(0))
            .expect_err("it misses its inter-token limit");
        assert!(matches!(slow.reason, RejectReason::TooSlow { .. }), "{slow}");
        assert_eq!(
            slow.retry_after,
            Duration::from_secs(4),
            "half of the decoding requests must end, which takes 8 s"
        );
        let pacing = DecodePrediction { neighbours: neighbours(16_000), ..decode_request(1, 0).decode };
        let slows = admission
            .admit(&AdmissionRequest { decode: pacing, ..decode_request(1, 11_000) }, at(0))
            .expect_err("it slows others");
        assert!(matches!(slows.reason, RejectReason::SlowsOthers { .. }), "{slows}");
        assert_eq!(slows.retry_after, Duration::from_millis(2_600), "down to nine tenths of 12 ms");
        let pacing = DecodePrediction { neighbours: neighbours(10_801), ..pacing };
        assert!(
            admission
                .admit(&AdmissionRequest { decode: pacing, ..decode_request(1, 11_000) }, at(0))
                .is_err()
        );
        let pacing = DecodePrediction { neighbours: neighbours(10_800), ..pacing };
        assert_eq!(
            admission.admit(&AdmissionRequest { decode: pacing, ..decode_request(1, 11_000) }, at(0)),
            Ok(())
        );
        let pacing = DecodePrediction { neighbours: neighbours(16_000), ..pacing };
        let first = AdmissionRequest { decode: pacing, priority: 1, ..decode_request(1, 11_000) };
        assert_eq!(admission.admit(&first, at(0)), Ok(()), "it has priority over its neighbours");
        let pacing = DecodePrediction { limit_us: 0, ..pacing };
        for ttft_max_us in [None, Some(LIMIT_US)] {
            let free = AdmissionRequest { decode: pacing, ttft_max_us, ..decode_request(1, 11_000) };
            assert_eq!(admission.admit(&free, at(0)), Ok(()), "it has no inter-token limit");
        }
    }

    #[test]
    fn idle_instance_admits_a_trial_request() {
        for (tbt_us, beside) in [(40_000, None), (19_500, None), (11_000, neighbours(16_000))] {
            let offer = |is_trial| {
                let pacing = DecodePrediction { neighbours: beside, is_trial, ..decode_request(1, 0).decode };
                AdmissionRequest { decode: pacing, priority: -1, ..decode_request(1, tbt_us) }
            };
            let mut admission = Admission::default();
            assert!(admission.admit(&offer(false), at(0)).is_err(), "{tbt_us}");
            assert_eq!(admission.admit(&offer(true), at(0)), Ok(()), "{tbt_us}");
        }
        let late =
            AdmissionRequest { ttft_us: LIMIT_US + 1, ttft_max_us: Some(LIMIT_US), ..decode_request(1, 1) };
        let pacing = DecodePrediction { is_trial: true, ..late.decode };
        let late = Admission::default().admit(&AdmissionRequest { decode: pacing, ..late }, at(0));
        assert!(late.is_err(), "the TTFT limit still applies");
    }

    #[test]
    fn slo_margin_is_open_to_positive_priority_only() {
        let offer = |priority, tbt_us| {
            let pacing = DecodePrediction { slo_margin_us: 1_500, ..decode_request(1, tbt_us).decode };
            AdmissionRequest { decode: pacing, priority, ..decode_request(1, tbt_us) }
        };
        let admit = |priority, tbt_us| Admission::default().admit(&offer(priority, tbt_us), at(0));
        assert_eq!(admit(0, 18_500), Ok(()));
        let rejection = admit(0, 18_501).expect_err("above the usable part of its limit");
        assert!(matches!(rejection.reason, RejectReason::DecodeOverloaded { .. }), "{rejection}");
        assert_eq!(admit(1, 20_000), Ok(()));
    }

    #[test]
    fn own_transfer_does_not_count_as_queueing() {
        // A tenant with twice its fair share may wait at most a third of the limit.
        let mut admission = Admission::default();
        (0..2).for_each(|_| assert_eq!(admission.admit(&request(1, 500_000, 500_000), at(0)), Ok(())));
        assert_eq!(admission.admit(&request(2, 100_000, 100_000), at(0)), Ok(()));
        let fetches = |transfer_us, ttft_us| AdmissionRequest { transfer_us, ..request(1, 100_000, ttft_us) };
        assert_eq!(admission.admit(&fetches(5_000_000, 5_100_000), at(0)), Ok(()));
        assert!(admission.admit(&fetches(0, 5_100_000), at(0)).is_err(), "the same time in a queue");
    }

    #[test]
    fn decode_capacity_is_shared_and_full_for_a_lone_tenant() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(&decode_request(1, 20_000), at(0)), Ok(()), "alone");
        (0..10).for_each(|_| assert_eq!(admission.admit(&decode_request(1, 15_000), at(0)), Ok(())));
        assert_eq!(admission.admit(&decode_request(2, 20_000), at(0)), Ok(()), "below its fair share");
        let more = admission.admit(&decode_request(1, 18_500), at(0)).expect_err("above its fair share");
        assert!(matches!(more.reason, RejectReason::DecodeOverloaded { .. }), "{more}");
        assert!(more.retry_after >= RETRY_MIN);
        assert_eq!(admission.admit(&decode_request(1, 18_000), at(0)), Ok(()));
        let last = |tbt_us| AdmissionRequest { priority: -1, ..decode_request(2, tbt_us) };
        assert!(admission.admit(&last(17_500), at(0)).is_err());
        assert_eq!(admission.admit(&last(17_000), at(0)), Ok(()));
        assert_eq!(
            admission.admit(&AdmissionRequest { priority: 1, ..decode_request(1, 20_000) }, at(0)),
            Ok(())
        );
    }

    #[test]
    fn flooding_decode_tenant_gets_only_spare_capacity() {
        // A decoding request adds 0.1 ms to each step and lasts 10 s, so ninety fit, and eighty of
        // a tenant above its fair share.
        let (mut admission, mut runs, mut sums) = (Admission::default(), Vec::new(), [0_u64; 3]);
        for ms in 0..600_000_u64 {
            runs.retain(|until| *until > ms);
            for (tenant, every_ms) in [(1, 250), (2, 10)] {
                let tbt_us = 10_000 + 100 * (runs.len() as u64 + 1);
                if ms % every_ms == 0 && admission.admit(&decode_request(tenant, tbt_us), at(ms)).is_ok() {
                    runs.push(ms + 10_000);
                    sums[tenant as usize] += 1;
                }
            }
        }
        let [_, modest, flood] = sums.map(|sum| sum as f64 / 600.0);
        assert!(modest > 3.8, "it wants four a second: {modest}");
        assert!(flood > 3.8, "more than the reserve stays idle: {flood}");
    }

    #[test]
    fn tracked_tenants_are_bounded_and_forgotten() {
        let mut admission = Admission::default();
        for tenant in 0..10_000 {
            assert_eq!(admission.admit(&request(tenant, 1_000, 1_000), at(0)), Ok(()));
        }
        assert!(admission.tenants.len() <= TENANTS_MAX + 1);
        assert_eq!(admission.admit(&request(1, 1_000, 1_000), at(3_600_000)), Ok(()));
        assert_eq!(admission.tenants.len(), 1);
    }
}
