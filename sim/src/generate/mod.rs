//! Deterministic traces calibrated to published statistics: equal specs give equal bytes.
//!
//! A [`Generator`] opens sessions at random and lets each take its turns; what a session looks like is one
//! file per [`Kind`], with its constants and where they come from. Not here: whether a result fits the
//! published numbers ([`crate::stats::published`] measures that).

mod agent;
mod business;
mod consumer;
mod draw;
mod knowable;

pub use knowable::simulate_knowable;

use crate::trace::{BAILIAN_BLOCK_TOKENS, Request};
use draw::Draw;
use kv_core::id::{Category, RequestKind};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Longest input generated, in tokens; a session that would pass it ends. 128 Ki, a common context limit.
pub const INPUT_TOKENS_MAX: u32 = 128 << 10;

/// What kind of traffic a trace shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// People chatting: trace A of ATC '25.
    Consumer,
    /// Programs calling with shared system prompts: trace B of ATC '25.
    Business,
    /// Tool-calling loops; no published trace, assumptions documented in the file.
    Agent,
}

impl Kind {
    /// Every kind, in the order listed to a person.
    pub const ALL: [Kind; 3] = [Kind::Consumer, Kind::Business, Kind::Agent];

    /// Name as written on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["consumer", "business", "agent"][self as usize]
    }

    /// The kind of this name, if there is one.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// What to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Kind of traffic.
    pub kind: Kind,
    /// Every draw follows from it.
    pub seed: u64,
    /// Number of requests.
    pub requests: u64,
    /// Tokens per block; at least 1. The file formats have 16 (Bailian) and 512 (Mooncake).
    pub block_tokens: u32,
    /// New sessions per second; `None` for the rate of the kind. Lower it to let sessions finish within a
    /// short trace: arrivals spread, gaps inside sessions stay.
    pub sessions_per_s: Option<f64>,
}

impl Spec {
    /// A trace of this kind and length in 16-token blocks at the kind's own rate.
    #[must_use]
    pub fn new(kind: Kind, seed: u64, requests: u64) -> Self {
        Spec { kind, seed, requests, block_tokens: BAILIAN_BLOCK_TOKENS, sessions_per_s: None }
    }
}

/// How a session starts.
struct Opening {
    /// Which of the model's session types it is.
    profile: usize,
    kind: RequestKind,
    /// Shared text every session of this number starts with, and its length in tokens.
    shared: Option<(usize, u32)>,
    /// Tokens of its own in the first request.
    own_tokens: u32,
    output_tokens: u32,
}

/// How a session goes on.
struct Step {
    gap_us: u64,
    /// Tokens added besides the output of the step before.
    own_tokens: u32,
    output_tokens: u32,
}

/// A kind of traffic: what sessions of it look like.
trait Model {
    /// New sessions per second.
    fn sessions_per_s(&self) -> f64;
    fn open(&self, draw: &mut Draw) -> Opening;
    /// The step after `turn` turns, or nothing when the session ends.
    fn next(&self, profile: usize, turn: u32, draw: &mut Draw) -> Option<Step>;
    /// Share of sessions that start with the shared text of this number.
    fn share_of(&self, shared: usize) -> f64;
    /// Chance that a session goes on behind `turn` turns.
    fn goes_on(&self, profile: usize, turn: u32) -> f64;
    /// How likely the wait for the next turn, if one comes, is to end at this age.
    fn wait(&self, profile: usize, turn: u32, age_s: f64) -> Wait;

    /// Requests a second that a session is expected to send at this age, if nothing came since its last.
    fn next_per_s(&self, profile: usize, turn: u32, age_s: f64) -> f64 {
        let (chance, wait) = (self.goes_on(profile, turn), self.wait(profile, turn, age_s));
        let silent = 1.0 - chance + chance * wait.longer;
        if silent > 0.0 { chance * wait.density_per_s / silent } else { 0.0 }
    }
}

/// A wait at an age.
struct Wait {
    density_per_s: f64,
    /// Share of waits that are longer.
    longer: f64,
}

#[derive(Clone)]
struct Session {
    profile: usize,
    /// Number of the shared text it starts with, and its whole blocks.
    shared: Option<usize>,
    shared_blocks: usize,
    request: Request,
    /// Tokens of the shared start, in whole blocks, before which nothing is ever renewed.
    filled_tokens: u32,
}

/// Iterator over the requests of a generated trace, in order of arrival.
pub struct Generator {
    model: Box<dyn Model>,
    spec: Spec,
    draw: Draw,
    /// Next requests by arrival, then by number.
    waiting: BinaryHeap<Reverse<(u64, u64)>>,
    sessions: BTreeMap<u64, Session>,
    shared: BTreeMap<usize, Vec<u64>>,
    next_session_us: u64,
    next_block: u64,
    next_chat: u64,
    left: u64,
}

impl Generator {
    /// A generator at the start of its trace.
    #[must_use]
    pub fn new(spec: Spec) -> Self {
        let model: Box<dyn Model> = match spec.kind {
            Kind::Consumer => Box::new(consumer::Consumer),
            Kind::Business => Box::new(business::Business::new()),
            Kind::Agent => Box::new(agent::Agent),
        };
        Generator {
            model,
            spec: Spec { block_tokens: spec.block_tokens.max(1), ..spec },
            draw: Draw::new(spec.seed),
            waiting: BinaryHeap::new(),
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

    /// Opens the session that is due and draws when the next one is.
    fn open(&mut self) {
        let opening = self.model.open(&mut self.draw);
        let blocks = self.shared_blocks(opening.shared);
        let shared_tokens = opening.shared.map_or(0, |(_, tokens)| tokens);
        let request = Request {
            arrival_us: self.next_session_us,
            input_tokens: (shared_tokens + opening.own_tokens).clamp(1, INPUT_TOKENS_MAX),
            output_tokens: opening.output_tokens,
            block_tokens: self.spec.block_tokens,
            category: Category { kind: opening.kind, turn: 1 },
            chat: None,
            parent: None,
            turn: 1,
            blocks,
        };
        let shared_blocks = request.blocks.len();
        let filled_tokens = shared_blocks as u32 * self.spec.block_tokens;
        let shared = opening.shared.map(|(number, _)| number);
        self.wait(Session { profile: opening.profile, shared, shared_blocks, request, filled_tokens });
        self.next_session_us += (self.draw.exponential(1.0 / self.sessions_per_s()) * 1e6) as u64;
    }

    fn sessions_per_s(&self) -> f64 {
        self.spec.sessions_per_s.unwrap_or_else(|| self.model.sessions_per_s()).max(1e-6)
    }

    /// Sessions opened a second that start with the shared text of this number.
    fn opened_per_s(&self, shared: usize) -> f64 {
        self.sessions_per_s() * self.model.share_of(shared)
    }

    fn shared_blocks(&mut self, shared: Option<(usize, u32)>) -> Vec<u64> {
        let Some((number, tokens)) = shared else { return Vec::new() };
        if let Some(blocks) = self.shared.get(&number) {
            return blocks.clone();
        }
        // Only whole blocks can be shared: the rest of the text lies in a block with what follows it.
        let blocks: Vec<u64> = (0..tokens / self.spec.block_tokens).map(|_| self.fresh_block()).collect();
        self.shared.insert(number, blocks.clone());
        blocks
    }

    fn wait(&mut self, mut session: Session) {
        let number = self.next_chat;
        self.next_chat += 1;
        session.request.chat = Some(number);
        self.waiting.push(Reverse((session.request.arrival_us, number)));
        self.sessions.insert(number, session);
    }

    /// Cuts the input into blocks: whole ones stay, the partly filled one is renewed.
    fn fill(&mut self, session: &mut Session) {
        let block_tokens = self.spec.block_tokens;
        session.request.blocks.truncate((session.filled_tokens / block_tokens) as usize);
        while (session.request.blocks.len() as u32) < session.request.input_tokens.div_ceil(block_tokens) {
            let block = self.fresh_block();
            session.request.blocks.push(block);
        }
        session.filled_tokens = session.request.input_tokens / block_tokens * block_tokens;
    }

    /// Lets a session go on behind the request just given out.
    fn go_on(&mut self, mut session: Session) {
        let request = &mut session.request;
        let Some(step) = self.model.next(session.profile, request.turn, &mut self.draw) else { return };
        let input_tokens = request.input_tokens + request.output_tokens + step.own_tokens;
        if input_tokens > INPUT_TOKENS_MAX {
            return;
        }
        request.input_tokens = input_tokens;
        request.output_tokens = step.output_tokens;
        request.arrival_us += step.gap_us;
        request.parent = request.chat;
        request.turn += 1;
        request.category.turn = u8::try_from(request.turn).unwrap_or(u8::MAX);
        self.wait(session);
    }
}

impl Generator {
    /// The session whose request is due, as it stands with that request.
    fn step(&mut self) -> Option<(u64, Session)> {
        self.left = self.left.checked_sub(1)?;
        while self.waiting.peek().is_none_or(|Reverse((arrival, _))| *arrival >= self.next_session_us) {
            self.open();
        }
        let Reverse((_, number)) = self.waiting.pop()?;
        let mut session = self.sessions.remove(&number)?;
        self.fill(&mut session);
        let due = session.clone();
        self.go_on(session);
        Some((number, due))
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.step().map(|(_, session)| session.request)
    }
}

#[cfg(test)]
mod tests;
