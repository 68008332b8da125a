//! Paths within one process, with faults on demand: for tests of everything above a transport.
//!
//! No sockets and no clock of its own: delays use tokio's time, so they are virtual if it is
//! paused. A seed and the operation's number determine every fault, so a run repeats. Not here:
//! encryption, messages and limits (`quic.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::LeaseId;
use kvfleet_proto::frame::{Frame, SliceLayout};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::{Instant, sleep, timeout_at};

use crate::layered::{LayerWait, NextLayer};
use crate::{
    BlockService, BoxFuture, Dialer, FetchAnswer, FetchReply, FetchRequest, LayerBuffers, LayerSource,
    LayeredSaveOutcome, MissReason, Path, PathError, SaveAnswer, SaveOffer, SaveRequest, layered,
};

/// Default time after which a save, release or ping without an answer counts as lost.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest deadline of a fetch. A longer one is as good as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Kinds and rates of faults; the default is no faults. Probabilities are clamped to 0..=1.
#[derive(Clone, Debug, PartialEq)]
pub struct Faults {
    /// Seed that reproduces a run.
    pub seed: u64,
    /// Delay of every operation on its way to the node.
    pub delay: Duration,
    /// Probability that an operation never gets an answer.
    pub loss: f64,
    /// Time after which a save, release or ping without an answer counts as lost.
    pub timeout: Duration,
    /// Number of frames (or of slices, in a layer-wise save) after which the connection breaks, in
    /// every operation.
    pub cut_after: Option<u32>,
    /// Probability per frame (or per slice, in a layer-wise save) of a flipped bit.
    pub corrupt: f64,
    /// Probability per fetched frame that it swaps places with the next one.
    pub reorder: f64,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            seed: 0,
            delay: Duration::ZERO,
            loss: 0.0,
            timeout: DEFAULT_TIMEOUT,
            cut_after: None,
            corrupt: 0.0,
            reorder: 0.0,
        }
    }
}

/// A network of services within this process, and the dialer to them. Clones share its state.
#[derive(Clone, Default)]
pub struct Loopback(Arc<Network>);

#[derive(Default)]
struct Network {
    services: Mutex<BTreeMap<String, Arc<dyn BlockService>>>,
    faults: Mutex<Faults>,
    operations: AtomicU64,
}

impl std::fmt::Debug for Loopback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loopback").field("addresses", &self.services().keys()).finish_non_exhaustive()
    }
}

impl Loopback {
    /// An empty network with these faults.
    #[must_use]
    pub fn new(faults: Faults) -> Loopback {
        let network = Loopback::default();
        network.set_faults(faults);
        network
    }

    /// Changes the faults from the next operation on.
    pub fn set_faults(&self, faults: Faults) {
        *self.0.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    fn faults(&self) -> Faults {
        self.0.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves `service` at `address`, replacing any service there.
    pub fn serve(&self, address: &str, service: Arc<dyn BlockService>) {
        self.services().insert(address.to_owned(), service);
    }

    /// Stops serving `address`; operations in progress fail.
    pub fn stop(&self, address: &str) {
        self.services().remove(address);
    }

    fn services(&self) -> MutexGuard<'_, BTreeMap<String, Arc<dyn BlockService>>> {
        self.0.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws the faults of one operation.
    fn draw_faults(&self) -> OperationFaults {
        let faults = self.faults();
        let number = self.0.operations.fetch_add(1, Ordering::Relaxed);
        let mut random = ChaCha8Rng::seed_from_u64(faults.seed);
        random.set_stream(number);
        OperationFaults { faults, random }
    }
}

impl Dialer for Loopback {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            if self.services().contains_key(&address) {
                Ok(Arc::new(LoopbackPath { network: self.clone(), peer: address }) as Arc<dyn Path>)
            } else {
                Err(PathError::Unreachable { peer: address, cause: "no service at this address".to_owned() })
            }
        })
    }
}

/// The faults of one operation.
struct OperationFaults {
    faults: Faults,
    random: ChaCha8Rng,
}

impl OperationFaults {
    fn hits(&mut self, probability: f64) -> bool {
        self.random.random_bool(probability.clamp(0.0, 1.0))
    }

    /// The way to the node: takes its delay, and may never end.
    async fn delay_or_lose(&mut self) {
        sleep(self.faults.delay).await;
        if self.hits(self.faults.loss) {
            std::future::pending::<()>().await;
        }
    }

    /// A slice as it arrives.
    fn corrupt_slice(&mut self, slice: Bytes) -> Bytes {
        if slice.is_empty() || !self.hits(self.faults.corrupt) {
            return slice;
        }
        let bit = self.random.random_range(0..slice.len() * 8);
        flip(&slice, bit)
    }

    fn is_cut(&self, frames: usize) -> bool {
        self.faults.cut_after.is_some_and(|limit| frames >= limit as usize)
    }

    /// The frame as it arrives; `None` if its header was corrupted.
    fn corrupt_frame(&mut self, frame: Frame) -> Option<Frame> {
        if !self.hits(self.faults.corrupt) {
            return Some(frame);
        }
        let bit = self.random.random_range(0..frame.bytes.len() * 8);
        Frame::parse(flip(&frame.bytes, bit)).ok()
    }
}

fn flip(bytes: &Bytes, bit: usize) -> Bytes {
    let mut flipped = BytesMut::from(&bytes[..]);
    flipped[bit / 8] ^= 1 << (bit % 8);
    flipped.freeze()
}

struct LoopbackPath {
    network: Loopback,
    peer: String,
}

impl LoopbackPath {
    fn service(&self) -> Result<Arc<dyn BlockService>, PathError> {
        let found = self.network.services().get(&self.peer).cloned();
        found.ok_or_else(|| self.broken("the service has stopped"))
    }

    /// Whether the service of an operation is still running.
    fn serves(&self, service: &Arc<dyn BlockService>) -> bool {
        self.service().is_ok_and(|current| Arc::ptr_eq(&current, service))
    }

    fn broken(&self, cause: &str) -> PathError {
        PathError::Broken { peer: self.peer.clone(), cause: cause.to_owned() }
    }

    async fn with_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, PathError>>,
    ) -> Result<T, PathError> {
        let after = self.network.faults().timeout;
        tokio::time::timeout(after, work)
            .await
            .unwrap_or_else(|_| Err(PathError::TimedOut { peer: self.peer.clone(), after }))
    }

    async fn fetch_all(
        &self,
        request: FetchRequest,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        let (epoch, progress) = (request.epoch, request.progress.clone());
        let mut fate = self.network.draw_faults();
        let service = self.service()?;
        let asked = async {
            fate.delay_or_lose().await;
            service.fetch(request).await
        };
        progress.mark_asked();
        let Ok(mut reply) = timeout_at(deadline, asked).await else {
            return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
        };
        progress.mark_answered();
        if reply.epoch != epoch && !reply.answer.tiers().is_empty() {
            return Ok(FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        }
        let mut delivered = 0;
        let transfer = self.transfer(&service, &mut reply, &mut fate, &mut delivered, sink);
        let reason = timeout_at(deadline, transfer).await.unwrap_or(MissReason::TooLate);
        Ok(reply.answer.cut_short(delivered, reason))
    }

    /// Transfers frames until all arrived or a fault ends it; counts in `delivered`.
    async fn transfer(
        &self,
        service: &Arc<dyn BlockService>,
        reply: &mut FetchReply,
        fate: &mut OperationFaults,
        delivered: &mut usize,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> MissReason {
        let wanted = reply.answer.tiers().len();
        let mut held: Option<Frame> = None;
        while *delivered < wanted {
            if fate.is_cut(*delivered) || !self.serves(service) {
                return MissReason::NodeLost;
            }
            let frame = match (reply.frames.next().await, held.take()) {
                (Some(frame), None) if *delivered + 1 < wanted && fate.hits(fate.faults.reorder) => {
                    held = Some(frame);
                    continue;
                }
                (Some(frame), earlier) => {
                    held = earlier;
                    frame
                }
                (None, Some(earlier)) => earlier,
                (None, None) => return reply.frames.end_reason().unwrap_or(MissReason::MediumFailed),
            };
            for frame in [Some(frame), held.take()].into_iter().flatten() {
                let Some(frame) = fate.corrupt_frame(frame) else { return MissReason::Corrupt };
                sink(frame);
                *delivered += 1;
            }
        }
        MissReason::NotHeld
    }

    async fn save_all(
        &self,
        request: SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let mut fate = self.network.draw_faults();
        let service = self.service()?;
        fate.delay_or_lose().await;
        let (wanted, mut session) = match service.save(request).await {
            (SaveOffer::Wanted(wanted), Some(session)) => (wanted, session),
            (SaveOffer::Wanted(_), None) => {
                return Err(self.broken("the service wants a save and has no session"));
            }
            (SaveOffer::Busy { retry_after }, _) => return Ok(SaveAnswer::Busy { retry_after }),
            (SaveOffer::Refused(refusal), _) => return Ok(SaveAnswer::Refused(refusal)),
        };
        let positions = wanted.iter().enumerate().filter(|(_, wanted)| **wanted);
        for (sent, (position, _)) in positions.enumerate() {
            if fate.is_cut(sent) || !self.serves(&service) {
                return Err(self.broken("the connection was cut"));
            }
            let frame =
                fate.corrupt_frame(source(position)).ok_or_else(|| self.broken("a frame header broke"))?;
            session.put(frame).await;
        }
        Ok(SaveAnswer::Done(session.finish().await))
    }
}

/// Layer-wise saves.
impl LoopbackPath {
    async fn stream_save(
        &self,
        request: SaveRequest,
        layers: &mut dyn LayerSource,
    ) -> Result<LayeredSaveOutcome, PathError> {
        let mut fate = self.network.draw_faults();
        let (service, layout) = (self.service()?, SliceLayout::new(layers.slice_bytes()).ok());
        let offered = self.with_timeout(async {
            fate.delay_or_lose().await;
            Ok(service.save(request).await)
        });
        if let (SaveOffer::Wanted(wanted), Some(mut session)) = offered.await?
            && let Some(room) = layout.as_ref().and_then(|layout| session.layer_buffers(layout))
        {
            let is_whole = self.send_layers(&service, &mut fate, &wanted, room, layers).await?;
            if !is_whole {
                return Ok(LayeredSaveOutcome::Abandoned);
            }
            return Ok(LayeredSaveOutcome::Answered(SaveAnswer::Done(session.finish().await)));
        }
        Ok(LayeredSaveOutcome::NotStreamed)
    }

    /// `false` if the slices come too slowly.
    async fn send_layers(
        &self,
        service: &Arc<dyn BlockService>,
        fate: &mut OperationFaults,
        wanted: &[bool],
        room: &mut dyn LayerBuffers,
        layers: &mut dyn LayerSource,
    ) -> Result<bool, PathError> {
        let lost_after = fate.faults.timeout;
        let (mut sent, mut patience) = (0, LayerWait::new(&self.peer, lost_after));
        for layer in 0.. {
            let slices = match layered::next_layer(layers, layer, wanted.len(), &patience).await? {
                NextLayer::Layer(slices) => slices,
                NextLayer::End => break,
                NextLayer::Slow => return Ok(false),
            };
            let wanted = slices.into_iter().zip(wanted).filter(|(_, wanted)| **wanted);
            for (position, (slice, _)) in wanted.enumerate() {
                if fate.is_cut(sent) || !self.serves(service) {
                    return Err(self.broken("the connection was cut"));
                }
                let slice = fate.corrupt_slice(slice);
                let to = room.slice(position, layer).filter(|to| to.len() == slice.len());
                to.ok_or_else(|| self.broken("no memory for a slice"))?.copy_from_slice(&slice);
                room.slice_written(position);
                layers.sent(slice.len());
                sent += 1;
                if !slice.is_empty() {
                    patience.record_progress();
                }
            }
        }
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let head = layers.head(position);
            layers.sent(head.len());
            room.put_head(head).await;
        }
        Ok(true)
    }
}

impl Path for LoopbackPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(self.fetch_all(request, sink))
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(self.with_timeout(self.save_all(request, source)))
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(self.stream_save(request, layers))
    }

    fn streams_saves(&self) -> bool {
        true
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(self.with_timeout(async move {
            self.network.draw_faults().delay_or_lose().await;
            self.service()?.release(lease).await;
            Ok(())
        }))
    }

    fn failure(&self) -> Option<PathError> {
        self.service().err()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(self.with_timeout(async move {
            let asked = Instant::now();
            self.network.draw_faults().delay_or_lose().await;
            self.service()?;
            Ok(asked.elapsed())
        }))
    }
}

#[cfg(test)]
mod tests;
