//! `cargo xtask`: repository rules, benchmark tables, release builds, tables of eviction policies
//! and routers, generated reference pages, and fuzz targets.
//!
//! Not here: the rules (`tidy/`, one file per rule, each run as a test), the benches (`benches/`)
//! and the fuzz targets (`core/src/index/tests/fuzzing/`).

mod bench;
mod features;
mod fuzz;
mod plot;
mod reference;
mod replays;
mod shipped;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// Repository tasks.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Check every repository rule and print each violation.
    Tidy,
    /// Build and run one bench, or all of them into docs/measurements/.
    Bench(bench::BenchArgs),
    /// Build the release program with profile-guided optimisation.
    Dist(shipped::DistArgs),
    /// Check each crate with each combination of its features.
    Features(features::FeaturesArgs),
    /// Run the fuzz targets of the index for a while.
    Fuzz(fuzz::FuzzArgs),
    /// Write the generated pages of docs/reference/, and docs/SUMMARY.md.
    Reference,
    /// Replay every eviction policy on every trace, into docs/measurements/policies.md.
    Policies(replays::PoliciesArgs),
    /// Simulate fleets on every trace with every router, into docs/measurements/routers.md.
    Routers(replays::RoutersArgs),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Tidy => tidy::report(),
        Task::Bench(args) => bench::run(args),
        Task::Dist(args) => shipped::run(&args),
        Task::Features(args) => features::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Reference => reference::run(),
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
