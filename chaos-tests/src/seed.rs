//! Seed of a run: from `KVFLEET_SEED`, or fresh and printed.
//!
//! Not here: the random choices (`workload.rs`).

use std::time::{SystemTime, UNIX_EPOCH};

/// Environment variable that sets the seed of a run.
pub const SEED_VARIABLE: &str = "KVFLEET_SEED";

/// The seed of this run, printed so that a failure can be reproduced.
///
/// # Panics
/// If the variable is not a number.
#[must_use]
pub fn run_seed() -> u64 {
    let seed = match std::env::var(SEED_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={text} is not a number")),
        Err(_) => fresh(),
    };
    println!("seed {seed}: run again with {SEED_VARIABLE}={seed}");
    seed
}

/// A seed that differs from run to run.
fn fresh() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::from(since.subsec_nanos()) ^ since.as_secs().rotate_left(20)
}
