//! A side in a process of its own: told to go by a line, answers with a line what it took, stopped in between.
//!
//! Not here: what is compared (the parent module).

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, ensure};
use benches::spend;
use benches::ssd_tier::{RUN_BYTES, SHAPES, STOCK_BYTES, SsdTier};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::foyer::{Foyer, Io};

/// Which tier.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Side {
    Ours,
    FoyerUring,
    FoyerCalls,
}

/// What one run took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Took {
    pub(super) wall_s: f64,
    /// Of all threads of the process.
    pub(super) cpu_s: f64,
}

/// Runs a side over a shape until standard input ends.
pub(crate) fn serve(side: Side, shape: usize, dir: &Path) -> anyhow::Result<()> {
    let shape = SHAPES.get(shape).context("no such shape")?;
    std::fs::create_dir_all(dir)?;
    let count = RUN_BYTES / u64::from(shape.block_bytes);
    let mut go: Box<dyn FnMut() -> anyhow::Result<()>> = match side {
        Side::Ours => {
            let mut tier = SsdTier::open(shape, dir, STOCK_BYTES)?;
            Box::new(move || tier.go(shape, count))
        }
        Side::FoyerUring | Side::FoyerCalls => {
            let io = if matches!(side, Side::FoyerUring) { Io::Uring } else { Io::Calls };
            let mut foyer = Foyer::open(io, shape, dir, STOCK_BYTES)?;
            Box::new(move || foyer.go(shape, count))
        }
    };
    println!("ready");
    for line in std::io::stdin().lines() {
        line?;
        let (end, spent) = spend(&mut go);
        end?;
        let took = Took { wall_s: spent.wall.as_secs_f64(), cpu_s: spent.cpu.as_secs_f64() };
        println!("{}", serde_json::to_string(&took)?);
    }
    Ok(())
}

/// A side that can be told to go.
pub(super) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it and waits until its stock is there; stopped from then on.
    pub(super) fn start(side: Side, shape: usize, dir: &Path) -> anyhow::Result<Process> {
        let name = side.to_possible_value().context("a side has a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["tier-side", "--side", name.get_name(), "--shape", &shape.to_string(), "--data"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let mut process = Process { child, input, output };
        ensure!(process.line()? == "ready", "the side did not start");
        process.signal(Signal::STOP)?;
        Ok(process)
    }

    /// One run.
    pub(super) fn go(&mut self) -> anyhow::Result<Took> {
        self.signal(Signal::CONT)?;
        writeln!(self.input, "go")?;
        let took =
            serde_json::from_str(&self.line()?).context("the side ended early; what it said is above")?;
        self.signal(Signal::STOP)?;
        Ok(took)
    }

    pub(super) fn end(mut self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)?;
        drop(self.input);
        ensure!(self.child.wait()?.success(), "the side ended with an error");
        Ok(())
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_child(&self.child);
        Ok(kill_process(pid, signal)?)
    }
}
