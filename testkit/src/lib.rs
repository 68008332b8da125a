//! Clusters and ports for tests: routers in this process with a fake node, and addresses that are free.
//!
//! Not here: anything a program links. A test that cannot go on panics, so this crate may unwrap.
#![allow(missing_docs, clippy::unwrap_used)]

pub mod cluster;
pub mod ports;
