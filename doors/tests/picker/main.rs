//! The door of Envoy over real connections and a real router: what an Envoy said, hostile streams, and, where one is at hand, Envoy itself.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod door;
mod engine;
mod envoy;
mod http;
mod recorded;
mod streams;
mod tap;

#[path = "../../../router/tests/cluster/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "../../../router/tests/cluster/ports.rs"]
mod ports;
