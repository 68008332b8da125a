//! The service of `kvfleet_transport::suite` with blocks in a shared arena, like a node's. For tests
//! only: unit tests, and those over a device (`tests/verbs`). Not here: the suite's cases.

use std::sync::Arc;

use kv_core::id::LeaseId;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::suite::MemoryService;
use kvfleet_transport::{
    BlockService, BoxFuture, Caller, CallerAdmission, FetchReply, FetchRequest, Frames, SaveOffer,
    SaveRequest, SaveSession,
};
use tokio::sync::mpsc;

use crate::RdmaBufferPool;

/// A [`MemoryService`] that moves its frames to an arena when they are fetched, as far as the arena
/// has space.
#[derive(Clone, Debug)]
pub struct SharedArenaService {
    /// The service.
    pub inner: MemoryService,
    /// The arena.
    pub arena: Arc<RdmaBufferPool>,
    /// Whether callers may read all of it.
    pub may_map: bool,
}

impl SharedArenaService {
    /// The same frame in the arena; unchanged if that is full.
    fn share(&self, frame: Frame) -> Frame {
        if self.arena.contains(&frame.bytes) {
            return frame;
        }
        let len = u32::try_from(frame.bytes.len()).ok();
        let Some(mut place) = len.and_then(|len| self.arena.take(len)) else { return frame };
        place.write(&frame.bytes);
        Frame { bytes: place.freeze(), ..frame }
    }
}

impl BlockService for SharedArenaService {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        Box::pin(async move {
            let mut reply = self.inner.fetch(request).await;
            reply.lendable = vec![true; reply.answer.tiers().len()];
            let mut inner = std::mem::replace(&mut reply.frames, Frames::empty());
            let ready = std::iter::from_fn(|| inner.try_next()).map(|frame| self.share(frame)).collect();
            let (sender, frames) = mpsc::channel(4);
            let service = self.clone();
            tokio::spawn(async move {
                while let Some(frame) = inner.next().await {
                    if sender.send(Ok(service.share(frame))).await.is_err() {
                        return;
                    }
                }
                if let Some(reason) = inner.end_reason() {
                    let _ = sender.send(Err(reason)).await; // a reader that gave up does not receive it
                }
            });
            reply.frames = Frames::ready_then(ready, frames);
            reply
        })
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.inner.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn admit(&self, _: &Caller) -> CallerAdmission {
        CallerAdmission::Scoped { service: Arc::new(self.clone()), may_map: self.may_map }
    }
}
