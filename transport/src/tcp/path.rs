//! The client's end: a path is a pool of connections and one keepalive connection.
//!
//! Not here: the operations (`client_ops.rs`), and connections (`pool.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use prost::Message;
use tokio::task::JoinHandle;

use super::pool::{ConnectionPool, PeerLoss, PooledConnection};
use crate::client_ops::{self, ClientPayload, OperationClient};
use crate::layered::LayerSupport;
use crate::stream::encode;
use crate::wire;
use crate::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, LayerSource, LayeredSaveOutcome, Path, PathError,
    Progress, SaveAnswer, SaveRequest, SliceSink,
};

/// Connections to one node.
pub struct TcpPath {
    pub(super) pool: Arc<ConnectionPool>,
    pub(super) lost: PeerLoss,
    pub(super) stall_timeout: Duration,
    /// The task that watches the peer; ends with the path.
    pub(super) watching: JoinHandle<()>,
    /// Whether the node answered a request for slices with frames.
    pub(super) is_frames_only: AtomicBool,
    pub(super) layer_support: LayerSupport,
}

impl Drop for TcpPath {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// For a protocol that upgrades connections.
impl TcpPath {
    /// Address of the peer.
    #[must_use]
    pub fn peer(&self) -> &str {
        self.pool.peer()
    }

    /// Time without progress after which a save or release counts as lost.
    #[must_use]
    pub fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    /// Sends a request and reads the answering message. The caller has the connection to itself
    /// until it gives it back.
    ///
    /// # Errors
    /// If the peer is lost, or its answer is malformed.
    pub async fn ask<M: Message + Default>(
        &self,
        request: &data::DataRequest,
    ) -> Result<(M, PooledConnection), PathError> {
        self.pool.call(wire::class_of(request), encode(request)?, None).await
    }

    /// Takes back the connection of a finished operation.
    pub fn give_back(&self, connection: PooledConnection) {
        self.pool.keep(connection);
    }
}

impl OperationClient for TcpPath {
    type Stream = PooledConnection;

    fn peer(&self) -> &str {
        self.pool.peer()
    }

    fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    async fn call<M: Message + Default>(
        &self,
        request: &data::DataRequest,
        _: ClientPayload,
        fetch: Option<&Progress>,
    ) -> Result<(M, PooledConnection), PathError> {
        self.pool.call(wire::class_of(request), encode(request)?, fetch).await
    }

    fn note_frames_only_fetch(&self) {
        self.is_frames_only.store(true, Ordering::Relaxed);
    }

    fn note_frames_only_saves(&self) {
        self.layer_support.mark_unsupported();
    }

    fn finish(&self, stream: PooledConnection) {
        self.pool.keep(stream);
    }
}

impl Path for TcpPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { client_ops::fetch(self, &request, sink).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { client_ops::fetch_layers(self, &request, asked, sink).await })
    }

    fn fetches_slices(&self) -> bool {
        !self.is_frames_only.load(Ordering::Relaxed)
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move { client_ops::save(self, &request, source).await })
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(async move { client_ops::save_layers(self, &request, layers).await })
    }

    fn streams_saves(&self) -> bool {
        !self.layer_support.is_unsupported()
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(client_ops::release(self, lease))
    }

    fn failure(&self) -> Option<PathError> {
        self.lost.borrow().clone().map(|loss| loss.at(self.peer()))
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(client_ops::ping(self))
    }
}
