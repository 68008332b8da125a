//! Limits of servers that follow from the process's open-file limit: the number of connections, and
//! how often a failed accept is logged.
//!
//! Not here: the servers (`tls/listen.rs`, and the block servers in `kvfleet-transport`).

use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::time::Instant;

/// Shortest time between two warnings about failed accepts. Clients can cause these failures at
/// will.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The number of connections that a server keeps: at most `connections_max`, and at most one
/// `share`th of the process's current open-file limit.
#[must_use]
pub fn connection_limit(connections_max: usize, share: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    files.map_or(connections_max, |files| connections_max.min(files / share))
}

/// Rate limit for warnings about failed accepts.
#[derive(Debug, Default)]
pub struct AcceptWarnings {
    last_warned: Option<Instant>,
}

impl AcceptWarnings {
    /// Whether to warn now; if so, the warning counts as given.
    pub fn should_warn(&mut self) -> bool {
        let is_due = self.last_warned.is_none_or(|said| said.elapsed() >= WARN_INTERVAL);
        if is_due {
            self.last_warned = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn accept_failures_are_logged_once_a_minute() {
        let mut refused = AcceptWarnings::default();
        let mut said = 0;
        for _ in 0..3 * 60 * 20 {
            said += usize::from(refused.should_warn());
            tokio::time::advance(Duration::from_millis(50)).await;
        }
        assert_eq!(said, 3);
    }
}
