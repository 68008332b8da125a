//! Arguments of the three processes.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ConnectArgs, process_numbers};
use crate::config::{Override, parse_override};

/// `kvfleet router|node|instance`.
#[derive(Clone, Debug, Args)]
pub struct ProcessArgs {
    /// Configuration file (TOML). Without it, defaults, environment and flags apply.
    #[arg(long, value_name = "FILE", env = "KVFLEET_CONFIG")]
    pub config: Option<PathBuf>,
    /// Set one key, overriding file and environment; may be repeated. Nested keys are joined with
    /// dots.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = parse_override)]
    pub overrides: Vec<Override>,
    /// Address of the Prometheus text endpoint; port 0 for any free one, "" for none.
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics_listen: Option<String>,
    /// Export spans to this OTLP collector.
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,
    /// Log filter, as in RUST_LOG.
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Log as JSON, one object per line.
    #[arg(long)]
    pub log_json: bool,
    /// Loopback address for drain requests; "" for none.
    #[arg(long, value_name = "HOST:PORT")]
    pub drain_listen: Option<String>,
    /// Only validate the configuration, and exit.
    #[arg(long)]
    pub check: bool,
    /// Stop when standard input ends, which happens when the parent process exits.
    #[arg(long, hide = true)]
    pub follow_parent: bool,
}

impl ProcessArgs {
    /// The flags as overrides of file and environment.
    #[must_use]
    pub fn flags(&self) -> Vec<Override> {
        let named = [
            ("--metrics-listen", "process.metrics_listen", self.metrics_listen.clone()),
            ("--drain-listen", "process.drain_listen", self.drain_listen.clone()),
            ("--otlp", "process.otlp", self.otlp.clone()),
            ("--log", "process.log", self.log.clone()),
            ("--log-json", "process.log_json", self.log_json.then(|| "true".to_owned())),
        ];
        let named = named.into_iter().filter_map(|(flag, key, text)| Some(Override::flag(flag, key, text?)));
        self.overrides.iter().cloned().chain(named).collect()
    }
}

/// `kvfleet node`.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NodeArgs {
    /// Subcommand to run instead of a node.
    #[command(subcommand)]
    pub command: Option<NodeCommand>,
    /// Arguments of every process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Name of the host, from which the node's number is derived: stable over restarts, and
    /// different on each host. Sets `host` and `id`.
    #[arg(long, value_name = "NAME", value_parser = host_and_number)]
    pub id_from_host: Option<(String, u32)>,
}

fn host_and_number(name: &str) -> Result<(String, u32), String> {
    Ok((name.to_owned(), process_numbers::node_from_host(name)?))
}

impl NodeArgs {
    /// Arguments of every process, including the settings of a node.
    #[must_use]
    pub fn settings(&self) -> ProcessArgs {
        let mut args = self.process.clone();
        for (host, number) in self.id_from_host.iter() {
            let set = |key, text| Override::flag("--id-from-host", key, text);
            args.overrides.extend([set("host", host.clone()), set("id", number.to_string())]);
        }
        args
    }
}

/// `kvfleet node …`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeCommand {
    /// Show the contents of a node, the history of its blocks by kind of request and turn, and its
    /// expected hit rate at other sizes.
    Inspect(InspectArgs),
}

/// `kvfleet node inspect`.
#[derive(Clone, Debug, Args)]
pub struct InspectArgs {
    /// The cluster.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Number of the node, as `kvfleet status` shows it.
    #[arg(value_name = "NODE")]
    pub node: u32,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// `kvfleet router`.
#[derive(Clone, Debug, Args)]
pub struct RouterArgs {
    /// Arguments of every process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Start without a cluster and wait for `kvfleet members add`.
    #[arg(long)]
    pub join: bool,
    /// Name of this router with an ordinal from 0, such as kvfleet-router-0: its number is one
    /// more. Sets `id`.
    #[arg(long, value_name = "NAME", value_parser = process_numbers::router_from_ordinal)]
    pub id_from_ordinal: Option<u64>,
}

impl RouterArgs {
    /// Arguments of every process, including the settings of a router.
    #[must_use]
    pub fn settings(&self) -> ProcessArgs {
        let mut args = self.process.clone();
        args.overrides.extend(self.join.then(|| Override::flag("--join", "join", "true".to_owned())));
        let number = self.id_from_ordinal.map(|id| Override::flag("--id-from-ordinal", "id", id.to_string()));
        args.overrides.extend(number);
        args
    }
}
