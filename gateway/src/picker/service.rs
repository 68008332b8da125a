//! gRPC service for Envoy's streams, one for each HTTP request: runs the exchange and sends its
//! answers.
//!
//! All work of a stream happens while Envoy polls it, and ends when Envoy drops it. No message is
//! read while an answer waits to be sent. Not here: the order of messages (`exchange.rs`), and the
//! listener (`server.rs`).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{Stream, stream};
use kv_core::id::InstanceId;
use kvfleet_proto::envoy::ext_proc::external_processor_server::ExternalProcessor;
use kvfleet_proto::envoy::ext_proc::{ProcessingRequest, ProcessingResponse, processing_request};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::exchange::{ExchangeOutput, ExchangeRules, ExtProcExchange, PickRequest};
use super::messages::Rejection;
use super::metrics::PickerMetrics;
use super::pick::{EndpointPicker, PickOutcome};
use super::response::ResponseScanner;
use crate::in_flight::InFlightGuard;
use crate::usage_scanner::AnswerUsage;

/// State that all streams share.
pub(super) struct PickerState {
    pub(super) picks: EndpointPicker,
    pub(super) rules: ExchangeRules,
    pub(super) metrics: PickerMetrics,
    pub(super) streams: Arc<Semaphore>,
    pub(super) held: Arc<AtomicUsize>,
    pub(super) held_bytes_max: usize,
    pub(super) arrival_max: Duration,
    pub(super) stop: CancellationToken,
}

/// The service.
#[derive(Clone)]
pub(super) struct PickerService {
    pub(super) shared: Arc<PickerState>,
}

type ResponseStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ExternalProcessor for PickerService {
    type ProcessStream = ResponseStream;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<ResponseStream>, Status> {
        let Ok(permit) = Arc::clone(&self.shared.streams).try_acquire_owned() else {
            self.shared.metrics.shed.inc();
            return Err(Status::resource_exhausted(
                "too many requests in flight at this picker; raise gateway.picker.streams_max, or add routers",
            ));
        };
        let call = RequestStream::new(Arc::clone(&self.shared), permit, request.into_inner());
        let answers = stream::unfold(call, |mut call| async move {
            let answer = call.next().await?;
            Some((answer, call))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// One stream.
struct RequestStream {
    shared: Arc<PickerState>,
    incoming: Streaming<ProcessingRequest>,
    exchange: ExtProcExchange,
    outgoing: VecDeque<ProcessingResponse>,
    picked: Option<PickOutcome>,
    answer: ResponseScanner,
    /// The request in flight, if Envoy sends its response through here, and the instance that
    /// answers, if known.
    in_flight: Option<(InFlightGuard, Option<InstanceId>)>,
    held: HeldBytes,
    arrival_deadline: tokio::time::Instant,
    is_done: bool,
    _permit: OwnedSemaphorePermit,
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        self.shared.metrics.streams.dec();
    }
}

/// Result of waiting for a message.
enum StreamEvent {
    Message(ProcessingRequest),
    /// Envoy closed its side.
    End,
    Failed(Status),
    /// The request took too long to arrive.
    TimedOut,
    /// This router is stopping.
    Stopping,
}

impl RequestStream {
    fn new(
        shared: Arc<PickerState>,
        permit: OwnedSemaphorePermit,
        incoming: Streaming<ProcessingRequest>,
    ) -> RequestStream {
        shared.metrics.streams.inc();
        let arrival_deadline = tokio::time::Instant::now() + shared.arrival_max;
        RequestStream {
            exchange: ExtProcExchange::new(shared.rules),
            held: HeldBytes { all: Arc::clone(&shared.held), bytes: 0 },
            shared,
            incoming,
            outgoing: VecDeque::new(),
            picked: None,
            answer: ResponseScanner::default(),
            in_flight: None,
            arrival_deadline,
            is_done: false,
            _permit: permit,
        }
    }

    /// The next answer; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.outgoing.pop_front() {
                return Some(Ok(answer));
            }
            if self.is_done || self.exchange.is_refused() {
                return None;
            }
            let _ = self.held.set(self.exchange.held_bytes(), self.shared.held_bytes_max); // shrinking always succeeds
            match self.next_event().await {
                StreamEvent::Message(message) => {
                    if let Err(status) = self.handle_message(message).await {
                        self.is_done = true;
                        return Some(Err(status));
                    }
                }
                StreamEvent::End | StreamEvent::Stopping => return None,
                StreamEvent::Failed(status) => {
                    self.is_done = true;
                    return Some(Err(status));
                }
                StreamEvent::TimedOut if self.exchange.has_headers() => {
                    self.refuse(&Rejection::new(408, "overdue", "the request took too long to arrive"));
                }
                StreamEvent::TimedOut => {
                    self.is_done = true;
                    return Some(Err(Status::deadline_exceeded("a stream was opened without any message")));
                }
            }
        }
    }

    async fn next_event(&mut self) -> StreamEvent {
        let message = self.incoming.message();
        let to_event = |came: Result<Option<ProcessingRequest>, Status>| match came {
            Ok(Some(message)) => StreamEvent::Message(message),
            Ok(None) => StreamEvent::End,
            Err(status) => StreamEvent::Failed(status),
        };
        if self.exchange.is_receiving_request() {
            return match tokio::time::timeout_at(self.arrival_deadline, message).await {
                Ok(done) => to_event(done),
                Err(_) => StreamEvent::TimedOut,
            };
        }
        let may_end = self.exchange.may_close();
        tokio::select! {
            biased;
            done = message => to_event(done),
            () = self.shared.stop.cancelled(), if may_end => StreamEvent::Stopping,
        }
    }

    async fn handle_message(&mut self, message: ProcessingRequest) -> Result<(), Status> {
        let is_answer = matches!(message.request, Some(processing_request::Request::ResponseHeaders(_)));
        let usage = message.request.as_ref().and_then(|request| self.answer.scan(request, Instant::now()));
        let ExchangeOutput { answers, pick_request: ask, served } =
            self.exchange.handle(message).map_err(|fault| {
                self.shared.metrics.protocol_errors.inc();
                Status::invalid_argument(fault.to_string())
            })?;
        if self.exchange.is_refused() && !answers.is_empty() {
            self.count_refusal(&answers);
        }
        self.outgoing.extend(answers);
        // Memory of answers that wait to be sent still counts; it is released after they are sent.
        let held = self.exchange.held_bytes().max(self.held.bytes);
        if !self.held.set(held, self.shared.held_bytes_max) {
            let reason = "the bodies of requests in flight exhaust their memory limit";
            let wait = Some(Duration::from_secs(1));
            self.refuse(&Rejection { retry_after: wait, ..Rejection::new(503, "memory", reason) });
            return Ok(());
        }
        if let Some(question) = ask {
            self.pick(&question).await;
        }
        if let Some(served) = served {
            self.handle_served(&served);
        }
        if is_answer && let Some(picked) = &mut self.picked {
            picked.routed = None;
        }
        if let Some(said) = usage {
            self.report_end(said);
        }
        Ok(())
    }

    /// Reports the end of the answer.
    fn report_end(&mut self, usage: AnswerUsage) {
        if let Some((under_way, Some(by))) = self.in_flight.take() {
            under_way.finish(by, usage);
        }
    }

    async fn pick(&mut self, pick_request: &PickRequest) {
        let started = Instant::now();
        let picked = self.shared.picks.pick(pick_request).await;
        self.shared.metrics.observe_pick(started.elapsed());
        match picked {
            Ok(picked) => {
                self.shared.metrics.picked.inc();
                let (destination, prefill) = (picked.destination(), picked.prefill.as_deref());
                let prefill = prefill.map(|one| one.authority.as_str());
                self.outgoing.extend(self.exchange.forward(&destination, prefill, picked.request));
                // If Envoy does not send the response body through here, the end of the answer is
                // not visible.
                self.in_flight = self.exchange.sees_response_body().then(|| {
                    let by = picked.endpoints.first().map(|endpoint| endpoint.instance);
                    (InFlightGuard::new(self.shared.picks.decider().router(), picked.request), by)
                });
                self.picked = Some(picked);
            }
            Err(refused) => self.refuse(&refused),
        }
    }

    fn refuse(&mut self, refused: &Rejection) {
        tracing::debug!(status = refused.status, reason = %refused.reason, "an Envoy request was refused");
        self.outgoing.clear();
        let heard = self.exchange.refuse(refused);
        self.count_refusal(&heard.answers);
        self.outgoing.extend(heard.answers);
    }

    fn count_refusal(&self, answers: &[ProcessingResponse]) {
        use kvfleet_proto::envoy::ext_proc::processing_response::Response;
        for answer in answers {
            if let Some(Response::ImmediateResponse(immediate)) = &answer.response {
                let code = immediate.status.as_ref().map_or(0, |status| status.code);
                self.shared.metrics.refused(u16::try_from(code).unwrap_or_default());
            }
        }
    }

    /// Reports to the router if another endpoint answers than the picked one, so that the load
    /// counts there.
    fn handle_served(&mut self, authority: &str) {
        let Some(picked) = &mut self.picked else { return };
        let Some(chosen) = picked.endpoints.first() else { return };
        if chosen.authority == authority {
            return;
        }
        self.shared.metrics.served_elsewhere.inc();
        let by = self.shared.picks.decider().endpoints().by_address(authority);
        let (request, chosen) = (picked.request, chosen.instance);
        let instance = by.as_ref().map(|by| by.instance);
        tracing::debug!(request, chosen = chosen.0, by = instance.map(|by| by.0), "another engine answers");
        if let Some((_, answers)) = &mut self.in_flight {
            *answers = instance;
        }
        // A resolved name is the same endpoint under another address.
        if let Some(by) = by.filter(|by| by.instance != chosen) {
            self.shared.picks.report_served_by(picked, &by);
        }
    }
}

/// Body bytes that one stream holds, counted in the total of all streams.
struct HeldBytes {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl HeldBytes {
    /// Sets the held bytes. Returns whether the total stays within `max`.
    fn set(&mut self, bytes: usize, max: usize) -> bool {
        if bytes >= self.bytes {
            let more = bytes - self.bytes;
            let before = self.all.fetch_add(more, Ordering::Relaxed);
            self.bytes = bytes;
            return more == 0 || before + more <= max;
        }
        self.all.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        self.bytes = bytes;
        true
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
