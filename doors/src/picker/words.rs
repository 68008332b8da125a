//! Envoy's words for what was decided.
//!
//! Not here: when each of them is said (`exchange.rs`).

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

use super::head::{DESTINATION, DROPPED, NAMESPACE, PREFILL};
use crate::REQUEST_HEADER as REQUEST;

/// Most of a body that one message carries: some builds of Envoy take no message above 64 KiB, its own words included.
pub(crate) const PIECE_BYTES_MAX: usize = 62_000;

/// Of whose messages it is an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Request,
    Response,
}

/// Why a request goes to no engine, as its sender is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) retry_after: Option<Duration>,
    /// For programs: why.
    pub(crate) code: &'static str,
}

impl Refused {
    pub(crate) fn new(status: u16, code: &'static str, reason: impl Into<String>) -> Refused {
        Refused { status, reason: reason.into(), retry_after: None, code }
    }
}

fn answer(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

/// Headers, with what changes of them.
pub(crate) fn headers(side: Side, common: CommonResponse) -> ProcessingResponse {
    let response = HeadersResponse { response: Some(common) };
    answer(match side {
        Side::Request => Response::RequestHeaders(response),
        Side::Response => Response::ResponseHeaders(response),
    })
}

/// A body, or a part of one.
pub(crate) fn body(side: Side, common: CommonResponse) -> ProcessingResponse {
    let response = BodyResponse { response: Some(common) };
    answer(match side {
        Side::Request => Response::RequestBody(response),
        Side::Response => Response::ResponseBody(response),
    })
}

/// Trailers, unchanged.
pub(crate) fn trailers(side: Side) -> ProcessingResponse {
    let response = TrailersResponse { header_mutation: None };
    answer(match side {
        Side::Request => Response::RequestTrailers(response),
        Side::Response => Response::ResponseTrailers(response),
    })
}

/// A body as it came, in pieces that Envoy takes; the last of them ends it if that was its end.
pub(crate) fn echoed(side: Side, mut whole: Bytes, end_of_stream: bool, out: &mut Vec<ProcessingResponse>) {
    loop {
        let piece = whole.split_to(whole.len().min(PIECE_BYTES_MAX));
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

/// One header that is set.
pub(crate) fn one_header(name: &str, value: &str) -> CommonResponse {
    let mutation = HeaderMutation { set_headers: vec![set(name, value)], remove_headers: Vec::new() };
    CommonResponse { header_mutation: Some(mutation), ..CommonResponse::default() }
}

/// Where the request goes, as Envoy is told in its headers; [`destination`] says the same in metadata. The engine gets the number that the
/// router knows it by.
pub(crate) fn sent_to(destination: &str, prefill: Option<&str>, request: u64) -> CommonResponse {
    let mut set_headers = vec![set(DESTINATION, destination), set(REQUEST, request.to_string())];
    set_headers.extend(prefill.map(|authority| set(PREFILL, authority)));
    // Who sends a request is not to say who computes it.
    let remove_headers = if prefill.is_none() { vec![PREFILL.to_owned()] } else { Vec::new() };
    let mutation = HeaderMutation { set_headers, remove_headers };
    CommonResponse { clear_route_cache: true, header_mutation: Some(mutation), ..CommonResponse::default() }
}

/// Where the request goes, as metadata.
pub(crate) fn destination(destination: &str) -> Struct {
    let text = Value { kind: Some(Kind::StringValue(destination.to_owned())) };
    let inner = Struct { fields: [(DESTINATION.to_owned(), text)].into() };
    let inner = Value { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: [(NAMESPACE.to_owned(), inner)].into() }
}

/// The answer that the sender gets in place of an engine's.
pub(crate) fn refusal(refused: &Refused) -> ProcessingResponse {
    let mut set_headers = vec![set("content-type", "application/json"), set(DROPPED, refused.code)];
    if let Some(wait) = refused.retry_after {
        set_headers.push(set("retry-after", crate::answer::seconds(wait).to_string()));
    }
    answer(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(refused.status) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: crate::answer::text(refused.status, &refused.reason, Some(refused.code)).into(),
        details: format!("kvfleet_{}", refused.code),
    }))
}
