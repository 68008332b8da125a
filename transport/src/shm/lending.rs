//! What one connection has of a node: loans with the bytes behind them, places of its tray, and packets that wait.
//!
//! One lock holds all of it, so that rows reach the client in the order in which they were lent. The rules are
//! `kv_core::lend`'s; here are the bytes that they speak of. Not here: reading packets (`connection.rs`) and
//! operations (`serving.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::id::{LeaseId, LoanId, Timestamp};
use kv_core::lend::{Descriptor, Effect, LendLimits, LendRefused, Lender, Place, Room};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::map::Mapping;
use super::packet::ToClient;
use super::seqpacket::{Peer, Sent, Seqpacket};
use super::{LEASES_MAX, LOANS_MAX, LOANS_OF_ALL_MAX, OldestLoan, PLACE_ALIGN};
use crate::SharedArena;

/// Loans that end at one go on the thread of the connection.
const FREED_HERE_MAX: usize = 1024;

/// Packets that wait for a slow reader before operations wait with them.
const POSTED_MAX: usize = 256;

/// What is lent over all connections of a node.
#[derive(Debug)]
pub(super) struct Account {
    lent: Mutex<Sum>,
    lent_bytes_max: u64,
}

/// Loans, and the bytes that they keep where they are.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    loans: usize,
    bytes: u64,
}

impl Account {
    pub(super) fn new(lent_bytes_max: u64) -> Arc<Account> {
        Arc::new(Account { lent: Mutex::default(), lent_bytes_max })
    }

    fn lent(&self) -> MutexGuard<'_, Sum> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As of one connection, what is alone passes.
    fn fits(&self, lent: Sum, planned: u64, bytes: u64) -> bool {
        let beside = lent.bytes.saturating_add(planned);
        let is_room = beside == 0 || beside.saturating_add(bytes) <= self.lent_bytes_max;
        is_room && lent.loans < LOANS_OF_ALL_MAX
    }

    /// Counts one more loan, if it fits.
    fn lend(&self, bytes: u64) -> bool {
        let mut lent = self.lent();
        let fits = self.fits(*lent, 0, bytes);
        if fits {
            lent.loans += 1;
            lent.bytes += bytes;
        }
        fits
    }

    fn take_back(&self, sum: Sum) {
        let mut lent = self.lent();
        lent.loans -= sum.loans;
        lent.bytes -= sum.bytes;
    }
}

/// Bytes that can be lent: where the client finds them, and what keeps them there.
pub(super) struct Lendable {
    place: Place,
    at: u64,
    len: u32,
    kept: Kept,
}

impl Lendable {
    /// Whether it took a place of the tray.
    pub(super) fn is_copied(&self) -> bool {
        self.place == Place::Tray
    }
}

/// What keeps bytes of a loan as they are.
enum Kept {
    /// The arena's slot comes back when nobody holds this.
    Slot { _bytes: Bytes },
    /// A place of the tray.
    Copy { _place: TrayPlace },
}

/// A place in the client's part of the tray, free again when dropped.
struct TrayPlace {
    lending: std::sync::Weak<Lending>,
    at: u64,
}

impl Drop for TrayPlace {
    fn drop(&mut self) {
        if let Some(lending) = self.lending.upgrade() {
            lending.rooms().give_back(self.at);
            lending.room.notify_waiters();
        }
    }
}

/// How far a packet of rows went.
#[derive(Debug)]
pub(super) struct Lent {
    /// Rows in it.
    pub(super) rows: usize,
    /// A limit that stands in the way of the rest.
    pub(super) refused: Option<LendRefused>,
}

/// One connection's side of the node.
pub(super) struct Lending {
    socket: AsyncFd<Seqpacket>,
    state: Mutex<State>,
    /// Places of the tray from which the client reads, in a lock of its own: they are freed while the other is held.
    rooms: Mutex<Room>,
    tray: Arc<Mapping>,
    /// Where the part from which the client reads begins in the tray.
    tray_out_at: u64,
    arena: Option<Arc<dyn SharedArena>>,
    account: Arc<Account>,
    /// Where what takes long is done.
    bulk: Handle,
    peer: Peer,
    since: Instant,
    /// A place of the tray came free.
    room: Notify,
    /// There are packets to be sent, or effects to be run.
    work: Notify,
    /// Fewer packets wait than before.
    sent: Notify,
}

struct State {
    lender: Lender,
    kept: BTreeMap<LoanId, Kept>,
    /// Its part of the node's account.
    lent: Sum,
    effects: Vec<Effect>,
    posted: VecDeque<Vec<u8>>,
    /// Since when the oldest packet waits.
    posted_since: Option<Instant>,
    /// Why nothing can be sent any more.
    failed: Option<io::Error>,
    /// The client was told that the connection closes: nothing is said after that.
    is_closing: bool,
    /// The client is gone: nothing that was lent is read any more.
    is_over: bool,
}

/// What a connection lends from.
pub(super) struct Stock {
    pub(super) tray: Arc<Mapping>,
    pub(super) tray_out_at: u64,
    pub(super) tray_out_bytes: u64,
    /// The arena, when the client has mapped it.
    pub(super) arena: Option<Arc<dyn SharedArena>>,
    pub(super) account: Arc<Account>,
    pub(super) lent_bytes_max: u64,
    pub(super) bulk: Handle,
    /// The client.
    pub(super) peer: Peer,
    pub(super) lease: std::time::Duration,
    /// When the node's time began.
    pub(super) since: Instant,
}

impl Lending {
    pub(super) fn new(socket: Seqpacket, stock: Stock) -> io::Result<Arc<Lending>> {
        let limits = LendLimits {
            lent_bytes_max: stock.lent_bytes_max,
            loans_max: LOANS_MAX,
            leases_max: LEASES_MAX,
            lease: stock.lease,
        };
        let state = State {
            lender: Lender::new(limits),
            kept: BTreeMap::new(),
            lent: Sum::default(),
            effects: Vec::new(),
            posted: VecDeque::new(),
            posted_since: None,
            failed: None,
            is_closing: false,
            is_over: false,
        };
        Ok(Arc::new(Lending {
            socket: socket.watched()?,
            state: Mutex::new(state),
            rooms: Mutex::new(Room::new(stock.tray_out_bytes, PLACE_ALIGN)),
            tray: stock.tray,
            tray_out_at: stock.tray_out_at,
            arena: stock.arena,
            account: stock.account,
            bulk: stock.bulk,
            peer: stock.peer,
            since: stock.since,
            room: Notify::new(),
            work: Notify::new(),
            sent: Notify::new(),
        }))
    }

    pub(super) fn socket(&self) -> &AsyncFd<Seqpacket> {
        &self.socket
    }

    pub(super) fn tray(&self) -> &Arc<Mapping> {
        &self.tray
    }

    /// Part of the tray that the client writes, in bytes.
    pub(super) fn tray_in_bytes(&self) -> u64 {
        self.tray_out_at
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rooms(&self) -> MutexGuard<'_, Room> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// An operation under this lease begins; it is over when the guard is dropped.
    ///
    /// # Errors
    /// When there are too many leases, or the connection is closing.
    pub(super) fn begin(self: &Arc<Self>, lease: LeaseId) -> Result<Begun, LendRefused> {
        let mut state = self.state();
        state.lender.begin(lease, self.now())?;
        // A release of before must not end what begins now.
        state.effects.retain(|effect| *effect != Effect::Release(lease));
        drop(state);
        Ok(Begun { lending: Arc::clone(self), lease })
    }

    /// The client ended a lease.
    pub(super) fn release(&self, lease: LeaseId) {
        let mut state = self.state();
        let State { lender, effects, .. } = &mut *state;
        lender.release(lease, effects);
    }

    /// Bytes of a block as they can be lent in place: when the client maps the arena, and as long as it may have so many
    /// more beside those that are `planned`.
    pub(super) fn in_place(&self, bytes: &Bytes, planned: u64) -> Option<Lendable> {
        let at = self.arena.as_ref()?.offset_of(bytes)?;
        let len = u32::try_from(bytes.len()).ok()?;
        let fits = self.state().lender.fits(planned, u64::from(len));
        if !fits || !self.account.fits(*self.account.lent(), planned, u64::from(len)) {
            return None;
        }
        let kept = Kept::Slot { _bytes: bytes.clone() };
        Some(Lendable { place: Place::Arena, at, len, kept })
    }

    /// A copy of bytes in the tray; nothing while there is no place for it. To be called where copying is no harm.
    pub(super) fn copied(self: &Arc<Self>, bytes: &Bytes) -> Option<Lendable> {
        let len = u32::try_from(bytes.len()).ok()?;
        let at = self.rooms().take(len)?;
        let place = TrayPlace { lending: Arc::downgrade(self), at };
        self.tray.write(self.tray_out_at + at, bytes)?;
        Some(Lendable { place: Place::Tray, at, len, kept: Kept::Copy { _place: place } })
    }

    /// Waits until a place of the tray came free. Made before the look at the tray that finds none, it misses nothing.
    pub(super) fn room(&self) -> tokio::sync::futures::Notified<'_> {
        self.room.notified()
    }

    /// Lends as many of these as may be and posts what `packet` makes of their rows.
    pub(super) fn lend(
        &self,
        lease: LeaseId,
        blocks: Vec<Lendable>,
        packet: impl FnOnce(Vec<Descriptor>, Option<LendRefused>) -> Option<ToClient>,
    ) -> Lent {
        let now = self.now();
        let mut state = self.state();
        let (mut rows, mut refused) = (Vec::with_capacity(blocks.len()), None);
        for block in blocks {
            match self.lend_one(&mut state, lease, &block, now) {
                Ok(loan) => {
                    rows.push(Descriptor { loan, place: block.place, at: block.at, len: block.len });
                    state.kept.insert(loan, block.kept);
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
        Lent { rows: count, refused }
    }

    fn lend_one(
        &self,
        state: &mut State,
        lease: LeaseId,
        block: &Lendable,
        now: Timestamp,
    ) -> Result<LoanId, LendRefused> {
        if block.is_copied() {
            // Bounded by the tray.
            return state.lender.lend_copy(lease, now);
        }
        let bytes = u64::from(block.len);
        if !self.account.lend(bytes) {
            return Err(LendRefused::Bytes { limit: self.account.lent_bytes_max });
        }
        let lent = state.lender.lend(lease, bytes, now);
        match lent {
            Ok(_) => {
                state.lent.loans += 1;
                state.lent.bytes += bytes;
            }
            Err(_) => self.account.take_back(Sum { loans: 1, bytes }),
        }
        lent
    }

    /// What came back goes off the node's account.
    fn settle(&self, state: &mut State) {
        let (loans, bytes) = state.lender.lent();
        let back = Sum { loans: state.lent.loans - loans, bytes: state.lent.bytes - bytes };
        state.lent = Sum { loans, bytes };
        self.account.take_back(back);
    }

    /// The client gave these back.
    ///
    /// # Errors
    /// When one of them is not out.
    pub(super) fn take_back(&self, loans: &[LoanId]) -> Result<(), kv_core::lend::UnknownLoan> {
        let mut state = self.state();
        let State { lender, effects, .. } = &mut *state;
        lender.take_back(loans, effects)?;
        self.free(state);
        Ok(())
    }

    /// Renews and forgets leases.
    pub(super) fn tick(&self) {
        let mut state = self.state();
        let State { lender, effects, .. } = &mut *state;
        lender.tick(self.now(), effects);
    }

    /// Nothing new is lent, and this is the last that the client hears: copies that go on elsewhere answer nobody. What is out stays out.
    pub(super) fn close(&self, last: &ToClient) {
        let mut state = self.state();
        let State { lender, effects, .. } = &mut *state;
        lender.close(effects);
        self.post_in(&mut state, last.encode());
        state.is_closing = true;
    }

    /// The client is gone, and with it all that it read.
    pub(super) fn end(&self) {
        let mut state = self.state();
        let State { lender, effects, is_over, .. } = &mut *state;
        *is_over = true;
        lender.end(effects);
        self.free(state);
    }

    /// Effects on leases that are to be run, in this order. Bytes of loans that ended are let go of at once.
    pub(super) fn take_effects(&self) -> Vec<Effect> {
        let mut state = self.state();
        let effects = std::mem::take(&mut state.effects);
        effects.into_iter().filter(|effect| !matches!(effect, Effect::Free(_))).collect()
    }

    /// Drops what is behind loans that ended, outside the lock: the arena has one of its own.
    fn free(&self, mut state: MutexGuard<'_, State>) {
        self.settle(&mut state);
        let State { effects, kept, .. } = &mut *state;
        let mut freed = Vec::new();
        effects.retain(|effect| match effect {
            Effect::Free(loan) => {
                freed.extend(kept.remove(loan));
                false
            }
            Effect::Release(_) | Effect::Renew(_) => true,
        });
        let is_work = !effects.is_empty();
        drop(state);
        if freed.len() > FREED_HERE_MAX {
            // Each is a step of the arena's lock, and this thread answers others.
            self.bulk.spawn(async move { drop(freed) });
        } else {
            drop(freed);
        }
        if is_work {
            self.work.notify_one();
        }
    }

    /// Sends a packet, now or as soon as the client reads again.
    pub(super) fn post(&self, packet: &ToClient) {
        self.post_in(&mut self.state(), packet.encode());
    }

    fn post_in(&self, state: &mut State, packet: Vec<u8>) {
        if state.is_closing {
            return;
        }
        if state.posted.is_empty() && self.send(state, &packet) {
            return;
        }
        state.posted_since.get_or_insert_with(Instant::now);
        state.posted.push_back(packet);
        self.work.notify_one();
    }

    /// Sends what waits, as far as the client takes it now; whether anything is left.
    pub(super) fn flush(&self) -> bool {
        let mut state = self.state();
        while let Some(packet) = state.posted.pop_front() {
            if !self.send(&mut state, &packet) {
                state.posted.push_front(packet);
                return true;
            }
            state.posted_since = (!state.posted.is_empty()).then(Instant::now);
        }
        drop(state);
        self.sent.notify_waiters();
        false
    }

    /// Whether a packet is off: the client has it, or is gone and needs none.
    fn send(&self, state: &mut State, packet: &[u8]) -> bool {
        match self.socket.get_ref().send(packet, &[]) {
            Ok(Sent::Queued | Sent::Ended) => true,
            Ok(Sent::Later) => false,
            Err(error) => {
                // The client will never hear it, and waits for it: the connection is of no more use.
                state.failed.get_or_insert(error);
                self.work.notify_one();
                true
            }
        }
    }

    /// Why a packet could not be sent.
    pub(super) fn take_failure(&self) -> Option<io::Error> {
        self.state().failed.take()
    }

    /// Since when a packet waits that the client does not take.
    pub(super) fn posted_since(&self) -> Option<Instant> {
        self.state().posted_since
    }

    /// Whether so many packets wait that the client is not to cause any more.
    pub(super) fn is_behind(&self) -> bool {
        self.state().posted.len() >= POSTED_MAX
    }

    /// Waits while too many packets wait for the client.
    pub(super) async fn may_post(&self) {
        loop {
            let sent = self.sent.notified();
            if !self.is_behind() {
                return;
            }
            sent.await;
        }
    }

    /// Waits until there is something to send or to run.
    pub(super) async fn work(&self) {
        self.work.notified().await;
    }

    /// Loans that are out, their bytes, and the oldest.
    pub(super) fn numbers(&self) -> (usize, u64, Option<OldestLoan>) {
        let state = self.state();
        let (loans, bytes) = state.lender.lent();
        let Peer { uid, pid } = self.peer;
        let oldest = |since| OldestLoan { age: self.now().since(since), uid, pid };
        (loans, bytes, state.lender.oldest().map(oldest))
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.is_over && !state.kept.is_empty() {
            // Nobody hears any more when the client ends (the runtime is gone), so its memory is never used again.
            tracing::debug!(loans = state.kept.len(), "what a client of this host reads stays as it is");
            std::mem::forget(std::mem::take(&mut state.kept));
        }
    }
}

/// An operation that is under way.
pub(super) struct Begun {
    lending: Arc<Lending>,
    lease: LeaseId,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut state = self.lending.state();
        let State { lender, effects, .. } = &mut *state;
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
    use crate::shm::map::memory_file;
    use crate::shm::packet::Closing;
    use crate::shm::seqpacket::Got;
    use std::time::Duration;

    const PART: u64 = 1 << 16;

    fn lending() -> Arc<Lending> {
        lending_and_client().0
    }

    fn lending_and_client() -> (Arc<Lending>, Seqpacket) {
        let dir = tempfile::tempdir().unwrap();
        let listener = Seqpacket::listen(&dir.path().join("s")).unwrap();
        let client = Seqpacket::connect(&dir.path().join("s")).unwrap();
        let stock = Stock {
            tray: Arc::new(Mapping::to_write(&memory_file(2 * PART).unwrap(), 2 * PART).unwrap()),
            tray_out_at: PART,
            tray_out_bytes: PART,
            arena: None,
            account: Account::new(PART),
            bulk: Handle::current(),
            peer: Peer { uid: 0, pid: 0 },
            lent_bytes_max: PART,
            lease: Duration::from_secs(60),
            since: Instant::now(),
        };
        (Lending::new(listener.accept().unwrap().unwrap(), stock).unwrap(), client)
    }

    #[tokio::test]
    async fn a_copy_that_ends_as_the_connection_closes_says_nothing() {
        let (lending, client) = lending_and_client();
        lending.post(&ToClient::Taken { op: 1, frames: 1 });
        lending.close(&ToClient::Closing(Closing::Protocol));
        lending.post(&ToClient::Taken { op: 1, frames: 1 });
        let mut buffer = [0; PACKET_BYTES_MAX];
        let mut heard = || match client.recv(&mut buffer).unwrap() {
            Got::Packet(len, _) => Some(ToClient::decode(&buffer[..len]).unwrap()),
            Got::Ended | Got::Later => None,
        };
        assert_eq!(heard(), Some(ToClient::Taken { op: 1, frames: 1 }));
        assert_eq!(heard(), Some(ToClient::Closing(Closing::Protocol)));
        assert_eq!(heard(), None);
    }

    #[tokio::test]
    async fn a_release_that_waits_ends_nothing_that_began_after_it() {
        let (lending, lease) = (lending(), LeaseId(7));
        let first = lending.begin(lease).unwrap();
        lending.release(lease);
        assert_eq!(lending.take_effects(), [], "it is in use");
        drop(first);
        let second = lending.begin(lease).unwrap();
        assert_eq!(lending.take_effects(), []);
        lending.release(lease);
        drop(second);
        assert_eq!(lending.take_effects(), [Effect::Release(lease)]);
    }
}
