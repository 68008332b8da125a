//! Processors that do not sleep while something is timed.
//!
//! Where a processor is a thread of a host, it is given back when nothing runs on it, and whoever is woken next waits until the host gives it again, with
//! caches that others have used meanwhile. Not here: what is timed.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rustix::thread::{CpuSet, sched_getaffinity};

/// Turns of a loop between two looks whether its bench is still there.
const SCRIPT: &str =
    "while kill -0 \"$1\" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done";

/// A loop on each processor that this process may use, which runs when nobody else wants it: until it is dropped.
pub(crate) struct Awake {
    loops: Vec<Child>,
}

impl Awake {
    /// Begins it.
    pub(crate) fn keep() -> anyhow::Result<Awake> {
        let mine = sched_getaffinity(None)?;
        let mut awake = Awake { loops: Vec::new() };
        for processor in (0..CpuSet::MAX_CPU).filter(|processor| mine.is_set(*processor)) {
            let mut command = Command::new("chrt");
            command.args(["--idle", "0", "taskset", "--cpu-list"]).arg(processor.to_string());
            command.args(["sh", "-c", SCRIPT, "sh"]).arg(std::process::id().to_string());
            let child = command.stdin(Stdio::null()).spawn();
            awake.loops.push(child.context("chrt and taskset of util-linux keep processors awake")?);
        }
        Ok(awake)
    }

    /// Ends it; an error if it did not run until now.
    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        for child in &mut self.loops {
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "a loop that keeps a processor awake ended by itself: {ended:?}");
        }
        Ok(())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for child in &mut self.loops {
            // One that has ended by itself needs no more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
