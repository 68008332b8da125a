//! Interface for a protocol that takes over connections of the TCP path, as RDMA does
//! (`kvfleet-rdma`).
//!
//! At the node, [`TcpServer::bind_offering`](crate::tcp::TcpServer::bind_offering) gets an
//! [`UpgradeOffer`]. A client asks for the upgrade on a connection of a [`TcpPath`], and from then
//! on each request on that connection goes to its [`UpgradedConnection`]. At the client, the path
//! is a [`Dialer`](crate::Dialer) like any other, and `pick` knows it only by its
//! [`PathKind`](crate::pick::PathKind). The other items are parts of this crate's own paths, which
//! are made public only here. Not here: a protocol.

use std::sync::Arc;

use kvfleet_proto::data;

use crate::{BlockService, BoxFuture};

// For both ends.
pub use crate::dial::within;
pub use crate::stream::{ItemError, NextItem, Source, Stream, StreamError, encode, read_frame, read_message};

// For the node's end.
pub use crate::in_flight::InFlightReservation;
pub use crate::quic::RETRY_AFTER;
pub use crate::serve::{Operations, SaveReservation, ServeError};
pub use crate::tcp::server::UPGRADE_REFUSED;
pub use crate::tcp::stream::TlsStream;

// For the client's end.
pub use crate::pick::breaker::Breaker;
pub use crate::pieces::{Piece, PieceQueue};
pub use crate::slices::FetchAssembly;
pub use crate::slot_queue::{Slot, SlotQueue};
pub use crate::tcp::path::TcpPath;
pub use crate::tcp::pool::PooledConnection;
pub use crate::tcp::stream::CLOSED;

/// Conversion between messages and the types of this crate.
pub mod wire {
    pub use crate::wire::{
        Operation, PROTOCOL_VERSION, done_from_pb, done_to_pb, fetch_to_pb, head_from_pb, head_to_pb,
        layers_to_pb, offer_from_pb, offer_to_pb, operation_from_pb, save_to_pb,
    };
}

/// A protocol that a node offers to clients that connect over TCP.
pub trait UpgradeOffer: Send + Sync + 'static {
    /// Answers a client that asks for the upgrade.
    ///
    /// # Errors
    /// If the request is malformed; the connection then ends.
    fn attach<'a>(
        self: Arc<Self>,
        request: UpgradeRequest<'a>,
    ) -> BoxFuture<'a, Result<UpgradeReply, ServeError>>;
}

/// A client's request for an upgrade.
pub struct UpgradeRequest<'a> {
    /// The client's message.
    pub attach: data::Attach,
    /// The client's certificate (DER).
    pub caller: &'a Arc<[u8]>,
    /// See [`CallerAdmission::Scoped`](crate::CallerAdmission::Scoped).
    pub may_map: bool,
}

/// A node's reply to a request for an upgrade.
pub struct UpgradeReply {
    /// Serves all further requests of the connection; `None` if it goes on as before.
    pub connection: Option<Box<dyn UpgradedConnection>>,
    /// The answer to the client.
    pub message: data::AttachReply,
}

/// The node's end of an upgraded connection; it lives as long as the connection.
pub trait UpgradedConnection: Send {
    /// Serves one operation, whose request was read from `stream`, to its end.
    ///
    /// # Errors
    /// Why the operation was aborted; the connection then ends.
    fn serve<'a>(
        &'a mut self,
        request: data::DataRequest,
        service: &'a dyn BlockService,
        operations: &'a Operations,
        stream: &'a mut TlsStream,
    ) -> BoxFuture<'a, Result<(), ServeError>>;
}
