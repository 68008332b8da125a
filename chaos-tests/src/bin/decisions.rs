//! The consensus table: the cost of router restarts and kills in decisions, next to published
//! figures.
//!
//! `decisions [DECISIONS-PER-FAULT]`; the seed comes from `KVFLEET_SEED`. Exits with an error if
//! any count that must be zero is not. The last two rows are references: an index that loses its
//! state, and readers without `fresh`. They are not checked.

use chaos_tests::cluster::SuiteError;
use chaos_tests::decisions::table::{ResultRow, render};
use chaos_tests::decisions::{self, Experiment, Fault};
use chaos_tests::seed;

/// Decisions of each row, as many as SG#39822 counted.
const DECISIONS: u64 = 2_000;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), SuiteError> {
    let decisions = std::env::args().nth(1).map_or(Ok(DECISIONS), |text| text.parse())?;
    let seed = seed::run_seed();
    let program = std::env::current_exe()?.with_file_name("chaos-router");
    let run =
        async |fault, fresh| decisions::run(&program, Experiment { fault, decisions, fresh, seed }).await;
    let mut rows = Vec::new();
    for fault in [Fault::Restart, Fault::LeaderKill, Fault::MinorityLoss] {
        rows.push(run(fault, true).await?);
    }
    let is_clean = rows.iter().all(ResultRow::is_clean);
    let stale = ResultRow { fault: "leader kill, read not fresh", ..run(Fault::LeaderKill, false).await? };
    rows.extend([stale, run(Fault::Forget, true).await?]);
    print!("{}", render(&rows));
    for row in &rows {
        if let Some(first) = &row.first_blind {
            println!("first blind decision, {}: {first}", row.fault);
        }
    }
    if is_clean { Ok(()) } else { Err("a count that must be zero is not".into()) }
}
