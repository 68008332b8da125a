//! The bench harness: runs our side and a peer's side by side and reports the outcome as a ratio.
//!
//! Not here: the measurements (one file per claim beside `main.rs`) and the document (`cargo xtask
//! bench`). Absolute figures of a shared machine mean little. Both sides run in the same process,
//! in alternating order, and the ratio of each run counts.

mod chain;
mod clock;
mod measure;
mod row;
pub mod ssd_tier;

pub use chain::next_hash;
pub use clock::{TimeSpent, measure_time, thread_cpu_time};
pub use measure::{Outcome, RUNS_MIN, median, outcome, side_by_side, sorted};
pub use row::{BenchRow, Better, format_figure, table};
