//! The node's end: accepts connections and serves their operations, one after another.
//!
//! Not here: the handling of an operation (`serve.rs`).

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use kvfleet_net::accept_limits::{AcceptWarnings, connection_limit};
use kvfleet_net::tls::access::rule_of;
use kvfleet_net::tls::{Identity, role_of};
use kvfleet_proto::data::{self, data_request::Op};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::TcpConfig;
use super::buffers::BufferSize;
use super::handshake;
use super::socket::listen;
use super::stream::{StreamShared, TlsStream};
use crate::BlockService;
use crate::capacity::{Capacity, FRAME_BYTES_ESTIMATE, TrafficCounters};
use crate::serve::{AdmittedCaller, OperationTimeouts, Operations, ServeError, ServeLimits, TIMES, admit};
use crate::stream::StreamError;
use crate::upgrade::{UpgradeOffer, UpgradeReply, UpgradeRequest, UpgradedConnection};

/// Pause after a failed accept: descriptors or memory are exhausted, and an immediate retry would
/// fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections get one of this many parts of the open-file limit: control calls need files in the
/// same process, and so does the SSD tier.
const OPEN_FILES_SHARE: usize = 2;

/// Value of `AttachReply.outcome`: there is no upgrade, and the connection goes on without it.
pub const UPGRADE_REFUSED: u32 = 3;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on tcp {address}: {cause}; choose a free port or stop the process that holds it")]
pub struct TcpBindError {
    /// The address.
    pub address: SocketAddr,
    /// The error of the system.
    pub cause: std::io::Error,
}

/// Serves a node's blocks over TLS on TCP until closed or dropped.
#[derive(Debug)]
pub struct TcpServer {
    local: SocketAddr,
    traffic: TrafficCounters,
    accepting: JoinHandle<()>,
}

/// State shared by all connections of a server.
struct TcpServerState {
    identity: Identity,
    service: Arc<dyn BlockService>,
    operations: Operations,
    tls: Arc<ServerConfig>,
    ends: StreamShared,
    config: TcpConfig,
    /// The configured limit, reduced to what the process's open-file limit allows.
    connections_max: usize,
    upgrade: Option<Arc<dyn UpgradeOffer>>,
}

/// The caller of a connection, and the protocol that took the connection over.
struct ServedCaller {
    caller: AdmittedCaller,
    upgraded: Option<Box<dyn UpgradedConnection>>,
}

/// Options of a server besides its settings.
pub(crate) struct ServerOptions {
    pub(crate) times: OperationTimeouts,
    pub(crate) upgrade: Option<Arc<dyn UpgradeOffer>>,
}

impl ServerOptions {
    fn new(times: OperationTimeouts) -> ServerOptions {
        ServerOptions { times, upgrade: None }
    }
}

/// The capacity of a server that shares none.
fn own_capacity(config: &TcpConfig) -> Capacity {
    Capacity::new(config.fetch_bytes_in_flight_max, config.save_bytes_in_flight_max, FRAME_BYTES_ESTIMATE)
}

impl TcpServer {
    /// Listens on `address` (port 0: any) with the default settings. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(
        address: SocketAddr,
        identity: &Identity,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        TcpServer::bind_with(address, identity, &TcpConfig::default(), service)
    }

    /// Like [`TcpServer::bind`], with settings.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_with(
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        TcpServer::bind_with_options(
            own_capacity(config),
            address,
            identity,
            config,
            &ServerOptions::new(TIMES),
            service,
        )
    }

    /// Like [`TcpServer::bind_with`], with a capacity shared with the node's other servers; the
    /// limits in `config` are ignored.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_in(
        room: &Capacity,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        TcpServer::bind_with_options(
            room.clone(),
            address,
            identity,
            config,
            &ServerOptions::new(TIMES),
            service,
        )
    }

    /// Like [`TcpServer::bind_in`], and offers an upgrade to clients that ask for it.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_offering(
        room: &Capacity,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        offer: Arc<dyn UpgradeOffer>,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        let terms = ServerOptions { times: TIMES, upgrade: Some(offer) };
        TcpServer::bind_with_options(room.clone(), address, identity, config, &terms, service)
    }

    #[cfg(test)]
    pub(super) fn bind_with_timeouts(
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        times: OperationTimeouts,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        TcpServer::bind_with_options(
            own_capacity(config),
            address,
            identity,
            config,
            &ServerOptions::new(times),
            service,
        )
    }

    pub(crate) fn bind_with_options(
        room: Capacity,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        terms: &ServerOptions,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, TcpBindError> {
        let failed = |cause| TcpBindError { address, cause };
        let listener = listen(address, config.congestion_control.as_deref()).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let limits = ServeLimits { stall_timeout: config.stall_timeout, times: terms.times };
        let operations = Operations::new(room, limits);
        let traffic = operations.traffic.clone();
        let shared = TcpServerState {
            identity: identity.clone(),
            service,
            operations,
            tls: Arc::new(identity.tcp_server()),
            ends: StreamShared {
                buffers: Arc::default(),
                received: Arc::default(),
                min_size: BufferSize::Small,
            },
            config: config.clone(),
            connections_max: connection_limit(config.connections_max, OPEN_FILES_SHARE),
            upgrade: terms.upgrade.clone(),
        };
        Ok(TcpServer { local, traffic, accepting: tokio::spawn(accept(listener, Arc::new(shared))) })
    }

    /// The listening address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Traffic so far. Blocks that an upgraded protocol moves beside the connection are not included.
    #[must_use]
    pub fn traffic(&self) -> TrafficCounters {
        self.traffic.clone()
    }

    /// Ends every operation and connection; returns when all have ended.
    pub async fn close(mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await; // cancelled, as asked
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<TcpServerState>) {
    let (mut connections, mut accept_warnings) = (JoinSet::new(), AcceptWarnings::default());
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                if accept_warnings.should_warn() {
                    tracing::warn!(%error, "cannot accept connections; raise the limit of open files if \
                        there are too many");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() >= shared.connections_max {
            let _ = socket.set_zero_linger(); // the reset informs the peer, and no state stays here
            continue;
        }
        connections.spawn(serve_connection(socket, Arc::clone(&shared)));
    }
}

async fn serve_connection(socket: TcpStream, shared: Arc<TcpServerState>) {
    let _ = socket.set_nodelay(true); // on failure answers are only slower
    let handshake = handshake::accept(socket, &shared.tls, shared.ends.clone());
    match timeout(shared.config.dial_timeout, handshake).await {
        Ok(Ok((stream, chain))) => {
            let leaf = chain.first().map(|leaf| leaf.as_ref().into());
            let Some(by) = admit(leaf, &shared.service) else {
                // The service logs the refusal itself, not for each connection.
                return tracing::debug!("a caller was refused because of its certificate");
            };
            let served = ServedCaller { caller: by, upgraded: None };
            serve_operations(stream, served, &shared, shared.identity.clone().client_end(chain)).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "handshake failed"),
        Err(_) => tracing::debug!("handshake took too long"),
    }
}

/// Accepts one connection outside a server, for tests that answer it message by message.
pub(crate) async fn accept_unserved(
    listener: &TcpListener,
    identity: &Identity,
) -> Result<TlsStream, StreamError> {
    let broken = |error: std::io::Error| StreamError::Broken(error.to_string());
    let (socket, _) = listener.accept().await.map_err(broken)?;
    let ends =
        StreamShared { buffers: Arc::default(), received: Arc::default(), min_size: BufferSize::Large };
    Ok(handshake::accept(socket, &Arc::new(identity.tcp_server()), ends).await?.0)
}

/// Serves one operation after another, until the connection ends, or `end` after an operation.
async fn serve_operations(
    mut stream: TlsStream,
    mut served: ServedCaller,
    shared: &TcpServerState,
    end: impl Future<Output = rustls::Error>,
) {
    let mut end = pin!(end);
    loop {
        let has_data = tokio::select! {
            biased;
            error = &mut end => {
                tracing::debug!(%error, "a connection ends with the certificate of its caller");
                return stream.close();
            }
            has_data = timeout(shared.config.server_idle_timeout(), stream.wait_for_data()) => has_data,
        };
        match has_data {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => return stream.close(),
            Ok(Err(error)) => return tracing::debug!(%error, "connection ended"),
        }
        if let Err(error) = serve_operation(&mut stream, &mut served, shared).await {
            // Its remaining bytes would be taken for the next operation.
            tracing::debug!(%error, "operation ended early");
            return;
        }
        stream.release_buffers();
    }
}

/// The answer to a client that asks for RDMA when there is none.
fn rdma_unavailable() -> data::AttachReply {
    let why = "its rdma.enabled is not set, or its log says why it has none".to_owned();
    data::AttachReply { outcome: UPGRADE_REFUSED, why, ..data::AttachReply::default() }
}

/// Whether the role of this certificate may use RDMA.
fn may_attach(leaf: &[u8]) -> bool {
    role_of(leaf).is_ok_and(|role| rule_of("data/Attach").is_some_and(|rule| rule.check(&role).is_ok()))
}

/// The answer to a client with a role that may not use RDMA.
fn attach_denied() -> data::AttachReply {
    let why = "the role of this certificate may not fetch blocks".to_owned();
    data::AttachReply { outcome: UPGRADE_REFUSED, why, ..data::AttachReply::default() }
}

async fn serve_operation(
    stream: &mut TlsStream,
    served: &mut ServedCaller,
    shared: &TcpServerState,
) -> Result<(), ServeError> {
    let (service, operations) = (served.caller.service.as_ref(), &shared.operations);
    let request = operations.request(stream).await?;
    if let Some(upgraded) = &mut served.upgraded {
        return upgraded.serve(request, service, operations, stream).await;
    }
    if matches!(request.op, Some(Op::Attach(_))) && !may_attach(&served.caller.leaf) {
        return operations.answer(stream, &attach_denied()).await;
    }
    if let (Some(Op::Attach(attach)), Some(offer)) = (&request.op, &shared.upgrade) {
        let AdmittedCaller { leaf, may_map, .. } = &served.caller;
        let asked = UpgradeRequest { attach: attach.clone(), caller: leaf, may_map: *may_map };
        let UpgradeReply { connection, message } = Arc::clone(offer).attach(asked).await?;
        served.upgraded = connection;
        return operations.answer(stream, &message).await;
    }
    if let Some(Op::Attach(_)) = request.op {
        return operations.answer(stream, &rdma_unavailable()).await;
    }
    operations.serve_request(request, service, stream).await
}
