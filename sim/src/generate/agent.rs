//! Agent traffic: loops of model call and tool call over one growing context.
//!
//! No paper of ours publishes such a trace, so these are assumptions, stated: a loop starts from one of a few
//! long system prompts with tool descriptions, takes a dozen steps in the mean, and waits between steps as
//! long as its tool runs: most tools answer in a second, some (builds, test runs, browsers) take most of a
//! minute, and now and then a person is asked. Not here: parallel tool calls and sub-agents.

use super::draw::lognormal_at;
use super::{Draw, Model, Opening, Step, Wait};
use kv_core::id::RequestKind;

/// New loops per second.
const SESSIONS_PER_S: f64 = 0.3;
/// Kinds of agents; each has its own prompt, used in the proportion of its weight.
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

/// A sort of tool: how often it is called, how long it runs, how much it answers.
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

impl Model for Agent {
    fn sessions_per_s(&self) -> f64 {
        SESSIONS_PER_S
    }

    fn open(&self, draw: &mut Draw) -> Opening {
        let prompt = draw.pick(&PROMPT_WEIGHTS);
        Opening {
            profile: 0,
            kind: RequestKind::Agent,
            shared: Some((prompt, PROMPT_TOKENS[prompt])),
            own_tokens: draw.tokens(TASK_TOKENS.0, TASK_TOKENS.1, 16, 16_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 4_000),
        }
    }

    fn share_of(&self, shared: usize) -> f64 {
        PROMPT_WEIGHTS[shared] / PROMPT_WEIGHTS.iter().sum::<f64>()
    }

    fn goes_on(&self, _profile: usize, turn: u32) -> f64 {
        if turn < STEPS_MAX { NEXT_STEP } else { 0.0 }
    }

    fn wait(&self, _profile: usize, _turn: u32, age_s: f64) -> Wait {
        let weights: f64 = TOOLS.iter().map(|tool| tool.weight).sum();
        TOOLS.iter().fold(Wait { density_per_s: 0.0, longer: 0.0 }, |sum, tool| {
            let (density_per_s, longer) = lognormal_at(tool.duration_s.0, tool.duration_s.1, age_s);
            let share = tool.weight / weights;
            Wait {
                density_per_s: sum.density_per_s + share * density_per_s,
                longer: sum.longer + share * longer,
            }
        })
    }

    fn next(&self, profile: usize, turn: u32, draw: &mut Draw) -> Option<Step> {
        // The longest draw nothing more.
        if turn >= STEPS_MAX || !draw.happens(self.goes_on(profile, turn)) {
            return None;
        }
        let tool = &TOOLS[draw.pick(&TOOLS.each_ref().map(|tool| tool.weight))];
        Some(Step {
            gap_us: (draw.lognormal(tool.duration_s.0, tool.duration_s.1) * 1e6) as u64,
            own_tokens: draw.tokens(tool.result_tokens, 0.9, 4, 16_000),
            output_tokens: draw.tokens(OUTPUT_TOKENS, 0.9, 1, 4_000),
        })
    }
}
