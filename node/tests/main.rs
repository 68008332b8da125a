//! A node as seen from outside: real connections, with a router and clients played by the tests.
//! One test program, because each would link the whole product.
//!
//! Not here: the fixture (`world`), and nodes with a real router (`chaos-tests`).
#![allow(clippy::unwrap_used, unreachable_pub)]

mod announcing;
mod copies;
mod draining;
#[cfg(feature = "gpu")]
mod gpu;
mod killed;
mod paths;
mod serving;
mod shm;
mod silence;
mod tenants;
mod weights;
mod windows;
mod world;
