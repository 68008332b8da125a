//! State of the paths to one peer, kept while paths come and go.
//!
//! Not here: the paths themselves (`path.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::Breaker;
use super::{PathClass, PathKind, PathReport, PeerReport, PickReason, PickRules};
use crate::PathError;

/// Silence after which a fetch's path counts as failed: longer than the delays of a busy node or
/// client.
const SILENCE_MIN: Duration = Duration::from_millis(100);

/// Round trips that a fetch must have waited for its silence to count.
const ROUND_TRIPS: u32 = 4;

/// Total time that waiting fetches got no answer over a path. Concurrent fetches count once.
#[derive(Clone, Debug, Default)]
struct SilenceTracker {
    sum: Duration,
    until: Option<Instant>,
}

impl SilenceTracker {
    /// Adds a silent fetch's interval. Returns whether the sum is long enough; it then starts anew.
    fn add_interval(&mut self, since: Instant, now: Instant) -> bool {
        let counted = self.until.map_or(since, |until| until.max(since));
        self.sum += now.saturating_duration_since(counted);
        self.until = Some(now);
        let is_long = self.sum >= SILENCE_MIN;
        if is_long {
            self.sum = Duration::ZERO;
        }
        is_long
    }
}

/// State of one peer. Paths are identified by position, in order of preference.
pub(super) struct PeerPaths {
    address: String,
    kinds: Vec<PathKind>,
    state: Mutex<PeerState>,
}

struct PeerState {
    paths: Vec<PathState>,
    /// The path of the last operation.
    used: Option<usize>,
}

struct PathState {
    breaker: Breaker,
    error: Option<PathError>,
    silence: SilenceTracker,
    /// The last round trip.
    latency: Option<Duration>,
}

impl PeerPaths {
    /// `kinds` in order of preference.
    pub(super) fn new(address: String, kinds: Vec<PathKind>, rules: &PickRules) -> PeerPaths {
        let path = |_: &PathKind| PathState {
            breaker: Breaker::new(rules.breaker),
            error: None,
            silence: SilenceTracker::default(),
            latency: None,
        };
        let paths = kinds.iter().map(path).collect();
        PeerPaths { address, kinds, state: Mutex::new(PeerState { paths, used: None }) }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    fn state(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of the next operation: the first open one that is not suspended. If all open ones
    /// are suspended, the first of them is better than none. `None` if none is open.
    pub(super) fn pick(&self, open: &[bool]) -> Option<usize> {
        let mut known = self.state();
        let usable = (0..open.len()).find(|at| open[*at] && known.paths[*at].breaker.is_closed());
        let picked = usable.or_else(|| open.iter().position(|open| *open));
        known.used = picked.or(known.used);
        picked
    }

    /// The paths in dial order. Suspended ones are left out, unless all are.
    pub(super) fn dial_order(&self, now: Instant) -> Vec<usize> {
        let mut known = self.state();
        let all = 0..self.kinds.len();
        let passing: Vec<usize> = all.clone().filter(|at| known.paths[*at].breaker.allows(now)).collect();
        if passing.is_empty() { all.collect() } else { passing }
    }

    /// Whether this path may be dialed in the background.
    pub(super) fn allows_trial(&self, now: Instant, at: usize) -> bool {
        self.state().paths[at].breaker.allows(now)
    }

    /// Whether this path's breaker is closed.
    pub(super) fn is_healthy(&self, at: usize) -> bool {
        self.state().paths[at].breaker.is_closed()
    }

    /// Records an operation that succeeded, or another sign of life.
    pub(super) fn record_success(&self, at: usize) {
        self.update_breaker(at, Breaker::record_success);
    }

    /// Records a fetch that delivered data.
    pub(super) fn record_delivery(&self, at: usize) {
        self.state().paths[at].silence = SilenceTracker::default();
        self.update_breaker(at, Breaker::record_delivery);
    }

    fn update_breaker(&self, at: usize, note: fn(&mut Breaker)) {
        let mut known = self.state();
        let breaker = &mut known.paths[at].breaker;
        let was_closed = breaker.is_closed();
        note(breaker);
        if !was_closed && breaker.is_closed() {
            drop(known);
            tracing::info!(peer = self.address, path = self.kinds[at].name(), "a path works again");
        }
    }

    pub(super) fn record_failure(&self, now: Instant, at: usize, error: &PathError) {
        self.update_failure(now, at, error, Breaker::record_failure);
    }

    /// Records a fetch that got no answer over this path since `since`. A wait of less than a few
    /// round trips is ignored, and short waits are added up.
    pub(super) fn record_silence(&self, now: Instant, at: usize, since: Instant) {
        let after = now.saturating_duration_since(since);
        let mut known = self.state();
        let path = &mut known.paths[at];
        let least = path.latency.unwrap_or_default().saturating_mul(ROUND_TRIPS);
        if after < least || !path.silence.add_interval(since, now) {
            return;
        }
        drop(known);
        let error = PathError::TimedOut { peer: self.address.clone(), after };
        self.update_failure(now, at, &error, Breaker::record_silence);
    }

    fn update_failure(
        &self,
        now: Instant,
        at: usize,
        error: &PathError,
        note: fn(&mut Breaker, Instant) -> bool,
    ) {
        let mut known = self.state();
        let state = &mut known.paths[at];
        let was_closed = state.breaker.is_closed();
        let opened = note(&mut state.breaker, now) && was_closed;
        state.error = Some(error.clone());
        drop(known);
        let path = self.kinds[at].name();
        // A single path is never suspended, since there is no alternative.
        if opened && self.kinds.len() > 1 {
            tracing::info!(peer = self.address, path, %error, "a path failed and is suspended");
        } else {
            tracing::debug!(peer = self.address, path, %error, "a path failed");
        }
    }

    pub(super) fn record_ping(&self, at: usize, took: Duration) {
        self.state().paths[at].latency = Some(took);
    }

    /// Position of the preferred network path; without network paths, of the first one.
    fn preferred_network(&self) -> usize {
        self.kinds.iter().position(|kind| kind.path_class() == PathClass::Network).unwrap_or(0)
    }

    fn reason(&self, known: &PeerState, used: usize) -> PickReason {
        let preferred = self.preferred_network();
        match self.kinds[used] {
            _ if self.kinds.len() == 1 => PickReason::OnlyPath,
            PathKind::SharedMemory => PickReason::SameHost,
            PathKind::Rdma => PickReason::RdmaOffered,
            PathKind::Quic | PathKind::Tcp if used == preferred => PickReason::Preferred,
            PathKind::Quic | PathKind::Tcp => {
                let failure = known.paths[preferred].error.as_ref().map(ToString::to_string);
                PickReason::Fallback { preferred: self.kinds[preferred], failure }
            }
        }
    }

    pub(super) fn report(&self) -> PeerReport {
        let known = self.state();
        let used = known.used.unwrap_or_else(|| self.preferred_network());
        let path = |(state, kind): (&PathState, &PathKind)| PathReport {
            kind: *kind,
            is_suspended: !state.breaker.is_closed(),
            latency: state.latency,
            error: state.error.as_ref().map(ToString::to_string),
        };
        PeerReport {
            peer: self.address.clone(),
            used: self.kinds[used],
            reason: self.reason(&known, used),
            paths: known.paths.iter().zip(&self.kinds).map(path).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// In any sequence of failures, successes and closed paths, the choice is the rule's.
    #[test]
    fn the_first_open_path_that_is_not_suspended_is_used() {
        let error = PathError::Broken { peer: "node:1".to_owned(), cause: "injected".to_owned() };
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let kinds = PathKind::ALL.to_vec();
            let peer = PeerPaths::new("node:1".to_owned(), kinds.clone(), &PickRules::default());
            let mut now = Instant::now();
            for _ in 0..300 {
                now += Duration::from_millis(random.random_range(0..500));
                let at = random.random_range(0..kinds.len());
                match random.random_range(0..4) {
                    0 => peer.record_success(at),
                    1 if peer.allows_trial(now, at) => peer.record_success(at),
                    _ => peer.record_failure(now, at, &error),
                }
                let open: Vec<bool> = kinds.iter().map(|_| random.random_bool(0.7)).collect();
                let suspended: Vec<bool> = peer.report().paths.iter().map(|path| path.is_suspended).collect();
                let usable = (0..kinds.len()).find(|at| open[*at] && !suspended[*at]);
                let expected = usable.or_else(|| (0..kinds.len()).find(|at| open[*at]));
                assert_eq!(peer.pick(&open), expected, "seed {seed}: {open:?} {suspended:?}");
                let used = expected.map(|at| kinds[at]);
                assert!(used.is_none_or(|used| used == peer.report().used), "seed {seed}");
            }
        }
    }
}
