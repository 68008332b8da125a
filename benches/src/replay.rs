//! The `kvfleet` program on generated traces: `kvfleet trace gen` and `kvfleet replay`, for benches
//! of real processes.
//!
//! Not here: the evaluation of a report (`overload.rs`, `prediction.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;

/// The `kvfleet` program beside the benches.
pub(crate) struct Program(PathBuf);

impl Program {
    /// Finds the program for this bench.
    pub(crate) fn find(bench: &str) -> anyhow::Result<Program> {
        let program = std::env::current_exe()?.with_file_name("kvfleet");
        ensure!(
            program.exists(),
            "{} is missing: run this bench by `cargo xtask bench {bench}`, which builds it",
            program.display()
        );
        Ok(Program(program))
    }

    /// Writes a generated trace of this kind, length and seed.
    pub(crate) fn generate(&self, kind: &str, requests: u64, seed: u64, trace: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(&self.0);
        command.args(["trace", "gen", "--kind", kind]);
        command.args(["--requests", &requests.to_string(), "--seed", &seed.to_string()]);
        run_command(command.arg("--output").arg(trace))
    }

    /// Replays a trace on a cluster, and returns the report from this folder.
    pub(crate) fn replay<R: DeserializeOwned>(
        &self,
        trace: &Path,
        folder: &Path,
        options: impl IntoIterator<Item = String>,
    ) -> anyhow::Result<R> {
        let mut command = Command::new(&self.0);
        command.arg("replay").arg(trace).args(options).arg("--quiet").arg("--report").arg(folder);
        // A replay with failed checks exits with an error too; its report shows the reason in its
        // row.
        let ended = run_command(&mut command);
        let Ok(text) = std::fs::read_to_string(folder.join("report.json")) else {
            return ended.and(Err(anyhow::anyhow!("the replay wrote no report")));
        };
        serde_json::from_str(&text).with_context(|| format!("unexpected report: {text}"))
    }
}

/// Runs a command and shows its output only on failure.
fn run_command(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().context("cannot start kvfleet")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{command:?} exited with {}:\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(())
}
