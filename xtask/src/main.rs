//! `cargo xtask`: the repository's own rules, its benchmark tables, the program as it is shipped, the tables of its eviction policies and routers, and its
//! fuzz targets.
//!
//! Not here: what a rule says (`tidy/`, one file per rule, each run as a test), what a benchmark
//! measures (`benches/`) and what a target checks (`core/src/index/tests/fuzzing/`).

mod bench;
mod fuzz;
mod plot;
mod replays;
mod shipped;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// Repository tasks.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Check every repository rule and print each place that breaks one.
    Tidy,
    /// Build and run one bench, or all of them into docs/BENCHMARKS.md.
    Bench(bench::BenchArgs),
    /// Build the program as it is shipped.
    Dist(shipped::DistArgs),
    /// Run the fuzz targets of the index for a while.
    Fuzz(fuzz::FuzzArgs),
    /// Replay every eviction policy on every trace, into docs/POLICIES.md with plots.
    Policies(replays::PoliciesArgs),
    /// Serve every trace on fleets in virtual time by every router, into docs/ROUTERS.md.
    Routers(replays::RoutersArgs),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Tidy => tidy::report(),
        Task::Bench(args) => bench::run(args),
        Task::Dist(args) => shipped::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Policies(args) => replays::policies(&args),
        Task::Routers(args) => replays::routers(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
