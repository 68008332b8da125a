//! The command line: what can be typed, with its help. One file per group of commands.
//!
//! Not here: what the commands do.

mod admin;
mod cluster;
mod crosscheck;
mod faults;
mod numbers;
mod probe;
mod process;
mod replay;
mod sizes;
mod spans;
mod trace;

pub use admin::{
    AddMemberArgs, ConnectArgs, GroupChoice, MembersCommand, PinArgs, QuotaArgs, RemoveMemberArgs,
    StatusArgs, TargetArgs, TransferArgs, TtlArgs, UnpinArgs, WeightsArgs, WhyArgs,
};
pub use cluster::{ShapeArgs, UpArgs};
pub use crosscheck::CrosscheckArgs;
pub use faults::{Fault, FaultKind, Target};
pub use probe::{DrainArgs, ProbeArgs, Question};
pub use process::{InspectArgs, NodeArgs, NodeCommand, ProcessArgs, RouterArgs};
pub use replay::{DemoArgs, ReplayArgs, Speed};
pub use sizes::{Capacity, Watermarks, parse_bytes};
pub use trace::{
    GenArgs, JoinsArgs, PoliciesArgs, RegretArgs, RoutersArgs, StatsArgs, TraceCommand, TraceFormat,
};

use clap::{Parser, Subcommand};

/// What exit statuses mean, for the end of the help.
const EXIT_STATUSES: &str = "\
Exit status:
  0    done, and all of it right
  1    refused, or could not be done; the message says what to do
  2    replay and demo: there is a report, and something in it is not as it must be: wrong bytes, a
       request that failed, a process that crashed, a fault that was not carried out or whose cost
       could not be measured, or an interruption; crosscheck: the real fleet and the one in
       virtual time differ; also a command line that cannot be read
  130  stopped at once by a second Ctrl-C";

/// A cluster-wide KV cache for LLM inference with a replicated index.
#[derive(Debug, Parser)]
#[command(name = "kvfleet", version, about, max_term_width = 100, after_help = EXIT_STATUSES)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `kvfleet` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate a short trace, start a cluster, replay the trace with a node killed half way.
    #[command(after_help = EXIT_STATUSES)]
    Demo(DemoArgs),
    /// Start routers, nodes and instances on this machine and keep them until Ctrl-C.
    Up(UpArgs),
    /// Serve a request trace: route, fetch, account compute, save; then report.
    #[command(after_help = EXIT_STATUSES)]
    Replay(Box<ReplayArgs>),
    /// Serve the same requests on a cluster of real processes and on a fleet in virtual time made of the same configuration, and hold the decisions and
    /// hit rates against each other.
    #[command(after_help = EXIT_STATUSES)]
    Crosscheck(Box<CrosscheckArgs>),
    /// Show routers, nodes, instances and the index of a running cluster.
    Status(StatusArgs),
    /// Why a request ran where it did, and why blocks of its prompt were missing.
    Why(WhyArgs),
    /// Characterise or generate request traces, and replay them under eviction policies and on fleets in virtual time.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Keep blocks wherever they are until unpinned.
    Pin(PinArgs),
    /// End a pin.
    Unpin(UnpinArgs),
    /// Set or lift a tenant's byte quota on each node.
    Quota(QuotaArgs),
    /// Set or lift the time after its last use when a block of a group of prefixes leaves every node.
    Ttl(TtlArgs),
    /// Show which generation of weights is in force, or go on to the next: after instances were given other weights.
    Weights(WeightsArgs),
    /// Show or change which routers the cluster has, who votes and who leads.
    #[command(subcommand)]
    Members(MembersCommand),
    /// Run one router in the foreground.
    Router(RouterArgs),
    /// Run one storage node in the foreground, or look into a running one.
    Node(NodeArgs),
    /// Run one stand-in instance in the foreground.
    Instance(ProcessArgs),
    /// Ask a process of this machine whether it lives or is ready: 0 yes, 2 no, 1 no answer.
    Probe(ProbeArgs),
    /// Ask a process of this machine to let go of its work before it is stopped, and wait until it has: 0 done, 2 not in time,
    /// 1 no answer.
    Drain(DrainArgs),
}
