//! Layers that are loaded and computed side by side, after CachedAttention (USENIX ATC '24, P2).
//! Pure: the caller supplies the time, in nanoseconds from any origin, and moves the bytes.
//!
//! `preload.rs` sizes the read buffer and orders the slices. `deadline.rs` decides at each moment
//! whether compute waits for missing blocks or recomputes them
//! (`docs/adr/0035-bounded-waiting-for-kv.md`), with the rate of `rate.rs`.
//!
//! Not here: which blocks are fetched from which source ([`crate::schedule`]), saves and their
//! write buffer (the client's queue of background saves), bytes, and threads.

mod deadline;
mod preload;
mod rate;
#[cfg(test)]
mod tests;

pub use deadline::{ArrivalOrder, ComputeCosts, LoadComputeOverlap, NextAction, WAIT_SHARE, WAIT_TICKS};
pub use preload::{Preload, PreloadWork, SliceSlot};
pub use rate::ArrivalRate;

/// Nanoseconds of a second.
const NS_PER_S: u128 = 1_000_000_000;
