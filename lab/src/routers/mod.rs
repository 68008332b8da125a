//! Routers of other systems for comparison with the production scheduler, each after its published
//! description, in its own file.
//!
//! Not here: the fleet, the trait of routers, and the production scheduler (`sim/src/routers/`).

mod compare;
mod dynamo;
mod goodput;
mod llm_d;
mod local_prefix;
mod mooncake;
mod oracle_gap;
mod power_of_two;
mod random;
mod round_robin;
mod sglang;
mod sticky;
mod threshold;

use kvfleet_sim::routers::{LeastLoaded, PRODUCTION, Production, Router};

pub use compare::{Comparison, LoadDraw, RouterResult, compare, median_and_range};
pub use goodput::{Goodput, GoodputResult, LatencyLimits, goodput};
pub use oracle_gap::{GapShares, Knowledge, KnowledgeResult, OracleGap, oracle_gap};
pub use threshold::ThresholdRouter;

/// Names of the baseline routers.
pub const BASELINES: [&str; 10] = [
    "random",
    "round-robin",
    "least-loaded",
    "local-prefix",
    "sticky",
    "power-of-two",
    "mooncake",
    "dynamo",
    "llm-d",
    "sglang",
];

/// A new router of this name; `seed` is for randomised ones.
#[must_use]
pub fn by_name(name: &str, seed: u64) -> Option<Box<dyn Router>> {
    Some(match name {
        PRODUCTION => Box::<Production>::default(),
        "random" => Box::new(random::Random::new(seed)),
        "round-robin" => Box::new(round_robin::RoundRobin::default()),
        "least-loaded" => Box::new(LeastLoaded),
        "local-prefix" => Box::new(local_prefix::LocalPrefix),
        "sticky" => Box::new(sticky::Sticky::default()),
        "power-of-two" => Box::new(power_of_two::PowerOfTwo::new(seed)),
        "mooncake" => Box::new(mooncake::Mooncake),
        "dynamo" => Box::new(dynamo::Dynamo),
        "llm-d" => Box::new(llm_d::LlmD),
        "sglang" => Box::new(sglang::Sglang),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
