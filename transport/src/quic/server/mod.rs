//! The node's end: accepts connections and their streams.
//!
//! Not here: the handling of an operation (`serve.rs`).

use std::future::poll_fn;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kvfleet_net::tls::Identity;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, Endpoint, default_runtime};
use rustls_pki_types::CertificateDer;
use tokio::task::{JoinHandle, JoinSet};

use super::stream::{QuicStream, StreamPriorities};
use super::{CODE_DONE, CODE_REFUSED, CONNECTIONS_MAX, QuicConfig};
use crate::BlockService;
use crate::capacity::{Capacity, FRAME_BYTES_ESTIMATE, TrafficCounters};
use crate::serve::{AdmittedCaller, OperationTimeouts, Operations, ServeLimits, TIMES, admit};

/// Time for closing connections when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on udp {address}: {cause}; choose a free port or stop the process that holds it")]
pub struct QuicBindError {
    /// The address.
    pub address: SocketAddr,
    /// The error of the system.
    pub cause: std::io::Error,
}

/// Serves a node's blocks over QUIC until closed or dropped.
#[derive(Debug)]
pub struct QuicServer {
    endpoint: Endpoint,
    local: SocketAddr,
    traffic: TrafficCounters,
    accepting: JoinHandle<()>,
}

/// State shared by all streams of a server.
struct QuicServerState {
    identity: Identity,
    /// Decides on the service of each connection.
    service: Arc<dyn BlockService>,
    operations: Operations,
}

impl QuicServer {
    /// Listens on `address` (port 0: any) with the default settings. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(
        address: SocketAddr,
        identity: &Identity,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, QuicBindError> {
        QuicServer::bind_with(address, identity, &QuicConfig::default(), service)
    }

    /// Like [`QuicServer::bind`], with settings.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_with(
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, QuicBindError> {
        QuicServer::bind_with_timeouts(address, identity, config, TIMES, service)
    }

    /// Like [`QuicServer::bind_with`], with a capacity shared with the node's other servers; the
    /// limits in `config` are ignored.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_in(
        room: &Capacity,
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, QuicBindError> {
        QuicServer::bind_with_capacity(room.clone(), address, identity, config, TIMES, service)
    }

    fn bind_with_timeouts(
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        times: OperationTimeouts,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, QuicBindError> {
        let (fetch_bytes, save_bytes) = (config.fetch_bytes_in_flight_max, config.save_bytes_in_flight_max);
        let room = Capacity::new(fetch_bytes, save_bytes, FRAME_BYTES_ESTIMATE);
        QuicServer::bind_with_capacity(room, address, identity, config, times, service)
    }

    fn bind_with_capacity(
        room: Capacity,
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        times: OperationTimeouts,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, QuicBindError> {
        let failed = |cause| QuicBindError { address, cause };
        let crypto = QuicServerConfig::try_from(identity.quic_server())
            .expect("ring has the cipher suite that QUIC's first packets need");
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(config.transport());
        let socket = std::net::UdpSocket::bind(address).map_err(failed)?;
        let runtime = default_runtime().ok_or_else(|| failed(std::io::Error::other("no tokio runtime")))?;
        let endpoint = Endpoint::new(config.endpoint(), Some(server), socket, runtime).map_err(failed)?;
        let local = endpoint.local_addr().map_err(failed)?;
        let operations = Operations::new(room, ServeLimits { stall_timeout: config.stall_timeout, times });
        let traffic = operations.traffic.clone();
        let shared = Arc::new(QuicServerState { identity: identity.clone(), service, operations });
        let accepting = tokio::spawn(accept(endpoint.clone(), shared));
        Ok(QuicServer { endpoint, local, traffic, accepting })
    }

    /// The listening address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Traffic so far.
    #[must_use]
    pub fn traffic(&self) -> TrafficCounters {
        self.traffic.clone()
    }

    /// Ends every operation and connection; returns when peers were told or after one second.
    pub async fn close(self) {
        self.endpoint.close(CODE_DONE, b"server closes");
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.endpoint.wait_idle()).await;
    }
}

impl Drop for QuicServer {
    fn drop(&mut self) {
        self.endpoint.close(CODE_DONE, b"server closes");
        self.accepting.abort();
    }
}

async fn accept(endpoint: Endpoint, shared: Arc<QuicServerState>) {
    let mut connections = JoinSet::new();
    while let Some(incoming) = endpoint.accept().await {
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS_MAX {
            incoming.refuse();
            continue;
        }
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            match incoming.await {
                Ok(connection) => serve_connection(connection, shared).await,
                Err(error) => tracing::debug!(%error, "handshake failed"),
            }
        });
    }
}

async fn serve_connection(connection: Connection, shared: Arc<QuicServerState>) {
    let chain = peer_chain(&connection);
    let leaf = chain.first().map(|leaf| leaf.as_ref().into());
    let Some(AdmittedCaller { service, .. }) = admit(leaf, &shared.service) else {
        // The service logs the refusal itself, not for each connection.
        tracing::debug!(peer = %connection.remote_address(), "a caller was refused because of its certificate");
        return connection.close(CODE_REFUSED, b"this caller is not served");
    };
    let (mut streams, mates) = (JoinSet::new(), StreamPriorities::new(&connection));
    let mut end = pin!(shared.identity.clone().client_end(chain));
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept_bi() => accepted,
            error = &mut end => {
                tracing::debug!(%error, "a connection ends with the certificate of its caller");
                break;
            }
        };
        let Ok((send, recv)) = accepted else { return };
        while streams.try_join_next().is_some() {}
        let (shared, service, mates) = (Arc::clone(&shared), Arc::clone(&service), mates.clone());
        let mut operation = Box::pin(async move {
            let mut stream = QuicStream::accepted(send, recv, &mates);
            match shared.operations.serve(service.as_ref(), &mut stream).await {
                Ok(()) => stream.finish_and_drain().await,
                Err(error) => {
                    tracing::debug!(%error, "operation ended early");
                    stream.refuse();
                }
            }
        });
        // Most fetches from DRAM complete without waiting. A separate task would wake another
        // thread, which then writes to the connection while this one sends.
        if poll_once(operation.as_mut()).await.is_pending() {
            streams.spawn(operation);
        }
    }
    end_connection(&connection, streams, &mates).await;
}

/// Refuses new operations until the running ones have ended, then closes the connection.
async fn end_connection(connection: &Connection, mut running: JoinSet<()>, mates: &StreamPriorities) {
    loop {
        tokio::select! {
            ended = running.join_next() => if ended.is_none() { break },
            accepted = connection.accept_bi() => match accepted {
                Ok((send, recv)) => QuicStream::accepted(send, recv, mates).refuse(),
                Err(_) => return,
            }
        }
    }
    connection.close(CODE_REFUSED, b"the certificate of this caller is no longer valid");
}

/// Polls `work` once. As in a separate task, a panic ends only this operation.
async fn poll_once(mut work: Pin<&mut (impl Future<Output = ()> + Send)>) -> Poll<()> {
    poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)));
        Poll::Ready(polled.unwrap_or(Poll::Ready(())))
    })
    .await
}

/// The chain of the certificate that the peer proved to own, leaf first. Empty without one.
pub(super) fn peer_chain(connection: &Connection) -> Vec<CertificateDer<'static>> {
    let chain = connection.peer_identity().and_then(|identity| identity.downcast().ok());
    chain.map(|chain| *chain).unwrap_or_default()
}

#[cfg(test)]
mod tests;
