//! `cargo xtask fuzz`: builds the fuzz targets of the index and runs them for a while, on any compiler.
//!
//! Not here: the targets (`core/src/index/tests/fuzzing`) and their driver's clock (`fuzz/src/main.rs`).

use anyhow::Context;

use crate::bench::{cargo, target};

/// What to run, and for how long.
#[derive(clap::Args)]
pub(crate) struct FuzzArgs {
    /// commands, codec or snapshot; all of them unless named.
    target: Option<String>,
    /// Time for all targets together.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The seed to begin with; from the clock unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs this one case instead, as a failure printed it.
    #[arg(long, value_name = "HEX")]
    case: Option<String>,
}

/// Runs the driver; fails when it found something.
pub(crate) fn run(args: &FuzzArgs) -> anyhow::Result<()> {
    let mut command = cargo();
    // Apart from other builds: the index is another one with its targets.
    command.env("CARGO_TARGET_DIR", target().join("fuzz"));
    command.args(["run", "--quiet", "--release", "--locked", "--manifest-path", "fuzz/Cargo.toml"]);
    command.args(["--bin", "drive", "--", "--seconds", &args.seconds.to_string()]);
    if let Some(seed) = args.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    if let Some(case) = &args.case {
        command.args(["--case", case]);
    }
    let status = command.args(&args.target).status().context("cannot start cargo")?;
    anyhow::ensure!(status.success(), "the fuzz driver ended with {status}");
    Ok(())
}
