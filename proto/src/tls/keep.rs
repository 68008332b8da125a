//! Looks after the certificate files of a process while it runs.
//!
//! Connections that are there keep what they began with: a certificate that runs out during a transfer does not cut it. Not
//! here: what is taken and what is refused (`renew.rs`).

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::{Look, Renewal};

/// How often files are looked at unless said otherwise: much less than a certificate's last hours, and nothing to the machine.
pub const RENEW_EVERY: Duration = Duration::from_secs(10);

/// Keeps what is shown as the files are, until dropped, and says in the log what became of it.
pub async fn keep_renewed(mut renewal: Renewal, every: Duration) {
    let mut ticks = interval(every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Files may lie on a network: nothing else waits for them.
        let looked = tokio::task::spawn_blocking(move || {
            let look = renewal.look();
            (look, renewal)
        });
        let Ok((look, again)) = looked.await else {
            tracing::error!("looking at the certificate files ended: they are not renewed any more");
            return;
        };
        renewal = again;
        log(look);
    }
}

fn log(look: Look) {
    match look {
        Look::Same => {}
        Look::Renewed => tracing::info!("new connections show a new certificate from now on"),
        Look::Kept(error) => tracing::warn!(%error, "certificate files cannot be used, the old one is kept"),
    }
}
