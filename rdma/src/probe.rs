//! Bare transfers between two ports of this host, without the path, to check that a card works and
//! to measure its limit.
//!
//! Not here: blocks, checksums, peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gpu::{AddressRange, DmaBufExport};
use super::memory::{RdmaBufferPool, RdmaMemory};
use super::rail::{Access, Direction, MemoryRegion, QueuePairAddress, Role};
use super::transfers::{QpHandle, RemoteAddress};
use super::{Rdma, RdmaError};

/// Two connected queue pairs, and memory at both ends.
pub struct Probe {
    requester: ProbeRequester,
    responder: ProbeResponder,
    remote: RemoteAddress,
}

/// The end that starts transfers.
struct ProbeRequester {
    rdma: Arc<Rdma>,
    qp: Arc<QpHandle>,
    registered: Box<dyn MemoryRegion>,
    pool: Arc<RdmaBufferPool>,
}

/// The end that answers transfers.
struct ProbeResponder {
    rdma: Arc<Rdma>,
    qp: Arc<QpHandle>,
    registered: Option<Box<dyn MemoryRegion>>,
    memory: Arc<RdmaMemory>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Probe(..)")
    }
}

/// Registers and deregisters memory that a GPU's driver exported.
///
/// # Errors
/// The system's error; `EOPNOTSUPP` if the card cannot do it.
pub fn register_dmabuf(
    rdma: &Arc<Rdma>,
    range: &AddressRange,
    exported: &DmaBufExport,
) -> std::io::Result<()> {
    rdma.transfers.rail().create_domain()?.register_dmabuf(range, exported).map(drop)
}

/// Destroys all queue pairs of a rail without telling their owners, as when a port goes down.
///
/// # Errors
/// The system's error.
pub fn kill_rail(rdma: &Rdma) -> std::io::Result<()> {
    rdma.transfers.queue_pairs().iter().try_for_each(|line| line.queue().destroy())
}

/// Error text of a failed transfer.
pub type ProbeError = String;

impl Probe {
    /// Connects two ports, which may be the same, with `bytes` of memory at each.
    ///
    /// # Errors
    /// If the device refuses a step.
    pub fn new(ours: &Arc<Rdma>, theirs: &Arc<Rdma>, bytes: usize) -> Result<Probe, RdmaError> {
        let failed = |rdma: &Arc<Rdma>, what| {
            let device = rdma.device().to_owned();
            move |cause| RdmaError::Device { device, what, cause }
        };
        let (domain, other) = (ours.domain()?, theirs.domain()?);
        let (memory, registered) = ours.allocate_registered(domain.as_ref(), bytes, Access::Local)?;
        let (target, offered) = theirs.allocate_registered(other.as_ref(), bytes, Access::ReadWrite)?;
        let queue = domain.create_queue_pair(Access::Local).map_err(failed(ours, "given a queue pair"))?;
        let answers =
            other.create_queue_pair(Access::ReadWrite).map_err(failed(theirs, "given a queue pair"))?;
        let end = |rdma: &Arc<Rdma>, queue: u32| {
            let port = rdma.transfers.rail().port();
            QueuePairAddress {
                gid: port.gid,
                lid: port.lid,
                mtu: port.mtu,
                qp_number: queue,
                first_psn: 7,
                max_reads: port.max_reads,
            }
        };
        answers
            .connect(Role::Responder, 7, &end(ours, queue.number()))
            .map_err(failed(theirs, "connected"))?;
        queue
            .connect(Role::Requester, 7, &end(theirs, answers.number()))
            .map_err(failed(ours, "connected"))?;
        let remote = RemoteAddress { address: target.address(), key: offered.remote_key() };
        let pool = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
        Ok(Probe {
            requester: ProbeRequester {
                rdma: Arc::clone(ours),
                qp: ours.transfers.register_queue_pair(queue, &ours.transfers.peer_limit()),
                registered,
                pool,
            },
            responder: ProbeResponder {
                rdma: Arc::clone(theirs),
                qp: theirs.transfers.register_queue_pair(answers, &theirs.transfers.peer_limit()),
                registered: Some(offered),
                memory: target,
            },
            remote,
        })
    }

    /// Writes into the other end's memory with the processor.
    pub fn write_remote(&self, at: u64, bytes: &[u8]) {
        self.responder.memory.write(at, bytes);
    }

    /// Contents of the other end's memory.
    #[must_use]
    pub fn remote_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.responder.memory.copy(at, &mut bytes);
        bytes
    }

    /// Reads `len` bytes of the other end's memory by RDMA.
    ///
    /// # Errors
    /// The card's error.
    pub async fn read(&self, at: u64, len: u32) -> Result<Vec<u8>, ProbeError> {
        self.transfer(Direction::Read, at, &vec![0; len as usize], self.remote.key).await
    }

    /// Writes into the other end's memory by RDMA.
    ///
    /// # Errors
    /// The card's error.
    pub async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), ProbeError> {
        self.transfer(Direction::Write, at, bytes, self.remote.key).await.map(drop)
    }

    /// Reads with an invalid key.
    ///
    /// # Errors
    /// The card's error, which is expected.
    pub async fn read_with_wrong_key(&self) -> Result<Vec<u8>, ProbeError> {
        self.transfer(Direction::Read, 0, &[0; 64], self.remote.key ^ 0x5A5A).await
    }

    /// Reads over its own queue pair from the other end of another probe, with the key that is
    /// valid there.
    ///
    /// # Errors
    /// The card's error, which is expected.
    pub async fn read_from(&self, other: &Probe) -> Result<Vec<u8>, ProbeError> {
        let at = other.remote.address.wrapping_sub(self.remote.address);
        self.transfer(Direction::Read, at, &[0; 64], other.remote.key).await
    }

    /// Deregisters the other end's memory, like a node that reclaims it.
    pub fn deregister_remote(&mut self) {
        self.responder.registered = None;
    }

    /// Destroys the other end's queue pair, as when its process is killed; returns once that is
    /// done.
    ///
    /// # Errors
    /// The system's error.
    pub fn kill_peer(&self) -> std::io::Result<()> {
        self.responder.qp.queue().destroy()
    }

    async fn transfer(
        &self,
        direction: Direction,
        at: u64,
        bytes: &[u8],
        key: u32,
    ) -> Result<Vec<u8>, ProbeError> {
        let ProbeRequester { rdma, qp: line, registered, pool } = &self.requester;
        let len = u32::try_from(bytes.len()).map_err(|error| error.to_string())?;
        let mut place = pool.wait(len).await.ok_or("more than the probe's memory")?;
        if direction == Direction::Write {
            place.write(bytes);
        }
        let remote = RemoteAddress { address: self.remote.address.wrapping_add(at), key };
        let begun = rdma.transfers.submit(line, direction, place, registered.local_key(), remote).await;
        let place = begun.map_err(|error| error.to_string())?.wait().await;
        Ok(place.map_err(|error| error.to_string())?.bytes().to_vec())
    }

    /// Reads `len` bytes `count` times, `depth` at once, without checking them. Returns the
    /// duration.
    ///
    /// # Errors
    /// The card's error.
    pub async fn read_many(&self, len: u32, depth: usize, count: usize) -> Result<Duration, ProbeError> {
        let ProbeRequester { rdma, qp: line, registered, pool } = &self.requester;
        let text = |error: super::transfers::TransferError| error.to_string();
        let mut under_way = std::collections::VecDeque::new();
        let began = Instant::now();
        for number in 0..count {
            if under_way.len() >= depth
                && let Some(first) = under_way.pop_front()
            {
                let first: super::transfers::PendingTransfer = first;
                first.wait().await.map_err(text)?;
            }
            let place = pool.wait(len).await.ok_or("more than the probe's memory")?;
            let span = self.responder.memory.len_bytes() - u64::from(len);
            let at = (number as u64 * u64::from(len)) % (span + 1);
            let remote = RemoteAddress { address: self.remote.address + at, key: self.remote.key };
            let begun = rdma.transfers.submit(line, Direction::Read, place, registered.local_key(), remote);
            under_way.push_back(begun.await.map_err(text)?);
        }
        for last in under_way {
            last.wait().await.map_err(text)?;
        }
        Ok(began.elapsed())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.requester.rdma.transfers.tear_down(vec![Arc::clone(&self.requester.qp)], ());
        self.responder
            .rdma
            .transfers
            .tear_down(vec![Arc::clone(&self.responder.qp)], self.responder.registered.take());
    }
}
