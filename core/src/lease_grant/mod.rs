//! Shared lease grants: when memory of a node that another process reads in place may be reused.
//! Pure.
//!
//! A connection has a [`GrantServer`] at the node and a [`GrantClient`] at the client. A grant ends
//! in one of three ways: the client returns it, the client's process ends, or the server's process
//! ends (then no process writes there any more). No clock ends a grant, because no clock can stop a
//! reader. Leases are the second layer. The tier book must not free granted blocks, so it is told
//! of the end of a lease when its last grant has returned; meanwhile the lease is renewed.
//!
//! Each end is told of events and returns actions. The caller keeps the bytes of a grant until
//! [`GrantEffect::Free`], and sends descriptors in grant order.
//!
//! Not here: sockets and mappings, the byte limit over all connections, and which blocks may be
//! granted.

mod grant_client;
mod grant_server;
mod slot_allocator;
#[cfg(test)]
mod tests;

pub use grant_client::{
    DescriptorError, GrantClient, GrantDescriptor, GrantMemory, MemoryExtent, RETURNS_PER_MESSAGE,
    ReceiveOutcome,
};
pub use grant_server::{GrantEffect, GrantLimits, GrantRefused, GrantServer, UnknownGrant};
pub use slot_allocator::SlotAllocator;
