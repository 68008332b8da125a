//! Fault-injection suites: they kill processes and check invariants.
//!
//! A seed gives a plan ([`workload`]). The plan runs against real router processes ([`cluster`])
//! with fake nodes that only announce ([`fake_node`]). Every acknowledged fact goes to the
//! [`oracle`], and the [`invariants`] compare it with the routers' answers. Not here: tests of a
//! single crate.

pub mod cluster;
pub mod decisions;
pub mod drive;
pub mod invariants;
pub mod oracle;
pub mod pins;

pub mod fake_node;
pub mod seed;
pub mod waiting;
pub mod workload;
