//! The last known load of an instance, and what we sent there since it was reported.
//!
//! Not here: how load becomes waiting time (`cost.rs`). Load is soft state: it never enters the log, and
//! a router that starts has none until the first reports.

use std::time::Duration;

use super::decision::{Decision, Prediction};
use super::decoding::{Decoding, Strictest};
use super::moved::Counted;
use super::speed::Speed;
use super::steps::Pace;
use crate::id::Timestamp;

/// Queued and running work of one instance.
///
/// Reports come a few times a second; in between many requests may be routed. Without counting those, all
/// of them would go to whichever instance looked idle last, so every recorded decision counts here until
/// the next report, which is taken to include it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Prompt tokens that wait for prefill, as reported.
    pub queue_tokens: u64,
    /// Requests being served, as reported.
    pub running: u32,
    /// Requests waiting, as reported.
    pub waiting: u32,
    /// Prompt tokens to compute of the requests routed there since the report.
    pub routed_tokens: u64,
    /// Requests routed there since the report.
    pub routed: u32,
    /// What decodes there, and room in GPU memory, as reported.
    pub decoding: Decoding,
    /// How fast its steps are beside those of others.
    pub(super) pace: Pace,
    /// How fast it computes beside them.
    pub(super) speed: Speed,
    /// The least limit between two tokens of requests that were sent there.
    pub(super) strictest: Strictest,
    /// Those routed there that are not computed yet, whether or not a report came since.
    pub(super) sent: Sent,
}

/// Requests that [`Sent`] tells apart; where more wait, some are taken together with those that come next to them.
const SENT_MAX: usize = 32;

/// For so long after its last report an instance is taken to go on: two report intervals (five a second), so that one that is late makes no difference. One that
/// is silent for longer may have died, and would look the better the longer it is dead.
pub(super) const GOES_ON_MAX: Duration = Duration::from_millis(400);

/// When a load is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Timestamp,
    /// Of the instance's last report.
    pub(super) reported_at: Timestamp,
}

impl Moment {
    /// Up to when the instance is taken to have gone on.
    fn goes_on_to(self) -> Timestamp {
        self.now.min(self.reported_at.after(GOES_ON_MAX))
    }
}

/// A request that was sent to an instance and has something to compute there, or several that come next to one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct One {
    turn: Timestamp,
    /// When what it fetches is there: others go first until then.
    ready: Timestamp,
    tokens: u32,
    /// Predicted for these tokens.
    prefill_us: u32,
    /// Room that it will take in GPU memory; 0 once a report counts it among what is taken.
    kv_tokens: u32,
    /// How many they are.
    requests: u32,
}

impl One {
    /// How long a step takes that has so many tokens of it, at most: all are taken for alike.
    fn step_us(&self, chunk_tokens: u32) -> u64 {
        let (prefill_us, tokens) = (u64::from(self.prefill_us), u64::from(self.tokens.max(1)));
        prefill_us * tokens.min(chunk_tokens.into()) / tokens
    }

    /// One of several is not among them any more.
    fn less_one(&mut self) {
        let less = |all: u32| all - all / self.requests.max(1);
        let (tokens, prefill_us, kv_tokens) =
            (less(self.tokens), less(self.prefill_us), less(self.kv_tokens));
        *self = One { tokens, prefill_us, kv_tokens, requests: self.requests.saturating_sub(1), ..*self };
    }

    /// Together with the next one, at its turn.
    fn with(self, next: One) -> One {
        One {
            turn: next.turn,
            ready: self.ready.max(next.ready),
            tokens: self.tokens.saturating_add(next.tokens),
            prefill_us: self.prefill_us.saturating_add(next.prefill_us),
            kv_tokens: self.kv_tokens.saturating_add(next.kv_tokens),
            requests: self.requests.saturating_add(next.requests),
        }
    }
}

/// What of the requests sent to an instance is not computed yet, in the order in which it will be.
///
/// A report says how many tokens wait, and not of which prompts: what was computed since the report before is what came first in this order. A token of a
/// long prompt costs several times one of a short prompt. Between two reports the instance is taken to go on as predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    /// What was begun, in that order, and what waits, by turn.
    all: [One; SENT_MAX],
    len: usize,
    /// Of these, how many were begun: nothing passes them.
    begun: usize,
    /// Of the time predicted for what was begun, how much has passed.
    done_us: u64,
    /// When that was.
    as_of: Timestamp,
    /// When the last report came.
    told_at: Timestamp,
    /// For how long the first of them is computed beyond `done_us`: what reports that nothing was done took back, and what went by when all that was begun should be over.
    late_us: u64,
}

/// What is computed before a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Time until it begins, when its blocks are there at the earliest.
    pub(super) wait_us: u64,
    /// Time that what goes before it takes.
    pub(super) work_us: u64,
    /// Requests that come behind it.
    pub(super) behind: u64,
    /// What it adds to the waiting of these.
    pub(super) delays_us: u64,
    /// Prompts that are computed behind it, which takes so long.
    pub(super) behind_us: u64,
    /// Of those that go before it, how many are known, and what room in GPU memory these will take.
    pub(super) known: u64,
    pub(super) kv_tokens: u64,
}

/// A request that may come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer {
    pub(super) turn: Timestamp,
    /// What its turn would be if it had no right to go before others, where it has one: those that it passes by right count for nothing against an instance.
    pub(super) by_right: Option<Timestamp>,
    /// From now until what it fetches is there.
    pub(super) transfer_us: u64,
    pub(super) prefill_us: u64,
}

impl Sent {
    fn all(&self) -> &[One] {
        &self.all[..self.len]
    }

    fn waiting(&self) -> &[One] {
        &self.all[self.begun..self.len]
    }

    fn tokens(&self) -> u64 {
        self.all().iter().map(|one| u64::from(one.tokens)).sum()
    }

    /// Until all that was begun is over.
    fn busy_us(&self) -> u64 {
        sum_us(&self.all[..self.begun]).saturating_sub(self.done_us)
    }

    /// Goes on to this time: what is begun is computed, and of what is there by then, the earliest turn is begun.
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
            // All that was begun is over by then, unless a report says that it is late.
            let until = next.map_or(now, |(_, ready)| ready);
            if self.begun > 0 {
                self.late_us = self.late_us.saturating_add(micros(until.since(at)));
            }
            let Some((next, _)) = next else { return };
            at = at.max(until);
            self.all[self.begun..=self.begun + next].rotate_right(1);
            self.begun += 1;
        }
    }

    fn push(&mut self, one: One) {
        if one.tokens == 0 {
            return;
        }
        if self.len == SENT_MAX && !self.join() {
            self.pop();
            self.late_us = 0;
        }
        let at = self.begun + self.waiting().partition_point(|other| other.turn <= one.turn);
        self.all.copy_within(at..self.len, at + 1);
        self.all[at] = one;
        self.len += 1;
    }

    /// Takes two together that come next to one another, those that are least; whether there are any. Whoever would go between them goes before both.
    fn join(&mut self) -> bool {
        let cost_us = |pair: &[One]| pair.iter().map(|one| u64::from(one.prefill_us)).sum::<u64>();
        let least = self.waiting().windows(2).enumerate().min_by_key(|(_, pair)| cost_us(pair));
        let Some((nth, _)) = least else { return false };
        let at = self.begun + nth;
        self.all[at + 1] = self.all[at].with(self.all[at + 1]);
        self.all.copy_within(at + 1..self.len, at);
        self.len -= 1;
        true
    }

    /// The one with this turn is not here.
    fn remove(&mut self, turn: Timestamp) {
        // Or it is among some that were taken together, at the turn of the last of them: each is as much as the others.
        let is_among = |one: &One| one.requests > 1 && one.turn >= turn;
        let found = self.all().iter().position(|one| one.turn == turn);
        let Some(nth) = found.or_else(|| self.all().iter().position(is_among)) else { return };
        if self.all[nth].requests > 1 {
            return self.all[nth].less_one();
        }
        if nth < self.begun {
            let before_us = sum_us(&self.all[..nth]);
            let own_us = self.done_us.saturating_sub(before_us).min(self.all[nth].prefill_us.into());
            self.done_us -= own_us;
            self.begun -= 1;
            if nth == 0 {
                self.late_us = 0;
            }
        }
        self.all.copy_within(nth + 1..self.len, nth);
        self.len -= 1;
        self.all[self.len] = One::default();
    }

    fn pop(&mut self) {
        self.done_us = self.done_us.saturating_sub(self.all[0].prefill_us.into());
        self.all.copy_within(1..self.len, 0);
        self.len -= 1;
        self.begun = self.begun.saturating_sub(1);
    }

    /// So many tokens are left, by a report that came at this time; a step has so many of prompts, at most.
    fn shrink_to(&mut self, tokens: u64, chunk_tokens: u32, now: Timestamp) {
        let mut done = self.tokens().saturating_sub(tokens);
        let is_further = done > 0;
        let mut gone_us = 0;
        let done_us = self.done_us;
        while done > 0 {
            let first = &mut self.all[0];
            let (all, us) = (u64::from(first.tokens), u64::from(first.prefill_us));
            if all <= done {
                done -= all;
                gone_us += us;
                self.pop();
                continue;
            }
            // All of its tokens are taken for alike.
            first.prefill_us = (us * (all - done) / all) as u32;
            first.tokens = (all - done) as u32;
            gone_us += us - u64::from(first.prefill_us);
            self.begun = self.begun.max(1);
            break;
        }
        self.begun = self.begun.min(1);
        // What waits again was begun as its blocks came.
        self.all[self.begun..self.len].sort_by_key(|one| one.turn);
        // Engines tell of whole steps: what is begun may be further than the report says, and by no more than one of these.
        let step_us = self.all[..self.begun].first().map_or(0, |one| one.step_us(chunk_tokens));
        let since_us = micros(now.since(self.told_at));
        self.told_at = self.told_at.max(now);
        if is_further {
            // The step before ended behind the last report.
            self.done_us = done_us.saturating_sub(gone_us).min(step_us).min(since_us);
            self.late_us = 0;
        } else {
            self.is_no_further(step_us);
        }
        // What runs has its room, and the report says how much.
        self.all[..self.begun].iter_mut().for_each(|one| one.kv_tokens = 0);
    }

    /// A report says that the same step runs still, which takes so long. One that should be over is late, and taken to be so for as long again: a slow instance
    /// looks as if it went on by itself, and one that hangs as if it had not begun.
    fn is_no_further(&mut self, step_us: u64) {
        let runs_us = self.done_us.saturating_add(self.late_us);
        let over_us = runs_us.saturating_sub(step_us);
        self.done_us = runs_us.min(step_us).saturating_sub(over_us);
        self.late_us = runs_us - self.done_us;
    }

    /// Until all of it is computed.
    fn left_us(&self) -> u64 {
        sum_us(self.all()).saturating_sub(self.done_us)
    }

    /// What becomes of a newcomer.
    fn ahead(&self, newcomer: &Newcomer, now: Timestamp) -> Ahead {
        let busy_us = self.busy_us();
        let ready = now.after(Duration::from_micros(newcomer.transfer_us));
        let free = now.after(Duration::from_micros(busy_us));
        let waiting = self.waiting();
        let before = waiting.partition_point(|one| one.turn <= newcomer.turn);
        let work_us = busy_us.saturating_add(sum_us(&waiting[..before]));
        let behind_us = sum_us(&waiting[before..]);
        let first = &self.all[..self.begun + before];
        let (known, kv_tokens) =
            (count(first), first.iter().map(|one| u64::from(one.kv_tokens)).sum::<u64>());
        let ahead = Ahead { work_us, behind_us, known, kv_tokens, ..Ahead::default() };
        if ready <= free && waiting.iter().all(|one| one.ready <= free) {
            let behind = count(&waiting[before..]);
            let delays_us = behind.saturating_mul(newcomer.prefill_us);
            let delays_us = by_right(waiting, newcomer).unwrap_or(delays_us);
            return Ahead { wait_us: work_us, behind, delays_us, ..ahead };
        }
        let prefill_us = u32::try_from(newcomer.prefill_us).unwrap_or(u32::MAX);
        // None of those that wait computes nothing: by that it is told from them.
        let new = One { turn: newcomer.turn, ready, tokens: 0, prefill_us, kv_tokens: 0, requests: 1 };
        let mut with = [One::default(); SENT_MAX + 1];
        with[..before].copy_from_slice(&waiting[..before]);
        with[before] = new;
        with[before + 1..=waiting.len()].copy_from_slice(&waiting[before..]);
        let with = Begins::of(&mut with[..=waiting.len()], free);
        if let Some(delays_us) = by_right(waiting, newcomer) {
            let wait_us = micros(with.newcomer.since(now));
            return Ahead { wait_us, behind: with.behind, delays_us, ..ahead };
        }
        let mut without = self.all;
        let without = Begins::of(&mut without[self.begun..self.len], free);
        let wait_us = micros(with.newcomer.since(now));
        let delays_us = with.sum_us.saturating_sub(without.sum_us);
        Ahead { wait_us, behind: with.behind, delays_us, ..ahead }
    }
}

/// What a newcomer adds to the waiting of others that it has no right to pass, if it has one to pass any.
fn by_right(waiting: &[One], newcomer: &Newcomer) -> Option<u64> {
    let turn = newcomer.by_right?;
    let before = waiting.partition_point(|one| one.turn <= turn);
    Some(count(&waiting[before..]).saturating_mul(newcomer.prefill_us))
}

fn count(all: &[One]) -> u64 {
    all.iter().map(|one| u64::from(one.requests)).sum()
}

fn sum_us(all: &[One]) -> u64 {
    all.iter().map(|one| u64::from(one.prefill_us)).sum()
}

/// Of these, in the order of turns, the first that is there by then; if none is, which is there first; and when.
fn first_ready(waiting: &[One], at: Timestamp) -> Option<(usize, Timestamp)> {
    let now = waiting.iter().position(|one| one.ready <= at);
    let next = now.or_else(|| (0..waiting.len()).min_by_key(|nth| waiting[*nth].ready))?;
    Some((next, waiting[next].ready))
}

/// When those that wait begin on an instance that is free from some time on.
struct Begins {
    /// Of all but the newcomer, from then, summed up.
    sum_us: u64,
    newcomer: Timestamp,
    /// Those that begin behind the newcomer.
    behind: u64,
}

impl Begins {
    /// Leaves them in the order in which they begin.
    fn of(waiting: &mut [One], free: Timestamp) -> Begins {
        let mut begins = Begins { sum_us: 0, newcomer: free, behind: 0 };
        let mut at = free;
        for begun in 0..waiting.len() {
            let Some((next, ready)) = first_ready(&waiting[begun..], at) else { break };
            at = at.max(ready);
            waiting[begun..=begun + next].rotate_right(1);
            if waiting[begun].tokens == 0 {
                begins.newcomer = at;
                begins.behind = count(&waiting[begun + 1..]);
            } else {
                let each_us = micros(at.since(free));
                let all_us = each_us.saturating_mul(waiting[begun].requests.into());
                begins.sum_us = begins.sum_us.saturating_add(all_us);
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
    /// The load as just reported: nothing routed since.
    #[must_use]
    pub fn reported(queue_tokens: u64, running: u32, waiting: u32) -> Self {
        Self { queue_tokens, running, waiting, ..Self::default() }
    }

    /// The same with what it says of decoding and of GPU memory.
    #[must_use]
    pub fn with_decoding(self, decoding: Decoding) -> Self {
        Self { decoding: decoding.believed(), ..self }
    }

    /// Tokens whose KV the instance has room for in GPU memory; 0 where that is not known.
    #[must_use]
    pub fn kv_tokens_max(&self) -> u64 {
        self.decoding.kv_tokens_max
    }

    /// The same, of an instance that is known by an earlier load: of what was sent there, what is left is remembered.
    #[must_use]
    pub fn after(self, before: &Load, now: Timestamp) -> Self {
        let mut sent = before.sent;
        sent.advance(now);
        sent.shrink_to(self.tokens_ahead(), self.decoding.chunk_tokens(), now);
        Self { sent, pace: before.pace, speed: before.speed, strictest: before.strictest, ..self }
    }

    /// For how long prompts were computed between a load and the report that follows it, as far as is known: that of what was sent by what is left of it, else
    /// of the tokens that are gone.
    pub(super) fn computed_us(&self, after: &Load, ns_per_token: u64) -> u64 {
        let known = self.sent.left_us().saturating_sub(after.sent.left_us());
        let gone = self.tokens_ahead().saturating_sub(after.queue_tokens);
        known.max(if self.sent.len == 0 { gone.saturating_mul(ns_per_token) / 1_000 } else { 0 })
    }

    /// What is computed before a newcomer; nothing where nothing is known of what waits.
    pub(super) fn ahead(&self, newcomer: &Newcomer, at: Moment) -> Option<Ahead> {
        let known = self.sent.tokens();
        let more = self.tokens_ahead().saturating_sub(known);
        if known == 0 {
            return (more == 0).then(Ahead::default);
        }
        let mut sent = self.sent;
        sent.advance(at.goes_on_to());
        let ahead = sent.ahead(newcomer, at.now);
        // What is known of nobody may come before.
        let unknown_us = u128::from(sum_us(sent.all())) * u128::from(more) / u128::from(known);
        let unknown_us = u64::try_from(unknown_us).unwrap_or(u64::MAX);
        let more = |us: u64| us.saturating_add(unknown_us);
        Some(Ahead { wait_us: more(ahead.wait_us), work_us: more(ahead.work_us), ..ahead })
    }

    /// For how long prompts that were sent there are computed from now on.
    pub(super) fn prompts_us(&self, at: Moment) -> u64 {
        let mut sent = self.sent;
        sent.advance(at.goes_on_to());
        sent.left_us()
    }

    /// Tokens that are prefilled before a request that comes now.
    #[must_use]
    pub fn tokens_ahead(&self) -> u64 {
        self.queue_tokens.saturating_add(self.routed_tokens)
    }

    /// Requests whose prefill starts before that of a request that comes now.
    #[must_use]
    pub fn requests_ahead(&self) -> u64 {
        u64::from(self.waiting) + u64::from(self.routed)
    }

    /// Whether nobody runs or waits there.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0 && self.requests_ahead() == 0 && self.tokens_ahead() == 0
    }

    /// Takes back what was counted of a request that does not run here.
    pub(super) fn take_back(&mut self, counted: &Counted, at: Moment) {
        // A report tells of what is there, and this one is not.
        if at.reported_at <= counted.at {
            self.routed_tokens = self.routed_tokens.saturating_sub(counted.tokens.into());
            self.routed = self.routed.saturating_sub(1);
        }
        self.sent.advance(at.goes_on_to());
        self.sent.remove(counted.turn);
    }

    /// Counts a decision that was sent here.
    pub(super) fn record(&mut self, decision: &Decision, at: Moment) {
        self.routed_tokens = self.routed_tokens.saturating_add(u64::from(decision.recompute_tokens));
        self.routed = self.routed.saturating_add(1);
        self.sent.advance(at.goes_on_to());
        let Prediction { transfer_us, prefill_us, .. } = decision.parts;
        self.sent.push(One {
            turn: decision.turn,
            ready: at.now.after(Duration::from_micros(transfer_us)),
            tokens: decision.recompute_tokens,
            prefill_us: u32::try_from(prefill_us).unwrap_or(u32::MAX),
            kv_tokens: decision.pacing.kv_tokens,
            requests: 1,
        });
        self.sent.advance(at.goes_on_to());
    }
}
