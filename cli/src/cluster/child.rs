//! One child process: start, READY line, kill, clean stop.
//!
//! Not here: which children a cluster has and what their configurations say.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, timeout_at};

use super::{ChildId, name};
use crate::process::Ready;

/// How long a child may take until it serves. Generous: a loaded machine reads its data back first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Lines of a child's log that are shown when it fails.
const LOG_LINES_SHOWN: usize = 5;

/// Why a child does not run.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The system did not start it.
    #[error("cannot start {name} ({}): {cause}", binary.display())]
    Spawn {
        /// Which child.
        name: String,
        /// What was to be run.
        binary: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// It ended, or said something else, before it served.
    #[error("{name} did not start ({how}): {said}\n  full log: {}", log.display())]
    NotReady {
        /// Which child.
        name: String,
        /// How it ended.
        how: String,
        /// Last lines of its log.
        said: String,
        /// Its log.
        log: PathBuf,
    },
}

impl ChildError {
    /// Whether it failed because something else listens on its port.
    #[must_use]
    pub fn is_port_taken(&self) -> bool {
        matches!(self, ChildError::NotReady { said, .. } if said.contains("in use"))
    }
}

/// A child process, running or not.
#[derive(Debug)]
pub struct Child {
    name: String,
    log: PathBuf,
    process: tokio::process::Child,
    /// Kept open: the child stops when this end closes.
    follows: Option<ChildStdin>,
    said: Option<BufReader<ChildStdout>>,
    ready: Option<Ready>,
    asked_to_end: bool,
}

impl Child {
    /// Starts `binary ROLE --config CONFIG`, its log going to `log`.
    pub(super) fn spawn(binary: &Path, id: ChildId, config: &Path, log: &Path) -> Result<Self, ChildError> {
        let fail = |cause| ChildError::Spawn { name: name(id), binary: binary.to_owned(), cause };
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
            // Ctrl-C goes to this process only: it stops the children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(fail)?;
        Ok(Self {
            name: name(id),
            log: log.to_owned(),
            follows: process.stdin.take(),
            said: process.stdout.take().map(BufReader::new),
            process,
            ready: None,
            asked_to_end: false,
        })
    }

    /// Waits for the READY line.
    pub(super) async fn wait_ready(&mut self) -> Result<(), ChildError> {
        let mut line = String::new();
        let Some(said) = self.said.as_mut() else { return Ok(()) };
        let read = timeout_at(Instant::now() + READY_TIMEOUT, said.read_line(&mut line)).await;
        let how = match read {
            Ok(Ok(_)) => match Ready::parse(&line) {
                Ok(ready) => {
                    self.ready = Some(ready);
                    return Ok(());
                }
                Err(_) if line.is_empty() => self.how_it_ended().await,
                Err(error) => error.to_string(),
            },
            Ok(Err(cause)) => cause.to_string(),
            Err(_) => format!("no READY line after {READY_TIMEOUT:?}"),
        };
        Err(ChildError::NotReady {
            name: self.name.clone(),
            how,
            said: self.last_words(),
            log: self.log.clone(),
        })
    }

    async fn how_it_ended(&mut self) -> String {
        const AFTER_STDOUT_CLOSED: Duration = Duration::from_secs(5);
        match tokio::time::timeout(AFTER_STDOUT_CLOSED, self.process.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            _ => "it closed its output".to_owned(),
        }
    }

    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
        if shown.is_empty() { "it wrote nothing".to_owned() } else { shown.join("\n  ") }
    }

    /// Addresses and number, once it serves.
    #[must_use]
    pub fn ready(&self) -> Option<&Ready> {
        self.ready.as_ref()
    }

    /// Process number while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Whether it was neither killed nor stopped.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.asked_to_end
    }

    /// Processor time used so far; nothing once it has ended.
    #[must_use]
    pub fn cpu_time(&self) -> Option<Duration> {
        self.pid().and_then(cpu_time_of)
    }

    /// Most memory it had in place so far, in bytes; nothing once it has ended.
    #[must_use]
    pub fn peak_memory(&self) -> Option<u64> {
        self.pid().and_then(|pid| kvfleet_node::memory::peak_bytes(&pid.to_string()))
    }

    /// How it ended, when nobody asked it to.
    pub(super) fn crashed(&mut self) -> Option<ExitStatus> {
        if self.asked_to_end {
            return None;
        }
        self.process.try_wait().ok().flatten()
    }

    /// SIGKILL, then reap. Returns the moment the signal was sent.
    pub(super) async fn kill(&mut self) -> std::io::Result<std::time::Instant> {
        self.asked_to_end = true;
        let at = std::time::Instant::now();
        self.process.start_kill()?;
        self.process.wait().await?;
        Ok(at)
    }

    /// SIGKILL without waiting. Harmless when it has ended.
    pub(super) fn kill_now(&mut self) {
        self.asked_to_end = true;
        // The only failure is that it has ended already.
        let _ = self.process.start_kill();
    }

    /// Waits, without a runtime, until it has ended and is reaped; gives up after `patience`.
    pub(super) fn reap_now(&mut self, patience: Duration) {
        const LOOK_EVERY: Duration = Duration::from_millis(1);
        let begun = std::time::Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && begun.elapsed() < patience {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// SIGTERM, then SIGKILL after `grace`; reaped in both cases.
    pub(super) async fn stop(&mut self, grace: Duration) {
        self.asked_to_end = true;
        if let Some(pid) = self.pid().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            // It may have ended between the two lines; waiting below reaps it either way.
            let _ = kill_process(pid, Signal::TERM);
        }
        self.follows = None;
        if tokio::time::timeout(grace, self.process.wait()).await.is_err() {
            tracing::warn!(child = self.name, "did not stop in time: killed");
            let _ = self.process.kill().await;
        }
    }
}

/// Processor time of a process, user and system.
pub(crate) fn cpu_time_of(pid: u32) -> Option<Duration> {
    /// Linux shows process times to programs in hundredths of a second on every architecture.
    const TICKS_PER_S: u64 = 100;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in brackets and may hold spaces; fields are counted behind it.
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
    fn processor_time_of_this_process_grows() {
        let before = cpu_time_of(std::process::id()).unwrap();
        let mut sum = 0u64;
        while cpu_time_of(std::process::id()).unwrap() == before {
            sum = (0..1_000_000).fold(sum, u64::wrapping_add);
        }
        assert!(cpu_time_of(std::process::id()).unwrap() > before, "{sum}");
        assert_eq!(cpu_time_of(u32::MAX), None);
    }
}
