//! The doors over real connections and a real router in this process. One program, as each is linked with all of the product.
//!
//! Not here: what both stand in (the router's own tests, `router/tests/cluster`).
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

#[allow(dead_code, reason = "the router's own tests use the rest")]
#[path = "../../router/tests/cluster/harness.rs"]
mod harness;
mod openai;
mod picker;
#[path = "../../router/tests/cluster/ports.rs"]
mod ports;
