//! A fetch at the node's end: each block is granted in place, copied into the bounce buffer, or
//! sent over the connection, whichever is possible first.
//!
//! Grants last until the client returns them, or the connection ends together with its queue pairs.
//! Not here: the rules for grants (`kv_core::lend`), saves (`save_server.rs`).

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory, GrantRefused};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::upgrade::{
    Operations, RETRY_AFTER, ServeError, Stream, TlsStream, UpgradedConnection, encode, read_message, wire,
};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, LayerRequest, MissReason,
};

use super::messages;
use super::server::{GrantedBytes, LinkError, ServerLink};

/// Bytes of blocks that one message names, unless a single block is larger. Grants return once the
/// whole message was read, and a client that returns none for long is considered gone.
const BATCH_BYTES: u64 = 64 << 20;

/// The same for a client that reads layer by layer: it reads one layer of all blocks of a message
/// before the next.
const LAYERS_BATCH_BYTES: u64 = 256 << 20;

/// How one block reaches the client.
enum BlockDelivery {
    /// The client reads it in place.
    Granted(GrantDescriptor),
    /// It is sent over the connection.
    Streamed,
    /// The client must return a grant first.
    AwaitReturns,
}

/// Rows that wait to be sent.
#[derive(Default)]
struct RowBatch {
    rows: Vec<GrantDescriptor>,
    bytes: u64,
    /// Whether any of them is in the bounce buffer.
    uses_bounce: bool,
}

/// The common part of all messages of one fetch.
struct ServeTerms {
    lease: LeaseId,
    /// Duration of the grants, from the request on.
    lease_time: Duration,
    epoch: u64,
    /// See [`BATCH_BYTES`].
    batch_bytes: u64,
    /// The layers that the client asked for; it reads these slices and the heads. `None` means
    /// whole frames.
    layers: Option<Range<usize>>,
}

impl ServeTerms {
    /// Bytes of a frame that the client reads.
    fn wanted_bytes(&self, frame: &Frame) -> usize {
        let all = frame.bytes.len();
        let Some(layers) = &self.layers else { return all };
        // The reader detects bytes that are not a frame.
        frame.head().map_or(all, |head| head.bytes().len() + head.bytes_of(layers.clone()))
    }
}

impl UpgradedConnection for ServerLink {
    fn serve<'a>(
        &'a mut self,
        request: data::DataRequest,
        service: &'a dyn BlockService,
        operations: &'a Operations,
        stream: &'a mut TlsStream,
    ) -> BoxFuture<'a, Result<(), ServeError>> {
        Box::pin(self.serve_operation(request, service, operations, stream))
    }
}

impl ServerLink {
    async fn serve_operation(
        &mut self,
        request: data::DataRequest,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        use data::data_request::Op;
        if !matches!(request.op, Some(Op::Fetch(_) | Op::Save(_))) {
            return operations.serve_request(request, service, stream).await;
        }
        match wire::operation_from_pb(request)? {
            wire::Operation::Fetch(request, layers) => {
                let span = operations.fetch_timeout(request.deadline);
                let fetch = self.fetch(request, layers, span, service, operations, stream);
                tokio::time::timeout(span, fetch).await?
            }
            wire::Operation::Save(request, _) => {
                let save = self.save(request, service, operations, stream);
                tokio::time::timeout(operations.save_timeout(), save).await?
            }
            wire::Operation::Release(_) | wire::Operation::Ping => Ok(()),
        }
    }

    async fn fetch(
        &mut self,
        request: FetchRequest,
        layers: Option<LayerRequest>,
        span: Duration,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let (lease, asked_epoch) = (request.context.lease, request.epoch);
        let reserved = operations.reserve_fetch(request.class(), request.hashes.len());
        let begun = reserved.is_some() && self.begin(lease).is_ok();
        let Some(_reserved) = reserved.filter(|_| begun) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return operations.answer(stream, &wire::head_to_pb(&busy, asked_epoch)).await;
        };
        let reply = self.with_renewals(service, service.fetch(request)).await;
        self.observe_epoch(reply.epoch);
        let is_by_layer = layers.as_ref().is_some_and(|layers| layers.arrive == ArrivalOrder::ByLayer);
        let batch_bytes = if is_by_layer { LAYERS_BATCH_BYTES } else { BATCH_BYTES };
        let layers = layers.map(|layers| layers.layers);
        let terms = ServeTerms { lease, lease_time: span, epoch: reply.epoch.0, batch_bytes, layers };
        let lent = if reply.epoch == asked_epoch {
            self.serve_blocks(reply, &terms, service, operations, stream).await
        } else {
            // The client would read no block of another epoch, so send none, and the link stays
            // usable.
            let stale = FetchAnswer::Miss { reason: MissReason::StaleEpoch };
            operations.answer(stream, &wire::head_to_pb(&stale, reply.epoch)).await
        };
        let mut effects = Vec::new();
        self.grants.finish(lease, &mut effects);
        // No grant of this lease is left, and no later operation uses it. A message over any of the
        // caller's connections ends the lease. Here it would count against the limit for other
        // requests.
        self.grants.release(lease, &mut effects);
        self.apply(effects, service);
        lent
    }

    async fn serve_blocks(
        &mut self,
        mut reply: FetchReply,
        terms: &ServeTerms,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let head = encode(&wire::head_to_pb(&reply.answer, reply.epoch))?;
        operations.with_stall_timeout(stream.write(head)).await??;
        let blocks = reply.answer.tiers().len();
        if blocks == 0 {
            return operations.flush(stream).await;
        }
        let mut batch = RowBatch::default();
        let mut reason = None;
        for position in 0..blocks {
            let frame = match reply.frames.try_next() {
                Some(frame) => Some(frame),
                None => {
                    self.send_rows(&mut batch, terms, operations, stream).await?;
                    self.with_renewals(service, operations.next_frame(&mut reply.frames, stream)).await?
                }
            };
            let Some(frame) = frame else {
                reason = reply.frames.end_reason();
                break;
            };
            // While the client reads one half of the bounce buffer, the other half is filled.
            if batch.uses_bounce && batch.bytes + frame.bytes.len() as u64 > self.bounce.bytes / 2 {
                self.send_rows(&mut batch, terms, operations, stream).await?;
            }
            let may_lend = reply.lendable.get(position).copied().unwrap_or(false);
            operations.sent(frame.bytes.len());
            loop {
                match self.deliver(&frame.bytes, may_lend, terms.lease) {
                    BlockDelivery::Granted(row) => {
                        self.carried().sent(terms.wanted_bytes(&frame));
                        batch.uses_bounce |= row.memory == GrantMemory::BounceBuffer;
                        batch.rows.push(row);
                        batch.bytes += u64::from(row.len);
                        break;
                    }
                    BlockDelivery::Streamed => {
                        self.send_rows(&mut batch, terms, operations, stream).await?;
                        let lent = data::ReadGrants { is_frame: true, ..data::ReadGrants::default() };
                        operations.with_stall_timeout(stream.write(encode(&lent)?)).await??;
                        let bytes = frame.bytes.len();
                        operations.with_stall_timeout(stream.write(frame.bytes)).await??;
                        operations.traffic.sent(bytes);
                        break;
                    }
                    BlockDelivery::AwaitReturns => {
                        self.send_rows(&mut batch, terms, operations, stream).await?;
                        self.receive_returns(service, operations, stream).await?;
                    }
                }
            }
            if batch.bytes >= terms.batch_bytes {
                self.send_rows(&mut batch, terms, operations, stream).await?;
            }
        }
        let mut last = self.take_message(&mut batch, terms);
        (last.is_last, last.reason) = (true, reason.map_or(0, |reason| reason as u32));
        operations.answer(stream, &last).await?;
        while !self.granted.is_empty() {
            self.receive_returns(service, operations, stream).await?;
        }
        Ok(())
    }

    /// Chooses how a block is delivered; a grant comes first.
    fn deliver(&mut self, bytes: &Bytes, may_lend: bool, lease: LeaseId) -> BlockDelivery {
        let Some(len) = u32::try_from(bytes.len()).ok().filter(|len| *len <= self.frame_bytes_max) else {
            return BlockDelivery::Streamed;
        };
        let arena = self.arena.as_ref().filter(|_| may_lend);
        if let Some(at) = arena.and_then(|arena| arena.offset_of(bytes)) {
            let kept = GrantedBytes { _bytes: Some(bytes.clone()), bounce_offset: None };
            return self.grant(lease, GrantMemory::Arena, at, len, kept);
        }
        if u64::from(len) > self.bounce.bytes {
            return BlockDelivery::Streamed;
        }
        let Some(at) = self.free_space.allocate(len) else { return BlockDelivery::AwaitReturns };
        self.bounce.memory.write(at, bytes);
        self.grant(
            lease,
            GrantMemory::BounceBuffer,
            at,
            len,
            GrantedBytes { _bytes: None, bounce_offset: Some(at) },
        )
    }

    fn grant(
        &mut self,
        lease: LeaseId,
        place: GrantMemory,
        at: u64,
        len: u32,
        kept: GrantedBytes,
    ) -> BlockDelivery {
        let tray_at = kept.bounce_offset;
        match self.grants.grant(lease, len.into(), self.now()) {
            Ok(loan) => {
                self.granted.insert(loan, kept);
                BlockDelivery::Granted(GrantDescriptor { grant: loan, memory: place, offset: at, len })
            }
            Err(refused) => {
                if let Some(at) = tray_at {
                    self.free_space.free(at);
                }
                match refused {
                    GrantRefused::Bytes { .. } | GrantRefused::Grants { .. } => BlockDelivery::AwaitReturns,
                    GrantRefused::Leases { .. } | GrantRefused::Closed => BlockDelivery::Streamed,
                }
            }
        }
    }

    fn take_message(&self, batch: &mut RowBatch, terms: &ServeTerms) -> data::ReadGrants {
        let RowBatch { rows, .. } = std::mem::take(batch);
        data::ReadGrants {
            rows: messages::rows_to_bytes(&rows),
            is_last: false,
            reason: 0,
            grant_us: u64::try_from(terms.lease_time.as_micros()).unwrap_or(u64::MAX),
            epoch: terms.epoch,
            is_frame: false,
        }
    }

    /// Sends the waiting rows, if any.
    async fn send_rows(
        &self,
        batch: &mut RowBatch,
        terms: &ServeTerms,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        if batch.rows.is_empty() {
            return Ok(());
        }
        let lent = self.take_message(batch, terms);
        operations.answer(stream, &lent).await
    }

    /// Waits until the client returns grants.
    async fn receive_returns(
        &mut self,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        operations.flush(stream).await?;
        let heard = operations.with_stall_timeout(read_message(stream));
        let back: data::ReturnedGrants = self.with_renewals(service, heard).await??;
        let loans = messages::loans_from_bytes(&back.grants).map_err(LinkError::from)?;
        let mut effects = Vec::new();
        self.grants.return_grants(&loans, &mut effects).map_err(LinkError::from)?;
        self.grants.tick(self.now(), &mut effects);
        self.apply(effects, service);
        Ok(())
    }

    /// Runs `work` and renews the leases in use meanwhile, so that the tier book keeps granted
    /// blocks.
    async fn with_renewals<T>(&mut self, service: &dyn BlockService, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        loop {
            if let Ok(done) = tokio::time::timeout(self.renew_interval(), &mut work).await {
                return done;
            }
            let mut effects = Vec::new();
            self.grants.tick(self.now(), &mut effects);
            self.apply(effects, service);
        }
    }
}
