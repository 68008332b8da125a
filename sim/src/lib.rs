//! Request traces: read, generate, characterise, and replay in virtual time on the production policies of
//! `kv-core`. No second copy of a policy exists here.
//!
//! Not here: files (readers take any `BufRead`), wall clocks, plots, a running cluster (the `kvfleet`
//! command has those), and comparisons with other routers and policies (`lab/`).

pub mod cache;
pub mod fleet;
pub mod generate;
pub mod ids;
pub mod routers;
pub mod stats;
pub mod tiers;
pub mod trace;
