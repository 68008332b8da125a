//! Arguments of `crosscheck`.

use std::path::PathBuf;

use clap::Args;
use kvfleet_sim::generate::Kind;

use super::cluster::{ShapeArgs, block_tokens};
use super::trace::{TraceFormat, kind};

/// `kvfleet crosscheck`.
#[derive(Clone, Debug, Args)]
pub struct CrosscheckArgs {
    /// The trace: one JSON object a line. Without it one is generated for each run.
    #[arg(value_name = "TRACE")]
    pub trace: Option<PathBuf>,
    /// Format of the trace.
    #[arg(long, value_enum, default_value_t = TraceFormat::Auto)]
    pub format: TraceFormat,
    /// Tokens of one block; by default what the format says.
    #[arg(long, value_name = "N", value_parser = block_tokens())]
    pub block_tokens: Option<u32>,
    /// Kind of the generated traces: consumer, business or agent.
    #[arg(long, default_value = "business", value_parser = kind)]
    pub kind: Kind,
    /// Requests of each run.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Runs, each on a cluster of its own: generated traces with as many seeds, or the same trace again.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub runs: u32,
    /// Seed of the first run; the others have those behind it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The cluster to start, and to have in virtual time.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// One request after the other, each finished and known everywhere before the next comes, so that timing plays no part. Without it requests come at
    /// their times, and --time-scale says how long computing takes.
    #[arg(long)]
    pub lockstep: bool,
    /// Load, as a share of what the fleet in virtual time gets through.
    #[arg(long, value_name = "SHARE", default_value_t = 0.7, value_parser = super::trace::share, conflicts_with = "lockstep")]
    pub load: f64,
    /// Print one JSON object a line for every run instead of text.
    #[arg(long)]
    pub json: bool,
}
