//! Chooses the path to a peer for each operation, among several candidates.
//!
//! Classes have an order: shared memory, then RDMA, then the network. Within the network, measured
//! fetch times decide (`pick/choice.rs` over `pick/estimate.rs`). A failing path is suspended for a
//! time (`pick/breaker.rs`). For the caller all candidates together are one [`Dialer`]
//! (`pick/dialer.rs`), and each dialed peer is one [`Path`](crate::Path) (`pick/path.rs`).
//! [`PeerReport`] explains the current choice at any time.
//!
//! Not here: the traffic of a path, and the choice of peers. A new kind needs a [`PathKind`] and a
//! [`PathCandidate`] with its dialer; no other code distinguishes the kinds
//! (`docs/adr/0039-choose-path-by-fetch-time.md`).

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
pub use reason::{Comparison, ComparisonOutcome, PickReason};

/// Transport of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PathKind {
    /// Host memory that both processes map.
    SharedMemory,
    /// One-sided reads and writes of another host's memory.
    Rdma,
    /// QUIC.
    Quic,
    /// TLS 1.3 over TCP.
    Tcp,
}

/// Classes of kinds, in order of preference, without measuring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PathClass {
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

    fn path_class(self) -> PathClass {
        match self {
            PathKind::SharedMemory => PathClass::SharedMemory,
            PathKind::Rdma => PathClass::Rdma,
            PathKind::Quic | PathKind::Tcp => PathClass::Network,
        }
    }
}

impl Display for PathKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One kind of path to peers.
#[derive(Clone)]
pub struct PathCandidate {
    /// Its transport.
    pub kind: PathKind,
    /// Opens the path. Must fail at once if a peer cannot be reached this way.
    pub dialer: Arc<dyn Dialer>,
}

/// Settings of the path choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PickRules {
    /// See [`ChoiceRules`].
    pub choice: ChoiceRules,
    /// See [`BreakerRules`].
    pub breaker: BreakerRules,
    /// How long a dial runs alone before the next candidate is dialed in parallel.
    pub head_start: Duration,
    /// Interval at which closed paths are redialed.
    pub maintenance_interval: Duration,
    /// Every how many such intervals each open path is pinged.
    pub ping_every_rounds: u32,
}

impl Default for PickRules {
    fn default() -> PickRules {
        PickRules {
            choice: ChoiceRules::default(),
            breaker: BreakerRules::default(),
            // Ten times the handshake of a good path, and five times a lost packet.
            head_start: Duration::from_millis(200),
            maintenance_interval: Duration::from_secs(1),
            ping_every_rounds: 5,
        }
    }
}

/// State of the paths to a peer.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// The peer's address.
    pub peer: String,
    /// The path of the last operation; before any, the network path that would be used.
    pub used: PathKind,
    /// Why that path is used.
    pub reason: PickReason,
    /// All candidates, best class first.
    pub paths: Vec<PathReport>,
}

/// State of one path to a peer.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Its transport.
    pub kind: PathKind,
    /// Whether it is suspended after failures.
    pub is_suspended: bool,
    /// Average round trip time without payload; `None` before the first ping.
    pub latency: Option<Duration>,
    /// Average throughput of a single fetch; `None` before the first.
    pub bytes_per_second: Option<f64>,
    /// Measured fetches.
    pub fetches: u64,
    /// Text of the last failure.
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
        write!(f, " over {} fetches", self.fetches)?;
        if self.is_suspended {
            f.write_str(", suspended")?;
        }
        match &self.error {
            Some(error) => write!(f, ", last failure: {error}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
