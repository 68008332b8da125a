//! The bench harness: runs our side and a peer's side by side and states the outcome as a ratio.
//!
//! Not here: what is measured (one file per claim beside `main.rs`) and how tables become a document
//! (`cargo xtask bench`). Absolute figures of a shared machine mean little; both sides run in the same
//! process, in alternating order, and the ratio of each run counts.

mod chain;
mod clock;
mod measure;
mod row;
pub mod ssd_tier;

pub use chain::next_hash;
pub use clock::{Spent, spend, thread_cpu_time};
pub use measure::{Outcome, RUNS_MIN, median, outcome, side_by_side, sorted};
pub use row::{Better, Row, figure, table};
