//! The last reported load of an instance, and the requests sent there since.
//!
//! Not here: how load becomes waiting time (`cost.rs`). Load is ephemeral state: it never enters
//! the log, and a freshly started router has none until the first reports.

use std::time::Duration;

use crate::id::Timestamp;
use crate::schedule::explain::decision::{Decision, Prediction};
use crate::schedule::fleet::reassignment::RouteRecord;
use crate::schedule::predict::decode_forecast::{DecodeReport, TightestLimit};
use crate::schedule::predict::decode_step_model::StepPace;
use crate::schedule::predict::relative_speed::RelativeSpeed;

/// Queued and running work of one instance.
///
/// Reports come a few times a second, and many requests may be routed between two of them. If those
/// did not count, all would go to the instance that looked idle last. So every recorded decision
/// counts here until the next report, which is taken to include it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Prompt tokens that wait for prefill, as reported.
    pub queue_tokens: u64,
    /// Requests being served, as reported.
    pub running: u32,
    /// Requests waiting, as reported.
    pub waiting: u32,
    /// Prompt tokens to compute of requests routed there since the report.
    pub routed_tokens: u64,
    /// Requests routed there since the report.
    pub routed: u32,
    /// Decoding and GPU memory, as reported.
    pub decode: DecodeReport,
    /// Step time of the instance relative to the fleet.
    pub(in crate::schedule) pace: StepPace,
    /// Prefill time of the instance relative to the fleet.
    pub(in crate::schedule) speed: RelativeSpeed,
    /// The tightest inter-token limit of requests that were sent there.
    pub(in crate::schedule) tightest_limit: TightestLimit,
    /// Requests routed there that are not prefilled yet, across reports.
    pub(in crate::schedule) queue: PrefillQueue,
}

/// Entries that a [`PrefillQueue`] can hold; with more waiting, neighbours in the queue are merged.
const QUEUE_ENTRIES_MAX: usize = 32;

/// Time after its last report up to which an instance is assumed to make progress: two report
/// intervals (five a second), so that one late report makes no difference. An instance that is
/// silent for longer may have died, and would look better the longer it is dead.
pub(in crate::schedule) const EXTRAPOLATION_MAX: Duration = Duration::from_millis(400);

/// The time at which a load is evaluated.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct LoadInstant {
    pub(in crate::schedule) now: Timestamp,
    /// Time of the instance's last report.
    pub(in crate::schedule) reported_at: Timestamp,
}

impl LoadInstant {
    /// Time up to which the instance is assumed to have made progress.
    fn extrapolate_until(self) -> Timestamp {
        self.now.min(self.reported_at.after(EXTRAPOLATION_MAX))
    }
}

/// A request that was sent to an instance and needs prefill, or several neighbours in the queue
/// merged into one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct QueuedPrefill {
    priority_deadline: Timestamp,
    /// When its fetched KV arrives; other requests run first until then.
    blocks_ready: Timestamp,
    tokens: u32,
    /// Predicted prefill time of these tokens, in microseconds.
    prefill_us: u32,
    /// KV capacity that it will take, in tokens; 0 once a report counts it as taken.
    kv_tokens: u32,
    /// Number of merged requests.
    requests: u32,
}

impl QueuedPrefill {
    /// Longest time of a step with up to `chunk_tokens` of its tokens; all tokens count alike.
    fn max_step_us(&self, chunk_tokens: u32) -> u64 {
        let (prefill_us, tokens) = (u64::from(self.prefill_us), u64::from(self.tokens.max(1)));
        prefill_us * tokens.min(chunk_tokens.into()) / tokens
    }

    /// Removes one of several merged requests.
    fn remove_one(&mut self) {
        let less = |all: u32| all - all / self.requests.max(1);
        let (tokens, prefill_us, kv_tokens) =
            (less(self.tokens), less(self.prefill_us), less(self.kv_tokens));
        *self = QueuedPrefill {
            tokens,
            prefill_us,
            kv_tokens,
            requests: self.requests.saturating_sub(1),
            ..*self
        };
    }

    /// Merged with the next one, at the deadline of the latter.
    fn merged_with(self, next: QueuedPrefill) -> QueuedPrefill {
        QueuedPrefill {
            priority_deadline: next.priority_deadline,
            blocks_ready: self.blocks_ready.max(next.blocks_ready),
            tokens: self.tokens.saturating_add(next.tokens),
            prefill_us: self.prefill_us.saturating_add(next.prefill_us),
            kv_tokens: self.kv_tokens.saturating_add(next.kv_tokens),
            requests: self.requests.saturating_add(next.requests),
        }
    }
}

/// The requests sent to an instance that are not prefilled yet, in their expected order.
///
/// A report says how many tokens wait, but not their prompts. The tokens computed since the
/// previous report are taken from the front of this order. A token of a long prompt costs several
/// times one of a short prompt. Between two reports the instance is assumed to make progress as
/// predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct PrefillQueue {
    /// Started requests in start order, then waiting ones by priority deadline.
    entries: [QueuedPrefill; QUEUE_ENTRIES_MAX],
    len: usize,
    /// Number of started requests; none of the others overtakes these.
    started: usize,
    /// Elapsed part of the predicted time of the started requests, in microseconds.
    done_us: u64,
    /// Time that `done_us` refers to.
    as_of: Timestamp,
    /// Time of the last report.
    reported_at: Timestamp,
    /// Time that the first request has run beyond `done_us`, in microseconds: progress that reports
    /// took back, and time that passed after all started work should have ended.
    late_us: u64,
}

/// Work in an instance's queue around a new request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct QueueForecast {
    /// Time until the request starts, after its blocks have arrived.
    pub(in crate::schedule) wait_us: u64,
    /// Time of the work before it.
    pub(in crate::schedule) work_us: u64,
    /// Requests behind it.
    pub(in crate::schedule) behind: u64,
    /// Delay that it adds to these.
    pub(in crate::schedule) delay_to_others_us: u64,
    /// Prefill time of the requests behind it.
    pub(in crate::schedule) behind_us: u64,
    /// Known requests among those before it, and the KV capacity that these will take, in tokens.
    pub(in crate::schedule) known_requests: u64,
    pub(in crate::schedule) kv_tokens: u64,
}

/// A request that may be sent to the instance.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct Newcomer {
    pub(in crate::schedule) priority_deadline: Timestamp,
    /// Its deadline without its right to go before others, if it has one: a delay to requests that
    /// it passes by that right does not count against an instance.
    pub(in crate::schedule) unprioritized_deadline: Option<Timestamp>,
    /// Time from now until its fetched KV has arrived.
    pub(in crate::schedule) transfer_us: u64,
    pub(in crate::schedule) prefill_us: u64,
}

impl PrefillQueue {
    fn entries(&self) -> &[QueuedPrefill] {
        &self.entries[..self.len]
    }

    fn waiting(&self) -> &[QueuedPrefill] {
        &self.entries[self.started..self.len]
    }

    fn tokens(&self) -> u64 {
        self.entries().iter().map(|one| u64::from(one.tokens)).sum()
    }

    /// Time until all started requests are done.
    fn busy_us(&self) -> u64 {
        sum_us(&self.entries[..self.started]).saturating_sub(self.done_us)
    }

    /// Advances to `now`: started requests are computed, then the earliest deadline among requests
    /// with arrived blocks starts.
    fn advance(&mut self, now: Timestamp) {
        let mut at = self.as_of;
        self.as_of = at.max(now);
        loop {
            let left_us = micros(now.since(at));
            let busy_us = self.busy_us();
            self.done_us = self.done_us.saturating_add(busy_us.min(left_us));
            if busy_us > left_us {
                return;
            }
            at = at.after(Duration::from_micros(busy_us));
            let next = first_ready(self.waiting(), at).filter(|(_, ready)| *ready <= now);
            // All started requests are done by then, unless a report says otherwise.
            let until = next.map_or(now, |(_, ready)| ready);
            if self.started > 0 {
                self.late_us = self.late_us.saturating_add(micros(until.since(at)));
            }
            let Some((next, _)) = next else { return };
            at = at.max(until);
            self.entries[self.started..=self.started + next].rotate_right(1);
            self.started += 1;
        }
    }

    fn push(&mut self, one: QueuedPrefill) {
        if one.tokens == 0 {
            return;
        }
        if self.len == QUEUE_ENTRIES_MAX && !self.merge_cheapest_pair() {
            self.pop();
            self.late_us = 0;
        }
        let at = self.started
            + self.waiting().partition_point(|other| other.priority_deadline <= one.priority_deadline);
        self.entries.copy_within(at..self.len, at + 1);
        self.entries[at] = one;
        self.len += 1;
    }

    /// Merges the two waiting neighbours with the least prefill time; `false` if fewer than two
    /// wait. A request with a deadline between theirs goes before both.
    fn merge_cheapest_pair(&mut self) -> bool {
        let cost_us = |pair: &[QueuedPrefill]| pair.iter().map(|one| u64::from(one.prefill_us)).sum::<u64>();
        let least = self.waiting().windows(2).enumerate().min_by_key(|(_, pair)| cost_us(pair));
        let Some((nth, _)) = least else { return false };
        let at = self.started + nth;
        self.entries[at + 1] = self.entries[at].merged_with(self.entries[at + 1]);
        self.entries.copy_within(at + 1..self.len, at);
        self.len -= 1;
        true
    }

    /// Removes the request with this deadline, which turned out not to run here.
    fn remove(&mut self, turn: Timestamp) {
        // It may be part of a merged entry, at the deadline of the last one of these: each counts
        // an equal share.
        let is_among = |one: &QueuedPrefill| one.requests > 1 && one.priority_deadline >= turn;
        let found = self.entries().iter().position(|one| one.priority_deadline == turn);
        let Some(nth) = found.or_else(|| self.entries().iter().position(is_among)) else { return };
        if self.entries[nth].requests > 1 {
            return self.entries[nth].remove_one();
        }
        if nth < self.started {
            let before_us = sum_us(&self.entries[..nth]);
            let own_us = self.done_us.saturating_sub(before_us).min(self.entries[nth].prefill_us.into());
            self.done_us -= own_us;
            self.started -= 1;
            if nth == 0 {
                self.late_us = 0;
            }
        }
        self.entries.copy_within(nth + 1..self.len, nth);
        self.len -= 1;
        self.entries[self.len] = QueuedPrefill::default();
    }

    fn pop(&mut self) {
        self.done_us = self.done_us.saturating_sub(self.entries[0].prefill_us.into());
        self.entries.copy_within(1..self.len, 0);
        self.len -= 1;
        self.started = self.started.saturating_sub(1);
    }

    /// Applies a report of `tokens` remaining tokens that arrived at `now`; a step holds up to
    /// `chunk_tokens` prompt tokens.
    fn shrink_to(&mut self, tokens: u64, chunk_tokens: u32, now: Timestamp) {
        let mut done = self.tokens().saturating_sub(tokens);
        let is_further = done > 0;
        let mut gone_us = 0;
        let done_us = self.done_us;
        while done > 0 {
            let first = &mut self.entries[0];
            let (all, us) = (u64::from(first.tokens), u64::from(first.prefill_us));
            if all <= done {
                done -= all;
                gone_us += us;
                self.pop();
                continue;
            }
            // All of its tokens count alike.
            first.prefill_us = (us * (all - done) / all) as u32;
            first.tokens = (all - done) as u32;
            gone_us += us - u64::from(first.prefill_us);
            self.started = self.started.max(1);
            break;
        }
        self.started = self.started.min(1);
        // Requests that wait again had started in order of block arrival.
        self.entries[self.started..self.len].sort_by_key(|one| one.priority_deadline);
        // Engines report whole steps: started work may be further than the report says, by at most
        // one step.
        let step_us = self.entries[..self.started].first().map_or(0, |one| one.max_step_us(chunk_tokens));
        let since_us = micros(now.since(self.reported_at));
        self.reported_at = self.reported_at.max(now);
        if is_further {
            // The previous step ended after the last report.
            self.done_us = done_us.saturating_sub(gone_us).min(step_us).min(since_us);
            self.late_us = 0;
        } else {
            self.note_no_progress(step_us);
        }
        // Running requests already hold their KV capacity, and the report counts it.
        self.entries[..self.started].iter_mut().for_each(|one| one.kv_tokens = 0);
    }

    /// Applies a report without progress: the current step still runs. A step that should have
    /// ended is late, and is assumed to take as long again. So a slow instance looks as if it made
    /// progress by itself, and one that hangs looks as if it had not started.
    fn note_no_progress(&mut self, step_us: u64) {
        let runs_us = self.done_us.saturating_add(self.late_us);
        let over_us = runs_us.saturating_sub(step_us);
        self.done_us = runs_us.min(step_us).saturating_sub(over_us);
        self.late_us = runs_us - self.done_us;
    }

    /// Time until all of it is prefilled.
    fn remaining_us(&self) -> u64 {
        sum_us(self.entries()).saturating_sub(self.done_us)
    }

    /// The queue around a newcomer, if it were sent now.
    fn forecast(&self, newcomer: &Newcomer, now: Timestamp) -> QueueForecast {
        let busy_us = self.busy_us();
        let ready = now.after(Duration::from_micros(newcomer.transfer_us));
        let free = now.after(Duration::from_micros(busy_us));
        let waiting = self.waiting();
        let before = waiting.partition_point(|one| one.priority_deadline <= newcomer.priority_deadline);
        let work_us = busy_us.saturating_add(sum_us(&waiting[..before]));
        let behind_us = sum_us(&waiting[before..]);
        let first = &self.entries[..self.started + before];
        let (known, kv_tokens) =
            (count(first), first.iter().map(|one| u64::from(one.kv_tokens)).sum::<u64>());
        let ahead = QueueForecast {
            work_us,
            behind_us,
            known_requests: known,
            kv_tokens,
            ..QueueForecast::default()
        };
        if ready <= free && waiting.iter().all(|one| one.blocks_ready <= free) {
            let behind = count(&waiting[before..]);
            let delays_us = behind.saturating_mul(newcomer.prefill_us);
            let delays_us = unprioritized_delay_us(waiting, newcomer).unwrap_or(delays_us);
            return QueueForecast { wait_us: work_us, behind, delay_to_others_us: delays_us, ..ahead };
        }
        let prefill_us = u32::try_from(newcomer.prefill_us).unwrap_or(u32::MAX);
        // Every waiting request has tokens; zero tokens mark the newcomer.
        let new = QueuedPrefill {
            priority_deadline: newcomer.priority_deadline,
            blocks_ready: ready,
            tokens: 0,
            prefill_us,
            kv_tokens: 0,
            requests: 1,
        };
        let mut with = [QueuedPrefill::default(); QUEUE_ENTRIES_MAX + 1];
        with[..before].copy_from_slice(&waiting[..before]);
        with[before] = new;
        with[before + 1..=waiting.len()].copy_from_slice(&waiting[before..]);
        let with = StartTimes::of(&mut with[..=waiting.len()], free);
        if let Some(delays_us) = unprioritized_delay_us(waiting, newcomer) {
            let wait_us = micros(with.newcomer_start.since(now));
            return QueueForecast { wait_us, behind: with.behind, delay_to_others_us: delays_us, ..ahead };
        }
        let mut without = self.entries;
        let without = StartTimes::of(&mut without[self.started..self.len], free);
        let wait_us = micros(with.newcomer_start.since(now));
        let delays_us = with.wait_sum_us.saturating_sub(without.wait_sum_us);
        QueueForecast { wait_us, behind: with.behind, delay_to_others_us: delays_us, ..ahead }
    }
}

/// Delay that a newcomer adds to requests that it has no right to pass; `None` if it has no such
/// right at all.
fn unprioritized_delay_us(waiting: &[QueuedPrefill], newcomer: &Newcomer) -> Option<u64> {
    let turn = newcomer.unprioritized_deadline?;
    let before = waiting.partition_point(|one| one.priority_deadline <= turn);
    Some(count(&waiting[before..]).saturating_mul(newcomer.prefill_us))
}

fn count(all: &[QueuedPrefill]) -> u64 {
    all.iter().map(|one| u64::from(one.requests)).sum()
}

fn sum_us(all: &[QueuedPrefill]) -> u64 {
    all.iter().map(|one| u64::from(one.prefill_us)).sum()
}

/// The first waiting request in deadline order with arrived blocks at `at`, else the one with the
/// earliest arrival; with its arrival time.
fn first_ready(waiting: &[QueuedPrefill], at: Timestamp) -> Option<(usize, Timestamp)> {
    let now = waiting.iter().position(|one| one.blocks_ready <= at);
    let next = now.or_else(|| (0..waiting.len()).min_by_key(|nth| waiting[*nth].blocks_ready))?;
    Some((next, waiting[next].blocks_ready))
}

/// Start times of waiting requests on an instance that becomes free at some time.
struct StartTimes {
    /// Sum of the waits of all but the newcomer, from that time.
    wait_sum_us: u64,
    newcomer_start: Timestamp,
    /// Requests that start after the newcomer.
    behind: u64,
}

impl StartTimes {
    /// Leaves `waiting` in start order.
    fn of(waiting: &mut [QueuedPrefill], free: Timestamp) -> StartTimes {
        let mut begins = StartTimes { wait_sum_us: 0, newcomer_start: free, behind: 0 };
        let mut at = free;
        for begun in 0..waiting.len() {
            let Some((next, ready)) = first_ready(&waiting[begun..], at) else { break };
            at = at.max(ready);
            waiting[begun..=begun + next].rotate_right(1);
            if waiting[begun].tokens == 0 {
                begins.newcomer_start = at;
                begins.behind = count(&waiting[begun + 1..]);
            } else {
                let each_us = micros(at.since(free));
                let all_us = each_us.saturating_mul(waiting[begun].requests.into());
                begins.wait_sum_us = begins.wait_sum_us.saturating_add(all_us);
            }
            at = at.after(Duration::from_micros(waiting[begun].prefill_us.into()));
        }
        begins
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Load {
    /// The load as just reported, without routed requests.
    #[must_use]
    pub fn reported(queue_tokens: u64, running: u32, waiting: u32) -> Self {
        Self { queue_tokens, running, waiting, ..Self::default() }
    }

    /// Same, with the report on decoding and GPU memory.
    #[must_use]
    pub fn with_decode_report(self, decoding: DecodeReport) -> Self {
        Self { decode: decoding.clamped(), ..self }
    }

    /// KV capacity of the instance in GPU memory, in tokens; 0 if unknown.
    #[must_use]
    pub fn kv_tokens_max(&self) -> u64 {
        self.decode.kv_tokens_max
    }

    /// Carries over the requests sent to an instance from its previous load.
    #[must_use]
    pub fn carry_over(self, before: &Load, now: Timestamp) -> Self {
        let mut sent = before.queue;
        sent.advance(now);
        sent.shrink_to(self.tokens_ahead(), self.decode.chunk_tokens(), now);
        Self {
            queue: sent,
            pace: before.pace,
            speed: before.speed,
            tightest_limit: before.tightest_limit,
            ..self
        }
    }

    /// Prefill time between a load and its next report, as far as known: by the queue of sent
    /// requests, or by the missing tokens if none was sent.
    pub(in crate::schedule) fn computed_us(&self, after: &Load, ns_per_token: u64) -> u64 {
        let known = self.queue.remaining_us().saturating_sub(after.queue.remaining_us());
        let gone = self.tokens_ahead().saturating_sub(after.queue_tokens);
        known.max(if self.queue.len == 0 { gone.saturating_mul(ns_per_token) / 1_000 } else { 0 })
    }

    /// The work before a newcomer; `None` if the waiting work is unknown.
    pub(in crate::schedule) fn forecast(
        &self,
        newcomer: &Newcomer,
        at: LoadInstant,
    ) -> Option<QueueForecast> {
        let known = self.queue.tokens();
        let more = self.tokens_ahead().saturating_sub(known);
        if known == 0 {
            return (more == 0).then(QueueForecast::default);
        }
        let mut sent = self.queue;
        sent.advance(at.extrapolate_until());
        let ahead = sent.forecast(newcomer, at.now);
        // Waiting work of unknown requests may run first.
        let unknown_us = u128::from(sum_us(sent.entries())) * u128::from(more) / u128::from(known);
        let unknown_us = u64::try_from(unknown_us).unwrap_or(u64::MAX);
        let more = |us: u64| us.saturating_add(unknown_us);
        Some(QueueForecast { wait_us: more(ahead.wait_us), work_us: more(ahead.work_us), ..ahead })
    }

    /// Remaining prefill time of the recorded prompts, from now.
    pub(in crate::schedule) fn remaining_prefill_us(&self, at: LoadInstant) -> u64 {
        let mut sent = self.queue;
        sent.advance(at.extrapolate_until());
        sent.remaining_us()
    }

    /// Tokens to prefill before a request that arrives now.
    #[must_use]
    pub fn tokens_ahead(&self) -> u64 {
        self.queue_tokens.saturating_add(self.routed_tokens)
    }

    /// Requests to prefill before one that arrives now.
    #[must_use]
    pub fn requests_ahead(&self) -> u64 {
        u64::from(self.waiting) + u64::from(self.routed)
    }

    /// Whether no request runs or waits there.
    pub(in crate::schedule) fn is_idle(&self) -> bool {
        self.running == 0 && self.requests_ahead() == 0 && self.tokens_ahead() == 0
    }

    /// Removes a recorded request that does not run here.
    pub(in crate::schedule) fn retract(&mut self, route: &RouteRecord, at: LoadInstant) {
        // A newer report already leaves this request out.
        if at.reported_at <= route.recorded_at {
            self.routed_tokens = self.routed_tokens.saturating_sub(route.tokens.into());
            self.routed = self.routed.saturating_sub(1);
        }
        self.queue.advance(at.extrapolate_until());
        self.queue.remove(route.priority_deadline);
    }

    /// Records a decision that was sent here.
    pub(in crate::schedule) fn record(&mut self, decision: &Decision, at: LoadInstant) {
        self.routed_tokens = self.routed_tokens.saturating_add(u64::from(decision.recompute_tokens));
        self.routed = self.routed.saturating_add(1);
        self.queue.advance(at.extrapolate_until());
        let Prediction { transfer_us, prefill_us, .. } = decision.uncorrected;
        self.queue.push(QueuedPrefill {
            priority_deadline: decision.priority_deadline,
            blocks_ready: at.now.after(Duration::from_micros(transfer_us)),
            tokens: decision.recompute_tokens,
            prefill_us: u32::try_from(prefill_us).unwrap_or(u32::MAX),
            kv_tokens: decision.decode.kv_tokens,
            requests: 1,
        });
        self.queue.advance(at.extrapolate_until());
    }
}
