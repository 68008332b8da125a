//! Several open paths to one peer as one path.
//!
//! Each operation uses the path chosen for it, and its result is recorded. If a path refuses a
//! fetch before any byte, the fetch continues over another one within its deadline. Closed paths
//! are opened in the background. Not here: the conclusions (`peer.rs`), and the operations (the
//! paths themselves).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{LeaseId, TrafficClass};
use kvfleet_proto::frame::{Frame, FrameHead};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::dialer::PathOption;
use super::peer::PeerPaths;
use super::{PathKind, PickRules};
use crate::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, LayerSource, LayeredSaveOutcome, MissReason, Path,
    PathError, Progress, SaveAnswer, SaveRequest, SliceSink, TrafficCounters,
};

/// The open paths to a peer.
pub(super) struct OpenPaths {
    options: Arc<[PathOption]>,
    peer: Arc<PeerPaths>,
    /// By position of the candidate.
    paths: Mutex<Vec<Option<Arc<dyn Path>>>>,
    leases: Mutex<LeasePaths>,
}

impl OpenPaths {
    pub(super) fn new(
        options: Arc<[PathOption]>,
        peer: Arc<PeerPaths>,
        at: usize,
        path: Arc<dyn Path>,
    ) -> OpenPaths {
        let mut paths = vec![None; options.len()];
        paths[at] = Some(path);
        OpenPaths { options, peer, paths: Mutex::new(paths), leases: Mutex::default() }
    }

    fn leases(&self) -> MutexGuard<'_, LeasePaths> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn paths(&self) -> MutexGuard<'_, Vec<Option<Arc<dyn Path>>>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of the next operation, except the `refused` ones.
    fn pick(&self, refused: &[usize]) -> Option<(usize, Arc<dyn Path>)> {
        let paths = self.paths().clone();
        let is_open = |(at, path): (usize, &Option<Arc<dyn Path>>)| {
            !refused.contains(&at) && path.as_ref().is_some_and(|path| path.failure().is_none())
        };
        let open: Vec<bool> = paths.iter().enumerate().map(is_open).collect();
        let at = self.peer.pick(&open)?;
        Some((at, paths.get(at).cloned().flatten()?))
    }

    /// Why no path is open; `None` while one is.
    fn failure(&self) -> Option<PathError> {
        let mut failure = None;
        for path in self.paths().iter().flatten() {
            let failed = path.failure()?;
            failure.get_or_insert(failed);
        }
        failure
    }

    /// The error of an operation without a path.
    fn no_path_error(&self) -> PathError {
        let peer = self.peer.address().to_owned();
        self.failure().unwrap_or(PathError::Broken { peer, cause: "no path to the peer is open".to_owned() })
    }

    /// Records the result of an operation. A mistake of the caller says no more about the path.
    fn record<T>(&self, at: usize, ended: &Result<T, PathError>) {
        match ended {
            Ok(_) => self.peer.record_success(at),
            Err(PathError::TooLarge { .. }) => {}
            Err(error) => self.peer.record_failure(Instant::now(), at, error),
        }
    }

    fn traffic(&self, at: usize) -> &TrafficCounters {
        &self.options[at].traffic
    }

    /// Records a fetch that ended with an answer or an error.
    fn record_fetch(&self, given: &FetchAttempt<'_>, ended: &Result<FetchAnswer, PathError>) {
        let FetchAttempt { at, bytes, .. } = *given;
        let Ok(answer) = ended else { return self.record(at, ended) };
        let now = Instant::now();
        if let FetchAnswer::Partial { reason: MissReason::NodeLost, .. }
        | FetchAnswer::Miss { reason: MissReason::NodeLost } = answer
        {
            let peer = self.peer.address().to_owned();
            let cause = "the connection ended during a fetch".to_owned();
            return self.peer.record_failure(now, at, &PathError::Broken { peer, cause });
        }
        if bytes > 0 {
            self.peer.record_delivery(at);
        }
        if *answer == (FetchAnswer::Miss { reason: MissReason::TooLate }) {
            return given.record_late(now);
        }
        self.peer.record_success(at);
    }

    async fn fetch(
        &self,
        mut request: FetchRequest,
        taker: &mut dyn FetchTarget,
    ) -> Result<FetchAnswer, PathError> {
        let (begun, deadline, mut refused) = (Instant::now(), request.deadline, Vec::new());
        let mut last = None;
        while let Some((at, path)) = self.pick(&refused) {
            let mut given = FetchAttempt::new(&self.peer, at, self.options[at].candidate.kind, &request);
            let mut count = |came: usize| {
                given.bytes += came as u64;
                self.traffic(at).received(came);
            };
            request.deadline = deadline.saturating_sub(begun.elapsed());
            self.leases().record(request.context.lease, at);
            let ended = taker.fetch(&*path, request.clone(), &mut count).await;
            given.is_finished = true;
            self.record_fetch(&given, &ended);
            let is_refused = match &ended {
                Ok(answer) => *answer == FetchAnswer::Miss { reason: MissReason::NodeLost },
                Err(error) => can_retry_elsewhere(error),
            };
            if given.bytes > 0 || !is_refused {
                return ended;
            }
            last = Some(ended);
            refused.push(at);
        }
        last.unwrap_or_else(|| Err(self.no_path_error()))
    }

    /// Runs a short operation over one path after another until one answers.
    async fn call<T>(
        &self,
        ask: impl Fn(Arc<dyn Path>) -> BoxFuture<'static, Result<T, PathError>>,
    ) -> Result<T, PathError> {
        let (mut refused, mut last) = (Vec::new(), None);
        while let Some((at, path)) = self.pick(&refused) {
            let ended = ask(path).await;
            self.record(at, &ended);
            match ended {
                Err(error) if can_retry_elsewhere(&error) => last = Some(error),
                ended => return ended,
            }
            refused.push(at);
        }
        Err(last.unwrap_or_else(|| self.no_path_error()))
    }

    async fn save(
        &self,
        request: SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let Some((at, path)) = self.pick(&[]) else { return Err(self.no_path_error()) };
        let counted = |position| {
            let frame = source(position);
            self.traffic(at).sent(frame.bytes.len());
            frame
        };
        self.leases().record(request.context.lease, at);
        // A failed save may be half stored, so the caller decides about a retry.
        let ended = path.save(request, &counted).await;
        self.record(at, &ended);
        ended
    }

    async fn save_layers(
        &self,
        request: SaveRequest,
        layers: &mut dyn LayerSource,
    ) -> Result<LayeredSaveOutcome, PathError> {
        let Some((at, path)) = self.pick(&[]) else { return Err(self.no_path_error()) };
        self.leases().record(request.context.lease, at);
        let ended =
            path.save_layers(request, &mut CountingLayerSource { layers, traffic: self.traffic(at) }).await;
        self.record(at, &ended);
        ended
    }

    /// Ends a lease over every path that used it: it may be a separate lease over each.
    async fn release(&self, lease: LeaseId) -> Result<(), PathError> {
        let used = self.leases().take(lease);
        let paths = self.paths().clone();
        let mut released = None;
        for (at, path) in paths.iter().enumerate().filter(|(at, _)| used & (1 << at) != 0) {
            let Some(path) = path.as_ref().filter(|path| path.failure().is_none()) else { continue };
            let ended = path.release(lease).await;
            self.record(at, &ended);
            // One successful release is enough: the others' leases expire.
            if !matches!(released, Some(Ok(()))) {
                released = Some(ended);
            }
        }
        match released {
            Some(Ok(())) => Ok(()),
            _ => self.call(move |path| Box::pin(async move { path.release(lease).await })).await,
        }
    }

    /// Maintains one path: opens it if it is closed, or pings it.
    async fn maintain(&self, at: usize, is_ping_due: bool) {
        let path = self.paths()[at].clone().filter(|path| path.failure().is_none());
        let is_doubtful = !self.peer.is_healthy(at);
        let Some(path) = path else {
            if !self.peer.allows_trial(Instant::now(), at) {
                return;
            }
            let dialled = self.options[at].candidate.dialer.dial(self.peer.address().to_owned()).await;
            self.record(at, &dialled);
            if let Ok(path) = dialled {
                self.paths()[at] = Some(path);
            }
            return;
        };
        let is_asked = if is_doubtful { self.peer.allows_trial(Instant::now(), at) } else { is_ping_due };
        if is_asked {
            let pinged = path.ping().await;
            self.record(at, &pinged);
            if let Ok(took) = pinged {
                self.peer.record_ping(at, took);
            }
        }
    }
}

/// A fetch over one path. Its caller may drop it before it has an answer: if the caller was waiting
/// and no data came, the path was late, as with a deadline.
struct FetchAttempt<'a> {
    peer: &'a PeerPaths,
    at: usize,
    class: TrafficClass,
    progress: Progress,
    bytes: u64,
    is_finished: bool,
}

impl<'a> FetchAttempt<'a> {
    fn new(peer: &'a PeerPaths, at: usize, kind: PathKind, request: &FetchRequest) -> FetchAttempt<'a> {
        let (class, progress) = (request.class(), request.progress.clone());
        progress.start(kind);
        FetchAttempt { peer, at, class, progress, bytes: 0, is_finished: false }
    }

    /// Records a late fetch. If the node never answered, the path failed; if it did, the path
    /// works. Prefetches queue behind other operations everywhere, so their lateness is not
    /// recorded.
    fn record_late(&self, now: Instant) {
        if let Some(since) = self.progress.unanswered_since() {
            if self.class == TrafficClass::Fetch {
                self.peer.record_silence(now, self.at, since);
            }
        } else if self.progress.is_answered() {
            self.peer.record_success(self.at);
        }
    }
}

impl Drop for FetchAttempt<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        if self.bytes > 0 {
            self.peer.record_delivery(self.at);
        } else if self.class == TrafficClass::Fetch {
            self.record_late(Instant::now());
        }
    }
}

/// Destination of a fetch's data, on any path.
trait FetchTarget: Send {
    /// Fetches over this path; calls `count` with all received encoded bytes.
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
        count: &'a mut (dyn FnMut(usize) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;
}

/// Takes frames.
struct FrameTarget<'s>(&'s mut (dyn FnMut(Frame) + Send));

impl FetchTarget for FrameTarget<'_> {
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

/// Takes slices of these layers.
struct LayerTarget<'s>(LayerRequest, &'s mut dyn SliceSink);

impl FetchTarget for LayerTarget<'_> {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
        count: &'a mut (dyn FnMut(usize) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let LayerTarget(asked, sink) = self;
            path.fetch_layers(request, asked.clone(), &mut CountingSink { sink: &mut **sink, count }).await
        })
    }
}

/// A sink that counts its bytes.
struct CountingSink<'a> {
    sink: &'a mut dyn SliceSink,
    count: &'a mut (dyn FnMut(usize) + Send),
}

impl SliceSink for CountingSink<'_> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        self.sink.head(position, head)
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        self.sink.slice(position, layer)
    }

    fn slices_filled(&mut self, position: usize, layers: Range<usize>) {
        self.sink.slices_filled(position, layers);
    }

    fn slice_rejected(&mut self, position: usize) {
        self.sink.slice_rejected(position);
    }

    fn count_received(&mut self, bytes: usize) {
        (self.count)(bytes);
        self.sink.count_received(bytes);
    }
}

/// A layer source that counts its bytes.
struct CountingLayerSource<'a> {
    layers: &'a mut dyn LayerSource,
    traffic: &'a TrafficCounters,
}

impl LayerSource for CountingLayerSource<'_> {
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
        self.traffic.sent(bytes);
        self.layers.sent(bytes);
    }
}

/// Most leases with known paths. Above it all are forgotten, and released over the current path.
const LEASES_MAX: usize = 4096;

/// The paths that each lease was used over, one bit per path.
#[derive(Default)]
struct LeasePaths(BTreeMap<LeaseId, u8>);

impl LeasePaths {
    fn record(&mut self, lease: LeaseId, at: usize) {
        if self.0.len() >= LEASES_MAX && !self.0.contains_key(&lease) {
            self.0.clear();
        }
        *self.0.entry(lease).or_default() |= 1 << at;
    }

    fn take(&mut self, lease: LeaseId) -> u8 {
        self.0.remove(&lease).unwrap_or(0)
    }
}

/// Whether another path may succeed where this one failed.
fn can_retry_elsewhere(error: &PathError) -> bool {
    !matches!(error, PathError::TooLarge { .. })
}

/// A path that is chosen anew for each operation.
pub(super) struct PickPath {
    open: Arc<OpenPaths>,
    /// Tasks that maintain the paths; they end with this path.
    maintenance: Vec<JoinHandle<()>>,
}

impl PickPath {
    pub(super) fn new(open: Arc<OpenPaths>, rules: &PickRules) -> PickPath {
        // A single path is redialed by its owner.
        let ways = if open.options.len() > 1 { open.options.len() } else { 0 };
        let (every, ping_every) = (rules.maintenance_interval, rules.ping_every_rounds.max(1));
        let tend = |at| tokio::spawn(maintain_path(Arc::clone(&open), at, every, ping_every));
        PickPath { maintenance: (0..ways).map(tend).collect(), open }
    }
}

impl Drop for PickPath {
    fn drop(&mut self) {
        self.maintenance.iter().for_each(JoinHandle::abort);
    }
}

async fn maintain_path(open: Arc<OpenPaths>, at: usize, every: Duration, ping_every: u32) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for tick in (0..ping_every).cycle() {
        ticks.tick().await;
        open.maintain(at, tick == 0).await;
    }
}

impl Path for PickPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.open.fetch(request, &mut FrameTarget(sink)).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.open.fetch(request, &mut LayerTarget(asked, sink)).await })
    }

    /// Must hold for all open paths.
    fn fetches_slices(&self) -> bool {
        self.open.paths().iter().flatten().all(|path| path.fetches_slices())
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
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(self.open.save_layers(request, layers))
    }

    /// For the path that a save would use now. If the save then uses another one without support,
    /// no slice is sent, and whole frames follow.
    fn streams_saves(&self) -> bool {
        self.open.pick(&[]).is_some_and(|(_, path)| path.streams_saves())
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(self.open.release(lease))
    }

    fn failure(&self) -> Option<PathError> {
        self.open.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(self.open.call(|path| Box::pin(async move { path.ping().await })))
    }
}
