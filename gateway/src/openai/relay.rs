//! Relays an engine's answer to the caller, frame by frame.
//!
//! It keeps only token counts (`crate::usage_scanner`). If the caller disconnects, dropping the
//! body closes the connection to the engine, which aborts the request there. Not here: everything
//! before the first byte (`forward.rs`).

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kv_core::id::InstanceId;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use super::breaker::AttemptGuard;
use super::upstream::error_chain;
use crate::in_flight::InFlightGuard;
use crate::metrics::{OpenAiMetrics, RequestOutcome};
use crate::usage_scanner::{self, AnswerUsage, UsageScanner};

/// Guard of one request in flight; counts its outcome when dropped.
#[derive(Debug)]
pub(super) struct RequestGuard {
    metrics: OpenAiMetrics,
    outcome: RequestOutcome,
    /// Permit of the limit on all requests.
    _permit: OwnedSemaphorePermit,
    /// Permit of the limit of the caller's key.
    _key_permit: Option<OwnedSemaphorePermit>,
}

impl RequestGuard {
    pub(super) fn new(
        metrics: OpenAiMetrics,
        place: OwnedSemaphorePermit,
        of_key: Option<OwnedSemaphorePermit>,
    ) -> RequestGuard {
        metrics.request_started();
        RequestGuard { metrics, outcome: RequestOutcome::ClientClosed, _permit: place, _key_permit: of_key }
    }

    /// Sets the outcome to count.
    pub(super) fn set_outcome(&mut self, outcome: RequestOutcome) {
        self.outcome = outcome;
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.metrics.request_ended(self.outcome);
    }
}

/// Why an answer that had begun broke off.
#[derive(Debug, thiserror::Error)]
pub(super) enum RelayError {
    /// The engine's connection failed.
    #[error("the engine's connection broke off: {0}")]
    Broken(String),
    /// The engine stalled.
    #[error("the engine was silent for {} ms", .0.as_millis())]
    Idle(Duration),
}

/// Body of a relayed answer.
#[derive(Debug)]
pub(super) struct RelayBody {
    /// Frame that was awaited before the answer began.
    pub(super) first: Option<Frame<Bytes>>,
    pub(super) rest: Incoming,
    pub(super) idle: IdleTimer,
    pub(super) scan: ResponseScan,
    pub(super) guard: Option<AttemptGuard>,
    pub(super) request: RequestGuard,
    /// Error to return from the next poll.
    pub(super) pending_error: Option<RelayError>,
}

/// Scan of an answer while it is relayed.
#[derive(Debug)]
pub(super) struct ResponseScan {
    /// `None` if the body is compressed or reports no tokens.
    pub(super) scanner: Option<UsageScanner>,
    /// Whether the next frame was awaited.
    pub(super) is_awaited: bool,
    /// Prompt tokens that the engine should report, if known.
    pub(super) expected_prompt_tokens: Option<u32>,
    /// The request in flight and its instance, if the answer is a success.
    pub(super) in_flight: Option<(InFlightGuard, InstanceId)>,
}

impl ResponseScan {
    fn observe(&mut self, data: &[u8]) {
        let came = std::mem::take(&mut self.is_awaited).then(Instant::now);
        if let Some(tally) = &mut self.scanner {
            tally.scan(data, came);
        }
    }

    /// Reports the end of the answer. A second call has no effect.
    fn finish(&mut self, metrics: &OpenAiMetrics) {
        let engine_tokens = self.scanner.as_ref().and_then(UsageScanner::prompt_tokens);
        if let (Some(gateway_tokens), Some(theirs)) = (self.expected_prompt_tokens.take(), engine_tokens) {
            metrics.prompt_tokens_compared(gateway_tokens == theirs);
            if gateway_tokens != theirs {
                tracing::debug!(
                    gateway_tokens,
                    theirs,
                    "the engine counts the prompt's tokens differently than the gateway's tokenizer"
                );
            }
        }
        if let Some((under_way, by)) = self.in_flight.take() {
            under_way
                .finish(by, self.scanner.as_ref().map_or_else(AnswerUsage::default, UsageScanner::usage));
        }
    }
}

/// Timer for a stalled answer.
#[derive(Debug)]
pub(super) struct IdleTimer {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    is_set: bool,
}

impl IdleTimer {
    pub(super) fn new(limit: Duration) -> IdleTimer {
        IdleTimer { limit, timer: Box::pin(tokio::time::sleep(limit)), is_set: false }
    }

    /// Ready if no frame arrived within the limit.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Duration> {
        if !self.is_set {
            self.timer.as_mut().reset(tokio::time::Instant::now() + self.limit);
            self.is_set = true;
        }
        self.timer.as_mut().poll(context).map(|()| self.limit)
    }
}

impl RelayBody {
    /// Finishes at once if the body is empty, because such a body is never polled.
    pub(super) fn finished_if_empty(mut self) -> RelayBody {
        if self.is_end_stream() {
            self.finish();
        }
        self
    }

    fn observe(&mut self, frame: &Frame<Bytes>) {
        self.idle.is_set = false;
        if let Some(data) = frame.data_ref() {
            self.scan.observe(data);
            if usage_scanner::ends_with_done(data) {
                self.scan.finish(&self.request.metrics);
            }
        }
    }

    fn finish(&mut self) {
        if let Some(claim) = self.guard.take() {
            claim.record_success();
        }
        self.scan.finish(&self.request.metrics);
        if self.request.outcome == RequestOutcome::ClientClosed {
            self.request.set_outcome(RequestOutcome::Completed);
        }
    }

    fn error(&mut self, cut: RelayError) -> RelayError {
        if let Some(claim) = self.guard.take() {
            claim.record_failure(Instant::now());
        }
        self.request.set_outcome(RequestOutcome::Truncated);
        tracing::debug!(%cut, "an answer broke off");
        cut
    }
}

impl Body for RelayBody {
    type Data = Bytes;
    type Error = RelayError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayError>>> {
        if let Some(cut) = self.pending_error.take() {
            return Poll::Ready(Some(Err(cut)));
        }
        if let Some(first) = self.first.take() {
            self.observe(&first);
            if self.rest.is_end_stream() {
                self.finish();
            }
            return Poll::Ready(Some(Ok(first)));
        }
        let Poll::Ready(next) = Pin::new(&mut self.rest).poll_frame(context) else {
            self.scan.is_awaited = true;
            let limit = ready!(self.idle.poll(context));
            return Poll::Ready(Some(Err(self.error(RelayError::Idle(limit)))));
        };
        Poll::Ready(match next {
            Some(Ok(frame)) => {
                self.observe(&frame);
                // A body of known length is not polled after its last frame.
                if self.rest.is_end_stream() {
                    self.finish();
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                let cut = self.error(RelayError::Broken(error_chain(&error)));
                // hyper would discard the frame before the error, because it is not yet sent. One
                // pending poll lets hyper send it.
                if !self.scan.is_awaited {
                    self.pending_error = Some(cut);
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(Err(cut))
            }
            None => {
                self.finish();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.pending_error.is_none() && self.rest.is_end_stream()
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
