//! A fetch at the node's end: each block is lent where it lies, copied into the tray, or sent, whichever is first possible.
//!
//! Loans are out until the client gives them back, or the connection ends and its queue pairs with it. Not here: the rules
//! of lending (`kv_core::lend`), saves (`taking.rs`).

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kv_core::lend::{Descriptor, LendRefused, Place as LentIn};
use kv_core::pipeline::Arrive;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;

use super::offer::{Attached, Kept};
use super::words;
use crate::quic::RETRY_AFTER;
use crate::serve::{Operations, ServeError};
use crate::stream::{Stream, encode, read_message};
use crate::{AskedLayers, BlockService, FetchAnswer, FetchReply, FetchRequest, MissReason, wire};

/// Bytes of blocks that one message names, but for a single one: loans come back once all that it names was read, and a client that
/// gives none back for long is taken for gone.
const BATCH_BYTES: u64 = 64 << 20;

/// The same to one who reads layer by layer, all of a message before the next.
const LAYERS_BATCH_BYTES: u64 = 256 << 20;

/// What becomes of one block.
enum Way {
    /// The client reads it there.
    Lent(Descriptor),
    /// It goes over the connection.
    Sent,
    /// Something must come back first.
    Full,
}

/// Rows that wait to be sent.
#[derive(Default)]
struct Batch {
    rows: Vec<Descriptor>,
    bytes: u64,
    /// Whether any of them was copied.
    in_tray: bool,
}

/// What all messages of one fetch say.
struct Terms {
    lease: LeaseId,
    /// How long the node lends, from the time it was asked.
    span: Duration,
    epoch: u64,
    /// See [`BATCH_BYTES`].
    batch_bytes: u64,
    /// Whoever asked for slices reads these and the heads; all of a frame else.
    layers: Option<Range<usize>>,
}

impl Terms {
    /// Bytes of a frame that its reader wants.
    fn wanted(&self, frame: &Frame) -> usize {
        let all = frame.bytes.len();
        let Some(layers) = &self.layers else { return all };
        // What is no frame is found out by whoever reads it.
        frame.head().map_or(all, |head| head.bytes().len() + head.bytes_of(layers.clone()))
    }
}

impl Attached {
    /// Serves one operation.
    pub(crate) async fn serve(
        &mut self,
        request: data::DataRequest,
        (service, operations): (&dyn BlockService, &Operations),
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        use data::data_request::Op;
        if !matches!(request.op, Some(Op::Fetch(_) | Op::Save(_))) {
            return operations.serve_request(request, service, stream).await;
        }
        match wire::operation_from_pb(request)? {
            wire::Operation::Fetch(request, layers) => {
                let span = operations.fetch_span(request.deadline);
                let fetch = self.fetch((request, layers), span, (service, operations), stream);
                tokio::time::timeout(span, fetch).await?
            }
            wire::Operation::Save(request, _) => {
                let save = self.save(request, (service, operations), stream);
                tokio::time::timeout(operations.save_span(), save).await?
            }
            wire::Operation::Release(_) | wire::Operation::Ping => Ok(()),
        }
    }

    async fn fetch(
        &mut self,
        (request, layers): (FetchRequest, Option<AskedLayers>),
        span: Duration,
        (service, operations): (&dyn BlockService, &Operations),
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let (lease, asked_epoch) = (request.asker.lease, request.epoch);
        let reserved = operations.reserve_fetch(request.class(), request.hashes.len());
        let begun = reserved.is_some() && self.begin(lease).is_ok();
        let Some(_reserved) = reserved.filter(|_| begun) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return operations.answer(stream, &wire::head_to_pb(&busy, asked_epoch)).await;
        };
        let reply = self.renewing(service, service.fetch(request)).await;
        self.answered(reply.epoch);
        let is_by_layer = layers.as_ref().is_some_and(|layers| layers.arrive == Arrive::ByLayer);
        let batch_bytes = if is_by_layer { LAYERS_BATCH_BYTES } else { BATCH_BYTES };
        let layers = layers.map(|layers| layers.layers);
        let terms = Terms { lease, span, epoch: reply.epoch.0, batch_bytes, layers };
        let lent = if reply.epoch == asked_epoch {
            self.lend_all(reply, &terms, (service, operations), stream).await
        } else {
            // It would read none of them; so nothing is under way, and the link is of use for the next.
            let stale = FetchAnswer::Miss { reason: MissReason::StaleEpoch };
            operations.answer(stream, &wire::head_to_pb(&stale, reply.epoch)).await
        };
        let mut effects = Vec::new();
        self.lender.finish(lease, &mut effects);
        // Nothing of it is out any more, and no later operation is of this lease's loans. It ends elsewhere, by a word over any of
        // the caller's connections; kept here, it would count against those of other requests.
        self.lender.release(lease, &mut effects);
        self.run(effects, service);
        lent
    }

    async fn lend_all(
        &mut self,
        mut reply: FetchReply,
        terms: &Terms,
        (service, operations): (&dyn BlockService, &Operations),
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let head = encode(&wire::head_to_pb(&reply.answer, reply.epoch))?;
        operations.timed(stream.write(head)).await??;
        let blocks = reply.answer.tiers().len();
        if blocks == 0 {
            return operations.flush(stream).await;
        }
        let mut batch = Batch::default();
        let mut reason = None;
        for position in 0..blocks {
            let frame = match reply.frames.try_next() {
                Some(frame) => Some(frame),
                None => {
                    self.say(&mut batch, terms, operations, stream).await?;
                    self.renewing(service, operations.next(&mut reply.frames, stream)).await?
                }
            };
            let Some(frame) = frame else {
                reason = reply.frames.ended();
                break;
            };
            // While the client reads a half of the tray, the other is filled.
            if batch.in_tray && batch.bytes + frame.bytes.len() as u64 > self.tray.bytes / 2 {
                self.say(&mut batch, terms, operations, stream).await?;
            }
            let may_lend = reply.lendable.get(position).copied().unwrap_or(false);
            operations.sent(frame.bytes.len());
            loop {
                match self.way(&frame.bytes, may_lend, terms.lease) {
                    Way::Lent(row) => {
                        self.carried().sent(terms.wanted(&frame));
                        batch.in_tray |= row.place == LentIn::Tray;
                        batch.rows.push(row);
                        batch.bytes += u64::from(row.len);
                        break;
                    }
                    Way::Sent => {
                        self.say(&mut batch, terms, operations, stream).await?;
                        let lent = data::Lent { is_frame: true, ..data::Lent::default() };
                        operations.timed(stream.write(encode(&lent)?)).await??;
                        let bytes = frame.bytes.len();
                        operations.timed(stream.write(frame.bytes)).await??;
                        operations.carried.sent(bytes);
                        break;
                    }
                    Way::Full => {
                        self.say(&mut batch, terms, operations, stream).await?;
                        self.take_back(service, operations, stream).await?;
                    }
                }
            }
            if batch.bytes >= terms.batch_bytes {
                self.say(&mut batch, terms, operations, stream).await?;
            }
        }
        let mut last = self.lent(&mut batch, terms);
        (last.is_last, last.reason) = (true, reason.map_or(0, |reason| reason as u32));
        operations.answer(stream, &last).await?;
        while !self.kept.is_empty() {
            self.take_back(service, operations, stream).await?;
        }
        Ok(())
    }

    /// What becomes of a block, which is lent if it can be.
    fn way(&mut self, bytes: &Bytes, may_lend: bool, lease: LeaseId) -> Way {
        let Some(len) = u32::try_from(bytes.len()).ok().filter(|len| *len <= self.frame_bytes_max) else {
            return Way::Sent;
        };
        let arena = self.arena.as_ref().filter(|_| may_lend);
        if let Some(at) = arena.and_then(|arena| arena.offset_of(bytes)) {
            let kept = Kept { _bytes: Some(bytes.clone()), tray_at: None };
            return self.lend(lease, LentIn::Arena, (at, len), kept);
        }
        if u64::from(len) > self.tray.bytes {
            return Way::Sent;
        }
        let Some(at) = self.room.take(len) else { return Way::Full };
        self.tray.memory.write(at, bytes);
        self.lend(lease, LentIn::Tray, (at, len), Kept { _bytes: None, tray_at: Some(at) })
    }

    fn lend(&mut self, lease: LeaseId, place: LentIn, (at, len): (u64, u32), kept: Kept) -> Way {
        let tray_at = kept.tray_at;
        match self.lender.lend(lease, len.into(), self.now()) {
            Ok(loan) => {
                self.kept.insert(loan, kept);
                Way::Lent(Descriptor { loan, place, at, len })
            }
            Err(refused) => {
                if let Some(at) = tray_at {
                    self.room.give_back(at);
                }
                match refused {
                    LendRefused::Bytes { .. } | LendRefused::Loans { .. } => Way::Full,
                    LendRefused::Leases { .. } | LendRefused::Closed => Way::Sent,
                }
            }
        }
    }

    fn lent(&self, batch: &mut Batch, terms: &Terms) -> data::Lent {
        let Batch { rows, .. } = std::mem::take(batch);
        data::Lent {
            rows: words::rows_to_bytes(&rows),
            is_last: false,
            reason: 0,
            lease_us: u64::try_from(terms.span.as_micros()).unwrap_or(u64::MAX),
            epoch: terms.epoch,
            is_frame: false,
        }
    }

    /// Sends the rows that wait, if any do.
    async fn say(
        &self,
        batch: &mut Batch,
        terms: &Terms,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        if batch.rows.is_empty() {
            return Ok(());
        }
        let lent = self.lent(batch, terms);
        operations.answer(stream, &lent).await
    }

    /// Waits until something of what is lent comes back.
    async fn take_back(
        &mut self,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        operations.flush(stream).await?;
        let heard = operations.timed(read_message(stream));
        let back: data::GivenBack = self.renewing(service, heard).await??;
        let loans = words::loans_from_bytes(&back.loans)?;
        let mut effects = Vec::new();
        self.lender.take_back(&loans, &mut effects)?;
        self.lender.tick(self.now(), &mut effects);
        self.run(effects, service);
        Ok(())
    }

    /// Waits for `work`, during which leases in use are renewed: the book is to hold what is lent, or about to be.
    async fn renewing<T>(&mut self, service: &dyn BlockService, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        loop {
            if let Ok(done) = tokio::time::timeout(self.tick_every(), &mut work).await {
                return done;
            }
            let mut effects = Vec::new();
            self.lender.tick(self.now(), &mut effects);
            self.run(effects, service);
        }
    }
}
