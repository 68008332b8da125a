//! Suites that kill things on purpose, and what must be true whatever they kill.
//!
//! A seed gives a plan ([`workload`]); the plan runs against real router processes ([`cluster`]) with
//! stand-in nodes that only announce ([`speaker`]); every acknowledged fact goes to the [`oracle`]; the
//! [`invariants`] compare it with what the routers say. Not here: tests of one crate alone.

pub mod certificates;
pub mod cluster;
pub mod decisions;
pub mod drive;
pub mod invariants;
pub mod oracle;
pub mod pins;
#[path = "../../router/tests/cluster/ports.rs"]
pub mod ports;
pub mod seed;
pub mod speaker;
pub mod waiting;
pub mod workload;
