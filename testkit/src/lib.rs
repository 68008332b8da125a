//! Clusters, certificates and ports for tests: routers in this process with a fake node, certificates
//! of every role, and addresses that are free.
//!
//! Not here: anything a program links. A test that cannot go on panics, so this crate may unwrap.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;

pub mod certificates;
pub mod cluster;
pub mod ports;

/// Writes a file that only its owner can read, as files of secrets must be.
pub fn write_secret(path: &std::path::Path, text: &str) {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}
