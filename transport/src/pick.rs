//! Which path to a peer each operation takes, of several that lead there.
//!
//! Classes have an order: shared memory, then RDMA, then the network. Within the network a choice by what fetches take
//! decides (`pick/choice.rs` over `pick/estimate.rs`), and a path that fails is left alone for a time (`pick/breaker.rs`). To its
//! caller all of them together are one [`Dialer`] (`pick/dialer.rs`), and what it dials one [`Path`](crate::Path)
//! (`pick/path.rs`). Why a path is the one in use can be asked at any time ([`PeerReport`]).
//!
//! Not here: what goes over a path, and where a client's routers send it. A kind is added by a [`PathKind`] and a
//! [`Candidate`] with its dialer; nothing else knows the kinds apart (`docs/adr/0039-both-network-paths.md`).

use std::fmt::{Display, Formatter};
use std::sync::Arc;
use std::time::Duration;

use crate::Dialer;

pub(crate) mod breaker;
mod choice;
mod dialer;
mod estimate;
mod path;
mod peer;
mod reason;

pub use breaker::BreakerRules;
pub use choice::ChoiceRules;
pub use dialer::PickDialer;
pub use reason::{Compared, Outcome, Reason};

/// What a path goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathKind {
    /// Memory of this host that both processes map.
    SharedMemory,
    /// One-sided reads and writes of another host's memory.
    Rdma,
    /// QUIC.
    Quic,
    /// TLS 1.3 over TCP.
    Tcp,
}

/// Kinds that are preferred one to another without measuring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    SharedMemory,
    Rdma,
    Network,
}

impl PathKind {
    /// Every kind, best class first.
    pub const ALL: [PathKind; 4] = [PathKind::SharedMemory, PathKind::Rdma, PathKind::Quic, PathKind::Tcp];

    /// Lower-case name as used in flags, metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PathKind::SharedMemory => "shm",
            PathKind::Rdma => "rdma",
            PathKind::Quic => "quic",
            PathKind::Tcp => "tcp",
        }
    }

    fn class(self) -> Class {
        match self {
            PathKind::SharedMemory => Class::SharedMemory,
            PathKind::Rdma => Class::Rdma,
            PathKind::Quic | PathKind::Tcp => Class::Network,
        }
    }
}

impl Display for PathKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One way to peers.
#[derive(Clone)]
pub struct Candidate {
    /// What it goes over.
    pub kind: PathKind,
    /// Opens it. Where a peer cannot be reached this way it says so at once.
    pub dialer: Arc<dyn Dialer>,
}

/// How paths are picked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PickRules {
    /// See [`ChoiceRules`].
    pub choice: ChoiceRules,
    /// See [`BreakerRules`].
    pub breaker: BreakerRules,
    /// How long a dial has before the next way is tried beside it.
    pub head_start: Duration,
    /// How often paths that are not open are looked after.
    pub tend_every: Duration,
    /// How often the round trip of each open path is measured, in times of the above.
    pub ping_every: u32,
}

impl Default for PickRules {
    fn default() -> PickRules {
        PickRules {
            choice: ChoiceRules::default(),
            breaker: BreakerRules::default(),
            // A handshake on a good path takes a tenth of it, and a lost packet twice as much.
            head_start: Duration::from_millis(200),
            tend_every: Duration::from_secs(1),
            ping_every: 5,
        }
    }
}

/// What is known of the ways to a peer.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// The peer's address.
    pub peer: String,
    /// The path that the last operation took, or, before any did, the network path that one would.
    pub used: PathKind,
    /// Why.
    pub reason: Reason,
    /// Each way, best class first.
    pub paths: Vec<PathReport>,
}

/// What is known of one way to a peer.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Which.
    pub kind: PathKind,
    /// Whether it is left alone because it failed.
    pub is_left_alone: bool,
    /// Round trip of nothing, on average.
    pub latency: Option<Duration>,
    /// Of one fetch, on average.
    pub bytes_per_second: Option<f64>,
    /// Fetches that were measured.
    pub fetches: u64,
    /// What it said when it failed last.
    pub error: Option<String>,
}

impl Display for PeerReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {}: {}", self.peer, self.used, self.reason)?;
        for path in &self.paths {
            write!(f, "; {path}")?;
        }
        Ok(())
    }
}

impl Display for PathReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(latency) = self.latency {
            write!(f, " {latency:.1?}")?;
        }
        if let Some(rate) = self.bytes_per_second {
            write!(f, " {:.2} GB/s", rate / 1e9)?;
        }
        write!(f, " of {} fetches", self.fetches)?;
        if self.is_left_alone {
            f.write_str(", left alone")?;
        }
        match &self.error {
            Some(error) => write!(f, ", last failure: {error}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
