//! One instance: continuous batching with chunked prefill, in virtual time.
//!
//! A step takes the profile's base time, plus a time for each decoding request and for the prompt
//! tokens in it. Requests wait in order; a request with blocks still in transit lets others pass,
//! like engines with asynchronous loads. A run of decode-only steps is one event, cut at the end of
//! a step when a request arrives. Not here: memory (`memory.rs`), sources of blocks (`store.rs`).

use std::collections::VecDeque;

use kv_core::id::Timestamp;
use kv_core::schedule::HardwareProfile;

use super::memory::GpuMemory;

/// Limits of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum decoding requests, including the one in prefill.
    pub requests_max: usize,
    /// Maximum prompt tokens.
    pub chunk_tokens: u32,
}

/// A request at an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EngineJob {
    /// Index of the request in the trace.
    pub(super) nth: usize,
    pub(super) input_tokens: u32,
    pub(super) output_tokens: u32,
    /// Leading tokens that are fetched or resident by `ready_ns`.
    pub(super) fetched_tokens: u32,
    /// The part of these that the decision assumed resident in the instance.
    pub(super) resident_tokens: u32,
    /// When the last fetched block arrives.
    pub(super) ready_ns: u64,
    /// Requests with an earlier deadline start first.
    pub(super) priority_deadline: Timestamp,
}

/// Progress of a request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineEvent {
    /// The first token was produced, after computing `computed_tokens` prompt tokens.
    FirstToken { nth: usize, computed_tokens: u32 },
    /// The last token was produced; `intervals` sums the intervals after the first token.
    LastToken { nth: usize, intervals: TokenIntervals },
}

#[derive(Clone, Copy, Debug)]
struct RunningPrefill {
    job: EngineJob,
    /// Tokens with KV in memory.
    context_tokens: u32,
    computed_tokens: u32,
}

#[derive(Clone, Copy, Debug)]
struct DecodingRequest {
    nth: usize,
    tokens_left: u32,
    intervals: TokenIntervals,
}

#[derive(Clone, Copy, Debug)]
enum EngineStep {
    /// A part of a prompt, together with the decoding requests.
    Prefill { chunk_tokens: u32 },
    /// A run of decode-only steps of equal length.
    Decode { steps: u32, each_ns: u64, from_ns: u64 },
}

/// Number and sum of the intervals between tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenIntervals {
    pub(super) tokens: u64,
    pub(super) ns: u64,
}

/// An instance.
pub(super) struct Engine {
    profile: HardwareProfile,
    batch: BatchLimits,
    pub(super) memory: GpuMemory,
    waiting: VecDeque<EngineJob>,
    prefill: Option<RunningPrefill>,
    decoding: Vec<DecodingRequest>,
    step: Option<(EngineStep, u64)>,
    pub(super) intervals: TokenIntervals,
    pub(super) busy_ns: u64,
}

impl Engine {
    pub(super) fn new(profile: HardwareProfile, batch: BatchLimits, memory: GpuMemory) -> Engine {
        Engine {
            profile,
            batch,
            memory,
            waiting: VecDeque::new(),
            prefill: None,
            decoding: Vec::new(),
            step: None,
            intervals: TokenIntervals::default(),
            busy_ns: 0,
        }
    }

    /// A copy for prediction.
    pub(super) fn snapshot(&self) -> Engine {
        Engine {
            memory: self.memory.snapshot(),
            waiting: self.waiting.clone(),
            decoding: self.decoding.clone(),
            ..*self
        }
    }

    /// End of the current step.
    pub(super) fn step_end_ns(&self) -> Option<u64> {
        self.step.map(|(_, end_ns)| end_ns)
    }

    /// Earliest time after `now_ns` when a waiting request has all its blocks.
    pub(super) fn next_ready_ns(&self, now_ns: u64) -> Option<u64> {
        self.waiting.iter().map(|job| job.ready_ns).filter(|ready_ns| *ready_ns > now_ns).min()
    }

    /// Number of requests without a first token.
    pub(super) fn awaiting_first_token(&self) -> usize {
        self.waiting.len() + usize::from(self.prefill.is_some())
    }

    /// Adds a waiting request.
    pub(super) fn enqueue(&mut self, job: EngineJob) {
        self.waiting.push_back(job);
    }

    /// Prompt tokens still to compute; tokens in transit are not counted.
    pub(super) fn queue_tokens(&self) -> u64 {
        let rest = |job: &EngineJob| u64::from(job.input_tokens - job.fetched_tokens.min(job.input_tokens));
        let running =
            self.prefill.map_or(0, |prefill| u64::from(prefill.job.input_tokens - prefill.context_tokens));
        self.waiting.iter().map(rest).sum::<u64>() + running
    }

    /// Numbers of waiting and running requests.
    pub(super) fn requests(&self) -> (u32, u32) {
        let running = self.decoding.len() + usize::from(self.prefill.is_some());
        (self.waiting.len() as u32, running as u32)
    }

    /// Token intervals up to now, including the current decode run.
    pub(super) fn intervals_by(&self, now_ns: u64) -> TokenIntervals {
        let Some((EngineStep::Decode { steps, each_ns, from_ns }, _)) = self.step else {
            return self.intervals;
        };
        let done = (now_ns.saturating_sub(from_ns) / each_ns.max(1)).min(steps.into());
        let tokens = self.decoding.len() as u64 * done;
        TokenIntervals { tokens: self.intervals.tokens + tokens, ns: self.intervals.ns + tokens * each_ns }
    }

    /// Starts a step if there is work and none runs; returns its end.
    pub(super) fn start_step(&mut self, now_ns: u64) -> Option<u64> {
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

    /// Admits the ready request with the earliest deadline if memory allows; ties go to the
    /// earliest arrival.
    fn admit(&mut self, now_ns: u64) {
        if self.decoding.len() >= self.batch.requests_max {
            return;
        }
        let ready = self.waiting.iter().enumerate().filter(|(_, job)| job.ready_ns <= now_ns);
        let Some((at, _)) = ready.min_by_key(|(_, job)| job.priority_deadline) else { return };
        let job = self.waiting[at];
        let Some(own_tokens) = self.memory.admit(job.nth, job.input_tokens, job.output_tokens) else {
            return;
        };
        self.waiting.remove(at);
        // Fetched blocks continue behind the blocks assumed resident; if those are gone, they are
        // useless.
        let there =
            if own_tokens >= job.resident_tokens { own_tokens.max(job.fetched_tokens) } else { own_tokens };
        // The last prompt token is always computed, because it yields the first output token.
        let context_tokens = there.min(job.input_tokens - 1);
        self.prefill = Some(RunningPrefill { job, context_tokens, computed_tokens: 0 });
    }

    fn prefill_step(&self, prefill: &RunningPrefill) -> (EngineStep, u64) {
        let left = prefill.job.input_tokens - prefill.context_tokens;
        let chunk_tokens = left.min(self.batch.chunk_tokens);
        let prefill_ns = self.profile.prefill_ns(prefill.context_tokens.into(), chunk_tokens.into());
        (EngineStep::Prefill { chunk_tokens }, prefill_ns + self.step_ns())
    }

    /// Duration of a step without prompt tokens.
    fn step_ns(&self) -> u64 {
        self.profile.step_ns + self.profile.step_ns_per_running * self.decoding.len() as u64
    }

    fn decode_steps(&self, now_ns: u64) -> Option<(EngineStep, u64)> {
        let steps = self.decoding.iter().map(|one| one.tokens_left).min()?;
        let each_ns = self.step_ns();
        Some((EngineStep::Decode { steps, each_ns, from_ns: now_ns }, each_ns * u64::from(steps)))
    }

    /// Cuts a decode run at the end of its current step. Returns the new end if it is earlier.
    pub(super) fn cut_decode_run(&mut self, now_ns: u64) -> Option<u64> {
        let (EngineStep::Decode { steps, each_ns, from_ns }, end_ns) = self.step? else { return None };
        let done =
            u32::try_from((now_ns - from_ns).div_ceil(each_ns.max(1))).unwrap_or(steps).clamp(1, steps);
        let end = from_ns + each_ns * u64::from(done);
        if end >= end_ns {
            return None;
        }
        self.busy_ns -= end_ns - end;
        self.step = Some((EngineStep::Decode { steps: done, each_ns, from_ns }, end));
        Some(end)
    }

    /// Ends the step that is due now, if any.
    pub(super) fn end_step(&mut self, now_ns: u64, ended: &mut Vec<EngineEvent>) {
        let Some((step, _)) = self.step.take_if(|(_, end_ns)| *end_ns == now_ns) else { return };
        match step {
            EngineStep::Prefill { chunk_tokens } => {
                let took_ns = match &self.prefill {
                    Some(prefill) => self.prefill_step(prefill).1,
                    None => 0,
                };
                self.finish_decode(1, took_ns, ended);
                self.finish_chunk(chunk_tokens, ended);
            }
            EngineStep::Decode { steps, each_ns, .. } => self.finish_decode(steps, each_ns, ended),
        }
    }

    fn finish_chunk(&mut self, chunk_tokens: u32, ended: &mut Vec<EngineEvent>) {
        let Some(prefill) = &mut self.prefill else { return };
        prefill.context_tokens += chunk_tokens;
        prefill.computed_tokens += chunk_tokens;
        if prefill.context_tokens < prefill.job.input_tokens {
            return;
        }
        let RunningPrefill { job, computed_tokens, .. } = *prefill;
        self.prefill = None;
        self.memory.on_computed(job.nth);
        ended.push(EngineEvent::FirstToken { nth: job.nth, computed_tokens });
        match job.output_tokens {
            0 | 1 => self.finish_request(job.nth, TokenIntervals::default(), ended),
            more => {
                let between = TokenIntervals::default();
                self.decoding.push(DecodingRequest {
                    nth: job.nth,
                    tokens_left: more - 1,
                    intervals: between,
                });
            }
        }
    }

    /// Adds `steps` tokens to each decoding request.
    fn finish_decode(&mut self, steps: u32, each_ns: u64, ended: &mut Vec<EngineEvent>) {
        let tokens = self.decoding.len() as u64 * u64::from(steps);
        self.intervals.tokens += tokens;
        self.intervals.ns += tokens * each_ns;
        let mut done = Vec::new();
        self.decoding.retain_mut(|one| {
            one.tokens_left = one.tokens_left.saturating_sub(steps);
            one.intervals.tokens += u64::from(steps);
            one.intervals.ns += u64::from(steps) * each_ns;
            if one.tokens_left == 0 {
                done.push((one.nth, one.intervals));
            }
            one.tokens_left > 0
        });
        done.into_iter().for_each(|(nth, between)| self.finish_request(nth, between, ended));
    }

    fn finish_request(&mut self, nth: usize, between: TokenIntervals, ended: &mut Vec<EngineEvent>) {
        self.memory.on_end(nth);
        ended.push(EngineEvent::LastToken { nth, intervals: between });
    }
}
