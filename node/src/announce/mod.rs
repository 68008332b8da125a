//! Tells the routers what this node holds: a pure queue (`outbox`) and the task that carries it (`link`).

pub(crate) mod link;
pub mod outbox;
pub(crate) mod seek;
