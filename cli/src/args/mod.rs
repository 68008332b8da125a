//! The command line and its help. One file per group of commands.
//!
//! Not here: the commands themselves.

mod admin;
mod certs;
mod cluster;
mod crosscheck;
mod durations;
mod faults;
mod keys;
mod probe;
mod process;
mod process_numbers;
mod replay;
mod sizes;
mod trace;

pub use admin::{
    AddMemberArgs, ConnectArgs, GroupChoice, MembersCommand, PinArgs, QuotaArgs, RemoveMemberArgs,
    StatusArgs, TargetArgs, TransferArgs, TtlArgs, UnpinArgs, WeightsArgs, WhyArgs,
};
pub use certs::{CertsCommand, InitArgs, IssueArgs, ListArgs, RevokeArgs};
pub use cluster::{ShapeArgs, UpArgs};
pub use crosscheck::CrosscheckArgs;
pub use faults::{FaultKind, FaultSpec, Target};
pub use keys::{KeysCommand, NewKeyArgs};
pub use probe::{DrainArgs, ProbeArgs, Question};
pub use process::{InspectArgs, NodeArgs, NodeCommand, ProcessArgs, RouterArgs};
pub use replay::{DemoArgs, ReplayArgs, Speed};
pub use sizes::{Capacity, Watermarks, parse_bytes};
pub use trace::{GenArgs, StatsArgs, TraceCommand, TraceFormat, parse_kind, parse_load};

use clap::{Parser, Subcommand};

/// Exit statuses, shown at the end of the help.
const EXIT_STATUSES: &str = "\
Exit status:
  0    success
  1    refused or failed; the message says how to fix it
  2    replay and demo: there is a report with failures: wrong bytes, a failed request, a crashed
       process, a fault that was not carried out or measured, or an interruption; crosscheck: the
       real fleet and the simulated one differ; also an invalid command line
  130  stopped at once by a second Ctrl-C";

/// A cluster-wide KV cache for LLM inference with a replicated index.
#[derive(Debug, Parser)]
#[command(name = "kvfleet", version, about, max_term_width = 100, after_help = EXIT_STATUSES)]
pub struct Args {
    /// Command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate a short trace, start a cluster, and replay the trace with a node killed halfway.
    #[command(after_help = EXIT_STATUSES)]
    Demo(DemoArgs),
    /// Start routers, nodes and instances on this machine and keep them until Ctrl-C.
    Up(UpArgs),
    /// Serve a request trace: route, fetch, account for compute, save; then report.
    #[command(after_help = EXIT_STATUSES)]
    Replay(Box<ReplayArgs>),
    /// Serve the same requests on real processes and on a simulated fleet with the same
    /// configuration, and compare decisions and hit rates.
    #[command(after_help = EXIT_STATUSES)]
    Crosscheck(Box<CrosscheckArgs>),
    /// Show routers, nodes, instances and the index of a running cluster.
    Status(StatusArgs),
    /// Show where a request ran and why, and why blocks of its prompt were missing.
    Why(WhyArgs),
    /// Show which roles of certificates may make which call.
    Access,
    /// Make, revoke and list the certificates of a fleet.
    #[command(subcommand)]
    Certs(CertsCommand),
    /// Make API keys for callers of the gateway.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Analyse or generate request traces.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Keep blocks in the cache until they are unpinned.
    Pin(PinArgs),
    /// End a pin.
    Unpin(UnpinArgs),
    /// Set or remove a tenant's byte quota on each node.
    Quota(QuotaArgs),
    /// Set or remove the time to live of a group of prefixes, counted from the last use of a block.
    Ttl(TtlArgs),
    /// Show the current generation of weights, or switch to the next one after instances got new
    /// weights.
    Weights(WeightsArgs),
    /// Show or change the cluster's routers, their votes and the leaders.
    #[command(subcommand)]
    Members(MembersCommand),
    /// Run one router in the foreground.
    Router(RouterArgs),
    /// Run one storage node in the foreground, or inspect a running one.
    Node(NodeArgs),
    /// Run one mock instance in the foreground.
    Instance(ProcessArgs),
    /// Ask a local process whether it is live or ready: 0 yes, 2 no, 1 no answer.
    Probe(ProbeArgs),
    /// Ask a local process to drain before it is stopped, and wait for the end: 0 done, 2 not in
    /// time, 1 no answer.
    Drain(DrainArgs),
}
