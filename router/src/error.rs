//! Errors that stop a router from starting; each text says what to do.
//!
//! Not here: errors of single calls, which go to the caller.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::ConfigError;
use crate::raft::log::LogError;
use crate::raft::snapshot_file::SnapshotFileError;

/// The reason why [`crate::Router::start`] failed. No task keeps running after a failure.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A certificate file is missing, unreadable or invalid.
    #[error("router certificates: {0}")]
    Tls(#[from] kvfleet_net::tls::TlsError),
    /// The listen address is in use.
    #[error(
        "{listen} is in use by another process: stop it, or set `listen` to a free port and `voters` to match"
    )]
    PortInUse {
        /// The address.
        listen: String,
    },
    /// The listen address is unavailable for another reason.
    #[error(
        "cannot listen on {listen}: {source}; check that the address belongs to this machine and the port is allowed"
    )]
    Listen {
        /// The address.
        listen: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// A port for engines that dial the router is unavailable.
    #[error("cannot listen on {address} for engines: {source}; choose another `engines.listen`")]
    EnginesListen {
        /// The address.
        address: SocketAddr,
        /// The operating system's error.
        source: io::Error,
    },
    /// The data directory cannot be created.
    #[error(
        "data directory {path} cannot be made: {source}; check `data_dir` and its permissions",
        path = path.display()
    )]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The Raft log is invalid.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The Raft log is corrupted or missing, so the router must rejoin as a new member.
    #[error(
        "{log}. While the other routers are healthy: run `kvfleet members remove {router}`, move {directory} \
         away, start this router with `join = true`, and run `kvfleet members add {router} {address}`",
        directory = directory.display()
    )]
    LostLog {
        /// The log's error.
        log: Box<LogError>,
        /// Number of this router.
        router: u64,
        /// Its data directory.
        directory: PathBuf,
        /// Address at which the other routers reach this one.
        address: String,
    },
    /// The Raft log is corrupted or missing, and no other router has a copy.
    #[error(
        "{log}; it is the only voter, and no other router has a copy: restore its data directory from a \
         copy, or start a new cluster with an empty one"
    )]
    LostCluster {
        /// The log's error.
        log: Box<LogError>,
    },
    /// The snapshot is invalid.
    #[error(transparent)]
    Snapshot(#[from] SnapshotFileError),
    /// The metrics registry already holds a router.
    #[error("metrics: {0}; give every router of a process its own registry")]
    Metrics(#[from] prometheus::Error),
    /// Consensus did not start.
    #[error("consensus did not start: {0}")]
    Consensus(String),
}
