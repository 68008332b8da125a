//! Errors of opening a log.
//!
//! Not here: their remedy in the cluster (`crate::raft::boot`).

use std::io;
use std::path::{Path, PathBuf};

use super::frame::FORMAT;

/// Error of opening a log file.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A record does not match its checksum, or a required one is missing.
    #[error(
        "raft log {path} is corrupted: {what}. This router refuses to start because it can no longer prove its \
         acknowledgements and its votes"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The record, and its problem.
        what: String,
    },
    /// The file belongs to another router.
    #[error(
        "raft log {path} belongs to router {found}, this is router {wanted}: correct `id` or `data_dir` in the config"
    )]
    OtherRouter {
        /// The file.
        path: PathBuf,
        /// The router that owns it.
        found: u64,
        /// This router.
        wanted: u64,
    },
    /// The file belongs to another cluster, or to one with another number of shards.
    #[error(
        "raft log {path} is of cluster {found:?} with {found_shards} shards, the config says cluster {wanted:?} with \
         {wanted_shards}: correct `cluster` and `shards`, which never change after the first start, or name an empty \
         data_dir"
    )]
    OtherCluster {
        /// The file.
        path: PathBuf,
        /// Its cluster.
        found: String,
        /// Its shards.
        found_shards: u16,
        /// The cluster of the config.
        wanted: String,
        /// The shards of the config.
        wanted_shards: u16,
    },
    /// The record layout belongs to another release.
    #[error(
        "raft log {path} has format {found}, this release reads {FORMAT}: start the release that wrote it, \
         or make this router a new member: run `kvfleet members remove`, move its data_dir away, start it \
         with `join = true`, and run `kvfleet members add`"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format number.
        found: u64,
    },
    /// Another process has the file open.
    #[error(
        "raft log {path} is in use by another process: stop the other router or give this one its own data_dir"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A file system error.
    #[error("raft log {path} cannot be opened: {source}; check that the directory exists and is writable")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

pub(super) fn corrupt(path: &Path, what: impl Into<String>) -> LogError {
    LogError::Corrupt { path: path.to_owned(), what: what.into() }
}
