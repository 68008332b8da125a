//! Arguments of `trace stats`, `trace gen`, `trace policies`, `trace joins`, `trace routers` and `trace regret`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use kvfleet_sim::generate::Kind;

/// `kvfleet trace …`.
#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Characterise a trace: ideal hit rate, skew, reuse times, life, turns, capacity curve.
    Stats(StatsArgs),
    /// Generate a trace. The same arguments give the same bytes.
    Gen(GenArgs),
    /// Replay every eviction policy on traces and on generated traffic, at many capacities.
    Policies(PoliciesArgs),
    /// Have a node join a fleet in the middle of a trace, blind and told what the others saw of categories.
    Joins(JoinsArgs),
    /// Serve traces on fleets in virtual time, by the production scheduler and by others.
    Routers(RoutersArgs),
    /// Serve a trace by the production scheduler under better and better knowledge, and tell what each would be worth.
    Regret(RegretArgs),
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
    #[arg(long, value_name = "KIND", value_parser = published_kind)]
    pub compare: Option<Kind>,
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
    #[arg(long, value_parser = kind)]
    pub kind: Kind,
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

/// `kvfleet trace policies`.
#[derive(Clone, Debug, Args)]
pub struct PoliciesArgs {
    /// Traces to replay beside the generated traffic.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Requests of each generated trace.
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    pub requests: usize,
    /// Generate each kind with seeds 1 to N; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub seeds: u64,
    /// Tokens per block of generated traffic. At 64 all is replayed in minutes; at 16, to which the generators are
    /// calibrated, it takes several times as long.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_tokens: u32,
    /// The policy held against the best of the baselines.
    #[arg(long, value_name = "POLICY", default_value = kv_core::evict::DEFAULT)]
    pub judge: String,
    /// Threads to replay on.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub threads: usize,
    /// Print one JSON object a line for every policy, trace, seed and capacity.
    #[arg(long)]
    pub json: bool,
    /// Write the document and its plots into this folder instead of printing tables.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `kvfleet trace joins`.
#[derive(Clone, Debug, Args)]
pub struct JoinsArgs {
    /// Traces to replay beside the generated traffic.
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
    /// Blocks of all nodes together, as shares of the different blocks of a trace.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_value = "0.005,0.02,0.1", value_parser = capacity)]
    pub capacities: Vec<f64>,
    /// Count the joiner's hits over so many of its first requests, each apart.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "50,100,200,500,1000")]
    pub first: Vec<u64>,
    /// Print one JSON object a line for every trace, seed and capacity instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Write these lines into this file beside what is printed.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `kvfleet trace routers`.
#[derive(Clone, Debug, Args)]
pub struct RoutersArgs {
    /// Traces to serve beside the generated traffic.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Only the first N requests of each trace.
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Requests of each generated trace; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub requests: u64,
    /// Kinds of generated traffic: consumer, business, agent.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', default_value = "consumer,business,agent", value_parser = kind, requires = "requests")]
    pub kinds: Vec<Kind>,
    /// Tokens per block of generated traffic.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub block_tokens: u32,
    /// Sizes of the fleet; a trace is served in one copy for every four instances.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "4,16", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub instances: Vec<u32>,
    /// Loads, as shares of what the fleet gets through; none where there are overloads and these are not given.
    #[arg(
        long,
        value_name = "SHARE,…",
        value_delimiter = ',',
        default_value = "0.5,0.8,0.95",
        default_value_if("overloads", clap::builder::ArgPredicate::IsPresent, None),
        value_parser = share
    )]
    pub loads: Vec<f64>,
    /// Loads above what the fleet gets through, at which requests are turned away and those in time are counted; none for none.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', value_parser = share)]
    pub overloads: Vec<f64>,
    /// What is in time there: until the first token, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub ttft_ms: u64,
    /// And between two others, on average, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub tbt_ms: u64,
    /// In place of both: so many times what a request takes that is alone on an instance without anything of its prompt.
    #[arg(long, value_name = "TTFT,TBT", value_parser = times, conflicts_with_all = ["ttft_ms", "tbt_ms"])]
    pub times_alone: Option<(f64, f64)>,
    /// Tokens of prompts in one step there.
    #[arg(long, value_name = "N", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub chunk_tokens: u32,
    /// Hardware profile of the instances.
    #[arg(long, default_value = "h100-8b")]
    pub profile: String,
    /// Seed of generated traffic and of routers that draw.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Runs at each load, at rates within a hundredth of it and with other seeds of the routers: of the first one all is told, and how the ratios
    /// of all of them spread.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub draws: u32,
    /// Lines that earlier runs printed with --json, of the same profile and seed: the document has them too. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub rows: Vec<PathBuf>,
    /// Print one JSON object a line for every fleet, traffic and load.
    #[arg(long)]
    pub json: bool,
    /// Write the document and its plots into this folder instead of printing it.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `kvfleet trace regret FILE`.
#[derive(Clone, Debug, Args)]
pub struct RegretArgs {
    /// The trace.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Only its first N requests: a search looks at each of them many times.
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub limit: usize,
    /// Instances of the fleet.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub instances: u32,
    /// Loads, as shares of what the fleet gets through.
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_value = "0.8,0.95", value_parser = share)]
    pub loads: Vec<f64>,
    /// Requests to come that are known in the last of four runs.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(..=256))]
    pub window: u32,
    /// Hardware profile of the instances.
    #[arg(long, default_value = "h100-8b")]
    pub profile: String,
    /// Seed of routers that draw.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Runs at each load, at rates within a hundredth of it: of the first one all is told, and how the shares of all of them spread.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub draws: u32,
    /// Print one JSON object a line for every load.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.01..=10.0).contains(&share) => Ok(share),
        _ => Err(format!("`{text}` is no load: expected a number like 0.8, from 0.01 to 10")),
    }
}

/// Reads `10,5`.
fn times(text: &str) -> Result<(f64, f64), String> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|times| (1.0..=1e6).contains(times));
    let both = text.split_once(',').and_then(|(ttft, tbt)| Some((number(ttft)?, number(tbt)?)));
    both.ok_or_else(|| {
        format!("`{text}` is no pair of limits: expected two numbers like 10,5, from 1 to 1000000")
    })
}

/// A kind of generated traffic, by its name.
pub(super) fn kind(text: &str) -> Result<Kind, String> {
    let known = || Kind::ALL.map(Kind::name).join(", ");
    Kind::by_name(text).ok_or_else(|| format!("`{text}` is no kind of traffic: choose one of {}", known()))
}

/// One of which numbers were published.
fn published_kind(text: &str) -> Result<Kind, String> {
    match kind(text)? {
        Kind::Agent => {
            Err("of agents no numbers were published: choose one of consumer, business".to_owned())
        }
        published => Ok(published),
    }
}

fn capacity(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (1e-6..=1.0).contains(&share) => Ok(share),
        _ => Err(format!(
            "`{text}` is no share of the blocks: expected a number like 0.02, from 0.000001 to 1"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_as_multiples_are_two_numbers_of_one_or_more() {
        assert_eq!(times("10,5"), Ok((10.0, 5.0)));
        assert_eq!(times(" 1.5 , 1 "), Ok((1.5, 1.0)));
        for wrong in
            ["", "10", "10,", ",5", "10;5", "10,5,2", "0.9,5", "10,0", "NaN,5", "inf,5", "-1,5", "1e7,5"]
        {
            let said = times(wrong).expect_err("it is none");
            assert!(said.contains("expected two numbers like 10,5"), "{wrong:?}: {said}");
        }
    }

    #[test]
    fn loads_are_the_usual_ones_unless_others_are_asked_for() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: RoutersArgs,
        }
        let loads = |words: &[&str]| {
            let args = <Line as clap::Parser>::parse_from(["routers"].iter().chain(words)).args;
            (args.loads, args.overloads)
        };
        assert_eq!(loads(&[]), (vec![0.5, 0.8, 0.95], vec![]));
        assert_eq!(loads(&["--loads", "0.9"]), (vec![0.9], vec![]));
        assert_eq!(loads(&["--overloads", "1.1,1.3"]), (vec![], vec![1.1, 1.3]));
        assert_eq!(loads(&["--overloads", "1.1", "--loads", "0.5"]), (vec![0.5], vec![1.1]));
    }

    #[test]
    fn a_load_is_a_number_near_one() {
        assert_eq!(share("0.95"), Ok(0.95));
        for wrong in ["", "0", "-1", "NaN", "11", "80%"] {
            assert!(share(wrong).expect_err("it is none").contains("is no load"), "{wrong:?}");
        }
    }
}
