//! `cargo xtask fuzz`: builds the fuzz targets of the index and runs them for a given time, on any
//! compiler.
//!
//! Not here: the targets (`core/src/index/tests/fuzzing`) and the clock of their driver
//! (`fuzz/src/main.rs`).

use anyhow::Context;

use crate::bench::{cargo, target};

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct FuzzArgs {
    /// Target to run: commands, codec or snapshot; by default all.
    target: Option<String>,
    /// Total time for all targets, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// First seed; by default from the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// Run only this case, as a failure printed it.
    #[arg(long, value_name = "HEX")]
    case: Option<String>,
}

/// Runs the driver.
///
/// # Errors
/// If the driver cannot start or finds a failure.
pub(crate) fn run(args: &FuzzArgs) -> anyhow::Result<()> {
    let mut command = cargo();
    // A separate target folder: the feature for fuzz targets changes the build of the index.
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
