//! A side in a separate process: a line starts a run, a line reports its times, and the process is
//! stopped in between.
//!
//! Not here: the comparison (the parent module).

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, ensure};
use benches::measure_time;
use benches::ssd_tier::{RUN_BYTES, SHAPES, STOCK_BYTES, SsdTierBench};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::foyer::{Foyer, IoEngine};

/// The tier to run.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TierKind {
    Ours,
    FoyerUring,
    FoyerCalls,
}

/// Times of one run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RunTimes {
    pub(super) wall_s: f64,
    /// CPU time of all threads of the process.
    pub(super) cpu_s: f64,
}

/// Serves runs of a shape until standard input closes.
pub(crate) fn serve(side: TierKind, shape: usize, dir: &Path) -> anyhow::Result<()> {
    let shape = SHAPES.get(shape).context("no such shape")?;
    std::fs::create_dir_all(dir)?;
    let count = RUN_BYTES / u64::from(shape.block_bytes);
    let mut go: Box<dyn FnMut() -> anyhow::Result<()>> = match side {
        TierKind::Ours => {
            let mut tier = SsdTierBench::open(shape, dir, STOCK_BYTES)?;
            Box::new(move || tier.run(shape, count))
        }
        TierKind::FoyerUring | TierKind::FoyerCalls => {
            let io = if matches!(side, TierKind::FoyerUring) { IoEngine::Uring } else { IoEngine::Psync };
            let mut foyer = Foyer::open(io, shape, dir, STOCK_BYTES)?;
            Box::new(move || foyer.run(shape, count))
        }
    };
    println!("ready");
    for line in std::io::stdin().lines() {
        line?;
        let (end, spent) = measure_time(&mut go);
        end?;
        let took = RunTimes { wall_s: spent.wall.as_secs_f64(), cpu_s: spent.cpu.as_secs_f64() };
        println!("{}", serde_json::to_string(&took)?);
    }
    Ok(())
}

/// A side's process.
pub(super) struct TierProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl TierProcess {
    /// Starts the process, waits until its stock is written, and stops it.
    pub(super) fn start(side: TierKind, shape: usize, dir: &Path) -> anyhow::Result<TierProcess> {
        let name = side.to_possible_value().context("a side has a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["tier-side", "--side", name.get_name(), "--shape", &shape.to_string(), "--data"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().context("the process has no standard input")?;
        let output = BufReader::new(child.stdout.take().context("the process has no standard output")?);
        let mut process = TierProcess { child, input, output };
        ensure!(process.line()? == "ready", "the side did not start");
        process.signal(Signal::STOP)?;
        Ok(process)
    }

    /// One run.
    pub(super) fn run(&mut self) -> anyhow::Result<RunTimes> {
        self.signal(Signal::CONT)?;
        writeln!(self.input, "go")?;
        let took =
            serde_json::from_str(&self.line()?).context("the side ended early; see its output above")?;
        self.signal(Signal::STOP)?;
        Ok(took)
    }

    pub(super) fn end(mut self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)?;
        drop(self.input);
        ensure!(self.child.wait()?.success(), "the side exited with an error");
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
