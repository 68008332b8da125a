//! A fetch at the client's end: rows arrive over the connection, and the card reads the blocks that
//! they name.
//!
//! The rows' blocks are read first, then the epoch word. If it still holds the node's epoch, no
//! grant was revoked before its block was read. Only then are the blocks delivered. Not here: the
//! reads (`reads.rs`, `layers.rs`), which links are used and how their failure affects the path
//! (`path.rs`).

use std::time::Duration;

use kv_core::id::{Epoch, GrantId};
use kv_core::lease_grant::{GrantClient, GrantDescriptor, GrantMemory};
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use kvfleet_transport::upgrade::{
    ItemError, NextItem, PooledConnection, Stream, StreamError, encode, read_frame, read_message, wire,
};
use kvfleet_transport::{FetchAnswer, FetchRequest, MissReason};
use tokio::time::Instant;

use super::layers::{self, SliceFetch};
use super::link::RdmaLink;
use super::messages;
use super::rail_pair::SecondaryLinks;
use super::reads::{self, ReadChannels};
use super::transfers::TransferError;

/// Maximum grants returned in one message.
const RETURNS_MAX: usize = 4096;

/// Interval of progress messages to the node while the client reads. A node considers a silent
/// client gone.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Longest lease; a longer one has no use and would overflow the clock.
const LEASE_MAX: Duration = Duration::from_secs(3600);

/// Why a fetch stopped early.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchStop {
    /// The connection failed, or a message over it was invalid.
    #[error("{0}")]
    Item(ItemError),
    /// A transfer of the card failed.
    #[error("{0}")]
    Transfer(TransferError),
    /// A miss without a failure.
    #[error("{}", .0.name())]
    Reason(MissReason),
}

impl FetchStop {
    /// Whether another link may bring the missing blocks: the failure does not concern the blocks
    /// themselves.
    pub(super) fn is_link_failure(&self) -> bool {
        match self {
            FetchStop::Transfer(_) => true,
            FetchStop::Item(ItemError::Lost(loss)) => {
                matches!(loss, StreamError::Broken(_) | StreamError::Unreachable(_))
            }
            FetchStop::Item(error) => error.is_loss(),
            FetchStop::Reason(_) => false,
        }
    }

    /// The miss reason for the blocks that did not arrive.
    pub(super) fn reason(&self) -> MissReason {
        match self {
            FetchStop::Item(error) if !error.is_loss() => MissReason::Corrupt,
            FetchStop::Item(_) | FetchStop::Transfer(_) => MissReason::NodeLost,
            FetchStop::Reason(reason) => *reason,
        }
    }
}

impl From<ItemError> for FetchStop {
    fn from(error: ItemError) -> FetchStop {
        FetchStop::Item(error)
    }
}

impl From<StreamError> for FetchStop {
    fn from(loss: StreamError) -> FetchStop {
        FetchStop::Item(loss.into())
    }
}

impl From<TransferError> for FetchStop {
    fn from(error: TransferError) -> FetchStop {
        FetchStop::Transfer(error)
    }
}

/// The peer sent a malformed message.
pub(super) fn malformed(what: &impl std::fmt::Display) -> FetchStop {
    FetchStop::Item(ItemError::Lost(StreamError::Protocol(format!("a malformed message: {what}"))))
}

/// Receives the blocks of a fetch.
pub(super) enum FetchSink<'a, 'b> {
    /// A sink for frames, and the frames delivered since the last request.
    Frames(&'a mut (dyn FnMut(Frame) + Send), usize),
    Slices(&'a mut SliceFetch<'b>),
}

impl FetchSink<'_, '_> {
    /// Complete leading blocks of the current request.
    pub(super) fn delivered_blocks(&self) -> usize {
        match self {
            FetchSink::Frames(_, delivered) => *delivered,
            FetchSink::Slices(slices) => slices.delivered_blocks(),
        }
    }

    /// Continues behind the complete blocks with the next request.
    pub(super) fn advance(&mut self) {
        match self {
            FetchSink::Frames(_, delivered) => *delivered = 0,
            FetchSink::Slices(slices) => slices.advance(),
        }
    }

    /// Number of leading blocks of the current request that are still useful; `None` means all.
    pub(super) fn usable_blocks(&self) -> Option<usize> {
        match self {
            FetchSink::Frames(..) => None,
            FetchSink::Slices(slices) => slices.usable_blocks(),
        }
    }

    /// Why no further block came, given the path's reason `said`.
    pub(super) fn miss_reason(&self, said: MissReason) -> MissReason {
        match self {
            FetchSink::Slices(slices) if slices.is_corrupt() => MissReason::Corrupt,
            _ => said,
        }
    }

    /// Delivers the `nth` block of the current request as a whole.
    pub(super) fn put_frame(&mut self, nth: usize, frame: Frame) {
        match self {
            FetchSink::Frames(sink, delivered) => {
                sink(frame);
                *delivered += 1;
            }
            FetchSink::Slices(slices) => slices.put_frame(nth, &frame),
        }
    }
}

/// Epoch and end of the node's grants.
pub(super) struct GrantTerms {
    pub(super) epoch: Epoch,
    pub(super) lease_end: Instant,
}

/// A fetch in progress.
pub(super) struct FetchOperation<'a, 'b, 'c, 'd> {
    pub(super) link: &'a mut RdmaLink,
    /// Links of other rail pairs.
    pub(super) helpers: &'a mut SecondaryLinks<'d>,
    /// The node's first answer; valid even if the fetch is cut off.
    pub(super) answer: &'a mut Option<FetchAnswer>,
    pub(super) sink: &'a mut FetchSink<'b, 'c>,
    /// Blocks that arrived or that the node named.
    pub(super) blocks_received: usize,
}

impl FetchOperation<'_, '_, '_, '_> {
    /// Runs the fetch; when it returns `Ok`, none of its transfers is in flight.
    pub(super) async fn run(&mut self, request: &FetchRequest) -> Result<FetchAnswer, FetchStop> {
        let asked = Instant::now();
        let (control, borrower, _) = self.link.split();
        let wire = match &self.sink {
            FetchSink::Frames(..) => wire::fetch_to_pb(request),
            FetchSink::Slices(slices) => wire::layers_to_pb(request, slices.asked()),
        };
        request.progress.mark_asked();
        control.write(encode(&wire).map_err(|error| malformed(&error))?).await?;
        control.flush().await?;
        let head: data::FetchHead = read_message(control).await?;
        request.progress.mark_answered();
        let (answer, epoch) =
            wire::head_from_pb(&head, request.hashes.len()).map_err(|error| malformed(&error))?;
        let blocks = answer.tiers().len();
        if blocks == 0 {
            return Ok(answer);
        }
        if epoch != request.epoch {
            return Err(FetchStop::Reason(MissReason::StaleEpoch));
        }
        *self.answer = Some(answer.clone());
        let operation = borrower.begin(blocks);
        loop {
            let lent: data::ReadGrants = read_message(&mut self.link.control).await?;
            if lent.is_frame {
                self.receive_frame(blocks).await?;
            } else {
                if lent.epoch != epoch.0 {
                    return Err(FetchStop::Reason(MissReason::StaleEpoch));
                }
                let rows = messages::rows_from_bytes(&lent.rows).map_err(|error| malformed(&error))?;
                if rows.len() > blocks - self.blocks_received {
                    return Err(malformed(&"more rows than blocks"));
                }
                self.link.grants.receive(operation, &rows).map_err(|error| malformed(&error))?;
                // The node's lease time starts after ours, so ours never ends later.
                let lease_end = asked + Duration::from_micros(lent.grant_us).min(LEASE_MAX);
                self.read_batch(&rows, &GrantTerms { epoch, lease_end }).await?;
            }
            if lent.is_last {
                self.link.grants.finish(operation);
                let reason =
                    messages::miss_reason_from_number(lent.reason).unwrap_or(MissReason::MediumFailed);
                return Ok(answer.cut_short(self.sink.delivered_blocks(), self.sink.miss_reason(reason)));
            }
        }
    }

    /// Receives a frame over the connection.
    async fn receive_frame(&mut self, blocks: usize) -> Result<(), FetchStop> {
        if self.blocks_received >= blocks {
            return Err(malformed(&"more frames than blocks"));
        }
        match read_frame(&mut self.link.control, FRAME_BYTES_MAX).await? {
            NextItem::Frame(frame) => {
                if let FetchSink::Slices(slices) = &mut self.sink {
                    slices.note_frame();
                }
                self.sink.put_frame(self.blocks_received, frame);
            }
            NextItem::End(_) => return Err(malformed(&"an end instead of a frame")),
        }
        self.blocks_received += 1;
        Ok(())
    }

    /// Reads a batch, and returns its grants.
    async fn read_batch(&mut self, rows: &[GrantDescriptor], terms: &GrantTerms) -> Result<(), FetchStop> {
        let in_arena = rows.iter().all(|row| row.memory == GrantMemory::Arena);
        let (control, borrower, own) = self.link.split();
        let own = &*own;
        let mut signs = ReturnSender { control, grants: borrower, last_sent: Instant::now() };
        match &mut self.sink {
            FetchSink::Frames(sink, delivered) => {
                let hand_on = |frame| {
                    sink(frame);
                    *delivered += 1;
                };
                let bytes = rows.iter().map(|row| u64::from(row.len)).sum();
                self.helpers.add_bytes(if in_arena { bytes } else { 0 });
                let reaches = ReadChannels::new(own, self.helpers.channels());
                reads::read_frames(rows, &reaches, terms, &mut signs, hand_on).await?;
            }
            FetchSink::Slices(slices) => {
                let plan = layers::plan_slices(
                    slices,
                    self.blocks_received,
                    rows,
                    &ReadChannels::new(own, []),
                    terms,
                    &mut signs,
                )
                .await?;
                self.helpers.add_bytes(if in_arena { plan.bytes } else { 0 });
                let reaches = ReadChannels::new(own, self.helpers.channels());
                layers::read_slices(slices, plan, &reaches, terms, &mut signs).await?;
            }
        }
        self.blocks_received += rows.len();
        for row in rows {
            signs.release(row.grant);
        }
        signs.give_back().await
    }
}

/// Sends progress and returned grants to the node during reads.
pub(super) struct ReturnSender<'a> {
    control: &'a mut PooledConnection,
    grants: &'a mut GrantClient,
    last_sent: Instant,
}

impl ReturnSender<'_> {
    /// Marks a grant as no longer read.
    pub(super) fn release(&mut self, loan: GrantId) {
        self.grants.release(loan);
    }

    /// Sends the returned grants from time to time, or an empty message as a sign of progress. Only
    /// sent while a grant of the node's last message is still held; otherwise the node would take
    /// it for the next request.
    pub(super) async fn report_progress(&mut self) -> Result<(), FetchStop> {
        if self.last_sent.elapsed() < PROGRESS_INTERVAL {
            return Ok(());
        }
        self.last_sent = Instant::now();
        if self.grants.pending_returns() == 0 && self.grants.held() > 0 {
            self.send(Vec::new()).await?;
        }
        self.give_back().await
    }

    async fn give_back(&mut self) -> Result<(), FetchStop> {
        while self.grants.pending_returns() > 0 {
            let loans = self.grants.take_returns(RETURNS_MAX);
            self.send(loans).await?;
        }
        Ok(self.control.flush().await?)
    }

    async fn send(&mut self, loans: Vec<GrantId>) -> Result<(), FetchStop> {
        let loans = messages::loans_to_bytes(&loans);
        let message = encode(&data::ReturnedGrants { grants: loans }).map_err(|error| malformed(&error))?;
        Ok(self.control.write(message).await?)
    }
}
