//! Every decision of kvfleet, as pure code: no clock, thread, file, socket or randomly seeded map.
//! Time, randomness and identity come in as arguments; commands go out as values.
//!
//! Not here: anything that waits, fails for a reason outside the program, or can be observed. Nor
//! unsafe code: instructions without a counterpart in the language are in `cpu/`.
#![forbid(unsafe_code)]

pub mod content;
pub mod evict;
pub mod id;
pub mod index;
pub mod lease_grant;
pub mod math;
pub mod pipeline;
pub mod place;
pub mod prefix;
pub mod schedule;
pub mod tier;
pub mod traffic_class;
