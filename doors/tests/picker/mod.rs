//! The door of Envoy: what an Envoy said, hostile streams, and, where one is at hand, Envoy itself.

mod door;
mod ends;
mod engine;
mod envoy;
mod http;
mod models;
mod recorded;
mod streams;
mod tap;
