//! What decodes at an instance, and what is predicted of it: how long a request waits for room in GPU memory, and how far apart tokens come, its own and those
//! of the requests that decode beside it.
//!
//! **Room.** Requests hold room for as long as they run, so that room comes free at a rate of all of it in the time that a request runs (Little's law). A
//! newcomer waits for what those before it and it itself need beyond what is free.
//!
//! **Time between tokens.** Each step gives every request that decodes a token. It takes its own time, more for each of them, and that of the part of a prompt
//! that is in it, which is bounded by what a step may hold. How many steps have one follows from the prompts that are computed while the request
//! decodes: those known to come behind it, and as many as came lately.
//!
//! Not here: learning these times (`steps.rs`), and who is turned away by them (`admit.rs`). After the second half of Mooncake's early rejection
//! (FAST '25, §7).

use std::time::Duration;

use super::cost::Wait;
use super::decision::{Decision, Prediction, RejectReason, Rejection};
use super::fleet::{Fleet, Instance};
use super::learnt::{self, Factors};
use super::load::Moment;
use super::pairs::Role;
use super::profile::HardwareProfile;
use super::steps::{FACTOR_MAX, step_us};
use super::turn::Standing;
use crate::id::{InstanceId, Timestamp};
use crate::math::rounded;

/// Tokens of prompts in a step of an engine that does not say: what engines are set to where memory is plenty.
const CHUNK_TOKENS: u32 = 8_192;

/// Its prompt is computed by then: a request is ended only if its limit is broken by more than this share of it.
const DECODE_SLACK: f64 = 0.1;

/// Shortest and longest that a request which may not decode is told to stay away.
const RETRY_S: [f64; 2] = [0.1, 30.0];

/// The shortest time between two tokens that could be learnt, of one that is alone: by factors of steps, and of predictions made with them.
fn least_us(profile: &HardwareProfile) -> f64 {
    step_us(profile, [1.0 / FACTOR_MAX; 2], 1.0) / learnt::FACTOR_MAX
}

/// A request is believed to run no longer than that: what is so far ahead is guesswork, and a limit keeps others away for as long.
const RUNS_US_MAX: u64 = 3_600_000_000;

/// No step takes longer; what is said to is nonsense.
const TBT_US_MAX: u32 = 60_000_000;

/// Most tokens that any GPU memory is believed to hold: a thousand prompts of a million.
const KV_TOKENS_MAX: u64 = 1 << 30;

/// What an instance says of its decoding and of its GPU memory; zero where it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoding {
    /// Tokens whose KV its GPU memory can hold.
    pub kv_tokens_max: u64,
    /// Of these, those held for requests that run.
    pub kv_tokens: u64,
    /// Mean time between two tokens of a request since the report before, in microseconds.
    pub tbt_us: u32,
    /// Tokens of prompts in a step, at most.
    pub chunk_tokens: u32,
}

impl Decoding {
    /// The same within bounds: of what cannot be, what is nearest to it.
    #[must_use]
    pub fn believed(self) -> Decoding {
        let kv_tokens_max = self.kv_tokens_max.min(KV_TOKENS_MAX);
        Decoding {
            kv_tokens_max,
            kv_tokens: self.kv_tokens.min(kv_tokens_max),
            tbt_us: self.tbt_us.min(TBT_US_MAX),
            chunk_tokens: self.chunk_tokens,
        }
    }

    /// Tokens of prompts in a step, also of an engine that does not say.
    pub(super) fn chunk_tokens(self) -> u32 {
        if self.chunk_tokens == 0 { CHUNK_TOKENS } else { self.chunk_tokens }
    }

    fn chunk(self) -> f64 {
        f64::from(self.chunk_tokens())
    }
}

/// The least limit between two tokens of the requests that were sent to an instance, as long as one of those is predicted to run. Those with more time are not
/// remembered beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Strictest {
    tbt_us: u32,
    until: Timestamp,
}

impl Strictest {
    /// A request was sent there; it keeps others away by no tighter limit than `least_us`.
    pub(super) fn sent(&mut self, decision: &Decision, least_us: u64, now: Timestamp) {
        let Pacing { limit_us, decode_us, .. } = decision.pacing;
        if limit_us == 0 {
            return;
        }
        let tbt_us = u32::try_from(limit_us.max(least_us)).unwrap_or(u32::MAX);
        let runs_us = decision.predicted.ttft_us().saturating_add(decode_us).min(RUNS_US_MAX);
        let until = now.after(Duration::from_micros(runs_us));
        match self.at(now) {
            Some(known) if known < tbt_us => {}
            Some(known) if known == tbt_us => self.until = self.until.max(until),
            _ => *self = Strictest { tbt_us, until },
        }
    }

    /// The limit, if there is one.
    pub(super) fn at(self, now: Timestamp) -> Option<u32> {
        (self.tbt_us > 0 && now < self.until).then_some(self.tbt_us)
    }
}

/// Whose limit between two tokens is predicted to be broken at an instance. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breaks {
    /// Of requests that decode there.
    Others,
    /// The request's own.
    Own,
}

/// What was predicted of requests that decode beside a newcomer, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Time between their tokens.
    pub tbt_us: u64,
    /// Up to which they may be slowed: the limit but for what is kept free of it, as learnt from answers.
    pub within_us: u64,
    /// The least limit of one of them.
    pub limit_us: u64,
}

/// How fast a request said what it said.
#[derive(Clone, Copy, Debug)]
pub struct Paced<'a> {
    /// What was predicted, before factors.
    pub parts: &'a Prediction,
    /// The same of times between its tokens as it was decided by, in microseconds.
    pub predicted_us: u64,
    /// Tokens that it said, told now or before; 0 where nobody knows.
    pub tokens: u32,
    /// Mean time between two of its tokens, in microseconds; 0 where nobody knows.
    pub tbt_us: u64,
    /// The limit whose keeping it shows; 0 for none.
    pub limit_us: u64,
}

/// What was predicted of a request's decoding at the instance that was chosen for it, for whoever lets it in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pacing {
    /// Tokens that it is expected to say.
    pub output_tokens: u32,
    /// Room that it takes in GPU memory, in tokens.
    pub kv_tokens: u32,
    /// Its limit between two tokens, in microseconds; 0 for none.
    pub limit_us: u64,
    /// How much of that is kept free, as learnt from answers.
    pub kept_us: u64,
    /// Time between its tokens if it were there alone, in microseconds.
    pub alone_us: u64,
    /// For how long it decodes.
    pub decode_us: u64,
    /// Those that decode beside it; nothing where nobody of them has a limit.
    pub beside: Option<Beside>,
    /// Whether it may show what is right, whatever is predicted of it: nobody runs or waits where it decodes, and there are times to learn that keep its limit.
    pub is_trial: bool,
}

/// What is the same for all instances: worked out once for a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Climate {
    /// Tokens that the request is expected to say.
    pub(super) output_tokens: u32,
    /// What requests say on average, at least one token.
    mean_output: f64,
    /// The same, each weighed by the room that it holds.
    output_by_room: f64,
    /// Room that one takes on average.
    mean_kv: f64,
    /// Room that this one takes.
    pub(super) kv_tokens: u32,
    /// Its own limit; 0 for none.
    pub(super) limit_us: u64,
    /// Of an instance's time, the share that prompts take.
    prompts: f64,
    prompt_us_per_token: f64,
    /// Factors of step times, as old as they are.
    steps: [f64; 2],
    /// Before and behind whom it goes.
    pub(super) standing: Standing,
    /// It was read as text.
    pub(super) is_text: bool,
    /// How fast prompts are computed, as far as that was learnt.
    pub(super) speeds: HardwareProfile,
    /// What was learnt of predicted times.
    pub(super) learnt: Factors,
    pub(super) now: Timestamp,
}

/// What is predicted at one instance, in microseconds, before what was learnt of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forecast {
    /// Until there is room for it.
    pub(super) room_us: u64,
    pub(super) tbt_us: u64,
    pub(super) others_us: u64,
}

impl Climate {
    pub(super) fn of(request: &super::RouteRequest, fleet: &Fleet, now: Timestamp) -> Climate {
        let (lengths, speeds) = (fleet.lengths(), fleet.speeds());
        let output_tokens = lengths.expected(request.category, request.output_tokens);
        let kv_tokens = request.input_tokens.saturating_add(output_tokens);
        Climate {
            output_tokens,
            mean_output: lengths.mean().max(1.0),
            output_by_room: lengths.by_room(),
            mean_kv: lengths.held().unwrap_or(kv_tokens.into()).max(1.0),
            kv_tokens,
            limit_us: request.tbt_max_us,
            standing: request.standing,
            is_text: request.is_text,
            prompts: fleet.passing().share(now),
            prompt_us_per_token: lengths.prompt_us_per_token(&speeds),
            steps: fleet.steps().at(now),
            speeds,
            learnt: fleet.learnt.at(now),
            now,
        }
    }

    /// The same for one that takes its room already and says as much as others do.
    fn decoding(fleet: &Fleet, limit_us: u64, now: Timestamp) -> Climate {
        let (lengths, mean_output) = (fleet.lengths(), fleet.lengths().mean().max(1.0));
        let speeds = fleet.speeds();
        Climate {
            output_tokens: mean_output.round() as u32,
            mean_output,
            output_by_room: lengths.by_room(),
            mean_kv: lengths.held().unwrap_or(1.0).max(1.0),
            kv_tokens: 0,
            limit_us,
            standing: Standing::default(),
            is_text: false,
            prompts: fleet.passing().share(now),
            prompt_us_per_token: lengths.prompt_us_per_token(&speeds),
            steps: fleet.steps().at(now),
            speeds,
            learnt: fleet.learnt.at(now),
            now,
        }
    }

    /// How long those wait for so much computing, all together, that are still to come. Where a share ρ of its time is taken, there are ρ / (1 − ρ)
    /// requests before an instance at any time (M/M/1), and each waits for all that is computed there.
    pub(super) fn later_us(&self, prefill_us: u64) -> u64 {
        // A cast saturates.
        (prefill_us as f64 * self.prompts / (1.0 - self.prompts)) as u64
    }

    /// What comes of it at an instance where it waits so, and takes so long to compute.
    pub(super) fn at(&self, fleet: &Fleet, instance: &Instance, wait: &Wait, prefill_us: u64) -> Forecast {
        let load = &instance.load;
        let Decoding { kv_tokens_max, kv_tokens, .. } = load.decoding;
        let pace = load.pace.at(self.now);
        let step_of = |running: f64| step_us(&fleet.profile, self.steps, running) * pace;
        let before = f64::from(load.running) + wait.requests as f64;
        // No more decode at once than have room.
        let most = if kv_tokens_max == 0 {
            f64::MAX
        } else {
            (kv_tokens_max as f64 / self.mean_kv).max(load.running.into())
        };
        let step = step_of(before.min(most) + 1.0);
        let chunk_us = load.decoding.chunk() * self.prompt_us_per_token;
        // While it decodes, as many prompts come as came lately; those that wait are among them.
        let later_us = step * self.prompts / (1.0 - self.prompts);
        let own_us = wait.behind_us as f64 / f64::from(self.output_tokens.max(1));
        let tbt_us = step + chunk_us.min(later_us.max(own_us));
        // Its own prompt is one more than those that come anyway: others have all of it.
        let waits_us = wait.work_us as f64 + wait.behind_us as f64;
        let known_us = later_us.max(waits_us / self.mean_output) + prefill_us as f64 / self.mean_output;
        let others_us = if before > 0.0 { step + chunk_us.min(known_us) } else { 0.0 };
        let ahead = wait.kv_tokens as f64 + wait.requests.saturating_sub(wait.known) as f64 * self.mean_kv;
        let wanted = ahead + f64::from(self.kv_tokens) + kv_tokens as f64 - kv_tokens_max as f64;
        // What is larger than all of it waits for all that runs.
        let missing = wanted.min(ahead + kv_tokens as f64).max(0.0);
        let room_us = if kv_tokens_max == 0 {
            0.0
        } else {
            missing / kv_tokens_max as f64 * self.output_by_room * tbt_us
        };
        let [room_us, tbt_us, others_us] = [room_us, tbt_us, others_us].map(rounded);
        Forecast { room_us, tbt_us, others_us }
    }

    /// What comes of it at an instance where it goes on, its prompt computed elsewhere. Those that only go on have no prompts in their steps.
    pub(super) fn at_partner(&self, fleet: &Fleet, partner: &Instance) -> Forecast {
        let wait = Wait { requests: partner.load.requests_ahead(), ..Wait::default() };
        self.of_role(fleet, partner.id).at(fleet, partner, &wait, 0)
    }

    /// The same for an instance with such prompts as it computes by its role.
    fn of_role(&self, fleet: &Fleet, id: InstanceId) -> Climate {
        let prompts = if fleet.part(id).role == Role::Decode { 0.0 } else { self.prompts };
        Climate { prompts, ..*self }
    }

    /// Time between its tokens if it were alone there.
    pub(super) fn alone_us(&self, fleet: &Fleet, instance: &Instance) -> u64 {
        let pace = instance.load.pace.at(self.now);
        rounded(step_us(&fleet.profile, self.steps, 1.0) * pace)
    }

    /// Whether nobody runs or waits there, and its limit is not below all that could be learnt.
    pub(super) fn is_trial(&self, fleet: &Fleet, instance: &Instance) -> bool {
        instance.load.is_idle() && self.limit_us as f64 >= least_us(&fleet.profile)
    }

    /// The least limit of requests that decode there.
    pub(super) fn strictest_us(&self, instance: &Instance) -> Option<u64> {
        instance.load.strictest.at(self.now).map(u64::from)
    }

    /// Whose limit is broken where tokens come so far apart.
    pub(super) fn breaks(&self, instance: &Instance, tbt_us: u64, others_us: u64) -> Option<Breaks> {
        if self.limit_us > 0 && tbt_us > self.limit_us {
            return Some(Breaks::Own);
        }
        let limit = instance.load.strictest.at(self.now);
        limit.is_some_and(|limit| others_us > limit.into()).then_some(Breaks::Others)
    }
}

impl Fleet {
    /// What a prompt of so many tokens that takes so long adds to the time of an instance. Each of the steps into which it is cut begins by itself, so to say, which is in how
    /// long prompts are found to take; but where others decode, there are these steps anyway. Where hardly any time is left, a tenth more would be most of what is.
    pub(super) fn added_us(&self, instance: &Instance, prefill_us: u64, tokens: u32, now: Timestamp) -> u64 {
        let load = &instance.load;
        if load.running == 0 {
            return prefill_us;
        }
        let step_us = step_us(&self.profile, self.steps().at(now), load.running.into()) * load.pace.at(now);
        // A cast saturates.
        prefill_us.saturating_sub((f64::from(tokens) / load.decoding.chunk() * step_us) as u64)
    }

    /// Whether a request whose prompt is computed may begin to decode at its instance, by what decodes and waits there now: how far apart its tokens come, in
    /// microseconds, or with that, why not. It may where that is not known (0) or does not matter (a limit of 0), and alone if there
    /// are times to learn that keep its limit. Of one that `runs_there` the report tells already.
    ///
    /// # Errors
    /// [`RejectReason::TooSlow`], with when to come again.
    pub fn may_decode(
        &self,
        (id, runs_there): (InstanceId, bool),
        limit_us: u64,
        now: Timestamp,
    ) -> Result<u64, (u64, Rejection)> {
        let known = self
            .instance(id)
            .filter(|instance| now.since(instance.reported_at) <= self.limits.report_stale_after);
        let Some(instance) = known else { return Ok(0) };
        let climate = Climate::decoding(self, limit_us, now).of_role(self, id);
        let prompts_us = instance.load.prompts_us(Moment { now, reported_at: instance.reported_at });
        let itself = u32::from(runs_there);
        let load = super::Load { running: instance.load.running.saturating_sub(itself), ..instance.load };
        let wait = Wait { behind_us: prompts_us, ..Wait::default() };
        let forecast = climate.at(self, &Instance { load, ..*instance }, &wait, 0);
        let tbt_us = climate.learnt.tbt_us(forecast.tbt_us);
        // Alone it may, as it was let in: what is predicted may be wrong, and is learnt anew only from who decodes.
        // Until the next report it is one of those that are ahead.
        let is_alone =
            load.running == 0 && u64::from(instance.load.running) + instance.load.requests_ahead() <= 1;
        let is_trial = is_alone && limit_us as f64 >= least_us(&self.profile);
        if limit_us == 0 || is_trial || tbt_us as f64 <= limit_us as f64 * (1.0 + DECODE_SLACK) {
            return Ok(tbt_us);
        }
        let (tbt, limit) = (Duration::from_micros(tbt_us), Duration::from_micros(limit_us));
        let share = 1.0 - limit_us as f64 / tbt_us as f64;
        let retry_s = tbt.as_secs_f64() * climate.mean_output * share;
        let retry_after = Duration::from_secs_f64(retry_s.clamp(RETRY_S[0], RETRY_S[1]));
        Err((tbt_us, Rejection { reason: RejectReason::TooSlow { tbt, limit }, retry_after }))
    }
}
