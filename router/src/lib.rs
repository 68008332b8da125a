//! The global scheduler: answers route calls and holds the Raft-replicated index.
//!
//! [`Router::start`] builds one router from its configuration: it loads log and snapshot from disk,
//! joins consensus with the other voters, and opens the control server. Every replica answers reads
//! from its published view. Writes go through the leader's log. Not here: block bytes (they never
//! pass a router), reading configuration files and serving the metrics endpoint (both are the process's job).

mod anti_entropy;
mod background;
mod balance;
mod clock;
pub mod config;
mod copies;
mod directives;
mod engines;
mod error;
mod fleet_reuse_stats;
mod groups;
mod handle;
mod ingest;
mod liveness;
mod manifests;
mod metrics;
mod pin_expiry;
mod raft;
mod retire;
mod server;
mod start;
mod tenant_shares;
mod view;
mod windows;

pub use config::{
    AdmissionConfig, AnnounceConfig, AntiEntropyConfig, ConfigError, DialectConfig, EngineConfig,
    EngineTenantConfig, EnginesConfig, HotCopiesConfig, RouterConfig, TenantWeightConfig, TimingsConfig,
    TlsConfig, VoterConfig,
};
pub use engines::FollowError;
#[cfg(feature = "probe")]
pub use engines::probe::RankProbe;
pub use engines::tenants::Tenants;
pub use error::StartError;
pub use handle::RouterHandle;
pub use raft::log::LogError;
#[cfg(feature = "probe")]
pub use raft::probe::ReplicaProbe;
pub use raft::snapshot_file::SnapshotFileError;
pub use server::route::RouteHints;
pub use start::Router;
