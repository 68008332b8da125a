//! Agent traffic: loops of model calls and tool calls over one growing context.
//!
//! No published trace is known to us, so these are stated assumptions. A loop starts from one of a
//! few long system prompts with tool descriptions and takes a dozen steps on average. Between steps
//! it waits as long as its tool runs: most tools answer in a second, some (builds, test runs,
//! browsers) take most of a minute, and sometimes a person is asked. Not here: parallel tool calls
//! and sub-agents.

use super::draw::lognormal_at;
use super::{Sampler, SessionStart, SessionStep, TrafficModel, WaitDistribution};
use kv_core::id::RequestKind;

/// New loops per second.
const SESSIONS_PER_S: f64 = 0.3;
/// Weights of the kinds of agents; each kind has its own prompt.
const PROMPT_WEIGHTS: [f64; 5] = [5.0, 3.0, 2.0, 1.0, 1.0];
/// Tokens of each kind's prompt and tool descriptions.
const PROMPT_TOKENS: [u32; 5] = [6_144, 4_096, 9_216, 2_560, 12_288];
/// Chance of another step: a mean of 12.5 steps.
const NEXT_STEP: f64 = 0.92;
/// Most steps of one loop.
const STEPS_MAX: u32 = 200;
/// Median and log-spread of the task, in tokens.
const TASK_TOKENS: (f64, f64) = (400.0, 1.0);
/// Median of the model's text and call, in tokens.
const OUTPUT_TOKENS: f64 = 120.0;

/// A type of tool: frequency of calls, duration, and size of results.
struct Tool {
    weight: f64,
    /// Median and log-spread of its duration, in seconds.
    duration_s: (f64, f64),
    /// Median of its result, in tokens.
    result_tokens: f64,
}

const TOOLS: [Tool; 4] = [
    // Reading a file, searching text.
    Tool { weight: 0.62, duration_s: (0.6, 0.8), result_tokens: 700.0 },
    // Fetching a page, asking a service.
    Tool { weight: 0.22, duration_s: (3.0, 0.8), result_tokens: 1_100.0 },
    // Building, testing.
    Tool { weight: 0.14, duration_s: (35.0, 1.0), result_tokens: 450.0 },
    // Asking a person.
    Tool { weight: 0.02, duration_s: (240.0, 1.2), result_tokens: 60.0 },
];

/// The model of agent traffic.
pub(super) struct Agent;

impl TrafficModel for Agent {
    fn sessions_per_s(&self) -> f64 {
        SESSIONS_PER_S
    }

    fn open(&self, draw: &mut Sampler) -> SessionStart {
        let prompt = draw.pick(&PROMPT_WEIGHTS);
        SessionStart {
            profile: 0,
            kind: RequestKind::Agent,
            shared: Some((prompt, PROMPT_TOKENS[prompt])),
            own_tokens: draw.tokens(TASK_TOKENS.0, TASK_TOKENS.1, 16, 16_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 4_000),
        }
    }

    fn shared_text_share(&self, shared: usize) -> f64 {
        PROMPT_WEIGHTS[shared] / PROMPT_WEIGHTS.iter().sum::<f64>()
    }

    fn continue_chance(&self, _profile: usize, turn: u32) -> f64 {
        if turn < STEPS_MAX { NEXT_STEP } else { 0.0 }
    }

    fn wait_at(&self, _profile: usize, _turn: u32, age_s: f64) -> WaitDistribution {
        let weights: f64 = TOOLS.iter().map(|tool| tool.weight).sum();
        TOOLS.iter().fold(WaitDistribution { density_per_s: 0.0, longer_share: 0.0 }, |sum, tool| {
            let (density_per_s, longer) = lognormal_at(tool.duration_s.0, tool.duration_s.1, age_s);
            let share = tool.weight / weights;
            WaitDistribution {
                density_per_s: sum.density_per_s + share * density_per_s,
                longer_share: sum.longer_share + share * longer,
            }
        })
    }

    fn next_step(&self, profile: usize, turn: u32, draw: &mut Sampler) -> Option<SessionStep> {
        // The longest loop draws no random number here.
        if turn >= STEPS_MAX || !draw.happens(self.continue_chance(profile, turn)) {
            return None;
        }
        let tool = &TOOLS[draw.pick(&TOOLS.each_ref().map(|tool| tool.weight))];
        Some(SessionStep {
            gap_us: (draw.lognormal(tool.duration_s.0, tool.duration_s.1) * 1e6) as u64,
            own_tokens: draw.tokens(tool.result_tokens, 0.9, 4, 16_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 4_000),
        })
    }
}
