//! The client against loopback nodes with faults, and against fake routers over mutual TLS.
#![allow(clippy::unwrap_used)]

mod authority;
mod completions;
mod fetching;
mod layer_saves;
mod layers;
mod prefill;
mod reporting;
mod routing;
mod saving;
mod slices;
mod streams;
mod transport;
