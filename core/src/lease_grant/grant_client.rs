//! The client's end of a grant connection: which memory it may read, and which grants it must
//! return.
//!
//! It checks the node's descriptors where that is cheap: ranges, lengths, counts and ids. The
//! reader checks whether the bytes are the block. Not here: the mapping, and the reading threads.

use std::collections::BTreeMap;

use crate::id::GrantId;

/// Returned grants that wait before a message is sent for them alone: 512 bytes of it.
pub const RETURNS_PER_MESSAGE: usize = 64;

/// Memory region of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GrantMemory {
    /// The node's arena, read in place.
    Arena,
    /// The connection's bounce buffer, which bytes are copied through.
    BounceBuffer,
}

/// Location of the bytes of a grant, as the node reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantDescriptor {
    /// The grant.
    pub grant: GrantId,
    /// The memory region.
    pub memory: GrantMemory,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// Sizes of a connection's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryExtent {
    /// The node's arena; zero if it is not mapped.
    pub arena_bytes: u64,
    /// The part of the bounce buffer that the client reads from.
    pub bounce_buffer_bytes: u64,
    /// The largest frame.
    pub frame_bytes_max: u32,
}

/// Result of valid descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// They may be read.
    Accepted,
    /// Their operation was cancelled: they wait to be returned.
    Unwanted,
}

/// Why descriptors are invalid. None of them counts, and the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The range lies outside its memory region.
    #[error("a block of {len} bytes at {at} does not lie in the {extent} bytes there are")]
    Range {
        /// Offset of the first byte.
        at: u64,
        /// Length in bytes.
        len: u32,
        /// Size of the region in bytes.
        extent: u64,
    },
    /// The length is zero, or above the largest frame.
    #[error("a block of {len} bytes is empty or above the limit of {limit} bytes")]
    Length {
        /// Length in bytes.
        len: u32,
        /// [`MemoryExtent::frame_bytes_max`].
        limit: u32,
    },
    /// The grant id is not above all earlier ones.
    #[error("{0} is not newer than an earlier grant")]
    StaleId(GrantId),
    /// More descriptors than requested blocks.
    #[error("more descriptors than the {asked} requested blocks")]
    TooMany {
        /// Requested blocks.
        asked: usize,
    },
    /// The operation was never started, or has ended.
    #[error("operation {0} is not in flight")]
    NoOperation(u64),
}

/// Grants that a client holds through one connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantClient {
    extent: MemoryExtent,
    newest_operation: u64,
    operations: BTreeMap<u64, GrantOperation>,
    /// The largest grant id seen. Ids grow, so it tells whether an id is new.
    newest_grant: GrantId,
    /// Readable grants with their operation.
    held: BTreeMap<GrantId, u64>,
    /// Grants that are no longer read, and that the node does not know to be free yet.
    returns: Vec<GrantId>,
    is_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct GrantOperation {
    asked: usize,
    received: usize,
    held: usize,
    is_cancelled: bool,
    /// No more grants arrive for it; it stays while one of its grants is held.
    is_finished: bool,
}

impl GrantClient {
    /// A new connection.
    #[must_use]
    pub fn new(extent: MemoryExtent) -> GrantClient {
        GrantClient {
            extent,
            newest_operation: 0,
            operations: BTreeMap::new(),
            newest_grant: GrantId(0),
            held: BTreeMap::new(),
            returns: Vec::new(),
            is_lost: false,
        }
    }

    /// Starts an operation that requests `asked` blocks, and returns its number.
    pub fn begin(&mut self, asked: usize) -> u64 {
        self.newest_operation += 1;
        let operation =
            GrantOperation { asked, received: 0, held: 0, is_cancelled: false, is_finished: false };
        self.operations.insert(self.newest_operation, operation);
        self.newest_operation
    }

    /// Receives the node's grants for an operation.
    ///
    /// # Errors
    /// If one of them is invalid; then none is accepted.
    pub fn receive(
        &mut self,
        operation: u64,
        descriptors: &[GrantDescriptor],
    ) -> Result<ReceiveOutcome, DescriptorError> {
        let found = self.operations.get_mut(&operation).filter(|found| !found.is_finished);
        let Some(found) = found.filter(|_| !self.is_lost) else {
            return Err(DescriptorError::NoOperation(operation));
        };
        if descriptors.len() > found.asked - found.received {
            return Err(DescriptorError::TooMany { asked: found.asked });
        }
        let mut newest = self.newest_grant;
        for row in descriptors {
            check_descriptor(row, &self.extent)?;
            if row.grant <= newest {
                return Err(DescriptorError::StaleId(row.grant));
            }
            newest = row.grant;
        }
        self.newest_grant = newest;
        found.received += descriptors.len();
        let loans = descriptors.iter().map(|row| row.grant);
        if found.is_cancelled {
            self.returns.extend(loans);
            return Ok(ReceiveOutcome::Unwanted);
        }
        found.held += descriptors.len();
        self.held.extend(loans.map(|loan| (loan, operation)));
        Ok(ReceiveOutcome::Accepted)
    }

    /// The node says that no more grants arrive for the operation. Returns `true` if waiting
    /// returns should be sent now.
    pub fn finish(&mut self, operation: u64) -> bool {
        if let Some(found) = self.operations.get_mut(&operation) {
            found.is_finished = true;
            if found.held == 0 {
                self.operations.remove(&operation);
                return !self.returns.is_empty();
            }
        }
        false
    }

    /// Further grants for the operation are unwanted. Received ones stay until they are returned,
    /// and the operation ends when the node says so.
    pub fn cancel(&mut self, operation: u64) {
        if let Some(found) = self.operations.get_mut(&operation) {
            found.is_cancelled = true;
        }
    }

    /// The grant is no longer read. Returns `true` if waiting returns should be sent now: it was
    /// the last of its operation, or many wait.
    pub fn release(&mut self, grant: GrantId) -> bool {
        let Some(operation) = self.held.remove(&grant) else { return false };
        let mut is_last = false;
        if let Some(found) = self.operations.get_mut(&operation) {
            found.held -= 1;
            is_last = found.held == 0 && found.is_finished;
        }
        if is_last {
            self.operations.remove(&operation);
        }
        if self.is_lost {
            return false;
        }
        self.returns.push(grant);
        is_last || self.returns.len() >= RETURNS_PER_MESSAGE
    }

    /// Up to `limit` grants to return to the node now, oldest first.
    pub fn take_returns(&mut self, limit: usize) -> Vec<GrantId> {
        let rest = self.returns.split_off(limit.min(self.returns.len()));
        std::mem::replace(&mut self.returns, rest)
    }

    /// The node is gone. No grant is returned any more, and held bytes stay as they are: their
    /// writer has ended.
    pub fn server_lost(&mut self) {
        self.is_lost = true;
        self.returns.clear();
        self.operations.clear();
    }

    /// Number of grants that wait to be returned.
    #[must_use]
    pub fn pending_returns(&self) -> usize {
        self.returns.len()
    }

    /// Whether the bytes of this grant are still as they were when it arrived.
    #[must_use]
    pub fn may_read(&self, grant: GrantId) -> bool {
        self.held.contains_key(&grant)
    }

    /// Number of held grants. While there is one, the connection must stay open, even if the node
    /// closed its end.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Same as [`super::GrantServer::renumber`].
    #[cfg(test)]
    pub(super) fn renumber(&mut self, loan: &dyn Fn(GrantId) -> GrantId, operation: &dyn Fn(u64) -> u64) {
        self.newest_operation = operation(self.newest_operation);
        self.newest_grant = loan(self.newest_grant);
        self.operations = std::mem::take(&mut self.operations)
            .into_iter()
            .map(|(id, found)| (operation(id), found))
            .collect();
        self.held =
            std::mem::take(&mut self.held).into_iter().map(|(id, of)| (loan(id), operation(of))).collect();
        self.returns.iter_mut().for_each(|id| *id = loan(*id));
    }
}

fn check_descriptor(descriptor: &GrantDescriptor, extent: &MemoryExtent) -> Result<(), DescriptorError> {
    let GrantDescriptor { memory: place, offset: at, len, .. } = *descriptor;
    if len == 0 || len > extent.frame_bytes_max {
        return Err(DescriptorError::Length { len, limit: extent.frame_bytes_max });
    }
    let there = match place {
        GrantMemory::Arena => extent.arena_bytes,
        GrantMemory::BounceBuffer => extent.bounce_buffer_bytes,
    };
    match at.checked_add(u64::from(len)) {
        Some(end) if end <= there => Ok(()),
        _ => Err(DescriptorError::Range { at, len, extent: there }),
    }
}
