//! Deterministic traces calibrated to published statistics: equal specs give equal bytes.
//!
//! A [`TraceGenerator`] opens sessions at random and generates their turns. Each [`TrafficKind`]
//! has a file with its session model, its constants and their sources. Not here: whether a result
//! fits the published numbers ([`crate::stats::published`] measures that).

mod agent;
mod business;
mod consumer;
mod draw;
mod knowable;

pub use knowable::simulate_knowable;

use crate::trace::{BAILIAN_BLOCK_TOKENS, Request};
use draw::Sampler;
use kv_core::id::{Category, RequestKind};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Longest generated input in tokens; a session that would exceed it ends. 128 Ki, a common context
/// limit.
pub const INPUT_TOKENS_MAX: u32 = 128 << 10;

/// Kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrafficKind {
    /// People chatting: trace A of ATC '25.
    Consumer,
    /// Programs calling with shared system prompts: trace B of ATC '25.
    Business,
    /// Tool-calling loops; no published trace, assumptions documented in the file.
    Agent,
}

impl TrafficKind {
    /// Every kind, in the order listed to a person.
    pub const ALL: [TrafficKind; 3] = [TrafficKind::Consumer, TrafficKind::Business, TrafficKind::Agent];

    /// Name as written on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["consumer", "business", "agent"][self as usize]
    }

    /// The kind of this name, if there is one.
    #[must_use]
    pub fn by_name(name: &str) -> Option<TrafficKind> {
        TrafficKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Parameters of a generated trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSpec {
    /// Kind of traffic.
    pub kind: TrafficKind,
    /// Seed of all random draws.
    pub seed: u64,
    /// Number of requests.
    pub requests: u64,
    /// Tokens per block; at least 1. The file formats have 16 (Bailian) and 512 (Mooncake).
    pub block_tokens: u32,
    /// New sessions per second; `None` for the rate of the kind. A lower rate lets sessions finish
    /// within a short trace: arrivals spread, gaps inside sessions stay.
    pub sessions_per_s: Option<f64>,
}

impl TraceSpec {
    /// A trace of this kind and length in 16-token blocks at the kind's own rate.
    #[must_use]
    pub fn new(kind: TrafficKind, seed: u64, requests: u64) -> Self {
        TraceSpec { kind, seed, requests, block_tokens: BAILIAN_BLOCK_TOKENS, sessions_per_s: None }
    }
}

/// Start of a session.
struct SessionStart {
    /// Index of the model's session type.
    profile: usize,
    kind: RequestKind,
    /// Number and length in tokens of the shared text at its start.
    shared: Option<(usize, u32)>,
    /// Tokens of the first request besides the shared text.
    own_tokens: u32,
    output_tokens: u32,
}

/// Next step of a session.
struct SessionStep {
    gap_us: u64,
    /// Tokens added besides the output of the previous step.
    own_tokens: u32,
    output_tokens: u32,
}

/// Session model of a kind of traffic.
trait TrafficModel {
    /// New sessions per second.
    fn sessions_per_s(&self) -> f64;
    fn open(&self, draw: &mut Sampler) -> SessionStart;
    /// The step after `turn` turns, or `None` if the session ends.
    fn next_step(&self, profile: usize, turn: u32, draw: &mut Sampler) -> Option<SessionStep>;
    /// Share of sessions that start with the shared text of this number.
    fn shared_text_share(&self, shared: usize) -> f64;
    /// Probability that a session continues after `turn` turns.
    fn continue_chance(&self, profile: usize, turn: u32) -> f64;
    /// Distribution, at this age, of the wait for the next turn, if one comes.
    fn wait_at(&self, profile: usize, turn: u32, age_s: f64) -> WaitDistribution;

    /// Expected request rate of a session at this age, per second, if no request came since its
    /// last.
    fn expected_rate_per_s(&self, profile: usize, turn: u32, age_s: f64) -> f64 {
        let (chance, wait) = (self.continue_chance(profile, turn), self.wait_at(profile, turn, age_s));
        let silent = 1.0 - chance + chance * wait.longer_share;
        if silent > 0.0 { chance * wait.density_per_s / silent } else { 0.0 }
    }
}

/// Distribution of waits at an age.
struct WaitDistribution {
    density_per_s: f64,
    /// Share of waits that are longer.
    longer_share: f64,
}

#[derive(Clone)]
struct Session {
    profile: usize,
    /// Number of the shared text at its start, and its whole blocks.
    shared: Option<usize>,
    shared_blocks: usize,
    request: Request,
    /// Tokens in complete blocks, which never change again.
    full_tokens: u32,
}

/// Iterator over the requests of a generated trace, in order of arrival.
pub struct TraceGenerator {
    model: Box<dyn TrafficModel>,
    spec: TraceSpec,
    draw: Sampler,
    /// Next requests by arrival, then by number.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    sessions: BTreeMap<u64, Session>,
    shared: BTreeMap<usize, Vec<u64>>,
    next_session_us: u64,
    next_block: u64,
    next_chat: u64,
    left: u64,
}

impl TraceGenerator {
    /// A generator at the start of its trace.
    #[must_use]
    pub fn new(spec: TraceSpec) -> Self {
        let model: Box<dyn TrafficModel> = match spec.kind {
            TrafficKind::Consumer => Box::new(consumer::Consumer),
            TrafficKind::Business => Box::new(business::Business::new()),
            TrafficKind::Agent => Box::new(agent::Agent),
        };
        TraceGenerator {
            model,
            spec: TraceSpec { block_tokens: spec.block_tokens.max(1), ..spec },
            draw: Sampler::new(spec.seed),
            due: BinaryHeap::new(),
            sessions: BTreeMap::new(),
            shared: BTreeMap::new(),
            next_session_us: 0,
            next_block: 0,
            next_chat: 0,
            left: spec.requests,
        }
    }

    fn fresh_block(&mut self) -> u64 {
        self.next_block += 1;
        self.next_block - 1
    }

    /// Opens the session that is due and draws the time of the next one.
    fn open_session(&mut self) {
        let opening = self.model.open(&mut self.draw);
        let blocks = self.shared_blocks(opening.shared);
        let shared_tokens = opening.shared.map_or(0, |(_, tokens)| tokens);
        let request = Request {
            arrival_us: self.next_session_us,
            input_tokens: (shared_tokens + opening.own_tokens).clamp(1, INPUT_TOKENS_MAX),
            output_tokens: opening.output_tokens,
            block_tokens: self.spec.block_tokens,
            category: Category { kind: opening.kind, conversation_turn: 1 },
            chat: None,
            parent: None,
            turn: 1,
            blocks,
        };
        let shared_blocks = request.blocks.len();
        let filled_tokens = shared_blocks as u32 * self.spec.block_tokens;
        let shared = opening.shared.map(|(number, _)| number);
        self.enqueue(Session {
            profile: opening.profile,
            shared,
            shared_blocks,
            request,
            full_tokens: filled_tokens,
        });
        self.next_session_us += (self.draw.exponential(1.0 / self.sessions_per_s()) * 1e6) as u64;
    }

    fn sessions_per_s(&self) -> f64 {
        self.spec.sessions_per_s.unwrap_or_else(|| self.model.sessions_per_s()).max(1e-6)
    }

    /// Rate of new sessions that start with the shared text of this number.
    fn shared_starts_per_s(&self, shared: usize) -> f64 {
        self.sessions_per_s() * self.model.shared_text_share(shared)
    }

    fn shared_blocks(&mut self, shared: Option<(usize, u32)>) -> Vec<u64> {
        let Some((number, tokens)) = shared else { return Vec::new() };
        if let Some(blocks) = self.shared.get(&number) {
            return blocks.clone();
        }
        // Only whole blocks can be shared: the rest of the text is in a block with the tokens after
        // it.
        let blocks: Vec<u64> = (0..tokens / self.spec.block_tokens).map(|_| self.fresh_block()).collect();
        self.shared.insert(number, blocks.clone());
        blocks
    }

    fn enqueue(&mut self, mut session: Session) {
        let number = self.next_chat;
        self.next_chat += 1;
        session.request.chat = Some(number);
        self.due.push(Reverse((session.request.arrival_us, number)));
        self.sessions.insert(number, session);
    }

    /// Updates the blocks of the input: whole ones stay, the partly filled one gets a new id.
    fn fill(&mut self, session: &mut Session) {
        let block_tokens = self.spec.block_tokens;
        session.request.blocks.truncate((session.full_tokens / block_tokens) as usize);
        while (session.request.blocks.len() as u32) < session.request.input_tokens.div_ceil(block_tokens) {
            let block = self.fresh_block();
            session.request.blocks.push(block);
        }
        session.full_tokens = session.request.input_tokens / block_tokens * block_tokens;
    }

    /// Schedules the session's next turn, if it continues.
    fn continue_session(&mut self, mut session: Session) {
        let request = &mut session.request;
        let Some(step) = self.model.next_step(session.profile, request.turn, &mut self.draw) else { return };
        let input_tokens = request.input_tokens + request.output_tokens + step.own_tokens;
        if input_tokens > INPUT_TOKENS_MAX {
            return;
        }
        request.input_tokens = input_tokens;
        request.output_tokens = step.output_tokens;
        request.arrival_us += step.gap_us;
        request.parent = request.chat;
        request.turn += 1;
        request.category.conversation_turn = u8::try_from(request.turn).unwrap_or(u8::MAX);
        self.enqueue(session);
    }
}

impl TraceGenerator {
    /// The session with the next request due, in its state at that request.
    fn next_due(&mut self) -> Option<(u64, Session)> {
        self.left = self.left.checked_sub(1)?;
        while self.due.peek().is_none_or(|Reverse((arrival, _))| *arrival >= self.next_session_us) {
            self.open_session();
        }
        let Reverse((_, number)) = self.due.pop()?;
        let mut session = self.sessions.remove(&number)?;
        self.fill(&mut session);
        let due = session.clone();
        self.continue_session(session);
        Some((number, due))
    }
}

impl Iterator for TraceGenerator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.next_due().map(|(_, session)| session.request)
    }
}

#[cfg(test)]
mod tests;
