//! Limit of open files, including connections: raised to the hard limit of the process.
//!
//! Not here: how the limit is divided (`net/src/tls/listen/mod.rs`, `net/src/accept_limits.rs`), which
//! is read when a service starts to listen.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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
