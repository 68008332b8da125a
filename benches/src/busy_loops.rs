//! Busy loops that keep the processors awake during measurements.
//!
//! An idle virtual processor returns to its host. A woken thread then waits for the host and finds
//! cold caches. Not here: the measurements.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rustix::thread::{CpuSet, sched_getaffinity};

/// A loop that checks now and then whether its bench still runs.
const SCRIPT: &str =
    "while kill -0 \"$1\" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done";

/// An idle-priority loop on each processor of this process, until dropped.
pub(crate) struct BusyLoops {
    loops: Vec<Child>,
}

impl BusyLoops {
    /// Starts the loops.
    pub(crate) fn start() -> anyhow::Result<BusyLoops> {
        let mine = sched_getaffinity(None)?;
        let mut busy = BusyLoops { loops: Vec::new() };
        for processor in (0..CpuSet::MAX_CPU).filter(|processor| mine.is_set(*processor)) {
            let mut command = Command::new("chrt");
            command.args(["--idle", "0", "taskset", "--cpu-list"]).arg(processor.to_string());
            command.args(["sh", "-c", SCRIPT, "sh"]).arg(std::process::id().to_string());
            let child = command.stdin(Stdio::null()).spawn();
            busy.loops
                .push(child.context("cannot start a busy loop: install chrt and taskset (util-linux)")?);
        }
        Ok(busy)
    }

    /// Stops the loops; an error if one exited early.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        for child in &mut self.loops {
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "a busy loop exited early: {ended:?}");
        }
        Ok(())
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for child in &mut self.loops {
            // A loop that already exited needs no kill.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
