//! Waiting in suites on real router processes: for a state, with a limit that only a hang reaches.
//!
//! Not here: the final properties (`invariants/`).

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::cluster::RouterClients;

/// Longer than any wait on any machine in use, except a hang.
pub const HANG: Duration = Duration::from_secs(60);

/// Interval between checks.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until `probe` returns a value.
///
/// # Panics
/// If it returns `None` for [`HANG`].
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut probe: impl FnMut() -> F) -> T {
    let deadline = Instant::now() + HANG;
    loop {
        if let Some(found) = probe().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {HANG:?} for: {what}");
        sleep(PAUSE).await;
    }
}

/// Waits until the routers at these positions have applied the same entry, and compares their
/// states.
///
/// # Panics
/// If they differ, have applied no entry, or do not reach the same entry within [`HANG`].
pub async fn until_equal(contacts: &RouterClients, positions: &[usize]) {
    let levels = until("routers with the same applied entry", || async {
        let mut levels = Vec::new();
        for position in positions {
            let groups = contacts.status(*position).await?.groups;
            levels.push(groups.into_iter().map(|one| (one.applied_index, one.digest)).collect::<Vec<_>>());
        }
        let applied = |level: &[(u64, Vec<u8>)]| level.iter().map(|one| one.0).collect::<Vec<_>>();
        levels.iter().all(|level| applied(level) == applied(&levels[0])).then_some(levels)
    })
    .await;
    assert!(levels.iter().flatten().any(|(applied, _)| *applied > 0), "{levels:?}");
    assert!(levels.iter().all(|level| *level == levels[0]), "replicas differ: {levels:?}");
}
