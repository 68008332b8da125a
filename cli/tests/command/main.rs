//! The built `kvfleet` binary from outside: clusters of real processes that are replayed on, broken,
//! interrupted and given nonsense.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod crosscheck;
mod doors;
mod lifecycle;
mod links;
mod prefill;
mod probes;
mod replay;
mod restart;
mod support;
mod trace;
mod transport;
mod weights;
mod why;
