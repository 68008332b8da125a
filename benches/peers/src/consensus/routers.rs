//! Three router processes of the built `kvfleet`, loaded by `chaos-ingest`, which prints the
//! figures.
//!
//! The load generator belongs to the repository's workspace. It is not linked here, because this
//! package pins other versions of common dependencies. Not here: the load itself
//! (`chaos-tests/src/bin/chaos-ingest/`).

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::Setup;

/// Release programs of the kvfleet side.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// `chaos-ingest`.
    pub(crate) ingest: PathBuf,
    /// `kvfleet`.
    pub(crate) router: PathBuf,
}

/// The figures of one round.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct RouterFigures {
    /// Stored and dropped blocks.
    pub(crate) blocks_per_second: f64,
    pub(crate) stored_per_second: f64,
    pub(crate) visible_p99_us: f64,
    pub(crate) half_visible_p99_us: f64,
    pub(crate) pin_p50_us: f64,
    pub(crate) pin_p99_us: f64,
    pub(crate) unreplicated_blocks_per_second: f64,
}

/// Runs all rounds, each with a new cluster.
pub(super) fn rounds(programs: &Programs, setup: &Setup) -> anyhow::Result<Vec<RouterFigures>> {
    (0..setup.rounds).map(|_| round(programs, setup)).collect()
}

fn round(programs: &Programs, setup: &Setup) -> anyhow::Result<RouterFigures> {
    let mut command = Command::new(&programs.ingest);
    command.arg(&programs.router).arg(setup.span.as_secs().to_string());
    // Directory for the routers' files.
    command.env("TMPDIR", &setup.data).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {}", programs.ingest.display()))?;
    ensure!(output.status.success(), "{} exited with {}", programs.ingest.display(), output.status);
    let ours: RouterFigures =
        serde_json::from_slice(&output.stdout).context("unexpected output from the load generator")?;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_line_of_the_load() {
        let line = r#"{"blocks_per_second": 2000000, "stored_per_second": 1000000, "routers_us_per_block": 0.9,
            "visible_p99_us": 90000, "half_visible_p99_us": 20000, "pin_p50_us": 300, "pin_p99_us": 900,
            "unreplicated_blocks_per_second": 9000000}"#;
        let ours: RouterFigures = serde_json::from_str(line).expect("all figures are present");
        assert_eq!((ours.pin_p50_us, ours.stored_per_second), (300.0, 1e6));
        assert!(serde_json::from_str::<RouterFigures>(&line.replace("pin_p99_us", "pin")).is_err());
    }
}
