//! Paths to nodes, opened when first needed and kept until they break.
//!
//! There is one dial at a time per address, in a task of its own. All waiting requests share its
//! outcome, and a request that gives up does not cancel it. A node that was lost is not waited for
//! again under the same epoch: a background dial tries it after the cool-down. When a router names
//! it under a newer epoch, it is dialled at once. Not here: the protocol over a path, and detecting
//! a dead peer (the transport does).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use kv_core::id::Epoch;
use kvfleet_transport::{BoxFuture, Dialer, Path, PathError};
use tokio::time::Instant;

/// Paths kept. If a cluster keeps changing addresses and the table reaches this size, it is cleared
/// and paths are opened anew.
const PATHS_MAX: usize = 1024;

/// Time between two dials of a lost address. After a short stall a node is back within a second, or
/// it is fenced.
pub(crate) const COOL_DOWN: Duration = Duration::from_millis(500);

type DialResult = Result<Arc<dyn Path>, PathError>;
type Dial = Shared<BoxFuture<'static, DialResult>>;

/// State of an address.
enum PathState {
    Open(Arc<dyn Path>),
    /// The first dial is in progress; all callers wait for it.
    Dialling(Dial),
    Lost(Loss),
}

/// An address with an unreachable node.
#[derive(Clone)]
struct Loss {
    /// The epoch under which the node was requested, if known.
    epoch: Option<Epoch>,
    error: PathError,
    /// Time of the loss or of the last dial.
    since: Instant,
}

impl Loss {
    /// Whether a router has since named the node under a newer epoch.
    fn is_older_than(&self, epoch: Option<Epoch>) -> bool {
        self.epoch < epoch
    }
}

/// Clones share everything.
#[derive(Clone)]
pub(crate) struct Paths {
    dialer: Arc<dyn Dialer>,
    states: Arc<Mutex<BTreeMap<String, PathState>>>,
    cool_down: Duration,
}

/// A path, and whether it was open before.
pub(crate) struct AcquiredPath {
    pub(crate) path: Arc<dyn Path>,
    pub(crate) reused: bool,
}

impl Paths {
    pub(crate) fn new(dialer: Arc<dyn Dialer>, cool_down: Duration) -> Paths {
        Paths { dialer, states: Arc::default(), cool_down }
    }

    /// The path to the node that serves at `address` in `epoch`, dialled if there is none.
    pub(crate) async fn get(&self, address: &str, epoch: Option<Epoch>) -> Result<AcquiredPath, PathError> {
        let dial = match self.lookup(address, epoch) {
            Lookup::Ready(answer) => return answer,
            Lookup::Wait(dial) => dial,
        };
        dial.await.map(|path| AcquiredPath { path, reused: false })
    }

    fn lookup(&self, address: &str, epoch: Option<Epoch>) -> Lookup {
        let mut states = self.states();
        match states.get_mut(address) {
            Some(PathState::Open(path)) => match path.failure() {
                None => return Lookup::Ready(Ok(AcquiredPath { path: Arc::clone(path), reused: true })),
                Some(error) if is_loss(&error) => {
                    let loss = Loss { epoch, error: error.clone(), since: Instant::now() };
                    states.insert(address.to_owned(), PathState::Lost(loss));
                    return Lookup::Ready(Err(error));
                }
                Some(_) => {}
            },
            Some(PathState::Dialling(dial)) => return Lookup::Wait(dial.clone()),
            Some(PathState::Lost(loss)) if !loss.is_older_than(epoch) => {
                let error = loss.error.clone();
                if loss.since.elapsed() >= self.cool_down {
                    loss.since = Instant::now();
                    self.redial_in_background(address);
                }
                return Lookup::Ready(Err(error));
            }
            Some(PathState::Lost(_)) | None => {}
        }
        if states.len() >= PATHS_MAX && !states.contains_key(address) {
            states.clear();
        }
        let dial = self.dial(address, epoch);
        states.insert(address.to_owned(), PathState::Dialling(dial.clone()));
        Lookup::Wait(dial)
    }

    /// Dials a lost address for later requests.
    fn redial_in_background(&self, address: &str) {
        let (paths, address) = (self.clone(), address.to_owned());
        tokio::spawn(async move {
            if let Ok(path) = paths.dialer.dial(address.clone()).await {
                let mut states = paths.states();
                if matches!(states.get(&address), Some(PathState::Lost(_))) {
                    states.insert(address, PathState::Open(path));
                }
            }
        });
    }

    /// Dials in a task of its own, which records the outcome even if all waiting callers gave up.
    fn dial(&self, address: &str, epoch: Option<Epoch>) -> Dial {
        let (paths, address) = (self.clone(), address.to_owned());
        let peer = address.clone();
        let task = tokio::spawn(async move {
            let dialled = paths.dialer.dial(address.clone()).await;
            let state = match &dialled {
                Ok(path) => PathState::Open(Arc::clone(path)),
                Err(error) => PathState::Lost(Loss { epoch, error: error.clone(), since: Instant::now() }),
            };
            paths.states().insert(address, state);
            dialled
        });
        let dial: BoxFuture<'static, DialResult> = Box::pin(async move {
            // Fails only if the runtime stops or the dialer panics.
            task.await.unwrap_or_else(|ended| {
                Err(PathError::Unreachable { peer, cause: format!("the dial task ended: {ended}") })
            })
        });
        dial.shared()
    }

    /// Records that `path` failed with `error` during a request under `epoch`. An unreachable peer
    /// is marked lost; a broken path is dialled anew when next needed.
    pub(crate) fn note_failure(
        &self,
        address: &str,
        epoch: Option<Epoch>,
        path: &Arc<dyn Path>,
        error: &PathError,
    ) {
        let mut states = self.states();
        let is_ours =
            matches!(states.get(address), Some(PathState::Open(current)) if Arc::ptr_eq(current, path));
        if !is_ours || matches!(error, PathError::TooLarge { .. }) {
            return;
        }
        if is_loss(error) {
            let loss = Loss { epoch, error: error.clone(), since: Instant::now() };
            states.insert(address.to_owned(), PathState::Lost(loss));
        } else {
            states.remove(address);
        }
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<String, PathState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of a lookup in the table.
enum Lookup {
    Ready(Result<AcquiredPath, PathError>),
    Wait(Dial),
}

/// Whether the peer itself is unreachable, as opposed to one connection to it.
fn is_loss(error: &PathError) -> bool {
    matches!(error, PathError::Unreachable { .. })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kvfleet_transport::loopback::Loopback;
    use kvfleet_transport::suite::MemoryService;
    use tokio::sync::Semaphore;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Lets dials finish one by one, and counts them. All dials fail until `serve` is called.
    struct GatedDialer {
        network: Loopback,
        dials: AtomicUsize,
        may_end: Semaphore,
    }

    impl Dialer for GatedDialer {
        fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
            self.dials.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                self.may_end.acquire().await.unwrap().forget();
                self.network.dial(address).await
            })
        }
    }

    impl GatedDialer {
        fn count(&self) -> usize {
            self.dials.load(Ordering::Relaxed)
        }

        fn serve(&self) {
            self.network.serve("node:1", Arc::new(MemoryService::default()));
        }

        async fn wait_for_dials(&self, times: usize) {
            while self.count() < times {
                tokio::task::yield_now().await;
            }
        }
    }

    fn gated_paths(permits: usize, cool_down: Duration) -> (Arc<GatedDialer>, Paths) {
        let slow = Arc::new(GatedDialer {
            network: Loopback::default(),
            dials: AtomicUsize::new(0),
            may_end: Semaphore::new(permits),
        });
        (slow.clone(), Paths::new(slow, cool_down))
    }

    async fn is_open(paths: &Paths, epoch: u64) -> bool {
        paths.get("node:1", Some(Epoch(epoch))).await.is_ok()
    }

    #[tokio::test]
    async fn requests_to_dead_node_share_one_failed_dial() {
        let (slow, paths) = gated_paths(0, HOUR);
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let paths = paths.clone();
            waiting.spawn(async move { is_open(&paths, 1).await });
        }
        slow.wait_for_dials(1).await;
        slow.may_end.add_permits(1);
        assert!(waiting.join_all().await.into_iter().all(|open| !open));
        assert_eq!(slow.count(), 1);
        assert!(!is_open(&paths, 1).await, "later requests do not wait at all");
        assert_eq!(slow.count(), 1);
    }

    #[tokio::test]
    async fn abandoned_dial_outcome_reaches_other_requests() {
        let (slow, paths) = gated_paths(0, HOUR);
        let given_up = tokio::time::timeout(Duration::from_millis(1), is_open(&paths, 1)).await;
        assert!(given_up.is_err());
        slow.may_end.add_permits(1);
        assert!(!is_open(&paths, 1).await);
        assert_eq!(slow.count(), 1);
    }

    #[tokio::test]
    async fn lost_node_is_redialled_in_background() {
        let (slow, paths) = gated_paths(1, Duration::ZERO);
        assert!(!is_open(&paths, 1).await);
        slow.serve();
        assert!(!is_open(&paths, 1).await, "this request does not wait for the dial that it starts");
        slow.wait_for_dials(2).await;
        slow.may_end.add_permits(1);
        while !is_open(&paths, 1).await {
            slow.may_end.add_permits(1);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn rejoined_node_is_dialled_at_once() {
        let (slow, paths) = gated_paths(2, HOUR);
        assert!(!is_open(&paths, 4).await);
        slow.serve();
        assert!(!is_open(&paths, 3).await, "a request under an older epoch fails");
        assert!(is_open(&paths, 5).await);
        assert_eq!(slow.count(), 2);
    }

    #[tokio::test]
    async fn failed_idle_path_is_not_reused() {
        let (slow, paths) = gated_paths(1, HOUR);
        slow.serve();
        assert!(paths.get("node:1", None).await.is_ok_and(|found| !found.reused));
        assert!(paths.get("node:1", None).await.is_ok_and(|found| found.reused));
        slow.network.stop("node:1");
        slow.may_end.add_permits(1);
        assert!(!is_open(&paths, 1).await);
        assert_eq!(slow.count(), 2, "it was dialled again and the dial failed");
    }

    #[tokio::test]
    async fn path_failure_is_shared_by_all_requests() {
        let (slow, paths) = gated_paths(2, HOUR);
        slow.serve();
        let epoch = Some(Epoch(1));
        let path = paths.get("node:1", epoch).await.unwrap().path;
        let peer = || "node:1".to_owned();
        paths.note_failure("node:1", epoch, &path, &PathError::TooLarge { bytes: 2, limit: 1 });
        assert!(
            is_open(&paths, 1).await && slow.count() == 1,
            "an error of the caller does not affect the path"
        );
        let gone = PathError::Unreachable { peer: peer(), cause: "silent".to_owned() };
        paths.note_failure("node:1", epoch, &path, &gone);
        assert!(!is_open(&paths, 1).await);
        assert!(is_open(&paths, 2).await);
        paths.note_failure("node:1", Some(Epoch(2)), &path, &gone);
        assert!(is_open(&paths, 2).await, "a failure of the old path does not affect the new one");
    }
}
