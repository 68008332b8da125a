//! The router's view: the published index (replicated), and load, links and GPU residency of
//! instances (ephemeral).
//!
//! Reads are answered from here without touching the log. Not here: changes of the index
//! (`crate::raft::state_machine`) and decisions (`kv_core::schedule`).

pub(crate) mod decision_log;
pub(crate) mod fleet;
pub(crate) mod holders;
pub(crate) mod links;
pub(crate) mod merged_runs;
pub(crate) mod published;
pub(crate) mod recent_drops;
pub(crate) mod residency;
