//! A block service in memory that can be made slow, busy or faulty. For tests only; the real one is
//! `node/`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, Epoch, LeaseId, NodeId, Seq, Tier};
use kvfleet_proto::frame::{Frame, KeyForm, SliceLayout, SlicesFirstFrame};
use tokio::sync::{Semaphore, mpsc, watch};

use super::{BumpArena, EPOCH, IDENTITY};
use crate::{
    AnnouncePosition, BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, LayerBuffers,
    MissReason, RENEW_INTERVAL, SaveDone, SaveOffer, SaveRefusal, SaveRequest, SaveSession,
};

/// Frames sent ahead of their reader.
const FRAMES_AHEAD: usize = 4;

/// Observations and settings, behind one lock.
#[derive(Debug)]
struct ServiceState {
    blocks: BTreeMap<BlockHash, Frame>,
    released: Vec<LeaseId>,
    deadlines: Vec<Duration>,
    busy: Option<Duration>,
    frames_ready: bool,
    end: Option<MissReason>,
    refuse: Option<SaveRefusal>,
    accepts_layers: bool,
    renew_interval: Duration,
    epoch: Epoch,
    seq: u64,
}

/// Blocks in a map. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryService(Arc<MemoryServiceInner>);

#[derive(Debug)]
struct MemoryServiceInner {
    state: Mutex<ServiceState>,
    /// Permits for further frames, in either direction.
    gate: Semaphore,
    puts: watch::Sender<usize>,
    slices: watch::Sender<usize>,
    aborted: watch::Sender<usize>,
    renewed: watch::Sender<Vec<LeaseId>>,
    /// The blocks' memory, for callers that read in place.
    arena: Option<Arc<BumpArena>>,
}

impl Default for MemoryService {
    fn default() -> MemoryService {
        MemoryService::new(None)
    }
}

impl MemoryService {
    /// With an `arena`, blocks lie there and may be shared.
    #[must_use]
    pub fn new(arena: Option<Arc<BumpArena>>) -> MemoryService {
        let state = ServiceState {
            blocks: BTreeMap::new(),
            released: Vec::new(),
            deadlines: Vec::new(),
            busy: None,
            frames_ready: false,
            end: None,
            refuse: None,
            accepts_layers: true,
            renew_interval: RENEW_INTERVAL,
            epoch: EPOCH,
            seq: 0,
        };
        MemoryService(Arc::new(MemoryServiceInner {
            state: Mutex::new(state),
            gate: Semaphore::new(Semaphore::MAX_PERMITS / 2),
            puts: watch::Sender::new(0),
            slices: watch::Sender::new(0),
            aborted: watch::Sender::new(0),
            renewed: watch::Sender::default(),
            arena,
        }))
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its arena, if blocks may be shared.
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

    /// The block as held.
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

    /// Makes all frames of a fetch ready with its answer, from now on.
    pub fn make_frames_ready(&self) {
        self.state().frames_ready = true;
    }

    /// Refuses saves from now on, or no longer.
    pub fn set_refuse(&self, refusal: Option<SaveRefusal>) {
        self.state().refuse = refusal;
    }

    /// Sets whether it has memory for layer-wise saves.
    pub fn set_accepts_layers(&self, takes_layers: bool) {
        self.state().accepts_layers = takes_layers;
    }

    /// Sets the interval of lease renewal.
    pub fn set_renew_interval(&self, span: Duration) {
        self.state().renew_interval = span;
    }

    /// Serves under another epoch from now on.
    pub fn set_epoch(&self, epoch: Epoch) {
        self.state().epoch = epoch;
    }

    /// Lets only this many further frames pass.
    pub fn set_gate(&self, frames: usize) {
        self.0.gate.forget_permits(Semaphore::MAX_PERMITS);
        self.0.gate.add_permits(frames);
    }

    /// Fails the medium: frames that have not passed never will.
    pub fn fail_medium(&self) {
        self.0.gate.close();
    }

    /// Like [`Self::fail_medium`], with a reason for the readers.
    pub fn end_with(&self, reason: MissReason) {
        self.state().end = Some(reason);
        self.0.gate.close();
    }

    /// Returns once this many frames of saves have arrived.
    pub async fn wait_for_puts(&self, frames: usize) {
        let _ = self.0.puts.subscribe().wait_for(|seen| *seen >= frames).await;
    }

    /// Returns once this many slices of layer-wise saves have arrived.
    pub async fn wait_for_slices(&self, slices: usize) {
        let _ = self.0.slices.subscribe().wait_for(|seen| *seen >= slices).await;
    }

    /// Returns once this many saves were aborted.
    pub async fn wait_for_aborts(&self, saves: usize) {
        let _ = self.0.aborted.subscribe().wait_for(|seen| *seen >= saves).await;
    }

    /// Waits for `count` further lease renewals; returns the leases in order.
    pub async fn wait_for_renewals(&self, count: usize) -> Vec<LeaseId> {
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
        if request.context.identity != IDENTITY {
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
        if self.state().frames_ready {
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
                        // A reader that gave up does not receive it.
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
        let frames = Frames::ready_then(Vec::new(), frames);
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
            let session = MemorySaveSession {
                service: self.clone(),
                wanted: wanted.iter().zip(&request.hashes).filter(|(w, _)| **w).map(|(_, h)| *h).collect(),
                present: wanted.iter().filter(|wanted| !**wanted).count(),
                arrived: Vec::new(),
                layered: Vec::new(),
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

    fn renew_interval(&self) -> Duration {
        self.state().renew_interval
    }
}

struct MemorySaveSession {
    service: MemoryService,
    wanted: Vec<BlockHash>,
    present: usize,
    arrived: Vec<Frame>,
    /// Blocks of a layer-wise save.
    layered: Vec<(SlicesFirstFrame, Vec<u8>)>,
    finished: bool,
}

impl LayerBuffers for MemorySaveSession {
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let (comes, memory) = self.layered.get_mut(position)?;
        comes.slice(layer, memory)
    }

    fn slice_written(&mut self, position: usize) {
        if let Some((comes, memory)) = self.layered.get_mut(position) {
            comes.record_slice(memory);
            self.service.0.slices.send_modify(|seen| *seen += 1);
        }
    }

    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()> {
        let position = self.arrived.len();
        let (comes, mut memory) = self.layered.get_mut(position).map_or_else(
            || unreachable!("a header for a block that was not wanted"),
            |(comes, memory)| (comes, std::mem::take(memory)),
        );
        let hash = self.wanted[position];
        let is_it = comes.finish(&head, IDENTITY, KeyForm::Rotated, hash, &mut memory);
        // An invalid frame uses up its position.
        let bytes = if is_it.is_ok() { memory.into() } else { Bytes::new() };
        self.put(Frame { bytes, identity: IDENTITY, hash })
    }
}

impl SaveSession for MemorySaveSession {
    fn layer_buffers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerBuffers> {
        let takes_layers = self.service.state().accepts_layers;
        let empty = || (SlicesFirstFrame::new(layout.clone()), vec![0; layout.frame_bytes()]);
        self.layered = self.wanted.iter().map(|_| empty()).collect();
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
                Some(AnnouncePosition { node: NodeId(1), epoch: state.epoch, shard: 1, seq: Seq(state.seq) });
        }
        drop(state);
        Box::pin(std::future::ready(done))
    }
}

impl Drop for MemorySaveSession {
    fn drop(&mut self) {
        if !self.finished {
            self.service.0.aborted.send_modify(|seen| *seen += 1);
        }
    }
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
