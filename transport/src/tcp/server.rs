//! The node's end: accepts connections, and serves what each asks, one operation after the other.
//!
//! Not here: what is done with an operation (`serve.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvfleet_proto::accepting::{Refused, connections_within};
use kvfleet_proto::data::{self, data_request::Op};
use kvfleet_proto::tls::Identity;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::TcpConfig;
use super::buffers::Size;
use super::handshake;
use super::socket::listen;
use super::stream::{Ends, TlsStream};
use crate::BlockService;
use crate::room::{Carried, FRAME_BYTES_GUESS, Room};
use crate::serve::{Admitted, Limits, Operations, ServeError, TIMES, Times, admit};

/// Wait after the system gave no connection: it is out of descriptors or memory, and asking at once gives nothing
/// either.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Of the files that the process may have open, connections get this part at most: control calls come to the same process, and a
/// tier has files too.
const SHARE_OF_FILES: usize = 2;

/// Number of `Attached.outcome`: there is no RDMA, and the connection goes on without.
pub(crate) const RDMA_REFUSED: u32 = 3;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on tcp {address}: {cause}; choose a free port or stop the process that holds it")]
pub struct BindError {
    /// Where.
    pub address: SocketAddr,
    /// What the system said.
    pub cause: std::io::Error,
}

/// Serves a node's blocks with TLS over TCP until closed or dropped.
#[derive(Debug)]
pub struct TcpServer {
    local: SocketAddr,
    carried: Carried,
    accepting: JoinHandle<()>,
}

/// What all connections of a server share.
struct Shared {
    service: Arc<dyn BlockService>,
    operations: Operations,
    tls: Arc<ServerConfig>,
    ends: Ends,
    config: TcpConfig,
    /// Of those in the settings, what the files of the process allow.
    connections_max: usize,
    #[cfg(feature = "rdma")]
    offer: Option<Arc<crate::rdma::RdmaOffer>>,
}

/// Whose connection it is, and what it has of the node.
struct Served {
    by: Admitted,
    #[cfg(feature = "rdma")]
    attached: Option<crate::rdma::Attached>,
}

/// What a server does and for how long, beside its settings.
pub(crate) struct Terms {
    pub(crate) times: Times,
    #[cfg(feature = "rdma")]
    pub(crate) offer: Option<Arc<crate::rdma::RdmaOffer>>,
}

impl Terms {
    fn of(times: Times) -> Terms {
        Terms {
            times,
            #[cfg(feature = "rdma")]
            offer: None,
        }
    }
}

/// Room of a server that shares none.
fn own_room(config: &TcpConfig) -> Room {
    Room::new(config.fetch_bytes_in_flight_max, config.save_bytes_in_flight_max, FRAME_BYTES_GUESS)
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
    ) -> Result<TcpServer, BindError> {
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
    ) -> Result<TcpServer, BindError> {
        TcpServer::bind_as(own_room(config), address, identity, config, &Terms::of(TIMES), service)
    }

    /// Like [`TcpServer::bind_with`], with bounds that other servers of the same node share: those of `config` are not
    /// looked at.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_in(
        room: &Room,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, BindError> {
        TcpServer::bind_as(room.clone(), address, identity, config, &Terms::of(TIMES), service)
    }

    /// Like [`TcpServer::bind_in`], and offers RDMA to clients that ask for it.
    ///
    /// # Errors
    /// When the address cannot be bound.
    #[cfg(feature = "rdma")]
    pub fn bind_offering(
        room: &Room,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        offer: Arc<crate::rdma::RdmaOffer>,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, BindError> {
        let terms = Terms { times: TIMES, offer: Some(offer) };
        TcpServer::bind_as(room.clone(), address, identity, config, &terms, service)
    }

    #[cfg(test)]
    pub(super) fn bind_timed(
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        times: Times,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, BindError> {
        TcpServer::bind_as(own_room(config), address, identity, config, &Terms::of(times), service)
    }

    pub(crate) fn bind_as(
        room: Room,
        address: SocketAddr,
        identity: &Identity,
        config: &TcpConfig,
        terms: &Terms,
        service: Arc<dyn BlockService>,
    ) -> Result<TcpServer, BindError> {
        let failed = |cause| BindError { address, cause };
        let listener = listen(address, config.congestion_control.as_deref()).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let limits = Limits { stall_timeout: config.stall_timeout, times: terms.times };
        let operations = Operations::new(room, limits);
        let carried = operations.carried.clone();
        let shared = Shared {
            service,
            operations,
            tls: Arc::new(identity.tcp_server()),
            ends: Ends { buffers: Arc::default(), heard: Arc::default(), least: Size::Small },
            config: config.clone(),
            connections_max: connections_within(config.connections_max, SHARE_OF_FILES),
            #[cfg(feature = "rdma")]
            offer: terms.offer.clone(),
        };
        Ok(TcpServer { local, carried, accepting: tokio::spawn(accept(listener, Arc::new(shared))) })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// What it carried so far. Blocks that went by RDMA are counted by what was offered
    /// (`RdmaOffer::carried`).
    #[must_use]
    pub fn carried(&self) -> Carried {
        self.carried.clone()
    }

    /// Ends every operation and connection; returns when that is done.
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

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let (mut connections, mut refused) = (JoinSet::new(), Refused::default());
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                if refused.is_to_be_said() {
                    tracing::warn!(%error, "no connection could be accepted; raise the limit of open files if there are too many");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() >= shared.connections_max {
            let _ = socket.set_zero_linger(); // the peer is told by a reset, and nothing of it is left here
            continue;
        }
        connections.spawn(serve_connection(socket, Arc::clone(&shared)));
    }
}

async fn serve_connection(socket: TcpStream, shared: Arc<Shared>) {
    let _ = socket.set_nodelay(true); // without it answers come later, and no less right
    let handshake = handshake::accept(socket, &shared.tls, shared.ends.clone());
    match timeout(shared.config.dial_timeout, handshake).await {
        Ok(Ok((stream, leaf))) => match admit(leaf, &shared.service) {
            Some(by) => {
                let served = Served {
                    by,
                    #[cfg(feature = "rdma")]
                    attached: None,
                };
                serve_operations(stream, served, &shared).await;
            }
            // Whoever refused it says why, and not for each connection.
            None => tracing::debug!("a caller is refused by its certificate"),
        },
        Ok(Err(error)) => tracing::debug!(%error, "handshake failed"),
        Err(_) => tracing::debug!("handshake took too long"),
    }
}

async fn serve_operations(mut stream: TlsStream, mut served: Served, shared: &Shared) {
    loop {
        match timeout(shared.config.idle_timeout_of_server(), stream.begun()).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => return stream.close(),
            Ok(Err(error)) => return tracing::debug!(%error, "connection ended"),
        }
        if let Err(error) = serve_operation(&mut stream, &mut served, shared).await {
            // What is left of it would be taken for what the next operation says.
            tracing::debug!(%error, "operation ended early");
            return;
        }
        stream.rest();
    }
}

/// What a client is told that asks for RDMA where there is none.
fn no_rdma() -> data::Attached {
    let why = "its rdma.enabled is not set, or its log says why it has none".to_owned();
    data::Attached { outcome: RDMA_REFUSED, why, ..data::Attached::default() }
}

async fn serve_operation(
    stream: &mut TlsStream,
    served: &mut Served,
    shared: &Shared,
) -> Result<(), ServeError> {
    let (service, operations) = (served.by.service.as_ref(), &shared.operations);
    let request = operations.request(stream).await?;
    #[cfg(feature = "rdma")]
    {
        if let Some(attached) = &mut served.attached {
            return attached.serve(request, (service, operations), stream).await;
        }
        if let (Some(Op::Attach(attach)), Some(offer)) = (&request.op, &shared.offer) {
            let caller = (&served.by.leaf, served.by.maps);
            let (attached, answer) = offer.attach(attach.clone(), caller).await?;
            served.attached = attached;
            return operations.answer(stream, &answer).await;
        }
    }
    if let Some(Op::Attach(_)) = request.op {
        return operations.answer(stream, &no_rdma()).await;
    }
    operations.serve_request(request, service, stream).await
}
