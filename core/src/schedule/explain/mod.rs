//! Decisions and why they are as they are: reasons, rejections, and why blocks were missing.
//!
//! Not here: how a decision is reached (`schedule/mod.rs`).

pub(in crate::schedule) mod decision;
pub(in crate::schedule) mod miss_reason;
pub(in crate::schedule) mod reasons;
