//! Builds messages to Envoy.
//!
//! Not here: when each message is sent (`exchange.rs`).

use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::envoy::base::{HeaderValue, HeaderValueOption, header_value_option::HeaderAppendAction};
use kvfleet_proto::envoy::ext_proc::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse,
    ProcessingResponse, StreamedBodyResponse, TrailersResponse, body_mutation::Mutation,
    processing_response::Response,
};
use kvfleet_proto::envoy::status::HttpStatus;
use kvfleet_proto::envoy::well_known::{Struct, Value, value::Kind};

use super::head::{DESTINATION, DROPPED_REASON, NAMESPACE, PREFILL};
use crate::REQUEST_HEADER as REQUEST;

/// Largest body chunk in one message: some builds of Envoy limit a message to 64 KiB, including
/// overhead.
pub(crate) const BODY_CHUNK_BYTES_MAX: usize = 62_000;

/// Whether a message belongs to the request or to the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Request,
    Response,
}

/// A refusal, sent to the client instead of an engine's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) retry_after: Option<Duration>,
    /// Machine-readable reason.
    pub(crate) code: &'static str,
}

impl Rejection {
    pub(crate) fn new(status: u16, code: &'static str, reason: impl Into<String>) -> Rejection {
        Rejection { status, reason: reason.into(), retry_after: None, code }
    }
}

fn to_message(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

/// Answer to headers, with mutations.
pub(crate) fn headers(side: Direction, common: CommonResponse) -> ProcessingResponse {
    let response = HeadersResponse { response: Some(common) };
    to_message(match side {
        Direction::Request => Response::RequestHeaders(response),
        Direction::Response => Response::ResponseHeaders(response),
    })
}

/// Answer to a body or to a chunk of it.
pub(crate) fn body(side: Direction, common: CommonResponse) -> ProcessingResponse {
    let response = BodyResponse { response: Some(common) };
    to_message(match side {
        Direction::Request => Response::RequestBody(response),
        Direction::Response => Response::ResponseBody(response),
    })
}

/// Answer to trailers, unchanged.
pub(crate) fn trailers(side: Direction) -> ProcessingResponse {
    let response = TrailersResponse { header_mutation: None };
    to_message(match side {
        Direction::Request => Response::RequestTrailers(response),
        Direction::Response => Response::ResponseTrailers(response),
    })
}

/// Sends a body back unchanged, in chunks that Envoy accepts. The last chunk ends the stream if
/// `end_of_stream` is set.
pub(crate) fn echo_body(
    side: Direction,
    mut whole: Bytes,
    end_of_stream: bool,
    out: &mut Vec<ProcessingResponse>,
) {
    loop {
        let piece = whole.split_to(whole.len().min(BODY_CHUNK_BYTES_MAX));
        let is_last = whole.is_empty();
        let streamed = StreamedBodyResponse { body: piece, end_of_stream: is_last && end_of_stream };
        let mutation = BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) };
        out.push(body(side, CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() }));
        if is_last {
            return;
        }
    }
}

fn set(name: &str, value: impl Into<Vec<u8>>) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: name.to_owned(), value: String::new(), raw_value: value.into() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// Mutation that sets one header.
pub(crate) fn with_header(name: &str, value: &str) -> CommonResponse {
    let mutation = HeaderMutation { set_headers: vec![set(name, value)], remove_headers: Vec::new() };
    CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() }
}

/// Headers that forward the request to `destination`, and give the engine the router's request
/// number. [`destination_metadata`] sends the destination as metadata.
pub(crate) fn forward_headers(destination: &str, prefill: Option<&str>, request: u64) -> CommonResponse {
    let mut set_headers = vec![set(DESTINATION, destination), set(REQUEST, request.to_string())];
    set_headers.extend(prefill.map(|authority| set(PREFILL, authority)));
    // A client must not choose the prefill endpoint.
    let remove_headers = if prefill.is_none() { vec![PREFILL.to_owned()] } else { Vec::new() };
    let mutation = HeaderMutation { set_headers, remove_headers };
    CommonResponse { clear_route_cache: true, header_mutation: Some(mutation), ..CommonResponse::default() }
}

/// Metadata that forwards the request to `destination`.
pub(crate) fn destination_metadata(destination: &str) -> Struct {
    let text = Value { kind: Some(Kind::StringValue(destination.to_owned())) };
    let inner = Struct { fields: [(DESTINATION.to_owned(), text)].into() };
    let inner = Value { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: [(NAMESPACE.to_owned(), inner)].into() }
}

/// Immediate response of a refusal.
pub(crate) fn rejection_response(refused: &Rejection) -> ProcessingResponse {
    let mut set_headers = vec![set("content-type", "application/json"), set(DROPPED_REASON, refused.code)];
    if let Some(wait) = refused.retry_after {
        set_headers.push(set("retry-after", crate::answer::retry_after_seconds(wait).to_string()));
    }
    to_message(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(refused.status) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: crate::answer::error_json(refused.status, &refused.reason, Some(refused.code)).into(),
        details: format!("kvfleet_{}", refused.code),
    }))
}
