//! The experiment of SG#39822 on our index: routers are restarted and killed under load, and no
//! decision is blind.
//!
//! `cargo nextest run -p chaos-tests --test decisions --no-capture` prints the rows. The table with
//! published figures comes from `cargo run -p chaos-tests --bin decisions`.

use std::path::Path;

use chaos_tests::decisions::table::{ResultRow, render};
use chaos_tests::decisions::{self, Experiment, Fault};
use chaos_tests::seed;

/// As many decisions as SG#39822 counted.
const DECISIONS: u64 = 2_000;

async fn row(fault: Fault, decisions: u64, fresh: bool) -> ResultRow {
    let seed = seed::run_seed();
    let experiment = Experiment { fault, decisions, fresh, seed };
    let row = decisions::run(Path::new(env!("CARGO_BIN_EXE_chaos-router")), experiment).await;
    let row = row.unwrap_or_else(|error| panic!("KVFLEET_SEED={seed}: {error}"));
    println!("{}", render(std::slice::from_ref(&row)));
    row
}

async fn assert_nothing_is_lost(fault: Fault) {
    let row = row(fault, DECISIONS, true).await;
    assert!(row.is_clean(), "{row:#?}");
    assert!(row.decisions >= DECISIONS && row.faults > 2, "too little happened: {row:#?}");
    assert!(row.empty_restarts > 2 && row.pins > 2, "too little happened: {row:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_decision_is_blind_when_routers_restart() {
    assert_nothing_is_lost(Fault::Restart).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_decision_is_blind_when_leaders_are_killed() {
    assert_nothing_is_lost(Fault::LeaderKill).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_decision_is_blind_when_a_minority_is_lost() {
    assert_nothing_is_lost(Fault::MinorityLoss).await;
}

/// The same experiment on routers that lose their state: it must detect that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn experiment_detects_an_index_that_loses_its_state() {
    let row = row(Fault::Forget, DECISIONS, true).await;
    assert!(row.blind > 0 && row.pins_lost > 0, "{row:#?}");
}
