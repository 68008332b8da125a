//! Paths to nodes, opened when first needed and kept until they break.
//!
//! One dial at a time per address, in a task of its own: those who wait share its outcome, and a request
//! that gives up waiting does not take the outcome with it. A node that was lost is left alone under the
//! epoch it was lost in: nobody waits for it again, it is dialled behind the requests' backs now and then,
//! and at once when a router names it under a newer epoch. Not here: what runs over a path, and noticing
//! that a peer is gone (the transport does).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use kv_core::id::Epoch;
use kvfleet_transport::{BoxFuture, Dialer, Path, PathError};
use tokio::time::Instant;

/// Paths kept. A client meets the nodes of one cluster; above this all are opened anew, so that a
/// cluster that keeps changing addresses cannot grow the table.
const PATHS_MAX: usize = 1024;

/// Time between two dials of an address that was lost. A node that only stumbled is back within a
/// second or is fenced.
pub(crate) const COOL_DOWN: Duration = Duration::from_millis(500);

type Dialled = Result<Arc<dyn Path>, PathError>;
type Dial = Shared<BoxFuture<'static, Dialled>>;

/// What is known of an address.
enum State {
    Open(Arc<dyn Path>),
    /// Somebody's first dial; all wait for it.
    Dialling(Dial),
    Lost(Loss),
}

/// An address whose node is gone.
#[derive(Clone)]
struct Loss {
    /// The epoch it was asked under, when that was known.
    epoch: Option<Epoch>,
    error: PathError,
    /// When it was last dialled or lost.
    since: Instant,
}

impl Loss {
    /// Whether a router has since seen the node come back.
    fn is_outlived_by(&self, epoch: Option<Epoch>) -> bool {
        self.epoch < epoch
    }
}

/// Clones share everything.
#[derive(Clone)]
pub(crate) struct Paths {
    dialer: Arc<dyn Dialer>,
    states: Arc<Mutex<BTreeMap<String, State>>>,
    cool_down: Duration,
}

/// A path, and whether it was there before.
pub(crate) struct Found {
    pub(crate) path: Arc<dyn Path>,
    pub(crate) kept: bool,
}

impl Paths {
    pub(crate) fn new(dialer: Arc<dyn Dialer>, cool_down: Duration) -> Paths {
        Paths { dialer, states: Arc::default(), cool_down }
    }

    /// The path to the node that serves at `address` in `epoch`, dialled if there is none.
    pub(crate) async fn get(&self, address: &str, epoch: Option<Epoch>) -> Result<Found, PathError> {
        let dial = match self.look(address, epoch) {
            Look::Ready(answer) => return answer,
            Look::Wait(dial) => dial,
        };
        dial.await.map(|path| Found { path, kept: false })
    }

    fn look(&self, address: &str, epoch: Option<Epoch>) -> Look {
        let mut states = self.states();
        match states.get_mut(address) {
            Some(State::Open(path)) => match path.failure() {
                None => return Look::Ready(Ok(Found { path: Arc::clone(path), kept: true })),
                Some(error) if is_loss(&error) => {
                    let loss = Loss { epoch, error: error.clone(), since: Instant::now() };
                    states.insert(address.to_owned(), State::Lost(loss));
                    return Look::Ready(Err(error));
                }
                Some(_) => {}
            },
            Some(State::Dialling(dial)) => return Look::Wait(dial.clone()),
            Some(State::Lost(loss)) if !loss.is_outlived_by(epoch) => {
                let error = loss.error.clone();
                if loss.since.elapsed() >= self.cool_down {
                    loss.since = Instant::now();
                    self.dial_behind(address);
                }
                return Look::Ready(Err(error));
            }
            Some(State::Lost(_)) | None => {}
        }
        if states.len() >= PATHS_MAX && !states.contains_key(address) {
            states.clear();
        }
        let dial = self.dial(address, epoch);
        states.insert(address.to_owned(), State::Dialling(dial.clone()));
        Look::Wait(dial)
    }

    /// Dials an address that was lost, for the requests to come.
    fn dial_behind(&self, address: &str) {
        let (paths, address) = (self.clone(), address.to_owned());
        tokio::spawn(async move {
            if let Ok(path) = paths.dialer.dial(address.clone()).await {
                let mut states = paths.states();
                if matches!(states.get(&address), Some(State::Lost(_))) {
                    states.insert(address, State::Open(path));
                }
            }
        });
    }

    /// Dials in a task of its own, which notes the outcome whoever still waits for it.
    fn dial(&self, address: &str, epoch: Option<Epoch>) -> Dial {
        let (paths, address) = (self.clone(), address.to_owned());
        let peer = address.clone();
        let task = tokio::spawn(async move {
            let dialled = paths.dialer.dial(address.clone()).await;
            let state = match &dialled {
                Ok(path) => State::Open(Arc::clone(path)),
                Err(error) => State::Lost(Loss { epoch, error: error.clone(), since: Instant::now() }),
            };
            paths.states().insert(address, state);
            dialled
        });
        let dial: BoxFuture<'static, Dialled> = Box::pin(async move {
            // Ends without an outcome only with the runtime, or by a panic in the dialer.
            task.await.unwrap_or_else(|ended| {
                Err(PathError::Unreachable { peer, cause: format!("dialling it ended: {ended}") })
            })
        });
        dial.shared()
    }

    /// Takes note that `path` failed with `error` while a node was asked for in `epoch`: a peer that is
    /// gone is left alone, a broken path is dialled anew when next needed.
    pub(crate) fn failed(
        &self,
        address: &str,
        epoch: Option<Epoch>,
        path: &Arc<dyn Path>,
        error: &PathError,
    ) {
        let mut states = self.states();
        let is_ours = matches!(states.get(address), Some(State::Open(current)) if Arc::ptr_eq(current, path));
        if !is_ours || matches!(error, PathError::TooLarge { .. }) {
            return;
        }
        if is_loss(error) {
            let loss = Loss { epoch, error: error.clone(), since: Instant::now() };
            states.insert(address.to_owned(), State::Lost(loss));
        } else {
            states.remove(address);
        }
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<String, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a look at the table gives.
enum Look {
    Ready(Result<Found, PathError>),
    Wait(Dial),
}

/// Whether the peer is gone, rather than one connection to it.
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

    /// Lets dials end one by one, and counts them. Nobody is there until somebody serves on the network.
    struct Slow {
        network: Loopback,
        dials: AtomicUsize,
        may_end: Semaphore,
    }

    impl Dialer for Slow {
        fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
            self.dials.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                self.may_end.acquire().await.unwrap().forget();
                self.network.dial(address).await
            })
        }
    }

    impl Slow {
        fn count(&self) -> usize {
            self.dials.load(Ordering::Relaxed)
        }

        fn serve(&self) {
            self.network.serve("node:1", Arc::new(MemoryService::default()));
        }

        async fn dialled(&self, times: usize) {
            while self.count() < times {
                tokio::task::yield_now().await;
            }
        }
    }

    fn slow(permits: usize, cool_down: Duration) -> (Arc<Slow>, Paths) {
        let slow = Arc::new(Slow {
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
    async fn everyone_behind_a_dead_node_shares_one_failed_dial() {
        let (slow, paths) = slow(0, HOUR);
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let paths = paths.clone();
            waiting.spawn(async move { is_open(&paths, 1).await });
        }
        slow.dialled(1).await;
        slow.may_end.add_permits(1);
        assert!(waiting.join_all().await.into_iter().all(|open| !open));
        assert_eq!(slow.count(), 1);
        assert!(!is_open(&paths, 1).await, "and those who come later do not wait at all");
        assert_eq!(slow.count(), 1);
    }

    #[tokio::test]
    async fn a_request_that_gives_up_leaves_the_outcome_to_others() {
        let (slow, paths) = slow(0, HOUR);
        let given_up = tokio::time::timeout(Duration::from_millis(1), is_open(&paths, 1)).await;
        assert!(given_up.is_err());
        slow.may_end.add_permits(1);
        assert!(!is_open(&paths, 1).await);
        assert_eq!(slow.count(), 1);
    }

    #[tokio::test]
    async fn a_lost_node_is_dialled_behind_the_requests() {
        let (slow, paths) = slow(1, Duration::ZERO);
        assert!(!is_open(&paths, 1).await);
        slow.serve();
        assert!(!is_open(&paths, 1).await, "this one does not wait for the dial it starts");
        slow.dialled(2).await;
        slow.may_end.add_permits(1);
        while !is_open(&paths, 1).await {
            slow.may_end.add_permits(1);
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_node_that_joined_again_is_dialled_at_once() {
        let (slow, paths) = slow(2, HOUR);
        assert!(!is_open(&paths, 4).await);
        slow.serve();
        assert!(!is_open(&paths, 3).await, "an older epoch is as lost");
        assert!(is_open(&paths, 5).await);
        assert_eq!(slow.count(), 2);
    }

    #[tokio::test]
    async fn a_path_that_died_unused_is_not_used() {
        let (slow, paths) = slow(1, HOUR);
        slow.serve();
        assert!(paths.get("node:1", None).await.is_ok_and(|found| !found.kept));
        assert!(paths.get("node:1", None).await.is_ok_and(|found| found.kept));
        slow.network.stop("node:1");
        slow.may_end.add_permits(1);
        assert!(!is_open(&paths, 1).await);
        assert_eq!(slow.count(), 2, "it was dialled anew, in vain");
    }

    #[tokio::test]
    async fn what_one_request_learns_of_a_path_all_know() {
        let (slow, paths) = slow(2, HOUR);
        slow.serve();
        let epoch = Some(Epoch(1));
        let path = paths.get("node:1", epoch).await.unwrap().path;
        let peer = || "node:1".to_owned();
        paths.failed("node:1", epoch, &path, &PathError::TooLarge { bytes: 2, limit: 1 });
        assert!(is_open(&paths, 1).await && slow.count() == 1, "our own mistake says nothing of the path");
        let gone = PathError::Unreachable { peer: peer(), cause: "silent".to_owned() };
        paths.failed("node:1", epoch, &path, &gone);
        assert!(!is_open(&paths, 1).await);
        assert!(is_open(&paths, 2).await);
        paths.failed("node:1", Some(Epoch(2)), &path, &gone);
        assert!(is_open(&paths, 2).await, "the old path says nothing of the new one");
    }
}
