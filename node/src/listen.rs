//! The node's block servers: QUIC, and TLS over TCP at the same port, which also offers RDMA.
//!
//! One address serves both, so no further address is announced. Both servers share the node's
//! in-flight limits and its service, which admits callers by certificate. Not here: answers
//! (`block_service`) and the transports (`kvfleet-transport`).

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;

use kvfleet_net::tls::Identity;
use kvfleet_transport::quic::{self, QuicConfig, QuicServer};
use kvfleet_transport::tcp::{self, TcpServer};
use kvfleet_transport::{BlockService, Capacity, TrafficCounters};

use crate::config::NodeConfig;
use crate::rdma::{self, RdmaOfferHandle};

/// Maximum number of ephemeral ports tried until one is free for both protocols.
const PORTS_TRIED_MAX: usize = 32;

/// Why a node cannot listen for block bytes.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The port, as QUIC's.
    #[error("data_listen: {0}")]
    Quic(#[from] quic::QuicBindError),
    /// The same port, as TCP's.
    #[error("data_listen: {0}, or set data_tcp to false to serve QUIC only")]
    Tcp(#[from] tcp::TcpBindError),
}

/// The node's block servers.
#[derive(Debug)]
pub(crate) struct DataServers {
    room: Capacity,
    quic: QuicServer,
    tcp: Option<TcpServer>,
    offer: Option<RdmaOfferHandle>,
}

impl DataServers {
    /// Listens at `address` (port 0: any port that is free for both protocols).
    pub(crate) fn bind(
        address: SocketAddr,
        identity: &Identity,
        config: &NodeConfig,
        service: &Arc<dyn BlockService>,
        offer: Option<RdmaOfferHandle>,
    ) -> Result<DataServers, ListenError> {
        let frame_bytes_max = config.frame_bytes_max() as u64;
        let room = Capacity::new(config.fetch_inflight_bytes, config.save_inflight_bytes, frame_bytes_max);
        let mut tries = 0;
        loop {
            let quic = QuicConfig::default();
            let quic = QuicServer::bind_in(&room, address, identity, &quic, Arc::clone(service))?;
            if !config.data_tcp {
                return Ok(DataServers { room, quic, tcp: None, offer: None });
            }
            let at = quic.local_addr();
            tries += 1;
            match rdma::bind(&room, offer.as_ref(), at, identity, Arc::clone(service)) {
                Ok(tcp) => return Ok(DataServers { room, quic, tcp: Some(tcp), offer }),
                Err(error) if may_try_another(address, &error, tries) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The listening address.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.quic.local_addr()
    }

    /// The limits that all servers share.
    pub(crate) fn room(&self) -> Capacity {
        self.room.clone()
    }

    /// Bytes carried by each transport, by name.
    pub(crate) fn carried(&self) -> Vec<(&'static str, TrafficCounters)> {
        let quic = ("quic", self.quic.traffic());
        let tcp = self.tcp.as_ref().map(|tcp| ("tcp", tcp.traffic()));
        let rdma = self.offer.as_ref().map(|offer| ("rdma", rdma::carried(offer)));
        std::iter::once(quic).chain(tcp).chain(rdma).collect()
    }

    /// Ends every operation and connection, and waits for the end.
    pub(crate) async fn close(self) {
        let tcp = async {
            if let Some(tcp) = self.tcp {
                tcp.close().await;
            }
        };
        tokio::join!(self.quic.close(), tcp);
    }
}

/// Whether the system chose the port and it was merely taken.
fn may_try_another(asked: SocketAddr, error: &tcp::TcpBindError, tries: usize) -> bool {
    asked.port() == 0 && error.cause.kind() == ErrorKind::AddrInUse && tries < PORTS_TRIED_MAX
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use kvfleet_net::tls::Role;
    use kvfleet_transport::quic::QuicDialer;
    use kvfleet_transport::suite::{
        MemoryService, PATIENCE, fetch, fetch_request, frame, hash, hashes, in_dram,
    };
    use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
    use kvfleet_transport::{Dialer, FetchAnswer};
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::*;

    fn identity() -> Identity {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(Role::Node(None).dns_names()).unwrap();
        let cert = params.signed_by(&key, &authority).unwrap();
        let (ca, cert, key) = (authority.pem(), cert.pem(), key.serialize_pem());
        Identity::from_pem(ca.as_bytes(), cert.as_bytes(), key.as_bytes()).unwrap()
    }

    #[tokio::test]
    async fn in_flight_limit_is_shared_by_both_servers() {
        let (identity, service) = (identity(), MemoryService::default());
        (0..2).for_each(|number| service.hold(frame(hash(number), 4000)));
        let config = NodeConfig { fetch_inflight_bytes: 1, ..NodeConfig::default() };
        let blocks: Arc<dyn BlockService> = Arc::new(service.clone());
        let any = "127.0.0.1:0".parse().unwrap();
        let servers = DataServers::bind(any, &identity, &config, &blocks, None).unwrap();
        let address = servers.local_addr().to_string();
        let quic = QuicDialer::new(&identity, QuicConfig::default()).dial(address.clone()).await.unwrap();
        let tcp = TcpDialer::new(&identity, TcpConfig::default()).dial(address).await.unwrap();
        service.set_gate(1);
        let seen = watch::Sender::new(0);
        let mut came = seen.subscribe();
        let first = async {
            let mut sink = |_| seen.send_modify(|seen| *seen += 1);
            quic.fetch(fetch_request(&hashes(2)), &mut sink).await.unwrap()
        };
        let second = async {
            came.wait_for(|seen| *seen == 1).await.unwrap();
            let busy = fetch(&*tcp, fetch_request(&hashes(2))).await.unwrap();
            service.set_gate(10);
            busy
        };
        let (first, second) = tokio::join!(first, second);
        assert_eq!(
            first,
            FetchAnswer::Hit { tiers: in_dram(2) },
            "a single fetch is admitted whatever its size"
        );
        assert!(matches!(second, FetchAnswer::Busy { .. }), "{second:?}");
        let again = fetch(&*tcp, fetch_request(&hashes(2))).await.unwrap();
        assert_eq!(
            again,
            FetchAnswer::Hit { tiers: in_dram(2) },
            "the finished fetch freed its in-flight bytes"
        );
        let frame = frame(hash(0), 4000).bytes.len() as u64;
        let sent: Vec<_> = servers.carried().iter().map(|(path, all)| (*path, all.sent_bytes())).collect();
        assert_eq!(sent, [("quic", 2 * frame), ("tcp", 2 * frame)]);
    }

    #[tokio::test]
    async fn in_flight_limit_holds_for_concurrent_first_fetches() {
        const PAYLOAD: u32 = 1 << 20;
        let (identity, service) = (identity(), MemoryService::default());
        (0..2).for_each(|number| service.hold(frame(hash(number), PAYLOAD)));
        let one = 2 * frame(hash(0), PAYLOAD).bytes.len() as u64;
        let mut config = NodeConfig { block_bytes: PAYLOAD.into(), ..NodeConfig::default() };
        config.fetch_inflight_bytes = 4 * 2 * config.frame_bytes_max() as u64;
        let blocks: Arc<dyn BlockService> = Arc::new(service.clone());
        let any = "127.0.0.1:0".parse().unwrap();
        let servers = DataServers::bind(any, &identity, &config, &blocks, None).unwrap();
        let dialer = QuicDialer::new(&identity, QuicConfig::default());
        let path = dialer.dial(servers.local_addr().to_string()).await.unwrap();
        // No frame is sent before all fetches were requested.
        service.set_gate(0);
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let path = Arc::clone(&path);
            asking.spawn(async move { fetch(&*path, fetch_request(&hashes(2))).await.unwrap() });
        }
        let numbers = async {
            loop {
                let [fetches, ..] = servers.room().class_counts();
                if fetches.admitted + fetches.refused == 16 {
                    return fetches;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let numbers = timeout(PATIENCE, numbers).await.unwrap();
        let peak = numbers.admitted * one;
        assert!(peak <= config.fetch_inflight_bytes, "{peak} bytes are in flight, above the limit");
        assert_eq!(numbers.admitted, 4, "the whole limit is used");
        service.set_gate(100);
        let answers = timeout(PATIENCE, asking.join_all()).await.unwrap();
        let are_whole = answers.iter().filter(|answer| **answer == FetchAnswer::Hit { tiers: in_dram(2) });
        assert_eq!(are_whole.count(), 4);
    }

    #[test]
    fn only_an_ephemeral_port_is_retried() {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let this: SocketAddr = "127.0.0.1:7400".parse().unwrap();
        let error = |kind: ErrorKind| tcp::TcpBindError { address: this, cause: kind.into() };
        assert!(may_try_another(any, &error(ErrorKind::AddrInUse), 1));
        assert!(!may_try_another(any, &error(ErrorKind::AddrInUse), PORTS_TRIED_MAX));
        assert!(!may_try_another(any, &error(ErrorKind::PermissionDenied), 1));
        assert!(!may_try_another(this, &error(ErrorKind::AddrInUse), 1));
    }
}
