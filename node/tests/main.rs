//! A node as others see it: over real connections, with a router and clients that the tests play. One program, as each is linked with all of
//! the product.
//!
//! Not here: what they stand in (`world`), and nodes behind a real router (`chaos-tests`).
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
