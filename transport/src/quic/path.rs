//! The client's end of a connection: one stream per operation.
//!
//! Not here: the operations (`client_ops.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use prost::Message;
use quinn::Connection;

use super::stream::{QuicStream, StreamPriorities};
use super::{CODE_DONE, STREAMS_MAX, path_error};
use crate::client_ops::{self, ClientPayload, OperationClient};
use crate::layered::LayerSupport;
use crate::slot_queue::SlotQueue;
use crate::stream::{Stream, encode, read_message};
use crate::wire;
use crate::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, LayerSource, LayeredSaveOutcome, Path, PathError,
    Progress, SaveAnswer, SaveRequest, SliceSink,
};

/// One connection to one node.
pub(super) struct QuicPath {
    connection: Connection,
    peer: String,
    stall_timeout: Duration,
    /// Whether the node answered a request for slices with frames.
    is_frames_only: AtomicBool,
    layer_support: LayerSupport,
    priorities: StreamPriorities,
    /// One slot for each stream that a node allows: quinn's own queue for streams ignores priority
    /// classes.
    slots: Arc<SlotQueue>,
}

impl Drop for QuicPath {
    fn drop(&mut self) {
        self.connection.close(CODE_DONE, b"path dropped");
    }
}

impl QuicPath {
    pub(super) fn new(connection: Connection, peer: String, stall_timeout: Duration) -> QuicPath {
        let (priorities, slots) = (StreamPriorities::new(&connection), SlotQueue::new(STREAMS_MAX as usize));
        let (is_frames_only, layer_support) = (AtomicBool::new(false), LayerSupport::default());
        QuicPath { connection, peer, stall_timeout, is_frames_only, layer_support, priorities, slots }
    }
}

impl OperationClient for QuicPath {
    type Stream = QuicStream;

    fn peer(&self) -> &str {
        &self.peer
    }

    fn stall_timeout(&self) -> Duration {
        self.stall_timeout
    }

    async fn call<M: Message + Default>(
        &self,
        request: &data::DataRequest,
        sends: ClientPayload,
        fetch: Option<&Progress>,
    ) -> Result<(M, QuicStream), PathError> {
        let (message, class) = (encode(request)?, wire::class_of(request));
        let place = self.slots.acquire(class).await;
        if let Some(fetch) = fetch {
            fetch.mark_asked();
        }
        let (send, recv) = self.connection.open_bi().await.map_err(|error| path_error(&self.peer, &error))?;
        let mut stream = QuicStream::opened(send, recv, place, &self.priorities);
        stream.set_class(class);
        stream.write(message).await.map_err(|loss| loss.at(&self.peer))?;
        stream.flush().await.map_err(|loss| loss.at(&self.peer))?;
        if sends == ClientPayload::RequestOnly {
            stream.finish();
        }
        let answer = read_message(&mut stream).await.map_err(|error| error.at(&self.peer))?;
        Ok((answer, stream))
    }

    /// Each operation has its own stream, which ends with it.
    fn note_frames_only_fetch(&self) {
        self.is_frames_only.store(true, Ordering::Relaxed);
    }

    fn note_frames_only_saves(&self) {
        self.layer_support.mark_unsupported();
    }

    fn finish(&self, mut stream: QuicStream) {
        stream.observe_end();
    }
}

impl Path for QuicPath {
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
        self.connection.close_reason().map(|error| path_error(&self.peer, &error))
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(client_ops::ping(self))
    }
}
