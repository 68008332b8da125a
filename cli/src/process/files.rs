//! How many files a process may have open, connections among them: as many as whoever started it allows.
//!
//! Not here: what they are divided among (`proto/src/tls/listen.rs`, `proto/src/accepting.rs`), which is read when a
//! service begins to listen.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit to the hard one. The soft one is low (1024, most often) for programs that keep such numbers in
/// sets of a fixed size, and nothing here does.
pub(super) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(?current, ?maximum, "the limit of open files is raised"),
        Err(cause) => tracing::warn!(%cause, ?current, ?maximum, "the limit of open files stays as it is"),
    }
}
