//! Three routers over real connections: agreement, failover, restarts, nodes that come and go, and bad input.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod agreement;
mod bad_input;
mod bursts;
mod copies;
mod engines;
mod harness;
mod hot;
mod identities;
mod learnt;
mod links;
mod moved;
mod nodes;
mod pace;
mod ports;
mod residency;
mod restarts;
mod runs_there;
mod shards;
mod streams;
mod tenants;
mod truth;
mod weights;
mod why;
mod windows;
