//! Engines that use the client as vLLM does.
//!
//! Today: a mock engine, which accounts compute instead of doing it. Not here: the client itself (`client/`) and the
//! choice of an instance (`router/`).

pub mod mock;
