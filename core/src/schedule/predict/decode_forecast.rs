//! Decode forecast of an instance: how long a request waits for KV capacity in GPU memory, and the
//! time between its tokens and between those of its neighbours.
//!
//! **KV capacity.** Requests hold capacity while they run, so all of it is freed once per request
//! duration (Little's law). A newcomer waits for the demand of the requests ahead and its own,
//! beyond the free part.
//!
//! **Time between tokens.** Each step gives every decoding request one token. It takes a base time,
//! more for each request, and the time of the prompt chunk in it, which has a size limit. The share
//! of steps with a chunk follows from the prompts computed while the request decodes: those known
//! to come after it, and the recent arrival rate.
//!
//! Not here: learning these times (`decode_step_model.rs`), and admission by them (`admission.rs`).
//! After the second half of Mooncake's early rejection (FAST '25, §7).

use crate::id::{InstanceId, Timestamp};
use crate::math::round_to_u64;
use crate::schedule::disaggregation::InstanceRole;
use crate::schedule::explain::decision::{Decision, Prediction, RejectReason, Rejection};
use crate::schedule::fairness::priority_deadline::QueuePriority;
use crate::schedule::fleet::load::LoadInstant;
use crate::schedule::fleet::{Fleet, Instance};
use crate::schedule::predict::cost::QueueWait;
use crate::schedule::predict::decode_step_model::{FACTOR_MAX, step_us};
use crate::schedule::predict::profile::HardwareProfile;
use crate::schedule::predict::ttft_bias::{self, BiasFactors};
use std::time::Duration;

/// Prompt tokens in a step of an engine that reports no limit: the usual setting with plenty of
/// memory.
const CHUNK_TOKENS: u32 = 8_192;

/// Slack on the limit once the prompt is computed: a request is ended only if its limit is exceeded
/// by more than this share.
const DECODE_SLACK: f64 = 0.1;

/// Shortest and longest retry hint for a request that may not decode, in seconds.
const RETRY_S: [f64; 2] = [0.1, 30.0];

/// The shortest time between tokens of a lone request that could be learned, by the bounds of step
/// factors and of prediction factors.
fn min_learnable_tbt_us(profile: &HardwareProfile) -> f64 {
    step_us(profile, [1.0 / FACTOR_MAX; 2], 1.0) / ttft_bias::FACTOR_MAX
}

/// Longest assumed duration of a request: a longer forecast is guesswork, and a limit keeps others
/// away for as long.
const DURATION_US_MAX: u64 = 3_600_000_000;

/// Longest believable time between tokens; a larger report is invalid.
const TBT_US_MAX: u32 = 60_000_000;

/// Largest believable KV capacity: a thousand prompts of a million tokens.
const KV_TOKENS_MAX: u64 = 1 << 30;

/// An instance's report on its decoding and GPU memory; a zero field is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeReport {
    /// KV capacity of its GPU memory, in tokens.
    pub kv_tokens_max: u64,
    /// Part of it that running requests hold.
    pub kv_tokens: u64,
    /// Mean time between two tokens of a request since the previous report, in microseconds.
    pub tbt_us: u32,
    /// Largest number of prompt tokens in a step.
    pub chunk_tokens: u32,
}

impl DecodeReport {
    /// The report with impossible values cut to the nearest possible ones.
    #[must_use]
    pub fn clamped(self) -> DecodeReport {
        let kv_tokens_max = self.kv_tokens_max.min(KV_TOKENS_MAX);
        DecodeReport {
            kv_tokens_max,
            kv_tokens: self.kv_tokens.min(kv_tokens_max),
            tbt_us: self.tbt_us.min(TBT_US_MAX),
            chunk_tokens: self.chunk_tokens,
        }
    }

    /// Prompt tokens in a step, with a default for an engine that reports none.
    pub(in crate::schedule) fn chunk_tokens(self) -> u32 {
        if self.chunk_tokens == 0 { CHUNK_TOKENS } else { self.chunk_tokens }
    }

    fn chunk_tokens_f64(self) -> f64 {
        f64::from(self.chunk_tokens())
    }
}

/// The tightest inter-token limit among the requests sent to an instance, for as long as one of
/// those is predicted to run. Looser limits are not remembered beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct TightestLimit {
    tbt_us: u32,
    until: Timestamp,
}

impl TightestLimit {
    /// Records a request that was sent there. Its limit counts as no tighter than `floor_us`.
    pub(in crate::schedule) fn record(&mut self, decision: &Decision, floor_us: u64, now: Timestamp) {
        let DecodePrediction { limit_us, decode_us, .. } = decision.decode;
        if limit_us == 0 {
            return;
        }
        let tbt_us = u32::try_from(limit_us.max(floor_us)).unwrap_or(u32::MAX);
        let runs_us = decision.predicted.ttft_us().saturating_add(decode_us).min(DURATION_US_MAX);
        let until = now.after(Duration::from_micros(runs_us));
        match self.limit_at(now) {
            Some(known) if known < tbt_us => {}
            Some(known) if known == tbt_us => self.until = self.until.max(until),
            _ => *self = TightestLimit { tbt_us, until },
        }
    }

    /// The limit, if there is one.
    pub(in crate::schedule) fn limit_at(self, now: Timestamp) -> Option<u32> {
        (self.tbt_us > 0 && now < self.until).then_some(self.tbt_us)
    }
}

/// The inter-token limit that is predicted to be broken at an instance. Closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BrokenLimit {
    /// That of requests that already decode there.
    Others,
    /// The request's own.
    Own,
}

/// Prediction for requests that decode beside a newcomer, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeighbourTbt {
    /// Time between their tokens.
    pub tbt_us: u64,
    /// Time between tokens up to which they may be slowed: their limit minus the learned SLO
    /// margin.
    pub allowed_us: u64,
    /// The tightest of their limits.
    pub limit_us: u64,
}

/// Observed decode speed of a finished request.
#[derive(Clone, Copy, Debug)]
pub struct DecodeObservation<'a> {
    /// The prediction before learned corrections.
    pub uncorrected: &'a Prediction,
    /// The predicted time between tokens at decision time, in microseconds.
    pub predicted_us: u64,
    /// Tokens that it produced in all; 0 if unknown.
    pub tokens: u32,
    /// Mean time between two of its tokens, in microseconds; 0 if unknown.
    pub tbt_us: u64,
    /// The limit to check it against, in microseconds; 0 for none.
    pub limit_us: u64,
}

/// Decode prediction of a request at its chosen instance; input of admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodePrediction {
    /// Expected output tokens.
    pub output_tokens: u32,
    /// KV capacity that it takes, in tokens.
    pub kv_tokens: u32,
    /// Its inter-token limit, in microseconds; 0 for none.
    pub limit_us: u64,
    /// The SLO margin below that limit, learned from finished answers, in microseconds.
    pub slo_margin_us: u64,
    /// Time between its tokens if it decoded alone, in microseconds.
    pub alone_tbt_us: u64,
    /// Decode duration, in microseconds.
    pub decode_us: u64,
    /// The neighbours that decode beside it; `None` if none of them has a limit.
    pub neighbours: Option<NeighbourTbt>,
    /// Whether it may run as a trial in spite of the prediction: its instance is idle, and some
    /// learnable step time meets its limit.
    pub is_trial: bool,
}

/// Inputs of a decode forecast that are the same for all instances, computed once per request.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct DecodeForecast {
    /// Expected output tokens of the request.
    pub(in crate::schedule) output_tokens: u32,
    /// Mean output tokens of a request, at least one.
    mean_output_tokens: f64,
    /// The same mean, weighted by held KV capacity.
    kv_weighted_output_tokens: f64,
    /// Mean KV capacity of a request, in tokens.
    mean_kv_tokens: f64,
    /// KV capacity of this request, in tokens.
    pub(in crate::schedule) kv_tokens: u32,
    /// Its own limit, in microseconds; 0 for none.
    pub(in crate::schedule) limit_us: u64,
    /// Share of an instance's time that prefill takes.
    prefill_share: f64,
    prompt_us_per_token: f64,
    /// Learned factors of step times, decayed by age.
    step_factors: [f64; 2],
    /// Its position relative to other waiting requests.
    pub(in crate::schedule) queue_priority: QueuePriority,
    /// The prompt was hashed as text.
    pub(in crate::schedule) is_untokenized: bool,
    /// The hardware profile with learned prefill speeds.
    pub(in crate::schedule) speeds: HardwareProfile,
    /// Learned corrections of predictions.
    pub(in crate::schedule) bias: BiasFactors,
    pub(in crate::schedule) now: Timestamp,
}

/// Decode estimate at one instance, in microseconds, before learned corrections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct DecodeEstimate {
    /// Wait for KV capacity.
    pub(in crate::schedule) kv_wait_us: u64,
    pub(in crate::schedule) tbt_us: u64,
    pub(in crate::schedule) others_tbt_us: u64,
}

impl DecodeForecast {
    pub(in crate::schedule) fn for_request(
        request: &crate::schedule::RouteRequest,
        fleet: &Fleet,
        now: Timestamp,
    ) -> DecodeForecast {
        let (lengths, speeds) = (fleet.lengths(), fleet.corrected_profile());
        let output_tokens = lengths.expected_output(request.category, request.output_tokens);
        let kv_tokens = request.input_tokens.saturating_add(output_tokens);
        DecodeForecast {
            output_tokens,
            mean_output_tokens: lengths.mean_output().max(1.0),
            kv_weighted_output_tokens: lengths.kv_weighted_output(),
            mean_kv_tokens: lengths.mean_kv_tokens().unwrap_or(kv_tokens.into()).max(1.0),
            kv_tokens,
            limit_us: request.tbt_max_us,
            queue_priority: request.queue_priority,
            is_untokenized: request.is_untokenized,
            prefill_share: fleet.overtaking().prefill_share(now),
            prompt_us_per_token: lengths.prompt_us_per_token(&speeds),
            step_factors: fleet.step_model().factors_at(now),
            speeds,
            bias: fleet.ttft_bias.factors_at(now),
            now,
        }
    }

    /// Same, for a request that already holds its KV capacity and has a mean output length.
    fn for_decode(fleet: &Fleet, limit_us: u64, now: Timestamp) -> DecodeForecast {
        let (lengths, mean_output_tokens) = (fleet.lengths(), fleet.lengths().mean_output().max(1.0));
        let speeds = fleet.corrected_profile();
        DecodeForecast {
            output_tokens: mean_output_tokens.round() as u32,
            mean_output_tokens,
            kv_weighted_output_tokens: lengths.kv_weighted_output(),
            mean_kv_tokens: lengths.mean_kv_tokens().unwrap_or(1.0).max(1.0),
            kv_tokens: 0,
            limit_us,
            queue_priority: QueuePriority::default(),
            is_untokenized: false,
            prefill_share: fleet.overtaking().prefill_share(now),
            prompt_us_per_token: lengths.prompt_us_per_token(&speeds),
            step_factors: fleet.step_model().factors_at(now),
            speeds,
            bias: fleet.ttft_bias.factors_at(now),
            now,
        }
    }

    /// Delay that a prefill causes to all future requests together. At a utilisation of ρ, ρ / (1 −
    /// ρ) requests are before an instance at any time (M/M/1), and each waits for every prefill
    /// there.
    pub(in crate::schedule) fn future_delay_us(&self, prefill_us: u64) -> u64 {
        // The cast saturates.
        (prefill_us as f64 * self.prefill_share / (1.0 - self.prefill_share)) as u64
    }

    /// The estimate at an instance with this wait and prefill time.
    pub(in crate::schedule) fn estimate(
        &self,
        fleet: &Fleet,
        instance: &Instance,
        wait: &QueueWait,
        prefill_us: u64,
    ) -> DecodeEstimate {
        let load = &instance.load;
        let DecodeReport { kv_tokens_max, kv_tokens, .. } = load.decode;
        let pace = load.pace.factor_at(self.now);
        let step_of = |running: f64| step_us(&fleet.profile, self.step_factors, running) * pace;
        let before = f64::from(load.running) + wait.requests as f64;
        // No more requests decode at once than fit in KV capacity.
        let capacity_requests = if kv_tokens_max == 0 {
            f64::MAX
        } else {
            (kv_tokens_max as f64 / self.mean_kv_tokens).max(load.running.into())
        };
        let step = step_of(before.min(capacity_requests) + 1.0);
        let chunk_us = load.decode.chunk_tokens_f64() * self.prompt_us_per_token;
        // While it decodes, prompts arrive at the recent rate; those that wait are among them.
        let later_us = step * self.prefill_share / (1.0 - self.prefill_share);
        let own_us = wait.behind_us as f64 / f64::from(self.output_tokens.max(1));
        let tbt_us = step + chunk_us.min(later_us.max(own_us));
        // Its own prompt comes on top of that rate: its neighbours pay for all of it.
        let waits_us = wait.work_us as f64 + wait.behind_us as f64;
        let known_us =
            later_us.max(waits_us / self.mean_output_tokens) + prefill_us as f64 / self.mean_output_tokens;
        let others_us = if before > 0.0 { step + chunk_us.min(known_us) } else { 0.0 };
        let ahead = wait.kv_tokens as f64
            + wait.requests.saturating_sub(wait.known_requests) as f64 * self.mean_kv_tokens;
        let demand_tokens = ahead + f64::from(self.kv_tokens) + kv_tokens as f64 - kv_tokens_max as f64;
        // A request larger than the whole capacity waits for everything that runs.
        let missing_tokens = demand_tokens.min(ahead + kv_tokens as f64).max(0.0);
        let room_us = if kv_tokens_max == 0 {
            0.0
        } else {
            missing_tokens / kv_tokens_max as f64 * self.kv_weighted_output_tokens * tbt_us
        };
        let [room_us, tbt_us, others_us] = [room_us, tbt_us, others_us].map(round_to_u64);
        DecodeEstimate { kv_wait_us: room_us, tbt_us, others_tbt_us: others_us }
    }

    /// The estimate at a decode partner. A decode-only instance has no prompts in its steps.
    pub(in crate::schedule) fn estimate_at_partner(
        &self,
        fleet: &Fleet,
        partner: &Instance,
    ) -> DecodeEstimate {
        let wait = QueueWait { requests: partner.load.requests_ahead(), ..QueueWait::default() };
        self.for_role(fleet, partner.id).estimate(fleet, partner, &wait, 0)
    }

    /// Same, with prefill load only if the instance's role includes prefill.
    fn for_role(&self, fleet: &Fleet, id: InstanceId) -> DecodeForecast {
        let prompts = if fleet.placement(id).role == InstanceRole::Decode { 0.0 } else { self.prefill_share };
        DecodeForecast { prefill_share: prompts, ..*self }
    }

    /// Time between its tokens if it decoded alone there, in microseconds.
    pub(in crate::schedule) fn alone_tbt_us(&self, fleet: &Fleet, instance: &Instance) -> u64 {
        let pace = instance.load.pace.factor_at(self.now);
        round_to_u64(step_us(&fleet.profile, self.step_factors, 1.0) * pace)
    }

    /// Whether the instance is idle and the limit is not below every learnable step time.
    pub(in crate::schedule) fn is_trial(&self, fleet: &Fleet, instance: &Instance) -> bool {
        instance.load.is_idle() && self.limit_us as f64 >= min_learnable_tbt_us(&fleet.profile)
    }

    /// The tightest limit of requests that decode there.
    pub(in crate::schedule) fn tightest_limit_us(&self, instance: &Instance) -> Option<u64> {
        instance.load.tightest_limit.limit_at(self.now).map(u64::from)
    }

    /// The limit that these times between tokens would break, if any.
    pub(in crate::schedule) fn broken_limit(
        &self,
        instance: &Instance,
        tbt_us: u64,
        others_us: u64,
    ) -> Option<BrokenLimit> {
        if self.limit_us > 0 && tbt_us > self.limit_us {
            return Some(BrokenLimit::Own);
        }
        let limit = instance.load.tightest_limit.limit_at(self.now);
        limit.is_some_and(|limit| others_us > limit.into()).then_some(BrokenLimit::Others)
    }
}

impl Fleet {
    /// Time that a prompt of this many tokens adds to an instance. Learned prefill times include
    /// the step overhead of each chunk. If others decode, those steps run anyway, so their time is
    /// subtracted; at high utilisation the difference decides.
    pub(in crate::schedule) fn added_prefill_us(
        &self,
        instance: &Instance,
        prefill_us: u64,
        tokens: u32,
        now: Timestamp,
    ) -> u64 {
        let load = &instance.load;
        if load.running == 0 {
            return prefill_us;
        }
        let step_us = step_us(&self.profile, self.step_model().factors_at(now), load.running.into())
            * load.pace.factor_at(now);
        // The cast saturates.
        prefill_us.saturating_sub((f64::from(tokens) / load.decode.chunk_tokens_f64() * step_us) as u64)
    }

    /// Whether a request with a computed prompt may start to decode at its instance, given the
    /// current load there. Returns the predicted time between its tokens in microseconds (0 if
    /// unknown). It may decode if that is unknown, if the limit is 0, or alone if some learnable
    /// step time meets the limit. `is_reported`: the request is already part of the instance's
    /// report.
    ///
    /// # Errors
    /// [`RejectReason::TooSlow`] with a retry hint, and the predicted time.
    pub fn admit_decode(
        &self,
        id: InstanceId,
        is_reported: bool,
        limit_us: u64,
        now: Timestamp,
    ) -> Result<u64, (u64, Rejection)> {
        let known = self
            .instance(id)
            .filter(|instance| now.since(instance.reported_at) <= self.limits.report_stale_after);
        let Some(instance) = known else { return Ok(0) };
        let forecast = DecodeForecast::for_decode(self, limit_us, now).for_role(self, id);
        let prompts_us =
            instance.load.remaining_prefill_us(LoadInstant { now, reported_at: instance.reported_at });
        let own_count = u32::from(is_reported);
        let load = crate::schedule::Load {
            running: instance.load.running.saturating_sub(own_count),
            ..instance.load
        };
        let wait = QueueWait { behind_us: prompts_us, ..QueueWait::default() };
        let estimate = forecast.estimate(self, &Instance { load, ..*instance }, &wait, 0);
        let tbt_us = forecast.bias.corrected_tbt_us(estimate.tbt_us);
        // Alone it may decode, as it was admitted: the prediction may be wrong, and only decoding
        // requests can correct it. Until the next report it counts among the requests ahead.
        let is_alone =
            load.running == 0 && u64::from(instance.load.running) + instance.load.requests_ahead() <= 1;
        let is_trial = is_alone && limit_us as f64 >= min_learnable_tbt_us(&self.profile);
        if limit_us == 0 || is_trial || tbt_us as f64 <= limit_us as f64 * (1.0 + DECODE_SLACK) {
            return Ok(tbt_us);
        }
        let (tbt, limit) = (Duration::from_micros(tbt_us), Duration::from_micros(limit_us));
        let share = 1.0 - limit_us as f64 / tbt_us as f64;
        let retry_s = tbt.as_secs_f64() * forecast.mean_output_tokens * share;
        let retry_after = Duration::from_secs_f64(retry_s.clamp(RETRY_S[0], RETRY_S[1]));
        Err((tbt_us, Rejection { reason: RejectReason::TooSlow { tbt, limit }, retry_after }))
    }
}
