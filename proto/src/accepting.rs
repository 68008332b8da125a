//! What servers know of the files that their process may have open: how many connections that allows, and how often it
//! is said that the system gives none.
//!
//! Not here: the servers (`tls/listen.rs`, and those of blocks in `kvfleet-transport`).

use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::time::Instant;

/// How often it is said that the system gives no connections: whoever connects may bring that about at will.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// Connections that a server keeps, of those that it may, where they get one `share`th of the files that the process may have open now.
#[must_use]
pub fn connections_within(connections_max: usize, share: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    files.map_or(connections_max, |files| connections_max.min(files / share))
}

/// When it was last said that the system gives no connections.
#[derive(Debug, Default)]
pub struct Refused {
    said: Option<Instant>,
}

impl Refused {
    /// Whether it is to be said again, which then counts as done.
    pub fn is_to_be_said(&mut self) -> bool {
        let is_due = self.said.is_none_or(|said| said.elapsed() >= SAID_EVERY);
        if is_due {
            self.said = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn that_nothing_can_be_accepted_is_said_once_a_minute() {
        let mut refused = Refused::default();
        let mut said = 0;
        for _ in 0..3 * 60 * 20 {
            said += usize::from(refused.is_to_be_said());
            tokio::time::advance(Duration::from_millis(50)).await;
        }
        assert_eq!(said, 3);
    }
}
