//! Chooses the path to a peer for each operation, among several candidates, by a fixed order.
//!
//! Shared memory comes first, then RDMA, then the network path that the configuration prefers, then
//! the other one. The first open path is used. A failing path is suspended for a time
//! (`pick/breaker.rs`). For the caller all candidates together are one [`Dialer`]
//! (`pick/dialer.rs`), and each dialed peer is one [`Path`](crate::Path) (`pick/path.rs`).
//! [`PeerReport`] explains the current choice at any time.
//!
//! Not here: the traffic of a path, and the choice of peers. A new kind needs a [`PathKind`] and a
//! [`PathCandidate`] with its dialer; no other code distinguishes the kinds
//! (`docs/adr/0080-keep-measured-mechanisms.md`).

use std::fmt::{Display, Formatter};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::Dialer;

pub(crate) mod breaker;
mod dialer;
mod path;
mod peer;
mod reason;

pub use breaker::BreakerRules;
pub use dialer::PickDialer;
pub use reason::PickReason;

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

/// Classes of kinds, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PathClass {
    SharedMemory,
    Rdma,
    Network,
}

impl PathKind {
    /// Every kind, in the default order of preference.
    pub const ALL: [PathKind; 4] = [PathKind::SharedMemory, PathKind::Rdma, PathKind::Tcp, PathKind::Quic];

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

/// The preferred network path. The other one is used while this one cannot be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkPreference {
    /// TLS 1.3 over TCP.
    #[default]
    Tcp,
    /// QUIC.
    Quic,
}

/// No network path has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no network path: choose tcp or quic")]
pub struct NetworkNameError(String);

impl NetworkPreference {
    /// Its kind of path.
    #[must_use]
    pub fn kind(self) -> PathKind {
        match self {
            NetworkPreference::Tcp => PathKind::Tcp,
            NetworkPreference::Quic => PathKind::Quic,
        }
    }
}

impl Display for NetworkPreference {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.kind().fmt(f)
    }
}

impl FromStr for NetworkPreference {
    type Err = NetworkNameError;

    fn from_str(text: &str) -> Result<NetworkPreference, NetworkNameError> {
        let all = [NetworkPreference::Tcp, NetworkPreference::Quic];
        let found = all.into_iter().find(|network| network.kind().name() == text);
        found.ok_or_else(|| NetworkNameError(text.to_owned()))
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PickRules {
    /// The preferred network path.
    pub network: NetworkPreference,
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
            network: NetworkPreference::default(),
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
    /// The path of the last operation; before any, the preferred network path.
    pub used: PathKind,
    /// Why that path is used.
    pub reason: PickReason,
    /// All candidates, in order of preference.
    pub paths: Vec<PathReport>,
}

/// State of one path to a peer.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// Its transport.
    pub kind: PathKind,
    /// Whether it is suspended after failures.
    pub is_suspended: bool,
    /// Last round trip time without payload; `None` before the first ping.
    pub latency: Option<Duration>,
    /// Text of the last failure.
    pub error: Option<String>,
}

impl Display for PeerReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {}: {}", self.peer, self.used, self.reason)?;
        for path in &self.paths {
            let is_told = self.reason.names(path.kind);
            if let Some(error) = path.error.as_ref().filter(|_| !is_told) {
                let state = if path.is_suspended { ", suspended" } else { "" };
                write!(f, "; {}{state}, last failure: {error}", path.kind)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
