//! Arguments of commands that ask a local process about itself.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::durations::parse_duration;

/// `kvfleet probe`.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// Question to ask.
    #[arg(value_name = "WHAT")]
    pub what: Question,
    /// The process's metrics endpoint (its process.metrics_listen).
    #[arg(long, value_name = "HOST:PORT")]
    pub address: String,
    /// Longest wait for the answer.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "2s")]
    pub timeout: Duration,
}

/// Question for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Question {
    /// Whether the process answers at all.
    Live,
    /// Whether the process should get requests.
    Ready,
}

impl Question {
    /// HTTP path of the question.
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
    /// Address for drain requests (process.drain_listen of the process).
    #[arg(long, value_name = "HOST:PORT")]
    pub address: String,
    /// Longest time for draining, as in 20s.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "20s")]
    pub within: Duration,
    /// Shortest total time, so that others notice that the process is not ready while it still
    /// serves.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub linger: Option<Duration>,
}
