//! What suites on real router processes wait for: a state, with a limit that only a hang reaches.
//!
//! Not here: what must hold of it in the end (`invariants/`).

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::cluster::Contacts;

/// A hang, on any machine this runs on.
pub const HANG: Duration = Duration::from_secs(60);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until `probe` gives something.
///
/// # Panics
/// When it gives nothing for [`HANG`].
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

/// Waits until the routers at these positions have applied the same, and compares their states.
///
/// # Panics
/// When they differ, have applied nothing, or do not get level for [`HANG`].
pub async fn until_equal(contacts: &Contacts, positions: &[usize]) {
    let levels = until("level routers", || async {
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
