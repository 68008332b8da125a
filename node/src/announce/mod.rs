//! Announces this node's blocks to the routers: pure queues (`outbox`, one per shard in
//! `outboxes`), and the tasks that send them (`link`).

pub(crate) mod link;
pub mod outbox;
pub mod outboxes;
pub(crate) mod router_selector;
pub(crate) mod session;
mod shard;
