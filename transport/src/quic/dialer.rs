//! Opens QUIC connections to nodes.
//!
//! A TLS 1.3 client finishes its handshake before the server has checked the client's certificate.
//! So a path counts as open only after an answered ping. Not here: operations on a path
//! (`path.rs`).

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use kvfleet_net::tls::{Identity, SERVER_NAME};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, Endpoint, default_runtime};

use super::path::QuicPath;
use super::server::peer_chain;
use super::watchdog::{wait_until_refused, watch_peer};
use super::{QuicConfig, path_error};
use crate::dial::{resolve, within};
use crate::{BoxFuture, Dialer, Path, PathError};

/// Opens QUIC paths. One UDP socket per address family, shared by all paths.
#[derive(Debug)]
pub struct QuicDialer {
    client: ClientConfig,
    identity: Identity,
    config: QuicConfig,
    /// Sockets, IPv4 first, opened on first use.
    endpoints: Mutex<[Option<Endpoint>; 2]>,
}

impl QuicDialer {
    /// A dialer that presents `identity` and trusts its authority. Opens no socket yet.
    #[must_use]
    pub fn new(identity: &Identity, config: QuicConfig) -> QuicDialer {
        let crypto = QuicClientConfig::try_from(identity.quic_client())
            .expect("ring has the cipher suite that QUIC's first packets need");
        let mut client = ClientConfig::new(Arc::new(crypto));
        client.transport_config(config.transport());
        QuicDialer { client, identity: identity.clone(), config, endpoints: Mutex::new([None, None]) }
    }

    async fn open(&self, peer: &str) -> Result<Arc<dyn Path>, PathError> {
        let address = resolve(peer).await?;
        let connection = self.connect(peer, address).await?;
        let path = QuicPath::new(connection.clone(), peer.to_owned(), self.config.stall_timeout);
        path.ping().await?;
        let end = self.identity.clone().server_end(peer_chain(&connection));
        tokio::spawn(watch_peer(connection, self.config.silence_max, end));
        Ok(Arc::new(path))
    }

    async fn connect(&self, peer: &str, address: SocketAddr) -> Result<Connection, PathError> {
        let unreachable = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
        let endpoint = self.endpoint(address).map_err(|error| unreachable(error.to_string()))?;
        let connecting = endpoint
            .connect_with(self.client.clone(), address, SERVER_NAME)
            .map_err(|error| unreachable(error.to_string()))?;
        tokio::select! {
            connected = connecting => connected.map_err(|error| match path_error(peer, &error) {
                PathError::Broken { cause, .. } => unreachable(cause),
                other => other,
            }),
            () = wait_until_refused(address) => Err(unreachable("no process listens on this port".to_owned())),
        }
    }

    fn endpoint(&self, address: SocketAddr) -> std::io::Result<Endpoint> {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut endpoints[usize::from(address.is_ipv6())];
        if let Some(endpoint) = slot {
            return Ok(endpoint.clone());
        }
        let any = match address {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let runtime = default_runtime().ok_or_else(|| std::io::Error::other("no tokio runtime here"))?;
        let socket = std::net::UdpSocket::bind(any)?;
        let endpoint = Endpoint::new(self.config.endpoint(), None, socket, runtime)?;
        Ok(slot.insert(endpoint).clone())
    }
}

impl Dialer for QuicDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move { within(&address, self.config.dial_timeout, self.open(&address)).await })
    }
}
