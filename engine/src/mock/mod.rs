//! Mock engine: it fetches and saves real bytes as an engine would, and models compute.
//!
//! Its answers are measured (bytes, hits, times of fetch and save), except for fields with
//! "modelled" in their name. Not here: choosing an instance (router), and a real model.

mod accelerator_queue;
mod blocks;
mod config;
mod load;
mod metrics;
mod openai;
mod prefill;
mod report;
mod request;
mod serve;
mod start;
mod streamed_save;
mod tenant_limits;

pub use config::{InstanceConfig, OpenAiSection, RdmaSection, ShmSection, TlsPaths};
pub use start::{Instance, StartError};
