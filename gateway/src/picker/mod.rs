//! Endpoint picker for Envoy, after the Gateway API Inference Extension, protocol 1.0.0.
//!
//! Envoy opens one stream for each HTTP request, and receives on it the endpoint for the request.
//! Data flows one way:
//! - `service.rs` passes Envoy's messages to `exchange.rs`, a state machine without I/O.
//! - `pick.rs` picks an endpoint for the exchange, through the router in this process.
//! - `messages.rs` builds the messages to Envoy, and `response.rs` scans the engine's response.
//!
//! Not here: forwarding, which Envoy does, and reading the prompt (`crate::prompt`).

mod config;
mod exchange;
mod head;
mod health;
mod messages;
mod metrics;
mod pick;
mod response;
mod server;
mod service;

pub use config::PickerConfig;
pub use server::PickerError;

pub(crate) use server::{PickerServer, serve};

#[cfg(test)]
mod exchange_tests;
