//! Comparisons of kvfleet with other systems in virtual time: their routers and eviction policies,
//! and the documents about them.
//!
//! The program `kvfleet-lab` runs them; no other program links this crate. Not here: the simulated
//! fleet and caches (`sim/`), the production scheduler and policies (`core/`), benches of speed
//! (`benches/`).

pub mod args;
pub mod commands;
pub mod evict;
pub mod join;
pub mod policies;
pub mod routers;
