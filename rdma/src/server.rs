//! The node's RDMA server: its arena for clients that may read all of it, and a bounce buffer for
//! every client.
//!
//! Each connection has its own protection domain with its bounce buffer, so that queue pairs of
//! other connections cannot reach it. The arena is registered read-only, once on each rail, in its
//! own domain. When a connection ends, its epoch word is set to `REVOKED` first, then its queue
//! pairs are destroyed, and only then is the memory released that they could reach. Not here:
//! operations (`fetch_server.rs`, `save_server.rs`), sockets (`kvfleet-transport`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::id::{Epoch, GrantId, LeaseId, Timestamp};
use kv_core::lease_grant::{
    GrantEffect, GrantLimits, GrantRefused, GrantServer, SlotAllocator, UnknownGrant,
};
use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use kvfleet_transport::upgrade::{
    ServeError, UpgradeOffer, UpgradeReply, UpgradeRequest, UpgradedConnection,
};
use kvfleet_transport::{BlockService, BoxFuture, TrafficCounters};

use super::link_quota::{LinkQuota, LinkSlot};
use super::memory::{ALIGN_BYTES, RdmaMemory};
use super::messages::{self, MalformedMessage, REVOKED, RemoteWindow, U24_MAX, outcome};
use super::rail::{Access, MemoryRegion, ProtectionDomain, QueuePairAddress, Role};
use super::rail_match::RAILS_MAX;
use super::transfers::QpHandle;
use super::{Rdma, RdmaError};

/// Maximum grants of one connection: as many as a client may leave unread in its socket.
const GRANTS_MAX: usize = 4096;

/// Maximum leases in use by one connection.
const LEASES_MAX: usize = 256;

/// Maximum bytes granted to one connection at once.
const GRANTED_BYTES_MAX: u64 = 512 << 20;

/// How long a tier book keeps a lease that is not renewed.
const LEASE: Duration = Duration::from_secs(10);

/// Maximum warnings about refused links.
const REFUSAL_WARNINGS_MAX: u64 = 16;

/// Limits of one connection's grants; leases last for `lease`.
fn limits(lease: Duration) -> GrantLimits {
    GrantLimits {
        granted_bytes_max: GRANTED_BYTES_MAX,
        grants_max: GRANTS_MAX,
        leases_max: LEASES_MAX,
        lease,
    }
}

/// Why a link could not be made, or violated the protocol. For logs only.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("peer violated the rules of shared leases: {0}")]
    Lease(#[from] UnknownGrant),
    #[error("peer sent a malformed request: {0}")]
    Malformed(#[from] MalformedMessage),
    #[error("RDMA could not be set up: {0}")]
    Device(String),
}

impl From<LinkError> for ServeError {
    fn from(error: LinkError) -> ServeError {
        ServeError::Upgrade(Box::new(error))
    }
}

/// A node's arena, registered on one rail.
struct RegisteredArena {
    memory: Arc<RdmaMemory>,
    domain: Arc<dyn ProtectionDomain>,
    registered: Box<dyn MemoryRegion>,
}

/// One rail, and the arena registered on it.
struct ServerRail {
    rdma: Arc<Rdma>,
    arena: Option<RegisteredArena>,
}

/// A node's RDMA server.
pub struct RdmaServer {
    /// At least one; clients address them by index.
    rails: Vec<ServerRail>,
    link_quota: Arc<LinkQuota>,
    /// See [`LEASE`].
    lease: Duration,
    /// The newest epoch of the node.
    epoch: AtomicU64,
    bounce_buffers: Mutex<Vec<Weak<BounceBuffer>>>,
    started: Instant,
    carried: TrafficCounters,
    /// Links that the device refused.
    refused: AtomicU64,
}

impl std::fmt::Debug for RdmaServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaOffer({:?})", self.rails.iter().map(|rail| &rail.rdma).collect::<Vec<_>>())
    }
}

/// Memory of one connection. The epoch word lies behind the buffer's bytes; it holds the epoch of
/// their grants.
pub(super) struct BounceBuffer {
    pub(super) memory: Arc<RdmaMemory>,
    registered: Box<dyn MemoryRegion>,
    /// Length without the epoch word.
    pub(super) bytes: u64,
}

impl BounceBuffer {
    /// Raises the epoch word, which the client reads. It never decreases: epochs grow, and
    /// `REVOKED` is the maximum.
    fn raise_epoch_word(&self, word: u64) {
        self.memory.store_max(self.bytes, word);
    }
}

/// Keeps the bytes of a grant as long as the client may read them.
pub(super) struct GrantedBytes {
    /// Bytes of the arena, which are not overwritten while a reference exists.
    pub(super) _bytes: Option<Bytes>,
    /// Offset of a copy in the bounce buffer.
    pub(super) bounce_offset: Option<u64>,
}

/// The node's end of one upgraded connection.
pub(super) struct ServerLink {
    server: Arc<RdmaServer>,
    /// Its rail.
    rdma: Arc<Rdma>,
    queue_pairs: Vec<Arc<QpHandle>>,
    pub(super) bounce: Arc<BounceBuffer>,
    pub(super) arena: Option<Arc<RdmaMemory>>,
    pub(super) grants: GrantServer,
    pub(super) free_space: SlotAllocator,
    pub(super) granted: BTreeMap<GrantId, GrantedBytes>,
    pub(super) frame_bytes_max: u32,
    slot: Option<LinkSlot>,
}

impl Drop for ServerLink {
    fn drop(&mut self) {
        self.bounce.raise_epoch_word(REVOKED);
        let rest = (std::mem::take(&mut self.granted), Arc::clone(&self.bounce), self.slot.take());
        let lines = std::mem::take(&mut self.queue_pairs);
        self.rdma.transfers.tear_down(lines, (rest, Arc::clone(&self.server)));
    }
}

impl ServerLink {
    pub(super) fn now(&self) -> Timestamp {
        self.server.now()
    }

    pub(super) fn carried(&self) -> &TrafficCounters {
        &self.server.carried
    }

    /// Interval between renewals of leases in use, well below the lease time.
    pub(super) fn renew_interval(&self) -> Duration {
        self.server.lease / 6
    }

    /// Starts an operation that grants under this lease.
    pub(super) fn begin(&mut self, lease: LeaseId) -> Result<(), GrantRefused> {
        let now = self.now();
        let mut forgotten = Vec::new();
        self.grants.tick(now, &mut forgotten);
        self.grants.begin(lease, now)
    }

    /// Records the epoch of an answer; connections with grants of an older epoch are notified.
    pub(super) fn observe_epoch(&self, epoch: Epoch) {
        self.server.set_epoch(epoch);
        self.bounce.raise_epoch_word(self.server.epoch.load(Ordering::SeqCst));
    }

    /// Releases returned grants, and renews leases in use.
    pub(super) fn apply(&mut self, effects: Vec<GrantEffect>, service: &dyn BlockService) {
        for effect in effects {
            match effect {
                GrantEffect::Free(loan) => {
                    let kept = self.granted.remove(&loan);
                    if let Some(at) = kept.and_then(|kept| kept.bounce_offset) {
                        self.free_space.free(at);
                    }
                }
                GrantEffect::Renew(lease) => service.renew(lease),
                // A message over any of the caller's connections ends a lease, or its time does.
                GrantEffect::Release(_) => {}
            }
        }
    }
}

impl RdmaServer {
    /// Serves a device's memory to callers: `arena`, with bytes that the service grants by
    /// [`kvfleet_transport::FetchReply::lendable`], and bounce buffers. Registers the arena, which takes about
    /// a second for each 30 GiB.
    ///
    /// # Errors
    /// If the arena cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, arena: Option<&Arc<RdmaMemory>>) -> Result<Arc<RdmaServer>, RdmaError> {
        RdmaServer::with_rails(std::slice::from_ref(rdma), arena)
    }

    /// Like `new` over several rails, the best first. The arena is registered on each; rails that
    /// refuse it are skipped.
    ///
    /// # Errors
    /// If the arena cannot be registered on any rail.
    pub fn with_rails(
        rails: &[Arc<Rdma>],
        arena: Option<&Arc<RdmaMemory>>,
    ) -> Result<Arc<RdmaServer>, RdmaError> {
        let Some(first) = rails.first() else {
            return Err(RdmaError::NoDevice { there: "none".to_owned() });
        };
        let register = |rdma: &Arc<Rdma>, memory: &Arc<RdmaMemory>| {
            let (memory, domain) = (Arc::clone(memory), rdma.domain()?);
            let registered = rdma.register(domain.as_ref(), &memory, Access::Read)?;
            Ok(RegisteredArena { memory, domain, registered })
        };
        let offered = |rdma: &Arc<Rdma>| {
            let arena = arena.map(|memory| register(rdma, memory)).transpose()?;
            Ok(ServerRail { rdma: Arc::clone(rdma), arena })
        };
        let links_max = first.config.links_max;
        Ok(Arc::new(RdmaServer {
            rails: super::keep_usable(rails.iter().take(RAILS_MAX).map(offered))?,
            link_quota: LinkQuota::new(links_max),
            lease: LEASE,
            epoch: AtomicU64::new(0),
            bounce_buffers: Mutex::default(),
            started: Instant::now(),
            carried: TrafficCounters::default(),
            refused: AtomicU64::new(0),
        }))
    }

    /// Bytes moved by clients' cards so far: sent counts granted bytes, received counts bytes
    /// written into bounce buffers. The TCP server counts bytes that used the connections
    /// themselves.
    #[must_use]
    pub fn carried(&self) -> TrafficCounters {
        self.carried.clone()
    }

    /// Changes the lease time.
    #[cfg(test)]
    pub(super) fn with_lease(self: Arc<RdmaServer>, lease: Duration) -> Arc<RdmaServer> {
        let mut offer = Arc::into_inner(self).expect("the server must not be shared yet");
        offer.lease = lease;
        Arc::new(offer)
    }

    /// Sets every epoch word to `REVOKED` without ending a connection.
    #[cfg(test)]
    pub(super) fn revoke_all(&self) {
        self.lock_bounce_buffers()
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|tray| tray.raise_epoch_word(REVOKED));
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn lock_bounce_buffers(&self) -> MutexGuard<'_, Vec<Weak<BounceBuffer>>> {
        self.bounce_buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the node's epoch: grants of an older epoch become invalid, and their readers see that.
    pub fn set_epoch(&self, epoch: Epoch) {
        if self.epoch.fetch_max(epoch.0, Ordering::SeqCst) < epoch.0 {
            self.lock_bounce_buffers()
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(|tray| tray.raise_epoch_word(epoch.0));
        }
    }

    /// Creates queue pairs and a bounce buffer for a client, with the reply that describes them.
    /// `None` if the connection limit is reached or the device refuses.
    pub(super) async fn attach_link(
        self: &Arc<RdmaServer>,
        request: UpgradeRequest<'_>,
    ) -> Result<(Option<ServerLink>, data::AttachReply), LinkError> {
        let UpgradeRequest { attach, caller, may_map } = request;
        if attach.version != messages::VERSION {
            return Err(MalformedMessage::new("a version of attach", attach.version).into());
        }
        if attach.bounce_buffer.is_none() && attach.arena.is_none() {
            let rails = self
                .rails
                .iter()
                .map(|rail| messages::address_to_pb(rail.rdma.transfers.rail().port(), 0, 0));
            let (outcome, rails) = (outcome::OFFERED, rails.collect());
            return Ok((None, data::AttachReply { outcome, rails, ..data::AttachReply::default() }));
        }
        if attach.rail as usize >= self.rails.len() {
            return Err(MalformedMessage::new("the number of a rail", attach.rail).into());
        }
        let Some(share) = self.link_quota.acquire(caller) else {
            return Ok((None, data::AttachReply { outcome: outcome::BUSY, ..data::AttachReply::default() }));
        };
        let offer = Arc::clone(self);
        let packets: [u32; 2] = super::random_psns();
        let made =
            tokio::task::spawn_blocking(move || offer.attach_blocking(&attach, may_map, packets, share))
                .await;
        match made.map_err(|error| LinkError::Device(error.to_string()))? {
            Ok((attached, answer)) => Ok((Some(attached), answer)),
            Err(LinkError::Device(why)) => {
                // The node lacks a resource, which its operator should know. A client can cause
                // this endlessly, so warnings are limited.
                if self.refused.fetch_add(1, Ordering::Relaxed) < REFUSAL_WARNINGS_MAX {
                    tracing::warn!("an RDMA link was refused: {why}");
                }
                let (outcome, why) = (outcome::REFUSED, format!("its device refuses: {why}"));
                Ok((None, data::AttachReply { outcome, why, ..data::AttachReply::default() }))
            }
            Err(other) => Err(other),
        }
    }

    /// The blocking part of `attach_link`.
    fn attach_blocking(
        self: &Arc<RdmaServer>,
        attach: &data::Attach,
        may_read_arena: bool,
        packets: [u32; 2],
        share: LinkSlot,
    ) -> Result<(ServerLink, data::AttachReply), LinkError> {
        let refused = |error: RdmaError| LinkError::Device(error.to_string());
        let peer = |end: &Option<data::QueuePairInfo>| {
            messages::address_from_pb(
                end.as_ref().ok_or(MalformedMessage::new("the number of queue pairs", 1_u32))?,
            )
        };
        let (tray_peer, arena_peer) = (peer(&attach.bounce_buffer)?, peer(&attach.arena)?);
        let ServerRail { rdma, arena } = &self.rails[attach.rail as usize];
        let domain = rdma.domain().map_err(refused)?;
        let bytes = (rdma.config.bounce_buffer_bytes as u64).next_multiple_of(ALIGN_BYTES);
        let all = usize::try_from(bytes + ALIGN_BYTES).unwrap_or(usize::MAX);
        let tray = rdma.allocate_registered(domain.as_ref(), all, Access::ReadWrite).map_err(refused)?;
        let tray = Arc::new(BounceBuffer { memory: tray.0, registered: tray.1, bytes });
        tray.raise_epoch_word(self.epoch.load(Ordering::SeqCst));
        let mut attached = ServerLink {
            server: Arc::clone(self),
            rdma: Arc::clone(rdma),
            queue_pairs: Vec::new(),
            bounce: Arc::clone(&tray),
            arena: None,
            grants: GrantServer::new(limits(self.lease)),
            free_space: SlotAllocator::new(bytes, ALIGN_BYTES),
            granted: BTreeMap::new(),
            frame_bytes_max: attach.frame_bytes_max.min(u32::try_from(FRAME_BYTES_MAX).unwrap_or(u32::MAX)),
            slot: Some(share),
        };
        let (line, tray_end) =
            create_queue_pair(rdma, domain.as_ref(), Access::ReadWrite, packets[0], &tray_peer)?;
        attached.queue_pairs.push(line);
        let window =
            RemoteWindow { address: tray.memory.address(), bytes, key: tray.registered.remote_key() };
        let mut answer = data::AttachReply {
            outcome: outcome::ATTACHED,
            bounce_buffer: Some(tray_end),
            bounce_window: Some(messages::window_to_pb(window)),
            epoch_word_address: tray.memory.address() + bytes,
            frame_bytes_max: attached.frame_bytes_max,
            ..data::AttachReply::default()
        };
        // A client that reads the arena can read every tenant's blocks.
        if let Some(arena) = arena.as_ref().filter(|_| may_read_arena) {
            let (line, end) =
                create_queue_pair(rdma, arena.domain.as_ref(), Access::Read, packets[1], &arena_peer)?;
            attached.queue_pairs.push(line);
            attached.arena = Some(Arc::clone(&arena.memory));
            let (address, bytes) = (arena.memory.address(), arena.memory.len_bytes());
            let window = RemoteWindow { address, bytes, key: arena.registered.remote_key() };
            (answer.arena, answer.arena_window) = (Some(end), Some(messages::window_to_pb(window)));
        }
        let mut trays = self.lock_bounce_buffers();
        trays.retain(|tray| tray.strong_count() > 0);
        trays.push(Arc::downgrade(&tray));
        drop(trays);
        // An epoch announced meanwhile reached only the connections listed then.
        tray.raise_epoch_word(self.epoch.load(Ordering::SeqCst));
        Ok((attached, answer))
    }
}

impl UpgradeOffer for RdmaServer {
    fn attach<'a>(
        self: Arc<Self>,
        request: UpgradeRequest<'a>,
    ) -> BoxFuture<'a, Result<UpgradeReply, ServeError>> {
        Box::pin(async move {
            let (link, message) = self.attach_link(request).await?;
            let connection = link.map(|link| Box::new(link) as Box<dyn UpgradedConnection>);
            Ok(UpgradeReply { connection, message })
        })
    }
}

/// Creates a queue pair that answers a client's.
fn create_queue_pair(
    rdma: &Rdma,
    domain: &dyn ProtectionDomain,
    access: Access,
    packet: u32,
    peer: &QueuePairAddress,
) -> Result<(Arc<QpHandle>, data::QueuePairInfo), LinkError> {
    let failed = |cause: std::io::Error| {
        let device = rdma.device().to_owned();
        LinkError::Device(RdmaError::Device { device, what: "given a queue pair", cause }.to_string())
    };
    let packet = packet & U24_MAX;
    let queue = domain.create_queue_pair(access).map_err(failed)?;
    queue.connect(Role::Responder, packet, peer).map_err(failed)?;
    let end = messages::address_to_pb(rdma.transfers.rail().port(), queue.number(), packet);
    // It starts no transfers.
    Ok((rdma.transfers.register_queue_pair(queue, &rdma.transfers.peer_limit()), end))
}
