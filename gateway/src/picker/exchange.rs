//! State machine of one HTTP request in Envoy's external processing protocol: order of messages and
//! the answer to each.
//!
//! Pure: Envoy's messages go in, answers come out. The request headers are answered only after the
//! body arrived, because the body holds the prompt. Not here: the stream (`service.rs`), and the
//! pick (`pick.rs`).

use bytes::{Bytes, BytesMut};
use kvfleet_proto::envoy::ext_proc::{
    CommonResponse, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, processing_request::Request,
};
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;

use super::head::{self, CONFORMANCE_SERVED, RequestHead};
use super::messages::{self, Direction, Rejection};

/// Rules for every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExchangeRules {
    pub(crate) body_bytes_max: usize,
    pub(crate) conformance: bool,
}

/// A request that has arrived and needs a pick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PickRequest {
    pub(crate) head: RequestHead,
    /// `None` if the request has no body, or Envoy does not send it.
    pub(crate) body: Option<Bytes>,
}

/// Result of a message.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ExchangeOutput {
    /// Answers to Envoy.
    pub(crate) answers: Vec<ProcessingResponse>,
    /// A request that needs a pick before further answers. [`ExtProcExchange::forward`] or
    /// [`ExtProcExchange::refuse`] must follow.
    pub(crate) pick_request: Option<PickRequest>,
    /// Address of the endpoint that answered the request.
    pub(crate) served: Option<String>,
}

/// A violation of the protocol. It ends the stream, because the state of the request at Envoy is
/// unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("{0} came before its headers")]
    Early(&'static str),
    #[error("{0} came after the end")]
    Late(&'static str),
    #[error("{0} came twice")]
    Duplicate(&'static str),
    #[error("request_body_mode {0} is not supported: configure FULL_DUPLEX_STREAMED, BUFFERED or NONE")]
    RequestMode(&'static str),
    #[error("response_body_mode {0} is not supported: configure NONE or FULL_DUPLEX_STREAMED")]
    ResponseMode(&'static str),
    #[error("observability_mode ignores answers, which an endpoint picker needs: turn it off")]
    ObservabilityMode,
}

/// State of the request.
#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// No message of it has arrived.
    Idle,
    /// Its headers have arrived, its body is arriving.
    Arriving(Box<RequestHead>),
    /// It has arrived and its pick is pending.
    Picking(RequestEnd),
    /// It was answered; trailers may follow if its body had no end.
    Forwarded { is_ended: bool },
    /// It was refused; further messages are ignored.
    Refused,
}

/// How the request ended before its pick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestEnd {
    /// With its headers.
    Headers,
    /// With its headers, because Envoy is configured to send no body.
    NoBody,
    /// With the last chunk of its body.
    Body,
    /// With trailers.
    Trailers,
    /// With a buffered body, after its headers were answered.
    Buffered { is_ended: bool },
}

/// State of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ResponsePhase {
    NotStarted,
    Headers,
    Ended,
}

/// State machine of one request; see the module.
#[derive(Debug)]
pub(crate) struct ExtProcExchange {
    rules: ExchangeRules,
    phase: Phase,
    response_phase: ResponsePhase,
    buffered: BytesMut,
    body: Bytes,
    request_mode: BodySendMode,
    response_mode: BodySendMode,
}

impl ExtProcExchange {
    pub(crate) fn new(rules: ExchangeRules) -> ExtProcExchange {
        ExtProcExchange {
            rules,
            phase: Phase::Idle,
            response_phase: ResponsePhase::NotStarted,
            buffered: BytesMut::new(),
            body: Bytes::new(),
            // Defaults of the endpoint picker protocol, if Envoy sends no configuration.
            request_mode: BodySendMode::FullDuplexStreamed,
            response_mode: BodySendMode::None,
        }
    }

    /// Whether the request has not fully arrived.
    pub(crate) fn is_receiving_request(&self) -> bool {
        matches!(self.phase, Phase::Idle | Phase::Arriving(_))
    }

    /// Whether its headers have arrived, so that a refusal can be sent.
    pub(crate) fn has_headers(&self) -> bool {
        self.phase != Phase::Idle
    }

    /// Whether the stream may close: the destination was sent, and the response does not pass
    /// through here.
    pub(crate) fn may_close(&self) -> bool {
        matches!(self.phase, Phase::Forwarded { .. })
            && self.response_mode != BodySendMode::FullDuplexStreamed
    }

    /// Whether Envoy sends the body of the response, so that its end is visible.
    pub(crate) fn sees_response_body(&self) -> bool {
        self.response_mode != BodySendMode::None
    }

    /// Whether the request was refused; the stream ends after the refusal is sent.
    pub(crate) fn is_refused(&self) -> bool {
        self.phase == Phase::Refused
    }

    /// Body bytes that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffered.len() + self.body.len()
    }

    /// Handles a message.
    pub(crate) fn handle(&mut self, message: ProcessingRequest) -> Result<ExchangeOutput, ProtocolError> {
        if message.observability_mode {
            return Err(ProtocolError::ObservabilityMode);
        }
        if let Some(config) = &message.protocol_config {
            self.request_mode = config.request_body_mode();
            self.response_mode = config.response_body_mode();
            self.check_modes()?;
        }
        let Some(request) = message.request else {
            // Window updates and messages of newer versions of Envoy.
            return Ok(ExchangeOutput::default());
        };
        if self.phase == Phase::Refused {
            return Ok(ExchangeOutput::default());
        }
        match request {
            Request::RequestHeaders(headers) => {
                let head = RequestHead::read(
                    headers.headers.as_ref().unwrap_or(&Default::default()),
                    message.metadata_context.as_ref(),
                );
                self.request_headers(&headers, head)
            }
            Request::RequestBody(body) => self.request_body(body),
            Request::RequestTrailers(_) => self.request_trailers(),
            Request::ResponseHeaders(headers) => {
                let served = head::served_endpoint(message.metadata_context.as_ref(), &message.attributes);
                self.response_headers(&headers, served)
            }
            Request::ResponseBody(body) => self.response_body(body),
            Request::ResponseTrailers(_) => self.response_trailers(),
        }
    }

    fn check_modes(&self) -> Result<(), ProtocolError> {
        match self.request_mode {
            BodySendMode::None | BodySendMode::Buffered | BodySendMode::FullDuplexStreamed => {}
            other => return Err(ProtocolError::RequestMode(other.as_str_name())),
        }
        match self.response_mode {
            BodySendMode::Grpc => Err(ProtocolError::ResponseMode(self.response_mode.as_str_name())),
            _ => Ok(()),
        }
    }

    fn request_headers(
        &mut self,
        headers: &HttpHeaders,
        head: Option<RequestHead>,
    ) -> Result<ExchangeOutput, ProtocolError> {
        if self.phase != Phase::Idle {
            return Err(ProtocolError::Duplicate("request_headers"));
        }
        let Some(mut head) = head else {
            return Ok(self.refuse(&Rejection::new(
                431,
                "headers",
                "the headers of the request are too large",
            )));
        };
        if !self.rules.conformance {
            head.selection = None;
        }
        if headers.end_of_stream {
            return Ok(self.start_pick(head, None, RequestEnd::Headers));
        }
        match self.request_mode {
            BodySendMode::None => Ok(self.start_pick(head, None, RequestEnd::NoBody)),
            BodySendMode::Buffered => {
                // Envoy sends the body only after the headers are answered. It keeps the headers
                // until the body is answered, so they can still be changed.
                self.phase = Phase::Arriving(Box::new(head));
                let answers = vec![messages::headers(Direction::Request, CommonResponse::default())];
                Ok(ExchangeOutput { answers, ..ExchangeOutput::default() })
            }
            _ => {
                self.phase = Phase::Arriving(Box::new(head));
                Ok(ExchangeOutput::default())
            }
        }
    }

    fn start_pick(&mut self, head: RequestHead, body: Option<Bytes>, ending: RequestEnd) -> ExchangeOutput {
        self.phase = Phase::Picking(ending);
        ExchangeOutput { pick_request: Some(PickRequest { head, body }), ..ExchangeOutput::default() }
    }

    fn request_body(&mut self, body: HttpBody) -> Result<ExchangeOutput, ProtocolError> {
        let is_whole = body.end_of_stream || self.request_mode == BodySendMode::Buffered;
        match &self.phase {
            Phase::Idle => return Err(ProtocolError::Early("request_body")),
            Phase::Arriving(_) => {}
            Phase::Picking(_) | Phase::Forwarded { .. } | Phase::Refused => {
                return Err(ProtocolError::Late("request_body"));
            }
        }
        if self.buffered.len() + body.body.len() > self.rules.body_bytes_max {
            let reason =
                format!("the body of the request is longer than {} bytes", self.rules.body_bytes_max);
            return Ok(self.refuse(&Rejection::new(413, "too_large", reason)));
        }
        if !is_whole {
            self.buffered.extend_from_slice(&body.body);
            return Ok(ExchangeOutput::default());
        }
        let ending = match self.request_mode {
            BodySendMode::Buffered => RequestEnd::Buffered { is_ended: body.end_of_stream },
            _ => RequestEnd::Body,
        };
        Ok(self.complete_body(body.body, ending))
    }

    /// Completes the body with its last chunk.
    fn complete_body(&mut self, last: Bytes, ending: RequestEnd) -> ExchangeOutput {
        let Phase::Arriving(head) = std::mem::replace(&mut self.phase, Phase::Picking(ending)) else {
            return ExchangeOutput::default();
        };
        self.body = match self.buffered.is_empty() {
            true => last,
            false => {
                self.buffered.extend_from_slice(&last);
                std::mem::take(&mut self.buffered).freeze()
            }
        };
        let body = (!self.body.is_empty()).then(|| self.body.clone());
        self.start_pick(*head, body, ending)
    }

    fn request_trailers(&mut self) -> Result<ExchangeOutput, ProtocolError> {
        match &mut self.phase {
            Phase::Idle => Err(ProtocolError::Early("request_trailers")),
            Phase::Arriving(_) if self.request_mode == BodySendMode::Buffered => {
                // The headers were answered and no body follows that could change them.
                let reason = "a buffered request with trailers but no body cannot be forwarded";
                Ok(self.refuse(&Rejection::new(400, "trailers", reason)))
            }
            Phase::Arriving(_) => Ok(self.complete_body(Bytes::new(), RequestEnd::Trailers)),
            Phase::Forwarded { is_ended: is_ended @ false } => {
                *is_ended = true;
                let answers = vec![messages::trailers(Direction::Request)];
                Ok(ExchangeOutput { answers, ..ExchangeOutput::default() })
            }
            Phase::Picking(_) | Phase::Forwarded { .. } | Phase::Refused => {
                Err(ProtocolError::Late("request_trailers"))
            }
        }
    }

    /// Forwards the request to `destination`: `ip:port`, with alternatives after commas. `prefill`
    /// is the endpoint that computes the prompt, if another one decodes.
    pub(crate) fn forward(
        &mut self,
        destination: &str,
        prefill: Option<&str>,
        request: u64,
    ) -> Vec<ProcessingResponse> {
        let Phase::Picking(ending) = self.phase else { return Vec::new() };
        let is_ended = !matches!(ending, RequestEnd::NoBody | RequestEnd::Buffered { is_ended: false });
        self.phase = Phase::Forwarded { is_ended };
        let whole = std::mem::take(&mut self.body);
        let sent_to = messages::forward_headers(destination, prefill, request);
        let mut first = match ending {
            RequestEnd::Buffered { .. } => messages::body(Direction::Request, sent_to),
            _ => messages::headers(Direction::Request, sent_to),
        };
        first.dynamic_metadata = Some(messages::destination_metadata(destination));
        let mut answers = vec![first];
        match ending {
            RequestEnd::Headers | RequestEnd::NoBody | RequestEnd::Buffered { .. } => {}
            RequestEnd::Body => messages::echo_body(Direction::Request, whole, true, &mut answers),
            RequestEnd::Trailers => {
                if !whole.is_empty() {
                    messages::echo_body(Direction::Request, whole, false, &mut answers);
                }
                answers.push(messages::trailers(Direction::Request));
            }
        }
        answers
    }

    /// Refuses the request. Further messages of it are ignored.
    pub(crate) fn refuse(&mut self, refused: &Rejection) -> ExchangeOutput {
        self.phase = Phase::Refused;
        (self.buffered, self.body) = (BytesMut::new(), Bytes::new());
        ExchangeOutput { answers: vec![messages::rejection_response(refused)], ..ExchangeOutput::default() }
    }

    /// Response headers may arrive at any time, even without a request, because Envoy itself may
    /// have answered.
    fn response_headers(
        &mut self,
        headers: &HttpHeaders,
        served: Option<String>,
    ) -> Result<ExchangeOutput, ProtocolError> {
        if self.response_phase > ResponsePhase::NotStarted {
            return Err(ProtocolError::Duplicate("response_headers"));
        }
        self.response_phase =
            if headers.end_of_stream { ResponsePhase::Ended } else { ResponsePhase::Headers };
        let common = match &served {
            Some(served) if self.rules.conformance => messages::with_header(CONFORMANCE_SERVED, served),
            _ => CommonResponse::default(),
        };
        Ok(ExchangeOutput {
            answers: vec![messages::headers(Direction::Response, common)],
            pick_request: None,
            served,
        })
    }

    fn response_body(&mut self, body: HttpBody) -> Result<ExchangeOutput, ProtocolError> {
        match self.response_phase {
            ResponsePhase::NotStarted => return Err(ProtocolError::Early("response_body")),
            ResponsePhase::Ended => return Err(ProtocolError::Late("response_body")),
            ResponsePhase::Headers => {}
        }
        if body.end_of_stream {
            self.response_phase = ResponsePhase::Ended;
        }
        let mut answers = Vec::new();
        match self.response_mode {
            BodySendMode::FullDuplexStreamed => {
                messages::echo_body(Direction::Response, body.body, body.end_of_stream, &mut answers);
            }
            _ => answers.push(messages::body(Direction::Response, CommonResponse::default())),
        }
        Ok(ExchangeOutput { answers, ..ExchangeOutput::default() })
    }

    fn response_trailers(&mut self) -> Result<ExchangeOutput, ProtocolError> {
        match self.response_phase {
            ResponsePhase::NotStarted => return Err(ProtocolError::Early("response_trailers")),
            ResponsePhase::Ended => return Err(ProtocolError::Late("response_trailers")),
            ResponsePhase::Headers => self.response_phase = ResponsePhase::Ended,
        }
        Ok(ExchangeOutput {
            answers: vec![messages::trailers(Direction::Response)],
            ..ExchangeOutput::default()
        })
    }
}
