//! State of one connection at a node: grants and their bytes, ranges of the bounce buffer, and
//! queued packets.
//!
//! One lock protects all of it, so that rows reach the client in the order of granting. The rules
//! are those of `kv_core::lend`; this file adds the bytes. Not here: reading packets
//! (`connection.rs`) and operations (`serving.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::id::{GrantId, LeaseId, Timestamp};
use kv_core::lease_grant::{
    GrantDescriptor, GrantEffect, GrantLimits, GrantMemory, GrantRefused, GrantServer, SlotAllocator,
};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::mapping::Mapping;
use super::packet::NodePacket;
use super::seqpacket::{PeerProcess, SendOutcome, Seqpacket};
use super::{BOUNCE_ALIGN_BYTES, GRANTS_MAX, GRANTS_TOTAL_MAX, LEASES_MAX, OldestGrant};
use crate::SharedArena;

/// Maximum ended grants that are freed on the connection's own thread.
const INLINE_FREES_MAX: usize = 1024;

/// Packets queued for a slow reader before its operations wait.
const QUEUED_PACKETS_MAX: usize = 256;

/// Budget of grants over all connections of a node.
#[derive(Debug)]
pub(super) struct GrantBudget {
    totals: Mutex<GrantTotals>,
    granted_bytes_max: u64,
}

/// Number of grants, and the bytes that they pin.
#[derive(Clone, Copy, Debug, Default)]
struct GrantTotals {
    grants: usize,
    bytes: u64,
}

impl GrantBudget {
    pub(super) fn new(lent_bytes_max: u64) -> Arc<GrantBudget> {
        Arc::new(GrantBudget { totals: Mutex::default(), granted_bytes_max: lent_bytes_max })
    }

    fn lock_totals(&self) -> MutexGuard<'_, GrantTotals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As for one connection, a single grant always fits.
    fn fits(&self, lent: GrantTotals, planned: u64, bytes: u64) -> bool {
        let beside = lent.bytes.saturating_add(planned);
        let is_room = beside == 0 || beside.saturating_add(bytes) <= self.granted_bytes_max;
        is_room && lent.grants < GRANTS_TOTAL_MAX
    }

    /// Reserves one more grant, if it fits.
    fn reserve(&self, bytes: u64) -> bool {
        let mut lent = self.lock_totals();
        let fits = self.fits(*lent, 0, bytes);
        if fits {
            lent.grants += 1;
            lent.bytes += bytes;
        }
        fits
    }

    fn release(&self, sum: GrantTotals) {
        let mut lent = self.lock_totals();
        lent.grants -= sum.grants;
        lent.bytes -= sum.bytes;
    }
}

/// A block that can be granted: its location for the client, and what keeps it there.
pub(super) struct GrantableBlock {
    place: GrantMemory,
    at: u64,
    len: u32,
    guard: BlockGuard,
}

impl GrantableBlock {
    /// Whether it occupies a range of the bounce buffer.
    pub(super) fn is_copied(&self) -> bool {
        self.place == GrantMemory::BounceBuffer
    }
}

/// Keeps the bytes of a grant unchanged.
enum BlockGuard {
    /// The arena's slot is freed when the last reference is dropped.
    ArenaSlot { _bytes: Bytes },
    /// A range of the bounce buffer.
    BounceCopy { _place: BounceSlot },
}

/// A range in the part of the bounce buffer that the client reads; freed on drop.
struct BounceSlot {
    grants: std::sync::Weak<ConnectionGrants>,
    at: u64,
}

impl Drop for BounceSlot {
    fn drop(&mut self) {
        if let Some(lending) = self.grants.upgrade() {
            lending.lock_free_space().free(self.at);
            lending.space_freed.notify_waiters();
        }
    }
}

/// Result of granting a batch of blocks.
#[derive(Debug)]
pub(super) struct GrantOutcome {
    /// Number of granted rows.
    pub(super) rows: usize,
    /// The limit that prevents the remaining grants.
    pub(super) refused: Option<GrantRefused>,
}

/// The node's state of one connection.
pub(super) struct ConnectionGrants {
    socket: AsyncFd<Seqpacket>,
    state: Mutex<GrantState>,
    /// Free ranges of the part that the client reads, under a separate lock: they are freed while
    /// the other lock is held.
    free_space: Mutex<SlotAllocator>,
    bounce: Arc<Mapping>,
    /// Offset of that part in the bounce buffer.
    bounce_out_offset: u64,
    arena: Option<Arc<dyn SharedArena>>,
    budget: Arc<GrantBudget>,
    /// Runtime for long work.
    bulk: Handle,
    peer: PeerProcess,
    since: Instant,
    /// Notified when a range of the bounce buffer is freed.
    space_freed: Notify,
    /// Notified when packets or effects are pending.
    work: Notify,
    /// Notified when the packet queue shrinks.
    sent: Notify,
}

struct GrantState {
    rules: GrantServer,
    guards: BTreeMap<GrantId, BlockGuard>,
    /// Its share of the node's budget.
    totals: GrantTotals,
    effects: Vec<GrantEffect>,
    queued: VecDeque<Vec<u8>>,
    /// Since when the oldest packet is queued.
    queued_since: Option<Instant>,
    /// Why no further packet can be sent.
    failed: Option<io::Error>,
    /// The client was told that the connection closes: no packet follows.
    is_closing: bool,
    /// The client is gone and reads no granted bytes any more.
    is_client_gone: bool,
}

/// Resources that a connection grants blocks from.
pub(super) struct GrantResources {
    pub(super) bounce: Arc<Mapping>,
    pub(super) bounce_out_offset: u64,
    pub(super) bounce_out_bytes: u64,
    /// The arena, if the client has mapped it.
    pub(super) arena: Option<Arc<dyn SharedArena>>,
    pub(super) budget: Arc<GrantBudget>,
    pub(super) granted_bytes_max: u64,
    pub(super) bulk: Handle,
    /// The client process.
    pub(super) peer: PeerProcess,
    pub(super) lease: std::time::Duration,
    /// Start of the node's clock.
    pub(super) since: Instant,
}

impl ConnectionGrants {
    pub(super) fn new(socket: Seqpacket, stock: GrantResources) -> io::Result<Arc<ConnectionGrants>> {
        let limits = GrantLimits {
            granted_bytes_max: stock.granted_bytes_max,
            grants_max: GRANTS_MAX,
            leases_max: LEASES_MAX,
            lease: stock.lease,
        };
        let state = GrantState {
            rules: GrantServer::new(limits),
            guards: BTreeMap::new(),
            totals: GrantTotals::default(),
            effects: Vec::new(),
            queued: VecDeque::new(),
            queued_since: None,
            failed: None,
            is_closing: false,
            is_client_gone: false,
        };
        Ok(Arc::new(ConnectionGrants {
            socket: socket.into_async()?,
            state: Mutex::new(state),
            free_space: Mutex::new(SlotAllocator::new(stock.bounce_out_bytes, BOUNCE_ALIGN_BYTES)),
            bounce: stock.bounce,
            bounce_out_offset: stock.bounce_out_offset,
            arena: stock.arena,
            budget: stock.budget,
            bulk: stock.bulk,
            peer: stock.peer,
            since: stock.since,
            space_freed: Notify::new(),
            work: Notify::new(),
            sent: Notify::new(),
        }))
    }

    pub(super) fn socket(&self) -> &AsyncFd<Seqpacket> {
        &self.socket
    }

    pub(super) fn bounce(&self) -> &Arc<Mapping> {
        &self.bounce
    }

    /// Bytes of the part that the client writes.
    pub(super) fn bounce_in_bytes(&self) -> u64 {
        self.bounce_out_offset
    }

    fn lock_state(&self) -> MutexGuard<'_, GrantState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_free_space(&self) -> MutexGuard<'_, SlotAllocator> {
        self.free_space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// Starts an operation under this lease; it ends when the guard is dropped.
    ///
    /// # Errors
    /// If there are too many leases, or the connection is closing.
    pub(super) fn begin(self: &Arc<Self>, lease: LeaseId) -> Result<OperationGuard, GrantRefused> {
        let mut state = self.lock_state();
        state.rules.begin(lease, self.now())?;
        // An earlier release must not end the operation that starts now.
        state.effects.retain(|effect| *effect != GrantEffect::Release(lease));
        drop(state);
        Ok(OperationGuard { lending: Arc::clone(self), lease })
    }

    /// The client ended a lease.
    pub(super) fn release(&self, lease: LeaseId) {
        let mut state = self.lock_state();
        let GrantState { rules: lender, effects, .. } = &mut *state;
        lender.release(lease, effects);
    }

    /// A block that can be granted in place: the client maps the arena, and the limits allow it
    /// besides the `planned` bytes.
    pub(super) fn grant_in_place(&self, bytes: &Bytes, planned: u64) -> Option<GrantableBlock> {
        let at = self.arena.as_ref()?.offset_of(bytes)?;
        let len = u32::try_from(bytes.len()).ok()?;
        let fits = self.lock_state().rules.fits(planned, u64::from(len));
        if !fits || !self.budget.fits(*self.budget.lock_totals(), planned, u64::from(len)) {
            return None;
        }
        let kept = BlockGuard::ArenaSlot { _bytes: bytes.clone() };
        Some(GrantableBlock { place: GrantMemory::Arena, at, len, guard: kept })
    }

    /// Copies bytes into the bounce buffer; `None` while it has no free range. Call this where
    /// copying may block.
    pub(super) fn copy_to_bounce(self: &Arc<Self>, bytes: &Bytes) -> Option<GrantableBlock> {
        let len = u32::try_from(bytes.len()).ok()?;
        let at = self.lock_free_space().allocate(len)?;
        let place = BounceSlot { grants: Arc::downgrade(self), at };
        self.bounce.write(self.bounce_out_offset + at, bytes)?;
        Some(GrantableBlock {
            place: GrantMemory::BounceBuffer,
            at,
            len,
            guard: BlockGuard::BounceCopy { _place: place },
        })
    }

    /// Waits until a range of the bounce buffer is freed. Create it before checking for a free
    /// range, so that no event is missed.
    pub(super) fn space_freed(&self) -> tokio::sync::futures::Notified<'_> {
        self.space_freed.notified()
    }

    /// Grants as many of these blocks as the limits allow, and posts the packet that `packet`
    /// builds from their rows.
    pub(super) fn grant(
        &self,
        lease: LeaseId,
        blocks: Vec<GrantableBlock>,
        packet: impl FnOnce(Vec<GrantDescriptor>, Option<GrantRefused>) -> Option<NodePacket>,
    ) -> GrantOutcome {
        let now = self.now();
        let mut state = self.lock_state();
        let (mut rows, mut refused) = (Vec::with_capacity(blocks.len()), None);
        for block in blocks {
            match self.grant_one(&mut state, lease, &block, now) {
                Ok(loan) => {
                    rows.push(GrantDescriptor {
                        grant: loan,
                        memory: block.place,
                        offset: block.at,
                        len: block.len,
                    });
                    state.guards.insert(loan, block.guard);
                }
                Err(why) => {
                    refused = Some(why);
                    break;
                }
            }
        }
        let count = rows.len();
        if let Some(packet) = packet(rows, refused) {
            self.post_in(&mut state, packet.encode());
        }
        GrantOutcome { rows: count, refused }
    }

    fn grant_one(
        &self,
        state: &mut GrantState,
        lease: LeaseId,
        block: &GrantableBlock,
        now: Timestamp,
    ) -> Result<GrantId, GrantRefused> {
        if block.is_copied() {
            // The bounce buffer bounds copies.
            return state.rules.grant_copy(lease, now);
        }
        let bytes = u64::from(block.len);
        if !self.budget.reserve(bytes) {
            return Err(GrantRefused::Bytes { limit: self.budget.granted_bytes_max });
        }
        let lent = state.rules.grant(lease, bytes, now);
        match lent {
            Ok(_) => {
                state.totals.grants += 1;
                state.totals.bytes += bytes;
            }
            Err(_) => self.budget.release(GrantTotals { grants: 1, bytes }),
        }
        lent
    }

    /// Releases returned grants from the node's budget.
    fn settle_budget(&self, state: &mut GrantState) {
        let (loans, bytes) = state.rules.granted();
        let back = GrantTotals { grants: state.totals.grants - loans, bytes: state.totals.bytes - bytes };
        state.totals = GrantTotals { grants: loans, bytes };
        self.budget.release(back);
    }

    /// The client returned these grants.
    ///
    /// # Errors
    /// If one of them does not exist.
    pub(super) fn return_grants(&self, loans: &[GrantId]) -> Result<(), kv_core::lease_grant::UnknownGrant> {
        let mut state = self.lock_state();
        let GrantState { rules: lender, effects, .. } = &mut *state;
        lender.return_grants(loans, effects)?;
        self.free_returned(state);
        Ok(())
    }

    /// Renews and expires leases.
    pub(super) fn tick(&self) {
        let mut state = self.lock_state();
        let GrantState { rules: lender, effects, .. } = &mut *state;
        lender.tick(self.now(), effects);
    }

    /// Stops granting and sends the last packet: copies that still run elsewhere send no answer.
    /// Existing grants stay.
    pub(super) fn close(&self, last: &NodePacket) {
        let mut state = self.lock_state();
        let GrantState { rules: lender, effects, .. } = &mut *state;
        lender.close(effects);
        self.post_in(&mut state, last.encode());
        state.is_closing = true;
    }

    /// The client is gone, so all its grants end.
    pub(super) fn end(&self) {
        let mut state = self.lock_state();
        let GrantState { rules: lender, effects, is_client_gone: is_over, .. } = &mut *state;
        *is_over = true;
        lender.end(effects);
        self.free_returned(state);
    }

    /// Pending effects on leases, in order. Bytes of ended grants were already freed.
    pub(super) fn take_effects(&self) -> Vec<GrantEffect> {
        let mut state = self.lock_state();
        let effects = std::mem::take(&mut state.effects);
        effects.into_iter().filter(|effect| !matches!(effect, GrantEffect::Free(_))).collect()
    }

    /// Frees the bytes of ended grants outside the lock, because the arena has its own.
    fn free_returned(&self, mut state: MutexGuard<'_, GrantState>) {
        self.settle_budget(&mut state);
        let GrantState { effects, guards: kept, .. } = &mut *state;
        let mut freed = Vec::new();
        effects.retain(|effect| match effect {
            GrantEffect::Free(loan) => {
                freed.extend(kept.remove(loan));
                false
            }
            GrantEffect::Release(_) | GrantEffect::Renew(_) => true,
        });
        let is_work = !effects.is_empty();
        drop(state);
        if freed.len() > INLINE_FREES_MAX {
            // Each takes the arena's lock, and this thread serves others.
            self.bulk.spawn(async move { drop(freed) });
        } else {
            drop(freed);
        }
        if is_work {
            self.work.notify_one();
        }
    }

    /// Sends a packet, now or as soon as the client reads again.
    pub(super) fn post(&self, packet: &NodePacket) {
        self.post_in(&mut self.lock_state(), packet.encode());
    }

    fn post_in(&self, state: &mut GrantState, packet: Vec<u8>) {
        if state.is_closing {
            return;
        }
        if state.queued.is_empty() && self.send(state, &packet) {
            return;
        }
        state.queued_since.get_or_insert_with(Instant::now);
        state.queued.push_back(packet);
        self.work.notify_one();
    }

    /// Sends queued packets as far as the client accepts them now; returns whether any are left.
    pub(super) fn flush(&self) -> bool {
        let mut state = self.lock_state();
        while let Some(packet) = state.queued.pop_front() {
            if !self.send(&mut state, &packet) {
                state.queued.push_front(packet);
                return true;
            }
            state.queued_since = (!state.queued.is_empty()).then(Instant::now);
        }
        drop(state);
        self.sent.notify_waiters();
        false
    }

    /// Whether a packet needs no further attempt: the client has it, or is gone.
    fn send(&self, state: &mut GrantState, packet: &[u8]) -> bool {
        match self.socket.get_ref().send(packet, &[]) {
            Ok(SendOutcome::Queued | SendOutcome::Closed) => true,
            Ok(SendOutcome::WouldBlock) => false,
            Err(error) => {
                // The client would wait for this packet forever, so the connection is useless.
                state.failed.get_or_insert(error);
                self.work.notify_one();
                true
            }
        }
    }

    /// Why a packet could not be sent.
    pub(super) fn take_failure(&self) -> Option<io::Error> {
        self.lock_state().failed.take()
    }

    /// Since when a packet is queued that the client does not take.
    pub(super) fn queued_since(&self) -> Option<Instant> {
        self.lock_state().queued_since
    }

    /// Whether the queue is too long for further packets of the client.
    pub(super) fn is_backlogged(&self) -> bool {
        self.lock_state().queued.len() >= QUEUED_PACKETS_MAX
    }

    /// Waits while the packet queue is too long.
    pub(super) async fn wait_backlog(&self) {
        loop {
            let sent = self.sent.notified();
            if !self.is_backlogged() {
                return;
            }
            sent.await;
        }
    }

    /// Waits until packets or effects are pending.
    pub(super) async fn wait_work(&self) {
        self.work.notified().await;
    }

    /// Number of grants, their bytes, and the oldest.
    pub(super) fn stats(&self) -> (usize, u64, Option<OldestGrant>) {
        let state = self.lock_state();
        let (loans, bytes) = state.rules.granted();
        let PeerProcess { uid, pid } = self.peer;
        let oldest = |since| OldestGrant { age: self.now().since(since), uid, pid };
        (loans, bytes, state.rules.oldest_since().map(oldest))
    }
}

impl Drop for ConnectionGrants {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.is_client_gone && !state.guards.is_empty() {
            // The runtime is gone, so the end of the client cannot be observed, and its memory is
            // never reused.
            tracing::debug!(
                loans = state.guards.len(),
                "bytes that a client of this host reads are never reused"
            );
            std::mem::forget(std::mem::take(&mut state.guards));
        }
    }
}

/// An operation in progress.
pub(super) struct OperationGuard {
    lending: Arc<ConnectionGrants>,
    lease: LeaseId,
}

impl Drop for OperationGuard {
    fn drop(&mut self) {
        let mut state = self.lending.lock_state();
        let GrantState { rules: lender, effects, .. } = &mut *state;
        lender.finish(self.lease, effects);
        if !effects.is_empty() {
            self.lending.work.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::shm::PACKET_BYTES_MAX;
    use crate::shm::mapping::memory_file;
    use crate::shm::packet::CloseReason;
    use crate::shm::seqpacket::RecvOutcome;
    use std::time::Duration;

    const PART: u64 = 1 << 16;

    fn grants() -> Arc<ConnectionGrants> {
        grants_and_client().0
    }

    fn grants_and_client() -> (Arc<ConnectionGrants>, Seqpacket) {
        let dir = tempfile::tempdir().unwrap();
        let listener = Seqpacket::listen(&dir.path().join("s")).unwrap();
        let client = Seqpacket::connect(&dir.path().join("s")).unwrap();
        let stock = GrantResources {
            bounce: Arc::new(Mapping::read_write(&memory_file(2 * PART).unwrap(), 2 * PART).unwrap()),
            bounce_out_offset: PART,
            bounce_out_bytes: PART,
            arena: None,
            budget: GrantBudget::new(PART),
            bulk: Handle::current(),
            peer: PeerProcess { uid: 0, pid: 0 },
            granted_bytes_max: PART,
            lease: Duration::from_secs(60),
            since: Instant::now(),
        };
        (ConnectionGrants::new(listener.accept().unwrap().unwrap(), stock).unwrap(), client)
    }

    #[tokio::test]
    async fn no_packet_follows_the_close() {
        let (lending, client) = grants_and_client();
        lending.post(&NodePacket::Taken { op: 1, frames: 1 });
        lending.close(&NodePacket::Closing(CloseReason::Protocol));
        lending.post(&NodePacket::Taken { op: 1, frames: 1 });
        let mut buffer = [0; PACKET_BYTES_MAX];
        let mut heard = || match client.recv(&mut buffer).unwrap() {
            RecvOutcome::Packet(len, _) => Some(NodePacket::decode(&buffer[..len]).unwrap()),
            RecvOutcome::Closed | RecvOutcome::WouldBlock => None,
        };
        assert_eq!(heard(), Some(NodePacket::Taken { op: 1, frames: 1 }));
        assert_eq!(heard(), Some(NodePacket::Closing(CloseReason::Protocol)));
        assert_eq!(heard(), None);
    }

    #[tokio::test]
    async fn a_pending_release_does_not_end_a_later_operation() {
        let (lending, lease) = (grants(), LeaseId(7));
        let first = lending.begin(lease).unwrap();
        lending.release(lease);
        assert_eq!(lending.take_effects(), [], "the lease is in use");
        drop(first);
        let second = lending.begin(lease).unwrap();
        assert_eq!(lending.take_effects(), []);
        lending.release(lease);
        drop(second);
        assert_eq!(lending.take_effects(), [GrantEffect::Release(lease)]);
    }
}
