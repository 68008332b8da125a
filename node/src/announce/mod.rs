//! Tells the routers what this node holds: pure queues (`outbox`, one per shard in `outboxes`) and the tasks
//! that carry them (`link`).

pub(crate) mod link;
pub mod outbox;
pub mod outboxes;
pub(crate) mod seek;
pub(crate) mod session;
mod shard;
