//! Business traffic: trace B of ATC '25, programs that call with a system prompt shared by all
//! their calls.
//!
//! Published and used unchanged: nearly every hit comes from single-turn API requests, 80 % of
//! reuses come within 10 s. Fitted (seed 1, 20,000 requests): prompt and content lengths, for a hit
//! rate of 54 % of blocks, and the number of programs with its skew, for the 10 s. Assumed:
//! popularity of programs falls as 1/rank. Not here: batch jobs that start and end.

use super::draw::exponential_at;
use super::{Sampler, SessionStart, SessionStep, TrafficModel, WaitDistribution};
use kv_core::id::RequestKind;

/// New sessions per second.
const SESSIONS_PER_S: f64 = 20.0;
/// Number of programs, each with its own prompt.
const PROGRAMS: usize = 150;
/// Exponent of the decline of popularity with rank.
const SKEW: f64 = 1.0;
/// Share of sessions that are conversations of a program's user; they give the 3 % of other hits.
const CHAT_SHARE: f64 = 0.012;
/// Chance of another turn in such a conversation.
const CHAT_NEXT_TURN: f64 = 0.5;
/// Mean gap between turns of such a conversation, in seconds.
const CHAT_GAP_S: f64 = 25.0;
/// Median and log-spread of a call's own content, in tokens.
const CONTENT_TOKENS: (f64, f64) = (480.0, 0.9);
/// Median of an answer, in tokens.
const OUTPUT_TOKENS: f64 = 90.0;
/// Length of a system prompt in tokens: shortest, and the step between [`PROMPT_STEPS`] lengths.
const PROMPT_TOKENS: (u32, u32) = (320, 128);
/// Number of different prompt lengths.
const PROMPT_STEPS: u32 = 11;

const API: usize = 0;
const CHAT: usize = 1;

/// The model of business traffic.
pub(super) struct Business {
    popularity: Vec<f64>,
}

impl Business {
    pub(super) fn new() -> Self {
        Business { popularity: (1..=PROGRAMS).map(|rank| (rank as f64).powf(-SKEW)).collect() }
    }
}

/// Length of a program's prompt: spread over the ranks, so that length and popularity are
/// independent.
fn prompt_tokens(program: usize) -> u32 {
    PROMPT_TOKENS.0 + PROMPT_TOKENS.1 * (program as u32 * 7 % PROMPT_STEPS)
}

impl TrafficModel for Business {
    fn sessions_per_s(&self) -> f64 {
        SESSIONS_PER_S
    }

    fn open(&self, draw: &mut Sampler) -> SessionStart {
        let program = draw.pick(&self.popularity);
        let is_chat = draw.happens(CHAT_SHARE);
        SessionStart {
            profile: if is_chat { CHAT } else { API },
            kind: if is_chat { RequestKind::Text } else { RequestKind::Api },
            shared: Some((program, prompt_tokens(program))),
            own_tokens: draw.tokens(CONTENT_TOKENS.0, CONTENT_TOKENS.1, 8, 16_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 2_000),
        }
    }

    fn shared_text_share(&self, shared: usize) -> f64 {
        self.popularity[shared] / self.popularity.iter().sum::<f64>()
    }

    fn continue_chance(&self, profile: usize, _turn: u32) -> f64 {
        if profile == CHAT { CHAT_NEXT_TURN } else { 0.0 }
    }

    fn wait_at(&self, _profile: usize, _turn: u32, age_s: f64) -> WaitDistribution {
        let (density_per_s, longer) = exponential_at(CHAT_GAP_S, age_s);
        WaitDistribution { density_per_s, longer_share: longer }
    }

    fn next_step(&self, profile: usize, turn: u32, draw: &mut Sampler) -> Option<SessionStep> {
        if profile != CHAT || !draw.happens(self.continue_chance(profile, turn)) {
            return None;
        }
        Some(SessionStep {
            gap_us: (draw.exponential(CHAT_GAP_S) * 1e6) as u64,
            own_tokens: draw.tokens(60.0, 0.8, 2, 4_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 2_000),
        })
    }
}
