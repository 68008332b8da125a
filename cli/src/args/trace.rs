//! Arguments of `trace stats` and `trace gen`.
//!
//! Not here: comparisons of routers and policies (`lab/src/args.rs`).

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use kvfleet_sim::generate::TrafficKind;

/// `kvfleet trace …`.
#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Analyse a trace: ideal hit rate, skew, reuse times, life spans, turns, capacity curve.
    Stats(StatsArgs),
    /// Generate a trace. The same arguments give the same bytes.
    Gen(GenArgs),
}

/// A trace's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// Detect by the first line.
    Auto,
    /// Mooncake: timestamps in milliseconds, ids name prefixes of 512-token blocks.
    Mooncake,
    /// Bailian (Qwen): timestamps in seconds, ids name contents of 16-token blocks.
    Bailian,
}

/// `kvfleet trace stats FILE`.
#[derive(Clone, Debug, Args)]
pub struct StatsArgs {
    /// The trace: one JSON object per line.
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
    /// Also show the published numbers of this kind (consumer, business).
    #[arg(long, value_name = "KIND", value_parser = parse_published_kind)]
    pub compare: Option<TrafficKind>,
    /// Seed of randomised policies.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Write plots into this directory.
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
}

/// `kvfleet trace gen`.
#[derive(Clone, Debug, Args)]
pub struct GenArgs {
    /// Kind of users: consumer, business or agent.
    #[arg(long, value_parser = parse_kind)]
    pub kind: TrafficKind,
    /// Seed.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests to generate.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub requests: usize,
    /// Format to write; blocks have 16 tokens in bailian (the default of auto) and 512 in mooncake.
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

/// Parses a load, as a share of a fleet's throughput.
///
/// # Errors
/// If it is no number from 0.01 to 10.
pub fn parse_load(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.01..=10.0).contains(&share) => Ok(share),
        _ => Err(format!("`{text}` is not a load: expected a number like 0.8, from 0.01 to 10")),
    }
}

/// Parses a kind of generated traffic.
///
/// # Errors
/// If there is no kind of this name; the text lists all.
pub fn parse_kind(text: &str) -> Result<TrafficKind, String> {
    let known = || TrafficKind::ALL.map(TrafficKind::name).join(", ");
    TrafficKind::by_name(text)
        .ok_or_else(|| format!("`{text}` is not a kind of traffic: choose one of {}", known()))
}

/// Parses a kind with published numbers.
fn parse_published_kind(text: &str) -> Result<TrafficKind, String> {
    match parse_kind(text)? {
        TrafficKind::Agent => {
            Err("agent traffic has no published numbers: choose one of consumer, business".to_owned())
        }
        published => Ok(published),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_loads() {
        assert_eq!(parse_load("0.95"), Ok(0.95));
        for wrong in ["", "0", "-1", "NaN", "11", "80%"] {
            assert!(parse_load(wrong).expect_err("must be refused").contains("is not a load"), "{wrong:?}");
        }
    }
}
