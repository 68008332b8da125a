//! A fetch at the client's end: rows come over the connection, the card reads what they name.
//!
//! Rows are read, then the board: as long as the node's epoch stands there, nothing of them was taken back before it was read. Only
//! then are they handed on. Not here: reading (`reads.rs`, `layers.rs`), which links, and what their failure means to the path
//! (`path.rs`).

use std::time::Duration;

use kv_core::id::{Epoch, LoanId};
use kv_core::lend::{Borrower, Descriptor, Place as LentIn};
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use tokio::time::Instant;

use super::flights::TransferError;
use super::lane::Besides;
use super::layers::{self, Slices};
use super::link::Link;
use super::reads::{self, Reaches};
use super::words;
use crate::stream::{ItemError, Loss, Next, Stream, encode, read_frame, read_message};
use crate::tcp::Occupied;
use crate::{FetchAnswer, FetchRequest, MissReason, wire};

/// Loans named in one message.
const RETURNS_MAX: usize = 4096;

/// How often a node hears at least that what it lent is being read, as long as it is: one that hears nothing for long takes its
/// client for gone.
const SIGN_EVERY: Duration = Duration::from_secs(1);

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
pub(super) fn nonsense(what: &impl std::fmt::Display) -> Stop {
    Stop::Item(ItemError::Lost(Loss::Protocol(format!("a message that makes no sense: {what}"))))
}

/// Who takes what a fetch brings.
pub(super) enum Taker<'a, 'b> {
    /// Frames, of which so many were handed on since it was asked.
    Frames(&'a mut (dyn FnMut(Frame) + Send), usize),
    Slices(&'a mut Slices<'b>),
}

impl Taker<'_, '_> {
    /// Leading blocks of those asked for now of which all came.
    pub(super) fn delivered(&self) -> usize {
        match self {
            Taker::Frames(_, delivered) => *delivered,
            Taker::Slices(slices) => slices.delivered(),
        }
    }

    /// From now on what is behind those is asked for.
    pub(super) fn go_on(&mut self) {
        match self {
            Taker::Frames(_, delivered) => *delivered = 0,
            Taker::Slices(slices) => slices.go_on(),
        }
    }

    /// How many of those asked for now are of use, where not all are.
    pub(super) fn of_use(&self) -> Option<usize> {
        match self {
            Taker::Frames(..) => None,
            Taker::Slices(slices) => slices.of_use(),
        }
    }

    /// Why not more came, when that is what the path says.
    pub(super) fn reason(&self, said: MissReason) -> MissReason {
        match self {
            Taker::Slices(slices) if slices.is_spoilt() => MissReason::Corrupt,
            _ => said,
        }
    }

    /// A block came whole, the `nth` of those asked for now.
    pub(super) fn frame(&mut self, nth: usize, frame: Frame) {
        match self {
            Taker::Frames(sink, delivered) => {
                sink(frame);
                *delivered += 1;
            }
            Taker::Slices(slices) => slices.frame(nth, &frame),
        }
    }
}

/// Under which epoch a node lends, and until when.
pub(super) struct Terms {
    pub(super) epoch: Epoch,
    pub(super) lease_end: Instant,
}

/// A fetch under way.
pub(super) struct Fetch<'a, 'b, 'c, 'd> {
    pub(super) link: &'a mut Link,
    /// Links of other lanes.
    pub(super) besides: &'a mut Besides<'d>,
    /// What the node said first; stands when the fetch is cut off.
    pub(super) answer: &'a mut Option<FetchAnswer>,
    pub(super) taker: &'a mut Taker<'b, 'c>,
    /// Blocks that came, or that the node named.
    pub(super) named: usize,
}

impl Fetch<'_, '_, '_, '_> {
    /// Runs it to its end; then nothing of it is under way.
    pub(super) async fn run(&mut self, request: &FetchRequest) -> Result<FetchAnswer, Stop> {
        let asked = Instant::now();
        let (control, borrower, _) = self.link.parts();
        let wire = match &self.taker {
            Taker::Frames(..) => wire::fetch_to_pb(request),
            Taker::Slices(slices) => wire::layers_to_pb(request, slices.asked()),
        };
        request.progress.asked();
        control.write(encode(&wire).map_err(|error| nonsense(&error))?).await?;
        control.flush().await?;
        let head: data::FetchHead = read_message(control).await?;
        request.progress.answered();
        let (answer, epoch) =
            wire::head_from_pb(&head, request.hashes.len()).map_err(|error| nonsense(&error))?;
        let blocks = answer.tiers().len();
        if blocks == 0 {
            return Ok(answer);
        }
        if epoch != request.epoch {
            return Err(Stop::Reason(MissReason::StaleEpoch));
        }
        *self.answer = Some(answer.clone());
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
                if rows.len() > blocks - self.named {
                    return Err(nonsense(&"more rows than blocks"));
                }
                self.link.borrower.receive(operation, &rows).map_err(|error| nonsense(&error))?;
                // The node's time begins after ours, so that ours never ends later.
                let lease_end = asked + Duration::from_micros(lent.lease_us).min(LEASE_MAX);
                self.read(&rows, &Terms { epoch, lease_end }).await?;
            }
            if lent.is_last {
                self.link.borrower.finish(operation);
                let reason = words::reason_from_number(lent.reason).unwrap_or(MissReason::MediumFailed);
                return Ok(answer.cut_short(self.taker.delivered(), self.taker.reason(reason)));
            }
        }
    }

    /// Takes a frame that comes over the connection.
    async fn take_frame(&mut self, blocks: usize) -> Result<(), Stop> {
        if self.named >= blocks {
            return Err(nonsense(&"more frames than blocks"));
        }
        match read_frame(&mut self.link.control, FRAME_BYTES_MAX).await? {
            Next::Frame(frame) => {
                if let Taker::Slices(slices) = &mut self.taker {
                    slices.note_whole();
                }
                self.taker.frame(self.named, frame);
            }
            Next::End(_) => return Err(nonsense(&"an end in place of a frame")),
        }
        self.named += 1;
        Ok(())
    }

    /// Reads a batch, and says that it was.
    async fn read(&mut self, rows: &[Descriptor], terms: &Terms) -> Result<(), Stop> {
        let in_arena = rows.iter().all(|row| row.place == LentIn::Arena);
        let (control, borrower, own) = self.link.parts();
        let own = &*own;
        let mut signs = Signs { control, borrower, last: Instant::now() };
        match &mut self.taker {
            Taker::Frames(sink, delivered) => {
                let hand_on = |frame| {
                    sink(frame);
                    *delivered += 1;
                };
                let bytes = rows.iter().map(|row| u64::from(row.len)).sum();
                self.besides.help(if in_arena { bytes } else { 0 });
                let reaches = Reaches::new(own, self.besides.reaches());
                reads::read_frames(rows, &reaches, terms, &mut signs, hand_on).await?;
            }
            Taker::Slices(slices) => {
                let plan =
                    layers::plan(slices, (self.named, rows), &Reaches::new(own, []), terms, &mut signs)
                        .await?;
                self.besides.help(if in_arena { plan.bytes } else { 0 });
                let reaches = Reaches::new(own, self.besides.reaches());
                layers::read(slices, plan, &reaches, terms, &mut signs).await?;
            }
        }
        self.named += rows.len();
        for row in rows {
            signs.is_read(row.loan);
        }
        signs.give_back().await
    }
}

/// What the node hears while what it lent is read.
pub(super) struct Signs<'a> {
    control: &'a mut Occupied,
    borrower: &'a mut Borrower,
    last: Instant,
}

impl Signs<'_> {
    /// Nobody reads this any more.
    pub(super) fn is_read(&mut self, loan: LoanId) {
        self.borrower.give_back(loan);
    }

    /// Something was read: now and then the node hears of it, and of what nobody reads any more, be it nothing. Only while something
    /// of what it said last is not given back: else it would take this for what is asked next.
    pub(super) async fn progress(&mut self) -> Result<(), Stop> {
        if self.last.elapsed() < SIGN_EVERY {
            return Ok(());
        }
        self.last = Instant::now();
        if self.borrower.waiting() == 0 && self.borrower.held() > 0 {
            self.say(Vec::new()).await?;
        }
        self.give_back().await
    }

    async fn give_back(&mut self) -> Result<(), Stop> {
        while self.borrower.waiting() > 0 {
            let loans = self.borrower.take_returns(RETURNS_MAX);
            self.say(loans).await?;
        }
        Ok(self.control.flush().await?)
    }

    async fn say(&mut self, loans: Vec<LoanId>) -> Result<(), Stop> {
        let loans = words::loans_to_bytes(&loans);
        let message = encode(&data::GivenBack { loans }).map_err(|error| nonsense(&error))?;
        Ok(self.control.write(message).await?)
    }
}
