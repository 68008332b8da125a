//! Several kinds of paths to peers as one dialer, and its state for each peer.
//!
//! Candidates are dialed in order of preference, the next one as soon as one fails or is slow. The
//! first open path is used, and the others are opened in the background. The state of a peer outlives
//! its paths. Not here: the path of an operation (`path.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::path::{OpenPaths, PickPath};
use super::peer::PeerPaths;
use super::{PathCandidate, PathKind, PeerReport, PickRules};
use crate::{BoxFuture, Dialer, Path, PathError, TrafficCounters};

/// Most known peers. A client meets the nodes of one cluster; above this limit all their states
/// are dropped, so that changing addresses cannot grow the table.
const PEERS_MAX: usize = 1024;

/// Opens paths chosen among several candidates.
pub struct PickDialer {
    options: Arc<[PathOption]>,
    rules: PickRules,
    peers: Mutex<BTreeMap<String, Arc<PeerPaths>>>,
}

/// A candidate, and its traffic to all peers.
pub(super) struct PathOption {
    pub(super) candidate: PathCandidate,
    pub(super) traffic: TrafficCounters,
}

impl std::fmt::Debug for PickDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds: Vec<PathKind> = self.options.iter().map(|way| way.candidate.kind).collect();
        f.debug_struct("PickDialer").field("kinds", &kinds).finish_non_exhaustive()
    }
}

impl PickDialer {
    /// A dialer over these candidates, at least one.
    #[must_use]
    pub fn new(first: PathCandidate, more: Vec<PathCandidate>, rules: PickRules) -> PickDialer {
        let mut candidates: Vec<PathCandidate> = std::iter::once(first).chain(more).collect();
        let preferred = rules.network.kind();
        candidates.sort_by_key(|candidate| (candidate.kind.path_class(), candidate.kind != preferred));
        let way = |candidate| PathOption { candidate, traffic: TrafficCounters::default() };
        PickDialer { options: candidates.into_iter().map(way).collect(), rules, peers: Mutex::default() }
    }

    /// Encoded bytes of blocks over each kind, to all peers: sent with saves, received with
    /// fetches.
    #[must_use]
    pub fn traffic(&self) -> Vec<(PathKind, TrafficCounters)> {
        self.options.iter().map(|way| (way.candidate.kind, way.traffic.clone())).collect()
    }

    /// The state of each peer.
    #[must_use]
    pub fn reports(&self) -> Vec<PeerReport> {
        let peers: Vec<_> = self.peers().values().cloned().collect();
        peers.iter().map(|peer| peer.report()).collect()
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<PeerPaths>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, address: &str) -> Arc<PeerPaths> {
        let mut peers = self.peers();
        if let Some(peer) = peers.get(address) {
            return Arc::clone(peer);
        }
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        let kinds = self.options.iter().map(|way| way.candidate.kind).collect();
        let peer = Arc::new(PeerPaths::new(address.to_owned(), kinds, &self.rules));
        peers.insert(address.to_owned(), Arc::clone(&peer));
        peer
    }

    /// Dials until the first path opens. Returns the error of the most preferred one if none opens.
    async fn dial_first(&self, peer: &PeerPaths) -> Result<(usize, Arc<dyn Path>), PathError> {
        let mut waiting = peer.dial_order(Instant::now()).into_iter();
        let (mut dials, mut refusal) = (JoinSet::new(), None::<(usize, PathError)>);
        let mut started = 0;
        loop {
            if let Some(at) = waiting.next() {
                let (ways, address) = (Arc::clone(&self.options), peer.address().to_owned());
                let order = started;
                started += 1;
                dials.spawn(async move { (order, at, ways[at].candidate.dialer.dial(address).await) });
            }
            let head_start = async {
                match waiting.len() {
                    0 => std::future::pending().await,
                    _ => sleep(self.rules.head_start).await,
                }
            };
            let ended = tokio::select! {
                ended = dials.join_next() => ended,
                () = head_start => continue,
            };
            match ended {
                Some(Ok((_, at, Ok(path)))) => {
                    peer.record_success(at);
                    return Ok((at, path));
                }
                Some(Ok((order, at, Err(error)))) => {
                    peer.record_failure(Instant::now(), at, &error);
                    if refusal.as_ref().is_none_or(|(earlier, _)| order < *earlier) {
                        refusal = Some((order, error));
                    }
                }
                Some(Err(ended)) => {
                    let cause = format!("the dial task ended: {ended}");
                    let error = PathError::Unreachable { peer: peer.address().to_owned(), cause };
                    refusal.get_or_insert((usize::MAX, error));
                }
                None if waiting.len() == 0 => {
                    let (_, error) = refusal.expect("at least one path was dialed, and none opened");
                    return Err(error);
                }
                None => {}
            }
        }
    }
}

impl Dialer for PickDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            let peer = self.peer(&address);
            let (at, path) = self.dial_first(&peer).await?;
            let open = OpenPaths::new(Arc::clone(&self.options), peer, at, path);
            Ok(Arc::new(PickPath::new(Arc::new(open), &self.rules)) as Arc<dyn Path>)
        })
    }
}
