//! Streams as Envoy opens them and as it never would: where requests go, what is refused, what is counted.

use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::envoy::base::{HeaderMap, HeaderValue, Metadata};
use kvfleet_proto::envoy::ext_proc::processing_request::Request;
use kvfleet_proto::envoy::ext_proc::processing_response::Response;
use kvfleet_proto::envoy::ext_proc::{
    HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest, ProcessingResponse,
};
use kvfleet_proto::envoy::well_known::{Struct, Value, value::Kind};
use kvfleet_proto::health::HealthCheckRequest;
use kvfleet_proto::health::health_check_response::ServingStatus;
use kvfleet_proto::health::health_client::HealthClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::door::{DRAWN, Door, Opened, completion, engine};
use crate::harness::{HANG, until};

pub async fn door() -> Door {
    Door::start([engine(), engine()]).await
}

pub struct Call {
    pub words: mpsc::Sender<ProcessingRequest>,
    pub answers: Streaming<ProcessingResponse>,
}

impl Call {
    pub async fn open(opened: &Opened) -> Result<Call, Status> {
        let (words, receiver) = mpsc::channel(64);
        let answers = opened.client().process(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Call { words, answers })
    }

    pub async fn say(&self, message: ProcessingRequest) {
        let _ = self.words.send(message).await; // the stream may have ended
    }

    pub async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        tokio::time::timeout(HANG, self.answers.message()).await.expect("an answer in time")
    }

    pub async fn refusal(&mut self) -> ImmediateResponse {
        let answer = self.next().await.unwrap().expect("an answer");
        let Some(Response::ImmediateResponse(immediate)) = answer.response else { panic!("{answer:?}") };
        assert!(self.next().await.unwrap().is_none(), "it ends with a refusal");
        immediate
    }
}

pub fn said(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

pub fn map(pairs: &[(&str, &str)]) -> HeaderMap {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: value.as_bytes().to_vec(),
    };
    HeaderMap { headers: pairs.iter().map(header).collect() }
}

fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> ProcessingRequest {
    said(Request::RequestHeaders(HttpHeaders { headers: Some(map(pairs)), end_of_stream }))
}

pub fn post() -> ProcessingRequest {
    headers(&[(":method", "POST"), (":path", "/v1/completions")], false)
}

pub fn body(bytes: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    said(Request::RequestBody(HttpBody { body: bytes.into(), end_of_stream }))
}

pub fn metadata(namespace: &str, key: &str, text: &str) -> Option<Metadata> {
    let value = Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let fields = Struct { fields: [(key.to_owned(), value)].into() };
    Some(Metadata { filter_metadata: [(namespace.to_owned(), fields)].into() })
}

/// Where a request goes, if it is the next answer that says so.
pub fn destination(answer: &ProcessingResponse) -> String {
    let Some(Response::RequestHeaders(headers)) = &answer.response else { panic!("{answer:?}") };
    let mutation = headers.response.as_ref().unwrap().header_mutation.as_ref().unwrap();
    String::from_utf8(mutation.set_headers[0].header.as_ref().unwrap().raw_value.clone()).unwrap()
}

pub fn status(immediate: &ImmediateResponse) -> i32 {
    immediate.status.as_ref().unwrap().code
}

async fn asked(opened: &Opened, first: ProcessingRequest, text: &str) -> Call {
    let call = Call::open(opened).await.unwrap();
    call.say(first).await;
    if !text.is_empty() {
        call.say(body(text.to_owned(), true)).await;
    }
    call
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_to_who_has_their_prefix_and_the_others_are_named_behind_it() {
    let door = door().await;
    let opened = door.open(|config| config.conformance = true).await;
    let [first, second] = &door.endpoints;
    let mut call = asked(&opened, post(), &completion(DRAWN, false)).await;
    assert_eq!(destination(&call.next().await.unwrap().unwrap()), format!("{second},{first}"));
    // Only where it may go.
    let subset = |text: &str| ProcessingRequest {
        metadata_context: metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", text),
        ..post()
    };
    let mut inside = asked(&opened, subset(&format!("{first},10.0.0.1:1")), &completion(DRAWN, false)).await;
    assert_eq!(destination(&inside.next().await.unwrap().unwrap()), *first);
    for text in ["", "10.0.0.1:1"] {
        let mut outside = asked(&opened, subset(text), &completion(DRAWN, false)).await;
        let immediate = outside.refusal().await;
        assert_eq!(status(&immediate), 503, "{text:?}");
    }
    // A request without a body has no prompt, and goes somewhere all the same.
    let mut without = asked(&opened, headers(&[(":path", "/v1/models")], true), "").await;
    assert!(destination(&without.next().await.unwrap().unwrap()).contains(first));
    // Nor has one that asks for something that has no prompt, whatever its body is.
    let other = headers(&[(":method", "POST"), (":path", "/v1/audio/speech")], false);
    let mut other = asked(&opened, other, "{").await;
    assert!(destination(&other.next().await.unwrap().unwrap()).contains(first));
    // The conformance tests say where.
    let selection = format!("10.9.9.9:1, {first}");
    let named = headers(&[("test-epp-endpoint-selection", &selection)], true);
    let mut named = asked(&opened, named, "").await;
    assert_eq!(destination(&named.next().await.unwrap().unwrap()), *first);
    // Who answered is another one: it is counted.
    let served = said(Request::ResponseHeaders(HttpHeaders::default()));
    let served = |by| ProcessingRequest {
        metadata_context: metadata("envoy.lb", "x-gateway-destination-endpoint-served", by),
        ..served.clone()
    };
    named.say(served(first)).await;
    named.next().await.unwrap().unwrap();
    assert_eq!(opened.counted("kvfleet_doors_picker_served_elsewhere_total"), 0);
    inside.say(served(second)).await;
    let is_of_response =
        |answer: ProcessingResponse| matches!(answer.response, Some(Response::ResponseHeaders(_)));
    while !is_of_response(inside.next().await.unwrap().unwrap()) {}
    assert_eq!(opened.counted("kvfleet_doors_picker_served_elsewhere_total"), 1);
    assert_eq!(opened.counted("kvfleet_doors_picker_picked_total"), 5);
    assert_eq!(opened.counted("kvfleet_doors_picker_refused_total"), 2);
    drop((call, inside, without, other, named));
    until("streams that are gone", || async {
        (opened.counted("kvfleet_doors_picker_streams") == 0).then_some(())
    })
    .await;
    opened.doors.shutdown().await;
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_be_served_is_told_so_with_the_right_status() {
    let door = door().await;
    let limits = |config: &mut kvfleet_doors::PickerConfig| {
        (config.body_bytes_max, config.held_bytes_max, config.arrival_ms) = (20_000, 30_000, 60_000);
    };
    let opened = door.open(limits).await;
    // Full queues.
    door.waiting.store(u64::MAX / 4, std::sync::atomic::Ordering::Relaxed);
    let full = until("a refusal", || async {
        let mut call = asked(&opened, post(), &completion(0..4, false)).await;
        match call.next().await.unwrap().unwrap().response.unwrap() {
            Response::ImmediateResponse(immediate) => Some(immediate),
            _ => None,
        }
    })
    .await;
    assert_eq!(status(&full), 429);
    let named = |name: &str| {
        let set = &full.headers.as_ref().unwrap().set_headers;
        set.iter().filter_map(|one| one.header.as_ref()).any(|header| header.key == name)
    };
    assert!(named("retry-after") && named("x-llm-d-request-dropped-reason"));
    door.waiting.store(0, std::sync::atomic::Ordering::Relaxed);
    // What cannot be read, and what is too long.
    let mut unreadable = asked(&opened, post(), "{").await;
    assert_eq!(status(&unreadable.refusal().await), 400);
    let mut long = asked(&opened, post(), &" ".repeat(20_001)).await;
    assert_eq!(status(&long.refusal().await), 413);
    // Two bodies that do not fit side by side: the second is refused, and room is there when the first is gone.
    let begun = async || {
        let first = Call::open(&opened).await.unwrap();
        first.say(post()).await;
        first.say(body(vec![b' '; 20_000], false)).await;
        first
    };
    let first = tokio::sync::Mutex::new(begun().await);
    let crowded = until("no room", || async {
        let mut second = Call::open(&opened).await.unwrap();
        second.say(post()).await;
        second.say(body(vec![b' '; 15_000], false)).await;
        second.say(body("{", true)).await;
        let immediate = second.refusal().await;
        let is_crowded = status(&immediate) == 503;
        // The second may have come first, and then it is the other that was refused.
        if !is_crowded {
            *first.lock().await = begun().await;
        }
        is_crowded.then_some(immediate)
    });
    assert_eq!(crowded.await.details, "kvfleet_memory");
    drop(first);
    until("room again", || async {
        let mut second = Call::open(&opened).await.unwrap();
        second.say(post()).await;
        second.say(body(vec![b' '; 15_000], false)).await;
        second.say(body("{", true)).await;
        (status(&second.refusal().await) == 400).then_some(())
    })
    .await;
    opened.doors.shutdown().await;
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_streams_end_with_a_word_and_take_nothing_from_others() {
    let door = door().await;
    let opened = door.open(|config| (config.streams_max, config.arrival_ms) = (4, 300)).await;
    // Out of order: the stream ends with what was wrong.
    let mut early = Call::open(&opened).await.unwrap();
    early.say(body("x", true)).await;
    let status = early.next().await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    kvfleet_errors_doc::says("a body of Envoy's before its headers", &status.message(), &[]);
    // Nothing is said, or headers and then nothing.
    let mut silent = Call::open(&opened).await.unwrap();
    assert_eq!(silent.next().await.unwrap_err().code(), Code::DeadlineExceeded);
    let mut slow = asked(&opened, post(), "").await;
    assert_eq!(self::status(&slow.refusal().await), 408);
    // Cut, before and after its end.
    drop(asked(&opened, post(), "").await);
    drop(asked(&opened, post(), &completion(0..4, false)).await);
    drop((early, silent, slow));
    let free = || async { (opened.counted("kvfleet_doors_picker_streams") == 0).then_some(()) };
    until("streams that are gone", free).await;
    opened.doors.shutdown().await;
    // As many as there may be, and one more.
    let opened = door.open(|config| config.streams_max = 4).await;
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut call = asked(&opened, post(), &completion(0..4, false)).await;
        destination(&call.next().await.unwrap().unwrap());
        open.push(call);
    }
    let refused = match Call::open(&opened).await {
        Ok(_) => panic!("a fifth stream"),
        Err(status) => status,
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    kvfleet_errors_doc::says("more requests of Envoy's than a picker takes", &refused.message(), &[]);
    assert_eq!(opened.counted("kvfleet_doors_picker_turned_away_total"), 1);
    // Streams whose answers Envoy still has to give do not keep a router from stopping.
    tokio::time::timeout(Duration::from_secs(4), opened.doors.shutdown()).await.expect("an end in time");
    for mut call in open {
        while let Ok(Some(_)) = call.next().await {}
    }
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_told_by_the_names_that_are_asked_for() {
    let door = door().await;
    let opened = door.open(|_| {}).await;
    let mut client = HealthClient::new(opened.channel());
    for service in ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
        let request = HealthCheckRequest { service: service.into() };
        let checked = client.check(request.clone()).await.unwrap().into_inner();
        assert_eq!(checked.status(), ServingStatus::Serving, "{service:?}");
        let mut watched = client.watch(request).await.unwrap().into_inner();
        assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    }
    let unknown = HealthCheckRequest { service: "other".into() };
    let status = client.check(unknown.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    kvfleet_errors_doc::says("the health of a service that a picker does not have", &status.message(), &[]);
    let mut watched = client.watch(unknown).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::ServiceUnknown);
    let request = HealthCheckRequest { service: "readiness".into() };
    let mut watched = client.watch(request).await.unwrap().into_inner();
    watched.message().await.unwrap().unwrap();
    opened.doors.shutdown().await;
    let last = watched.message().await;
    assert!(!matches!(&last, Ok(Some(look)) if look.status() == ServingStatus::Serving), "{last:?}");
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_said_with_its_key() {
    let door = door().await;
    let opened = door.open(|_| {}).await;
    let picker = kvfleet_doors::PickerConfig { listen: opened.address.clone(), ..Default::default() };
    let config = kvfleet_doors::DoorsConfig { picker, ..Default::default() };
    let registry = prometheus::Registry::new();
    let error = kvfleet_doors::Doors::open(&config, &door.engines, door.desk(), &registry).await.unwrap_err();
    kvfleet_errors_doc::says("a port of the endpoint picker that is in use", &error, &[&opened.address]);
    opened.doors.shutdown().await;
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tls_the_certificate_of_the_router_is_shown_and_none_is_asked_for() {
    let door = door().await;
    let opened = door.open(|config| config.tls = true).await;
    let authority = std::fs::read(&door.cluster.configs[0].tls.ca).unwrap();
    let tls = tonic::transport::ClientTlsConfig::new()
        .domain_name("kvfleet")
        .ca_certificate(tonic::transport::Certificate::from_pem(authority));
    let endpoint = tonic::transport::Endpoint::from_shared(format!("https://{}", opened.address)).unwrap();
    let mut client = HealthClient::new(endpoint.tls_config(tls).unwrap().connect_lazy());
    let checked = client.check(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(checked.status(), ServingStatus::Serving);
    // Who speaks no TLS is not heard.
    let mut plain = HealthClient::new(opened.channel());
    assert!(plain.check(HealthCheckRequest::default()).await.is_err());
    opened.doors.shutdown().await;
    door.shutdown().await;
}
