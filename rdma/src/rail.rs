//! Traits for the network card. `verbs.rs` implements them with libibverbs; tests implement them by
//! copying memory.
//!
//! The caller keeps the order of calls (`transfers.rs`): memory outlives its registration, and a
//! queue pair is destroyed before the memory that it can touch is reused. Not here: access control.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::gpu::{AddressRange, DmaBufExport};
use super::memory::RdmaMemory;

/// The address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub(super) struct Gid(pub(super) [u8; 16]);

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::net::Ipv6Addr::from(self.0), f)
    }
}

/// Attributes of a port that peers need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RailPort {
    /// Device name.
    pub(super) device: String,
    pub(super) gid: Gid,
    /// Local identifier in an InfiniBand subnet; zero elsewhere.
    pub(super) lid: u16,
    /// Largest packet in the verbs encoding (1: 256 bytes, 5: 4096).
    pub(super) mtu: u8,
    /// Maximum concurrent RDMA reads of its queue pairs, both started and answered.
    pub(super) max_reads: u8,
}

/// Address of one end of a queue pair connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuePairAddress {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) mtu: u8,
    /// Queue pair number.
    pub(super) qp_number: u32,
    /// Sequence number of its first packet, 24 bits, chosen so that a third party cannot guess it.
    pub(super) first_psn: u32,
    /// Maximum concurrent RDMA reads, both started and answered. Further reads fail.
    pub(super) max_reads: u8,
}

/// Access that a peer has to registered memory, or through a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Access {
    /// No access for peers; only this end's own transfers.
    Local,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// Role of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It answers the peer's transfers and starts none.
    Responder,
    /// It starts transfers.
    Requester,
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    /// Returned with the completion.
    pub(super) id: u64,
    pub(super) direction: Direction,
    pub(super) local_address: u64,
    pub(super) local_key: u32,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) len: u32,
}

/// The end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) id: u64,
    /// Zero for success, otherwise the verbs status code.
    pub(super) status: u32,
}

/// One port of a card.
pub(super) trait Rail: Send + Sync {
    /// Attributes that peers need.
    fn port(&self) -> &RailPort;

    /// Creates a protection domain: its queue pairs reach only its own memory.
    fn create_domain(&self) -> io::Result<Arc<dyn ProtectionDomain>>;

    /// Appends the transfers that ended since the last call.
    fn poll(&self, ended: &mut Vec<Completion>) -> io::Result<()>;
}

/// A protection domain. It is freed with the last object in it.
pub(super) trait ProtectionDomain: Send + Sync {
    /// Registers memory with the card and pins its pages.
    fn register(&self, memory: &Arc<RdmaMemory>, access: Access) -> io::Result<Box<dyn MemoryRegion>>;

    /// Registers GPU memory that the GPU's driver exported as dma-buf.
    fn register_dmabuf(
        &self,
        _range: &AddressRange,
        _exported: &DmaBufExport,
    ) -> io::Result<Box<dyn MemoryRegion>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Creates an unconnected queue pair.
    fn create_queue_pair(&self, access: Access) -> io::Result<Box<dyn QueuePair>>;
}

/// Registered memory; dropping it deregisters the memory.
pub(super) trait MemoryRegion: Send + Sync {
    /// Key for this end's transfers.
    fn local_key(&self) -> u32;

    /// Key for a peer's transfers.
    fn remote_key(&self) -> u32;
}

/// A queue pair.
pub(super) trait QueuePair: Send + Sync {
    fn number(&self) -> u32;

    /// Connects it to a peer's queue pair, for good. `first_psn` is our first packet sequence
    /// number.
    fn connect(&self, role: Role, first_psn: u32, peer: &QueuePairAddress) -> io::Result<()>;

    /// Starts a transfer. The caller keeps the memory at both keys until the transfer ends or the
    /// queue pair is destroyed.
    fn post(&self, transfer: &Transfer) -> io::Result<()>;

    /// Destroys the queue pair, once. Afterwards the card touches no memory on its behalf, in
    /// either direction.
    ///
    /// # Errors
    /// If the system does not confirm the end. Then the state is unknown, and memory that the queue
    /// pair can touch must never be reused.
    fn destroy(&self) -> io::Result<()>;
}
