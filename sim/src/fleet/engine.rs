//! One instance: continuous batching with chunked prefill, in virtual time.
//!
//! A step takes the profile's time for it, for each request that decodes, and for the tokens of prompts in it. Requests wait in
//! order; one whose blocks are still on their way lets others pass, as engines do with loads under way. A run of steps that only decode
//! is one event, cut at a step's end when something comes. Not here: memory (`memory.rs`), where blocks come from (`store.rs`).

use std::collections::VecDeque;

use kv_core::id::Timestamp;
use kv_core::schedule::HardwareProfile;

use super::memory::Memory;

/// What one step may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Requests that decode, the one in prefill counted.
    pub requests_max: usize,
    /// Tokens of prompts in a step.
    pub chunk_tokens: u32,
}

/// A request at an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    /// Which request of the trace.
    pub(super) nth: usize,
    pub(super) input_tokens: u32,
    pub(super) output_tokens: u32,
    /// Leading tokens that came from elsewhere, or will have come by `ready_ns`.
    pub(super) fetched_tokens: u32,
    /// Of these, how many it was told the instance has itself.
    pub(super) resident_tokens: u32,
    /// When the last of them is there.
    pub(super) ready_ns: u64,
    /// The earliest goes first.
    pub(super) turn: Timestamp,
}

/// What became of requests in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The first token is out, and so many tokens were computed for it.
    First { nth: usize, computed_tokens: u32 },
    /// The last token is out; so many came behind the first, in this time.
    Last { nth: usize, between: Between },
}

#[derive(Clone, Copy, Debug)]
struct Prefill {
    job: Job,
    /// Tokens whose KV is there.
    context_tokens: u32,
    computed_tokens: u32,
}

#[derive(Clone, Copy, Debug)]
struct Decoding {
    nth: usize,
    left_tokens: u32,
    between: Between,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A part of a prompt, beside what decodes.
    Prefill { chunk_tokens: u32 },
    /// So many steps that only decode, each of this length.
    Decode { steps: u32, each_ns: u64, from_ns: u64 },
}

/// Times between two tokens, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Between {
    pub(super) tokens: u64,
    pub(super) ns: u64,
}

/// The instance.
pub(super) struct Engine {
    profile: HardwareProfile,
    batch: Batch,
    pub(super) memory: Memory,
    waiting: VecDeque<Job>,
    prefill: Option<Prefill>,
    decoding: Vec<Decoding>,
    step: Option<(Step, u64)>,
    pub(super) between: Between,
    pub(super) busy_ns: u64,
}

impl Engine {
    pub(super) fn new(profile: HardwareProfile, batch: Batch, memory: Memory) -> Engine {
        Engine {
            profile,
            batch,
            memory,
            waiting: VecDeque::new(),
            prefill: None,
            decoding: Vec::new(),
            step: None,
            between: Between::default(),
            busy_ns: 0,
        }
    }

    /// A copy, to see what would come.
    pub(super) fn copy(&self) -> Engine {
        Engine {
            memory: self.memory.copy(),
            waiting: self.waiting.clone(),
            decoding: self.decoding.clone(),
            ..*self
        }
    }

    /// When the step that runs ends.
    pub(super) fn step_ends_ns(&self) -> Option<u64> {
        self.step.map(|(_, end_ns)| end_ns)
    }

    /// When the first of what waits has come that has not come yet.
    pub(super) fn wakes_ns(&self, now_ns: u64) -> Option<u64> {
        self.waiting.iter().map(|job| job.ready_ns).filter(|ready_ns| *ready_ns > now_ns).min()
    }

    /// Requests whose first token is not out.
    pub(super) fn without_first(&self) -> usize {
        self.waiting.len() + usize::from(self.prefill.is_some())
    }

    /// A request comes.
    pub(super) fn put(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Prompt tokens that are not computed yet; those on their way from elsewhere are left out.
    pub(super) fn queue_tokens(&self) -> u64 {
        let rest = |job: &Job| u64::from(job.input_tokens - job.fetched_tokens.min(job.input_tokens));
        let running =
            self.prefill.map_or(0, |prefill| u64::from(prefill.job.input_tokens - prefill.context_tokens));
        self.waiting.iter().map(rest).sum::<u64>() + running
    }

    /// Requests that wait, and those that run.
    pub(super) fn requests(&self) -> (u32, u32) {
        let running = self.decoding.len() + usize::from(self.prefill.is_some());
        (self.waiting.len() as u32, running as u32)
    }

    /// Tokens behind the first of a request so far, those of a run of steps that goes on among them.
    pub(super) fn between_by(&self, now_ns: u64) -> Between {
        let Some((Step::Decode { steps, each_ns, from_ns }, _)) = self.step else { return self.between };
        let done = (now_ns.saturating_sub(from_ns) / each_ns.max(1)).min(steps.into());
        let tokens = self.decoding.len() as u64 * done;
        Between { tokens: self.between.tokens + tokens, ns: self.between.ns + tokens * each_ns }
    }

    /// Begins a step, if there is something to do and none runs; answers when it ends.
    pub(super) fn begin(&mut self, now_ns: u64) -> Option<u64> {
        if self.step.is_some() {
            return None;
        }
        if self.prefill.is_none() {
            self.admit(now_ns);
        }
        let (step, took_ns) = match self.prefill {
            Some(prefill) => self.prefill_step(&prefill),
            None => self.decode_steps(now_ns)?,
        };
        let end_ns = now_ns + took_ns;
        self.busy_ns += took_ns;
        self.step = Some((step, end_ns));
        Some(end_ns)
    }

    /// Of those that are ready, the one whose turn is earliest is next, if it has room; of equal ones that which came first.
    fn admit(&mut self, now_ns: u64) {
        if self.decoding.len() >= self.batch.requests_max {
            return;
        }
        let ready = self.waiting.iter().enumerate().filter(|(_, job)| job.ready_ns <= now_ns);
        let Some((at, _)) = ready.min_by_key(|(_, job)| job.turn) else { return };
        let job = self.waiting[at];
        let Some(own_tokens) = self.memory.admit(job.nth, job.input_tokens, job.output_tokens) else {
            return;
        };
        self.waiting.remove(at);
        // What came from elsewhere goes on behind what the instance was said to have; without that it is of no use.
        let there =
            if own_tokens >= job.resident_tokens { own_tokens.max(job.fetched_tokens) } else { own_tokens };
        // The last token is always computed: it gives the first one out.
        let context_tokens = there.min(job.input_tokens - 1);
        self.prefill = Some(Prefill { job, context_tokens, computed_tokens: 0 });
    }

    fn prefill_step(&self, prefill: &Prefill) -> (Step, u64) {
        let left = prefill.job.input_tokens - prefill.context_tokens;
        let chunk_tokens = left.min(self.batch.chunk_tokens);
        let prefill_ns = self.profile.prefill_ns(prefill.context_tokens.into(), chunk_tokens.into());
        (Step::Prefill { chunk_tokens }, prefill_ns + self.step_ns())
    }

    /// A step without prompts.
    fn step_ns(&self) -> u64 {
        self.profile.step_ns + self.profile.step_ns_per_running * self.decoding.len() as u64
    }

    fn decode_steps(&self, now_ns: u64) -> Option<(Step, u64)> {
        let steps = self.decoding.iter().map(|one| one.left_tokens).min()?;
        let each_ns = self.step_ns();
        Some((Step::Decode { steps, each_ns, from_ns: now_ns }, each_ns * u64::from(steps)))
    }

    /// Something came: a run of steps ends with the one that runs. Answers when, if that is another time.
    pub(super) fn interrupt(&mut self, now_ns: u64) -> Option<u64> {
        let (Step::Decode { steps, each_ns, from_ns }, end_ns) = self.step? else { return None };
        let done =
            u32::try_from((now_ns - from_ns).div_ceil(each_ns.max(1))).unwrap_or(steps).clamp(1, steps);
        let end = from_ns + each_ns * u64::from(done);
        if end >= end_ns {
            return None;
        }
        self.busy_ns -= end_ns - end;
        self.step = Some((Step::Decode { steps: done, each_ns, from_ns }, end));
        Some(end)
    }

    /// Ends the step that ends now, if one does.
    pub(super) fn end(&mut self, now_ns: u64, ended: &mut Vec<Ended>) {
        let Some((step, _)) = self.step.take_if(|(_, end_ns)| *end_ns == now_ns) else { return };
        match step {
            Step::Prefill { chunk_tokens } => {
                let took_ns = match &self.prefill {
                    Some(prefill) => self.prefill_step(prefill).1,
                    None => 0,
                };
                self.decoded(1, took_ns, ended);
                self.prefilled(chunk_tokens, ended);
            }
            Step::Decode { steps, each_ns, .. } => self.decoded(steps, each_ns, ended),
        }
    }

    fn prefilled(&mut self, chunk_tokens: u32, ended: &mut Vec<Ended>) {
        let Some(prefill) = &mut self.prefill else { return };
        prefill.context_tokens += chunk_tokens;
        prefill.computed_tokens += chunk_tokens;
        if prefill.context_tokens < prefill.job.input_tokens {
            return;
        }
        let Prefill { job, computed_tokens, .. } = *prefill;
        self.prefill = None;
        self.memory.computed(job.nth);
        ended.push(Ended::First { nth: job.nth, computed_tokens });
        match job.output_tokens {
            0 | 1 => self.last(job.nth, Between::default(), ended),
            more => {
                let between = Between::default();
                self.decoding.push(Decoding { nth: job.nth, left_tokens: more - 1, between });
            }
        }
    }

    /// Each that decodes has so many tokens more.
    fn decoded(&mut self, steps: u32, each_ns: u64, ended: &mut Vec<Ended>) {
        let tokens = self.decoding.len() as u64 * u64::from(steps);
        self.between.tokens += tokens;
        self.between.ns += tokens * each_ns;
        let mut done = Vec::new();
        self.decoding.retain_mut(|one| {
            one.left_tokens = one.left_tokens.saturating_sub(steps);
            one.between.tokens += u64::from(steps);
            one.between.ns += u64::from(steps) * each_ns;
            if one.left_tokens == 0 {
                done.push((one.nth, one.between));
            }
            one.left_tokens > 0
        });
        done.into_iter().for_each(|(nth, between)| self.last(nth, between, ended));
    }

    fn last(&mut self, nth: usize, between: Between, ended: &mut Vec<Ended>) {
        self.memory.ended(nth);
        ended.push(Ended::Last { nth, between });
    }
}
