//! Where the KV of a prefix comes from and how long it takes: links, their measured speeds, and the choice of nodes.
//!
//! Not here: what the rest costs to compute (`predict/`).

pub(in crate::schedule) mod link;
pub(in crate::schedule) mod link_stats;
pub(in crate::schedule) mod planner_cache;
pub(in crate::schedule) mod replication_gain;
pub(in crate::schedule) mod source_choice;
