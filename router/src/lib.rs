//! The global scheduler: serves route calls and holds the Raft-replicated index.
//!
//! [`Router::start`] builds one router from its config: log and snapshot from disk, consensus with the other
//! voters, the control server. Reads are answered by every replica from its published view; writes go
//! through the leader's log. Not here: block bytes (they never pass a router), reading config files, the
//! metrics endpoint (both the process's).

mod background;
mod balance;
mod clock;
pub mod config;
mod copies;
mod desk;
mod directives;
mod engines;
mod error;
mod fits;
mod groups;
mod ingest;
mod liveness;
mod manifests;
mod metrics;
mod pin_ends;
mod raft;
mod retire;
mod server;
mod shares;
mod start;
mod truth;
mod view;
mod windows;

// Tests that must reach into a running router use the cluster of the tests that do not.
#[cfg(test)]
extern crate self as kvfleet_router;
#[cfg(test)]
#[path = "../tests/cluster/harness.rs"]
#[allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]
mod harness;
#[cfg(test)]
#[path = "../tests/cluster/ports.rs"]
#[allow(missing_docs, unreachable_pub)]
mod ports;

pub use config::{
    AdmissionConfig, AnnounceConfig, ConfigError, DialectConfig, EngineConfig, EngineTenantConfig,
    EnginesConfig, HotCopiesConfig, RouterConfig, TenantWeightConfig, TimingsConfig, TlsConfig, TruthConfig,
    VoterConfig,
};
pub use desk::Desk;
pub use engines::FollowError;
#[cfg(feature = "probe")]
pub use engines::probe::Listener;
pub use engines::tenants::Tenants;
pub use error::StartError;
pub use raft::log::LogError;
#[cfg(feature = "probe")]
pub use raft::probe::Replica;
pub use raft::snapshot_file::SnapshotFileError;
pub use server::route::Besides;
pub use start::Router;
