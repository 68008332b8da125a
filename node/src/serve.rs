//! Fetch and save as they come from the wire, on top of the store.
//!
//! Bytes in DRAM are handed out by reference. What is saved is checked against what was offered before
//! it is committed. Each caller is answered by a service of its own ([`Scope`]). Not here: the wire
//! (`kvfleet-transport`) and who holds what (`store`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, IdentityDigest, LeaseId, TenantId, Tier};
use kv_core::tier::{Asker, Offered, RefusedBy};
use kvfleet_proto::frame::{Frame, FrameError, HeadLast, KeyForm, SliceLayout, Unsettled, settle};
use kvfleet_proto::tls::{NamesError, tenants_of};
use kvfleet_proto::trace_context;
use kvfleet_transport::{
    Admission, BlockService, BoxFuture, Caller, FetchAnswer, FetchReply, FetchRequest, Frames, LayerRoom,
    MissReason, SaveDone, SaveOffer, SaveRefusal, SaveRequest, SaveSession,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tracing::Instrument;

use crate::arena::{Arena, Purpose, SlotMut};
use crate::layered::{Layered, LayeredPart};
use crate::metrics::Metrics;
use crate::scope::{Locals, Scope};
use crate::store::{Ask, BUSY_RETRY, FetchPlan, OfferPlan, Planned, PlannedBytes, Reserved, StoreHandle};

/// How long a save waits for a DRAM slot while demotions are under way, before the block is refused.
pub const SAVE_ROOM_WAIT: Duration = Duration::from_secs(2);

/// Blocks in one fetch or save: 1 Mi tokens in blocks of 16, the longest prompt anyone serves.
pub const REQUEST_BLOCKS_MAX: usize = 65_536;

/// Longest time a fetch may take, whatever its deadline: no recomputation takes longer.
pub const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Warnings about one caller: enough to see what is wrong with it.
const SAID_MAX: u32 = 16;

/// How long a waiting save sleeps at most before it asks for a slot again (a wake-up may be missed).
const ROOM_POLL: Duration = Duration::from_millis(5);

/// The frames that a node keeps: those of one manifest, and no longer ones than it has room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keeps {
    /// Digest of the manifest: the identity under weights of generation 0.
    pub(crate) identity: IdentityDigest,
    /// Form of the keys by the manifest. The digest says it too, but nobody can read it there.
    pub(crate) key_form: KeyForm,
    /// Length of the longest frame in bytes.
    pub(crate) frame_bytes_max: usize,
}

/// What a node grants its callers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Bytes of the DRAM tier: its own slots, not those beside it.
    pub(crate) tier_bytes: usize,
    /// How long a lease is kept that nobody renews.
    pub(crate) lease: Duration,
}

/// The node's side of every path of one caller.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    store: StoreHandle,
    arena: Arena,
    keeps: Keeps,
    terms: Terms,
    metrics: Metrics,
    scope: Scope,
    locals: Locals,
    /// Whether cards of callers with a certificate may read all memory of blocks.
    lends_in_place: bool,
    /// Slots that may be held while blocks are computed, of all callers.
    layered: Layered,
    /// What was said of this caller in the log.
    said: Arc<AtomicU32>,
}

impl Service {
    /// For this process; others are served by what [`BlockService::admit`] gives them.
    pub(crate) fn new(
        store: StoreHandle,
        arena: Arena,
        keeps: Keeps,
        terms: Terms,
        metrics: Metrics,
        scope: Scope,
        locals: Locals,
    ) -> Service {
        let (lends_in_place, said) = (false, Arc::default());
        let layered = Layered::half_of(terms.tier_bytes);
        Service { store, arena, keeps, terms, metrics, scope, locals, lends_in_place, layered, said }
    }

    /// The same, which lets cards of callers with a certificate read all memory of blocks, or not.
    pub(crate) fn lending_in_place(self, lends_in_place: bool) -> Service {
        Service { lends_in_place, ..self }
    }

    /// The same node for another caller.
    pub(crate) fn scoped(&self, caller: &Caller, tenants: Option<Arc<[TenantId]>>) -> Service {
        Service { scope: self.scope.of(caller, tenants), said: Arc::default(), ..self.clone() }
    }

    /// Whether something may be said of this caller: whoever does wrong without end is not to fill the log.
    fn may_say(&self) -> bool {
        let more = |said: u32| (said < SAID_MAX).then_some(said + 1);
        self.said.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    async fn answer_fetch(&self, request: FetchRequest) -> FetchReply {
        let reason = self.refuse_fetch(&request);
        if let Some(reason) = reason {
            return self.without_frames(FetchAnswer::Miss { reason });
        }
        if request.hashes.is_empty() {
            return self.without_frames(FetchAnswer::Hit { tiers: Vec::new() });
        }
        let asker = self.asker(&request.asker);
        let deadline = Instant::now() + request.deadline.min(FETCH_TIME_MAX);
        let asked = request.hashes.len();
        let hashes = request.hashes;
        let identity = request.asker.identity;
        let Some(generation) = identity.generation_over(self.keeps.identity) else {
            return self.without_frames(FetchAnswer::Miss { reason: MissReason::IdentityDiffers });
        };
        let held = hashes.clone();
        match self.store.try_ask(|reply| Ask::Fetch { asker, generation, hashes, reply }).await {
            Ok(FetchPlan::OtherWeights) => {
                self.without_frames(FetchAnswer::Miss { reason: MissReason::GenerationDiffers })
            }
            Ok(FetchPlan::Blocks { blocks, .. }) if blocks.is_empty() => {
                self.without_frames(FetchAnswer::Miss { reason: MissReason::NotHeld })
            }
            Ok(FetchPlan::Blocks { blocks, permit }) => {
                let tiers: Vec<Tier> = blocks.iter().map(|block| block.tier).collect();
                let answer = if tiers.len() == asked {
                    FetchAnswer::Hit { tiers }
                } else {
                    FetchAnswer::Partial { tiers, reason: MissReason::NotHeld }
                };
                let lendable = blocks.iter().map(|block| block.stays).collect();
                let frames = stream(identity, held, blocks, deadline, permit);
                FetchReply { answer, frames, epoch: self.store.shared.epoch(), lendable }
            }
            Ok(FetchPlan::Busy) | Err(_) => self.busy(),
        }
    }

    fn refuse_fetch(&self, request: &FetchRequest) -> Option<MissReason> {
        let generation = request.asker.identity.generation_over(self.keeps.identity);
        if generation.is_none() {
            return Some(MissReason::IdentityDiffers);
        }
        if !self.may_name(request.asker.tenant) {
            return Some(MissReason::NotHeld);
        }
        // Before the epoch, which other weights end too: what is wrong is the identity.
        if generation != Some(self.store.shared.generation()) {
            return Some(MissReason::GenerationDiffers);
        }
        if request.epoch != self.store.shared.epoch() {
            return Some(MissReason::StaleEpoch);
        }
        (request.hashes.len() > REQUEST_BLOCKS_MAX).then_some(MissReason::NotHeld)
    }

    /// Whether this is the identity under the weights in force.
    fn is_now(&self, identity: IdentityDigest) -> bool {
        identity == self.identity()
    }

    /// Whether the tenant is one of this caller's.
    fn may_name(&self, tenant: TenantId) -> bool {
        let has = self.scope.has(tenant);
        if !has && self.may_say() {
            tracing::warn!(%tenant, "a caller asks as a tenant that is not its own, check its configuration");
        }
        has
    }

    /// Whoever is refused comes again: all of them together are not to fill the log.
    fn say_refused(&self, error: &NamesError) {
        if self.may_say() {
            tracing::warn!(%error, "a certificate is refused, issue a new one");
        }
    }

    pub(crate) fn asker(&self, asker: &kvfleet_transport::Asker) -> Asker {
        let (lease, caller) = (self.scope.lease(asker.lease), self.scope.caller());
        Asker { lease, caller, tenant: asker.tenant, category: asker.category }
    }

    fn busy(&self) -> FetchReply {
        self.without_frames(FetchAnswer::Busy { retry_after: BUSY_RETRY })
    }

    fn without_frames(&self, answer: FetchAnswer) -> FetchReply {
        FetchReply { answer, frames: Frames::none(), epoch: self.store.shared.epoch(), lendable: Vec::new() }
    }

    async fn answer_save(&self, request: SaveRequest) -> (SaveOffer, Option<Box<dyn SaveSession>>) {
        let (answers, session) = match self.reserve(&request).await {
            Ok(reserved) => reserved,
            Err(offer) => return (offer, None),
        };
        if let Some(refusal) = all_refused(&answers) {
            return (SaveOffer::Refused(refusal), None);
        }
        let marks = answers.iter().map(|answer| matches!(answer, Offered::Wanted(_))).collect();
        (SaveOffer::Wanted(marks), Some(Box::new(session)))
    }

    /// What of a save is wanted, block by block, and the session that takes it.
    ///
    /// # Errors
    /// What is answered where nothing of it can be looked at.
    pub(crate) async fn reserve(&self, request: &SaveRequest) -> Result<(Vec<Offered>, Session), SaveOffer> {
        let generation = request.asker.identity.generation_over(self.keeps.identity);
        let generation = generation.filter(|_| self.may_name(request.asker.tenant));
        let generation = generation.ok_or(SaveOffer::Refused(SaveRefusal::IdentityDiffers))?;
        let frame_bytes = match u32::try_from(request.frame_bytes) {
            Ok(bytes) if bytes > 0 && bytes as usize <= self.keeps.frame_bytes_max => bytes,
            _ => return Err(SaveOffer::Refused(SaveRefusal::FrameSize)),
        };
        let offsets_end = u32::try_from(request.hashes.len()).ok();
        let offsets_end = offsets_end.and_then(|blocks| request.first_offset_blocks.checked_add(blocks));
        if request.hashes.is_empty() || request.hashes.len() > REQUEST_BLOCKS_MAX || offsets_end.is_none() {
            return Err(SaveOffer::Refused(SaveRefusal::FrameSize));
        }
        let (asker, hashes) = (self.asker(&request.asker), request.hashes.clone());
        let (parent, first_offset_blocks) = (request.parent, request.first_offset_blocks);
        let ask =
            |reply| Ask::Offer { asker, generation, parent, first_offset_blocks, hashes, frame_bytes, reply };
        match self.store.try_ask(ask).await {
            Ok(OfferPlan::Blocks(reserved)) => Ok(self.open_session(request, frame_bytes, reserved)),
            Ok(OfferPlan::OtherWeights) => Err(SaveOffer::Refused(SaveRefusal::GenerationDiffers)),
            Ok(OfferPlan::Busy) | Err(_) => Err(SaveOffer::Busy { retry_after: BUSY_RETRY }),
        }
    }

    fn open_session(
        &self,
        request: &SaveRequest,
        frame_bytes: u32,
        reserved: Reserved,
    ) -> (Vec<Offered>, Session) {
        // No await between here and the session: it answers for the reserved blocks from now on.
        let has_dram = reserved.has_dram();
        let answers = reserved.into_answers();
        let count = |kind: fn(&Offered) -> bool| u32::try_from(answers.iter().filter(|a| kind(a)).count());
        let wanted = answers.iter().zip(&request.hashes).filter_map(|(answer, hash)| match answer {
            Offered::Wanted(key) => Some((*key, *hash)),
            _ => None,
        });
        let mut wanted: Vec<(BlockKey, BlockHash)> = wanted.collect();
        wanted.reverse();
        let session = Session {
            service: self.clone(),
            lease: self.scope.lease(request.asker.lease),
            identity: request.asker.identity,
            frame_bytes: frame_bytes as usize,
            has_dram,
            root: request.hashes.first().copied().unwrap_or_default(),
            wanted,
            filling: Filling::default(),
            done: SaveDone {
                present_blocks: count(|answer| matches!(answer, Offered::Present)).unwrap_or(u32::MAX),
                refused_blocks: count(|answer| matches!(answer, Offered::Refused(_))).unwrap_or(u32::MAX),
                ..SaveDone::default()
            },
        };
        (answers, session)
    }

    /// The identity of what is kept now.
    pub(crate) fn identity(&self) -> IdentityDigest {
        self.keeps.identity.of_generation(self.store.shared.generation())
    }

    /// The identity of what is kept under weights of generation 0.
    pub(crate) fn manifest(&self) -> IdentityDigest {
        self.keeps.identity
    }

    /// Length of the longest frame that is kept, in bytes.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        self.keeps.frame_bytes_max
    }
}

fn all_refused(answers: &[Offered]) -> Option<SaveRefusal> {
    let mut refusal = None;
    for answer in answers {
        let Offered::Refused(by) = answer else { return None };
        refusal.get_or_insert(match by {
            RefusedBy::Quota => SaveRefusal::Quota,
            RefusedBy::Full => SaveRefusal::Full,
            RefusedBy::Worth => SaveRefusal::Worth,
        });
    }
    refusal
}

/// The planned blocks as frames, in order; ends at the first that cannot be had in time.
fn stream(
    identity: IdentityDigest,
    hashes: Vec<BlockHash>,
    plan: Vec<Planned>,
    deadline: Instant,
    permit: OwnedSemaphorePermit,
) -> Frames {
    let mut ready = Vec::with_capacity(plan.len());
    let mut blocks = hashes.into_iter().zip(plan);
    // What is in DRAM needs no task and no channel: the frames are references.
    for (hash, block) in blocks.by_ref() {
        match block.bytes {
            PlannedBytes::Ready(bytes) => ready.push(Frame { bytes, identity, hash }),
            loading => {
                let rest = blocks.map(|(hash, block)| (hash, block.bytes));
                let rest: Vec<_> = std::iter::once((hash, loading)).chain(rest).collect();
                let (send, later) = mpsc::channel(rest.len());
                tokio::spawn(stream_rest(identity, rest, deadline, send, permit));
                return Frames::then(ready, later);
            }
        }
    }
    Frames::ready(ready)
}

async fn stream_rest(
    identity: IdentityDigest,
    rest: Vec<(BlockHash, PlannedBytes)>,
    deadline: Instant,
    send: mpsc::Sender<Result<Frame, MissReason>>,
    permit: OwnedSemaphorePermit,
) {
    for (hash, bytes) in rest {
        let bytes = tokio::select! {
            bytes = in_time(bytes, deadline) => bytes,
            // Nobody reads any more: the room for loads is for those who do.
            () = send.closed() => break,
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(reason) => {
                tracing::debug!(%hash, reason = reason.name(), "a fetch ends before this block");
                // Nobody reads any more, perhaps.
                let _ = send.send(Err(reason)).await;
                break;
            }
        };
        if send.send(Ok(Frame { bytes, identity, hash })).await.is_err() {
            break;
        }
    }
    drop(permit);
}

async fn in_time(bytes: PlannedBytes, deadline: Instant) -> Result<Bytes, MissReason> {
    match bytes {
        PlannedBytes::Ready(bytes) => Ok(bytes),
        PlannedBytes::Loading(told) => match tokio::time::timeout_at(deadline, told).await {
            // Nobody loads it any more.
            Ok(told) => told.unwrap_or(Err(MissReason::NotHeld)),
            Err(_) => Err(MissReason::TooLate),
        },
    }
}

impl BlockService for Service {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let span = tracing::info_span!("node_fetch", request = %request.asker.request, blocks = request.hashes.len());
        trace_context::set_parent(&span, &request.asker.traceparent);
        Box::pin(self.answer_fetch(request).instrument(span))
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        let span =
            tracing::info_span!("node_save", request = %request.asker.request, blocks = request.hashes.len());
        trace_context::set_parent(&span, &request.asker.traceparent);
        Box::pin(self.answer_save(request).instrument(span))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let lease = self.scope.lease(lease);
            // A node that stops has no leases left to end.
            let _ = self.store.ask(|reply| Ask::Release { lease, reply }).await;
        })
    }

    fn admit(&self, caller: &Caller) -> Admission {
        match caller {
            Caller::Own => Admission::Same,
            Caller::Certified(leaf) => match tenants_of(leaf) {
                Ok(tenants) => {
                    // The memory is one: whoever reads it reads what every tenant keeps there.
                    let maps = self.lends_in_place && tenants.is_none();
                    let tenants = tenants.map(|tenants| tenants.into_iter().collect());
                    Admission::Scoped { service: Arc::new(self.scoped(caller, tenants)), maps }
                }
                Err(error) => {
                    self.say_refused(&error);
                    Admission::Refused
                }
            },
            // Each connection by itself: what it read ends with it.
            Caller::Local { uid, .. } => match self.locals.of(*uid) {
                Some(local) => {
                    let service = Arc::new(self.scoped(caller, local.tenants.clone()));
                    Admission::Scoped { service, maps: local.maps }
                }
                None => Admission::Refused,
            },
        }
    }

    fn renew(&self, lease: LeaseId) {
        self.store.tell_later(Ask::Renew { lease: self.scope.lease(lease) });
    }

    fn renew_every(&self) -> Duration {
        self.terms.lease / 3
    }
}

/// A save under way. Each block that was put is whole and verified, and stays when the save ends early;
/// only what did not come is given back.
pub(crate) struct Session {
    service: Service,
    /// The book's name for it.
    lease: LeaseId,
    /// The frames', under the weights of the offer.
    identity: IdentityDigest,
    frame_bytes: usize,
    /// Whether all that is wanted has its room in DRAM. The few slots through which the rest passes on its way to SSD are not for
    /// what is still computed.
    has_dram: bool,
    /// A block of the prefix: all of it is listed by one shard.
    root: BlockHash,
    /// Still to come, last first.
    wanted: Vec<(BlockKey, BlockHash)>,
    /// What comes by layer.
    filling: Filling,
    done: SaveDone,
}

impl Session {
    /// Blocks that were put.
    pub(crate) fn stored_blocks(&self) -> u32 {
        self.done.stored_blocks
    }

    async fn take(&mut self, frame: &dyn Unsettled) {
        let Some((key, hash)) = self.wanted.pop() else {
            self.done.refused_blocks += 1;
            return;
        };
        // From here on the block is ours to end, one way or the other, even if this future is dropped.
        let pending = Pending { store: self.service.store.clone(), key: Some(key) };
        let kept = self.keep(frame, hash).await;
        self.end(pending, key, kept).await;
    }

    /// Puts what was kept of a block, or refuses it.
    async fn end(&mut self, mut pending: Pending, key: BlockKey, kept: Option<Bytes>) {
        // The store keeps nothing that was offered under earlier weights, and who saves is not to count it.
        let is_now = || self.service.is_now(self.identity);
        match kept.filter(|_| is_now()) {
            Some(bytes) => {
                let (lease, len) = (self.lease, bytes.len() as u64);
                if self.service.store.tell(Ask::Put { lease, key, bytes }).await.is_ok() {
                    pending.key = None;
                    self.done.stored_blocks += 1;
                    self.done.stored_bytes += len;
                }
            }
            None => {
                self.done.refused_blocks += 1;
                self.service.metrics.refused(1);
            }
        }
    }

    /// The frame's bytes in the arena, if they are what was offered and there is room. What counts is what is there, and
    /// not what a peer's fields claim or what else the bytes were before or after.
    async fn keep(&self, frame: &dyn Unsettled, hash: BlockHash) -> Option<Bytes> {
        let len = frame.len_bytes();
        if len > self.frame_bytes {
            if self.service.may_say() {
                tracing::warn!(%hash, len, offered = self.frame_bytes, "a frame is larger than offered, check the instance that sent it");
            }
            return None;
        }
        let waiting = tokio::time::timeout(SAVE_ROOM_WAIT, self.room(len));
        let mut slot = waiting.await.ok()?;
        match settle(frame, self.identity, self.service.keeps.key_form, hash, &mut slot) {
            Ok(()) => Some(slot.freeze()),
            Err(cause) => self.refused(hash, cause),
        }
    }

    fn refused(&self, hash: BlockHash, cause: FrameError) -> Option<Bytes> {
        if self.service.may_say() {
            tracing::warn!(%hash, %cause, "a saved frame is refused, check the instance that sent it");
        }
        None
    }

    async fn room(&self, len: usize) -> SlotMut {
        loop {
            if let Some(slot) = self.service.arena.take(len, Purpose::Save) {
                return slot;
            }
            // A timeout only means: look again.
            let _ = tokio::time::timeout(ROOM_POLL, self.service.arena.freed()).await;
        }
    }

    fn abort_rest(&mut self) {
        let keys: Vec<BlockKey> = std::mem::take(&mut self.wanted).into_iter().map(|(key, _)| key).collect();
        if !keys.is_empty() {
            self.service.store.tell_later(Ask::Abort { keys });
        }
    }
}

/// A reserved block whose bytes are being taken; aborted unless it was put.
struct Pending {
    store: StoreHandle,
    key: Option<BlockKey>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.store.tell_later(Ask::Abort { keys: vec![key] });
        }
    }
}

/// Slots of the wanted blocks of a save that comes by layer.
#[derive(Default)]
struct Filling {
    /// By position; taken when their heads come.
    slots: Vec<Option<(SlotMut, HeadLast)>>,
    /// Heads that came.
    heads: usize,
    _part: Option<LayeredPart>,
}

impl LayerRoom for Session {
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let (slot, comes) = self.filling.slots.get_mut(position)?.as_mut()?;
        comes.slice(layer, slot)
    }

    fn came(&mut self, position: usize) {
        if let Some(Some((slot, comes))) = self.filling.slots.get_mut(position) {
            comes.came(slot);
        }
    }

    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Some((key, hash)) = self.wanted.pop() else { return };
            let pending = Pending { store: self.service.store.clone(), key: Some(key) };
            let filled = self.filling.slots.get_mut(self.filling.heads).and_then(Option::take);
            self.filling.heads += 1;
            let (identity, key_form) = (self.identity, self.service.keeps.key_form);
            let kept = filled.and_then(|(mut slot, comes)| {
                match comes.finish(&head, identity, key_form, hash, &mut slot) {
                    Ok(()) => Some(slot.freeze()),
                    Err(cause) => self.refused(hash, cause),
                }
            });
            self.end(pending, key, kept).await;
        })
    }
}

impl SaveSession for Session {
    /// Slots for all blocks or none: saves that wait for each other's would wait for ever.
    fn layers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerRoom> {
        let (service, frame_bytes) = (&self.service, layout.frame_bytes());
        if frame_bytes > self.frame_bytes || !self.has_dram {
            return None;
        }
        let share_bytes = service.arena.share_bytes(frame_bytes);
        let part = service.layered.take(share_bytes.saturating_mul(self.wanted.len()))?;
        let slot = || Some((service.arena.take(frame_bytes, Purpose::Save)?, HeadLast::new(layout.clone())));
        let slots = self.wanted.iter().map(|_| slot().map(Some)).collect::<Option<_>>()?;
        self.filling = Filling { slots, heads: 0, _part: Some(part) };
        Some(self)
    }

    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.take(&frame.bytes).await })
    }

    fn put_unsettled(&mut self, frame: Arc<dyn Unsettled>) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.take(&*frame).await })
    }

    fn finish(mut self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        Box::pin(async move {
            self.done.refused_blocks += u32::try_from(self.wanted.len()).unwrap_or(u32::MAX);
            self.abort_rest();
            let block = self.root;
            let at = self.service.store.ask(|reply| Ask::Position { block, reply }).await;
            SaveDone { visible_at: at.ok().flatten(), ..self.done.clone() }
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.abort_rest();
    }
}
