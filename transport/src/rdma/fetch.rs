//! A fetch at the client's end: rows come over the connection, the card reads what they name.
//!
//! A batch of rows is read, then the board: as long as the node's epoch stands there, nothing of the batch was taken
//! back before it was read. Only then are frames handed on. Not here: which link, and what its failure means to the path
//! (`path.rs`).

use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{Epoch, LoanId};
use kv_core::lend::Descriptor;
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use tokio::time::Instant;

use super::flights::{Arriving, TransferError};
use super::link::Link;
use super::words;
use crate::stream::{ItemError, Loss, Next, Stream, encode, read_frame, read_message};
use crate::{FetchAnswer, FetchRequest, MissReason, wire};

/// Loans named in one message.
const RETURNS_MAX: usize = 4096;

/// Longest lease: more is the same as no end, and would overflow the clock.
const LEASE_MAX: Duration = Duration::from_secs(3600);

/// Why a fetch goes no further.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stop {
    /// The connection, or what came over it.
    #[error("{0}")]
    Item(ItemError),
    /// The card.
    #[error("{0}")]
    Transfer(TransferError),
    /// Nothing is broken.
    #[error("{}", .0.name())]
    Reason(MissReason),
}

impl Stop {
    /// Whether another link may bring what this one did not: nobody said anything of the blocks themselves.
    pub(super) fn is_of_the_link(&self) -> bool {
        match self {
            Stop::Transfer(_) => true,
            Stop::Item(ItemError::Lost(loss)) => matches!(loss, Loss::Broken(_) | Loss::Unreachable(_)),
            Stop::Item(error) => error.is_loss(),
            Stop::Reason(_) => false,
        }
    }

    /// What it means for blocks that did not come.
    pub(super) fn reason(&self) -> MissReason {
        match self {
            Stop::Item(error) if !error.is_loss() => MissReason::Corrupt,
            Stop::Item(_) | Stop::Transfer(_) => MissReason::NodeLost,
            Stop::Reason(reason) => *reason,
        }
    }
}

impl From<ItemError> for Stop {
    fn from(error: ItemError) -> Stop {
        Stop::Item(error)
    }
}

impl From<Loss> for Stop {
    fn from(loss: Loss) -> Stop {
        Stop::Item(loss.into())
    }
}

impl From<TransferError> for Stop {
    fn from(error: TransferError) -> Stop {
        Stop::Transfer(error)
    }
}

/// The peer talks nonsense.
fn nonsense(what: &impl std::fmt::Display) -> Stop {
    Stop::Item(ItemError::Lost(Loss::Protocol(format!("a message that makes no sense: {what}"))))
}

/// How far a fetch came: what stands when it is cut off.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What the node said first.
    pub(super) answer: Option<FetchAnswer>,
    /// Frames handed on.
    pub(super) delivered: usize,
}

/// One block that is being read.
struct Reading {
    loan: LoanId,
    arriving: Arriving,
    /// The frame may stay where it is read to.
    stays: bool,
}

/// A fetch under way.
pub(super) struct Fetch<'a> {
    pub(super) link: &'a mut Link,
    pub(super) progress: &'a mut Progress,
    pub(super) sink: &'a mut (dyn FnMut(Frame) + Send),
}

impl Fetch<'_> {
    /// Runs it to its end; then nothing of it is under way.
    pub(super) async fn run(&mut self, request: &FetchRequest) -> Result<FetchAnswer, Stop> {
        let asked = Instant::now();
        let (control, borrower, _) = self.link.parts();
        let message = encode(&wire::fetch_to_pb(request)).map_err(|error| nonsense(&error))?;
        control.write(message).await?;
        control.flush().await?;
        let head: data::FetchHead = read_message(control).await?;
        let (answer, epoch) =
            wire::head_from_pb(&head, request.hashes.len()).map_err(|error| nonsense(&error))?;
        let blocks = answer.tiers().len();
        if blocks == 0 {
            return Ok(answer);
        }
        if epoch != request.epoch {
            return Err(Stop::Reason(MissReason::StaleEpoch));
        }
        self.progress.answer = Some(answer.clone());
        let operation = borrower.begin(blocks);
        loop {
            let lent: data::Lent = read_message(&mut self.link.control).await?;
            if lent.is_frame {
                self.take_frame(blocks).await?;
            } else {
                if lent.epoch != epoch.0 {
                    return Err(Stop::Reason(MissReason::StaleEpoch));
                }
                let rows = words::rows_from_bytes(&lent.rows).map_err(|error| nonsense(&error))?;
                if rows.len() > blocks - self.progress.delivered {
                    return Err(nonsense(&"more rows than blocks"));
                }
                self.link.borrower.receive(operation, &rows).map_err(|error| nonsense(&error))?;
                // The node's time begins after ours, so that ours never ends later.
                let lease_end = asked + Duration::from_micros(lent.lease_us).min(LEASE_MAX);
                self.read(rows, epoch, lease_end).await?;
            }
            if lent.is_last {
                self.link.borrower.finish(operation);
                let reason = words::reason_from_number(lent.reason).unwrap_or(MissReason::MediumFailed);
                return Ok(answer.cut_short(self.progress.delivered, reason));
            }
        }
    }

    /// Takes a frame that comes over the connection.
    async fn take_frame(&mut self, blocks: usize) -> Result<(), Stop> {
        if self.progress.delivered >= blocks {
            return Err(nonsense(&"more frames than blocks"));
        }
        match read_frame(&mut self.link.control, FRAME_BYTES_MAX).await? {
            Next::Frame(frame) => self.hand_on(frame),
            Next::End(_) => return Err(nonsense(&"an end in place of a frame")),
        }
        Ok(())
    }

    fn hand_on(&mut self, frame: Frame) {
        (self.sink)(frame);
        self.progress.delivered += 1;
    }

    /// Reads a batch, and says that it was.
    async fn read(&mut self, rows: Vec<Descriptor>, epoch: Epoch, lease_end: Instant) -> Result<(), Stop> {
        let mut reading = Vec::with_capacity(rows.len());
        for row in rows {
            let local = &self.link.parts().2.local;
            let place = match local.take(row.len) {
                Some(place) => place,
                None => {
                    // Whoever waits for a place holds none, or two could wait for each other.
                    let passing = std::sync::Arc::clone(&local.passing);
                    self.settle(std::mem::take(&mut reading), epoch, lease_end).await?;
                    let place = passing.wait(row.len).await;
                    (place.ok_or_else(|| nonsense(&"a block that is too large"))?, false)
                }
            };
            let arriving = self.link.parts().2.read(row.place, row.at, place.0).await?;
            reading.push(Reading { loan: row.loan, arriving, stays: place.1 });
        }
        self.settle(reading, epoch, lease_end).await?;
        self.give_back().await
    }

    /// Waits for what is being read, checks that the node lent it all the while, and hands it on.
    async fn settle(&mut self, reading: Vec<Reading>, epoch: Epoch, lease_end: Instant) -> Result<(), Stop> {
        if reading.is_empty() {
            return Ok(());
        }
        let mut there = Vec::with_capacity(reading.len());
        for Reading { loan, arriving, stays } in reading {
            there.push((loan, arriving.end().await?, stays));
        }
        let board = self.link.parts().2.board().await?;
        if board == words::REVOKED {
            return Err(Stop::Transfer(TransferError::Broken));
        }
        if board != epoch.0 {
            return Err(Stop::Reason(MissReason::StaleEpoch));
        }
        if Instant::now() >= lease_end {
            return Err(Stop::Reason(MissReason::TooLate));
        }
        for (loan, place, stays) in there {
            let bytes = if stays { place.freeze() } else { Bytes::copy_from_slice(place.bytes()) };
            let frame = Frame::parse(bytes).map_err(ItemError::from)?;
            self.hand_on(frame);
            self.link.borrower.give_back(loan);
        }
        Ok(())
    }

    async fn give_back(&mut self) -> Result<(), Stop> {
        let (control, borrower, _) = self.link.parts();
        while borrower.waiting() > 0 {
            let loans = words::loans_to_bytes(&borrower.take_returns(RETURNS_MAX));
            let message = encode(&data::GivenBack { loans }).map_err(|error| nonsense(&error))?;
            control.write(message).await?;
        }
        Ok(control.flush().await?)
    }
}
