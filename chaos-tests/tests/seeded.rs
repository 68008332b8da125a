//! Seeded runs against real router processes: leaders and whole clusters are killed while nodes
//! announce, join and fall silent. Afterwards everything acknowledged must be present.
//!
//! Not here: the properties, one file each in `chaos-tests/src/invariants/`.

use std::path::Path;

use chaos_tests::{drive, seed, workload};

/// Steps of a run: enough for about ten kills and as many node restarts.
const STEPS: usize = 160;

/// Runs per test, each with its own seed; `KVFLEET_SEED` sets the first one.
const RUNS: u64 = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_when_routers_die() {
    let first = seed::run_seed();
    for run in 0..RUNS {
        let seed = first.wrapping_add(run);
        let plan = workload::plan(seed, STEPS);
        let tally = drive::run(Path::new(env!("CARGO_BIN_EXE_chaos-router")), &plan).await;
        let tally = tally.unwrap_or_else(|error| panic!("KVFLEET_SEED={seed}: {error}"));
        println!("seed {seed}: {tally:?}");
        assert!(tally.kills > 3 && tally.epochs > 4, "seed {seed}: too little happened: {tally:?}");
    }
}
