//! The command line: what can be typed, with its help. One file per group of commands.
//!
//! Not here: what the commands do.

mod admin;
mod cluster;
mod faults;
mod process;
mod replay;
mod sizes;
mod trace;

pub use admin::{ConnectArgs, PinArgs, QuotaArgs, StatusArgs, UnpinArgs};
pub use cluster::{ShapeArgs, UpArgs};
pub use faults::{Fault, FaultKind, Target};
pub use process::ProcessArgs;
pub use replay::{DemoArgs, ReplayArgs, Speed};
pub use sizes::{Capacity, Watermarks, parse_bytes};
pub use trace::{GenArgs, StatsArgs, TraceCommand, TraceFormat};

use clap::{Parser, Subcommand};

/// A cluster-wide KV cache for LLM inference with a replicated index.
#[derive(Debug, Parser)]
#[command(name = "kvfleet", version, about, max_term_width = 100)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `kvfleet` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate a short trace, start a cluster, replay the trace with a node killed half way.
    Demo(DemoArgs),
    /// Start routers, nodes and instances on this machine and keep them until Ctrl-C.
    Up(UpArgs),
    /// Serve a request trace: route, fetch, account compute, save; then report.
    Replay(Box<ReplayArgs>),
    /// Show routers, nodes, instances and the index of a running cluster.
    Status(StatusArgs),
    /// Characterise or generate request traces.
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Keep blocks wherever they are until unpinned.
    Pin(PinArgs),
    /// End a pin.
    Unpin(UnpinArgs),
    /// Set or lift a tenant's byte quota on each node.
    Quota(QuotaArgs),
    /// Run one router in the foreground.
    Router(ProcessArgs),
    /// Run one storage node in the foreground.
    Node(ProcessArgs),
    /// Run one stand-in instance in the foreground.
    Instance(ProcessArgs),
}
