//! One child process: start, READY line, kill, clean stop.
//!
//! Not here: the set of children, and their configurations.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, timeout_at};

use super::{ChildId, process_name};
use crate::process::ReadyLine;

/// Longest time until a child is ready. Generous, because a loaded machine must first read back its
/// data.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Log lines that are shown when a child fails.
const LOG_LINES_SHOWN: usize = 5;

/// Why a child does not run.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The process could not be created.
    #[error("cannot start {name} ({}): {cause}", binary.display())]
    Spawn {
        /// Name of the child.
        name: String,
        /// Path of the program.
        binary: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// It exited, or printed something else, before it was ready.
    #[error("{name} did not start ({reason}): {log_tail}\n  full log: {}", log.display())]
    NotReady {
        /// Name of the child.
        name: String,
        /// Exit status or other reason.
        reason: String,
        /// Last lines of its log.
        log_tail: String,
        /// Path of its log.
        log: PathBuf,
    },
}

impl ChildError {
    /// Whether its port was in use.
    #[must_use]
    pub fn is_port_taken(&self) -> bool {
        matches!(self, ChildError::NotReady { log_tail, .. } if log_tail.contains("in use"))
    }
}

/// A child process, running or not.
#[derive(Debug)]
pub struct Child {
    name: String,
    log: PathBuf,
    process: tokio::process::Child,
    /// Kept open: the child stops when this end closes.
    stdin_pipe: Option<ChildStdin>,
    stdout: Option<BufReader<ChildStdout>>,
    ready: Option<ReadyLine>,
    stop_requested: bool,
}

impl Child {
    /// Starts `binary ROLE --config CONFIG` with its log in `log`.
    pub(super) fn spawn(binary: &Path, id: ChildId, config: &Path, log: &Path) -> Result<Self, ChildError> {
        let fail = |cause| ChildError::Spawn { name: process_name(id), binary: binary.to_owned(), cause };
        let errors = open_log(log).map_err(fail)?;
        let mut process = Command::new(binary)
            .arg(id.0.name())
            .arg("--config")
            .arg(config)
            .arg("--follow-parent")
            .env_clear()
            .envs(std::env::vars().filter(|(variable, _)| !variable.starts_with("KVFLEET_")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            // Own process group, so that Ctrl-C reaches only the parent, which stops the children
            // in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(fail)?;
        Ok(Self {
            name: process_name(id),
            log: log.to_owned(),
            stdin_pipe: process.stdin.take(),
            stdout: process.stdout.take().map(BufReader::new),
            process,
            ready: None,
            stop_requested: false,
        })
    }

    /// Waits for the READY line.
    pub(super) async fn wait_ready(&mut self) -> Result<(), ChildError> {
        let mut line = String::new();
        let Some(said) = self.stdout.as_mut() else { return Ok(()) };
        let read = timeout_at(Instant::now() + READY_TIMEOUT, said.read_line(&mut line)).await;
        let how = match read {
            Ok(Ok(_)) => match ReadyLine::parse(&line) {
                Ok(ready) => {
                    self.ready = Some(ready);
                    return Ok(());
                }
                Err(_) if line.is_empty() => self.exit_description().await,
                Err(error) => error.to_string(),
            },
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => format!("no READY line within {READY_TIMEOUT:?}"),
        };
        Err(ChildError::NotReady {
            name: self.name.clone(),
            reason: how,
            log_tail: self.log_tail(),
            log: self.log.clone(),
        })
    }

    async fn exit_description(&mut self) -> String {
        const AFTER_STDOUT_CLOSED: Duration = Duration::from_secs(5);
        match tokio::time::timeout(AFTER_STDOUT_CLOSED, self.process.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            _ => "it closed its standard output".to_owned(),
        }
    }

    fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
        if shown.is_empty() { "its log is empty".to_owned() } else { shown.join("\n  ") }
    }

    /// READY line, once it is ready.
    #[must_use]
    pub fn ready(&self) -> Option<&ReadyLine> {
        self.ready.as_ref()
    }

    /// Process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Whether it was neither killed nor stopped.
    #[must_use]
    pub fn should_run(&self) -> bool {
        !self.stop_requested
    }

    /// CPU time used so far; `None` after its end.
    #[must_use]
    pub fn cpu_time(&self) -> Option<Duration> {
        self.pid().and_then(cpu_time_of)
    }

    /// Peak resident memory so far, in bytes; `None` after its end.
    #[must_use]
    pub fn peak_memory(&self) -> Option<u64> {
        self.pid().and_then(|pid| kvfleet_node::memory::peak_bytes(&pid.to_string()))
    }

    /// Exit status if it ended without a request.
    pub(super) fn crashed(&mut self) -> Option<ExitStatus> {
        if self.stop_requested {
            return None;
        }
        self.process.try_wait().ok().flatten()
    }

    /// Sends SIGKILL and reaps the process. Returns the time of the signal.
    pub(super) async fn kill(&mut self) -> std::io::Result<std::time::Instant> {
        self.stop_requested = true;
        let at = std::time::Instant::now();
        self.process.start_kill()?;
        self.process.wait().await?;
        Ok(at)
    }

    /// Sends SIGKILL without waiting; has no effect after its end.
    pub(super) fn kill_now(&mut self) {
        self.stop_requested = true;
        // Fails only if it has already ended.
        let _ = self.process.start_kill();
    }

    /// Waits without a runtime until it has ended and is reaped, at most for `patience`.
    pub(super) fn reap_now(&mut self, patience: Duration) {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let begun = std::time::Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && begun.elapsed() < patience {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends SIGTERM, then SIGKILL after `grace`, and reaps the process.
    pub(super) async fn stop(&mut self, grace: Duration) {
        self.stop_requested = true;
        if let Some(pid) = self.pid().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            // It may have ended in between; waiting below reaps it in any case.
            let _ = kill_process(pid, Signal::TERM);
        }
        self.stdin_pipe = None;
        if tokio::time::timeout(grace, self.process.wait()).await.is_err() {
            tracing::warn!(child = self.name, "did not stop in time; killing it");
            let _ = self.process.kill().await;
        }
    }
}

/// CPU time of a process, user and system.
pub(crate) fn cpu_time_of(pid: u32) -> Option<Duration> {
    /// Linux reports process times in hundredths of a second on every architecture.
    const TICKS_PER_S: u64 = 100;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, a name in brackets, may contain spaces; later fields are counted after it.
    let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 1000 / TICKS_PER_S))
}

fn open_log(log: &Path) -> std::io::Result<File> {
    if let Some(directory) = log.parent() {
        std::fs::create_dir_all(directory)?;
    }
    File::options().create(true).append(true).open(log)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn cpu_time_grows() {
        let before = cpu_time_of(std::process::id()).unwrap();
        let mut sum = 0u64;
        while cpu_time_of(std::process::id()).unwrap() == before {
            sum = (0..1_000_000).fold(sum, u64::wrapping_add);
        }
        assert!(cpu_time_of(std::process::id()).unwrap() > before, "{sum}");
        assert_eq!(cpu_time_of(u32::MAX), None);
    }
}
