//! Which paths a client takes to nodes, by name; and what it says of them.
//!
//! Not here: how one of several is picked (`kvfleet_transport::pick`).

use std::fmt::{Display, Formatter};
use std::net::IpAddr;
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
    Quic,
    /// TLS 1.3 over TCP only: for nodes that all serve it.
    Tcp,
    /// Shared memory only: for nodes of this host.
    Shm,
    /// RDMA only: for nodes that all offer it.
    Rdma,
    /// Whatever there is, the best of it: shared memory with nodes of this host, RDMA with those that offer it, and QUIC until
    /// another network path is clearly faster.
    #[default]
    Auto,
}

/// A name that is no transport's, or not one of this program's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTransport {
    /// There is none of this name.
    #[error("`{0}` is no transport: choose one of quic, tcp, shm, rdma, auto")]
    Unknown(String),
    /// There is, but it was left out of this program.
    #[error(
        "this program was built without RDMA: build it with --features rdma, or choose one of quic, tcp, shm, auto"
    )]
    NotBuilt,
}

/// Which devices carry blocks by RDMA, and what it takes here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaSettings {
    /// The device's name, such as `mlx5_0`; the best there is when nothing is said.
    pub device: Option<String>,
    /// Further devices: each port of all of them is a rail; `all` for every device there is.
    pub devices: Vec<String>,
    /// A device by its PCI address, such as `0000:17:00.0`: the GPU that the blocks are for. Of devices that are equally good
    /// otherwise the nearest is taken, or taken first.
    pub near: Option<String>,
    /// The address of the device's port; for an IPv4 address, that of its network interface.
    pub address: Option<IpAddr>,
    /// Memory that blocks are read into and written from, in bytes, for all devices together. It is locked from the first path on.
    pub memory_bytes: usize,
    /// Class of the packets, by which networks without loss know them.
    pub traffic_class: u8,
}

impl RdmaSettings {
    /// Least memory that is of use, in bytes.
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

    /// The kinds of paths it may take, the best first; shared memory only where a client knows its directory, and RDMA where
    /// this program was built with it.
    #[must_use]
    pub fn kinds(self) -> &'static [PathKind] {
        self.kinds_where(cfg!(feature = "rdma"))
    }

    fn kinds_where(self, has_rdma: bool) -> &'static [PathKind] {
        match self {
            Transport::Quic => &[PathKind::Quic],
            Transport::Tcp => &[PathKind::Tcp],
            Transport::Shm => &[PathKind::SharedMemory],
            Transport::Rdma => &[PathKind::Rdma],
            Transport::Auto if has_rdma => &PathKind::ALL,
            Transport::Auto => &[PathKind::SharedMemory, PathKind::Quic, PathKind::Tcp],
        }
    }

    fn read(text: &str, has_rdma: bool) -> Result<Transport, NoTransport> {
        let found = Transport::ALL.into_iter().find(|transport| transport.name() == text);
        match found.ok_or_else(|| NoTransport::Unknown(text.to_owned()))? {
            Transport::Rdma if !has_rdma => Err(NoTransport::NotBuilt),
            transport => Ok(transport),
        }
    }

    /// # Errors
    /// When it needs a directory that is not configured, or RDMA that is not there.
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
            candidates.push(Candidate { kind: *kind, dialer });
        }
        let mut candidates = candidates.into_iter();
        let first = candidates.next().ok_or(ClientError::NoShmDir)?;
        Ok(PickDialer::new(first, candidates.collect(), PickRules::default()))
    }

    /// Where nothing else may be taken, what is missing is known at once; otherwise each dial says it, and others are taken.
    #[cfg(feature = "rdma")]
    fn rdma(self, config: &ClientConfig) -> Result<Arc<dyn Dialer>, ClientError> {
        use kvfleet_transport::rdma::{Rdma, RdmaChoice, RdmaConfig, RdmaDialer, RdmaNear, RdmaTuning};
        let RdmaSettings { device, devices, near, address, memory_bytes, traffic_class } =
            config.rdma.clone();
        let near = near.map_or(RdmaNear::Process, RdmaNear::Pci);
        let rdma = RdmaConfig {
            choice: RdmaChoice { device, devices, address, near },
            tuning: RdmaTuning { traffic_class, ..RdmaTuning::default() },
            local_bytes: memory_bytes.max(RdmaSettings::MEMORY_BYTES_MIN),
            ..RdmaConfig::default()
        };
        let (identity, tcp) = (&config.identity, config.tcp.clone());
        if self != Transport::Rdma {
            return Ok(Arc::new(RdmaDialer::late(rdma, identity, tcp)));
        }
        let opened = Rdma::open_all(&rdma).and_then(|rails| RdmaDialer::over(&rails, identity, tcp));
        opened
            .map(|dialer| Arc::new(dialer) as _)
            .map_err(|error| ClientError::Rdma { cause: error.to_string() })
    }

    #[cfg(not(feature = "rdma"))]
    fn rdma(self, _: &ClientConfig) -> Result<Arc<dyn Dialer>, ClientError> {
        Err(ClientError::Rdma { cause: NoTransport::NotBuilt.to_string() })
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
        Transport::read(text, cfg!(feature = "rdma"))
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
            assert_eq!(Transport::read(transport.name(), true), Ok(transport));
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
    fn a_build_without_rdma_says_what_to_do() {
        let error = Transport::read("rdma", false).unwrap_err();
        kvfleet_errors_doc::says("transport rdma, in a build without RDMA", &error, &[]);
        assert!(!Transport::Auto.kinds_where(false).contains(&PathKind::Rdma));
        assert!(Transport::Auto.kinds_where(true).contains(&PathKind::Rdma));
    }
}
