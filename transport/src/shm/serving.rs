//! One operation of a client, from its ask to its last packet.
//!
//! What has to wait runs as a task of its own; dropped midway it leaves nothing behind but what was lent, which the client gives back.
//! Not here: who may ask (`server.rs`), how packets come (`connection.rs`), and saves whose slices come as they are computed
//! (`layered.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::lend::LendRefused;
use kvfleet_proto::frame::SliceLayout;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::RETRY_AFTER;
use super::held::{Held, Saving};
use super::layered::Layered;
use super::lending::{Begun, Lendable, Lending};
use super::map::TrayFrame;
use super::packet::{ToClient, TrayPlace};
use crate::serve::TIMES;
use crate::{BlockService, FetchAnswer, FetchReply, FetchRequest, MissReason, SaveOffer, SaveRequest, wire};

/// Above this many bytes a copy goes to another thread: what it costs there to begin, 10 µs, is a tenth of the copy.
const COPY_HERE_BYTES_MAX: usize = 128 << 10;

/// Copies of so many bytes are a turn of this thread by themselves: some microseconds.
const TURN_BYTES: usize = 16 << 10;

/// How often a client hears that its save goes on.
const TAKEN_EVERY: Duration = Duration::from_millis(100);

/// How much longer than its deadline a fetch is served; the client's own clock ends it first.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Longest time a fetch is served, whatever deadline it names.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Longest time a save may take.
const SAVE_TIME_MAX: Duration = TIMES.save_max;

/// What all operations of a connection share.
#[derive(Clone)]
pub(super) struct Serving {
    pub(super) lending: Arc<Lending>,
    pub(super) service: Arc<dyn BlockService>,
    pub(super) frame_bytes_max: u32,
    pub(super) stall_timeout: Duration,
    /// Whether it was said that a client broke a rule.
    pub(super) said_broken: Arc<AtomicBool>,
    /// How long to wait for the next packet without sleeping.
    pub(super) awake: Duration,
    /// Whether its thread may move to another processor.
    pub(super) may_move: bool,
    /// Where long copies run.
    pub(super) bulk: Handle,
}

/// What a client says in the course of a save.
#[derive(Debug)]
pub(super) enum SavePart {
    Put(Vec<TrayPlace>),
    Finish,
}

/// Where a save's frames are.
#[derive(Debug)]
pub(super) struct Frames {
    /// How long their slices are, where they may come by layer.
    pub(super) layout: Option<SliceLayout>,
    /// Whether they would have come by layer: then they may not come at all.
    pub(super) may_end: bool,
    /// In the tray already, one for each block; empty when they come as they are wanted.
    pub(super) there: Vec<TrayPlace>,
    pub(super) come: mpsc::Receiver<SavePart>,
}

/// Why an operation ended before its end. Only ever logged: the client hears that it ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error("a save ended after {got} of {wanted} frames")]
    SaveCut { got: usize, wanted: usize },
    #[error("a save brings more than the {wanted} frames that are wanted")]
    TooMany { wanted: usize },
    #[error("a frame of {len} bytes at {at} does not lie in the tray, or is longer than the offer said")]
    Place { at: u64, len: u32 },
    #[error("a slice or a head of {wanted} bytes, of which {left} are in its piece")]
    Piece { wanted: usize, left: usize },
    #[error("a save by layer ended before the last head")]
    PiecesCut,
    #[error("the service wants slices and takes none")]
    NoRoom,
    #[error("the client went quiet")]
    Stalled(#[from] tokio::time::error::Elapsed),
    #[error("the thread that copies ended")]
    Copy(#[from] tokio::task::JoinError),
}

impl Serving {
    pub(super) async fn fetch(self, op: u64, request: FetchRequest, begun: Result<Begun, LendRefused>) {
        let epoch = request.epoch;
        let Ok(_begun) = begun else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            let head = wire::head_to_pb(&busy, epoch);
            return self.lending.post(&ToClient::Head { op, head, rows: Vec::new() });
        };
        let limit = request.deadline.saturating_add(DEADLINE_GRACE).min(FETCH_TIME_MAX);
        if timeout(limit, self.answer(op, request)).await.is_err() {
            self.lending.post(&ToClient::End { op, reason: MissReason::TooLate as u32 });
        }
    }

    async fn answer(&self, op: u64, request: FetchRequest) {
        let lease = request.asker.lease;
        let mut reply = self.service.fetch(request).await;
        let wanted = reply.answer.tiers().len();
        let (mut sent, mut is_headed) = (0, false);
        while sent < wanted || !is_headed {
            let (blocks, waits) = self.ready(&mut reply, wanted - sent, sent).await;
            if blocks.is_empty() && is_headed && !waits {
                break;
            }
            let head = (!is_headed).then(|| wire::head_to_pb(&reply.answer, reply.epoch));
            is_headed = true;
            let lent = self.lending.lend(lease, blocks, |rows, _| match head {
                Some(head) => Some(ToClient::Head { op, head, rows }),
                None => (!rows.is_empty()).then_some(ToClient::More { op, rows }),
            });
            sent += lent.rows;
            if let Some(refused) = lent.refused {
                tracing::debug!(%refused, "a fetch ends early");
                return self.end(op, sent, wanted, Some(MissReason::Busy));
            }
            self.lending.may_post().await;
            if waits && let Err(reason) = self.wait(op, lease, &mut reply, &mut sent).await {
                return self.end(op, sent, wanted, reason);
            }
        }
        self.end(op, sent, wanted, reply.frames.ended());
    }

    fn end(&self, op: u64, sent: usize, wanted: usize, reason: Option<MissReason>) {
        if sent < wanted {
            self.lending.post(&ToClient::End { op, reason: reason.map_or(0, |reason| reason as u32) });
        }
    }

    /// The blocks that are there now, at most so many, of which the first is at `position`; and whether to wait for more.
    async fn ready(&self, reply: &mut FetchReply, most: usize, position: usize) -> (Vec<Lendable>, bool) {
        let (mut blocks, mut planned) = (Vec::with_capacity(most.min(16)), 0);
        while blocks.len() < most {
            let Some(frame) = reply.frames.try_next() else {
                return (blocks, reply.frames.ended().is_none());
            };
            let is_lendable = reply.lendable.get(position + blocks.len()).copied().unwrap_or(false);
            match is_lendable.then(|| self.lending.in_place(&frame.bytes, planned)).flatten() {
                Some(block) => {
                    planned += frame.bytes.len() as u64;
                    blocks.push(block);
                }
                None => {
                    reply.frames.put_back(frame);
                    return (blocks, true);
                }
            }
        }
        (blocks, false)
    }

    /// Waits for the next block and sends it, by a copy if need be; an error when none comes, with the reason if there is one.
    async fn wait(
        &self,
        op: u64,
        lease: kv_core::id::LeaseId,
        reply: &mut FetchReply,
        sent: &mut usize,
    ) -> Result<(), Option<MissReason>> {
        let Some(frame) = reply.frames.next().await else { return Err(reply.frames.ended()) };
        let is_lendable = reply.lendable.get(*sent).copied().unwrap_or(false);
        let block = match is_lendable.then(|| self.lending.in_place(&frame.bytes, 0)).flatten() {
            Some(block) => block,
            None => match self.copied(&frame.bytes).await {
                Ok(block) => block,
                Err(ServeError::Stalled(_)) => return Err(Some(MissReason::Busy)),
                Err(error) => {
                    tracing::warn!(%error, "a block could not be copied for a client of this host");
                    return Err(None);
                }
            },
        };
        debug_assert!(block.is_copied() || is_lendable, "what lies elsewhere is not lent");
        let lent = self.lending.lend(lease, vec![block], |rows, refused| {
            refused.is_none().then_some(ToClient::More { op, rows })
        });
        *sent += lent.rows;
        if lent.refused.is_some() { Err(Some(MissReason::Busy)) } else { Ok(()) }
    }

    async fn copied(&self, bytes: &Bytes) -> Result<Lendable, ServeError> {
        loop {
            let room = self.lending.room();
            let copied = if bytes.len() <= COPY_HERE_BYTES_MAX {
                self.lending.copied(bytes)
            } else {
                let (lending, bytes) = (Arc::clone(&self.lending), bytes.clone());
                self.bulk.spawn(async move { lending.copied(&bytes) }).await?
            };
            match copied {
                Some(block) => {
                    Turn::default().before(bytes.len()).await;
                    return Ok(block);
                }
                // A client that reads gives places back. What is to be copied must not be kept for one that does not.
                None => timeout(self.stall_timeout, room).await?,
            }
        }
    }

    pub(super) async fn save(
        self,
        op: u64,
        request: SaveRequest,
        held: Result<Arc<Held>, LendRefused>,
        frames: Frames,
    ) {
        let Ok(held) = held else {
            let offer = wire::offer_to_pb(&SaveOffer::Busy { retry_after: RETRY_AFTER });
            return self.lending.post(&ToClient::Offer { op, offer });
        };
        let ended = match timeout(SAVE_TIME_MAX, self.take(op, request, &held, frames)).await {
            Ok(taken) => taken,
            Err(elapsed) => Err(elapsed.into()),
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a save ends early");
            held.say_ended();
        }
    }

    async fn take(
        &self,
        op: u64,
        request: SaveRequest,
        held: &Arc<Held>,
        frames: Frames,
    ) -> Result<(), ServeError> {
        let len_max = request.frame_bytes.min(u64::from(self.frame_bytes_max));
        let (offer, session) = self.service.save(request).await;
        let saving = session.map(|session| Saving::new(session, held));
        let saving = match (offer, saving) {
            (SaveOffer::Wanted(wanted), Some(saving)) if !frames.there.is_empty() => {
                self.take_there(op, saving, &wanted, frames.there, len_max).await?
            }
            (SaveOffer::Wanted(wanted), Some(saving)) if let Some(layout) = frames.layout => {
                let parts = frames.come;
                Layered { op, wanted, layout, parts, len_max }.take(self, saving).await?
            }
            (offer, saving) => {
                self.lending.post(&ToClient::Offer { op, offer: wire::offer_to_pb(&offer) });
                let (SaveOffer::Wanted(wanted), Some(saving)) = (offer, saving) else { return Ok(()) };
                self.take_coming(op, saving, &wanted, frames.come, (len_max, frames.may_end)).await?
            }
        };
        let done = saving.session.finish().await;
        self.lending.post(&ToClient::Done { op, done: wire::done_to_pb(&done) });
        Ok(())
    }

    /// Takes what is wanted of frames that lie in the tray.
    async fn take_there(
        &self,
        op: u64,
        mut saving: Saving,
        wanted: &[bool],
        places: Vec<TrayPlace>,
        len_max: u64,
    ) -> Result<Saving, ServeError> {
        let (mut turn, mut since, mut passed) = (Turn::default(), Instant::now(), 0);
        for (place, wanted) in places.into_iter().zip(wanted) {
            if *wanted {
                turn.before(place.len as usize).await;
                saving = self.put(saving, place, len_max).await?;
            }
            passed += 1;
            // A client waits as long as something is heard. Most saves are over before.
            if since.elapsed() >= TAKEN_EVERY {
                self.lending.post(&ToClient::Taken { op, frames: passed });
                (since, passed) = (Instant::now(), 0);
            }
        }
        Ok(saving)
    }

    /// Takes frames as they are announced, which have this length at most. Who would have sent slices may end before the first one.
    pub(super) async fn take_coming(
        &self,
        op: u64,
        mut saving: Saving,
        wanted: &[bool],
        mut parts: mpsc::Receiver<SavePart>,
        (len_max, may_end): (u64, bool),
    ) -> Result<Saving, ServeError> {
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        let (mut got, mut turn) = (0, Turn::default());
        loop {
            match timeout(self.stall_timeout, parts.recv()).await? {
                Some(SavePart::Put(places)) => {
                    for place in places {
                        if got == wanted {
                            return Err(ServeError::TooMany { wanted });
                        }
                        turn.before(place.len as usize).await;
                        saving = self.put(saving, place, len_max).await?;
                        got += 1;
                        self.lending.post(&ToClient::Taken { op, frames: 1 });
                    }
                }
                Some(SavePart::Finish) if got == wanted || may_end && got == 0 => return Ok(saving),
                Some(SavePart::Finish) | None => return Err(ServeError::SaveCut { got, wanted }),
            }
        }
    }

    async fn put(&self, mut saving: Saving, place: TrayPlace, len_max: u64) -> Result<Saving, ServeError> {
        let frame = Arc::new(self.there(place, len_max)?);
        if place.len as usize <= COPY_HERE_BYTES_MAX {
            saving.session.put_unsettled(frame).await;
            return Ok(saving);
        }
        let put = async move {
            saving.session.put_unsettled(frame).await;
            saving
        };
        self.aside(put).await
    }

    /// Runs where copies are long. Were this operation dropped meanwhile, a copy goes on to its end, and what it copies for holds
    /// the lease until then.
    pub(super) async fn aside<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, ServeError> {
        let mut there = JoinSet::new();
        there.spawn_on(work, &self.bulk);
        Ok(there.join_next().await.ok_or(ServeError::NoRoom)??)
    }

    /// What the client put there, of this length at most.
    pub(super) fn there(&self, place: TrayPlace, len_max: u64) -> Result<TrayFrame, ServeError> {
        let TrayPlace { at, len } = place;
        let is_inside = at.checked_add(u64::from(len)).is_some_and(|end| end <= self.lending.tray_in_bytes());
        let fits = is_inside && len > 0 && u64::from(len) <= len_max;
        let there = TrayFrame::new(self.lending.tray(), at, len).filter(|_| fits);
        there.ok_or(ServeError::Place { at, len })
    }
}

/// How much was copied in one turn of this thread.
#[derive(Default)]
struct Turn {
    bytes: usize,
}

impl Turn {
    /// Before a copy of so many bytes: others have their turn if those before were enough for one.
    async fn before(&mut self, bytes: usize) {
        if self.bytes >= TURN_BYTES {
            self.bytes = 0;
            tokio::task::yield_now().await;
        }
        // What is not long takes its time as well.
        self.bytes += bytes.max(TURN_BYTES / 16);
    }
}
