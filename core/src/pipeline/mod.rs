//! Layers that are loaded and computed side by side, after CachedAttention (USENIX ATC '24, P2). Pure: whoever
//! drives it brings the time, in nanoseconds from an origin of his own, and moves the bytes.
//!
//! `preload.rs` sizes the read buffer and says in which order slices come; `deadline.rs` decides at each moment whether
//! compute waits for what has not come or computes it (`docs/adr/0035-wait-or-recompute.md`), with the rate of `rate.rs`.
//!
//! Not here: which blocks are fetched from whom ([`crate::schedule`]), saves and their write buffer (the client's queue of
//! background saves), bytes, and threads.

mod deadline;
mod preload;
mod rate;
#[cfg(test)]
mod tests;

pub use deadline::{Arrive, Costs, GRAINS, Next, Race, WAIT_SHARE};
pub use preload::{Preload, PreloadWork, Slot};
pub use rate::Rate;

/// Nanoseconds of a second.
const NS_PER_S: u128 = 1_000_000_000;
