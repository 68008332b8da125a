//! The order of requests that wait: deadlines and the shares of tenants.
//!
//! Not here: rejection (`admission/`).

pub(in crate::schedule) mod fair_queue;
pub(in crate::schedule) mod priority_deadline;
