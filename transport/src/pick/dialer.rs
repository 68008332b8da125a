//! Several ways to peers as one dialer, and what it knows of each peer.
//!
//! Ways are dialled in the order of preference, the next one as soon as one failed or takes long; the first that is open is used,
//! and the others are opened behind it. What was learnt of a peer outlives its paths. Not here: which open path an
//! operation takes (`path.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::path::{Open, PickPath};
use super::peer::Peer;
use super::{Candidate, PathKind, PeerReport, PickRules};
use crate::{BoxFuture, Carried, Dialer, Path, PathError};

/// Peers that are known. A client meets the nodes of one cluster; above this all is learnt anew, so that a cluster that
/// keeps changing addresses cannot grow the table.
const PEERS_MAX: usize = 1024;

/// Opens paths that are picked from several.
pub struct PickDialer {
    ways: Arc<[Way]>,
    rules: PickRules,
    peers: Mutex<BTreeMap<String, Arc<Peer>>>,
}

/// A candidate, and what went over it to all peers.
pub(super) struct Way {
    pub(super) candidate: Candidate,
    pub(super) carried: Carried,
}

impl std::fmt::Debug for PickDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds: Vec<PathKind> = self.ways.iter().map(|way| way.candidate.kind).collect();
        f.debug_struct("PickDialer").field("kinds", &kinds).finish_non_exhaustive()
    }
}

impl PickDialer {
    /// Picks among these ways. Of the network's, `first` or the first of `more` is the default.
    #[must_use]
    pub fn new(first: Candidate, more: Vec<Candidate>, rules: PickRules) -> PickDialer {
        let mut candidates: Vec<Candidate> = std::iter::once(first).chain(more).collect();
        // Stable: within a class the caller's order counts.
        candidates.sort_by_key(|candidate| candidate.kind.class());
        let way = |candidate| Way { candidate, carried: Carried::default() };
        PickDialer { ways: candidates.into_iter().map(way).collect(), rules, peers: Mutex::default() }
    }

    /// Encoded bytes of blocks that went over each kind, to all peers: sent are those of saves, received those of fetches.
    #[must_use]
    pub fn carried(&self) -> Vec<(PathKind, Carried)> {
        self.ways.iter().map(|way| (way.candidate.kind, way.carried.clone())).collect()
    }

    /// What is known of each peer.
    #[must_use]
    pub fn reports(&self) -> Vec<PeerReport> {
        let peers: Vec<_> = self.peers().values().cloned().collect();
        peers.iter().map(|peer| peer.report()).collect()
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, address: &str) -> Arc<Peer> {
        let mut peers = self.peers();
        if let Some(peer) = peers.get(address) {
            return Arc::clone(peer);
        }
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        let kinds = self.ways.iter().map(|way| way.candidate.kind).collect();
        let peer = Arc::new(Peer::new(address.to_owned(), kinds, &self.rules, Instant::now()));
        peers.insert(address.to_owned(), Arc::clone(&peer));
        peer
    }

    /// The first way that opens; the error of the most preferred one when none does.
    async fn first_open(&self, peer: &Peer) -> Result<(usize, Arc<dyn Path>), PathError> {
        let mut waiting = peer.dial_order(Instant::now()).into_iter();
        let (mut dials, mut refusal) = (JoinSet::new(), None::<(usize, PathError)>);
        let mut started = 0;
        loop {
            if let Some(at) = waiting.next() {
                let (ways, address) = (Arc::clone(&self.ways), peer.address().to_owned());
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
                    peer.succeeded(at);
                    return Ok((at, path));
                }
                Some(Ok((order, at, Err(error)))) => {
                    peer.failed(Instant::now(), at, &error);
                    if refusal.as_ref().is_none_or(|(earlier, _)| order < *earlier) {
                        refusal = Some((order, error));
                    }
                }
                Some(Err(ended)) => {
                    let cause = format!("dialling it ended: {ended}");
                    let error = PathError::Unreachable { peer: peer.address().to_owned(), cause };
                    refusal.get_or_insert((usize::MAX, error));
                }
                None if waiting.len() == 0 => {
                    let (_, error) = refusal.expect("one way at least was dialled, and none is open");
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
            let (at, path) = self.first_open(&peer).await?;
            let open = Open::new(Arc::clone(&self.ways), peer, at, path);
            Ok(Arc::new(PickPath::new(Arc::new(open), &self.rules)) as Arc<dyn Path>)
        })
    }
}
