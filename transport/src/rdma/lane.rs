//! The client's end: lanes to one node, each over one of our rails and one of the node's, with links that operations leave to
//! each other.
//!
//! An operation takes the lane that has the fewest under way. A lane on which a transfer failed is left alone for a time that
//! doubles, and then tried by a link of its own, over which a few bytes are read before it counts: never by a request. Links are
//! made by tasks of their own, so that whoever has too little time for one leaves it to the next. A link that an operation did
//! not bring to its end goes with it; the next one gets new queue pairs, and if something was under way on it, at once: cards tell
//! of a rail that is silent later than many operations wait. Not here: which rails go together (`pairs.rs`), what an operation
//! says (`fetch.rs`, `save.rs`).

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::Class;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at};

use super::link::{Asked, Link, Local, Reach};
use super::pairs::Pair;
use crate::ask::Asks;
use crate::pick::BreakerRules;
use crate::pick::breaker::Breaker;
use crate::tcp::TcpPath;
use crate::turns::{Place, Places};
use crate::{Path, PathError};

/// Time for a link. Cards take milliseconds for it; some seconds are what they try to reach a peer that does not answer, and what
/// their emulation takes.
pub(super) const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long nobody asks for a link after there was none: asking costs both ends queue pairs.
const WITHOUT: Duration = Duration::from_secs(5);

/// How long an operation waits for a link that is asked for already, before it goes without: cards take less for one.
const BESIDE: Duration = Duration::from_millis(100);

/// How long reads over a link may take to end that nobody waits for any more: a few times what is under way at most takes.
const QUIET_MAX: Duration = Duration::from_millis(100);

/// Links at once of each lane, at least: while one operation is answered, another has the rail.
const LINKS_PER_LANE: usize = 2;

/// Whether links of a lane were given up while something was under way on them, which nobody knows the end of.
#[derive(Default)]
pub(super) struct Doubt {
    is_there: AtomicBool,
    /// Who looks after lanes.
    told: Arc<Notify>,
}

impl Doubt {
    /// A link was given up so.
    pub(super) fn cast(&self) {
        self.is_there.store(true, Ordering::Relaxed);
        self.told.notify_one();
    }
}

/// One of our rails, and one of a node's.
pub(super) struct Lane {
    local: Arc<Local>,
    /// Which of the node's.
    remote: u32,
    /// Another lane has one of the two: this one is for when that fails.
    is_spare: bool,
    breaker: Mutex<Breaker>,
    /// Transfers of all its links.
    of_peer: Arc<Semaphore>,
    /// Whether a task asks for links.
    is_asked: AtomicBool,
    /// Operations that wait for a link.
    wanted: AtomicUsize,
    /// An operation went over another lane, as this one had no link.
    is_missed: AtomicBool,
    doubt: Arc<Doubt>,
    /// Told when there is a link that there was not.
    came: Arc<Notify>,
    /// When there was no link to be had.
    without: Mutex<Option<Instant>>,
    /// Links that no operation has, and since when; used last at the end.
    idle: Mutex<Vec<(Link, Instant)>>,
    under_way: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lane {
    /// Without links; `told` is notified of what is to be done about it.
    pub(super) fn new(local: &Arc<Local>, pair: Pair, rules: BreakerRules, told: &Arc<Notify>) -> Lane {
        Lane {
            local: Arc::clone(local),
            remote: pair.remote,
            is_spare: pair.is_spare,
            breaker: Mutex::new(Breaker::new(rules)),
            of_peer: local.rdma.flights.peer(),
            is_asked: AtomicBool::new(false),
            wanted: AtomicUsize::new(0),
            is_missed: AtomicBool::new(false),
            doubt: Arc::new(Doubt { told: Arc::clone(told), ..Doubt::default() }),
            came: Arc::default(),
            without: Mutex::default(),
            idle: Mutex::default(),
            under_way: AtomicUsize::new(0),
        }
    }

    /// Packets do not pass: it is left alone at first.
    pub(super) fn leave_alone(&self) {
        locked(&self.breaker).failed(Instant::now());
    }

    fn is_open(&self) -> bool {
        locked(&self.breaker).is_closed()
    }

    /// As if a link had been given up on it, and nobody was told.
    #[cfg(test)]
    pub(super) fn is_in_doubt(&self) {
        self.doubt.is_there.store(true, Ordering::Relaxed);
    }

    /// Whether links were given up on it just now, so that others come first.
    fn is_doubted(&self) -> bool {
        self.doubt.is_there.load(Ordering::Relaxed)
    }

    /// Whether there may be a link if one is asked for: who was told that there is none is not followed by the next.
    fn may_have(&self) -> bool {
        self.is_open() && locked(&self.without).is_none_or(|since| since.elapsed() >= WITHOUT)
    }

    fn is_short(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > locked(&self.idle).len()
    }

    /// Whether a link is to be asked for now.
    fn is_to_be_asked(&self) -> bool {
        if self.is_asked.load(Ordering::Acquire) {
            return false;
        }
        let is_open = self.is_open();
        if !is_open {
            return locked(&self.breaker).passes(Instant::now());
        }
        let is_missed = self.is_missed.load(Ordering::Relaxed) && locked(&self.idle).is_empty();
        self.may_have() && (is_missed || self.is_doubted() || self.is_short())
    }

    /// The link that was used last, and when, if one can be used again; made since then, where that is said.
    fn take(&self, idle_timeout: Duration, made_since: Option<Instant>) -> Option<(Link, Instant)> {
        loop {
            let (mut link, since) = locked(&self.idle).pop()?;
            let is_fit = made_since.is_none_or(|begun| !link.is_used && since >= begun);
            if is_fit && since.elapsed() < idle_timeout && link.rest() {
                return Some((link, since));
            }
        }
    }

    fn keep(&self, link: Link) {
        self.keep_since(link, Instant::now());
    }

    /// Keeps one whose connection nobody used since then.
    fn keep_since(&self, link: Link, since: Instant) {
        let mut idle = locked(&self.idle);
        let at = idle.partition_point(|(_, other)| *other <= since);
        idle.insert(at, (link, since));
        drop(idle);
        self.came.notify_waiters();
    }

    /// Takes back one that only helped; of a lane that is left alone since, links go.
    fn take_back(&self, link: Link, since: Instant) {
        if self.is_open() {
            self.keep_since(link, since);
        }
    }

    /// Keeps one that was just made.
    fn keep_new(&self, mut link: Link) {
        link.watch(&self.doubt);
        self.keep(link);
    }

    /// Links that nobody used for long.
    fn old(&self, idle_timeout: Duration) -> Vec<(Link, Instant)> {
        let mut links = locked(&self.idle);
        // Used last is taken first, so the front is the oldest.
        let old = links.iter().take_while(|(_, since)| since.elapsed() >= idle_timeout).count();
        links.drain(..old).collect()
    }

    /// Asks for a link and tries it.
    pub(super) async fn attach(&self, tcp: &TcpPath) -> Result<Asked, PathError> {
        match timeout(ATTACH_TIMEOUT, Link::attach(tcp, (&self.local, self.remote), &self.of_peer)).await {
            Ok(asked) => asked,
            Err(_) => Ok(Asked::Dead("its RDMA answers too slowly".to_owned())),
        }
    }
}

/// Counts an operation on its lane.
struct Busy(Arc<Lane>);

impl Busy {
    fn new(lane: &Arc<Lane>) -> Busy {
        lane.under_way.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(lane))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts an operation that waits for a link.
struct Wanted<'a>(&'a Lane);

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.wanted.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A link that one operation has to itself.
pub(super) struct Held {
    pub(super) link: Link,
    /// Its lane, by position.
    pub(super) at: usize,
    busy: Busy,
    _place: Place,
}

/// Links over which a fetch reads that was asked over another one.
pub(super) struct Besides<'a> {
    lanes: &'a Lanes,
    /// Lanes of which none is taken: the one that was asked, and those whose links broke before.
    without: Vec<usize>,
    may_take: bool,
    bytes: u64,
    taken: Vec<Beside>,
}

impl<'a> Besides<'a> {
    /// None yet of other lanes than `own` and those that are `left_out`, and never any unless they `may` be taken.
    pub(super) fn new(lanes: &'a Lanes, own: usize, left_out: &[usize], may: bool) -> Besides<'a> {
        let without = left_out.iter().copied().chain([own]).collect();
        Besides { lanes, without, may_take: may, bytes: 0, taken: Vec::new() }
    }

    /// So many bytes more are to be read that any link reaches: takes others once they are many.
    pub(super) fn help(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        // Where there was none, one is made meanwhile.
        if self.may_take && self.taken.is_empty() && self.bytes >= self.lanes.large_bytes() {
            self.taken = self.lanes.beside(&self.without);
        }
    }

    pub(super) fn reaches(&self) -> impl Iterator<Item = &Reach> {
        self.taken.iter().filter_map(|beside| beside.link.as_ref()).map(Link::reach)
    }

    /// Takes note of those that broke: their lanes.
    pub(super) fn ended(&self, why: &dyn Display) -> Vec<usize> {
        let broken = |beside: &&Beside| beside.link.as_ref().is_some_and(Link::is_broken);
        let failed = self.taken.iter().filter(broken).inspect(|beside| self.lanes.fail(&beside.busy.0, why));
        failed.map(|beside| beside.at).collect()
    }
}

struct Beside {
    link: Option<Link>,
    /// Its lane, by position.
    at: usize,
    /// When its connection was used last: the node ends links over which nothing is asked.
    since: Instant,
    busy: Busy,
}

impl Drop for Beside {
    /// The next one has it, unless it broke; once what was begun over it has ended, which nobody waits for any more.
    fn drop(&mut self) {
        let Some(link) = self.link.take().filter(|link| !link.is_broken()) else { return };
        let (lane, since) = (Arc::clone(&self.busy.0), self.since);
        if !link.is_under_way() {
            return lane.take_back(link, since);
        }
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            // Else it goes as any link does on which something is under way.
            if timeout(QUIET_MAX, link.quiet()).await.is_ok() && !link.is_broken() {
                lane.take_back(link, since);
            }
        });
    }
}

/// All lanes to a node, over one path of TLS over TCP.
pub(super) struct Lanes {
    pub(super) tcp: TcpPath,
    lanes: Vec<Arc<Lane>>,
    at_once: Arc<Places>,
    /// The node closes what nobody used for three times as long.
    idle_timeout: Duration,
    /// Something is to be done about a lane.
    told: Arc<Notify>,
    /// Somebody asked for links, and there are some or none; or there is one again.
    came: Arc<Notify>,
    is_told: AtomicBool,
    is_failure_told: AtomicBool,
}

impl Lanes {
    /// Over this path; `first` is a link that was made to see whether there can be any, on the lane of that position. Of one lane
    /// `links_max` have operations at once; of several no fewer than keep each of them under way.
    pub(super) fn new(
        tcp: TcpPath,
        (lanes, told): (Vec<Lane>, Arc<Notify>),
        (at, first): (usize, Link),
        (links_max, idle_timeout): (usize, Duration),
    ) -> Lanes {
        let abreast = lanes.iter().filter(|lane| !lane.is_spare).count();
        let many = if abreast > 1 { LINKS_PER_LANE * abreast } else { 1 };
        let at_once = Places::new(links_max.max(many));
        let came = Arc::new(Notify::new());
        let of_all = |lane| Arc::new(Lane { came: Arc::clone(&came), ..lane });
        let lanes: Vec<Arc<Lane>> = lanes.into_iter().map(of_all).collect();
        lanes[at].keep_new(first);
        let (is_told, is_failure_told) = (AtomicBool::new(false), AtomicBool::new(false));
        Lanes { tcp, lanes, at_once, idle_timeout, told, came, is_told, is_failure_told }
    }

    #[cfg(test)]
    pub(super) fn lane(&self, at: usize) -> &Lane {
        &self.lanes[at]
    }

    /// Bytes from which on a fetch is large.
    fn large_bytes(&self) -> u64 {
        self.lanes[0].local.rdma.config.large_bytes as u64
    }

    /// Lanes that may be used, those that have the fewest under way first.
    fn in_order(&self, tried: &[usize], is_spare: bool) -> Vec<(usize, &Arc<Lane>)> {
        let untried = self.lanes.iter().enumerate().filter(|(at, _)| !tried.contains(at));
        let mut lanes: Vec<_> =
            untried.filter(|(_, lane)| lane.is_spare == is_spare && lane.is_open()).collect();
        lanes.sort_by_key(|(_, lane)| (lane.is_doubted(), lane.under_way.load(Ordering::Relaxed)));
        lanes
    }

    /// A link for an operation of this class, of none of the lanes that it `tried`; nothing when there is none to be had. One
    /// that is there comes first; one that is not is waited for at most half of the time that is left `until` then, so that
    /// the other half is there to go without.
    pub(super) async fn held(
        &self,
        (class, until): (Class, Instant),
        tried: &[usize],
        may_be_used: bool,
    ) -> Option<Held> {
        let place = self.at_once.take(class).await;
        let begun = Instant::now();
        let half = begun + until.saturating_duration_since(begun) / 2;
        let (made_since, mut patience) = ((!may_be_used).then_some(begun), None);
        for is_spare in [false, true] {
            loop {
                let came = self.came.notified();
                tokio::pin!(came);
                came.as_mut().enable();
                let lanes = self.in_order(tried, is_spare);
                let there = |(at, lane): &(usize, &Arc<Lane>)| {
                    lane.take(self.idle_timeout, made_since).map(|(link, _)| (*at, Busy::new(lane), link))
                };
                if let Some((at, busy, link)) = lanes.iter().find_map(there) {
                    self.miss(lanes.iter().take_while(|(other, _)| *other != at).map(|(_, lane)| *lane));
                    return Some(Held { link, at, busy, _place: place });
                }
                let Some((_, lane)) = lanes.iter().find(|(_, lane)| lane.may_have()) else { break };
                // Nobody asks a node that is gone.
                if self.tcp.failure().is_some() {
                    return None;
                }
                let (_busy, _wanted) = (Busy::new(lane), Wanted(lane));
                let others = lane.wanted.fetch_add(1, Ordering::Relaxed);
                let is_asked = others > 0 || lane.is_asked.load(Ordering::Acquire);
                let patience = patience.get_or_insert(if is_asked { half.min(begun + BESIDE) } else { half });
                self.told.notify_one();
                if timeout_at(*patience, came).await.is_err() {
                    return None;
                }
            }
        }
        None
    }

    /// Links of other lanes than these on which nothing is under way.
    fn beside(&self, without: &[usize]) -> Vec<Beside> {
        let unused: Vec<_> = self
            .in_order(without, false)
            .into_iter()
            .filter(|(_, lane)| !lane.is_doubted() && lane.under_way.load(Ordering::Relaxed) == 0)
            .collect();
        let take = |(at, lane): &(usize, &Arc<Lane>)| {
            let (link, since) = lane.take(self.idle_timeout, None)?;
            Some(Beside { link: Some(link), at: *at, since, busy: Busy::new(lane) })
        };
        let there = unused.iter().filter_map(take).collect();
        // One that took the last leaves the next operation none for as long as the fetch lasts.
        let has_none = |lane: &&Arc<Lane>| locked(&lane.idle).is_empty();
        self.miss(unused.iter().map(|(_, lane)| *lane).filter(has_none));
        there
    }

    /// These had no link for an operation: they are to have one for the next.
    fn miss<'a>(&self, lanes: impl Iterator<Item = &'a Arc<Lane>>) {
        for lane in lanes {
            lane.is_missed.store(true, Ordering::Relaxed);
            self.told.notify_one();
        }
    }

    /// Asks for links on a lane until there are as many as operations wait for, and tells its breaker.
    async fn make(self: Arc<Lanes>, lane: Arc<Lane>) {
        loop {
            let asked = lane.attach(&self.tcp).await;
            lane.is_missed.store(false, Ordering::Relaxed);
            lane.doubt.is_there.store(false, Ordering::Relaxed);
            let is_made = matches!(asked, Ok(Asked::Made(_)));
            *locked(&lane.without) = (!is_made).then(Instant::now);
            self.take_note(&lane, asked);
            if !is_made || !lane.is_short() {
                break;
            }
            self.came.notify_waiters();
        }
        lane.is_asked.store(false, Ordering::Release);
        self.came.notify_waiters();
        // Whoever wanted one since was not seen.
        self.told.notify_one();
    }

    /// What became of asking for a link.
    fn take_note(&self, lane: &Lane, asked: Result<Asked, PathError>) {
        let (peer, remote) = (self.tcp.peer(), lane.remote);
        match asked {
            Ok(Asked::Made(link)) => {
                let was_open = lane.is_open();
                locked(&lane.breaker).succeeded();
                lane.keep_new(*link);
                if !was_open && lane.is_open() {
                    let device = &lane.local.rdma.flights.rail().port().device;
                    tracing::info!(peer, device, remote, "an RDMA lane is used again");
                }
            }
            Ok(Asked::Dead(why)) => self.fail(lane, &why),
            // That says nothing of the lane, so that the next trial decides.
            Ok(Asked::None(why)) => {
                if !self.is_told.swap(true, Ordering::Relaxed) {
                    tracing::warn!(peer, why, "some blocks go over TCP, as there is no further RDMA link");
                }
            }
            // The operation that goes over that connection hears of it.
            Err(error) => tracing::debug!(peer, remote, %error, "no RDMA link"),
        }
    }

    /// Takes back the link of an operation that is over.
    pub(super) fn keep(&self, held: Held) {
        let Held { mut link, busy, _place, .. } = held;
        if link.rest() {
            locked(&busy.0.breaker).succeeded();
            busy.0.keep(link);
        }
        // The place goes last: whoever waits for it finds the link.
        drop((busy, _place));
    }

    /// Takes note of an operation that its link did not bring to an end, and why.
    pub(super) fn ended(&self, held: &Held, why: &dyn Display) {
        if held.link.is_broken() {
            self.fail(&held.busy.0, why);
        }
    }

    /// Transfers fail on this lane: it is left alone for a time. Says so once; whoever runs the network should know.
    fn fail(&self, lane: &Lane, why: &dyn Display) {
        if !locked(&lane.breaker).failed(Instant::now()) {
            return;
        }
        // What is idle goes over the same rails, and the trial makes a new one.
        let idle = std::mem::take(&mut *locked(&lane.idle));
        drop(idle);
        self.told.notify_one();
        let (peer, rdma) = (self.tcp.peer(), &lane.local.rdma);
        let (port, remote, errors) = (rdma.flights.rail().port(), lane.remote, rdma.numbers().failed);
        if self.is_failure_told.swap(true, Ordering::Relaxed) {
            tracing::debug!(peer, device = port.device, remote, %why, "an RDMA lane is left alone again");
        } else {
            let device = &port.device;
            tracing::warn!(peer, device, gid = ?port.gid, remote, errors, %why, "an RDMA transfer failed: its lane is left alone");
        }
    }

    /// Ends what is idle, asks for links, and tries lanes that are left alone. Never ends by itself.
    pub(super) async fn tend(self: Arc<Lanes>) {
        let mut ticks = interval((self.idle_timeout / 2).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // They end with this.
        let mut asking = JoinSet::new();
        loop {
            self.ask(&mut asking);
            let unasked = self.lanes.iter().filter(|lane| !lane.is_asked.load(Ordering::Acquire));
            let next = unasked.filter_map(|lane| locked(&lane.breaker).trial_at()).min();
            let wait = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = ticks.tick() => {
                    let old: Vec<_> = self.lanes.iter().flat_map(|lane| lane.old(self.idle_timeout)).collect();
                    drop(old);
                }
                () = self.told.notified() => {}
                () = wait => {}
                Some(_) = asking.join_next() => {}
            }
        }
    }

    /// Asks for a link on each lane that is to have one, or whose time to be tried has come.
    fn ask(self: &Arc<Lanes>, asking: &mut JoinSet<()>) {
        for lane in &self.lanes {
            // Of a node that is gone its own path says so.
            if lane.is_to_be_asked() && self.tcp.failure().is_none() {
                lane.is_asked.store(true, Ordering::Release);
                asking.spawn(Arc::clone(self).make(Arc::clone(lane)));
            }
        }
        if self.tcp.failure().is_some() {
            self.came.notify_waiters();
        }
    }
}
