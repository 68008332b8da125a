//! The client's end: a path is a pool of connections and one that listens for signs of life.
//!
//! Not here: what an operation does with its stream (`ask.rs`), connections (`pool.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use prost::Message;
use tokio::task::JoinHandle;

use super::pool::{Lost, Occupied, Pool};
use crate::ask::{self, Asks, Sends};
use crate::layered::FramesOnly;
use crate::stream::encode;
use crate::wire;
use crate::{
    AskedLayers, BoxFuture, FetchAnswer, FetchRequest, LayerSource, Path, PathError, Progress, SaveAnswer,
    SaveRequest, SliceSink, Streamed,
};

/// Connections to one node.
pub(crate) struct TcpPath {
    pub(crate) pool: Arc<Pool>,
    pub(super) lost: Lost,
    pub(super) stall_timeout: Duration,
    /// Says when the peer is gone; ends with the path.
    pub(super) watching: JoinHandle<()>,
    /// Whether the node is known to send frames where slices were asked for.
    pub(super) sends_frames: AtomicBool,
    pub(super) saves_frames: FramesOnly,
}

impl Drop for TcpPath {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Asks for TcpPath {
    type Stream = Occupied;

    fn peer(&self) -> &str {
        self.pool.peer()
    }

    fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    async fn call<M: Message + Default>(
        &self,
        request: &data::DataRequest,
        _: Sends,
        fetch: Option<&Progress>,
    ) -> Result<(M, Occupied), PathError> {
        self.pool.ask(wire::class_of(request), encode(request)?, fetch).await
    }

    fn sends_frames(&self) {
        self.sends_frames.store(true, Ordering::Relaxed);
    }

    fn saves_frames(&self) {
        self.saves_frames.seems();
    }

    fn over(&self, stream: Occupied) {
        self.pool.keep(stream);
    }
}

impl Path for TcpPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { ask::fetch(self, &request, sink).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { ask::fetch_layers(self, &request, asked, sink).await })
    }

    fn moves_slices(&self) -> bool {
        !self.sends_frames.load(Ordering::Relaxed)
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move { ask::save(self, &request, source).await })
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<Streamed, PathError>> {
        Box::pin(async move { ask::save_layers(self, &request, layers).await })
    }

    fn streams_saves(&self) -> bool {
        !self.saves_frames.is_so()
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(ask::release(self, lease))
    }

    fn failure(&self) -> Option<PathError> {
        self.lost.borrow().clone().map(|loss| loss.at(self.peer()))
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(ask::ping(self))
    }
}
