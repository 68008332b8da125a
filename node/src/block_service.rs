//! Block service: fetches and saves from any transport, on top of the store.
//!
//! Bytes in DRAM are returned by reference. Saved bytes are verified against the offer before the
//! commit. Each caller has a service with its own [`Scope`]. Not here: the wire
//! (`kvfleet-transport`) and block ownership (`store`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, IdentityDigest, LeaseId, TenantId, Tier};
use kv_core::tier::{OfferOutcome, RefusalReason, Requester};
use kvfleet_net::tls::access::{Access, rule_of};
use kvfleet_net::tls::{NamesError, Role, role_of};
use kvfleet_net::trace_context;
use kvfleet_proto::frame::{
    Frame, FrameError, KeyForm, SliceLayout, SlicesFirstFrame, VolatileBytes, copy_and_verify,
};
use kvfleet_transport::{
    BlockService, BoxFuture, Caller, CallerAdmission, FetchAnswer, FetchReply, FetchRequest, Frames,
    LayerBuffers, MissReason, SaveDone, SaveOffer, SaveRefusal, SaveRequest, SaveSession,
};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tracing::Instrument;

use crate::arena::{Arena, Purpose, SlotMut};
use crate::layerwise::{LayerwiseBudget, LayerwiseReservation};
use crate::metrics::Metrics;
use crate::scope::{LocalUsers, Scope};
use crate::store::{
    BUSY_RETRY, FetchPlan, OfferPlan, OfferReservation, PlannedBlock, PlannedBytes, StoreHandle, StoreRequest,
};

/// Longest wait of a save for a DRAM slot while demotions are in progress; then the block is
/// refused.
pub const SAVE_SLOT_WAIT: Duration = Duration::from_secs(2);

/// Maximum blocks of one fetch or save: 1 Mi tokens in blocks of 16, above any prompt length in
/// use.
pub const REQUEST_BLOCKS_MAX: usize = 65_536;

/// Longest time of a fetch, whatever its deadline: no recomputation takes longer.
pub const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Maximum warnings logged about one caller.
const WARNINGS_PER_CALLER_MAX: u32 = 16;

/// Longest sleep of a waiting save between attempts to take a slot, because a wake-up may be
/// missed.
const SLOT_POLL: Duration = Duration::from_millis(5);

/// Frames that the node accepts: one identity, and a maximum length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameSpec {
    /// Digest of the manifest: the identity under weights of generation 0.
    pub(crate) identity: IdentityDigest,
    /// Key form by the manifest. The digest covers it too, but cannot be decoded.
    pub(crate) key_form: KeyForm,
    /// Length of the longest frame in bytes.
    pub(crate) frame_bytes_max: usize,
}

/// Limits that the node applies to its callers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceLimits {
    /// Size of the DRAM tier in bytes, without the slots for blocks in flight.
    pub(crate) tier_bytes: usize,
    /// Lifetime of a lease without renewal.
    pub(crate) lease: Duration,
}

/// The block service of one caller, for every transport.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    store: StoreHandle,
    arena: Arena,
    frame_spec: FrameSpec,
    limits: ServiceLimits,
    metrics: Metrics,
    scope: Scope,
    locals: LocalUsers,
    /// Whether network cards of certified callers may read the whole block memory.
    rdma_reads_in_place: bool,
    /// Slots for layer-wise saves, shared by all callers.
    layerwise: LayerwiseBudget,
    /// Operations that this caller may request.
    permissions: DataPermissions,
    /// Number of warnings logged about this caller.
    warnings: Arc<AtomicU32>,
}

/// Operations of the block path that a caller may request, besides pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataPermissions {
    fetch: bool,
    save: bool,
    /// Whether its network card may read the whole block memory.
    map: bool,
}

impl DataPermissions {
    const ALL: DataPermissions = DataPermissions { fetch: true, save: true, map: true };

    /// Those of a role, by the access table.
    fn of(role: &Role) -> DataPermissions {
        let access = |path| rule_of(path).map_or(Access::Deny, |rule| rule.access(role.kind()));
        DataPermissions {
            fetch: access("data/Fetch") != Access::Deny,
            save: access("data/Save") != Access::Deny,
            map: access("data/Attach") == Access::Allow,
        }
    }
}

impl Service {
    /// Service for this process; [`BlockService::admit`] creates those of other callers.
    pub(crate) fn new(
        store: StoreHandle,
        arena: Arena,
        frame_spec: FrameSpec,
        limits: ServiceLimits,
        metrics: Metrics,
        scope: Scope,
        locals: LocalUsers,
    ) -> Service {
        let (rdma_reads_in_place, warnings) = (false, Arc::default());
        let layerwise = LayerwiseBudget::half_of(limits.tier_bytes);
        Service {
            store,
            arena,
            frame_spec,
            limits,
            metrics,
            scope,
            locals,
            rdma_reads_in_place,
            layerwise,
            permissions: DataPermissions::ALL,
            warnings,
        }
    }

    /// Sets whether network cards of certified callers may read the whole block memory.
    pub(crate) fn with_rdma_reads_in_place(self, lends_in_place: bool) -> Service {
        Service { rdma_reads_in_place: lends_in_place, ..self }
    }

    /// The service for another caller.
    pub(crate) fn scoped(&self, caller: &Caller, tenants: Option<Arc<[TenantId]>>) -> Service {
        Service { scope: self.scope.of(caller, tenants), warnings: Arc::default(), ..self.clone() }
    }

    /// Whether another warning may be logged: a misbehaving caller must not fill the log.
    fn may_warn(&self) -> bool {
        let more = |said: u32| (said < WARNINGS_PER_CALLER_MAX).then_some(said + 1);
        self.warnings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    async fn answer_fetch(&self, request: FetchRequest) -> FetchReply {
        let reason = self.refuse_fetch(&request);
        if let Some(reason) = reason {
            return self.without_frames(FetchAnswer::Miss { reason });
        }
        if request.hashes.is_empty() {
            return self.without_frames(FetchAnswer::Hit { tiers: Vec::new() });
        }
        let asker = self.asker(&request.context);
        let deadline = Instant::now() + request.deadline.min(FETCH_TIME_MAX);
        let asked = request.hashes.len();
        let hashes = request.hashes;
        let identity = request.context.identity;
        let Some(generation) = identity.generation_relative_to(self.frame_spec.identity) else {
            return self.without_frames(FetchAnswer::Miss { reason: MissReason::IdentityDiffers });
        };
        let held = hashes.clone();
        match self.store.try_request(|reply| StoreRequest::Fetch { asker, generation, hashes, reply }).await {
            Ok(FetchPlan::GenerationMismatch) => {
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
                let lendable = blocks.iter().map(|block| block.is_dram_resident).collect();
                let frames = frame_stream(identity, held, blocks, deadline, permit);
                FetchReply { answer, frames, epoch: self.store.shared.epoch(), lendable }
            }
            Ok(FetchPlan::Busy) | Err(_) => self.busy(),
        }
    }

    fn refuse_fetch(&self, request: &FetchRequest) -> Option<MissReason> {
        let generation = request.context.identity.generation_relative_to(self.frame_spec.identity);
        if generation.is_none() {
            return Some(MissReason::IdentityDiffers);
        }
        if !self.is_allowed(self.permissions.fetch) || !self.is_tenant_allowed(request.context.tenant) {
            return Some(MissReason::NotHeld);
        }
        // Check before the epoch, which also changes with the weights: the identity is the actual
        // mismatch.
        if generation != Some(self.store.shared.generation()) {
            return Some(MissReason::GenerationDiffers);
        }
        if request.epoch != self.store.shared.epoch() {
            return Some(MissReason::StaleEpoch);
        }
        (request.hashes.len() > REQUEST_BLOCKS_MAX).then_some(MissReason::NotHeld)
    }

    /// Whether this is the identity under the weights in force.
    fn is_current(&self, identity: IdentityDigest) -> bool {
        identity == self.identity()
    }

    /// Logs a call that the caller's role may not make.
    fn is_allowed(&self, permission: bool) -> bool {
        if !permission && self.may_warn() {
            tracing::warn!("a caller's role may not fetch or save blocks: give it an instance's certificate");
        }
        permission
    }

    /// Whether this caller may name the tenant.
    fn is_tenant_allowed(&self, tenant: TenantId) -> bool {
        let has = self.scope.has_tenant(tenant);
        if !has && self.may_warn() {
            tracing::warn!(%tenant, "a caller asks as a tenant that is not its own, check its configuration");
        }
        has
    }

    /// Refused callers retry; together they must not fill the log.
    fn warn_refused(&self, error: &NamesError) {
        if self.may_warn() {
            tracing::warn!(%error, "a certificate is refused, issue a new one");
        }
    }

    pub(crate) fn asker(&self, asker: &kvfleet_transport::RequestContext) -> Requester {
        let (lease, caller) = (self.scope.lease(asker.lease), self.scope.caller());
        Requester { lease, caller, tenant: asker.tenant, category: asker.category }
    }

    fn busy(&self) -> FetchReply {
        self.without_frames(FetchAnswer::Busy { retry_after: BUSY_RETRY })
    }

    fn without_frames(&self, answer: FetchAnswer) -> FetchReply {
        FetchReply { answer, frames: Frames::empty(), epoch: self.store.shared.epoch(), lendable: Vec::new() }
    }

    async fn answer_save(&self, request: SaveRequest) -> (SaveOffer, Option<Box<dyn SaveSession>>) {
        let (answers, session) = match self.reserve(&request).await {
            Ok(reserved) => reserved,
            Err(offer) => return (offer, None),
        };
        if let Some(refusal) = all_refused(&answers) {
            return (SaveOffer::Refused(refusal), None);
        }
        let marks = answers.iter().map(|answer| matches!(answer, OfferOutcome::Wanted(_))).collect();
        (SaveOffer::Wanted(marks), Some(Box::new(session)))
    }

    /// Offers a save to the store. Returns the answer for each block and the session that receives
    /// them.
    ///
    /// # Errors
    /// The answer to send if the save as a whole is refused.
    pub(crate) async fn reserve(
        &self,
        request: &SaveRequest,
    ) -> Result<(Vec<OfferOutcome>, NodeSaveSession), SaveOffer> {
        let generation = request.context.identity.generation_relative_to(self.frame_spec.identity);
        let generation = generation.filter(|_| {
            self.is_allowed(self.permissions.save) && self.is_tenant_allowed(request.context.tenant)
        });
        let generation = generation.ok_or(SaveOffer::Refused(SaveRefusal::IdentityDiffers))?;
        let frame_bytes = match u32::try_from(request.frame_bytes) {
            Ok(bytes) if bytes > 0 && bytes as usize <= self.frame_spec.frame_bytes_max => bytes,
            _ => return Err(SaveOffer::Refused(SaveRefusal::FrameSize)),
        };
        let offsets_end = u32::try_from(request.hashes.len()).ok();
        let offsets_end = offsets_end.and_then(|blocks| request.first_offset_blocks.checked_add(blocks));
        if request.hashes.is_empty() || request.hashes.len() > REQUEST_BLOCKS_MAX || offsets_end.is_none() {
            return Err(SaveOffer::Refused(SaveRefusal::FrameSize));
        }
        let (asker, hashes) = (self.asker(&request.context), request.hashes.clone());
        let (parent, first_offset_blocks) = (request.parent, request.first_offset_blocks);
        let ask = |reply| StoreRequest::Offer {
            asker,
            generation,
            parent,
            first_offset_blocks,
            hashes,
            frame_bytes,
            reply,
        };
        match self.store.try_request(ask).await {
            Ok(OfferPlan::Blocks(reserved)) => Ok(self.open_session(request, frame_bytes, reserved)),
            Ok(OfferPlan::GenerationMismatch) => Err(SaveOffer::Refused(SaveRefusal::GenerationDiffers)),
            Ok(OfferPlan::Busy) | Err(_) => Err(SaveOffer::Busy { retry_after: BUSY_RETRY }),
        }
    }

    fn open_session(
        &self,
        request: &SaveRequest,
        frame_bytes: u32,
        reserved: OfferReservation,
    ) -> (Vec<OfferOutcome>, NodeSaveSession) {
        // No await between here and the session: from now on the session must commit or abort the
        // reserved blocks.
        let has_dram = reserved.has_dram();
        let answers = reserved.into_answers();
        let count =
            |kind: fn(&OfferOutcome) -> bool| u32::try_from(answers.iter().filter(|a| kind(a)).count());
        let wanted = answers.iter().zip(&request.hashes).filter_map(|(answer, hash)| match answer {
            OfferOutcome::Wanted(key) => Some((*key, *hash)),
            _ => None,
        });
        let mut wanted: Vec<(BlockKey, BlockHash)> = wanted.collect();
        wanted.reverse();
        let session = NodeSaveSession {
            service: self.clone(),
            lease: self.scope.lease(request.context.lease),
            identity: request.context.identity,
            frame_bytes: frame_bytes as usize,
            has_dram,
            root: request.hashes.first().copied().unwrap_or_default(),
            wanted,
            layer_slots: LayerSlots::default(),
            done: SaveDone {
                present_blocks: count(|answer| matches!(answer, OfferOutcome::Present)).unwrap_or(u32::MAX),
                refused_blocks: count(|answer| matches!(answer, OfferOutcome::Refused(_)))
                    .unwrap_or(u32::MAX),
                ..SaveDone::default()
            },
        };
        (answers, session)
    }

    /// Identity under the weights in force.
    pub(crate) fn identity(&self) -> IdentityDigest {
        self.frame_spec.identity.with_generation(self.store.shared.generation())
    }

    /// Identity under weights of generation 0.
    pub(crate) fn manifest(&self) -> IdentityDigest {
        self.frame_spec.identity
    }

    /// Length of the longest accepted frame, in bytes.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        self.frame_spec.frame_bytes_max
    }
}

fn all_refused(answers: &[OfferOutcome]) -> Option<SaveRefusal> {
    let mut refusal = None;
    for answer in answers {
        let OfferOutcome::Refused(by) = answer else { return None };
        refusal.get_or_insert(match by {
            RefusalReason::Quota => SaveRefusal::Quota,
            RefusalReason::Full => SaveRefusal::Full,
            RefusalReason::LowValue => SaveRefusal::LowValue,
        });
    }
    refusal
}

/// The planned blocks as frames, in order. Ends at the first block that does not arrive in time.
fn frame_stream(
    identity: IdentityDigest,
    hashes: Vec<BlockHash>,
    plan: Vec<PlannedBlock>,
    deadline: Instant,
    permit: OwnedSemaphorePermit,
) -> Frames {
    let mut ready = Vec::with_capacity(plan.len());
    let mut blocks = hashes.into_iter().zip(plan);
    // Blocks in DRAM need no task and no channel: their frames are references.
    for (hash, block) in blocks.by_ref() {
        match block.bytes {
            PlannedBytes::Ready(bytes) => ready.push(Frame { bytes, identity, hash }),
            loading => {
                let rest = blocks.map(|(hash, block)| (hash, block.bytes));
                let rest: Vec<_> = std::iter::once((hash, loading)).chain(rest).collect();
                let (send, later) = mpsc::channel(rest.len());
                tokio::spawn(stream_loading(identity, rest, deadline, send, permit));
                return Frames::ready_then(ready, later);
            }
        }
    }
    Frames::ready(ready)
}

async fn stream_loading(
    identity: IdentityDigest,
    rest: Vec<(BlockHash, PlannedBytes)>,
    deadline: Instant,
    send: mpsc::Sender<Result<Frame, MissReason>>,
    permit: OwnedSemaphorePermit,
) {
    for (hash, bytes) in rest {
        let bytes = tokio::select! {
            bytes = bytes_before(bytes, deadline) => bytes,
            // The reader is gone; free the load budget for other readers.
            () = send.closed() => break,
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(reason) => {
                tracing::debug!(%hash, reason = reason.name(), "a fetch ends before this block");
                // The reader may be gone.
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

async fn bytes_before(bytes: PlannedBytes, deadline: Instant) -> Result<Bytes, MissReason> {
    match bytes {
        PlannedBytes::Ready(bytes) => Ok(bytes),
        PlannedBytes::Loading(told) => match tokio::time::timeout_at(deadline, told).await {
            // The load was abandoned.
            Ok(told) => told.unwrap_or(Err(MissReason::NotHeld)),
            Err(_) => Err(MissReason::TooLate),
        },
    }
}

impl BlockService for Service {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let span = tracing::info_span!("node_fetch", request = %request.context.request, blocks = request.hashes.len());
        trace_context::set_parent(&span, &request.context.traceparent);
        Box::pin(self.answer_fetch(request).instrument(span))
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        let span = tracing::info_span!("node_save", request = %request.context.request, blocks = request.hashes.len());
        trace_context::set_parent(&span, &request.context.traceparent);
        Box::pin(self.answer_save(request).instrument(span))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if !self.permissions.fetch {
                return;
            }
            let lease = self.scope.lease(lease);
            // A node that stops has no leases left to end.
            let _ = self.store.request(|reply| StoreRequest::Release { lease, reply }).await;
        })
    }

    fn admit(&self, caller: &Caller) -> CallerAdmission {
        match caller {
            Caller::ThisProcess => CallerAdmission::Unscoped,
            Caller::Certified(leaf) => match role_of(leaf) {
                Ok(role) => {
                    let permissions = DataPermissions::of(&role);
                    // The memory is shared by all tenants: a caller that maps it reads every
                    // tenant's blocks.
                    let may_map = self.rdma_reads_in_place && permissions.map;
                    let tenants = match role {
                        Role::Tenants(tenants) => Some(tenants.into_iter().collect()),
                        _ => None,
                    };
                    let service = Service { permissions, ..self.scoped(caller, tenants) };
                    CallerAdmission::Scoped { service: Arc::new(service), may_map }
                }
                Err(error) => {
                    self.warn_refused(&error);
                    CallerAdmission::Refused
                }
            },
            // Each connection is its own caller: its leases end with it.
            Caller::Local { uid, .. } => match self.locals.of(*uid) {
                Some(local) => {
                    let service = Arc::new(self.scoped(caller, local.tenants.clone()));
                    CallerAdmission::Scoped { service, may_map: local.may_map }
                }
                None => CallerAdmission::Refused,
            },
        }
    }

    fn renew(&self, lease: LeaseId) {
        self.store.send_or_spawn(StoreRequest::Renew { lease: self.scope.lease(lease) });
    }

    fn renew_interval(&self) -> Duration {
        self.limits.lease / 3
    }
}

/// A save in progress. Each block that was put is verified and stays if the save ends early; blocks
/// that did not arrive are aborted.
pub(crate) struct NodeSaveSession {
    service: Service,
    /// The lease's id in the book.
    lease: LeaseId,
    /// Identity of the frames, under the weights of the offer.
    identity: IdentityDigest,
    frame_bytes: usize,
    /// Whether all wanted blocks have their space in DRAM. The few slots for blocks that pass
    /// through to SSD may not hold blocks still being computed.
    has_dram: bool,
    /// A block of the prefix; one shard lists the whole prefix.
    root: BlockHash,
    /// Blocks still to arrive, last first.
    wanted: Vec<(BlockKey, BlockHash)>,
    /// Slots of blocks that arrive by layer.
    layer_slots: LayerSlots,
    done: SaveDone,
}

impl NodeSaveSession {
    /// Number of blocks put.
    pub(crate) fn stored_blocks(&self) -> u32 {
        self.done.stored_blocks
    }

    async fn take_frame(&mut self, frame: &dyn VolatileBytes) {
        let Some((key, hash)) = self.wanted.pop() else {
            self.done.refused_blocks += 1;
            return;
        };
        // From here on this block must be committed or aborted, even if this future is dropped.
        let pending = ReservedBlock { store: self.service.store.clone(), key: Some(key) };
        let kept = self.store_frame(frame, hash).await;
        self.finish_block(pending, key, kept).await;
    }

    /// Commits the stored bytes of a block, or refuses it.
    async fn finish_block(&mut self, mut pending: ReservedBlock, key: BlockKey, kept: Option<Bytes>) {
        // The store keeps no block offered under earlier weights, so it must not be counted as
        // stored.
        let is_now = || self.service.is_current(self.identity);
        match kept.filter(|_| is_now()) {
            Some(bytes) => {
                let (lease, len) = (self.lease, bytes.len() as u64);
                if self.service.store.send(StoreRequest::Put { lease, key, bytes }).await.is_ok() {
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

    /// Copies the frame into the arena and verifies it there. Returns `None` if it is not the
    /// offered block or no slot is free. Only the copied bytes count, because the source may still
    /// change.
    async fn store_frame(&self, frame: &dyn VolatileBytes, hash: BlockHash) -> Option<Bytes> {
        let len = frame.len_bytes();
        if len > self.frame_bytes {
            if self.service.may_warn() {
                tracing::warn!(%hash, len, offered = self.frame_bytes, "a frame is larger than offered, \
                    check the instance that sent it");
            }
            return None;
        }
        let waiting = tokio::time::timeout(SAVE_SLOT_WAIT, self.wait_for_slot(len));
        let mut slot = waiting.await.ok()?;
        match copy_and_verify(frame, self.identity, self.service.frame_spec.key_form, hash, &mut slot) {
            Ok(()) => Some(slot.freeze()),
            Err(cause) => self.refused(hash, cause),
        }
    }

    fn refused(&self, hash: BlockHash, cause: FrameError) -> Option<Bytes> {
        if self.service.may_warn() {
            tracing::warn!(%hash, %cause, "a saved frame is refused, check the instance that sent it");
        }
        None
    }

    async fn wait_for_slot(&self, len: usize) -> SlotMut {
        loop {
            if let Some(slot) = self.service.arena.take(len, Purpose::Save) {
                return slot;
            }
            // A timeout only means: look again.
            let _ = tokio::time::timeout(SLOT_POLL, self.service.arena.freed()).await;
        }
    }

    fn abort_rest(&mut self) {
        let keys: Vec<BlockKey> = std::mem::take(&mut self.wanted).into_iter().map(|(key, _)| key).collect();
        if !keys.is_empty() {
            self.service.store.send_or_spawn(StoreRequest::Abort { keys });
        }
    }
}

/// A reserved block in transfer; aborted unless it was put.
struct ReservedBlock {
    store: StoreHandle,
    key: Option<BlockKey>,
}

impl Drop for ReservedBlock {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.store.send_or_spawn(StoreRequest::Abort { keys: vec![key] });
        }
    }
}

/// Slots of the wanted blocks of a layer-wise save.
#[derive(Default)]
struct LayerSlots {
    /// By position; taken when the block's head arrives.
    slots: Vec<Option<(SlotMut, SlicesFirstFrame)>>,
    /// Heads received.
    heads: usize,
    _part: Option<LayerwiseReservation>,
}

impl LayerBuffers for NodeSaveSession {
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let (slot, comes) = self.layer_slots.slots.get_mut(position)?.as_mut()?;
        comes.slice(layer, slot)
    }

    fn slice_written(&mut self, position: usize) {
        if let Some(Some((slot, comes))) = self.layer_slots.slots.get_mut(position) {
            comes.record_slice(slot);
        }
    }

    fn put_head(&mut self, head: Bytes) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Some((key, hash)) = self.wanted.pop() else { return };
            let pending = ReservedBlock { store: self.service.store.clone(), key: Some(key) };
            let filled = self.layer_slots.slots.get_mut(self.layer_slots.heads).and_then(Option::take);
            self.layer_slots.heads += 1;
            let (identity, key_form) = (self.identity, self.service.frame_spec.key_form);
            let kept = filled.and_then(|(mut slot, comes)| {
                match comes.finish(&head, identity, key_form, hash, &mut slot) {
                    Ok(()) => Some(slot.freeze()),
                    Err(cause) => self.refused(hash, cause),
                }
            });
            self.finish_block(pending, key, kept).await;
        })
    }
}

impl SaveSession for NodeSaveSession {
    /// Takes slots for all blocks or none: saves that wait for each other's slots would deadlock.
    fn layer_buffers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerBuffers> {
        let (service, frame_bytes) = (&self.service, layout.frame_bytes());
        if frame_bytes > self.frame_bytes || !self.has_dram {
            return None;
        }
        let share_bytes = service.arena.share_bytes(frame_bytes);
        let part = service.layerwise.take(share_bytes.saturating_mul(self.wanted.len()))?;
        let slot =
            || Some((service.arena.take(frame_bytes, Purpose::Save)?, SlicesFirstFrame::new(layout.clone())));
        let slots = self.wanted.iter().map(|_| slot().map(Some)).collect::<Option<_>>()?;
        self.layer_slots = LayerSlots { slots, heads: 0, _part: Some(part) };
        Some(self)
    }

    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.take_frame(&frame.bytes).await })
    }

    fn put_volatile(&mut self, frame: Arc<dyn VolatileBytes>) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.take_frame(&*frame).await })
    }

    fn finish(mut self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        Box::pin(async move {
            self.done.refused_blocks += u32::try_from(self.wanted.len()).unwrap_or(u32::MAX);
            self.abort_rest();
            let block = self.root;
            let at = self.service.store.request(|reply| StoreRequest::Position { block, reply }).await;
            SaveDone { visible_at: at.ok().flatten(), ..self.done.clone() }
        })
    }
}

impl Drop for NodeSaveSession {
    fn drop(&mut self) {
        self.abort_rest();
    }
}
