//! Arguments of commands for a running cluster.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::durations::parse_duration;
use super::sizes::parse_bytes;

/// Connection to a running cluster.
#[derive(Clone, Debug, Args)]
pub struct ConnectArgs {
    /// Addresses of routers, separated by commas.
    #[arg(long, value_name = "ADDR[,ADDR]", value_delimiter = ',', env = "KVFLEET_CLUSTER")]
    pub cluster: Vec<String>,
    /// Directory with the cluster's ca.pem and this command's admin.pem and admin.key, or with ca.crt,
    /// tls.crt and tls.key of an administrator.
    #[arg(long, value_name = "DIR", env = "KVFLEET_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
}

/// A running cluster for a replay. Given by flag only, so that a cluster named in the environment
/// never gets the load of a replay.
#[derive(Clone, Debug, Args)]
pub struct TargetArgs {
    /// Addresses of routers of a running cluster to use instead of starting one, separated by
    /// commas. Its blocks must have as many tokens as the trace's: see --block-tokens of `kvfleet
    /// up`.
    #[arg(long, value_name = "ADDR[,ADDR]", value_delimiter = ',')]
    pub cluster: Vec<String>,
    /// With --cluster: directory with the cluster's ca.pem and this command's admin.pem and
    /// admin.key, or with ca.crt, tls.crt and tls.key of an administrator.
    #[arg(long, value_name = "DIR", env = "KVFLEET_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
}

impl TargetArgs {
    /// Connection to the cluster, if one was named.
    #[must_use]
    pub fn connect(&self) -> Option<ConnectArgs> {
        let connect = ConnectArgs { cluster: self.cluster.clone(), tls_dir: self.tls_dir.clone() };
        (!self.cluster.is_empty()).then_some(connect)
    }
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

/// `kvfleet why`.
#[derive(Clone, Debug, Args)]
pub struct WhyArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the request, as given by its frontend; through the gateway, the header
    /// `x-kvfleet-request`.
    pub request: u64,
    /// Print one JSON object.
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
    /// Owner of the pin; only the owner may end it.
    #[arg(long)]
    pub owner: String,
    /// Soft pin: its blocks may be evicted, but only as the last resort, after all blocks without a
    /// pin, lease or waiting request. Blocks of other pins are never evicted.
    #[arg(long)]
    pub soft: bool,
    /// Duration of the pin, as in 500ms, 90s, 15m, 12h or 7d; without it, the pin lasts until it is
    /// ended. Repeating the command restarts the duration.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    pub span: Option<Duration>,
    /// Hashes of the blocks, 38 hexadecimal digits each.
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
    /// Number of the tenant.
    #[arg(long)]
    pub tenant: u32,
    /// Most bytes that the tenant may hold on each node.
    #[arg(long, value_parser = parse_bytes, required_unless_present = "lift")]
    pub bytes: Option<u64>,
    /// Remove its quota.
    #[arg(long, conflicts_with = "bytes")]
    pub lift: bool,
}

/// `kvfleet ttl`.
#[derive(Clone, Debug, Args)]
pub struct TtlArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// The group: the first byte of the hashes of its blocks, 0 to 255.
    #[arg(long, value_name = "NUMBER", required_unless_present = "block")]
    pub group: Option<u8>,
    /// Any block of the group, 38 hexadecimal digits. Other prefixes may belong to the same group.
    #[arg(long, value_name = "HASH", conflicts_with = "group")]
    pub block: Option<String>,
    /// Seconds after its last use when a block of the group is dropped on every node; 0: at the end
    /// of its request.
    #[arg(long, required_unless_present = "lift")]
    pub seconds: Option<u64>,
    /// Remove the group's time to live.
    #[arg(long, conflicts_with = "seconds")]
    pub lift: bool,
}

/// `kvfleet weights`.
#[derive(Clone, Debug, Args)]
pub struct WeightsArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Switch to this generation, which must follow the current one. KV computed with earlier
    /// weights is invalidated on every node at once. Repeating the command changes nothing. Without
    /// it, show the current generation.
    #[arg(long, value_name = "GENERATION")]
    pub next: Option<u32>,
}

/// `kvfleet members`.
#[derive(Debug, Subcommand)]
pub enum MembersCommand {
    /// Show the members of every group, the leaders, and the lag of each member.
    List(ConnectArgs),
    /// Make a waiting router (`kvfleet router --join`) a member of every group. To replace a
    /// router, add the new one, then remove the old one. Run it again to finish an interrupted
    /// change.
    Add(AddMemberArgs),
    /// Remove a router from every group. Run it again to finish an interrupted change.
    Remove(RemoveMemberArgs),
    /// Transfer the leadership of a group, or of all groups, to a voter.
    Transfer(TransferArgs),
}

/// `kvfleet members add`.
#[derive(Clone, Debug, Args)]
pub struct AddMemberArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the router.
    pub router: u64,
    /// Address at which the other routers reach it.
    #[arg(value_name = "HOST:PORT")]
    pub address: String,
    /// Add it as a learner, which replicates and answers reads without a vote.
    #[arg(long)]
    pub learner: bool,
}

/// `kvfleet members remove`.
#[derive(Clone, Debug, Args)]
pub struct RemoveMemberArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the router.
    pub router: u64,
}

/// `kvfleet members transfer`.
#[derive(Clone, Debug, Args)]
pub struct TransferArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the group, or `all`.
    #[arg(value_name = "GROUP|all", value_parser = parse_group)]
    pub group: GroupChoice,
    /// Number of the new leader.
    pub router: u64,
}

/// One group or all groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupChoice {
    /// The group with this number.
    One(u32),
    /// All groups.
    All,
}

fn parse_group(text: &str) -> Result<GroupChoice, String> {
    if text == "all" {
        return Ok(GroupChoice::All);
    }
    let number = text.parse().map(GroupChoice::One);
    number.map_err(|_| format!("{text:?} is not a group: write its number (0 is control), or `all`"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kvfleet_errors_doc::says;

    #[test]
    fn parses_groups() {
        assert_eq!(parse_group("all"), Ok(GroupChoice::All));
        assert_eq!(parse_group("3"), Ok(GroupChoice::One(3)));
        says("a group that is no number", &parse_group("shard-1").unwrap_err(), &[]);
    }
}
