//! A storage node: serves and saves KV blocks from DRAM, SSD and GPU memory, and announces them to
//! the routers.
//!
//! [`Node::start`] assembles the parts: `store` (the task that owns the tier book) over `arena`
//! (DRAM) and `tiers` (SSD, GPU), `block_service` (block path), `server` (control calls),
//! `announce` (the routers), `copies` and `drain` (other nodes).
//!
//! Not here: placement and eviction decisions (`kv_core::tier`), and consensus (`kvfleet-router`).

pub mod announce;
pub mod arena;
mod block_service;
pub mod config;
pub mod copies;
mod drain;
mod host;
mod layerwise;
mod listen;
mod low_latency;
mod membership;
pub mod memory;
mod metrics;
mod rdma;
mod scope;
pub mod server;
mod start;
pub mod store;
pub mod tiers;

pub use block_service::{FETCH_TIME_MAX, REQUEST_BLOCKS_MAX, SAVE_SLOT_WAIT};
pub use config::{
    ConfigError, NodeConfig, QuotaSection, RdmaSection, ShmPeerSection, ShmSection, TlsSection,
};
pub use drain::DrainReport;
pub use listen::ListenError;
pub use membership::Membership;
pub use start::{Node, NodeFailed, StartError};
