//! The streams of Envoy, one for each HTTP request: what comes on one is fed to its exchange, and what that says is sent.
//!
//! Everything of a stream happens in the stream itself: nothing runs on when Envoy drops it, and nothing is heard while an answer waits to
//! be sent. Not here: what may follow what (`exchange.rs`), the port (`server.rs`).

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

use super::answer::Answer;
use super::exchange::{Exchange, Heard, Question, Rules};
use super::metrics::Metrics;
use super::pick::{Picked, Picks};
use super::words::Refused;
use crate::tally::Said;
use crate::under_way::UnderWay;

/// What all streams share.
pub(super) struct Shared {
    pub(super) picks: Picks,
    pub(super) rules: Rules,
    pub(super) metrics: Metrics,
    pub(super) streams: Arc<Semaphore>,
    pub(super) held: Arc<AtomicUsize>,
    pub(super) held_bytes_max: usize,
    pub(super) arrival_max: Duration,
    pub(super) stop: CancellationToken,
}

/// The service.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) shared: Arc<Shared>,
}

type Answers = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let Ok(place) = Arc::clone(&self.shared.streams).try_acquire_owned() else {
            self.shared.metrics.turned_away.inc();
            return Err(Status::resource_exhausted(
                "as many requests are under way as this picker takes; raise doors.picker.streams_max, or add routers",
            ));
        };
        let call = Call::new(Arc::clone(&self.shared), place, request.into_inner());
        let answers = stream::unfold(call, |mut call| async move {
            let answer = call.next().await?;
            Some((answer, call))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// One stream.
struct Call {
    shared: Arc<Shared>,
    incoming: Streaming<ProcessingRequest>,
    exchange: Exchange,
    outgoing: VecDeque<ProcessingResponse>,
    picked: Option<Picked>,
    answer: Answer,
    /// The request, where the end of its answer is seen, and who answers, if it is known.
    under_way: Option<(UnderWay, Option<InstanceId>)>,
    held: Held,
    arrives_by: tokio::time::Instant,
    is_over: bool,
    _place: OwnedSemaphorePermit,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.shared.metrics.streams.dec();
    }
}

/// What a message came to.
enum Came {
    Message(ProcessingRequest),
    /// Envoy says no more.
    End,
    Cut(Status),
    /// The request took too long to arrive.
    Overdue,
    /// This router ends.
    Stopping,
}

impl Call {
    fn new(shared: Arc<Shared>, place: OwnedSemaphorePermit, incoming: Streaming<ProcessingRequest>) -> Call {
        shared.metrics.streams.inc();
        let arrives_by = tokio::time::Instant::now() + shared.arrival_max;
        Call {
            exchange: Exchange::new(shared.rules),
            held: Held { all: Arc::clone(&shared.held), bytes: 0 },
            shared,
            incoming,
            outgoing: VecDeque::new(),
            picked: None,
            answer: Answer::default(),
            under_way: None,
            arrives_by,
            is_over: false,
            _place: place,
        }
    }

    /// The next answer; nothing at the end of the stream.
    async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.outgoing.pop_front() {
                return Some(Ok(answer));
            }
            if self.is_over || self.exchange.is_refused() {
                return None;
            }
            let _ = self.held.set(self.exchange.held_bytes(), self.shared.held_bytes_max); // less is always taken
            match self.came().await {
                Came::Message(message) => {
                    if let Err(status) = self.take(message).await {
                        self.is_over = true;
                        return Some(Err(status));
                    }
                }
                Came::End | Came::Stopping => return None,
                Came::Cut(status) => {
                    self.is_over = true;
                    return Some(Err(status));
                }
                Came::Overdue if self.exchange.is_begun() => {
                    self.refuse(&Refused::new(408, "overdue", "the request took too long to arrive"));
                }
                Came::Overdue => {
                    self.is_over = true;
                    return Some(Err(Status::deadline_exceeded(
                        "a stream was opened, and nothing said on it",
                    )));
                }
            }
        }
    }

    async fn came(&mut self) -> Came {
        let message = self.incoming.message();
        let came = |came: Result<Option<ProcessingRequest>, Status>| match came {
            Ok(Some(message)) => Came::Message(message),
            Ok(None) => Came::End,
            Err(status) => Came::Cut(status),
        };
        if self.exchange.is_arriving() {
            return match tokio::time::timeout_at(self.arrives_by, message).await {
                Ok(done) => came(done),
                Err(_) => Came::Overdue,
            };
        }
        let may_end = self.exchange.may_end();
        tokio::select! {
            biased;
            done = message => came(done),
            () = self.shared.stop.cancelled(), if may_end => Came::Stopping,
        }
    }

    async fn take(&mut self, message: ProcessingRequest) -> Result<(), Status> {
        let is_answer = matches!(message.request, Some(processing_request::Request::ResponseHeaders(_)));
        let said = message.request.as_ref().and_then(|request| self.answer.hear(request, Instant::now()));
        let Heard { answers, ask, served } = self.exchange.hear(message).map_err(|fault| {
            self.shared.metrics.faults.inc();
            Status::invalid_argument(fault.to_string())
        })?;
        if self.exchange.is_refused() && !answers.is_empty() {
            self.count_refusal(&answers);
        }
        self.outgoing.extend(answers);
        // What is on its way back to Envoy is held as well: room is given back when that has gone.
        let held = self.exchange.held_bytes().max(self.held.bytes);
        if !self.held.set(held, self.shared.held_bytes_max) {
            let reason = "the bodies of requests under way fill the memory that is set aside for them";
            let wait = Some(Duration::from_secs(1));
            self.refuse(&Refused { retry_after: wait, ..Refused::new(503, "memory", reason) });
            return Ok(());
        }
        if let Some(question) = ask {
            self.answer(&question).await;
        }
        if let Some(served) = served {
            self.served(&served);
        }
        if is_answer && let Some(picked) = &mut self.picked {
            picked.asked = None;
        }
        if let Some(said) = said {
            self.ended(said);
        }
        Ok(())
    }

    /// The answer has gone by.
    fn ended(&mut self, said: Said) {
        if let Some((under_way, Some(by))) = self.under_way.take() {
            under_way.ended(by, said);
        }
    }

    async fn answer(&mut self, question: &Question) {
        let started = Instant::now();
        let picked = self.shared.picks.pick(question).await;
        self.shared.metrics.timed(started.elapsed());
        match picked {
            Ok(picked) => {
                self.shared.metrics.picked.inc();
                let (destination, prefill) = (picked.destination(), picked.prefill.as_deref());
                let to = (destination.as_str(), prefill.map(|one| one.authority.as_str()));
                self.outgoing.extend(self.exchange.picked(to, picked.request));
                // Where the body of an answer does not come through here, nobody here knows how it ends.
                self.under_way = self.exchange.sees_answer().then(|| {
                    let by = picked.endpoints.first().map(|endpoint| endpoint.instance);
                    (UnderWay::new(self.shared.picks.decider().desk(), picked.request), by)
                });
                self.picked = Some(picked);
            }
            Err(refused) => self.refuse(&refused),
        }
    }

    fn refuse(&mut self, refused: &Refused) {
        tracing::debug!(status = refused.status, reason = %refused.reason, "a request of Envoy is refused");
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

    /// The router is told if another engine answers than the one that was picked: what it counts of the request is there.
    fn served(&mut self, authority: &str) {
        let Some(picked) = &mut self.picked else { return };
        let Some(chosen) = picked.endpoints.first() else { return };
        if chosen.authority == authority {
            return;
        }
        self.shared.metrics.served_elsewhere.inc();
        let by = self.shared.picks.decider().endpoints().at(authority);
        let (request, chosen) = (picked.request, chosen.instance);
        let instance = by.as_ref().map(|by| by.instance);
        tracing::debug!(request, chosen = chosen.0, by = instance.map(|by| by.0), "another engine answers");
        if let Some((_, answers)) = &mut self.under_way {
            *answers = instance;
        }
        // A name that was resolved is the same engine by another name.
        if let Some(by) = by.filter(|by| by.instance != chosen) {
            self.shared.picks.answered_by(picked, &by);
        }
    }
}

/// Bytes of bodies that one stream holds, among those of all.
struct Held {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Held {
    /// Whether there is room for that many.
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

impl Drop for Held {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
