//! An engine's answer on its way to the caller: every piece as it came, at once.
//!
//! Nothing of it is kept but what it says of tokens (`crate::tally`). Dropped before its end, because the caller left, it drops the connection to the engine, which ends the request
//! there. Not here: what happens before the first byte (`forward.rs`).

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kv_core::id::InstanceId;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use super::breaker::Claim;
use super::upstream::causes;
use crate::metrics::{Metrics, Outcome};
use crate::tally::{self, Said, Tally};
use crate::under_way::UnderWay;

/// A request that is under way, as it is counted.
#[derive(Debug)]
pub(super) struct Running {
    metrics: Metrics,
    outcome: Outcome,
    /// Its place among those that may be.
    _place: OwnedSemaphorePermit,
}

impl Running {
    pub(super) fn new(metrics: Metrics, place: OwnedSemaphorePermit) -> Running {
        metrics.began();
        Running { metrics, outcome: Outcome::Left, _place: place }
    }

    /// How it ends, unless it ends otherwise.
    pub(super) fn ends(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.metrics.ended(self.outcome);
    }
}

/// Why an answer that had begun does not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Cut {
    /// The engine broke off.
    #[error("the engine broke off: {0}")]
    Broken(String),
    /// It stood still.
    #[error("the engine sent nothing for {} ms", .0.as_millis())]
    Idle(Duration),
}

/// The body of an answer.
#[derive(Debug)]
pub(super) struct Relay {
    /// What was awaited before the answer began.
    pub(super) first: Option<Frame<Bytes>>,
    pub(super) rest: Incoming,
    pub(super) still: Still,
    pub(super) seen: Seen,
    pub(super) claim: Option<Claim>,
    pub(super) running: Running,
    /// Why it breaks off with the next poll.
    pub(super) broken: Option<Cut>,
}

/// What of an answer is looked at as it goes by.
#[derive(Debug)]
pub(super) struct Seen {
    /// Nothing of one that is no text, or says nothing of tokens.
    pub(super) tally: Option<Tally>,
    /// Whether what comes next was waited for.
    pub(super) is_awaited: bool,
    /// Tokens that we counted in the prompt, where the engine must have as many.
    pub(super) tokens: Option<u32>,
    /// The request, if this is its answer, and who gives it.
    pub(super) under_way: Option<(UnderWay, InstanceId)>,
}

impl Seen {
    fn see(&mut self, data: &[u8]) {
        let came = std::mem::take(&mut self.is_awaited).then(Instant::now);
        if let Some(tally) = &mut self.tally {
            tally.see(data, came);
        }
    }

    /// All of it has gone by. Twice is once.
    fn end(&mut self, metrics: &Metrics) {
        let theirs = self.tally.as_ref().and_then(Tally::prompt_tokens);
        if let (Some(ours), Some(theirs)) = (self.tokens.take(), theirs) {
            metrics.compared(ours == theirs);
            if ours != theirs {
                tracing::debug!(
                    ours,
                    theirs,
                    "the engine counts other tokens in a prompt than its tokenizer.json here"
                );
            }
        }
        if let Some((under_way, by)) = self.under_way.take() {
            under_way.ended(by, self.tally.as_ref().map_or_else(Said::default, Tally::said));
        }
    }
}

/// How long nothing came.
#[derive(Debug)]
pub(super) struct Still {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    is_set: bool,
}

impl Still {
    pub(super) fn new(limit: Duration) -> Still {
        Still { limit, timer: Box::pin(tokio::time::sleep(limit)), is_set: false }
    }

    /// Ready when nothing came for too long.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Duration> {
        if !self.is_set {
            self.timer.as_mut().reset(tokio::time::Instant::now() + self.limit);
            self.is_set = true;
        }
        self.timer.as_mut().poll(context).map(|()| self.limit)
    }
}

impl Relay {
    /// The same, at its end if nothing is to come: such a body is not asked for its pieces.
    pub(super) fn begun(mut self) -> Relay {
        if self.is_end_stream() {
            self.end();
        }
        self
    }

    fn see(&mut self, frame: &Frame<Bytes>) {
        self.still.is_set = false;
        if let Some(data) = frame.data_ref() {
            self.seen.see(data);
            if tally::is_last(data) {
                self.seen.end(&self.running.metrics);
            }
        }
    }

    fn end(&mut self) {
        if let Some(claim) = self.claim.take() {
            claim.ended();
        }
        self.seen.end(&self.running.metrics);
        if self.running.outcome == Outcome::Left {
            self.running.ends(Outcome::Answered);
        }
    }

    fn cut(&mut self, cut: Cut) -> Cut {
        if let Some(claim) = self.claim.take() {
            claim.failed(Instant::now());
        }
        self.running.ends(Outcome::Cut);
        tracing::debug!(%cut, "an answer that had begun does not go on");
        cut
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if let Some(cut) = self.broken.take() {
            return Poll::Ready(Some(Err(cut)));
        }
        if let Some(first) = self.first.take() {
            self.see(&first);
            if self.rest.is_end_stream() {
                self.end();
            }
            return Poll::Ready(Some(Ok(first)));
        }
        let Poll::Ready(next) = Pin::new(&mut self.rest).poll_frame(context) else {
            self.seen.is_awaited = true;
            let limit = ready!(self.still.poll(context));
            return Poll::Ready(Some(Err(self.cut(Cut::Idle(limit)))));
        };
        Poll::Ready(match next {
            Some(Ok(frame)) => {
                self.see(&frame);
                // A body whose length is known is not polled once more.
                if self.rest.is_end_stream() {
                    self.end();
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                let cut = self.cut(Cut::Broken(causes(&error)));
                // What came just before it is not sent yet, and would be thrown away: it is sent where there is nothing more for a moment.
                if !self.seen.is_awaited {
                    self.broken = Some(cut);
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(Err(cut))
            }
            None => {
                self.end();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.broken.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + first);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + first);
        }
        hint
    }
}
