//! Which requests to reject when not all can meet their limits.
//!
//! Not here: the order of those that wait (`fairness/`).

pub(in crate::schedule) mod shedding;
