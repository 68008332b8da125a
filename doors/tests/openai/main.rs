//! The OpenAI-compatible door over real connections: a router in this process, engines of our own that answer as a test says, and callers.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod answers;
mod engine;
mod failures;
#[allow(dead_code, reason = "the router's own tests use the rest")]
#[path = "../../../router/tests/cluster/harness.rs"]
mod harness;
mod house;
mod limits;
#[path = "../../../router/tests/cluster/ports.rs"]
mod ports;
mod prompts;
