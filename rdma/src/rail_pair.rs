//! The client's rail pairs to one node, each of one local and one remote rail, with links that
//! operations use one after the other.
//!
//! An operation takes the rail pair with the fewest operations in flight. A rail pair with a failed
//! transfer is suspended for a time that doubles. Then a dedicated link probes it by reading a few
//! bytes; a request never serves as the probe. Separate tasks make links, so that an operation with
//! too little time leaves its link to the next one. A link is dropped with an operation that does
//! not complete, and the next link gets new queue pairs. If that link had transfers in flight, its
//! successor is made at once, because cards report a silent rail later than many operations wait.
//! Not here: which rails go together (`rail_match.rs`), the messages of an operation (`fetch.rs`,
//! `save.rs`).

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::TrafficClass;
use kvfleet_transport::pick::BreakerRules;
use kvfleet_transport::upgrade::{Breaker, Slot, SlotQueue, TcpPath};
use kvfleet_transport::{Path, PathError};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at};

use super::link::{AttachOutcome, LocalRail, RdmaChannel, RdmaLink};
use super::rail_match::RailMatch;

/// Time limit to make a link. Cards need milliseconds; attempts to reach a silent peer, and
/// software emulation, take seconds.
pub(super) const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before another request for a link after the node had none: each request costs both ends
/// queue pairs.
const UNAVAILABLE_PAUSE: Duration = Duration::from_secs(5);

/// How long an operation waits for a link that is already being made, before it continues without
/// one. Cards make a link in less time.
const PENDING_LINK_WAIT: Duration = Duration::from_millis(100);

/// How long abandoned reads may take to end before their link is dropped: a few times the longest
/// duration of the transfers in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// Minimum concurrent links of each rail pair, so that one operation uses the rail while another
/// waits for its answer.
const LINKS_PER_RAIL_PAIR: usize = 2;

/// Set when links of a rail pair were dropped with transfers in flight, so that the state of the
/// rail is unknown.
#[derive(Default)]
pub(super) struct SuspectFlag {
    is_set: AtomicBool,
    /// Wakes the maintenance task.
    wake: Arc<Notify>,
}

impl SuspectFlag {
    /// Records that a link was dropped with transfers in flight.
    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }
}

/// One of our rails and one of a node's.
pub(super) struct RailPair {
    local: Arc<LocalRail>,
    /// Number of the node's rail.
    remote: u32,
    /// Another rail pair uses one of the two rails; this one is used if that fails.
    is_spare: bool,
    breaker: Mutex<Breaker>,
    /// Limits the transfers of all its links.
    peer_limit: Arc<Semaphore>,
    /// Whether a task is making links.
    is_connecting: AtomicBool,
    /// Operations that wait for a link.
    waiting_operations: AtomicUsize,
    /// An operation used another rail pair because this one had no link.
    needs_link: AtomicBool,
    suspect: Arc<SuspectFlag>,
    /// Notified when a link becomes available.
    link_ready: Arc<Notify>,
    /// When the node last refused a link.
    unavailable_since: Mutex<Option<Instant>>,
    /// Links without an operation, and since when; the most recently used is last.
    idle: Mutex<Vec<(RdmaLink, Instant)>>,
    in_flight: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RailPair {
    /// A rail pair without links; `wake` notifies the maintenance task.
    pub(super) fn new(
        local: &Arc<LocalRail>,
        pair: RailMatch,
        rules: BreakerRules,
        wake: &Arc<Notify>,
    ) -> RailPair {
        RailPair {
            local: Arc::clone(local),
            remote: pair.remote,
            is_spare: pair.is_spare,
            breaker: Mutex::new(Breaker::new(rules)),
            peer_limit: local.rdma.transfers.peer_limit(),
            is_connecting: AtomicBool::new(false),
            waiting_operations: AtomicUsize::new(0),
            needs_link: AtomicBool::new(false),
            suspect: Arc::new(SuspectFlag { wake: Arc::clone(wake), ..SuspectFlag::default() }),
            link_ready: Arc::default(),
            unavailable_since: Mutex::default(),
            idle: Mutex::default(),
            in_flight: AtomicUsize::new(0),
        }
    }

    /// Suspends the rail pair, because packets do not pass.
    pub(super) fn suspend(&self) {
        locked(&self.breaker).record_failure(Instant::now());
    }

    fn is_available(&self) -> bool {
        locked(&self.breaker).is_closed()
    }

    /// As if a link had been dropped with transfers in flight, without waking the maintenance task.
    #[cfg(test)]
    pub(super) fn mark_suspect(&self) {
        self.suspect.is_set.store(true, Ordering::Relaxed);
    }

    /// Whether links were dropped with transfers in flight, so that other rail pairs are preferred.
    fn is_suspect(&self) -> bool {
        self.suspect.is_set.load(Ordering::Relaxed)
    }

    /// Whether a request for a link may succeed; no request follows shortly after a refusal.
    fn may_connect(&self) -> bool {
        self.is_available()
            && locked(&self.unavailable_since).is_none_or(|since| since.elapsed() >= UNAVAILABLE_PAUSE)
    }

    fn lacks_links(&self) -> bool {
        self.waiting_operations.load(Ordering::Relaxed) > locked(&self.idle).len()
    }

    /// Whether to request a link now.
    fn should_connect(&self) -> bool {
        if self.is_connecting.load(Ordering::Acquire) {
            return false;
        }
        let is_open = self.is_available();
        if !is_open {
            return locked(&self.breaker).allows(Instant::now());
        }
        let is_missed = self.needs_link.load(Ordering::Relaxed) && locked(&self.idle).is_empty();
        self.may_connect() && (is_missed || self.is_suspect() || self.lacks_links())
    }

    /// The most recently used link that is still usable, and since when it was idle; with
    /// `made_since`, only an unused link made since then.
    fn take_idle(&self, idle_timeout: Duration, made_since: Option<Instant>) -> Option<(RdmaLink, Instant)> {
        loop {
            let (mut link, since) = locked(&self.idle).pop()?;
            let is_fit = made_since.is_none_or(|begun| !link.was_used && since >= begun);
            if is_fit && since.elapsed() < idle_timeout && link.prepare_reuse() {
                return Some((link, since));
            }
        }
    }

    fn put_idle(&self, link: RdmaLink) {
        self.put_idle_since(link, Instant::now());
    }

    /// Stores a link; its connection was last used at `since`.
    fn put_idle_since(&self, link: RdmaLink, since: Instant) {
        let mut idle = locked(&self.idle);
        let at = idle.partition_point(|(_, other)| *other <= since);
        idle.insert(at, (link, since));
        drop(idle);
        self.link_ready.notify_waiters();
    }

    /// Stores a helper link again; drops it if the rail pair was suspended meanwhile.
    fn return_helper(&self, link: RdmaLink, since: Instant) {
        if self.is_available() {
            self.put_idle_since(link, since);
        }
    }

    /// Stores a new link.
    fn put_new(&self, mut link: RdmaLink) {
        link.set_suspect_flag(&self.suspect);
        self.put_idle(link);
    }

    /// Removes the links that were idle for too long.
    fn take_expired(&self, idle_timeout: Duration) -> Vec<(RdmaLink, Instant)> {
        let mut links = locked(&self.idle);
        // The most recently used link is taken first, so the front is the oldest.
        let old = links.iter().take_while(|(_, since)| since.elapsed() >= idle_timeout).count();
        links.drain(..old).collect()
    }

    /// Requests a link and probes it.
    pub(super) async fn attach(&self, tcp: &TcpPath) -> Result<AttachOutcome, PathError> {
        match timeout(ATTACH_TIMEOUT, RdmaLink::attach(tcp, &self.local, self.remote, &self.peer_limit)).await
        {
            Ok(asked) => asked,
            Err(_) => Ok(AttachOutcome::Unreachable("its RDMA device answers too slowly".to_owned())),
        }
    }
}

/// Counts an operation on its rail pair.
struct RailPairUse(Arc<RailPair>);

impl RailPairUse {
    fn new(lane: &Arc<RailPair>) -> RailPairUse {
        lane.in_flight.fetch_add(1, Ordering::Relaxed);
        RailPairUse(Arc::clone(lane))
    }
}

impl Drop for RailPairUse {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts an operation that waits for a link.
struct WaitingOperation<'a>(&'a RailPair);

impl Drop for WaitingOperation<'_> {
    fn drop(&mut self) {
        self.0.waiting_operations.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A link that one operation uses exclusively.
pub(super) struct ExclusiveLink {
    pub(super) link: RdmaLink,
    /// Index of its rail pair.
    pub(super) at: usize,
    busy: RailPairUse,
    _place: Slot,
}

/// Additional links over which a fetch reads, besides the link that it was sent over.
pub(super) struct SecondaryLinks<'a> {
    rail_pairs: &'a RailPairs,
    /// Rail pairs that are not used: that of the fetch itself, and those with links that broke
    /// before.
    excluded: Vec<usize>,
    may_take: bool,
    bytes: u64,
    links: Vec<SecondaryLink>,
}

impl<'a> SecondaryLinks<'a> {
    /// Takes no links yet. `own` and `left_out` are never used, and no rail pair is unless `may` is
    /// set.
    pub(super) fn new(
        rail_pairs: &'a RailPairs,
        own: usize,
        left_out: &[usize],
        may: bool,
    ) -> SecondaryLinks<'a> {
        let excluded = left_out.iter().copied().chain([own]).collect();
        SecondaryLinks { rail_pairs, excluded, may_take: may, bytes: 0, links: Vec::new() }
    }

    /// Adds bytes to read that any link reaches; takes helper links once the sum is large.
    pub(super) fn add_bytes(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        // If none is available, the request makes one for later.
        if self.may_take && self.links.is_empty() && self.bytes >= self.rail_pairs.large_bytes() {
            self.links = self.rail_pairs.take_helpers(&self.excluded);
        }
    }

    pub(super) fn channels(&self) -> impl Iterator<Item = &RdmaChannel> {
        self.links.iter().filter_map(|beside| beside.link.as_ref()).map(RdmaLink::channel)
    }

    /// Records the failure of broken helper links; returns their rail pairs.
    pub(super) fn record_failures(&self, why: &dyn Display) -> Vec<usize> {
        let broken = |beside: &&SecondaryLink| beside.link.as_ref().is_some_and(RdmaLink::is_broken);
        let failed = self
            .links
            .iter()
            .filter(broken)
            .inspect(|beside| self.rail_pairs.record_failure(&beside.busy.0, why));
        failed.map(|beside| beside.at).collect()
    }
}

struct SecondaryLink {
    link: Option<RdmaLink>,
    /// Index of its rail pair.
    at: usize,
    /// When its connection was last used: the node closes links without requests.
    since: Instant,
    busy: RailPairUse,
}

impl Drop for SecondaryLink {
    /// Returns the link for other operations unless it broke, once its abandoned reads have ended.
    fn drop(&mut self) {
        let Some(link) = self.link.take().filter(|link| !link.is_broken()) else { return };
        let (lane, since) = (Arc::clone(&self.busy.0), self.since);
        if !link.has_in_flight() {
            return lane.return_helper(link, since);
        }
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            // Otherwise it is dropped like any link with transfers in flight.
            if timeout(DRAIN_TIMEOUT, link.wait_idle()).await.is_ok() && !link.is_broken() {
                lane.return_helper(link, since);
            }
        });
    }
}

/// All rail pairs to a node, over one TLS over TCP path.
pub(super) struct RailPairs {
    pub(super) tcp: TcpPath,
    rail_pairs: Vec<Arc<RailPair>>,
    operation_limit: Arc<SlotQueue>,
    /// Idle time after which a link is closed. The node closes a link after three times as long.
    idle_timeout: Duration,
    /// Wakes the maintenance task.
    wake: Arc<Notify>,
    /// Notified when an attempt to make links has ended, or a link was returned.
    link_ready: Arc<Notify>,
    is_unavailable_logged: AtomicBool,
    is_failure_logged: AtomicBool,
}

impl RailPairs {
    /// `first` is the link that was made to test RDMA, on the rail pair at `at`. One rail pair runs
    /// `links_max` operations; several run at least enough to keep each of them busy.
    pub(super) fn new(
        tcp: TcpPath,
        lanes: Vec<RailPair>,
        wake: Arc<Notify>,
        at: usize,
        first: RdmaLink,
        links_max: usize,
        idle_timeout: Duration,
    ) -> RailPairs {
        let abreast = lanes.iter().filter(|lane| !lane.is_spare).count();
        let many = if abreast > 1 { LINKS_PER_RAIL_PAIR * abreast } else { 1 };
        let operation_limit = SlotQueue::new(links_max.max(many));
        let link_ready = Arc::new(Notify::new());
        let of_all = |lane| Arc::new(RailPair { link_ready: Arc::clone(&link_ready), ..lane });
        let rail_pairs: Vec<Arc<RailPair>> = lanes.into_iter().map(of_all).collect();
        rail_pairs[at].put_new(first);
        let (is_unavailable_logged, is_failure_logged) = (AtomicBool::new(false), AtomicBool::new(false));
        RailPairs {
            tcp,
            rail_pairs,
            operation_limit,
            idle_timeout,
            wake,
            link_ready,
            is_unavailable_logged,
            is_failure_logged,
        }
    }

    #[cfg(test)]
    pub(super) fn rail_pair(&self, at: usize) -> &RailPair {
        &self.rail_pairs[at]
    }

    /// Minimum bytes of a large fetch.
    fn large_bytes(&self) -> u64 {
        self.rail_pairs[0].local.rdma.config.large_bytes as u64
    }

    /// Usable rail pairs, the least loaded first.
    fn by_load(&self, tried: &[usize], is_spare: bool) -> Vec<(usize, &Arc<RailPair>)> {
        let untried = self.rail_pairs.iter().enumerate().filter(|(at, _)| !tried.contains(at));
        let mut lanes: Vec<_> =
            untried.filter(|(_, lane)| lane.is_spare == is_spare && lane.is_available()).collect();
        lanes.sort_by_key(|(_, lane)| (lane.is_suspect(), lane.in_flight.load(Ordering::Relaxed)));
        lanes
    }

    /// A link for an operation of this class, on none of the rail pairs in `tried`; `None` if there
    /// is none. An available link comes first. A missing one is waited for at most half of the time
    /// left `until` the deadline; the other half stays for the fallback.
    pub(super) async fn acquire(
        &self,
        class: TrafficClass,
        until: Instant,
        tried: &[usize],
        may_be_used: bool,
    ) -> Option<ExclusiveLink> {
        let place = self.operation_limit.acquire(class).await;
        let begun = Instant::now();
        let half = begun + until.saturating_duration_since(begun) / 2;
        let (made_since, mut patience) = ((!may_be_used).then_some(begun), None);
        for is_spare in [false, true] {
            loop {
                let came = self.link_ready.notified();
                tokio::pin!(came);
                came.as_mut().enable();
                let lanes = self.by_load(tried, is_spare);
                let there = |(at, lane): &(usize, &Arc<RailPair>)| {
                    lane.take_idle(self.idle_timeout, made_since)
                        .map(|(link, _)| (*at, RailPairUse::new(lane), link))
                };
                if let Some((at, busy, link)) = lanes.iter().find_map(there) {
                    self.request_links(
                        lanes.iter().take_while(|(other, _)| *other != at).map(|(_, lane)| *lane),
                    );
                    return Some(ExclusiveLink { link, at, busy, _place: place });
                }
                let Some((_, lane)) = lanes.iter().find(|(_, lane)| lane.may_connect()) else { break };
                // A node that is gone gets no request.
                if self.tcp.failure().is_some() {
                    return None;
                }
                let (_busy, _wanted) = (RailPairUse::new(lane), WaitingOperation(lane));
                let others = lane.waiting_operations.fetch_add(1, Ordering::Relaxed);
                let is_asked = others > 0 || lane.is_connecting.load(Ordering::Acquire);
                let patience =
                    patience.get_or_insert(if is_asked { half.min(begun + PENDING_LINK_WAIT) } else { half });
                self.wake.notify_one();
                if timeout_at(*patience, came).await.is_err() {
                    return None;
                }
            }
        }
        None
    }

    /// Links of idle rail pairs that are not in `without`.
    fn take_helpers(&self, without: &[usize]) -> Vec<SecondaryLink> {
        let unused: Vec<_> = self
            .by_load(without, false)
            .into_iter()
            .filter(|(_, lane)| !lane.is_suspect() && lane.in_flight.load(Ordering::Relaxed) == 0)
            .collect();
        let take = |(at, lane): &(usize, &Arc<RailPair>)| {
            let (link, since) = lane.take_idle(self.idle_timeout, None)?;
            Some(SecondaryLink { link: Some(link), at: *at, since, busy: RailPairUse::new(lane) })
        };
        let there = unused.iter().filter_map(take).collect();
        // Taking the last link would leave the next operation without one for the duration of the
        // fetch.
        let has_none = |lane: &&Arc<RailPair>| locked(&lane.idle).is_empty();
        self.request_links(unused.iter().map(|(_, lane)| *lane).filter(has_none));
        there
    }

    /// These rail pairs had no link for an operation: requests one for the next operation.
    fn request_links<'a>(&self, lanes: impl Iterator<Item = &'a Arc<RailPair>>) {
        for lane in lanes {
            lane.needs_link.store(true, Ordering::Relaxed);
            self.wake.notify_one();
        }
    }

    /// Requests links on a rail pair until every waiting operation has one, and updates its
    /// breaker.
    async fn connect(self: Arc<RailPairs>, lane: Arc<RailPair>) {
        loop {
            let asked = lane.attach(&self.tcp).await;
            lane.needs_link.store(false, Ordering::Relaxed);
            lane.suspect.is_set.store(false, Ordering::Relaxed);
            let is_made = matches!(asked, Ok(AttachOutcome::Attached(_)));
            *locked(&lane.unavailable_since) = (!is_made).then(Instant::now);
            self.record_attach(&lane, asked);
            if !is_made || !lane.lacks_links() {
                break;
            }
            self.link_ready.notify_waiters();
        }
        lane.is_connecting.store(false, Ordering::Release);
        self.link_ready.notify_waiters();
        // A request that arrived meanwhile was not seen.
        self.wake.notify_one();
    }

    /// Records the result of a request for a link.
    fn record_attach(&self, lane: &RailPair, asked: Result<AttachOutcome, PathError>) {
        let (peer, remote) = (self.tcp.peer(), lane.remote);
        match asked {
            Ok(AttachOutcome::Attached(link)) => {
                let was_open = lane.is_available();
                locked(&lane.breaker).record_success();
                lane.put_new(*link);
                if !was_open && lane.is_available() {
                    let device = &lane.local.rdma.transfers.rail().port().device;
                    tracing::info!(peer, device, remote, "RDMA rail pair is in use again");
                }
            }
            Ok(AttachOutcome::Unreachable(why)) => self.record_failure(lane, &why),
            // That is not a failure of the rail pair, so the next trial decides.
            Ok(AttachOutcome::Unavailable(why)) => {
                if !self.is_unavailable_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        peer,
                        why,
                        "some blocks go over TCP because the node gave no further RDMA link"
                    );
                }
            }
            // The operation that uses that connection reports the error.
            Err(error) => tracing::debug!(peer, remote, %error, "no RDMA link"),
        }
    }

    /// Returns the link of a finished operation.
    pub(super) fn release(&self, held: ExclusiveLink) {
        let ExclusiveLink { mut link, busy, _place, .. } = held;
        if link.prepare_reuse() {
            locked(&busy.0.breaker).record_success();
            busy.0.put_idle(link);
        }
        // The permit is released last, so that the next operation finds the link.
        drop((busy, _place));
    }

    /// Records an operation that its link did not complete, and why.
    pub(super) fn record_end(&self, held: &ExclusiveLink, why: &dyn Display) {
        if held.link.is_broken() {
            self.record_failure(&held.busy.0, why);
        }
    }

    /// Suspends a rail pair after a failed transfer. Warns once, for the network operator.
    fn record_failure(&self, lane: &RailPair, why: &dyn Display) {
        if !locked(&lane.breaker).record_failure(Instant::now()) {
            return;
        }
        // Idle links use the same rails, and the trial makes a new link.
        let idle = std::mem::take(&mut *locked(&lane.idle));
        drop(idle);
        self.wake.notify_one();
        let (peer, rdma) = (self.tcp.peer(), &lane.local.rdma);
        let (port, remote, errors) = (rdma.transfers.rail().port(), lane.remote, rdma.stats().failed);
        if self.is_failure_logged.swap(true, Ordering::Relaxed) {
            tracing::debug!(peer, device = port.device, remote, %why, "RDMA rail pair suspended again");
        } else {
            let device = &port.device;
            tracing::warn!(peer, device, gid = ?port.gid, remote, errors, %why, "RDMA transfer failed; its \
                rail pair is suspended");
        }
    }

    /// Closes idle links, requests links, and probes suspended rail pairs. Never returns.
    pub(super) async fn maintain(self: Arc<RailPairs>) {
        let mut ticks = interval((self.idle_timeout / 2).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // They are aborted with this task.
        let mut asking = JoinSet::new();
        loop {
            self.start_connects(&mut asking);
            let unasked = self.rail_pairs.iter().filter(|lane| !lane.is_connecting.load(Ordering::Acquire));
            let next = unasked.filter_map(|lane| locked(&lane.breaker).trial_at()).min();
            let wait = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = ticks.tick() => {
                    for lane in &self.rail_pairs {
                        drop(lane.take_expired(self.idle_timeout));
                    }
                }
                () = self.wake.notified() => {}
                () = wait => {}
                Some(_) = asking.join_next() => {}
            }
        }
    }

    /// Requests a link on each rail pair that needs one or is due for a trial.
    fn start_connects(self: &Arc<RailPairs>, asking: &mut JoinSet<()>) {
        for lane in &self.rail_pairs {
            // The path itself reports a node that is gone.
            if lane.should_connect() && self.tcp.failure().is_none() {
                lane.is_connecting.store(true, Ordering::Release);
                asking.spawn(Arc::clone(self).connect(Arc::clone(lane)));
            }
        }
        if self.tcp.failure().is_some() {
            self.link_ready.notify_waiters();
        }
    }
}
