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
    /// Stand-in instances; instance N uses node N as its own.
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
    #[arg(long, default_value = kv_core::evict::DEFAULT, value_parser = policy)]
    pub policy: String,
    /// Fill levels HIGH:LOW of each tier: above HIGH a node evicts down to LOW.
    #[arg(long)]
    pub watermarks: Option<Watermarks>,
    /// Hardware profile under which compute is modelled.
    #[arg(long, default_value_t = default_profile(), value_parser = profile)]
    pub profile: String,
    /// Share of the modelled compute time that computing really takes on the instances, one prefill at a time on each, beside its load; with 0 it
    /// takes none.
    #[arg(long, default_value_t = 0.0)]
    pub time_scale: f64,
    /// The first N instances compute prompts only, and the others only go on where these did: such requests are served by pairs. 0: all do both.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill_instances: u32,
    /// Paths that block bytes take: quic, tcp (TLS 1.3), shm (shared memory), rdma, or auto for the best there is.
    #[arg(long, default_value_t = Transport::default())]
    pub transport: Transport,
    /// Where processes keep their data and logs; kept afterwards. Without it, a temporary directory.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Export spans of every process to this OTLP collector.
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Log filter of the processes, as in RUST_LOG; their logs lie in the data directory.
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
    /// Tokens of one block, part of the identity of the KV: a replay on this cluster must use the same
    /// (512 in Mooncake traces, 16 in Bailian's). Without it 512, and 16 with --openai.
    #[arg(long, value_name = "N", value_parser = block_tokens())]
    pub block_tokens: Option<u32>,
    /// Take requests as OpenAI's clients send them: router 1 at this port, and router N at the one N - 1 above; 0 for any free ones. What is
    /// answered is no model's.
    #[arg(long, value_name = "PORT")]
    pub openai: Option<u16>,
    /// A tokenizer.json by which prompts are read, with its chat template beside it. Without it, text is told apart by its text.
    #[arg(long, value_name = "FILE", requires = "openai", requires = "model")]
    pub tokenizer: Option<PathBuf>,
    /// Name that requests have as their model. Without it any is taken.
    #[arg(long, value_name = "NAME", requires = "tokenizer")]
    pub model: Option<String>,
    /// First port: routers listen there and above. Without it, free ports are chosen.
    #[arg(long, value_name = "PORT")]
    pub base_port: Option<u16>,
    /// Tenants to make certificates for, separated by commas: tenant-N.pem and tenant-N.key beside the others. Who has
    /// one may route, read and save as that tenant, and do nothing else.
    #[arg(long = "tenant", value_name = "N[,N]", value_delimiter = ',')]
    pub tenants: Vec<u32>,
    /// Print what is ready as one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
}

/// Most tokens of one block: what routers take.
const BLOCK_TOKENS_MAX: i64 = 4096;

/// Reads a number of tokens that a block can have.
pub(super) fn block_tokens() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=BLOCK_TOKENS_MAX)
}

fn default_profile() -> String {
    kv_core::schedule::HardwareProfile::default().name.to_owned()
}

fn profile(text: &str) -> Result<String, String> {
    let known: Vec<_> = kv_core::schedule::PROFILES.iter().map(|profile| profile.name).collect();
    if known.contains(&text) {
        Ok(text.to_owned())
    } else {
        Err(format!("choose one of {}", known.join(", ")))
    }
}

fn policy(text: &str) -> Result<String, String> {
    let known = kv_core::evict::NAMES;
    if known.contains(&text) {
        Ok(text.to_owned())
    } else {
        Err(format!("choose one of {}", known.join(", ")))
    }
}
