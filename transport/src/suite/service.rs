//! A block service in memory, with handles to make it slow, busy or broken. For tests only; the real one
//! is `node/`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, Epoch, LeaseId, NodeId, Seq, Tier};
use kvfleet_proto::frame::{Frame, HeadLast, KeyForm, SliceLayout};
use tokio::sync::{Semaphore, mpsc, watch};

use super::{BumpArena, EPOCH, IDENTITY};
use crate::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, LayerRoom, MissReason,
    RENEW_EVERY, SaveDone, SaveOffer, SaveRefusal, SaveRequest, SaveSession, VisibleAt,
};

/// Frames handed over ahead of their reader.
const FRAMES_AHEAD: usize = 4;

/// What was observed and what is set, behind one lock.
#[derive(Debug)]
struct State {
    blocks: BTreeMap<BlockHash, Frame>,
    released: Vec<LeaseId>,
    deadlines: Vec<Duration>,
    busy: Option<Duration>,
    lies_ready: bool,
    end: Option<MissReason>,
    refuse: Option<SaveRefusal>,
    takes_layers: bool,
    renew_every: Duration,
    epoch: Epoch,
    seq: u64,
}

/// Blocks in a map. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryService(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Frames that may still pass, in either direction.
    gate: Semaphore,
    puts: watch::Sender<usize>,
    slices: watch::Sender<usize>,
    aborted: watch::Sender<usize>,
    renewed: watch::Sender<Vec<LeaseId>>,
    /// Where blocks lie, for those who may read them in place.
    arena: Option<Arc<BumpArena>>,
}

impl Default for MemoryService {
    fn default() -> MemoryService {
        MemoryService::new(None)
    }
}

impl MemoryService {
    /// One whose blocks lie in `arena` and may be lent; nothing: neither.
    #[must_use]
    pub fn new(arena: Option<Arc<BumpArena>>) -> MemoryService {
        let state = State {
            blocks: BTreeMap::new(),
            released: Vec::new(),
            deadlines: Vec::new(),
            busy: None,
            lies_ready: false,
            end: None,
            refuse: None,
            takes_layers: true,
            renew_every: RENEW_EVERY,
            epoch: EPOCH,
            seq: 0,
        };
        MemoryService(Arc::new(Inner {
            state: Mutex::new(state),
            gate: Semaphore::new(Semaphore::MAX_PERMITS / 2),
            puts: watch::Sender::new(0),
            slices: watch::Sender::new(0),
            aborted: watch::Sender::new(0),
            renewed: watch::Sender::default(),
            arena,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its blocks lie, if they may be lent.
    #[must_use]
    pub fn arena(&self) -> Option<Arc<BumpArena>> {
        self.0.arena.clone()
    }

    /// Holds `frame` from now on.
    pub fn hold(&self, mut frame: Frame) {
        if let Some(arena) = &self.0.arena {
            frame.bytes = arena.hold(&frame.bytes);
        }
        self.state().blocks.insert(frame.hash, frame);
    }

    /// Forgets a block.
    pub fn forget(&self, hash: BlockHash) {
        self.state().blocks.remove(&hash);
    }

    /// Whether it holds this block.
    #[must_use]
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.state().blocks.contains_key(&hash)
    }

    /// The block as it holds it.
    #[must_use]
    pub fn held(&self, hash: BlockHash) -> Option<Frame> {
        self.state().blocks.get(&hash).cloned()
    }

    /// Deadlines of all fetches so far.
    #[must_use]
    pub fn deadlines(&self) -> Vec<Duration> {
        self.state().deadlines.clone()
    }

    /// Leases released so far, in order.
    #[must_use]
    pub fn released(&self) -> Vec<LeaseId> {
        self.state().released.clone()
    }

    /// Answers `Busy` from now on, or no longer.
    pub fn set_busy(&self, retry_after: Option<Duration>) {
        self.state().busy = retry_after;
    }

    /// From now on all frames of a fetch lie ready when it is answered.
    pub fn lie_ready(&self) {
        self.state().lies_ready = true;
    }

    /// Refuses saves from now on, or no longer.
    pub fn set_refuse(&self, refusal: Option<SaveRefusal>) {
        self.state().refuse = refusal;
    }

    /// Has memory for saves that come by layer from now on, or none.
    pub fn set_takes_layers(&self, takes_layers: bool) {
        self.state().takes_layers = takes_layers;
    }

    /// Wants leases that are in use to be renewed so often from now on.
    pub fn set_renew_every(&self, span: Duration) {
        self.state().renew_every = span;
    }

    /// Serves under another epoch from now on.
    pub fn set_epoch(&self, epoch: Epoch) {
        self.state().epoch = epoch;
    }

    /// Lets only so many more frames pass.
    pub fn set_gate(&self, frames: usize) {
        self.0.gate.forget_permits(Semaphore::MAX_PERMITS);
        self.0.gate.add_permits(frames);
    }

    /// Fails the medium: frames that have not passed never will, and nobody waits for them.
    pub fn fail_medium(&self) {
        self.0.gate.close();
    }

    /// The same, and whoever waits is told why.
    pub fn end_with(&self, reason: MissReason) {
        self.state().end = Some(reason);
        self.0.gate.close();
    }

    /// Returns once so many frames of saves have arrived.
    pub async fn puts_seen(&self, frames: usize) {
        let _ = self.0.puts.subscribe().wait_for(|seen| *seen >= frames).await;
    }

    /// Returns once so many slices of saves that come by layer have arrived.
    pub async fn slices_seen(&self, slices: usize) {
        let _ = self.0.slices.subscribe().wait_for(|seen| *seen >= slices).await;
    }

    /// Returns once so many saves were aborted.
    pub async fn aborts_seen(&self, saves: usize) {
        let _ = self.0.aborted.subscribe().wait_for(|seen| *seen >= saves).await;
    }

    /// Returns once leases were renewed so often since it was asked: which, in order.
    pub async fn renewals(&self, count: usize) -> Vec<LeaseId> {
        let mut renewed = self.0.renewed.subscribe();
        let before = renewed.borrow().len();
        let seen = renewed.wait_for(|renewed| renewed.len() >= before + count).await;
        seen.map_or_else(|_| Vec::new(), |renewed| renewed[before..].to_vec())
    }

    fn answer(&self, request: &FetchRequest) -> (FetchAnswer, Vec<Frame>, Epoch) {
        let state = self.state();
        if let Some(retry_after) = state.busy {
            return (FetchAnswer::Busy { retry_after }, Vec::new(), state.epoch);
        }
        if request.asker.identity != IDENTITY {
            let answer = FetchAnswer::Miss { reason: MissReason::IdentityDiffers };
            return (answer, Vec::new(), state.epoch);
        }
        let frames: Vec<Frame> =
            request.hashes.iter().map_while(|hash| state.blocks.get(hash).cloned()).collect();
        let hit = FetchAnswer::Hit { tiers: vec![Tier::Dram; request.hashes.len()] };
        (hit.cut_short(frames.len(), MissReason::NotHeld), frames, state.epoch)
    }
}

impl BlockService for MemoryService {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.state().deadlines.push(request.deadline);
        let (answer, found, epoch) = self.answer(&request);
        let lendable = vec![self.0.arena.is_some(); found.len()];
        if self.state().lies_ready {
            let frames = Frames::ready(found);
            return Box::pin(std::future::ready(FetchReply { answer, frames, epoch, lendable }));
        }
        let (sender, frames) = mpsc::channel(FRAMES_AHEAD);
        let service = self.clone();
        tokio::spawn(async move {
            for frame in found {
                let Ok(passed) = service.0.gate.acquire().await else {
                    let end = service.state().end;
                    if let Some(reason) = end {
                        // A reader that gave up does not hear it.
                        let _ = sender.send(Err(reason)).await;
                    }
                    return;
                };
                passed.forget();
                if sender.send(Ok(frame)).await.is_err() {
                    return;
                }
            }
        });
        let frames = Frames::then(Vec::new(), frames);
        Box::pin(std::future::ready(FetchReply { answer, frames, epoch, lendable }))
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        let state = self.state();
        let answer = if let Some(retry_after) = state.busy {
            (SaveOffer::Busy { retry_after }, None)
        } else if let Some(refusal) = state.refuse {
            (SaveOffer::Refused(refusal), None)
        } else {
            let wanted: Vec<bool> =
                request.hashes.iter().map(|hash| !state.blocks.contains_key(hash)).collect();
            let session = Session {
                service: self.clone(),
                wanted: wanted.iter().zip(&request.hashes).filter(|(w, _)| **w).map(|(_, h)| *h).collect(),
                present: wanted.iter().filter(|wanted| !**wanted).count(),
                arrived: Vec::new(),
                filling: Vec::new(),
                finished: false,
            };
            (SaveOffer::Wanted(wanted), Some(Box::new(session) as Box<dyn SaveSession>))
        };
        drop(state);
        Box::pin(std::future::ready(answer))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.state().released.push(lease);
        Box::pin(std::future::ready(()))
    }

    fn renew(&self, lease: LeaseId) {
        self.0.renewed.send_modify(|renewed| renewed.push(lease));
    }

    fn renew_every(&self) -> Duration {
        self.state().renew_every
    }
}

struct Session {
    service: MemoryService,
    wanted: Vec<BlockHash>,
    present: usize,
    arrived: Vec<Frame>,
    /// What comes by layer.
    filling: Vec<(HeadLast, Vec<u8>)>,
    finished: bool,
}

impl LayerRoom for Session {
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let (comes, memory) = self.filling.get_mut(position)?;
        comes.slice(layer, memory)
    }

    fn came(&mut self, position: usize) {
        if let Some((comes, memory)) = self.filling.get_mut(position) {
            comes.came(memory);
            self.service.0.slices.send_modify(|seen| *seen += 1);
        }
    }

    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()> {
        let position = self.arrived.len();
        let (comes, mut memory) = self.filling.get_mut(position).map_or_else(
            || unreachable!("a head of a block that nobody wanted"),
            |(comes, memory)| (comes, std::mem::take(memory)),
        );
        let hash = self.wanted[position];
        let is_it = comes.finish(&head, IDENTITY, KeyForm::Rotated, hash, &mut memory);
        // What is no frame uses up its turn.
        let bytes = if is_it.is_ok() { memory.into() } else { Bytes::new() };
        self.put(Frame { bytes, identity: IDENTITY, hash })
    }
}

impl SaveSession for Session {
    fn layers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerRoom> {
        let takes_layers = self.service.state().takes_layers;
        let empty = || (HeadLast::new(layout.clone()), vec![0; layout.frame_bytes()]);
        self.filling = self.wanted.iter().map(|_| empty()).collect();
        takes_layers.then_some(self)
    }

    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.arrived.push(frame);
            self.service.0.puts.send_modify(|seen| *seen += 1);
            if let Ok(passed) = self.service.0.gate.acquire().await {
                passed.forget();
            }
        })
    }

    fn finish(mut self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        self.finished = true;
        let mut state = self.service.state();
        let mut done = SaveDone { present_blocks: count(self.present), ..SaveDone::default() };
        for (frame, hash) in self.arrived.iter().zip(&self.wanted) {
            if frame.verify(IDENTITY, *hash).is_err() {
                done.refused_blocks += 1;
                continue;
            }
            done.stored_blocks += 1;
            done.stored_bytes += frame.bytes.len() as u64;
            let mut frame = frame.clone();
            if let Some(arena) = &self.service.0.arena {
                frame.bytes = arena.hold(&frame.bytes);
            }
            state.blocks.insert(*hash, frame);
        }
        if done.stored_blocks > 0 {
            state.seq += 1;
            done.visible_at =
                Some(VisibleAt { node: NodeId(1), epoch: state.epoch, shard: 1, seq: Seq(state.seq) });
        }
        drop(state);
        Box::pin(std::future::ready(done))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.finished {
            self.service.0.aborted.send_modify(|seen| *seen += 1);
        }
    }
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
