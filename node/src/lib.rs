//! A storage node: serves and saves KV blocks from DRAM and SSD, and tells the routers what it holds.
//!
//! [`Node::start`] puts the parts together: `store` (the one task that owns the tier book) over `arena`
//! (DRAM) and `tiers` (SSD), `serve` (block path), `server` (control calls), `announce` (the routers), `copies` and `evacuate`
//! (other nodes).
//! Not here: decisions (`kv_core::tier`), and anything that votes.

pub mod announce;
pub mod arena;
pub mod config;
pub mod copies;
mod evacuate;
mod host;
mod layered;
mod listen;
pub mod memory;
mod metrics;
mod quick;
mod rdma;
mod scope;
mod serve;
pub mod server;
mod standing;
mod start;
pub mod store;
#[cfg(test)]
#[path = "../tests/world/log.rs"]
mod test_log;
pub mod tiers;

pub use config::{
    ConfigError, NodeConfig, QuotaSection, RdmaSection, ShmPeerSection, ShmSection, TlsSection,
};
pub use evacuate::Evacuated;
pub use listen::ListenError;
pub use serve::{FETCH_TIME_MAX, REQUEST_BLOCKS_MAX, SAVE_ROOM_WAIT};
pub use standing::Standing;
pub use start::{Node, NodeFailed, StartError};
