//! Files of a process: their permissions, and the limit of open ones, connections included.
//!
//! Not here: how the limit is divided (`net/src/tls/listen/mod.rs`, `net/src/accept_limits.rs`), which
//! is read when a service starts to listen.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};

/// Permission bits for users that are neither the owner nor in the directory's group.
const OTHERS: u32 = 0o007;

/// Makes new files of this process private to its user: they hold KV of prompts, and the state of
/// the cluster.
pub(super) fn keep_private() {
    umask(Mode::RWXG | Mode::RWXO);
}

/// Refuses a data directory that all users of the host can enter.
///
/// # Errors
/// Says how to change the directory.
pub(super) fn require_private(data_dir: &Path) -> anyhow::Result<()> {
    let Ok(found) = std::fs::metadata(data_dir) else { return Ok(()) };
    let mode = found.permissions().mode() & 0o7777;
    anyhow::ensure!(
        mode & OTHERS == 0,
        "data_dir {} is open to all users of this host (mode {mode:04o}), and it holds the KV of prompts; \
         run: chmod o-rwx {}",
        data_dir.display(),
        data_dir.display()
    );
    Ok(())
}

/// Raises the soft limit to the hard one. The soft limit is usually 1024, for programs with
/// fixed-size descriptor sets, which this one does not use.
pub(super) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(?current, ?maximum, "raised the limit of open files"),
        Err(cause) => tracing::warn!(%cause, ?current, ?maximum, "cannot raise the limit of open files"),
    }
}
