//! Tests of the endpoint picker: recorded messages of Envoy, hostile streams, and a real Envoy if
//! available.

mod ends;
mod engine;
mod envoy;
mod fixture;
mod http;
mod models;
mod recorded;
mod recorder;
mod streams;
