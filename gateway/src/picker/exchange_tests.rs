//! Tests of the exchange: the answer to each message, and violations of the protocol.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use kvfleet_proto::envoy::base::{HeaderMap, HeaderValue, Metadata};
use kvfleet_proto::envoy::ext_proc::processing_request::Request;
use kvfleet_proto::envoy::ext_proc::processing_response::Response;
use kvfleet_proto::envoy::ext_proc::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
    StreamedBodyResponse, body_mutation::Mutation,
};
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;
use kvfleet_proto::envoy::well_known::{ListValue, Struct, Value, value::Kind};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::exchange::{ExchangeOutput, ExchangeRules, ExtProcExchange, ProtocolError};
use super::messages::{BODY_CHUNK_BYTES_MAX, Rejection};

const RULES: ExchangeRules = ExchangeRules { body_bytes_max: 200_000, conformance: false };

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn map(pairs: &[(&str, &str)]) -> HeaderMap {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: value.as_bytes().to_vec(),
    };
    HeaderMap { headers: pairs.iter().map(header).collect() }
}

fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> Request {
    Request::RequestHeaders(HttpHeaders { headers: Some(map(pairs)), end_of_stream })
}

fn body(bytes: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::RequestBody(HttpBody { body: bytes.into(), end_of_stream }))
}

fn trailers() -> ProcessingRequest {
    message(Request::RequestTrailers(HttpTrailers { trailers: Some(map(&[("a", "b")])) }))
}

fn response_headers(end_of_stream: bool) -> ProcessingRequest {
    message(Request::ResponseHeaders(HttpHeaders {
        headers: Some(map(&[(":status", "200")])),
        end_of_stream,
    }))
}

fn response_body(bytes: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::ResponseBody(HttpBody { body: bytes.into(), end_of_stream }))
}

fn response_trailers() -> ProcessingRequest {
    message(Request::ResponseTrailers(HttpTrailers::default()))
}

/// Starts an exchange with these body modes.
fn start(
    rules: ExchangeRules,
    modes: [BodySendMode; 2],
    request: Request,
) -> (ExtProcExchange, Result<ExchangeOutput, ProtocolError>) {
    let config = ProtocolConfiguration {
        request_body_mode: modes[0].into(),
        response_body_mode: modes[1].into(),
        send_body_without_waiting_for_header_response: false,
    };
    let mut exchange = ExtProcExchange::new(rules);
    let heard = exchange.handle(ProcessingRequest { protocol_config: Some(config), ..message(request) });
    (exchange, heard)
}

const DUPLEX: [BodySendMode; 2] = [BodySendMode::FullDuplexStreamed, BodySendMode::None];

fn post() -> Request {
    headers(&[(":method", "POST"), (":path", "/v1/completions?x=1")], false)
}

/// Destination in the header and in the metadata of an answer, and whether the route cache is
/// cleared.
fn destination(answer: &ProcessingResponse) -> Option<(String, String, bool)> {
    let common = match answer.response.as_ref()? {
        Response::RequestHeaders(headers) => headers.response.as_ref()?,
        Response::RequestBody(body) => body.response.as_ref()?,
        _ => return None,
    };
    let set = &common.header_mutation.as_ref()?.set_headers[0];
    let header = set.header.as_ref()?;
    assert_eq!(header.key, "x-gateway-destination-endpoint");
    let number = common.header_mutation.as_ref()?.set_headers[1].header.as_ref()?;
    assert_eq!((number.key.as_str(), &number.raw_value[..]), ("x-kvfleet-request", &b"7"[..]));
    assert_eq!(set.append_action, 2, "it replaces the client's value");
    let Some(Kind::StructValue(fields)) = &answer.dynamic_metadata.as_ref()?.fields["envoy.lb"].kind else {
        return None;
    };
    let Some(Kind::StringValue(text)) = &fields.fields["x-gateway-destination-endpoint"].kind else {
        return None;
    };
    Some((String::from_utf8(header.raw_value.clone()).unwrap(), text.clone(), common.clear_route_cache))
}

fn streamed(answer: &ProcessingResponse) -> Option<&StreamedBodyResponse> {
    let body = match answer.response.as_ref()? {
        Response::RequestBody(body) | Response::ResponseBody(body) => body,
        _ => return None,
    };
    match body.response.as_ref()?.body_mutation.as_ref()?.mutation.as_ref()? {
        Mutation::StreamedResponse(streamed) => Some(streamed),
        _ => None,
    }
}

/// The echoed body, and whether its last chunk ends it.
fn echo(answers: &[ProcessingResponse]) -> (Vec<u8>, bool) {
    let pieces: Vec<_> = answers.iter().filter_map(streamed).collect();
    assert!(pieces.iter().all(|piece| piece.body.len() <= BODY_CHUNK_BYTES_MAX));
    let early = pieces.iter().rev().skip(1).any(|piece| piece.end_of_stream);
    assert!(!early, "the stream ends before the last chunk");
    let whole = pieces.iter().flat_map(|piece| piece.body.to_vec()).collect();
    (whole, pieces.last().is_some_and(|piece| piece.end_of_stream))
}

fn status(heard: &ExchangeOutput) -> i32 {
    match heard.answers[0].response.as_ref().unwrap() {
        Response::ImmediateResponse(immediate) => immediate.status.as_ref().unwrap().code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn forwards_headers_and_body_after_the_whole_body_arrived() {
    let bytes: Vec<u8> = (0..180_013_u32).map(|at| at as u8).collect();
    let (mut exchange, first) = start(RULES, DUPLEX, post());
    assert_eq!(first.unwrap(), ExchangeOutput::default());
    for piece in bytes[..131_072].chunks(16_384) {
        assert_eq!(exchange.handle(body(piece.to_vec(), false)).unwrap(), ExchangeOutput::default());
    }
    assert!(exchange.is_receiving_request());
    let asked = exchange.handle(body(bytes[131_072..].to_vec(), true)).unwrap();
    assert!(asked.answers.is_empty());
    let question = asked.pick_request.unwrap();
    assert_eq!(question.head.path, "/v1/completions");
    assert_eq!(question.body.unwrap(), bytes);
    assert_eq!(exchange.held_bytes(), bytes.len());
    let answers = exchange.forward("10.0.0.1:8000,10.0.0.2:8000", None, 7);
    let both = "10.0.0.1:8000,10.0.0.2:8000".to_owned();
    assert_eq!(destination(&answers[0]).unwrap(), (both.clone(), both, true));
    assert_eq!(answers.len(), 1 + 3, "headers, and chunks of 62,000 bytes");
    assert_eq!(echo(&answers), (bytes, true));
    assert_eq!(exchange.held_bytes(), 0);
    assert!(exchange.may_close());
}

#[test]
fn sets_or_removes_the_prefill_header() {
    for prefill in [Some("p:1"), None] {
        let (mut exchange, _) = start(RULES, DUPLEX, post());
        exchange.handle(body("", true)).unwrap();
        let answers = exchange.forward("a:1", prefill, 7);
        let Some(Response::RequestHeaders(headers)) = &answers[0].response else { panic!("{answers:?}") };
        let mutation = headers.response.as_ref().unwrap().header_mutation.as_ref().unwrap();
        let set = mutation.set_headers.iter().filter_map(|set| set.header.as_ref());
        let set: Vec<_> = set.filter(|header| header.key == "x-prefiller-host-port").collect();
        let named: Vec<_> = set.iter().map(|header| header.raw_value.as_slice()).collect();
        assert_eq!(named, prefill.iter().map(|one| one.as_bytes()).collect::<Vec<_>>());
        assert_eq!(mutation.remove_headers.is_empty(), prefill.is_some());
    }
}

#[test]
fn accepts_every_end_of_a_request() {
    // An empty body with its end.
    let (mut exchange, _) = start(RULES, DUPLEX, post());
    let asked = exchange.handle(body("", true)).unwrap();
    assert_eq!(asked.pick_request.unwrap().body, None);
    assert_eq!(echo(&exchange.forward("a:1", None, 7)), (vec![], true));
    // An end in a message of its own.
    let (mut exchange, _) = start(RULES, DUPLEX, post());
    exchange.handle(body("some", false)).unwrap();
    assert_eq!(exchange.handle(body("", true)).unwrap().pick_request.unwrap().body.unwrap(), "some");
    assert_eq!(echo(&exchange.forward("a:1", None, 7)), (b"some".to_vec(), true));
    // Trailers instead of an end.
    let (mut exchange, _) = start(RULES, DUPLEX, post());
    exchange.handle(body("some", false)).unwrap();
    assert_eq!(exchange.handle(trailers()).unwrap().pick_request.unwrap().body.unwrap(), "some");
    let answers = exchange.forward("a:1", None, 7);
    assert_eq!(echo(&answers), (b"some".to_vec(), false));
    assert!(matches!(answers.last().unwrap().response, Some(Response::RequestTrailers(_))));
    assert_eq!(exchange.handle(trailers()), Err(ProtocolError::Late("request_trailers")));
    // Headers only.
    let (mut exchange, heard) = start(RULES, DUPLEX, headers(&[(":path", "/v1/models")], true));
    assert_eq!(heard.unwrap().pick_request.unwrap().body, None);
    let answers = exchange.forward("a:1", None, 7);
    assert_eq!((answers.len(), destination(&answers[0]).is_some()), (1, true));
}

#[test]
fn buffered_bodies_are_not_echoed() {
    let modes = [BodySendMode::Buffered, BodySendMode::None];
    let (mut exchange, heard) = start(RULES, modes, post());
    let answers = heard.unwrap().answers;
    assert!(matches!(&answers[..], [one] if matches!(one.response, Some(Response::RequestHeaders(_)))));
    assert!(answers[0].dynamic_metadata.is_none());
    assert_eq!(exchange.handle(body("whole", false)).unwrap().pick_request.unwrap().body.unwrap(), "whole");
    let answers = exchange.forward("a:1", None, 7);
    assert!(matches!(&answers[..], [one] if matches!(one.response, Some(Response::RequestBody(_)))));
    assert!(destination(&answers[0]).is_some() && streamed(&answers[0]).is_none());
    let heard = exchange.handle(trailers()).unwrap();
    assert!(matches!(heard.answers[0].response, Some(Response::RequestTrailers(_))));
    assert_eq!(exchange.handle(body("more", true)), Err(ProtocolError::Late("request_body")));
    // Trailers without a body: the headers were already answered, so the request cannot be
    // forwarded.
    let (mut exchange, _) = start(RULES, modes, post());
    assert_eq!(status(&exchange.handle(trailers()).unwrap()), 400);
    // A body that Envoy does not send.
    let (mut exchange, heard) = start(RULES, [BodySendMode::None; 2], post());
    assert_eq!(heard.unwrap().pick_request.unwrap().body, None);
    assert_eq!(exchange.forward("a:1", None, 7).len(), 1);
}

#[test]
fn refuses_oversized_bodies_and_ignores_the_rest() {
    for pieces in [vec![200_001], vec![150_000, 50_001]] {
        let (mut exchange, _) = start(RULES, DUPLEX, post());
        let mut last = ExchangeOutput::default();
        for length in pieces {
            last = exchange.handle(body(vec![b' '; length], false)).unwrap();
        }
        assert_eq!(status(&last), 413);
        assert!(exchange.is_refused());
        assert_eq!(exchange.held_bytes(), 0);
        assert_eq!(exchange.handle(body("more", true)), Ok(ExchangeOutput::default()));
    }
    let (mut exchange, _) = start(RULES, DUPLEX, post());
    assert!(exchange.handle(body(vec![b' '; 200_000], true)).unwrap().pick_request.is_some());
}

#[test]
fn refuses_oversized_headers() {
    let many: Vec<(String, String)> = (0..1_025).map(|at| (format!("h{at}"), String::new())).collect();
    let many: Vec<_> = many.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let long = "x".repeat((1 << 20) + 1);
    for pairs in [many, vec![("a", long.as_str())]] {
        let (_, heard) = start(RULES, DUPLEX, headers(&pairs, false));
        assert_eq!(status(&heard.unwrap()), 431);
    }
}

#[test]
fn a_rejection_has_a_reason_and_retry_after() {
    let (mut exchange, _) = start(RULES, DUPLEX, post());
    exchange.handle(body("{}", true)).unwrap();
    let wait = Some(std::time::Duration::from_millis(1_200));
    let refused = Rejection { retry_after: wait, ..Rejection::new(429, "busy", "every engine is \"full\"") };
    let heard = exchange.refuse(&refused);
    let Some(Response::ImmediateResponse(immediate)) = &heard.answers[0].response else {
        panic!("{heard:?}")
    };
    let set = &immediate.headers.as_ref().unwrap().set_headers;
    let set: Vec<_> = set.iter().map(|one| one.header.clone().unwrap()).collect();
    let has = |name: &str, value: &str| {
        set.iter().any(|header| header.key == name && header.raw_value == value.as_bytes())
    };
    assert!(has("retry-after", "2") && has("x-llm-d-request-dropped-reason", "busy"), "{set:?}");
    let body: serde_json::Value = serde_json::from_slice(&immediate.body).unwrap();
    assert_eq!(body["error"]["message"], "every engine is \"full\"");
    assert_eq!((immediate.status.as_ref().unwrap().code, &*immediate.details), (429, "kvfleet_busy"));
}

fn namespaced(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = [(key.to_owned(), Value { kind: Some(kind) })].into();
    Metadata { filter_metadata: [(namespace.to_owned(), Struct { fields })].into() }
}

#[test]
fn parses_subset_hints() {
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let list = |texts: &[&str]| {
        let values = texts.iter().map(|one| Value { kind: Some(text(one)) }).collect();
        Kind::ListValue(ListValue { values })
    };
    let cases: Vec<(Kind, &[&str])> = vec![
        (text("10.0.0.1:1, 10.0.0.2:2,"), &["10.0.0.1:1", "10.0.0.2:2"]),
        (list(&["10.0.0.1:1", "10.0.0.2:2"]), &["10.0.0.1:1", "10.0.0.2:2"]),
        (text(""), &[]),
        (list(&[]), &[]),
        (Kind::NumberValue(1.0), &[]),
    ];
    for (kind, expected) in cases {
        let metadata =
            namespaced("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", kind.clone());
        let mut exchange = ExtProcExchange::new(RULES);
        let message = ProcessingRequest { metadata_context: Some(metadata), ..message(headers(&[], true)) };
        let asked = exchange.handle(message).unwrap().pick_request.unwrap();
        assert_eq!(asked.head.subset.unwrap(), expected, "{kind:?}");
    }
    let asked =
        ExtProcExchange::new(RULES).handle(message(headers(&[], true))).unwrap().pick_request.unwrap();
    assert_eq!(asked.head.subset, None);
}

#[test]
fn reads_protocol_headers_and_selection_only_for_conformance() {
    let pairs = [
        ("X-Gateway-Inference-Objective", "old"),
        ("x-llm-d-inference-objective", "fast"),
        ("x-gateway-inference-fairness-id", "team"),
        ("x-llm-d-slo-ttft-ms", "250"),
        ("x-llm-d-slo-tpot-ms", "soon"),
        ("x-gateway-model-name-rewrite", "other"),
        ("test-epp-endpoint-selection", "10.0.0.1:1,10.0.0.2"),
        ("traceparent", "00-1"),
    ];
    for conformance in [false, true] {
        let mut exchange = ExtProcExchange::new(ExchangeRules { conformance, ..RULES });
        let head = exchange.handle(message(headers(&pairs, true))).unwrap().pick_request.unwrap().head;
        assert_eq!(head.slo.objective, "fast");
        assert_eq!(head.slo.fairness, "team");
        assert_eq!(head.slo.ttft.unwrap().as_millis(), 250);
        assert_eq!(head.slo.tpot, None);
        let timed = [("X-LLM-D-SLO-TPOT-MS", "12.5")];
        let other = ExtProcExchange::new(RULES)
            .handle(message(headers(&timed, true)))
            .unwrap()
            .pick_request
            .unwrap()
            .head;
        assert_eq!(other.slo.tpot.unwrap().as_micros(), 12_500);
        assert_eq!((head.model.as_deref(), &*head.traceparent), (Some("other"), "00-1"));
        let selection = conformance.then(|| vec!["10.0.0.1:1".to_owned(), "10.0.0.2".to_owned()]);
        assert_eq!(head.selection, selection);
    }
}

#[test]
fn reads_the_served_endpoint_from_metadata_or_attributes() {
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let metadata = namespaced("envoy.lb", "x-gateway-destination-endpoint-served", text("10.0.0.1:1"));
    let fields = [("upstream.address".to_owned(), Value { kind: Some(text("10.0.0.2:2")) })].into();
    let attributes = [("envoy.filters.http.ext_proc".to_owned(), Struct { fields })];
    let both = ProcessingRequest {
        metadata_context: Some(metadata),
        attributes: attributes.into(),
        ..response_headers(false)
    };
    let second = ProcessingRequest { metadata_context: None, ..both.clone() };
    for (message, expected) in [(both, "10.0.0.1:1"), (second, "10.0.0.2:2")] {
        for conformance in [false, true] {
            let heard =
                ExtProcExchange::new(ExchangeRules { conformance, ..RULES }).handle(message.clone()).unwrap();
            assert_eq!(heard.served.as_deref(), Some(expected));
            let Some(Response::ResponseHeaders(headers)) = &heard.answers[0].response else { panic!() };
            let mutation = &headers.response.as_ref().unwrap().header_mutation;
            let set = mutation.as_ref().map(|mutation| mutation.set_headers[0].header.clone().unwrap());
            assert_eq!(set.is_some(), conformance);
            assert!(
                set.is_none_or(|set| set.key == "x-conformance-test-served-endpoint"
                    && set.raw_value == expected.as_bytes())
            );
        }
    }
}

#[test]
fn echoes_the_response_unchanged() {
    let modes = [BodySendMode::FullDuplexStreamed; 2];
    let (mut exchange, _) = start(RULES, modes, headers(&[], true));
    exchange.forward("a:1", None, 7);
    assert!(!exchange.may_close(), "its response passes through here");
    exchange.handle(response_headers(false)).unwrap();
    let first = exchange.handle(response_body("data: 1\n\n", false)).unwrap().answers;
    assert_eq!(echo(&first), (b"data: 1\n\n".to_vec(), false));
    let long = vec![b'x'; 130_000];
    let last = exchange.handle(response_body(long.clone(), true)).unwrap().answers;
    assert_eq!((last.len(), echo(&last)), (3, (long, true)));
    assert_eq!(exchange.handle(response_trailers()), Err(ProtocolError::Late("response_trailers")));
    // Modes without echo get a plain answer.
    for mode in [BodySendMode::Streamed, BodySendMode::Buffered, BodySendMode::BufferedPartial] {
        let (mut exchange, _) = start(RULES, [BodySendMode::None, mode], headers(&[], true));
        exchange.forward("a:1", None, 7);
        exchange.handle(response_headers(false)).unwrap();
        let answers = exchange.handle(response_body("x", false)).unwrap().answers;
        assert!(matches!(&answers[..], [one] if streamed(one).is_none()));
        assert_eq!(exchange.handle(response_trailers()).unwrap().answers.len(), 1);
    }
}

#[test]
fn out_of_order_messages_are_protocol_errors() {
    let headed = || start(RULES, DUPLEX, post()).0;
    let ended = || {
        let mut exchange = start(RULES, DUPLEX, headers(&[], true)).0;
        exchange.forward("a:1", None, 7);
        exchange
    };
    let answered = || {
        let mut exchange = ended();
        exchange.handle(response_headers(true)).unwrap();
        exchange
    };
    let cases = [
        (ExtProcExchange::new(RULES), body("x", true), ProtocolError::Early("request_body")),
        (ExtProcExchange::new(RULES), trailers(), ProtocolError::Early("request_trailers")),
        (ExtProcExchange::new(RULES), response_body("x", true), ProtocolError::Early("response_body")),
        (ExtProcExchange::new(RULES), response_trailers(), ProtocolError::Early("response_trailers")),
        (headed(), message(post()), ProtocolError::Duplicate("request_headers")),
        (ended(), body("x", true), ProtocolError::Late("request_body")),
        (ended(), trailers(), ProtocolError::Late("request_trailers")),
        (answered(), response_headers(true), ProtocolError::Duplicate("response_headers")),
        (answered(), response_body("", true), ProtocolError::Late("response_body")),
        (answered(), response_trailers(), ProtocolError::Late("response_trailers")),
        (
            headed(),
            ProcessingRequest { observability_mode: true, ..body("x", true) },
            ProtocolError::ObservabilityMode,
        ),
    ];
    for (mut exchange, message, fault) in cases {
        assert_eq!(exchange.handle(message), Err(fault));
    }
    let odd = [
        ([BodySendMode::Streamed, BodySendMode::None], ProtocolError::RequestMode("STREAMED")),
        ([BodySendMode::BufferedPartial, BodySendMode::None], ProtocolError::RequestMode("BUFFERED_PARTIAL")),
        ([BodySendMode::Grpc, BodySendMode::None], ProtocolError::RequestMode("GRPC")),
        ([BodySendMode::FullDuplexStreamed, BodySendMode::Grpc], ProtocolError::ResponseMode("GRPC")),
    ];
    for (modes, fault) in odd {
        assert_eq!(start(RULES, modes, post()).1, Err(fault));
    }
}

#[test]
fn random_messages_respect_the_memory_limit_and_echo_whole_bodies() {
    let seed = 41;
    println!("seed {seed}");
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    let modes = [BodySendMode::None, BodySendMode::Buffered, BodySendMode::FullDuplexStreamed];
    let rules = ExchangeRules { body_bytes_max: 300, conformance: true };
    let (mut picks, mut faults, mut refusals) = (0, 0, 0);
    for _ in 0..20_000 {
        let chosen = [*modes.choose(&mut random).unwrap(), *modes.choose(&mut random).unwrap()];
        let first = headers(&[], random.random_bool(0.1));
        let (mut exchange, mut heard) = start(rules, chosen, first);
        let mut sent = Vec::new();
        for _ in 0..random.random_range(0..12) {
            match &heard {
                Err(_) => break,
                Ok(ExchangeOutput { pick_request: Some(question), .. }) => {
                    assert_eq!(question.body.as_deref().unwrap_or_default(), sent);
                    let answers = exchange.forward("a:1", None, 7);
                    if chosen[0] == BodySendMode::FullDuplexStreamed {
                        assert_eq!(echo(&answers).0, sent);
                    }
                    picks += 1;
                }
                Ok(_) => {}
            }
            let piece = vec![random.random(); random.random_range(0..90)];
            let end = random.random_bool(0.2);
            let message = match random.random_range(0..20) {
                0 => message(headers(&[], end)),
                1 => trailers(),
                2 => response_headers(end),
                3 => response_body(piece, end),
                4 => response_trailers(),
                5 => ProcessingRequest::default(),
                _ => {
                    sent.extend_from_slice(&piece);
                    body(piece, end)
                }
            };
            heard = exchange.handle(message);
            assert!(exchange.held_bytes() <= 300);
        }
        faults += u32::from(heard.is_err());
        refusals += u32::from(exchange.is_refused());
    }
    assert!(picks > 1_000 && faults > 1_000 && refusals > 100, "{picks} {faults} {refusals}");
}
