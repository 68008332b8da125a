//! Why a router did not start, in words that say what to do.
//!
//! Not here: errors of single calls; those are answered to the caller.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::ConfigError;
use crate::raft::log::LogError;
use crate::raft::snapshot_file::SnapshotFileError;

/// Why [`crate::Router::start`] failed. Nothing keeps running after it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A certificate file is missing, unreadable or not what it should be.
    #[error("router certificates: {0}")]
    Tls(#[from] kvfleet_proto::tls::TlsError),
    /// The listen address is taken.
    #[error(
        "{listen} is in use by another process: stop it, or set `listen` to a free port and `voters` to match"
    )]
    PortInUse {
        /// The address.
        listen: String,
    },
    /// The listen address cannot be had for another reason.
    #[error(
        "cannot listen on {listen}: {source}; check that the address belongs to this machine and the port is allowed"
    )]
    Listen {
        /// The address.
        listen: String,
        /// What the system said.
        source: io::Error,
    },
    /// A port for engines that dial cannot be had.
    #[error("cannot listen on {address} for engines: {source}; choose another `engines.listen`")]
    EnginesListen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The data directory cannot be made.
    #[error("data directory {path} cannot be made: {source}; check `data_dir` and its permissions", path = path.display())]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The Raft log was refused.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The Raft log is corrupted or gone: the router must become a new member.
    #[error(
        "{log}. While the other routers are healthy: run `kvfleet members remove {router}`, move {directory} away, start \
         this router with `join = true`, and run `kvfleet members add {router} {address}`", directory = directory.display()
    )]
    LostLog {
        /// What is wrong with it.
        log: Box<LogError>,
        /// Number of this router.
        router: u64,
        /// Its data directory.
        directory: PathBuf,
        /// Where the others reach it.
        address: String,
    },
    /// The Raft log is corrupted or gone, and there is no other router.
    #[error(
        "{log}; it is the only voter, and nobody else has it: restore its data directory from a copy, or start a new \
         cluster with an empty one"
    )]
    LostCluster {
        /// What is wrong with it.
        log: Box<LogError>,
    },
    /// The snapshot was refused.
    #[error(transparent)]
    Snapshot(#[from] SnapshotFileError),
    /// The metrics registry already holds a router.
    #[error("metrics: {0}; give every router of a process its own registry")]
    Metrics(#[from] prometheus::Error),
    /// Consensus did not start.
    #[error("consensus did not start: {0}")]
    Consensus(String),
}
