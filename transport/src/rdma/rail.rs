//! What the path asks of a network card, as traits: `verbs.rs` has the real one, tests one that copies memory.
//!
//! The order of calls is the caller's to keep (`flights.rs`): memory outlives its registration, a queue pair is ended before
//! what it may still touch is used again. Not here: who may touch what.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::gpu::{Exported, Range};
use super::memory::Memory;

/// The address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub(super) struct Gid(pub(super) [u8; 16]);

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::net::Ipv6Addr::from(self.0), f)
    }
}

/// What others must know of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    /// The device's name.
    pub(super) device: String,
    pub(super) gid: Gid,
    /// Its address in an InfiniBand subnet; zero elsewhere.
    pub(super) lid: u16,
    /// Largest packet, as verbs number it (1: 256 bytes, 5: 4096).
    pub(super) mtu: u8,
    /// Reads that its queue pairs have under way, or answer, at once.
    pub(super) reads: u8,
}

/// One end of a connection between queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) mtu: u8,
    /// The queue pair's number.
    pub(super) queue: u32,
    /// The number of its first packet, 24 bits, which nobody else should guess.
    pub(super) packet: u32,
    /// Reads that it has under way, or answers, at once; what is more fails.
    pub(super) reads: u8,
}

/// What a peer may do with registered memory, or through a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Access {
    /// Nothing; only this end's own transfers touch it.
    Local,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// What a queue pair is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It answers the peer's transfers, and begins none.
    Answers,
    /// It begins transfers.
    Asks,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the peer's memory into ours.
    Read,
    /// From ours into the peer's.
    Write,
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    /// Comes back with its end.
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
    /// Zero: all went well. Otherwise the number that verbs give the failure.
    pub(super) status: u32,
}

/// One port of a card.
pub(super) trait Rail: Send + Sync {
    /// What others must know of it.
    fn port(&self) -> &Port;

    /// A new protection domain: its queue pairs reach its memory and no other.
    fn domain(&self) -> io::Result<Arc<dyn Domain>>;

    /// Adds the transfers that ended since.
    fn poll(&self, ended: &mut Vec<Completion>) -> io::Result<()>;
}

/// A protection domain. It ends with the last thing in it.
pub(super) trait Domain: Send + Sync {
    /// Makes memory known to the card, which keeps its pages.
    fn register(&self, memory: &Arc<Memory>, access: Access) -> io::Result<Box<dyn RegisterMr>>;

    /// The same of a GPU's memory, which its driver exported.
    fn register_file(&self, _range: &Range, _exported: &Exported) -> io::Result<Box<dyn RegisterMr>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// A queue pair without a peer.
    fn queue(&self, access: Access) -> io::Result<Box<dyn Queue>>;
}

/// Registered memory, which is kept until it is deregistered by a drop.
pub(super) trait RegisterMr: Send + Sync {
    /// The key for transfers of this end.
    fn local_key(&self) -> u32;

    /// The key for transfers of a peer.
    fn remote_key(&self) -> u32;
}

/// A queue pair.
pub(super) trait Queue: Send + Sync {
    fn number(&self) -> u32;

    /// Joins it to a peer's, for good. `packet` is the number of our first packet.
    fn connect(&self, role: Role, packet: u32, peer: &End) -> io::Result<()>;

    /// Begins a transfer. The caller keeps the memory at both keys until its end, or until the queue pair is ended.
    fn post(&self, transfer: &Transfer) -> io::Result<()>;

    /// Ends the queue pair, once: after it the card touches nothing on its behalf, in neither direction.
    ///
    /// # Errors
    /// When the system does not say so: then nobody knows, and what it may touch must never be used again.
    fn end(&self) -> io::Result<()>;
}
