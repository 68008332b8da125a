//! Which paths a client takes to nodes, by name; and what it says of them.
//!
//! Not here: how one of several is picked (`kvfleet_transport::pick`).

use std::fmt::{Display, Formatter};
use std::str::FromStr;
use std::sync::Arc;

use kvfleet_transport::pick::{Candidate, PathKind, PeerReport, PickDialer, PickRules};
use kvfleet_transport::quic::QuicDialer;
use kvfleet_transport::shm::ShmDialer;
use kvfleet_transport::tcp::TcpDialer;
use kvfleet_transport::{Carried, Dialer};

use crate::{Client, ClientConfig, ClientError};

/// Which paths a client takes to nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// QUIC only.
    #[default]
    Quic,
    /// TLS 1.3 over TCP only: for nodes that all serve it.
    Tcp,
    /// Shared memory only: for nodes of this host.
    Shm,
    /// Whatever there is, the best of it: shared memory with nodes of this host, and QUIC until another network path is
    /// clearly faster.
    Auto,
}

/// A name that is no transport's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no transport: choose one of quic, tcp, shm, auto")]
pub struct NoTransport(String);

impl Transport {
    /// Every transport.
    pub const ALL: [Transport; 4] = [Transport::Quic, Transport::Tcp, Transport::Shm, Transport::Auto];

    /// Its name in flags and configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transport::Quic => "quic",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::Auto => "auto",
        }
    }

    /// The kinds of paths it may take, the default first; shared memory only where a client knows its directory.
    #[must_use]
    pub fn kinds(self) -> &'static [PathKind] {
        match self {
            Transport::Quic => &[PathKind::Quic],
            Transport::Tcp => &[PathKind::Tcp],
            Transport::Shm => &[PathKind::SharedMemory],
            Transport::Auto => &[PathKind::SharedMemory, PathKind::Quic, PathKind::Tcp],
        }
    }

    /// # Errors
    /// When it needs a directory that is not configured.
    pub(crate) fn dialer(self, config: &ClientConfig) -> Result<PickDialer, ClientError> {
        let candidate = |kind: &PathKind| {
            let dialer: Arc<dyn Dialer> = match kind {
                PathKind::SharedMemory => Arc::new(ShmDialer::new(config.shm.clone()?)),
                PathKind::Tcp => Arc::new(TcpDialer::new(&config.identity, config.tcp.clone())),
                PathKind::Quic | PathKind::Rdma => {
                    Arc::new(QuicDialer::new(&config.identity, config.quic.clone()))
                }
            };
            Some(Candidate { kind: *kind, dialer })
        };
        let mut candidates = self.kinds().iter().filter_map(candidate);
        let first = candidates.next().ok_or(ClientError::NoShmDir)?;
        Ok(PickDialer::new(first, candidates.collect(), PickRules::default()))
    }
}

impl Display for Transport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Transport {
    type Err = NoTransport;

    fn from_str(text: &str) -> Result<Self, NoTransport> {
        let found = Transport::ALL.into_iter().find(|transport| transport.name() == text);
        found.ok_or_else(|| NoTransport(text.to_owned()))
    }
}

impl Client {
    /// Encoded bytes of blocks that went over each kind of path so far: sent are those of saves, received those of
    /// fetches. Nothing where the caller brought a dialer of its own.
    #[must_use]
    pub fn carried(&self) -> Vec<(PathKind, Carried)> {
        self.picks.as_ref().map(|picks| picks.carried()).unwrap_or_default()
    }

    /// Which path is taken to each node that was met, and why. Nothing where the caller brought a dialer of its own.
    #[must_use]
    pub fn path_reports(&self) -> Vec<PeerReport> {
        self.picks.as_ref().map(|picks| picks.reports()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_transport_is_read_as_it_is_written() {
        for transport in Transport::ALL {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        let error = "carrier pigeon".parse::<Transport>().unwrap_err().to_string();
        for transport in Transport::ALL {
            assert!(error.contains(transport.name()), "{error}");
        }
    }
}
