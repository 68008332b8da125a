//! Arguments of the three processes.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ConnectArgs;
use crate::config::{Override, parse_override};

/// `kvfleet router|node|instance`.
#[derive(Clone, Debug, Args)]
pub struct ProcessArgs {
    /// Configuration file (TOML). Without one, defaults, environment and flags decide.
    #[arg(long, value_name = "FILE", env = "KVFLEET_CONFIG")]
    pub config: Option<PathBuf>,
    /// Set one key over file and environment; may be repeated. Nested keys are joined with dots.
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
    /// Log as JSON, one object a line.
    #[arg(long)]
    pub log_json: bool,
    /// Stop when standard input ends, which it does when the parent process is gone.
    #[arg(long, hide = true)]
    pub follow_parent: bool,
}

impl ProcessArgs {
    /// The flags as layers over file and environment.
    #[must_use]
    pub fn flags(&self) -> Vec<Override> {
        let named = [
            ("--metrics-listen", "process.metrics_listen", self.metrics_listen.clone()),
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
    /// What to do instead of running one.
    #[command(subcommand)]
    pub command: Option<NodeCommand>,
    /// As for every process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// `kvfleet node …`.
#[derive(Clone, Debug, Subcommand)]
pub enum NodeCommand {
    /// Show what a node of a running cluster holds, what happened to its blocks by kind of request and turn, and what it
    /// would hit with more or less room.
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
    /// As for every process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Start without a cluster and wait to be added to one with `kvfleet members add`.
    #[arg(long)]
    pub join: bool,
}

impl RouterArgs {
    /// The arguments that every process has, with this one among its settings.
    #[must_use]
    pub fn settings(&self) -> ProcessArgs {
        let mut args = self.process.clone();
        args.overrides.extend(self.join.then(|| Override::flag("--join", "join", "true".to_owned())));
        args
    }
}
