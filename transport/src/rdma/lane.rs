//! The client's end: lanes to one node, each over one of our rails and one of the node's, with links that operations leave to
//! each other.
//!
//! An operation takes the lane that has the fewest under way. A lane on which a transfer failed is left alone for a time that
//! doubles, and then tried by a link of its own, over which a few bytes are read before it counts: never by a request. A link that
//! an operation did not bring to its end goes with it; the next one gets new queue pairs. Not here: which rails go together
//! (`pairs.rs`), what an operation says (`fetch.rs`, `save.rs`).

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::Class;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::link::{Asked, Link, Local};
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

/// How long an operation waits for another that asks for a link, before it goes without: cards take less for one.
const BESIDE: Duration = Duration::from_millis(100);

/// Links at once of each lane, at least: while one operation is answered, another has the rail.
const LINKS_PER_LANE: usize = 2;

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
    /// Held by whoever asks for a link.
    asking: tokio::sync::Mutex<()>,
    /// Since when a link is asked for, or there was none to be had.
    asked: Mutex<Option<Instant>>,
    /// Links that no operation has, and since when; used last at the end.
    idle: Mutex<Vec<(Link, Instant)>>,
    under_way: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lane {
    pub(super) fn new(local: &Arc<Local>, pair: Pair, rules: BreakerRules) -> Lane {
        Lane {
            local: Arc::clone(local),
            remote: pair.remote,
            is_spare: pair.is_spare,
            breaker: Mutex::new(Breaker::new(rules)),
            of_peer: local.rdma.flights.peer(),
            asking: tokio::sync::Mutex::default(),
            asked: Mutex::default(),
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

    /// The link that was used last, if one can be used again.
    fn take(&self, idle_timeout: Duration) -> Option<Link> {
        loop {
            let (mut link, since) = locked(&self.idle).pop()?;
            if since.elapsed() < idle_timeout && link.rest() {
                return Some(link);
            }
        }
    }

    fn keep(&self, link: Link) {
        locked(&self.idle).push((link, Instant::now()));
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

/// A link that one operation has to itself.
pub(super) struct Held {
    pub(super) link: Link,
    /// Its lane, by position.
    pub(super) at: usize,
    busy: Busy,
    place: Place,
}

/// All lanes to a node, over one path of TLS over TCP.
pub(super) struct Lanes {
    pub(super) tcp: TcpPath,
    lanes: Vec<Arc<Lane>>,
    at_once: Arc<Places>,
    /// The node closes what nobody used for three times as long.
    idle_timeout: Duration,
    /// A lane is left alone, and somebody is to try it.
    left_alone: Notify,
    is_told: AtomicBool,
    is_failure_told: AtomicBool,
}

impl Lanes {
    /// Over this path; `first` is a link that was made to see whether there can be any, on the lane of that position. Of one lane
    /// `links_max` have operations at once; of several no fewer than keep each of them under way.
    pub(super) fn new(
        tcp: TcpPath,
        lanes: Vec<Lane>,
        (at, first): (usize, Link),
        (links_max, idle_timeout): (usize, Duration),
    ) -> Lanes {
        let many = if lanes.len() > 1 { LINKS_PER_LANE * lanes.len() } else { 1 };
        let at_once = Places::new(links_max.max(many));
        let lanes: Vec<Arc<Lane>> = lanes.into_iter().map(Arc::new).collect();
        lanes[at].keep(first);
        let (is_told, is_failure_told) = (AtomicBool::new(false), AtomicBool::new(false));
        Lanes { tcp, lanes, at_once, idle_timeout, left_alone: Notify::new(), is_told, is_failure_told }
    }

    /// How many may be used side by side.
    pub(super) fn open(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.is_spare && lane.is_open()).count()
    }

    /// Bytes of a stripe, and of stripes that may wait for others: as many as may stay where they are read to.
    pub(super) fn stripes(&self) -> (u64, u64) {
        let config = &self.lanes[0].local.rdma.config;
        (config.stripe_bytes as u64, config.local_bytes as u64 / 2)
    }

    /// A link for an operation of this class, of none of the lanes that it `tried`; nothing when there is none to be had.
    pub(super) async fn held(
        &self,
        class: Class,
        tried: &[usize],
        may_be_used: bool,
    ) -> Result<Option<Held>, PathError> {
        let place = self.at_once.take(class).await;
        let untried = self.lanes.iter().enumerate().filter(|(at, _)| !tried.contains(at));
        let mut lanes: Vec<_> = untried.filter(|(_, lane)| lane.is_open()).collect();
        lanes.sort_by_key(|(_, lane)| (lane.is_spare, lane.under_way.load(Ordering::Relaxed)));
        for (at, lane) in lanes {
            let busy = Busy::new(lane);
            let link = match lane.take(self.idle_timeout).filter(|_| may_be_used) {
                Some(link) => Some(link),
                None => self.attach(lane).await?,
            };
            if let Some(link) = link {
                return Ok(Some(Held { link, at, busy, place }));
            }
        }
        Ok(None)
    }

    /// A new link, unless there was none just before, or somebody asks for one for long: who runs out of time in a network that
    /// loses everything is not to be followed by the next.
    async fn attach(&self, lane: &Lane) -> Result<Option<Link>, PathError> {
        let Ok(_asking) = timeout(BESIDE, lane.asking.lock()).await else { return Ok(None) };
        {
            let mut asked = locked(&lane.asked);
            if asked.is_some_and(|since| since.elapsed() < WITHOUT) {
                return Ok(None);
            }
            *asked = Some(Instant::now());
        }
        let asked = lane.attach(&self.tcp).await?;
        *locked(&lane.asked) = matches!(asked, Asked::None(_)).then(Instant::now);
        match asked {
            Asked::Made(link) => Ok(Some(*link)),
            Asked::Dead(why) => {
                self.fail(lane, &why);
                Ok(None)
            }
            Asked::None(why) => {
                if !self.is_told.swap(true, Ordering::Relaxed) {
                    let peer = self.tcp.peer();
                    tracing::warn!(peer, why, "some blocks go over TCP, as there is no further RDMA link");
                }
                Ok(None)
            }
        }
    }

    /// Takes back the link of an operation that is over.
    pub(super) fn keep(&self, held: Held) {
        let Held { mut link, busy, place, .. } = held;
        if link.rest() {
            locked(&busy.0.breaker).succeeded();
            busy.0.keep(link);
        }
        // The place goes last: whoever waits for it finds the link.
        drop((busy, place));
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
        self.left_alone.notify_one();
        let (peer, rdma) = (self.tcp.peer(), &lane.local.rdma);
        let (port, remote, errors) = (rdma.flights.rail().port(), lane.remote, rdma.numbers().failed);
        if self.is_failure_told.swap(true, Ordering::Relaxed) {
            tracing::debug!(peer, device = port.device, remote, %why, "an RDMA lane is left alone again");
        } else {
            let device = &port.device;
            tracing::warn!(peer, device, gid = ?port.gid, remote, errors, %why, "an RDMA transfer failed: its lane is left alone");
        }
    }

    /// Ends what is idle, and tries lanes that are left alone. Never ends by itself.
    pub(super) async fn tend(self: Arc<Lanes>) {
        let mut ticks = interval((self.idle_timeout / 2).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let trials = self.lanes.iter().filter_map(|lane| locked(&lane.breaker).trial_at());
            let next = trials.min();
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
                () = self.left_alone.notified() => {}
                () = wait => self.try_lanes().await,
            }
        }
    }

    /// Tries each lane whose time has come: a link is made on it, and read over.
    async fn try_lanes(&self) {
        for lane in &self.lanes {
            let is_due = {
                let mut breaker = locked(&lane.breaker);
                !breaker.is_closed() && breaker.passes(Instant::now())
            };
            // Of a node that is gone its own path says so.
            if !is_due || self.tcp.failure().is_some() {
                continue;
            }
            match lane.attach(&self.tcp).await {
                Ok(Asked::Made(link)) => {
                    locked(&lane.breaker).succeeded();
                    lane.keep(*link);
                    let device = &lane.local.rdma.flights.rail().port().device;
                    tracing::info!(
                        peer = self.tcp.peer(),
                        device,
                        remote = lane.remote,
                        "an RDMA lane is used again"
                    );
                }
                Ok(Asked::Dead(why)) => self.fail(lane, &why),
                // That says nothing of the lane, so that the next trial decides.
                Ok(Asked::None(_)) | Err(_) => {}
            }
        }
    }
}
