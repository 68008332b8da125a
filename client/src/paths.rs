//! Paths to nodes, opened when first needed and kept until they break.
//!
//! One dial at a time per address; others wait for it and share its outcome, a failure too: behind a dead
//! node nobody queues for a dial of his own. Not here: what runs over a path.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvfleet_transport::{Dialer, Path, PathError};
use tokio::time::Instant;

/// Paths kept. A client meets the nodes of one cluster; above this all are opened anew, so that a
/// cluster that keeps changing addresses cannot grow the table.
const PATHS_MAX: usize = 1024;

/// How long an address that could not be reached is left alone. A dead node is fenced in less than a
/// second; until then requests that still name it must not each wait for a handshake.
pub(crate) const COOL_DOWN: Duration = Duration::from_secs(1);

type Slot = Arc<tokio::sync::Mutex<State>>;

/// What is known of an address.
#[derive(Default)]
enum State {
    /// Not dialled, or broken since.
    #[default]
    Closed,
    Open(Arc<dyn Path>),
    /// Could not be reached at that time.
    Unreachable(Instant, PathError),
}

pub(crate) struct Paths {
    dialer: Arc<dyn Dialer>,
    slots: Mutex<BTreeMap<String, Slot>>,
    cool_down: Duration,
}

/// A path, and whether it was there before.
pub(crate) struct Found {
    pub(crate) path: Arc<dyn Path>,
    pub(crate) kept: bool,
}

impl Paths {
    pub(crate) fn new(dialer: Arc<dyn Dialer>, cool_down: Duration) -> Paths {
        Paths { dialer, slots: Mutex::default(), cool_down }
    }

    /// The path to `address`, dialled if there is none.
    pub(crate) async fn get(&self, address: &str) -> Result<Found, PathError> {
        let slot = self.slot(address);
        let mut slot = slot.lock().await;
        match &*slot {
            State::Open(path) => return Ok(Found { path: Arc::clone(path), kept: true }),
            State::Unreachable(since, error) if since.elapsed() < self.cool_down => return Err(error.clone()),
            State::Unreachable(..) | State::Closed => {}
        }
        match self.dialer.dial(address.to_owned()).await {
            Ok(path) => {
                *slot = State::Open(Arc::clone(&path));
                Ok(Found { path, kept: false })
            }
            Err(error) => {
                *slot = State::Unreachable(Instant::now(), error.clone());
                Err(error)
            }
        }
    }

    /// Forgets `path`, unless another took its place already.
    pub(crate) async fn forget(&self, address: &str, path: &Arc<dyn Path>) {
        self.replace(address, path, State::Closed).await;
    }

    /// Forgets `path` after `error`; a peer that went silent is left alone for a while.
    pub(crate) async fn failed(&self, address: &str, path: &Arc<dyn Path>, error: &PathError) {
        let state = match error {
            PathError::Unreachable { .. } => State::Unreachable(Instant::now(), error.clone()),
            error if is_broken(error) => State::Closed,
            _ => return,
        };
        self.replace(address, path, state).await;
    }

    async fn replace(&self, address: &str, path: &Arc<dyn Path>, state: State) {
        let slot = self.slot(address);
        let mut slot = slot.lock().await;
        if matches!(&*slot, State::Open(current) if Arc::ptr_eq(current, path)) {
            *slot = state;
        }
    }

    fn slot(&self, address: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= PATHS_MAX && !slots.contains_key(address) {
            slots.clear();
        }
        Arc::clone(slots.entry(address.to_owned()).or_default())
    }
}

/// Whether a path that said this should be opened anew.
fn is_broken(error: &PathError) -> bool {
    !matches!(error, PathError::TooLarge { .. })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kvfleet_transport::BoxFuture;
    use tokio::sync::Semaphore;

    use super::*;

    /// Finds out that nobody is there, once it is let.
    struct Deaf {
        dials: AtomicUsize,
        may_fail: Semaphore,
    }

    impl Dialer for Deaf {
        fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
            self.dials.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                let _permit = self.may_fail.acquire().await;
                Err(PathError::Unreachable { peer: address, cause: "nobody answers".to_owned() })
            })
        }
    }

    fn deaf(permits: usize, cool_down: Duration) -> (Arc<Deaf>, Arc<Paths>) {
        let deaf = Arc::new(Deaf { dials: AtomicUsize::new(0), may_fail: Semaphore::new(permits) });
        let paths = Paths::new(deaf.clone(), cool_down);
        (deaf, Arc::new(paths))
    }

    #[tokio::test]
    async fn everyone_behind_a_dead_node_shares_one_failed_dial() {
        let (deaf, paths) = deaf(0, Duration::from_secs(3600));
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let paths = Arc::clone(&paths);
            waiting.spawn(async move { paths.get("node:1").await.is_err() });
        }
        while deaf.dials.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        deaf.may_fail.add_permits(1);
        assert!(waiting.join_all().await.into_iter().all(|failed| failed));
        assert_eq!(deaf.dials.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn after_the_cool_down_it_is_dialled_again() {
        let (deaf, paths) = deaf(1, Duration::ZERO);
        assert!(paths.get("node:1").await.is_err());
        assert!(paths.get("node:1").await.is_err());
        assert_eq!(deaf.dials.load(Ordering::Relaxed), 2);
    }
}
