//! Kinds of paths that a client uses to nodes, by name, and statistics of them.
//!
//! Not here: how one of several is picked (`kvfleet_transport::pick`).

use std::fmt::{Display, Formatter};
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use kvfleet_transport::pick::{PathCandidate, PathKind, PeerReport, PickDialer, PickRules};
use kvfleet_transport::quic::QuicDialer;
use kvfleet_transport::shm::ShmDialer;
use kvfleet_transport::tcp::TcpDialer;
use kvfleet_transport::{Dialer, TrafficCounters};

use crate::{Client, ClientConfig, ClientError};

/// Kinds of paths that a client uses to nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// QUIC only.
    Quic,
    /// TLS 1.3 over TCP only: all nodes must serve it.
    Tcp,
    /// Shared memory only: for nodes of this host.
    Shm,
    /// RDMA only: all nodes must offer it.
    Rdma,
    /// The first available one: shared memory with nodes of this host, RDMA with nodes that offer
    /// it, the preferred network path, the other network path.
    #[default]
    Auto,
}

/// Error of parsing a transport's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportNameError {
    /// No transport has this name.
    #[error("`{0}` is no transport: choose one of quic, tcp, shm, rdma, auto")]
    Unknown(String),
    /// The transport is not compiled into this program.
    #[error(
        "this program was built without RDMA: build it with --features rdma, or choose one of quic, tcp, shm, auto"
    )]
    NotBuilt,
}

/// Settings of RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaSettings {
    /// The device's name, such as `mlx5_0`; `None` picks the best one.
    pub device: Option<String>,
    /// Further devices; each port of all of them is a rail. `all` selects every device.
    pub devices: Vec<String>,
    /// PCI address of the GPU that the blocks are for, such as `0000:17:00.0`. Among otherwise
    /// equal devices the nearest to it is preferred.
    pub near: Option<String>,
    /// The address of the device's port; for an IPv4 address, that of its network interface.
    pub address: Option<IpAddr>,
    /// Memory for reading and writing blocks, in bytes, for all devices together. It is locked from
    /// the first path on.
    pub memory_bytes: usize,
    /// Traffic class of the packets; lossless networks select their queue by it.
    pub traffic_class: u8,
}

impl RdmaSettings {
    /// Minimum useful memory, in bytes.
    pub const MEMORY_BYTES_MIN: usize = 1 << 20;
}

impl Default for RdmaSettings {
    fn default() -> RdmaSettings {
        RdmaSettings {
            device: None,
            devices: Vec::new(),
            near: None,
            address: None,
            memory_bytes: 256 << 20,
            traffic_class: 0,
        }
    }
}

impl Transport {
    /// Every transport.
    pub const ALL: [Transport; 5] =
        [Transport::Quic, Transport::Tcp, Transport::Shm, Transport::Rdma, Transport::Auto];

    /// Its name in flags and configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transport::Quic => "quic",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::Rdma => "rdma",
            Transport::Auto => "auto",
        }
    }

    /// The kinds of paths it may use, in the default order. Shared memory needs a configured
    /// directory; RDMA needs a build with it.
    #[must_use]
    pub fn kinds(self) -> &'static [PathKind] {
        self.kinds_for_build(cfg!(feature = "rdma"))
    }

    fn kinds_for_build(self, has_rdma: bool) -> &'static [PathKind] {
        match self {
            Transport::Quic => &[PathKind::Quic],
            Transport::Tcp => &[PathKind::Tcp],
            Transport::Shm => &[PathKind::SharedMemory],
            Transport::Rdma => &[PathKind::Rdma],
            Transport::Auto if has_rdma => &PathKind::ALL,
            Transport::Auto => &[PathKind::SharedMemory, PathKind::Tcp, PathKind::Quic],
        }
    }

    fn parse(text: &str, has_rdma: bool) -> Result<Transport, TransportNameError> {
        let found = Transport::ALL.into_iter().find(|transport| transport.name() == text);
        match found.ok_or_else(|| TransportNameError::Unknown(text.to_owned()))? {
            Transport::Rdma if !has_rdma => Err(TransportNameError::NotBuilt),
            transport => Ok(transport),
        }
    }

    /// # Errors
    /// If it needs a directory that is not configured, or RDMA that is not available.
    pub(crate) fn dialer(self, config: &ClientConfig) -> Result<PickDialer, ClientError> {
        let mut candidates = Vec::new();
        for kind in self.kinds() {
            let dialer: Arc<dyn Dialer> = match kind {
                PathKind::SharedMemory => match &config.shm {
                    Some(shm) => Arc::new(ShmDialer::new(shm.clone())),
                    None => continue,
                },
                PathKind::Rdma => self.rdma(config)?,
                PathKind::Tcp => Arc::new(TcpDialer::new(&config.identity, config.tcp.clone())),
                PathKind::Quic => Arc::new(QuicDialer::new(&config.identity, config.quic.clone())),
            };
            candidates.push(PathCandidate { kind: *kind, dialer });
        }
        let mut candidates = candidates.into_iter();
        let first = candidates.next().ok_or(ClientError::NoShmDir)?;
        let rules = PickRules { network: config.network, ..PickRules::default() };
        Ok(PickDialer::new(first, candidates.collect(), rules))
    }

    /// If the transport is RDMA only, a missing device is an error now. Otherwise each dial reports
    /// it, and other paths are used.
    #[cfg(feature = "rdma")]
    fn rdma(self, config: &ClientConfig) -> Result<Arc<dyn Dialer>, ClientError> {
        use kvfleet_rdma::{Rdma, RdmaAffinity, RdmaChoice, RdmaConfig, RdmaDialer, RdmaTuning};
        let RdmaSettings { device, devices, near, address, memory_bytes, traffic_class } =
            config.rdma.clone();
        let near = near.map_or(RdmaAffinity::Process, RdmaAffinity::Pci);
        let rdma = RdmaConfig {
            choice: RdmaChoice { device, devices, address, affinity: near },
            tuning: RdmaTuning { traffic_class, ..RdmaTuning::default() },
            local_bytes: memory_bytes.max(RdmaSettings::MEMORY_BYTES_MIN),
            ..RdmaConfig::default()
        };
        let (identity, tcp) = (&config.identity, config.tcp.clone());
        if self != Transport::Rdma {
            return Ok(Arc::new(RdmaDialer::lazy(rdma, identity, tcp)));
        }
        let opened = Rdma::open_all(&rdma).and_then(|rails| RdmaDialer::with_rails(&rails, identity, tcp));
        opened
            .map(|dialer| Arc::new(dialer) as _)
            .map_err(|error| ClientError::Rdma { cause: error.to_string() })
    }

    #[cfg(not(feature = "rdma"))]
    fn rdma(self, _: &ClientConfig) -> Result<Arc<dyn Dialer>, ClientError> {
        Err(ClientError::Rdma { cause: TransportNameError::NotBuilt.to_string() })
    }
}

impl Display for Transport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Transport {
    type Err = TransportNameError;

    fn from_str(text: &str) -> Result<Self, TransportNameError> {
        Transport::parse(text, cfg!(feature = "rdma"))
    }
}

impl Client {
    /// Encoded bytes of blocks transferred over each kind of path so far: sent by saves, received
    /// by fetches. Empty if the caller supplied its own dialer.
    #[must_use]
    pub fn carried(&self) -> Vec<(PathKind, TrafficCounters)> {
        self.pick_dialer.as_ref().map(|picks| picks.traffic()).unwrap_or_default()
    }

    /// The path in use to each known node, and the reason. Empty if the caller supplied its own
    /// dialer.
    #[must_use]
    pub fn path_reports(&self) -> Vec<PeerReport> {
        self.pick_dialer.as_ref().map(|picks| picks.reports()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn transport_names_round_trip() {
        for transport in Transport::ALL {
            assert_eq!(Transport::parse(transport.name(), true), Ok(transport));
        }
        let not_rdma = |transport: &Transport| *transport != Transport::Rdma;
        for transport in Transport::ALL.into_iter().filter(not_rdma) {
            assert_eq!(transport.to_string().parse(), Ok(transport));
        }
        let error = "carrier pigeon".parse::<Transport>().unwrap_err().to_string();
        for transport in Transport::ALL {
            assert!(error.contains(transport.name()), "{error}");
        }
    }

    #[test]
    fn build_without_rdma_names_the_remedy() {
        let error = Transport::parse("rdma", false).unwrap_err();
        kvfleet_errors_doc::says("transport rdma, in a build without RDMA", &error, &[]);
        assert!(!Transport::Auto.kinds_for_build(false).contains(&PathKind::Rdma));
        assert!(Transport::Auto.kinds_for_build(true).contains(&PathKind::Rdma));
    }
}
