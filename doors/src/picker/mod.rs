//! The door for Envoy: an endpoint picker after the Gateway API Inference Extension, protocol 1.0.0.
//!
//! Envoy opens one stream for each HTTP request, and is told on it to which engine the request goes. Data flows one way: `service.rs` feeds what
//! Envoy says to `exchange.rs`, a state machine without input or output; what that asks is answered by `pick.rs`, from the router in this
//! process; `words.rs` makes Envoy's words of it, and `answer.rs` sees how a response ends. Not here: the request itself, which Envoy sends, and which prompt it has (`crate::prompt`).

mod answer;
mod config;
mod exchange;
mod head;
mod health;
mod metrics;
mod pick;
mod server;
mod service;
mod words;

pub use config::PickerConfig;
pub use server::OpenError;

pub(crate) use server::{Open, serve};

#[cfg(test)]
mod exchange_tests;
