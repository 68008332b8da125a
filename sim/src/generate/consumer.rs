//! Consumer traffic: trace A of ATC '25, people in conversation with an assistant.
//!
//! Published and used unchanged: the mix of types, the multi-turn share of each, turns P50 1 and
//! P90 5, at most 232. Conflicting: a probability of .8 for a next turn after *every* later turn
//! would put P90 at 9; [`NEXT_TURN`] therefore rises to .8, which keeps the quantile. Fitted (seed
//! 1, 20,000 requests): the lengths, for a hit rate of 62 % of blocks, and the gaps, for 80 % of
//! reuses within 10 min. Not fitted, and different: the skew and the lifetime of blocks, because
//! the sessions' own shape leaves no freedom for them. Not here: time of day; the rate is constant.

use super::draw::exponential_at;
use super::{Sampler, SessionStart, SessionStep, TrafficModel, WaitDistribution};
use kv_core::id::RequestKind;

/// New conversations per second: two requests every three seconds with their turns. Low, so that
/// most conversations end within a trace of some thousand requests.
const SESSIONS_PER_S: f64 = 0.3;
/// Longest published conversation, in turns.
const TURNS_MAX: u32 = 232;
/// Probability of a next turn after turns 2, 3, 4 and 5; the last value is for all later turns.
const NEXT_TURN: [f64; 5] = [0.60, 0.65, 0.65, 0.75, 0.80];
/// The short text all plain chats start with: two blocks of 16 tokens. Cross-user hits are rare.
const SHARED_TOKENS: u32 = 32;

/// One type of conversation.
struct Profile {
    kind: RequestKind,
    /// Share of conversations, derived from the published share of requests and the mean number of turns.
    share: f64,
    /// Published share of conversations with a second turn.
    multi_turn: f64,
    /// Median and log-spread of the first question, including attachments, in tokens.
    first_tokens: (f64, f64),
    /// Median of every later question, in tokens.
    later_tokens: f64,
    /// Median of an answer, in tokens.
    output_tokens: f64,
    /// Mean time from a request to the next turn, in seconds, after the first and after later
    /// turns.
    gap_s: (f64, f64),
}

impl Profile {
    fn gap_mean_s(&self, turn: u32) -> f64 {
        if turn == 1 { self.gap_s.0 } else { self.gap_s.1 }
    }
}

const PROFILES: [Profile; 4] = [
    Profile {
        kind: RequestKind::Text,
        share: 0.78,
        multi_turn: 0.47,
        first_tokens: (840.0, 1.2),
        later_tokens: 35.0,
        output_tokens: 130.0,
        gap_s: (450.0, 345.0),
    },
    Profile {
        kind: RequestKind::File,
        share: 0.039,
        multi_turn: 0.51,
        first_tokens: (6000.0, 0.9),
        later_tokens: 30.0,
        output_tokens: 150.0,
        gap_s: (545.0, 440.0),
    },
    Profile {
        kind: RequestKind::Multimodal,
        share: 0.056,
        multi_turn: 0.10,
        first_tokens: (1800.0, 0.7),
        later_tokens: 30.0,
        output_tokens: 90.0,
        gap_s: (275.0, 230.0),
    },
    Profile {
        kind: RequestKind::Search,
        share: 0.147,
        multi_turn: 0.49,
        first_tokens: (1600.0, 0.8),
        later_tokens: 80.0,
        output_tokens: 160.0,
        gap_s: (380.0, 315.0),
    },
];

/// The model of consumer traffic.
pub(super) struct Consumer;

impl TrafficModel for Consumer {
    fn sessions_per_s(&self) -> f64 {
        SESSIONS_PER_S
    }

    fn open(&self, draw: &mut Sampler) -> SessionStart {
        let number = draw.pick(&PROFILES.each_ref().map(|profile| profile.share));
        let profile = &PROFILES[number];
        let (median, spread) = profile.first_tokens;
        SessionStart {
            profile: number,
            kind: profile.kind,
            shared: (profile.kind == RequestKind::Text).then_some((0, SHARED_TOKENS)),
            own_tokens: draw.tokens(median, spread, 8, 32_000),
            output_tokens: draw.tokens(profile.output_tokens, 0.8, 1, 4_000),
        }
    }

    fn shared_text_share(&self, _shared: usize) -> f64 {
        let plain = |profile: &&Profile| profile.kind == RequestKind::Text;
        let all: f64 = PROFILES.iter().map(|profile| profile.share).sum();
        PROFILES.iter().filter(plain).map(|profile| profile.share).sum::<f64>() / all
    }

    fn continue_chance(&self, profile: usize, turn: u32) -> f64 {
        match turn {
            TURNS_MAX.. => 0.0,
            0 | 1 => PROFILES[profile].multi_turn,
            turn => NEXT_TURN[(turn as usize - 2).min(NEXT_TURN.len() - 1)],
        }
    }

    fn wait_at(&self, profile: usize, turn: u32, age_s: f64) -> WaitDistribution {
        let (density_per_s, longer) = exponential_at(PROFILES[profile].gap_mean_s(turn), age_s);
        WaitDistribution { density_per_s, longer_share: longer }
    }

    fn next_step(&self, number: usize, turn: u32, draw: &mut Sampler) -> Option<SessionStep> {
        if turn >= TURNS_MAX || !draw.happens(self.continue_chance(number, turn)) {
            return None;
        }
        let profile = &PROFILES[number];
        Some(SessionStep {
            gap_us: (draw.exponential(profile.gap_mean_s(turn)) * 1e6) as u64,
            own_tokens: draw.tokens(profile.later_tokens, 0.9, 2, 8_000),
            output_tokens: draw.tokens(profile.output_tokens, 0.8, 1, 4_000),
        })
    }
}
