//! Three routers, each a process of the built `kvfleet`, under the load of `chaos-ingest`, which prints figures.
//!
//! The load is a program of the repository's workspace, and not linked here: this package has other versions of
//! what both would need. Not here: what the load is (`chaos-tests/src/bin/chaos-ingest/`).

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::Setup;

/// What runs our side, built for release.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// `chaos-ingest`.
    pub(crate) ingest: PathBuf,
    /// `kvfleet`.
    pub(crate) router: PathBuf,
}

/// The figures of one round that rows are made of.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Ours {
    /// Stored and dropped.
    pub(crate) blocks_per_second: f64,
    pub(crate) stored_per_second: f64,
    pub(crate) visible_p99_us: f64,
    pub(crate) half_visible_p99_us: f64,
    pub(crate) pin_p50_us: f64,
    pub(crate) pin_p99_us: f64,
    pub(crate) unreplicated_blocks_per_second: f64,
}

/// Runs all rounds, each with a cluster of its own.
pub(super) fn rounds(programs: &Programs, setup: &Setup) -> anyhow::Result<Vec<Ours>> {
    (0..setup.rounds).map(|_| round(programs, setup)).collect()
}

fn round(programs: &Programs, setup: &Setup) -> anyhow::Result<Ours> {
    let mut command = Command::new(&programs.ingest);
    command.arg(&programs.router).arg(setup.span.as_secs().to_string());
    // Where it keeps what routers write.
    command.env("TMPDIR", &setup.data).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {}", programs.ingest.display()))?;
    ensure!(output.status.success(), "{} ended with {}", programs.ingest.display(), output.status);
    let ours: Ours = serde_json::from_slice(&output.stdout).context("the load printed something else")?;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_load_is_read() {
        let line = r#"{"blocks_per_second": 2000000, "stored_per_second": 1000000, "routers_us_per_block": 0.9,
            "visible_p99_us": 90000, "half_visible_p99_us": 20000, "pin_p50_us": 300, "pin_p99_us": 900,
            "unreplicated_blocks_per_second": 9000000}"#;
        let ours: Ours = serde_json::from_str(line).expect("all figures are there");
        assert_eq!((ours.pin_p50_us, ours.stored_per_second), (300.0, 1e6));
        assert!(serde_json::from_str::<Ours>(&line.replace("pin_p99_us", "pin")).is_err());
    }
}
