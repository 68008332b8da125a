//! One HTTP request, as Envoy tells of it: which message may follow which, and what each is answered.
//!
//! Pure: what Envoy says goes in, what it is answered comes out. The headers of a request are answered when its body is there, since the
//! body says which prompt it has. Not here: the stream (`service.rs`), the pick (`pick.rs`).

use bytes::{Bytes, BytesMut};
use kvfleet_proto::envoy::ext_proc::{
    CommonResponse, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, processing_request::Request,
};
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;

use super::head::{self, CONFORMANCE_SERVED, Head};
use super::words::{self, Refused, Side};

/// What holds for every request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) body_bytes_max: usize,
    pub(crate) conformance: bool,
}

/// A request that is there as far as the pick needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) head: Head,
    /// Nothing where it has none, or Envoy does not send it.
    pub(crate) body: Option<Bytes>,
}

/// What came of a message.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Heard {
    /// What Envoy is answered.
    pub(crate) answers: Vec<ProcessingResponse>,
    /// What has to be known before it is answered more: [`Exchange::picked`] or [`Exchange::refuse`] must follow.
    pub(crate) ask: Option<Question>,
    /// Who answered the request.
    pub(crate) served: Option<String>,
}

/// A message that does not belong where it came. The stream ends with it: nobody knows what Envoy means.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{0} came before the headers that it belongs to")]
    Early(&'static str),
    #[error("{0} came after the end")]
    Late(&'static str),
    #[error("{0} came twice")]
    Twice(&'static str),
    #[error("request_body_mode {0} cannot be picked by: configure FULL_DUPLEX_STREAMED, BUFFERED or NONE")]
    RequestMode(&'static str),
    #[error("response_body_mode {0} is not known: configure NONE or FULL_DUPLEX_STREAMED")]
    ResponseMode(&'static str),
    #[error("observability_mode hears no answers, and a picker only answers: configure it off")]
    Observing,
}

/// Where the request is.
#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing of it came.
    Nothing,
    /// Its headers came, its body is coming.
    Arriving(Box<Head>),
    /// It is there; where it goes is being decided.
    Asked(Ending),
    /// It was answered; trailers may come where its body had no end.
    Sent { is_ended: bool },
    /// It was refused: nothing that still comes counts.
    Refused,
}

/// How a request ended whose pick is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// With its headers.
    Headers,
    /// With its headers as far as we are told: Envoy sends no body.
    Unsent,
    /// With a part of its body.
    Body,
    /// With trailers.
    Trailers,
    /// Its body came in one piece, and its headers were answered before.
    Whole { is_ended: bool },
}

/// How far the response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Back {
    Nothing,
    Headers,
    Ended,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Exchange {
    rules: Rules,
    phase: Phase,
    back: Back,
    gathered: BytesMut,
    whole: Bytes,
    request_mode: BodySendMode,
    response_mode: BodySendMode,
}

impl Exchange {
    pub(crate) fn new(rules: Rules) -> Exchange {
        Exchange {
            rules,
            phase: Phase::Nothing,
            back: Back::Nothing,
            gathered: BytesMut::new(),
            whole: Bytes::new(),
            // What the protocol of endpoint pickers asks for, where Envoy says nothing.
            request_mode: BodySendMode::FullDuplexStreamed,
            response_mode: BodySendMode::None,
        }
    }

    /// Whether the request is still to come, wholly or in part.
    pub(crate) fn is_arriving(&self) -> bool {
        matches!(self.phase, Phase::Nothing | Phase::Arriving(_))
    }

    /// Whether headers came, so that a refusal has somebody to go to.
    pub(crate) fn is_begun(&self) -> bool {
        self.phase != Phase::Nothing
    }

    /// Whether Envoy needs us no more: it was told where the request goes, and goes on by itself with a response that it does not send
    /// through here.
    pub(crate) fn may_end(&self) -> bool {
        matches!(self.phase, Phase::Sent { .. }) && self.response_mode != BodySendMode::FullDuplexStreamed
    }

    /// Whether Envoy sends the body of the response, so that its end is seen.
    pub(crate) fn sees_answer(&self) -> bool {
        self.response_mode != BodySendMode::None
    }

    /// Whether it was refused: the stream ends when that is said.
    pub(crate) fn is_refused(&self) -> bool {
        self.phase == Phase::Refused
    }

    /// Bytes of the body that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.gathered.len() + self.whole.len()
    }

    /// Takes a message.
    pub(crate) fn hear(&mut self, message: ProcessingRequest) -> Result<Heard, Fault> {
        if message.observability_mode {
            return Err(Fault::Observing);
        }
        if let Some(config) = &message.protocol_config {
            self.request_mode = config.request_body_mode();
            self.response_mode = config.response_body_mode();
            self.check_modes()?;
        }
        let Some(request) = message.request else {
            // Window updates and whatever else newer Envoys say besides.
            return Ok(Heard::default());
        };
        if self.phase == Phase::Refused {
            return Ok(Heard::default());
        }
        match request {
            Request::RequestHeaders(headers) => {
                let head = Head::read(
                    headers.headers.as_ref().unwrap_or(&Default::default()),
                    message.metadata_context.as_ref(),
                );
                self.request_headers(&headers, head)
            }
            Request::RequestBody(body) => self.request_body(body),
            Request::RequestTrailers(_) => self.request_trailers(),
            Request::ResponseHeaders(headers) => {
                let served = head::served(message.metadata_context.as_ref(), &message.attributes);
                self.response_headers(&headers, served)
            }
            Request::ResponseBody(body) => self.response_body(body),
            Request::ResponseTrailers(_) => self.response_trailers(),
        }
    }

    fn check_modes(&self) -> Result<(), Fault> {
        match self.request_mode {
            BodySendMode::None | BodySendMode::Buffered | BodySendMode::FullDuplexStreamed => {}
            other => return Err(Fault::RequestMode(other.as_str_name())),
        }
        match self.response_mode {
            BodySendMode::Grpc => Err(Fault::ResponseMode(self.response_mode.as_str_name())),
            _ => Ok(()),
        }
    }

    fn request_headers(&mut self, headers: &HttpHeaders, head: Option<Head>) -> Result<Heard, Fault> {
        if self.phase != Phase::Nothing {
            return Err(Fault::Twice("request_headers"));
        }
        let Some(mut head) = head else {
            return Ok(self.refuse(&Refused::new(
                431,
                "headers",
                "the headers of the request are too large",
            )));
        };
        if !self.rules.conformance {
            head.selection = None;
        }
        if headers.end_of_stream {
            return Ok(self.ask(head, None, Ending::Headers));
        }
        match self.request_mode {
            BodySendMode::None => Ok(self.ask(head, None, Ending::Unsent)),
            BodySendMode::Buffered => {
                // Envoy holds them back until it has an answer to the body, which it sends when these are answered.
                self.phase = Phase::Arriving(Box::new(head));
                let answers = vec![words::headers(Side::Request, CommonResponse::default())];
                Ok(Heard { answers, ..Heard::default() })
            }
            _ => {
                self.phase = Phase::Arriving(Box::new(head));
                Ok(Heard::default())
            }
        }
    }

    fn ask(&mut self, head: Head, body: Option<Bytes>, ending: Ending) -> Heard {
        self.phase = Phase::Asked(ending);
        Heard { ask: Some(Question { head, body }), ..Heard::default() }
    }

    fn request_body(&mut self, body: HttpBody) -> Result<Heard, Fault> {
        let is_whole = body.end_of_stream || self.request_mode == BodySendMode::Buffered;
        match &self.phase {
            Phase::Nothing => return Err(Fault::Early("request_body")),
            Phase::Arriving(_) => {}
            Phase::Asked(_) | Phase::Sent { .. } | Phase::Refused => return Err(Fault::Late("request_body")),
        }
        if self.gathered.len() + body.body.len() > self.rules.body_bytes_max {
            let reason =
                format!("the body of the request is longer than {} bytes", self.rules.body_bytes_max);
            return Ok(self.refuse(&Refused::new(413, "too_large", reason)));
        }
        if !is_whole {
            self.gathered.extend_from_slice(&body.body);
            return Ok(Heard::default());
        }
        let ending = match self.request_mode {
            BodySendMode::Buffered => Ending::Whole { is_ended: body.end_of_stream },
            _ => Ending::Body,
        };
        Ok(self.complete(body.body, ending))
    }

    /// The body is there, with this last piece of it.
    fn complete(&mut self, last: Bytes, ending: Ending) -> Heard {
        let Phase::Arriving(head) = std::mem::replace(&mut self.phase, Phase::Asked(ending)) else {
            return Heard::default();
        };
        self.whole = match self.gathered.is_empty() {
            true => last,
            false => {
                self.gathered.extend_from_slice(&last);
                std::mem::take(&mut self.gathered).freeze()
            }
        };
        let body = (!self.whole.is_empty()).then(|| self.whole.clone());
        self.ask(*head, body, ending)
    }

    fn request_trailers(&mut self) -> Result<Heard, Fault> {
        match &mut self.phase {
            Phase::Nothing => Err(Fault::Early("request_trailers")),
            Phase::Arriving(_) if self.request_mode == BodySendMode::Buffered => {
                // Its headers were answered, and no body comes by which they could still be changed.
                let reason = "a request with trailers and without a body cannot be sent anywhere";
                Ok(self.refuse(&Refused::new(400, "trailers", reason)))
            }
            Phase::Arriving(_) => Ok(self.complete(Bytes::new(), Ending::Trailers)),
            Phase::Sent { is_ended: is_ended @ false } => {
                *is_ended = true;
                let answers = vec![words::trailers(Side::Request)];
                Ok(Heard { answers, ..Heard::default() })
            }
            Phase::Asked(_) | Phase::Sent { .. } | Phase::Refused => Err(Fault::Late("request_trailers")),
        }
    }

    /// It goes there: `ip:port`, and after commas where else if that fails; and who computes its prompt before that, where it is another.
    pub(crate) fn picked(
        &mut self,
        (destination, prefill): (&str, Option<&str>),
        request: u64,
    ) -> Vec<ProcessingResponse> {
        let Phase::Asked(ending) = self.phase else { return Vec::new() };
        let is_ended = !matches!(ending, Ending::Unsent | Ending::Whole { is_ended: false });
        self.phase = Phase::Sent { is_ended };
        let whole = std::mem::take(&mut self.whole);
        let sent_to = words::sent_to(destination, prefill, request);
        let mut first = match ending {
            Ending::Whole { .. } => words::body(Side::Request, sent_to),
            _ => words::headers(Side::Request, sent_to),
        };
        first.dynamic_metadata = Some(words::destination(destination));
        let mut answers = vec![first];
        match ending {
            Ending::Headers | Ending::Unsent | Ending::Whole { .. } => {}
            Ending::Body => words::echoed(Side::Request, whole, true, &mut answers),
            Ending::Trailers => {
                if !whole.is_empty() {
                    words::echoed(Side::Request, whole, false, &mut answers);
                }
                answers.push(words::trailers(Side::Request));
            }
        }
        answers
    }

    /// It goes nowhere. What Envoy still says of it counts for nothing.
    pub(crate) fn refuse(&mut self, refused: &Refused) -> Heard {
        self.phase = Phase::Refused;
        (self.gathered, self.whole) = (BytesMut::new(), Bytes::new());
        Heard { answers: vec![words::refusal(refused)], ..Heard::default() }
    }

    /// These may come at any time, and without a request: Envoy itself may have answered.
    fn response_headers(&mut self, headers: &HttpHeaders, served: Option<String>) -> Result<Heard, Fault> {
        if self.back > Back::Nothing {
            return Err(Fault::Twice("response_headers"));
        }
        self.back = if headers.end_of_stream { Back::Ended } else { Back::Headers };
        let common = match &served {
            Some(served) if self.rules.conformance => words::one_header(CONFORMANCE_SERVED, served),
            _ => CommonResponse::default(),
        };
        Ok(Heard { answers: vec![words::headers(Side::Response, common)], ask: None, served })
    }

    fn response_body(&mut self, body: HttpBody) -> Result<Heard, Fault> {
        match self.back {
            Back::Nothing => return Err(Fault::Early("response_body")),
            Back::Ended => return Err(Fault::Late("response_body")),
            Back::Headers => {}
        }
        if body.end_of_stream {
            self.back = Back::Ended;
        }
        let mut answers = Vec::new();
        match self.response_mode {
            BodySendMode::FullDuplexStreamed => {
                words::echoed(Side::Response, body.body, body.end_of_stream, &mut answers);
            }
            _ => answers.push(words::body(Side::Response, CommonResponse::default())),
        }
        Ok(Heard { answers, ..Heard::default() })
    }

    fn response_trailers(&mut self) -> Result<Heard, Fault> {
        match self.back {
            Back::Nothing => return Err(Fault::Early("response_trailers")),
            Back::Ended => return Err(Fault::Late("response_trailers")),
            Back::Headers => self.back = Back::Ended,
        }
        Ok(Heard { answers: vec![words::trailers(Side::Response)], ..Heard::default() })
    }
}
