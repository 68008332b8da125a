//! What a node offers over RDMA: its arena to those who may read all of it, and a tray to everybody.
//!
//! A connection has a protection domain of its own with its tray in it, so that no other connection's queue pairs reach
//! it. The arena is registered once on each rail, in a domain of its own, to be read and not written. When a connection ends, the board
//! says so first, then its queue pairs end, and only then is given back what they could reach. Not here: operations
//! (`lending.rs`, `taking.rs`), sockets (`tcp/server.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::id::{Epoch, LeaseId, LoanId, Timestamp};
use kv_core::lend::{Effect, LendLimits, LendRefused, Lender, Room};
use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;

use super::flights::Line;
use super::memory::{ALIGN_BYTES, Memory};
use super::pairs::RAILS_MAX;
use super::rail::{Access, Domain, End, RegisterMr, Role};
use super::shares::{Share, Shares};
use super::words::{self, Nonsense, PACKET_MAX, REVOKED, Window, outcome};
use super::{Rdma, RdmaError};
use crate::BlockService;
use crate::room::Carried;
use crate::serve::ServeError;

/// Loans of one connection at once: what a client may leave unread in its socket.
const LOANS_MAX: usize = 4096;

/// Leases in use at once by one connection.
const LEASES_MAX: usize = 256;

/// Bytes lent to one connection at once.
const LENT_BYTES_MAX: u64 = 512 << 20;

/// How long a tier book keeps a lease that nobody renews.
const LEASE: Duration = Duration::from_secs(10);

/// Warnings of refused links: enough to see what is wrong.
const SAID_MAX: u64 = 16;

/// What one connection may have lent, under leases that the book keeps so long.
fn limits(lease: Duration) -> LendLimits {
    LendLimits { lent_bytes_max: LENT_BYTES_MAX, loans_max: LOANS_MAX, leases_max: LEASES_MAX, lease }
}

/// A node's arena, registered on one rail.
struct Arena {
    memory: Arc<Memory>,
    domain: Arc<dyn Domain>,
    registered: Box<dyn RegisterMr>,
}

/// One rail, and what is reached over it.
struct OfferedRail {
    rdma: Arc<Rdma>,
    arena: Option<Arena>,
}

/// What a node offers over RDMA.
pub struct RdmaOffer {
    /// One at least; clients know them by their numbers.
    rails: Vec<OfferedRail>,
    shares: Arc<Shares>,
    /// See [`LEASE`].
    lease: Duration,
    /// The newest epoch that the node answered under.
    epoch: AtomicU64,
    trays: Mutex<Vec<Weak<Tray>>>,
    began: Instant,
    carried: Carried,
    /// Links that the device refused.
    refused: AtomicU64,
}

impl std::fmt::Debug for RdmaOffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaOffer({:?})", self.rails.iter().map(|rail| &rail.rdma).collect::<Vec<_>>())
    }
}

/// Memory of one connection. Behind the tray's bytes lies the board: one word that says under which epoch they are lent.
pub(super) struct Tray {
    pub(super) memory: Arc<Memory>,
    registered: Box<dyn RegisterMr>,
    /// Bytes without the board.
    pub(super) bytes: u64,
}

impl Tray {
    /// What the client reads behind the bytes it was told of. It never goes back: epochs grow, and nothing is above the end.
    fn show(&self, word: u64) {
        self.memory.raise_word(self.bytes, word);
    }
}

/// Bytes of a loan, as long as the client may read them.
pub(super) struct Kept {
    /// The arena's own, which it writes no other block over while somebody has them.
    pub(super) _bytes: Option<Bytes>,
    /// Where a copy begins in the tray.
    pub(super) tray_at: Option<u64>,
}

/// What one upgraded connection has of the node.
pub(crate) struct Attached {
    offer: Arc<RdmaOffer>,
    /// Its rail.
    rdma: Arc<Rdma>,
    lines: Vec<Arc<Line>>,
    pub(super) tray: Arc<Tray>,
    pub(super) arena: Option<Arc<Memory>>,
    pub(super) lender: Lender,
    pub(super) room: Room,
    pub(super) kept: BTreeMap<LoanId, Kept>,
    pub(super) frame_bytes_max: u32,
    share: Option<Share>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.tray.show(REVOKED);
        let rest = (std::mem::take(&mut self.kept), Arc::clone(&self.tray), self.share.take());
        let lines = std::mem::take(&mut self.lines);
        self.rdma.flights.end(lines, (rest, Arc::clone(&self.offer)));
    }
}

impl Attached {
    pub(super) fn now(&self) -> Timestamp {
        self.offer.now()
    }

    pub(super) fn carried(&self) -> &Carried {
        &self.offer.carried
    }

    /// How often leases in use are looked after: more often than they must be renewed.
    pub(super) fn tick_every(&self) -> Duration {
        self.offer.lease / 6
    }

    /// An operation begins that lends under this lease.
    pub(super) fn begin(&mut self, lease: LeaseId) -> Result<(), LendRefused> {
        let now = self.now();
        let mut forgotten = Vec::new();
        self.lender.tick(now, &mut forgotten);
        self.lender.begin(lease, now)
    }

    /// The node answered under this epoch: connections that lend under an older one hear of it.
    pub(super) fn answered(&self, epoch: Epoch) {
        self.offer.answered(epoch);
        self.tray.show(self.offer.epoch.load(Ordering::SeqCst));
    }

    /// Lets go of what the client gave back, and renews leases that are in use.
    pub(super) fn run(&mut self, effects: Vec<Effect>, service: &dyn BlockService) {
        for effect in effects {
            match effect {
                Effect::Free(loan) => {
                    let kept = self.kept.remove(&loan);
                    if let Some(at) = kept.and_then(|kept| kept.tray_at) {
                        self.room.give_back(at);
                    }
                }
                Effect::Renew(lease) => service.renew(lease),
                // Leases end by a word over any of a caller's connections, or by their time.
                Effect::Release(_) => {}
            }
        }
    }
}

impl RdmaOffer {
    /// Offers a device's memory to callers: `arena`, whose bytes the service lends by [`crate::FetchReply::lendable`], and
    /// trays. Registers the arena, which takes about a second for each 30 GiB.
    ///
    /// # Errors
    /// When the arena cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, arena: Option<&Arc<Memory>>) -> Result<Arc<RdmaOffer>, RdmaError> {
        RdmaOffer::over(std::slice::from_ref(rdma), arena)
    }

    /// The same over several rails, the best first. The arena is registered on each; those that refuse it are left out.
    ///
    /// # Errors
    /// When the arena cannot be registered on any.
    pub fn over(rails: &[Arc<Rdma>], arena: Option<&Arc<Memory>>) -> Result<Arc<RdmaOffer>, RdmaError> {
        let Some(first) = rails.first() else {
            return Err(RdmaError::NoDevice { there: "none".to_owned() });
        };
        let register = |rdma: &Arc<Rdma>, memory: &Arc<Memory>| {
            let (memory, domain) = (Arc::clone(memory), rdma.domain()?);
            let registered = rdma.register(domain.as_ref(), &memory, Access::Read)?;
            Ok(Arena { memory, domain, registered })
        };
        let offered = |rdma: &Arc<Rdma>| {
            let arena = arena.map(|memory| register(rdma, memory)).transpose()?;
            Ok(OfferedRail { rdma: Arc::clone(rdma), arena })
        };
        let links_max = first.config.links_max;
        Ok(Arc::new(RdmaOffer {
            rails: super::those_that_work(rails.iter().take(RAILS_MAX).map(offered))?,
            shares: Shares::new(links_max),
            lease: LEASE,
            epoch: AtomicU64::new(0),
            trays: Mutex::default(),
            began: Instant::now(),
            carried: Carried::default(),
            refused: AtomicU64::new(0),
        }))
    }

    /// What clients' cards moved so far: sent is what was lent to be read, received what was written into trays. What went over
    /// the connections themselves is their server's to count.
    #[must_use]
    pub fn carried(&self) -> Carried {
        self.carried.clone()
    }

    /// The same with leases that are short.
    #[cfg(test)]
    pub(super) fn leasing(self: Arc<RdmaOffer>, lease: Duration) -> Arc<RdmaOffer> {
        let mut offer = Arc::into_inner(self).expect("nobody else has it yet");
        offer.lease = lease;
        Arc::new(offer)
    }

    /// Says on every board that everything is taken back, and ends nothing.
    #[cfg(test)]
    pub(super) fn take_back(&self) {
        self.trays().iter().filter_map(Weak::upgrade).for_each(|tray| tray.show(REVOKED));
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn trays(&self) -> MutexGuard<'_, Vec<Weak<Tray>>> {
        self.trays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node is at this epoch: whatever was lent under an older one is not to be trusted, and its readers see so.
    pub fn answered(&self, epoch: Epoch) {
        if self.epoch.fetch_max(epoch.0, Ordering::SeqCst) < epoch.0 {
            self.trays().iter().filter_map(Weak::upgrade).for_each(|tray| tray.show(epoch.0));
        }
    }

    /// Queue pairs and a tray for a client, and what it is told of them; nothing when as many connections have some as may, or
    /// the device has no more.
    pub(crate) async fn attach(
        self: &Arc<RdmaOffer>,
        attach: data::Attach,
        (caller, maps): (&Arc<[u8]>, bool),
    ) -> Result<(Option<Attached>, data::Attached), ServeError> {
        if attach.version != words::VERSION {
            return Err(Nonsense::new("a version of attach", attach.version).into());
        }
        if attach.tray.is_none() && attach.arena.is_none() {
            let rails = self.rails.iter().map(|rail| words::end_to_pb(rail.rdma.flights.rail().port(), 0, 0));
            let (outcome, rails) = (outcome::OFFERED, rails.collect());
            return Ok((None, data::Attached { outcome, rails, ..data::Attached::default() }));
        }
        if attach.rail as usize >= self.rails.len() {
            return Err(Nonsense::new("the number of a rail", attach.rail).into());
        }
        let Some(share) = self.shares.take(caller) else {
            return Ok((None, data::Attached { outcome: outcome::BUSY, ..data::Attached::default() }));
        };
        let offer = Arc::clone(self);
        let packets: [u32; 2] = super::packets();
        let made = tokio::task::spawn_blocking(move || offer.make(&attach, maps, packets, share)).await;
        match made.map_err(|error| ServeError::Rdma(error.to_string()))? {
            Ok((attached, answer)) => Ok((Some(attached), answer)),
            Err(ServeError::Rdma(why)) => {
                // The node is short of something, which its operator should know; but a client can be the cause, without end.
                if self.refused.fetch_add(1, Ordering::Relaxed) < SAID_MAX {
                    tracing::warn!("a client gets no RDMA link: {why}");
                }
                let (outcome, why) = (outcome::REFUSED, format!("its device refuses: {why}"));
                Ok((None, data::Attached { outcome, why, ..data::Attached::default() }))
            }
            Err(other) => Err(other),
        }
    }

    /// The blocking part.
    fn make(
        self: &Arc<RdmaOffer>,
        attach: &data::Attach,
        maps: bool,
        packets: [u32; 2],
        share: Share,
    ) -> Result<(Attached, data::Attached), ServeError> {
        let refused = |error: RdmaError| ServeError::Rdma(error.to_string());
        let peer = |end: &Option<data::QueueEnd>| {
            words::end_from_pb(end.as_ref().ok_or(Nonsense::new("the number of queue pairs", 1_u32))?)
        };
        let (tray_peer, arena_peer) = (peer(&attach.tray)?, peer(&attach.arena)?);
        let OfferedRail { rdma, arena } = &self.rails[attach.rail as usize];
        let domain = rdma.domain().map_err(refused)?;
        let bytes = (rdma.config.tray_bytes as u64).next_multiple_of(ALIGN_BYTES);
        let all = usize::try_from(bytes + ALIGN_BYTES).unwrap_or(usize::MAX);
        let tray = rdma.allocate(domain.as_ref(), all, Access::ReadWrite).map_err(refused)?;
        let tray = Arc::new(Tray { memory: tray.0, registered: tray.1, bytes });
        tray.show(self.epoch.load(Ordering::SeqCst));
        let mut attached = Attached {
            offer: Arc::clone(self),
            rdma: Arc::clone(rdma),
            lines: Vec::new(),
            tray: Arc::clone(&tray),
            arena: None,
            lender: Lender::new(limits(self.lease)),
            room: Room::new(bytes, ALIGN_BYTES),
            kept: BTreeMap::new(),
            frame_bytes_max: attach.frame_bytes_max.min(u32::try_from(FRAME_BYTES_MAX).unwrap_or(u32::MAX)),
            share: Some(share),
        };
        let (line, tray_end) = join(rdma, domain.as_ref(), Access::ReadWrite, packets[0], &tray_peer)?;
        attached.lines.push(line);
        let window = Window { address: tray.memory.address(), bytes, key: tray.registered.remote_key() };
        let mut answer = data::Attached {
            outcome: outcome::ATTACHED,
            tray: Some(tray_end),
            tray_window: Some(words::window_to_pb(window)),
            board_address: tray.memory.address() + bytes,
            frame_bytes_max: attached.frame_bytes_max,
            ..data::Attached::default()
        };
        // To read the arena is to read every tenant's blocks.
        if let Some(arena) = arena.as_ref().filter(|_| maps) {
            let (line, end) = join(rdma, arena.domain.as_ref(), Access::Read, packets[1], &arena_peer)?;
            attached.lines.push(line);
            attached.arena = Some(Arc::clone(&arena.memory));
            let (address, bytes) = (arena.memory.address(), arena.memory.len_bytes());
            let window = Window { address, bytes, key: arena.registered.remote_key() };
            (answer.arena, answer.arena_window) = (Some(end), Some(words::window_to_pb(window)));
        }
        let mut trays = self.trays();
        trays.retain(|tray| tray.strong_count() > 0);
        trays.push(Arc::downgrade(&tray));
        drop(trays);
        // What was announced between, to those that were listed then.
        tray.show(self.epoch.load(Ordering::SeqCst));
        Ok((attached, answer))
    }
}

/// A queue pair that answers a client's.
fn join(
    rdma: &Rdma,
    domain: &dyn Domain,
    access: Access,
    packet: u32,
    peer: &End,
) -> Result<(Arc<Line>, data::QueueEnd), ServeError> {
    let failed = |cause: std::io::Error| {
        let device = rdma.device().to_owned();
        ServeError::Rdma(RdmaError::Device { device, what: "given a queue pair", cause }.to_string())
    };
    let packet = packet & PACKET_MAX;
    let queue = domain.queue(access).map_err(failed)?;
    queue.connect(Role::Answers, packet, peer).map_err(failed)?;
    let end = words::end_to_pb(rdma.flights.rail().port(), queue.number(), packet);
    // It begins nothing.
    Ok((rdma.flights.line(queue, &rdma.flights.peer()), end))
}
