//! Arguments that shape a local cluster, shared by `up`, `replay` and `demo`.

use std::path::PathBuf;

use clap::Args;
use kvfleet_client::Transport;

use super::sizes::{Capacity, Watermarks, parse_bytes};

/// The shape of a local cluster.
#[derive(Clone, Debug, Args)]
pub struct ShapeArgs {
    /// Routers (voters of the replicated index).
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=9))]
    pub routers: u32,
    /// Storage nodes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub nodes: u32,
    /// Mock instances; instance N uses node N as its local node.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub instances: u32,
    /// Bytes of one block, all layers together.
    #[arg(long, default_value = "16KiB", value_parser = parse_bytes)]
    pub block_bytes: u64,
    /// DRAM of each node: bytes, blocks (1000b), share of the trace's unique blocks over all nodes
    /// (10%), or unbounded.
    #[arg(long)]
    pub dram: Option<Capacity>,
    /// SSD of each node, in the same forms; 0 for none.
    #[arg(long)]
    pub ssd: Option<Capacity>,
    /// Eviction policy of the nodes.
    #[arg(long, default_value = kv_core::evict::DEFAULT, value_parser = parse_policy)]
    pub policy: String,
    /// Fill levels HIGH:LOW of each tier: above HIGH a node evicts down to LOW.
    #[arg(long)]
    pub watermarks: Option<Watermarks>,
    /// Hardware profile that models the compute time.
    #[arg(long, default_value_t = default_profile(), value_parser = parse_profile)]
    pub profile: String,
    /// Real compute time as a share of the modelled time, one prefill at a time on each instance; 0
    /// skips compute time.
    #[arg(long, default_value_t = 0.0)]
    pub time_scale: f64,
    /// The first N instances only prefill, and the others only decode, so that pairs serve the
    /// requests. 0: all instances do both.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill_instances: u32,
    /// Transport of block bytes: quic, tcp (TLS 1.3), shm (shared memory), rdma, or auto for the
    /// first available one of shm, rdma, tcp and quic.
    #[arg(long, default_value_t = Transport::default())]
    pub transport: Transport,
    /// Directory for data and logs of the processes; kept afterwards. Without it, a temporary
    /// directory.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Export spans of every process to this OTLP collector.
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Log filter of the processes, as in RUST_LOG; their logs are in the data directory.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// Set one key of every router, node or instance: router.KEY=VALUE, node.KEY=VALUE or instance.KEY=VALUE.
    #[arg(long = "set", value_name = "ROLE.KEY=VALUE")]
    pub overrides: Vec<String>,
}

/// `kvfleet up`.
#[derive(Clone, Debug, Args)]
pub struct UpArgs {
    /// The cluster.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Tokens of one block, part of the identity of the KV: a replay on this cluster must use the
    /// same number (512 in Mooncake traces, 16 in Bailian's). Default 512, or 16 with --openai.
    #[arg(long, value_name = "N", value_parser = block_tokens_parser())]
    pub block_tokens: Option<u32>,
    /// Serve OpenAI-compatible requests: router 1 on this port, router N on the port N - 1 higher;
    /// 0 for free ports. The mock instances generate no real answers.
    #[arg(long, value_name = "PORT")]
    pub openai: Option<u16>,
    /// Serve these requests to other hosts too, and without keys: only in a network that you trust.
    #[arg(long, requires = "openai")]
    pub open: bool,
    /// A tokenizer.json to read prompts with, next to its chat template. Without it, text prompts
    /// are compared by their text.
    #[arg(long, value_name = "FILE", requires = "openai", requires = "model")]
    pub tokenizer: Option<PathBuf>,
    /// Model name in requests. Without it, any name is accepted.
    #[arg(long, value_name = "NAME", requires = "tokenizer")]
    pub model: Option<String>,
    /// First port: routers listen there and above. Without it, free ports are chosen.
    #[arg(long, value_name = "PORT")]
    pub base_port: Option<u16>,
    /// Tenants to make certificates for, separated by commas: tenant-N.pem and tenant-N.key next to
    /// the others. A holder may route, read and save as that tenant, and do nothing else.
    #[arg(long = "tenant", value_name = "N[,N]", value_delimiter = ',')]
    pub tenants: Vec<u32>,
    /// Print the started processes as one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Most tokens of one block that routers accept.
const BLOCK_TOKENS_MAX: i64 = 4096;

/// Parser for the number of tokens of a block.
pub(super) fn block_tokens_parser() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=BLOCK_TOKENS_MAX)
}

fn default_profile() -> String {
    kv_core::schedule::HardwareProfile::default().name.to_owned()
}

fn parse_profile(text: &str) -> Result<String, String> {
    let known: Vec<_> = kv_core::schedule::PROFILES.iter().map(|profile| profile.name).collect();
    if known.contains(&text) {
        Ok(text.to_owned())
    } else {
        Err(format!("choose one of {}", known.join(", ")))
    }
}

fn parse_policy(text: &str) -> Result<String, String> {
    if kv_core::evict::NAMES.contains(&text) {
        Ok(text.to_owned())
    } else {
        Err(kv_core::evict::UNKNOWN_NAME_REMEDY.to_owned())
    }
}
