//! Arguments of `replay` and `demo`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::admin::TargetArgs;
use super::cluster::{ShapeArgs, block_tokens_parser};
use super::faults::FaultSpec;
use super::trace::TraceFormat;

/// Pace at which requests start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// As fast as the cluster answers.
    Max,
    /// This many times faster than the trace's timestamps.
    Times(f64),
}

/// Slowest pace: a minute of the trace takes most of a day.
const TIMES_MIN: f64 = 0.001;

/// Fastest pace: a month of the trace takes seconds, like `max`.
const TIMES_MAX: f64 = 1_000_000.0;

impl FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "max" {
            return Ok(Speed::Max);
        }
        let number = text.trim_end_matches(['x', 'X', '×']);
        match number.parse::<f64>() {
            Ok(times) if (TIMES_MIN..=TIMES_MAX).contains(&times) => Ok(Speed::Times(times)),
            _ => Err(format!(
                "`{text}` is not a speed: expected max, or a number like 10x from {TIMES_MIN}x to {TIMES_MAX}x"
            )),
        }
    }
}

impl std::fmt::Display for Speed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Speed::Max => f.write_str("max"),
            Speed::Times(times) => write!(f, "{times}x"),
        }
    }
}

/// `kvfleet replay TRACE`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// The trace: one JSON object per line.
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Format of the trace.
    #[arg(long, value_enum, default_value_t = TraceFormat::Auto)]
    pub format: TraceFormat,
    /// Skip malformed lines and count them, instead of stopping at the first.
    #[arg(long)]
    pub lenient: bool,
    /// Serve only the first N requests.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// The cluster to start; ignored with --cluster.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// A running cluster to use instead of starting one.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Start requests as fast as possible (max), or N times as fast as the trace (10x).
    #[arg(long, default_value = "max")]
    pub speed: Speed,
    /// Requests in flight at the same time.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub concurrency: u16,
    /// Serve one request after the other, in the trace's order. This is the default with bounded
    /// capacity, unless --no-sequential is set.
    #[arg(long, overrides_with = "no_sequential")]
    pub sequential: bool,
    /// Serve requests concurrently even with bounded capacity; hit rates then vary between runs.
    #[arg(long)]
    pub no_sequential: bool,
    /// Kill a process (SIGKILL) at a share of the requests: node:2@30%, router-leader@50%.
    #[arg(long, value_name = "PROCESS@PERCENT")]
    pub kill: Vec<FaultSpec>,
    /// Start a process again: node:2@60%.
    #[arg(long, value_name = "PROCESS@PERCENT")]
    pub restart: Vec<FaultSpec>,
    /// Seed of the pauses between repeated route calls, the only random part of a replay. The
    /// timing of processes is not reproducible.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Tenant of the requests.
    #[arg(long, default_value_t = 0)]
    pub tenant: u32,
    /// Tokens of one block; by default those of the format (512 for Mooncake, 16 for Bailian).
    #[arg(long, value_name = "N", value_parser = block_tokens_parser())]
    pub block_tokens: Option<u32>,
    /// Least time for a fetch before it counts as a miss, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    pub fetch_floor_ms: u64,
    /// Write report.json and plots into this directory.
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// No progress bar.
    #[arg(long)]
    pub quiet: bool,
    /// Also print which transport path each instance uses to each node, and why.
    #[arg(long)]
    pub verbose: bool,
}

/// `kvfleet demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Requests of the generated trace.
    #[arg(long, default_value_t = 1500)]
    pub requests: usize,
    /// Seed of the generated trace, and of its replay.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Directory for the report and plots.
    #[arg(long, value_name = "DIR", default_value = "kvfleet-demo")]
    pub report: PathBuf,
    /// No progress bar.
    #[arg(long)]
    pub quiet: bool,
    /// Also print which transport path each instance uses to each node, and why.
    #[arg(long)]
    pub verbose: bool,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parses_and_formats_speeds() {
        assert_eq!("max".parse::<Speed>().unwrap(), Speed::Max);
        assert_eq!("10x".parse::<Speed>().unwrap(), Speed::Times(10.0));
        assert_eq!("2.5×".parse::<Speed>().unwrap(), Speed::Times(2.5));
        for text in ["0x", "-1x", "fast", "infx", "", "1e-300x", "1e300x", "NaNx"] {
            assert!(text.parse::<Speed>().unwrap_err().contains("expected max"), "{text}");
        }
    }
}
