//! Arguments of the commands that ask a process of this machine about itself.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::spans::parse_span;

/// `kvfleet probe`.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// What to ask.
    #[arg(value_name = "WHAT")]
    pub what: Question,
    /// The process's metrics endpoint (its process.metrics_listen).
    #[arg(long, value_name = "HOST:PORT")]
    pub address: String,
    /// Longest wait for the answer.
    #[arg(long, value_name = "TIME", value_parser = parse_span, default_value = "2s")]
    pub timeout: Duration,
}

/// What a process is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Question {
    /// Whether it answers at all.
    Live,
    /// Whether requests should come to it.
    Ready,
}

impl Question {
    /// Where the answer is.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Question::Live => "/livez",
            Question::Ready => "/readyz",
        }
    }
}

/// `kvfleet drain`.
#[derive(Clone, Debug, Args)]
pub struct DrainArgs {
    /// Where the process is asked to drain (its process.drain_listen).
    #[arg(long, value_name = "HOST:PORT")]
    pub address: String,
    /// Longest it may take, as in 20s.
    #[arg(long, value_name = "TIME", value_parser = parse_span, default_value = "20s")]
    pub within: Duration,
    /// Time to wait at least, for others to notice that the process is not ready, while it serves on.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub linger: Option<Duration>,
}
