//! Tests of the gateway over real connections, with a real router in this process. They form one
//! program, because each test program links the whole product.
//!
//! Not here: the test cluster (the router's own tests, `router/tests/cluster`).
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

#[allow(dead_code, reason = "the router's own tests use the rest")]
mod openai;
mod picker;
