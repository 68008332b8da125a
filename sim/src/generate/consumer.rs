//! Consumer traffic: trace A of ATC '25, people in conversation with an assistant.
//!
//! Published and taken as they are: the mix of types, the multi-turn share of each, turns P50 1 and P90 5,
//! at most 232. In conflict: a chance of .8 of a next turn behind *every* later turn would put P90 at 9;
//! [`NEXT_TURN`] therefore climbs to .8, which keeps the quantile. Fitted (seed 1, 20,000 requests): the
//! lengths, so that 62 % of blocks hit, and the gaps, so that 80 % of reuses come within 10 min. Not fitted,
//! and off: the skew and the life of blocks, which the sessions' own shape leaves no freedom for. Not here:
//! time of day; the rate is level.

use super::draw::exponential_at;
use super::{Draw, Model, Opening, Step, Wait};
use kv_core::id::RequestKind;

/// New conversations per second: two requests every three seconds with their turns. Low, so that in a trace
/// of some thousand requests most conversations come to their end.
const SESSIONS_PER_S: f64 = 0.3;
/// Longest published conversation, in turns.
const TURNS_MAX: u32 = 232;
/// Chance of a next turn behind turns 2, 3, 4 and 5; behind later ones the last of these.
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
    /// Median and log-spread of the first question, with what is attached to it, in tokens.
    first_tokens: (f64, f64),
    /// Median of every later question, in tokens.
    later_tokens: f64,
    /// Median of an answer, in tokens.
    output_tokens: f64,
    /// Mean time from a request to the next turn, in seconds, behind the first and behind later turns.
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

impl Model for Consumer {
    fn sessions_per_s(&self) -> f64 {
        SESSIONS_PER_S
    }

    fn open(&self, draw: &mut Draw) -> Opening {
        let number = draw.pick(&PROFILES.each_ref().map(|profile| profile.share));
        let profile = &PROFILES[number];
        let (median, spread) = profile.first_tokens;
        Opening {
            profile: number,
            kind: profile.kind,
            shared: (profile.kind == RequestKind::Text).then_some((0, SHARED_TOKENS)),
            own_tokens: draw.tokens(median, spread, 8, 32_000),
            output_tokens: draw.tokens(profile.output_tokens, 0.8, 1, 4_000),
        }
    }

    fn share_of(&self, _shared: usize) -> f64 {
        let plain = |profile: &&Profile| profile.kind == RequestKind::Text;
        let all: f64 = PROFILES.iter().map(|profile| profile.share).sum();
        PROFILES.iter().filter(plain).map(|profile| profile.share).sum::<f64>() / all
    }

    fn goes_on(&self, profile: usize, turn: u32) -> f64 {
        match turn {
            TURNS_MAX.. => 0.0,
            0 | 1 => PROFILES[profile].multi_turn,
            turn => NEXT_TURN[(turn as usize - 2).min(NEXT_TURN.len() - 1)],
        }
    }

    fn wait(&self, profile: usize, turn: u32, age_s: f64) -> Wait {
        let (density_per_s, longer) = exponential_at(PROFILES[profile].gap_mean_s(turn), age_s);
        Wait { density_per_s, longer }
    }

    fn next(&self, number: usize, turn: u32, draw: &mut Draw) -> Option<Step> {
        if turn >= TURNS_MAX || !draw.happens(self.goes_on(number, turn)) {
            return None;
        }
        let profile = &PROFILES[number];
        Some(Step {
            gap_us: (draw.exponential(profile.gap_mean_s(turn)) * 1e6) as u64,
            own_tokens: draw.tokens(profile.later_tokens, 0.9, 2, 8_000),
            output_tokens: draw.tokens(profile.output_tokens, 0.8, 1, 4_000),
        })
    }
}
