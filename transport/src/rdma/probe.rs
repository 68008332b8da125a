//! Bare transfers between two ports of this host, without the path: to see that a card works, and what its limit is.
//!
//! Not here: blocks, checksums, peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::flights::{Line, Remote};
use super::gpu::{Exported, Range};
use super::memory::{Memory, Pool};
use super::rail::{Access, Direction, End, RegisterMr, Role};
use super::{Rdma, RdmaError};

/// Two queue pairs joined to each other, and memory at both ends.
pub struct Probe {
    near: Near,
    far: Far,
    remote: Remote,
}

/// The end that begins transfers.
struct Near {
    rdma: Arc<Rdma>,
    line: Arc<Line>,
    registered: Box<dyn RegisterMr>,
    pool: Arc<Pool>,
}

/// The end that answers them.
struct Far {
    rdma: Arc<Rdma>,
    line: Arc<Line>,
    registered: Option<Box<dyn RegisterMr>>,
    memory: Arc<Memory>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Probe(..)")
    }
}

/// Registers memory that a GPU's driver exported, and deregisters it.
///
/// # Errors
/// What the system says; `EOPNOTSUPP` of a card that cannot.
pub fn register_file(rdma: &Arc<Rdma>, range: &Range, exported: &Exported) -> std::io::Result<()> {
    rdma.flights.rail().domain()?.register_file(range, exported).map(drop)
}

/// Ends all queue pairs of a rail and lets their owners believe that they live, as when a port goes down.
///
/// # Errors
/// What the system said.
pub fn kill_rail(rdma: &Rdma) -> std::io::Result<()> {
    rdma.flights.lines().iter().try_for_each(|line| line.queue().end())
}

/// What a transfer that failed says.
pub type Failed = String;

impl Probe {
    /// Joins two ports, with so many bytes of memory at each; they may be one.
    ///
    /// # Errors
    /// When something of it is refused.
    pub fn new(ours: &Arc<Rdma>, theirs: &Arc<Rdma>, bytes: usize) -> Result<Probe, RdmaError> {
        let failed = |rdma: &Arc<Rdma>, what| {
            let device = rdma.device().to_owned();
            move |cause| RdmaError::Device { device, what, cause }
        };
        let (domain, other) = (ours.domain()?, theirs.domain()?);
        let (memory, registered) = ours.allocate(domain.as_ref(), bytes, Access::Local)?;
        let (target, offered) = theirs.allocate(other.as_ref(), bytes, Access::ReadWrite)?;
        let queue = domain.queue(Access::Local).map_err(failed(ours, "given a queue pair"))?;
        let answers = other.queue(Access::ReadWrite).map_err(failed(theirs, "given a queue pair"))?;
        let end = |rdma: &Arc<Rdma>, queue: u32| {
            let port = rdma.flights.rail().port();
            End { gid: port.gid, lid: port.lid, mtu: port.mtu, queue, packet: 7, reads: port.reads }
        };
        answers.connect(Role::Answers, 7, &end(ours, queue.number())).map_err(failed(theirs, "connected"))?;
        queue.connect(Role::Asks, 7, &end(theirs, answers.number())).map_err(failed(ours, "connected"))?;
        let remote = Remote { address: target.address(), key: offered.remote_key() };
        let pool = Pool::new(&memory, 0..memory.len_bytes());
        Ok(Probe {
            near: Near {
                rdma: Arc::clone(ours),
                line: ours.flights.line(queue, &ours.flights.peer()),
                registered,
                pool,
            },
            far: Far {
                rdma: Arc::clone(theirs),
                line: theirs.flights.line(answers, &theirs.flights.peer()),
                registered: Some(offered),
                memory: target,
            },
            remote,
        })
    }

    /// Writes into the other end's memory, by its own processor.
    pub fn set_remote(&self, at: u64, bytes: &[u8]) {
        self.far.memory.write(at, bytes);
    }

    /// What is in the other end's memory.
    #[must_use]
    pub fn remote(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.far.memory.copy(at, &mut bytes);
        bytes
    }

    /// Reads so many bytes there.
    ///
    /// # Errors
    /// What the card says.
    pub async fn read(&self, at: u64, len: u32) -> Result<Vec<u8>, Failed> {
        self.transfer(Direction::Read, at, &vec![0; len as usize], self.remote.key).await
    }

    /// Writes there.
    ///
    /// # Errors
    /// What the card says.
    pub async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Failed> {
        self.transfer(Direction::Write, at, bytes, self.remote.key).await.map(drop)
    }

    /// Reads with a key that nobody gave.
    ///
    /// # Errors
    /// What the card says; it should.
    pub async fn read_with_wrong_key(&self) -> Result<Vec<u8>, Failed> {
        self.transfer(Direction::Read, 0, &[0; 64], self.remote.key ^ 0x5A5A).await
    }

    /// Reads, over its own queue pair, what lies at the other end of another probe, with the key that is good there.
    ///
    /// # Errors
    /// What the card says; it should.
    pub async fn read_of(&self, other: &Probe) -> Result<Vec<u8>, Failed> {
        let at = other.remote.address.wrapping_sub(self.remote.address);
        self.transfer(Direction::Read, at, &[0; 64], other.remote.key).await
    }

    /// Deregisters the other end's memory, as a node does that wants it back.
    pub fn invalidate(&mut self) {
        self.far.registered = None;
    }

    /// Ends the other end's queue pair, as when its process is killed; returns once that is done.
    ///
    /// # Errors
    /// What the system said.
    pub fn kill_peer(&self) -> std::io::Result<()> {
        self.far.line.queue().end()
    }

    async fn transfer(
        &self,
        direction: Direction,
        at: u64,
        bytes: &[u8],
        key: u32,
    ) -> Result<Vec<u8>, Failed> {
        let Near { rdma, line, registered, pool } = &self.near;
        let len = u32::try_from(bytes.len()).map_err(|error| error.to_string())?;
        let mut place = pool.wait(len).await.ok_or("more than the probe's memory")?;
        if direction == Direction::Write {
            place.write(bytes);
        }
        let remote = Remote { address: self.remote.address.wrapping_add(at), key };
        let begun = rdma.flights.begin(line, direction, (place, registered.local_key()), remote).await;
        let place = begun.map_err(|error| error.to_string())?.end().await;
        Ok(place.map_err(|error| error.to_string())?.bytes().to_vec())
    }

    /// Reads `count` times `len` bytes, `depth` at once, without looking at them; how long it took.
    ///
    /// # Errors
    /// What the card says.
    pub async fn read_many(&self, len: u32, depth: usize, count: usize) -> Result<Duration, Failed> {
        let Near { rdma, line, registered, pool } = &self.near;
        let text = |error: super::flights::TransferError| error.to_string();
        let mut under_way = std::collections::VecDeque::new();
        let began = Instant::now();
        for number in 0..count {
            if under_way.len() >= depth
                && let Some(first) = under_way.pop_front()
            {
                let first: super::flights::Arriving = first;
                first.end().await.map_err(text)?;
            }
            let place = pool.wait(len).await.ok_or("more than the probe's memory")?;
            let span = self.far.memory.len_bytes() - u64::from(len);
            let at = (number as u64 * u64::from(len)) % (span + 1);
            let remote = Remote { address: self.remote.address + at, key: self.remote.key };
            let begun = rdma.flights.begin(line, Direction::Read, (place, registered.local_key()), remote);
            under_way.push_back(begun.await.map_err(text)?);
        }
        for last in under_way {
            last.end().await.map_err(text)?;
        }
        Ok(began.elapsed())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.near.rdma.flights.end(vec![Arc::clone(&self.near.line)], ());
        self.far.rdma.flights.end(vec![Arc::clone(&self.far.line)], self.far.registered.take());
    }
}
