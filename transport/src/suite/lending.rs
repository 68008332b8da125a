//! The suite's service with blocks in an arena that may be lent, as a node's are. For tests only.

use std::sync::Arc;

use kv_core::id::LeaseId;
use kvfleet_proto::frame::Frame;
use tokio::sync::mpsc;

use super::MemoryService;
use crate::rdma::Pool;
use crate::{
    Admission, BlockService, BoxFuture, Caller, FetchReply, FetchRequest, Frames, SaveOffer, SaveRequest,
    SaveSession,
};

/// A [`MemoryService`] whose frames lie in an arena when they are fetched, as far as it has room.
#[derive(Clone, Debug)]
pub struct LendingService {
    /// Who answers.
    pub inner: MemoryService,
    /// The arena.
    pub arena: Arc<Pool>,
    /// Whether callers may read all of it.
    pub maps: bool,
}

impl LendingService {
    /// The same frame in the arena; as it is when that is full.
    fn lend(&self, frame: Frame) -> Frame {
        if self.arena.has(&frame.bytes) {
            return frame;
        }
        let len = u32::try_from(frame.bytes.len()).ok();
        let Some(mut place) = len.and_then(|len| self.arena.take(len)) else { return frame };
        place.write(&frame.bytes);
        Frame { bytes: place.freeze(), ..frame }
    }
}

impl BlockService for LendingService {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        Box::pin(async move {
            let mut reply = self.inner.fetch(request).await;
            reply.lendable = vec![true; reply.answer.tiers().len()];
            let mut inner = std::mem::replace(&mut reply.frames, Frames::none());
            let ready = std::iter::from_fn(|| inner.try_next()).map(|frame| self.lend(frame)).collect();
            let (sender, frames) = mpsc::channel(4);
            let service = self.clone();
            tokio::spawn(async move {
                while let Some(frame) = inner.next().await {
                    if sender.send(Ok(service.lend(frame))).await.is_err() {
                        return;
                    }
                }
                if let Some(reason) = inner.ended() {
                    let _ = sender.send(Err(reason)).await; // a reader that gave up does not hear it
                }
            });
            reply.frames = Frames::then(ready, frames);
            reply
        })
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.inner.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn admit(&self, _: &Caller) -> Admission {
        Admission::Scoped { service: Arc::new(self.clone()), maps: self.maps }
    }
}
