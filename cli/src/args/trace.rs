//! Arguments of `trace stats` and `trace gen`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// `kvfleet trace …`.
#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Characterise a trace: ideal hit rate, skew, reuse times, life, turns, capacity curve.
    Stats(StatsArgs),
    /// Generate a trace. The same arguments give the same bytes.
    Gen(GenArgs),
}

/// A trace's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// Look at the first line.
    Auto,
    /// Mooncake: timestamps in milliseconds, ids name prefixes of 512-token blocks.
    Mooncake,
    /// Bailian (Qwen): timestamps in seconds, ids name contents of 16-token blocks.
    Bailian,
}

/// `kvfleet trace stats FILE`.
#[derive(Clone, Debug, Args)]
pub struct StatsArgs {
    /// The trace: one JSON object a line.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Format of the trace.
    #[arg(long, value_enum, default_value_t = TraceFormat::Auto)]
    pub format: TraceFormat,
    /// Skip malformed lines and count them, instead of stopping at the first.
    #[arg(long)]
    pub lenient: bool,
    /// Only the first N requests.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Show the published numbers of this kind (consumer, business) beside those of the trace.
    #[arg(long, value_name = "KIND")]
    pub compare: Option<String>,
    /// Seed of policies that leave something to chance.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Write plots into this folder.
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
}

/// `kvfleet trace gen`.
#[derive(Clone, Debug, Args)]
pub struct GenArgs {
    /// What kind of users: consumer, business or agent.
    #[arg(long)]
    pub kind: String,
    /// Seed.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests to generate.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub requests: usize,
    /// Format to write; blocks have 16 tokens in bailian's (auto means that), 512 in mooncake's.
    #[arg(long, value_enum, default_value_t = TraceFormat::Auto)]
    pub format: TraceFormat,
    /// New sessions per second; by default the rate of the kind. Lower it to let sessions finish within a
    /// short trace.
    #[arg(long, value_name = "RATE")]
    pub sessions_per_s: Option<f64>,
    /// Output file; standard output when absent.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}
