//! Every decision of kvfleet, pure: no clock, no thread, no file, no socket, no randomly seeded map.
//! Time, chance and identity come in as arguments; commands go out as values.
//!
//! Not here: anything that can wait, fail for a reason outside the program, or be observed.

pub mod classes;
pub mod cpu;
pub mod evict;
pub mod id;
pub mod index;
pub mod lend;
pub mod math;
pub mod pipeline;
pub mod place;
pub mod prefix;
pub mod schedule;
pub mod tier;
