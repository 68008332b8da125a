//! The client's end of a connection: one stream for each operation.
//!
//! Not here: what an operation does with its stream (`ask.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use prost::Message;
use quinn::Connection;

use super::stream::{Mates, QuicStream};
use super::{CODE_DONE, STREAMS_MAX, path_error};
use crate::ask::{self, Asks, Sends};
use crate::layered::FramesOnly;
use crate::stream::{Stream, encode, read_message};
use crate::turns::Places;
use crate::wire;
use crate::{
    AskedLayers, BoxFuture, FetchAnswer, FetchRequest, LayerSource, Path, PathError, Progress, SaveAnswer,
    SaveRequest, SliceSink, Streamed,
};

/// One connection to one node.
pub(super) struct QuicPath {
    connection: Connection,
    peer: String,
    stall_timeout: Duration,
    /// Whether the node is known to send frames where slices were asked for.
    sends_frames: AtomicBool,
    saves_frames: FramesOnly,
    mates: Mates,
    /// One for each stream that a node allows: who waits for quinn's goes by no class.
    at_once: Arc<Places>,
}

impl Drop for QuicPath {
    fn drop(&mut self) {
        self.connection.close(CODE_DONE, b"path dropped");
    }
}

impl QuicPath {
    pub(super) fn new(connection: Connection, peer: String, stall_timeout: Duration) -> QuicPath {
        let (mates, at_once) = (Mates::of(&connection), Places::new(STREAMS_MAX as usize));
        let (sends_frames, saves_frames) = (AtomicBool::new(false), FramesOnly::default());
        QuicPath { connection, peer, stall_timeout, sends_frames, saves_frames, mates, at_once }
    }
}

impl Asks for QuicPath {
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
        sends: Sends,
        fetch: Option<&Progress>,
    ) -> Result<(M, QuicStream), PathError> {
        let (message, class) = (encode(request)?, wire::class_of(request));
        let place = self.at_once.take(class).await;
        if let Some(fetch) = fetch {
            fetch.asked();
        }
        let opened = self.connection.open_bi().await.map_err(|error| path_error(&self.peer, &error))?;
        let mut stream = QuicStream::opened(opened, place, &self.mates);
        stream.rank(class);
        stream.write(message).await.map_err(|loss| loss.at(&self.peer))?;
        stream.flush().await.map_err(|loss| loss.at(&self.peer))?;
        if sends == Sends::Request {
            stream.finish();
        }
        let answer = read_message(&mut stream).await.map_err(|error| error.at(&self.peer))?;
        Ok((answer, stream))
    }

    /// Each operation has a stream of its own, which ends with it.
    fn sends_frames(&self) {
        self.sends_frames.store(true, Ordering::Relaxed);
    }

    fn saves_frames(&self) {
        self.saves_frames.seems();
    }

    fn over(&self, mut stream: QuicStream) {
        stream.see_end();
    }
}

impl Path for QuicPath {
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
        self.connection.close_reason().map(|error| path_error(&self.peer, &error))
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(ask::ping(self))
    }
}
