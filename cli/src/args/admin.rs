//! Arguments of commands that talk to a running cluster.

use std::path::PathBuf;

use clap::Args;

use super::sizes::parse_bytes;

/// How to reach a running cluster.
#[derive(Clone, Debug, Args)]
pub struct ConnectArgs {
    /// Addresses of routers, separated by commas.
    #[arg(long, value_name = "ADDR[,ADDR]", value_delimiter = ',', env = "KVFLEET_CLUSTER")]
    pub cluster: Vec<String>,
    /// Directory with the cluster's ca.pem and this command's admin.pem and admin.key.
    #[arg(long, value_name = "DIR", env = "KVFLEET_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
}

/// `kvfleet status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `kvfleet pin`.
#[derive(Clone, Debug, Args)]
pub struct PinArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the pin, chosen by its owner.
    #[arg(long)]
    pub pin: u64,
    /// Who owns it; only the owner may end it.
    #[arg(long)]
    pub owner: String,
    /// Hashes of the blocks, 32 hexadecimal digits each.
    #[arg(required = true, value_name = "HASH")]
    pub blocks: Vec<String>,
}

/// `kvfleet unpin`.
#[derive(Clone, Debug, Args)]
pub struct UnpinArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the pin.
    #[arg(long)]
    pub pin: u64,
    /// Its owner.
    #[arg(long)]
    pub owner: String,
}

/// `kvfleet quota`.
#[derive(Clone, Debug, Args)]
pub struct QuotaArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// The tenant.
    #[arg(long)]
    pub tenant: u32,
    /// Bytes it may hold on each node.
    #[arg(long, value_parser = parse_bytes, required_unless_present = "lift")]
    pub bytes: Option<u64>,
    /// Remove its quota.
    #[arg(long, conflicts_with = "bytes")]
    pub lift: bool,
}
