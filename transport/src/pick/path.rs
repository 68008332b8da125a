//! Several open ways to one peer as one path.
//!
//! Each operation takes the way that is picked for it, and what becomes of it is remembered. A fetch that a way refused
//! before it gave a byte goes another way within its deadline. Ways that are not open are opened behind the operations. Not here:
//! what is concluded (`peer.rs`), what an operation says (the paths themselves).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{Class, LeaseId, Tier};
use kvfleet_proto::frame::{Frame, FrameHead};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::dialer::Way;
use super::peer::Peer;
use super::{PathKind, PickRules};
use crate::{
    AskedLayers, BoxFuture, Carried, FetchAnswer, FetchRequest, LayerSource, MissReason, Path, PathError,
    Progress, SaveAnswer, SaveRequest, SliceSink, Streamed,
};

/// The ways to a peer that are open.
pub(super) struct Open {
    ways: Arc<[Way]>,
    peer: Arc<Peer>,
    /// By position of the way.
    paths: Mutex<Vec<Option<Arc<dyn Path>>>>,
    leases: Mutex<LeaseWays>,
}

impl Open {
    pub(super) fn new(ways: Arc<[Way]>, peer: Arc<Peer>, at: usize, path: Arc<dyn Path>) -> Open {
        let mut paths = vec![None; ways.len()];
        paths[at] = Some(path);
        Open { ways, peer, paths: Mutex::new(paths), leases: Mutex::default() }
    }

    fn leases(&self) -> MutexGuard<'_, LeaseWays> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn paths(&self) -> MutexGuard<'_, Vec<Option<Arc<dyn Path>>>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way that the next operation takes, but for those that refused it.
    fn pick(&self, is_fetch: bool, refused: &[usize]) -> Option<(usize, Arc<dyn Path>)> {
        let paths = self.paths().clone();
        let is_open = |(at, path): (usize, &Option<Arc<dyn Path>>)| {
            !refused.contains(&at) && path.as_ref().is_some_and(|path| path.failure().is_none())
        };
        let open: Vec<bool> = paths.iter().enumerate().map(is_open).collect();
        let at = self.peer.pick(Instant::now(), &open, is_fetch)?;
        Some((at, paths.get(at).cloned().flatten()?))
    }

    /// Why nothing is open any more; nothing while something is.
    fn failure(&self) -> Option<PathError> {
        let mut failure = None;
        for path in self.paths().iter().flatten() {
            let failed = path.failure()?;
            failure.get_or_insert(failed);
        }
        failure
    }

    /// What an operation without a way is told.
    fn no_way(&self) -> PathError {
        let peer = self.peer.address().to_owned();
        self.failure().unwrap_or(PathError::Broken { peer, cause: "no path to it is open".to_owned() })
    }

    /// Takes note of what became of an operation. What the caller did wrong says nothing of the way.
    fn note<T>(&self, at: usize, ended: &Result<T, PathError>) {
        match ended {
            Ok(_) => self.peer.succeeded(at),
            Err(PathError::TooLarge { .. }) => {}
            Err(error) => self.peer.failed(Instant::now(), at, error),
        }
    }

    fn carried(&self, at: usize) -> &Carried {
        &self.ways[at].carried
    }

    /// A fetch that began with its answer, and came or not.
    fn note_fetch(&self, given: &GivenUp<'_>, ended: &Result<FetchAnswer, PathError>) {
        let GivenUp { at, begun, bytes, .. } = *given;
        let Ok(answer) = ended else { return self.note(at, ended) };
        let now = Instant::now();
        if let FetchAnswer::Partial { reason: MissReason::NodeLost, .. }
        | FetchAnswer::Miss { reason: MissReason::NodeLost } = answer
        {
            let peer = self.peer.address().to_owned();
            let cause = "it ended during a fetch".to_owned();
            return self.peer.failed(now, at, &PathError::Broken { peer, cause });
        }
        if bytes > 0 {
            self.peer.brought(at);
        }
        if *answer == (FetchAnswer::Miss { reason: MissReason::TooLate }) {
            return given.late(now);
        }
        self.peer.succeeded(at);
        // What a slow medium gave says nothing of the way.
        if bytes > 0 && answer.tiers().iter().all(|tier| *tier == Tier::Dram) {
            self.peer.fetched(now, at, bytes, now - begun);
        }
    }

    async fn fetch(
        &self,
        mut request: FetchRequest,
        taker: &mut dyn Taker,
    ) -> Result<FetchAnswer, PathError> {
        let (begun, deadline, mut refused) = (Instant::now(), request.deadline, Vec::new());
        let mut last = None;
        while let Some((at, path)) = self.pick(true, &refused) {
            let mut given = GivenUp::new(&self.peer, (at, self.ways[at].candidate.kind), &request);
            let mut count = |came: usize| {
                given.bytes += came as u64;
                self.carried(at).received(came);
            };
            request.deadline = deadline.saturating_sub(begun.elapsed());
            self.leases().note(request.asker.lease, at);
            let ended = taker.fetch(&*path, request.clone(), &mut count).await;
            given.is_over = true;
            self.note_fetch(&given, &ended);
            let is_refused = match &ended {
                Ok(answer) => *answer == FetchAnswer::Miss { reason: MissReason::NodeLost },
                Err(error) => goes_on(error),
            };
            if given.bytes > 0 || !is_refused {
                return ended;
            }
            last = Some(ended);
            refused.push(at);
        }
        last.unwrap_or_else(|| Err(self.no_way()))
    }

    /// Asks something short, over one way after the other until one answers.
    async fn ask<T>(
        &self,
        ask: impl Fn(Arc<dyn Path>) -> BoxFuture<'static, Result<T, PathError>>,
    ) -> Result<T, PathError> {
        let (mut refused, mut last) = (Vec::new(), None);
        while let Some((at, path)) = self.pick(false, &refused) {
            let ended = ask(path).await;
            self.note(at, &ended);
            match ended {
                Err(error) if goes_on(&error) => last = Some(error),
                ended => return ended,
            }
            refused.push(at);
        }
        Err(last.unwrap_or_else(|| self.no_way()))
    }

    async fn save(
        &self,
        request: SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let Some((at, path)) = self.pick(false, &[]) else { return Err(self.no_way()) };
        let counted = |position| {
            let frame = source(position);
            self.carried(at).sent(frame.bytes.len());
            frame
        };
        self.leases().note(request.asker.lease, at);
        // Half of it may be stored when it fails: whether it is said again is the caller's to say.
        let ended = path.save(request, &counted).await;
        self.note(at, &ended);
        ended
    }

    async fn save_layers(
        &self,
        request: SaveRequest,
        layers: &mut dyn LayerSource,
    ) -> Result<Streamed, PathError> {
        let Some((at, path)) = self.pick(false, &[]) else { return Err(self.no_way()) };
        self.leases().note(request.asker.lease, at);
        let ended = path.save_layers(request, &mut CountedLayers { layers, carried: self.carried(at) }).await;
        self.note(at, &ended);
        ended
    }

    /// Ends a lease over every way that it was used over: to the node it may be another one over each.
    async fn release(&self, lease: LeaseId) -> Result<(), PathError> {
        let used = self.leases().take(lease);
        let paths = self.paths().clone();
        let mut released = None;
        for (at, path) in paths.iter().enumerate().filter(|(at, _)| used & (1 << at) != 0) {
            let Some(path) = path.as_ref().filter(|path| path.failure().is_none()) else { continue };
            let ended = path.release(lease).await;
            self.note(at, &ended);
            // One that was heard is as good as all: what the others hold ends by itself.
            if !matches!(released, Some(Ok(()))) {
                released = Some(ended);
            }
        }
        match released {
            Some(Ok(())) => Ok(()),
            _ => self.ask(move |path| Box::pin(async move { path.release(lease).await })).await,
        }
    }

    /// Looks after one way: opens it if it is not open, and asks for a sign of life.
    async fn tend(&self, at: usize, is_ping_due: bool) {
        let path = self.paths()[at].clone().filter(|path| path.failure().is_none());
        let is_doubtful = !self.peer.is_closed(at);
        let Some(path) = path else {
            if !self.peer.may_dial(Instant::now(), at) {
                return;
            }
            let dialled = self.ways[at].candidate.dialer.dial(self.peer.address().to_owned()).await;
            self.note(at, &dialled);
            if let Ok(path) = dialled {
                self.paths()[at] = Some(path);
            }
            return;
        };
        let is_asked = if is_doubtful { self.peer.may_dial(Instant::now(), at) } else { is_ping_due };
        if is_asked {
            let pinged = path.ping().await;
            self.note(at, &pinged);
            if let Ok(took) = pinged {
                self.peer.pinged(at, took);
            }
        }
    }
}

/// A fetch over one way, whose caller may give it up before it has an answer: where somebody waited for it and nothing came, that way
/// was late, as it would have been by a deadline. Of one that brought something it is not known from which medium.
struct GivenUp<'a> {
    peer: &'a Peer,
    at: usize,
    begun: Instant,
    class: Class,
    progress: Progress,
    bytes: u64,
    is_over: bool,
}

impl<'a> GivenUp<'a> {
    fn new(peer: &'a Peer, (at, kind): (usize, PathKind), request: &FetchRequest) -> GivenUp<'a> {
        let (class, progress) = (request.class(), request.progress.clone());
        progress.begins(kind);
        GivenUp { peer, at, begun: Instant::now(), class, progress, bytes: 0, is_over: false }
    }

    /// It was not there in time. The way failed where the node was not even heard over it, and works where it was. What nobody waits for
    /// goes behind others, also on its way to the node, and says nothing of a way.
    fn late(&self, now: Instant) {
        let is_first = self.class == Class::Fetch;
        if let Some(since) = self.progress.unheard_since() {
            if is_first {
                self.peer.unheard(now, self.at, since);
            }
        } else if self.progress.is_answered() {
            self.peer.succeeded(self.at);
        }
        if is_first {
            self.peer.late(now, self.at, now - self.begun);
        }
    }
}

impl Drop for GivenUp<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if self.bytes > 0 {
            self.peer.brought(self.at);
        } else if self.class == Class::Fetch {
            self.late(Instant::now());
        }
    }
}

/// What a fetch is to bring, over whichever way.
trait Taker: Send {
    /// Fetches over this way; `count` hears of all encoded bytes that come.
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
        count: &'a mut (dyn FnMut(usize) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;
}

/// Frames.
struct Blocks<'s>(&'s mut (dyn FnMut(Frame) + Send));

impl Taker for Blocks<'_> {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
        count: &'a mut (dyn FnMut(usize) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let mut counted = |frame: Frame| {
                count(frame.bytes.len());
                (self.0)(frame);
            };
            path.fetch(request, &mut counted).await
        })
    }
}

/// Slices of these layers.
struct Layers<'s>(AskedLayers, &'s mut dyn SliceSink);

impl Taker for Layers<'_> {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
        count: &'a mut (dyn FnMut(usize) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let Layers(asked, sink) = self;
            path.fetch_layers(request, asked.clone(), &mut Counted { sink: &mut **sink, count }).await
        })
    }
}

/// A sink whose bytes are counted.
struct Counted<'a> {
    sink: &'a mut dyn SliceSink,
    count: &'a mut (dyn FnMut(usize) + Send),
}

impl SliceSink for Counted<'_> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        self.sink.head(position, head)
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        self.sink.slice(position, layer)
    }

    fn filled(&mut self, position: usize, layers: Range<usize>) {
        self.sink.filled(position, layers);
    }

    fn wrong(&mut self, position: usize) {
        self.sink.wrong(position);
    }

    fn received(&mut self, bytes: usize) {
        (self.count)(bytes);
        self.sink.received(bytes);
    }
}

/// Layers whose bytes are counted.
struct CountedLayers<'a> {
    layers: &'a mut dyn LayerSource,
    carried: &'a Carried,
}

impl LayerSource for CountedLayers<'_> {
    fn slice_bytes(&self) -> &[u32] {
        self.layers.slice_bytes()
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        self.layers.next()
    }

    fn head(&self, position: usize) -> Bytes {
        self.layers.head(position)
    }

    fn sent(&mut self, bytes: usize) {
        self.carried.sent(bytes);
        self.layers.sent(bytes);
    }
}

/// Leases that are known to have been used over a way. Above it all are forgotten, and released over the one in use.
const LEASES_MAX: usize = 4096;

/// Over which ways a lease was used, a bit for each.
#[derive(Default)]
struct LeaseWays(BTreeMap<LeaseId, u8>);

impl LeaseWays {
    fn note(&mut self, lease: LeaseId, at: usize) {
        if self.0.len() >= LEASES_MAX && !self.0.contains_key(&lease) {
            self.0.clear();
        }
        *self.0.entry(lease).or_default() |= 1 << at;
    }

    fn take(&mut self, lease: LeaseId) -> u8 {
        self.0.remove(&lease).unwrap_or(0)
    }
}

/// Whether another way may do better: all that is wrong is this one.
fn goes_on(error: &PathError) -> bool {
    !matches!(error, PathError::TooLarge { .. })
}

/// A path that is picked anew for each operation.
pub(super) struct PickPath {
    open: Arc<Open>,
    /// Looks after the ways; ends with the path.
    tending: Vec<JoinHandle<()>>,
}

impl PickPath {
    pub(super) fn new(open: Arc<Open>, rules: &PickRules) -> PickPath {
        // A single way is its owner's to dial anew.
        let ways = if open.ways.len() > 1 { open.ways.len() } else { 0 };
        let (every, ping_every) = (rules.tend_every, rules.ping_every.max(1));
        let tend = |at| tokio::spawn(tend(Arc::clone(&open), at, every, ping_every));
        PickPath { tending: (0..ways).map(tend).collect(), open }
    }
}

impl Drop for PickPath {
    fn drop(&mut self) {
        self.tending.iter().for_each(JoinHandle::abort);
    }
}

async fn tend(open: Arc<Open>, at: usize, every: Duration, ping_every: u32) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for tick in (0..ping_every).cycle() {
        ticks.tick().await;
        open.tend(at, tick == 0).await;
    }
}

impl Path for PickPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.open.fetch(request, &mut Blocks(sink)).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.open.fetch(request, &mut Layers(asked, sink)).await })
    }

    /// Whichever way it goes.
    fn moves_slices(&self) -> bool {
        self.open.paths().iter().flatten().all(|path| path.moves_slices())
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(self.open.save(request, source))
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<Streamed, PathError>> {
        Box::pin(self.open.save_layers(request, layers))
    }

    /// Over the way that a save would take now. Where it takes another one that does not, nothing is sent, and whole frames go as they would
    /// have.
    fn streams_saves(&self) -> bool {
        self.open.pick(false, &[]).is_some_and(|(_, path)| path.streams_saves())
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(self.open.release(lease))
    }

    fn failure(&self) -> Option<PathError> {
        self.open.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(self.open.ask(|path| Box::pin(async move { path.ping().await })))
    }
}
