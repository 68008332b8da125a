//! `cargo xtask`: the repository's own rules and its benchmark tables.
//!
//! Not here: what a rule says (`tidy/`, one file per rule, each run as a test) and what a benchmark
//! measures (`benches/`).

mod bench;
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
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Tidy => tidy::report(),
        Task::Bench(args) => bench::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
