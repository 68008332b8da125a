//! The stand-in engine: fetches and saves as an engine would, and accounts compute instead of doing it.
//!
//! What it answers is measured (bytes, hits, times of fetch and save) except for what carries
//! "modelled" in its name. Not here: choosing where a request runs (router), and a real model.

mod blocks;
mod config;
mod load;
mod metrics;
mod openai;
mod prefill;
mod report;
mod request;
mod saving;
mod serve;
mod shares;
mod start;
mod turns;

pub use config::{InstanceConfig, OpenAiSection, RdmaSection, ShmSection, TlsPaths};
pub use start::{Instance, StartError};
