//! Cards that copy memory of this process, with the rules of real ones: keys, domains, rights, and the end of a queue pair.
//! For tests only.
//!
//! Transfers can be held back, so that a test sees what happens while one is under way; what is held back touches memory only
//! when it goes on, as a slow card would. All calls whose order matters are written down.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use super::rail::{
    Access, Completion, Direction, Domain, End, Gid, Port, Queue, Rail, RegisterMr, Role, Transfer,
};

/// Status of a transfer that the other end does not allow.
const REMOTE_ACCESS: u32 = 10;
/// Status of what was under way behind a failure.
const FLUSHED: u32 = 5;

struct FakeQueue {
    domain: u32,
    access: Access,
    rail: Gid,
    peer: Option<(Role, u32, End)>,
    is_broken: bool,
}

struct FakeMemory {
    domain: u32,
    access: Access,
    memory: Arc<Memory>,
}

#[derive(Default)]
struct State {
    next: u32,
    queues: HashMap<u32, FakeQueue>,
    memories: HashMap<u32, FakeMemory>,
    ended: HashMap<[u8; 16], Vec<Completion>>,
    held: Option<Vec<(u32, Transfer)>>,
    hold_from: Option<usize>,
    kill_after: Vec<(u8, usize)>,
    queues_made: usize,
    fail_next: Option<u32>,
    refuse_register: Option<i32>,
    refuse_register_of: Option<(u8, i32)>,
    refuse_queue: Option<i32>,
    end_fails: bool,
    dead: BTreeSet<u8>,
    silent: BTreeSet<u8>,
    lost: Vec<(u32, Transfer)>,
    unended: BTreeSet<u32>,
    log: Vec<String>,
    transfers: Vec<Transfer>,
}

/// What cards are plugged into.
#[derive(Clone, Default)]
pub(super) struct Fabric(Arc<Mutex<State>>);

impl Fabric {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A card with this number.
    pub(super) fn rail(&self, number: u8) -> Arc<dyn Rail> {
        let port = Port {
            device: format!("fake{number}"),
            gid: Gid([number; 16]),
            lid: number.into(),
            mtu: 5,
            reads: 16,
        };
        Arc::new(FakeRail { fabric: self.clone(), port })
    }

    /// Transfers that are begun from now on go on only when they are let go.
    pub(super) fn hold(&self) {
        self.state().held.get_or_insert_default();
    }

    /// The same once so many were begun since the first of all.
    pub(super) fn hold_from(&self, transfers: usize) {
        self.state().hold_from = Some(transfers);
    }

    /// Lets go of what is held back. What belongs to a queue pair that ended since touches nothing.
    pub(super) fn let_go(&self) {
        let mut state = self.state();
        state.hold_from = None;
        for (queue, transfer) in state.held.take().unwrap_or_default() {
            state.run(queue, &transfer);
        }
    }

    /// Transfers that are held back.
    pub(super) fn held(&self) -> usize {
        self.state().held.as_ref().map_or(0, Vec::len)
    }

    /// The next transfer fails with this status.
    pub(super) fn fail_next(&self, status: u32) {
        self.state().fail_next = Some(status);
    }

    /// Nothing passes to or from this card any more.
    pub(super) fn kill(&self, number: u8) {
        self.state().dead.insert(number);
    }

    /// The same once so many transfers were begun since the first of all.
    pub(super) fn kill_after(&self, number: u8, transfers: usize) {
        self.state().kill_after.push((number, transfers));
    }

    /// It does again.
    pub(super) fn revive(&self, number: u8) {
        self.state().dead.remove(&number);
    }

    /// Nothing passes to or from this card any more, and cards go on trying: nobody hears of an end.
    pub(super) fn silence(&self, number: u8) {
        self.state().silent.insert(number);
    }

    /// Cards have tried for long enough: what was lost ends, and the silent card is dead.
    pub(super) fn give_up(&self, number: u8) {
        let mut state = self.state();
        state.silent.remove(&number);
        state.dead.insert(number);
        for (queue, transfer) in std::mem::take(&mut state.lost) {
            state.run(queue, &transfer);
        }
    }

    /// Queue pairs that live and on which something was lost, by number.
    pub(super) fn waiting(&self) -> BTreeSet<u32> {
        let state = self.state();
        let queues = state.lost.iter().map(|(queue, _)| *queue);
        queues.filter(|queue| state.queues.contains_key(queue)).collect()
    }

    /// Memory is no longer registered, with this error.
    pub(super) fn refuse_register(&self, errno: i32) {
        self.state().refuse_register = Some(errno);
    }

    /// The same of one card.
    pub(super) fn refuse_register_of(&self, number: u8, errno: i32) {
        self.state().refuse_register_of = Some((number, errno));
    }

    /// There are no queue pairs any more, with this error.
    pub(super) fn refuse_queue(&self, errno: i32) {
        self.state().refuse_queue = Some(errno);
    }

    /// Queue pairs do not end from now on.
    pub(super) fn refuse_end(&self) {
        self.state().end_fails = true;
    }

    /// Queue pairs whose end was refused, by number.
    pub(super) fn unended(&self) -> Vec<u32> {
        self.state().unended.iter().copied().collect()
    }

    /// Adds a line to what was written down.
    pub(super) fn note(&self, line: String) {
        self.state().log.push(line);
    }

    /// What was written down.
    pub(super) fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    /// Every transfer that was begun.
    pub(super) fn transfers(&self) -> Vec<Transfer> {
        self.state().transfers.clone()
    }

    /// Queue pairs that there ever were.
    pub(super) fn queues_made(&self) -> usize {
        self.state().queues_made
    }

    /// Queue pairs that live, by number.
    pub(super) fn queues(&self) -> Vec<u32> {
        let mut queues: Vec<u32> = self.state().queues.keys().copied().collect();
        queues.sort_unstable();
        queues
    }
}

impl State {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The memory behind a key, if a queue pair of this domain may touch it so.
    fn reach(
        &self,
        key: u32,
        domain: u32,
        needs: &[Access],
        address: u64,
        len: u32,
    ) -> Option<(Arc<Memory>, u64)> {
        let found = self.memories.get(&key)?;
        let at = address.checked_sub(found.memory.address())?;
        let is_inside = at.checked_add(len.into())? <= found.memory.len_bytes();
        (found.domain == domain && needs.contains(&found.access) && is_inside)
            .then(|| (Arc::clone(&found.memory), at))
    }

    /// Whether nobody hears what this queue pair sends.
    fn is_lost(&self, number: u32) -> bool {
        let Some(queue) = self.queues.get(&number) else { return false };
        let peer = queue.peer.as_ref().map(|(_, _, peer)| peer.gid.0[0]);
        self.silent.contains(&queue.rail.0[0]) || peer.is_some_and(|peer| self.silent.contains(&peer))
    }

    fn status(&self, number: u32, transfer: &Transfer) -> u32 {
        let Some(queue) = self.queues.get(&number) else { return FLUSHED };
        if queue.is_broken {
            return FLUSHED;
        }
        let Some((Role::Asks, packet, peer)) = &queue.peer else { return 2 };
        if self.dead.contains(&queue.rail.0[0]) || self.dead.contains(&peer.gid.0[0]) {
            return 12;
        }
        // Nobody answers for a queue pair that is gone, or that is joined to another.
        let Some(other) = self.queues.get(&peer.queue).filter(|other| other.rail == peer.gid) else {
            return 12;
        };
        let Some((_, expected, back)) = &other.peer else { return 12 };
        if back.queue != number || back.packet != *packet || *expected != peer.packet || other.is_broken {
            return 12;
        }
        let all = [Access::Local, Access::Read, Access::ReadWrite];
        let Some((ours, at)) =
            self.reach(transfer.local_key, queue.domain, &all, transfer.local_address, transfer.len)
        else {
            return 4;
        };
        let needs: &[Access] = match transfer.direction {
            Direction::Read => &[Access::Read, Access::ReadWrite],
            Direction::Write => &[Access::ReadWrite],
        };
        let theirs =
            self.reach(transfer.remote_key, other.domain, needs, transfer.remote_address, transfer.len);
        let Some((theirs, there)) = theirs.filter(|_| needs.contains(&other.access)) else {
            return REMOTE_ACCESS;
        };
        let mut bytes = vec![0; transfer.len as usize];
        match transfer.direction {
            Direction::Read => {
                theirs.copy(there, &mut bytes);
                ours.write(at, &bytes);
            }
            Direction::Write => {
                ours.copy(at, &mut bytes);
                theirs.write(there, &bytes);
            }
        }
        0
    }

    fn run(&mut self, number: u32, transfer: &Transfer) {
        let status = match self.fail_next.take() {
            Some(status) => status,
            None => self.status(number, transfer),
        };
        // A card says nothing of a queue pair that ended.
        let Some(queue) = self.queues.get_mut(&number) else { return };
        queue.is_broken |= status != 0;
        self.ended.entry(queue.rail.0).or_default().push(Completion { id: transfer.id, status });
    }
}

struct FakeRail {
    fabric: Fabric,
    port: Port,
}

impl Rail for FakeRail {
    fn port(&self) -> &Port {
        &self.port
    }

    fn domain(&self) -> io::Result<Arc<dyn Domain>> {
        let number = self.fabric.state().number();
        Ok(Arc::new(FakeDomain { fabric: self.fabric.clone(), rail: self.port.gid, number }))
    }

    fn poll(&self, ended: &mut Vec<Completion>) -> io::Result<()> {
        ended.append(self.fabric.state().ended.entry(self.port.gid.0).or_default());
        Ok(())
    }
}

struct FakeDomain {
    fabric: Fabric,
    rail: Gid,
    number: u32,
}

impl Domain for FakeDomain {
    fn register(&self, memory: &Arc<Memory>, access: Access) -> io::Result<Box<dyn RegisterMr>> {
        let mut state = self.fabric.state();
        let own = state.refuse_register_of.filter(|(number, _)| *number == self.rail.0[0]);
        if let Some(errno) = state.refuse_register.or(own.map(|(_, errno)| errno)) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let key = state.number();
        state.log.push(format!("register {} bytes", memory.len_bytes()));
        let memory = Arc::clone(memory);
        state.memories.insert(key, FakeMemory { domain: self.number, access, memory });
        Ok(Box::new(FakeMr { fabric: self.fabric.clone(), key }))
    }

    fn queue(&self, access: Access) -> io::Result<Box<dyn Queue>> {
        let mut state = self.fabric.state();
        if let Some(errno) = state.refuse_queue {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let number = state.number();
        let queue = FakeQueue { domain: self.number, access, rail: self.rail, peer: None, is_broken: false };
        state.queues_made += 1;
        state.queues.insert(number, queue);
        Ok(Box::new(Handle { fabric: self.fabric.clone(), number }))
    }
}

struct FakeMr {
    fabric: Fabric,
    key: u32,
}

impl RegisterMr for FakeMr {
    fn local_key(&self) -> u32 {
        self.key
    }

    fn remote_key(&self) -> u32 {
        self.key
    }
}

impl Drop for FakeMr {
    fn drop(&mut self) {
        let mut state = self.fabric.state();
        let gone = state.memories.remove(&self.key);
        state
            .log
            .push(format!("deregister {} bytes", gone.as_ref().map_or(0, |gone| gone.memory.len_bytes())));
        drop(state);
    }
}

struct Handle {
    fabric: Fabric,
    number: u32,
}

impl Queue for Handle {
    fn number(&self) -> u32 {
        self.number
    }

    fn connect(&self, role: Role, packet: u32, peer: &End) -> io::Result<()> {
        let mut state = self.fabric.state();
        let queue = state.queues.get_mut(&self.number).ok_or(io::ErrorKind::NotConnected)?;
        queue.peer = Some((role, packet, *peer));
        Ok(())
    }

    fn post(&self, transfer: &Transfer) -> io::Result<()> {
        let mut state = self.fabric.state();
        if !state.queues.contains_key(&self.number) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let begun = state.transfers.len();
        state.transfers.push(*transfer);
        let dying = state.kill_after.extract_if(.., |(_, after)| *after <= begun).collect::<Vec<_>>();
        state.dead.extend(dying.into_iter().map(|(number, _)| number));
        if state.hold_from.is_some_and(|from| from <= begun) {
            state.held.get_or_insert_default();
        }
        if state.is_lost(self.number) {
            state.lost.push((self.number, *transfer));
            return Ok(());
        }
        match &mut state.held {
            Some(held) => held.push((self.number, *transfer)),
            None => state.run(self.number, transfer),
        }
        Ok(())
    }

    fn end(&self) -> io::Result<()> {
        let mut state = self.fabric.state();
        if state.end_fails && state.queues.contains_key(&self.number) {
            state.unended.insert(self.number);
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        if let Some(queue) = state.queues.remove(&self.number) {
            state.log.push(format!("end queue of fake{}", queue.rail.0[0]));
        }
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.end(); // as asked of the fabric
    }
}
