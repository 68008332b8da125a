//! What this router knows: the published index (replicated), and the load, links and GPU memory of instances (soft).
//!
//! Reads are answered from here and never touch the log. Not here: who changes the index
//! (`crate::raft::state_machine`) and who decides (`kv_core::schedule`).

pub(crate) mod departed;
pub(crate) mod fleet;
pub(crate) mod holders;
pub(crate) mod links;
pub(crate) mod planes;
pub(crate) mod published;
pub(crate) mod recall;
pub(crate) mod residency;
