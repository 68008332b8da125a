//! The consensus table: what restarts and kills of routers cost in decisions, beside what others published.
//!
//! `decisions [DECISIONS-PER-FAULT]`; the seed comes from `KVFLEET_SEED`. Exits with an error when any count that
//! must be zero is not. The two last rows are there to show what the experiment says of an index that forgets and
//! of readers that do not ask for what is committed now; they are not judged.

use chaos_tests::cluster::Trouble;
use chaos_tests::decisions::table::{Row, render};
use chaos_tests::decisions::{self, Experiment, Fault};
use chaos_tests::seed;

/// Decisions of each row, as many as SG#39822 counted.
const DECISIONS: u64 = 2_000;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Trouble> {
    let decisions = std::env::args().nth(1).map_or(Ok(DECISIONS), |text| text.parse())?;
    let seed = seed::of_this_run();
    let program = std::env::current_exe()?.with_file_name("chaos-router");
    let run =
        async |fault, fresh| decisions::run(&program, Experiment { fault, decisions, fresh, seed }).await;
    let mut rows = Vec::new();
    for fault in [Fault::Restart, Fault::LeaderKill, Fault::MinorityLoss] {
        rows.push(run(fault, true).await?);
    }
    let is_clean = rows.iter().all(Row::is_clean);
    let stale = Row { fault: "leader kill, read not fresh", ..run(Fault::LeaderKill, false).await? };
    rows.extend([stale, run(Fault::Forget, true).await?]);
    print!("{}", render(&rows));
    for row in &rows {
        if let Some(first) = &row.first_blind {
            println!("first blind decision, {}: {first}", row.fault);
        }
    }
    if is_clean { Ok(()) } else { Err("a count that must be zero is not".into()) }
}
