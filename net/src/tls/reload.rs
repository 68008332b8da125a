//! Reloads a process's certificate files while it runs.
//!
//! Existing connections keep their certificate until it ends or is revoked. Not here: which
//! certificates are accepted (`renew.rs`).

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::{Renewal, RenewalOutcome};

/// Default interval between two checks of the files. Short against a certificate's last hours, and
/// cheap.
pub const RENEW_INTERVAL: Duration = Duration::from_secs(10);

/// Renews the certificate from its files until dropped, and logs every change.
pub async fn keep_renewed(mut renewal: Renewal, every: Duration) {
    let mut ticks = interval(every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Files may lie on a network: only this task waits for them.
        let looked = tokio::task::spawn_blocking(move || {
            let look = renewal.check();
            (look, renewal)
        });
        let Ok((look, again)) = looked.await else {
            tracing::error!("the check of the certificate files crashed: they are no longer renewed");
            return;
        };
        renewal = again;
        log(look);
    }
}

fn log(look: RenewalOutcome) {
    match look {
        RenewalOutcome::Unchanged => {}
        RenewalOutcome::Renewed => {
            tracing::info!("a new certificate, or a new list of revoked ones, is in force");
        }
        RenewalOutcome::Rejected(error) => {
            tracing::warn!(%error, "certificate files cannot be used, the old one is kept");
        }
    }
}
