//! Fake cards that copy memory of this process, with the rules of real ones: keys, domains, access
//! rights, and the end of a queue pair. For tests only.
//!
//! Transfers can be held back, so that a test observes the state during a transfer. A held transfer
//! touches memory only when it is released, like that of a slow card. Calls with a significant
//! order are logged.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::RdmaMemory;
use super::rail::{
    Access, Completion, Direction, Gid, MemoryRegion, ProtectionDomain, QueuePair, QueuePairAddress, Rail,
    RailPort, Role, Transfer,
};

/// Status of a transfer that the other end does not allow.
const STATUS_REMOTE_ACCESS: u32 = 10;
/// Status of transfers behind a failed one.
const STATUS_FLUSHED: u32 = 5;

struct FakeQueue {
    domain: u32,
    access: Access,
    rail: Gid,
    peer: Option<(Role, u32, QueuePairAddress)>,
    is_broken: bool,
}

struct FakeMemory {
    domain: u32,
    access: Access,
    memory: Arc<RdmaMemory>,
}

#[derive(Default)]
struct FabricState {
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
    is_destroy_refused: bool,
    dead: BTreeSet<u8>,
    silent: BTreeSet<u8>,
    lost: Vec<(u32, Transfer)>,
    undestroyed: BTreeSet<u32>,
    log: Vec<String>,
    transfers: Vec<Transfer>,
}

/// The network that connects the fake cards.
#[derive(Clone, Default)]
pub(super) struct Fabric(Arc<Mutex<FabricState>>);

impl Fabric {
    fn state(&self) -> MutexGuard<'_, FabricState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A card with this number.
    pub(super) fn rail(&self, number: u8) -> Arc<dyn Rail> {
        let port = RailPort {
            device: format!("fake{number}"),
            gid: Gid([number; 16]),
            lid: number.into(),
            mtu: 5,
            max_reads: 16,
        };
        Arc::new(FakeRail { fabric: self.clone(), port })
    }

    /// Holds back every transfer from now on until [`Fabric::release`].
    pub(super) fn hold(&self) {
        self.state().held.get_or_insert_default();
    }

    /// Holds back transfers once this number was started in total.
    pub(super) fn hold_from(&self, transfers: usize) {
        self.state().hold_from = Some(transfers);
    }

    /// Executes the held transfers. Those of queue pairs that ended meanwhile touch no memory.
    pub(super) fn release(&self) {
        let mut state = self.state();
        state.hold_from = None;
        for (queue, transfer) in state.held.take().unwrap_or_default() {
            state.execute(queue, &transfer);
        }
    }

    /// Number of held transfers.
    pub(super) fn held(&self) -> usize {
        self.state().held.as_ref().map_or(0, Vec::len)
    }

    /// The next transfer fails with this status.
    pub(super) fn fail_next(&self, status: u32) {
        self.state().fail_next = Some(status);
    }

    /// No packet passes to or from this card any more.
    pub(super) fn kill(&self, number: u8) {
        self.state().dead.insert(number);
    }

    /// Kills the card once this number of transfers was started in total.
    pub(super) fn kill_after(&self, number: u8, transfers: usize) {
        self.state().kill_after.push((number, transfers));
    }

    /// Lets packets pass again.
    pub(super) fn revive(&self, number: u8) {
        self.state().dead.remove(&number);
    }

    /// No packet passes to or from this card any more, and cards keep retrying, so that no
    /// completion comes.
    pub(super) fn silence(&self, number: u8) {
        self.state().silent.insert(number);
    }

    /// Retries run out: lost transfers complete, and the silent card is dead.
    pub(super) fn time_out(&self, number: u8) {
        let mut state = self.state();
        state.silent.remove(&number);
        state.dead.insert(number);
        for (queue, transfer) in std::mem::take(&mut state.lost) {
            state.execute(queue, &transfer);
        }
    }

    /// Numbers of live queue pairs with lost transfers.
    pub(super) fn stalled_queues(&self) -> BTreeSet<u32> {
        let state = self.state();
        let queues = state.lost.iter().map(|(queue, _)| *queue);
        queues.filter(|queue| state.queues.contains_key(queue)).collect()
    }

    /// Refuses registrations with this error from now on.
    pub(super) fn refuse_register(&self, errno: i32) {
        self.state().refuse_register = Some(errno);
    }

    /// The same for one card.
    pub(super) fn refuse_register_of(&self, number: u8, errno: i32) {
        self.state().refuse_register_of = Some((number, errno));
    }

    /// Refuses new queue pairs with this error from now on.
    pub(super) fn refuse_queue(&self, errno: i32) {
        self.state().refuse_queue = Some(errno);
    }

    /// Refuses to destroy queue pairs from now on.
    pub(super) fn refuse_destroy(&self) {
        self.state().is_destroy_refused = true;
    }

    /// Numbers of the queue pairs that could not be destroyed.
    pub(super) fn undestroyed_queues(&self) -> Vec<u32> {
        self.state().undestroyed.iter().copied().collect()
    }

    /// Appends a line to the log.
    pub(super) fn note(&self, line: String) {
        self.state().log.push(line);
    }

    /// The log.
    pub(super) fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    /// All transfers that were started.
    pub(super) fn transfers(&self) -> Vec<Transfer> {
        self.state().transfers.clone()
    }

    /// Number of queue pairs created so far.
    pub(super) fn queues_made(&self) -> usize {
        self.state().queues_made
    }

    /// Numbers of the live queue pairs.
    pub(super) fn queues(&self) -> Vec<u32> {
        let mut queues: Vec<u32> = self.state().queues.keys().copied().collect();
        queues.sort_unstable();
        queues
    }
}

impl FabricState {
    fn next_number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The memory behind a key, if a queue pair of this domain has the needed access to it.
    fn resolve(
        &self,
        key: u32,
        domain: u32,
        needs: &[Access],
        address: u64,
        len: u32,
    ) -> Option<(Arc<RdmaMemory>, u64)> {
        let found = self.memories.get(&key)?;
        let at = address.checked_sub(found.memory.address())?;
        let is_inside = at.checked_add(len.into())? <= found.memory.len_bytes();
        (found.domain == domain && needs.contains(&found.access) && is_inside)
            .then(|| (Arc::clone(&found.memory), at))
    }

    /// Whether this queue pair's packets are lost.
    fn is_lost(&self, number: u32) -> bool {
        let Some(queue) = self.queues.get(&number) else { return false };
        let peer = queue.peer.as_ref().map(|(_, _, peer)| peer.gid.0[0]);
        self.silent.contains(&queue.rail.0[0]) || peer.is_some_and(|peer| self.silent.contains(&peer))
    }

    fn status(&self, number: u32, transfer: &Transfer) -> u32 {
        let Some(queue) = self.queues.get(&number) else { return STATUS_FLUSHED };
        if queue.is_broken {
            return STATUS_FLUSHED;
        }
        let Some((Role::Requester, packet, peer)) = &queue.peer else { return 2 };
        if self.dead.contains(&queue.rail.0[0]) || self.dead.contains(&peer.gid.0[0]) {
            return 12;
        }
        // No answer comes from a queue pair that is gone or connected elsewhere.
        let Some(other) = self.queues.get(&peer.qp_number).filter(|other| other.rail == peer.gid) else {
            return 12;
        };
        let Some((_, expected, back)) = &other.peer else { return 12 };
        if back.qp_number != number
            || back.first_psn != *packet
            || *expected != peer.first_psn
            || other.is_broken
        {
            return 12;
        }
        let all = [Access::Local, Access::Read, Access::ReadWrite];
        let Some((ours, at)) =
            self.resolve(transfer.local_key, queue.domain, &all, transfer.local_address, transfer.len)
        else {
            return 4;
        };
        let needs: &[Access] = match transfer.direction {
            Direction::Read => &[Access::Read, Access::ReadWrite],
            Direction::Write => &[Access::ReadWrite],
        };
        let theirs =
            self.resolve(transfer.remote_key, other.domain, needs, transfer.remote_address, transfer.len);
        let Some((theirs, there)) = theirs.filter(|_| needs.contains(&other.access)) else {
            return STATUS_REMOTE_ACCESS;
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

    fn execute(&mut self, number: u32, transfer: &Transfer) {
        let status = match self.fail_next.take() {
            Some(status) => status,
            None => self.status(number, transfer),
        };
        // A card reports no completion for a destroyed queue pair.
        let Some(queue) = self.queues.get_mut(&number) else { return };
        queue.is_broken |= status != 0;
        self.ended.entry(queue.rail.0).or_default().push(Completion { id: transfer.id, status });
    }
}

struct FakeRail {
    fabric: Fabric,
    port: RailPort,
}

impl Rail for FakeRail {
    fn port(&self) -> &RailPort {
        &self.port
    }

    fn create_domain(&self) -> io::Result<Arc<dyn ProtectionDomain>> {
        let number = self.fabric.state().next_number();
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

impl ProtectionDomain for FakeDomain {
    fn register(&self, memory: &Arc<RdmaMemory>, access: Access) -> io::Result<Box<dyn MemoryRegion>> {
        let mut state = self.fabric.state();
        let own = state.refuse_register_of.filter(|(number, _)| *number == self.rail.0[0]);
        if let Some(errno) = state.refuse_register.or(own.map(|(_, errno)| errno)) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let key = state.next_number();
        state.log.push(format!("register {} bytes", memory.len_bytes()));
        let memory = Arc::clone(memory);
        state.memories.insert(key, FakeMemory { domain: self.number, access, memory });
        Ok(Box::new(FakeMr { fabric: self.fabric.clone(), key }))
    }

    fn create_queue_pair(&self, access: Access) -> io::Result<Box<dyn QueuePair>> {
        let mut state = self.fabric.state();
        if let Some(errno) = state.refuse_queue {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let number = state.next_number();
        let queue = FakeQueue { domain: self.number, access, rail: self.rail, peer: None, is_broken: false };
        state.queues_made += 1;
        state.queues.insert(number, queue);
        Ok(Box::new(FakeQueueHandle { fabric: self.fabric.clone(), number }))
    }
}

struct FakeMr {
    fabric: Fabric,
    key: u32,
}

impl MemoryRegion for FakeMr {
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

struct FakeQueueHandle {
    fabric: Fabric,
    number: u32,
}

impl QueuePair for FakeQueueHandle {
    fn number(&self) -> u32 {
        self.number
    }

    fn connect(&self, role: Role, packet: u32, peer: &QueuePairAddress) -> io::Result<()> {
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
            None => state.execute(self.number, transfer),
        }
        Ok(())
    }

    fn destroy(&self) -> io::Result<()> {
        let mut state = self.fabric.state();
        if state.is_destroy_refused && state.queues.contains_key(&self.number) {
            state.undestroyed.insert(self.number);
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        if let Some(queue) = state.queues.remove(&self.number) {
            state.log.push(format!("end queue of fake{}", queue.rail.0[0]));
        }
        Ok(())
    }
}

impl Drop for FakeQueueHandle {
    fn drop(&mut self) {
        let _ = self.destroy(); // the fabric may be set to refuse
    }
}
