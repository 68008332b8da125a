//! `cargo xtask policies` and `cargo xtask routers`: every eviction policy and every router on every trace, into `docs/POLICIES.md` with plots and
//! `docs/ROUTERS.md`.
//!
//! Not here: the replays (`kvfleet trace policies` and `trace routers`, which this runs) and how fast one of them decides (`cargo xtask bench`).

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;

use crate::bench::{cargo, root};

/// The recorded trace; without it only generated traffic is replayed.
const TRACE: &str = "mooncake_conversation_trace.jsonl";

/// What to replay.
#[derive(Args, Debug)]
pub(crate) struct ReplaysArgs {
    /// Options of `kvfleet trace policies` or `trace routers`, such as `--json`; behind `--`.
    #[arg(last = true)]
    options: Vec<String>,
}

/// Replays and writes.
///
/// # Errors
/// When the command does not build or fails.
pub(crate) fn run(what: &str, args: &ReplaysArgs) -> anyhow::Result<()> {
    let folder =
        std::env::var_os("KVFLEET_TRACES").map_or_else(|| root().join("../shared/traces"), PathBuf::from);
    let trace = std::path::absolute(folder.join(TRACE))?;
    let mut command = cargo();
    // The profile of the tests: who has run them has it built, and the figures do not depend on it.
    command.args(["run", "--quiet", "--profile", "chaos", "--package", "kvfleet", "--bin", "kvfleet", "--"]);
    command.args(["trace", what, "--out", "docs"]);
    if trace.exists() {
        command.arg(trace);
    } else {
        eprintln!("SKIPPED: {} is absent; put the trace there or set KVFLEET_TRACES", trace.display());
    }
    let status = command.args(&args.options).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the replays ended with {status}; what they said is above");
    }
    Ok(())
}
