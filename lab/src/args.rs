//! The command line of `kvfleet-lab` and its help.
//!
//! Not here: the commands themselves (`commands/`).

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use kvfleet::args::{parse_kind, parse_load};
use kvfleet_sim::generate::TrafficKind;

/// Comparisons of kvfleet with other routers and eviction policies, in virtual time.
#[derive(Debug, Parser)]
#[command(name = "kvfleet-lab", version, about, max_term_width = 100)]
pub struct LabArgs {
    /// Comparison to run.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// The comparisons.
#[derive(Clone, Debug, Subcommand)]
pub enum LabCommand {
    /// Replay every eviction policy on traces and on generated traffic, at many capacities.
    Policies(PoliciesArgs),
    /// Simulate a node that joins a fleet in the middle of a trace, with and without the fleet's
    /// reuse statistics.
    Joins(JoinsArgs),
    /// Serve traces on simulated fleets, with the production scheduler and with others.
    Routers(RoutersArgs),
    /// Serve a trace with the production scheduler and with increasing knowledge, and measure the
    /// gap to each oracle.
    OracleGap(OracleGapArgs),
}

/// `kvfleet-lab policies`.
#[derive(Clone, Debug, Args)]
pub struct PoliciesArgs {
    /// Traces to replay in addition to the generated traffic.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Requests of each generated trace.
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    pub requests: usize,
    /// Generate each kind with seeds 1 to N; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub seeds: u64,
    /// Tokens per block of generated traffic. 64 finishes in minutes; 16, the calibration of the
    /// generators, takes several times as long.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_tokens: u32,
    /// Policy to compare with the best baseline.
    #[arg(long, value_name = "POLICY", default_value = kv_core::evict::DEFAULT)]
    pub judge: String,
    /// Threads to replay on.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub threads: usize,
    /// Print one JSON object per line for every policy, trace, seed and capacity.
    #[arg(long)]
    pub json: bool,
    /// Write the document and its plots into this directory instead of printing tables.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write a summary of at most 20 kB into this file, without plots.
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,
}

/// `kvfleet-lab joins`.
#[derive(Clone, Debug, Args)]
pub struct JoinsArgs {
    /// Traces to replay in addition to the generated traffic.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Requests of each generated trace.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub requests: u64,
    /// Generate each kind with seeds 1 to N; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub seeds: u64,
    /// Tokens per block of generated traffic.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_tokens: u32,
    /// Policy of all nodes.
    #[arg(long, value_name = "POLICY", default_value = kv_core::evict::DEFAULT)]
    pub policy: String,
    /// Nodes before the join.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub nodes: u32,
    /// Total blocks of all nodes, as shares of the trace's unique blocks.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_value = "0.005,0.02,0.1")]
    #[arg(value_parser = parse_capacity_share)]
    pub capacities: Vec<f64>,
    /// Count the joiner's hits over these numbers of its first requests.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "50,100,200,500,1000")]
    pub first: Vec<u64>,
    /// Print one JSON object per line for every trace, seed and capacity instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Also write these lines into this file.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `kvfleet-lab routers`.
#[derive(Clone, Debug, Args)]
pub struct RoutersArgs {
    /// Traces to serve in addition to the generated traffic.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Only the first N requests of each trace.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Requests of each generated trace; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub requests: u64,
    /// Kinds of generated traffic: consumer, business, agent.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', default_value = "consumer,business,agent")]
    #[arg(value_parser = parse_kind, requires = "requests")]
    pub kinds: Vec<TrafficKind>,
    /// Tokens per block of generated traffic.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub block_tokens: u32,
    /// Sizes of the fleet; a trace is served in one copy for every four instances.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "4,16")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub instances: Vec<u32>,
    /// Loads, as shares of the fleet's throughput; without this flag, none if --overloads is given.
    #[arg(
        long,
        value_name = "SHARE,…",
        value_delimiter = ',',
        default_value = "0.5,0.8,0.95",
        default_value_if("overloads", clap::builder::ArgPredicate::IsPresent, None),
        value_parser = parse_load
    )]
    pub loads: Vec<f64>,
    /// Loads above the fleet's throughput, at which requests are shed and those in time are
    /// counted.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', value_parser = parse_load)]
    pub overloads: Vec<f64>,
    /// Limit for the time to first token at overload, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub ttft_ms: u64,
    /// Limit for the mean time between further tokens, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub tbt_ms: u64,
    /// Instead of both limits: multiples of the times that a request takes alone on an instance
    /// without any cached block.
    #[arg(long, value_name = "TTFT,TBT", value_parser = parse_latency_factors)]
    #[arg(conflicts_with_all = ["ttft_ms", "tbt_ms"])]
    pub times_alone: Option<(f64, f64)>,
    /// Prompt tokens per step at overload.
    #[arg(long, value_name = "N", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk_tokens: u32,
    /// Hardware profile of the instances.
    #[arg(long, default_value = "h100-8b")]
    pub profile: String,
    /// Seed of generated traffic and of randomised routers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Runs at each load, with rates within one percent of it and other router seeds. The first run
    /// is reported in full; the others only give the spread of the ratios.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub draws: u32,
    /// Output of earlier runs with --json, of the same profile and seed, to include in the
    /// document. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub rows: Vec<PathBuf>,
    /// Print one JSON object per line for every fleet, traffic and load.
    #[arg(long)]
    pub json: bool,
    /// Write the document and its plots into this directory instead of printing it.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write a summary of at most 20 kB into this file, without plots.
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,
}

/// `kvfleet-lab oracle-gap FILE`.
#[derive(Clone, Debug, Args)]
pub struct OracleGapArgs {
    /// The trace.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Only its first N requests; the search evaluates each of them many times.
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub limit: usize,
    /// Instances of the fleet.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub instances: u32,
    /// Loads, as shares of the fleet's throughput.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_value = "0.8,0.95", value_parser = parse_load)]
    pub loads: Vec<f64>,
    /// Future requests that are known in the last of four runs.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(..=256))]
    pub window: u32,
    /// Hardware profile of the instances.
    #[arg(long, default_value = "h100-8b")]
    pub profile: String,
    /// Seed of randomised routers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Runs at each load, with rates within one percent of it. The first run is reported in full;
    /// the others only give the spread of the shares.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub draws: u32,
    /// Print one JSON object per line for every load.
    #[arg(long)]
    pub json: bool,
}

/// Parses `10,5`.
fn parse_latency_factors(text: &str) -> Result<(f64, f64), String> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|times| (1.0..=1e6).contains(times));
    let both = text.split_once(',').and_then(|(ttft, tbt)| Some((number(ttft)?, number(tbt)?)));
    both.ok_or_else(|| {
        format!("`{text}` is not a pair of factors: expected two numbers like 10,5, from 1 to 1000000")
    })
}

fn parse_capacity_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (1e-6..=1.0).contains(&share) => Ok(share),
        _ => Err(format!(
            "`{text}` is not a share of the blocks: expected a number like 0.02, from 0.000001 to 1"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_latency_factors() {
        assert_eq!(parse_latency_factors("10,5"), Ok((10.0, 5.0)));
        assert_eq!(parse_latency_factors(" 1.5 , 1 "), Ok((1.5, 1.0)));
        for wrong in
            ["", "10", "10,", ",5", "10;5", "10,5,2", "0.9,5", "10,0", "NaN,5", "inf,5", "-1,5", "1e7,5"]
        {
            let said = parse_latency_factors(wrong).expect_err("must be refused");
            assert!(said.contains("expected two numbers like 10,5"), "{wrong:?}: {said}");
        }
    }

    #[test]
    fn default_loads_apply_without_overloads() {
        #[derive(clap::Parser)]
        struct RoutersCommandLine {
            #[command(flatten)]
            args: RoutersArgs,
        }
        let loads = |words: &[&str]| {
            let args = RoutersCommandLine::parse_from(["routers"].iter().chain(words)).args;
            (args.loads, args.overloads)
        };
        assert_eq!(loads(&[]), (vec![0.5, 0.8, 0.95], vec![]));
        assert_eq!(loads(&["--loads", "0.9"]), (vec![0.9], vec![]));
        assert_eq!(loads(&["--overloads", "1.1,1.3"]), (vec![], vec![1.1, 1.3]));
        assert_eq!(loads(&["--overloads", "1.1", "--loads", "0.5"]), (vec![0.5], vec![1.1]));
    }
}
