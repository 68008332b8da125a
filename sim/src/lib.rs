//! Request traces: read, generate, characterise, and replay in virtual time on the production policies of
//! `kv-core`. No second copy of a policy exists here.
//!
//! Not here: files (readers take any `BufRead`), wall clocks, plots, a running cluster (the `kvfleet`
//! command has those).

pub mod cache;
pub mod fleet;
pub mod generate;
mod ids;
pub mod join;
pub mod policies;
pub mod routers;
pub mod stats;
pub mod tiers;
pub mod trace;
