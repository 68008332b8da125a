//! Valid and hostile streams: destinations, refusals and metrics.

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
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status, Streaming};

use super::fixture::{PickerFixture, RESIDENT_PROMPT, RunningPicker, completion, healthy_engine};
use kvfleet_testkit::cluster::{HANG, until};

pub async fn start_fixture() -> PickerFixture {
    PickerFixture::start([healthy_engine(), healthy_engine()]).await
}

pub struct PickerStream {
    pub sender: mpsc::Sender<ProcessingRequest>,
    pub answers: Streaming<ProcessingResponse>,
}

impl PickerStream {
    pub async fn open(opened: &RunningPicker) -> Result<PickerStream, Status> {
        let (words, receiver) = mpsc::channel(64);
        let answers = opened.client().process(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(PickerStream { sender: words, answers })
    }

    pub async fn send(&self, message: ProcessingRequest) {
        let _ = self.sender.send(message).await; // the stream may have ended
    }

    pub async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        tokio::time::timeout(HANG, self.answers.message()).await.expect("an answer in time")
    }

    pub async fn expect_refusal(&mut self) -> ImmediateResponse {
        let answer = self.next().await.unwrap().expect("an immediate response");
        let Some(Response::ImmediateResponse(immediate)) = answer.response else { panic!("{answer:?}") };
        assert!(self.next().await.unwrap().is_none(), "the stream ends after a refusal");
        immediate
    }
}

pub fn message(request: Request) -> ProcessingRequest {
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
    message(Request::RequestHeaders(HttpHeaders { headers: Some(map(pairs)), end_of_stream }))
}

pub fn post() -> ProcessingRequest {
    headers(&[(":method", "POST"), (":path", "/v1/completions")], false)
}

pub fn body(bytes: impl Into<Bytes>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::RequestBody(HttpBody { body: bytes.into(), end_of_stream }))
}

pub fn metadata(namespace: &str, key: &str, text: &str) -> Option<Metadata> {
    let value = Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let fields = Struct { fields: [(key.to_owned(), value)].into() };
    Some(Metadata { filter_metadata: [(namespace.to_owned(), fields)].into() })
}

/// Destination in the next answer.
pub fn destination(answer: &ProcessingResponse) -> String {
    let Some(Response::RequestHeaders(headers)) = &answer.response else { panic!("{answer:?}") };
    let mutation = headers.response.as_ref().unwrap().header_mutation.as_ref().unwrap();
    String::from_utf8(mutation.set_headers[0].header.as_ref().unwrap().raw_value.clone()).unwrap()
}

pub fn status(immediate: &ImmediateResponse) -> i32 {
    immediate.status.as_ref().unwrap().code
}

async fn start_request(opened: &RunningPicker, first: ProcessingRequest, text: &str) -> PickerStream {
    let call = PickerStream::open(opened).await.unwrap();
    call.send(first).await;
    if !text.is_empty() {
        call.send(body(text.to_owned(), true)).await;
    }
    call
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn picks_the_prefix_holder_first_then_alternatives() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|config| config.conformance = true).await;
    let [first, second] = &gateway.endpoints;
    let mut call = start_request(&opened, post(), &completion(RESIDENT_PROMPT, false)).await;
    assert_eq!(destination(&call.next().await.unwrap().unwrap()), format!("{second},{first}"));
    // With subsets.
    let subset = |text: &str| ProcessingRequest {
        metadata_context: metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", text),
        ..post()
    };
    let mut inside =
        start_request(&opened, subset(&format!("{first},10.0.0.1:1")), &completion(RESIDENT_PROMPT, false))
            .await;
    assert_eq!(destination(&inside.next().await.unwrap().unwrap()), *first);
    for text in ["", "10.0.0.1:1"] {
        let mut outside = start_request(&opened, subset(text), &completion(RESIDENT_PROMPT, false)).await;
        let immediate = outside.expect_refusal().await;
        assert_eq!(status(&immediate), 503, "{text:?}");
    }
    // A request without a body has no prompt, but is still placed.
    let mut without = start_request(&opened, headers(&[(":path", "/v1/models")], true), "").await;
    assert!(destination(&without.next().await.unwrap().unwrap()).contains(first));
    // Neither does one on a path without prompts, whatever its body.
    let other = headers(&[(":method", "POST"), (":path", "/v1/audio/speech")], false);
    let mut other = start_request(&opened, other, "{").await;
    assert!(destination(&other.next().await.unwrap().unwrap()).contains(first));
    // A conformance test selects the endpoint.
    let selection = format!("10.9.9.9:1, {first}");
    let named = headers(&[("test-epp-endpoint-selection", &selection)], true);
    let mut named = start_request(&opened, named, "").await;
    assert_eq!(destination(&named.next().await.unwrap().unwrap()), *first);
    // Another endpoint answers, which is counted.
    let served = message(Request::ResponseHeaders(HttpHeaders::default()));
    let served = |by| ProcessingRequest {
        metadata_context: metadata("envoy.lb", "x-gateway-destination-endpoint-served", by),
        ..served.clone()
    };
    named.send(served(first)).await;
    named.next().await.unwrap().unwrap();
    assert_eq!(opened.metric("kvfleet_gateway_picker_served_elsewhere_total"), 0);
    inside.send(served(second)).await;
    let is_of_response =
        |answer: ProcessingResponse| matches!(answer.response, Some(Response::ResponseHeaders(_)));
    while !is_of_response(inside.next().await.unwrap().unwrap()) {}
    assert_eq!(opened.metric("kvfleet_gateway_picker_served_elsewhere_total"), 1);
    assert_eq!(opened.metric("kvfleet_gateway_picker_picked_total"), 5);
    assert_eq!(opened.metric("kvfleet_gateway_picker_refused_total"), 2);
    drop((call, inside, without, other, named));
    until("closed streams", || async {
        (opened.metric("kvfleet_gateway_picker_streams") == 0).then_some(())
    })
    .await;
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_have_the_right_status() {
    let gateway = start_fixture().await;
    let limits = |config: &mut kvfleet_gateway::PickerConfig| {
        (config.body_bytes_max, config.held_bytes_max, config.arrival_ms) = (20_000, 30_000, 60_000);
    };
    let opened = gateway.open(limits).await;
    // Full queues.
    gateway.queue_tokens.store(u64::MAX / 4, std::sync::atomic::Ordering::Relaxed);
    let full = until("a refusal", || async {
        let mut call = start_request(&opened, post(), &completion(0..4, false)).await;
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
    gateway.queue_tokens.store(0, std::sync::atomic::Ordering::Relaxed);
    // Unreadable and oversized bodies.
    let mut unreadable = start_request(&opened, post(), "{").await;
    assert_eq!(status(&unreadable.expect_refusal().await), 400);
    let mut long = start_request(&opened, post(), &" ".repeat(20_001)).await;
    assert_eq!(status(&long.expect_refusal().await), 413);
    // Two bodies that exceed the limit together: the second is refused, until the first is gone.
    let begun = async || {
        let first = PickerStream::open(&opened).await.unwrap();
        first.send(post()).await;
        first.send(body(vec![b' '; 20_000], false)).await;
        first
    };
    let first = tokio::sync::Mutex::new(begun().await);
    let refused = until("a refusal for lack of memory", || async {
        let mut second = PickerStream::open(&opened).await.unwrap();
        second.send(post()).await;
        second.send(body(vec![b' '; 15_000], false)).await;
        second.send(body("{", true)).await;
        let immediate = second.expect_refusal().await;
        let is_crowded = status(&immediate) == 503;
        // If the second stream was handled first, the other one was refused.
        if !is_crowded {
            *first.lock().await = begun().await;
        }
        is_crowded.then_some(immediate)
    });
    assert_eq!(refused.await.details, "kvfleet_memory");
    drop(first);
    until("free memory", || async {
        let mut second = PickerStream::open(&opened).await.unwrap();
        second.send(post()).await;
        second.send(body(vec![b' '; 15_000], false)).await;
        second.send(body("{", true)).await;
        (status(&second.expect_refusal().await) == 400).then_some(())
    })
    .await;
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_streams_end_with_an_error() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|config| (config.streams_max, config.arrival_ms) = (4, 300)).await;
    // An out-of-order message ends the stream with an error.
    let mut early = PickerStream::open(&opened).await.unwrap();
    early.send(body("x", true)).await;
    let status = early.next().await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    kvfleet_errors_doc::says("a body of Envoy's before its headers", &status.message(), &[]);
    // A silent stream, and headers without a body.
    let mut silent = PickerStream::open(&opened).await.unwrap();
    assert_eq!(silent.next().await.unwrap_err().code(), Code::DeadlineExceeded);
    let mut slow = start_request(&opened, post(), "").await;
    assert_eq!(self::status(&slow.expect_refusal().await), 408);
    // Streams dropped before and after the end of the request.
    drop(start_request(&opened, post(), "").await);
    drop(start_request(&opened, post(), &completion(0..4, false)).await);
    drop((early, silent, slow));
    let free = || async { (opened.metric("kvfleet_gateway_picker_streams") == 0).then_some(()) };
    until("closed streams", free).await;
    opened.gateway.shutdown().await;
    // One stream more than allowed.
    let opened = gateway.open(|config| config.streams_max = 4).await;
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut call = start_request(&opened, post(), &completion(0..4, false)).await;
        destination(&call.next().await.unwrap().unwrap());
        open.push(call);
    }
    let refused = match PickerStream::open(&opened).await {
        Ok(_) => panic!("a stream above the limit was accepted"),
        Err(status) => status,
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    kvfleet_errors_doc::says("more requests of Envoy's than a picker takes", &refused.message(), &[]);
    assert_eq!(opened.metric("kvfleet_gateway_picker_shed_total"), 1);
    // Streams that wait for a response do not delay the shutdown.
    tokio::time::timeout(Duration::from_secs(4), opened.gateway.shutdown())
        .await
        .expect("a shutdown in time");
    for mut call in open {
        while let Ok(Some(_)) = call.next().await {}
    }
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_service_knows_its_services() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|_| {}).await;
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
    opened.gateway.shutdown().await;
    let last = watched.message().await;
    assert!(!matches!(&last, Ok(Some(look)) if look.status() == ServingStatus::Serving), "{last:?}");
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_the_key_of_a_port_in_use() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|_| {}).await;
    let picker = kvfleet_gateway::PickerConfig { listen: opened.address.clone(), ..Default::default() };
    let config = kvfleet_gateway::GatewayConfig { picker, ..Default::default() };
    let registry = prometheus::Registry::new();
    let error = kvfleet_gateway::Gateway::open(&config, &gateway.engines, gateway.router(), &registry)
        .await
        .unwrap_err();
    kvfleet_errors_doc::says("a port of the endpoint picker that is in use", &error, &[&opened.address]);
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_uses_the_router_certificate_without_client_certificates() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|config| config.tls = true).await;
    let authority = std::fs::read(&gateway.cluster.configs[0].tls.ca).unwrap();
    let tls = ClientTlsConfig::new().domain_name("kvfleet").ca_certificate(Certificate::from_pem(authority));
    let endpoint = Endpoint::from_shared(format!("https://{}", opened.address)).unwrap();
    let mut client = HealthClient::new(endpoint.tls_config(tls).unwrap().connect_lazy());
    let checked = client.check(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(checked.status(), ServingStatus::Serving);
    // A client without TLS is refused.
    let mut plain = HealthClient::new(opened.channel());
    assert!(plain.check(HealthCheckRequest::default()).await.is_err());
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_show_a_certificate_of_their_ca() {
    let folder = tempfile::tempdir().unwrap();
    let authority = || {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let (of_clients, other) = (authority(), authority());
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, of_clients.pem()).unwrap();
    let gateway = start_fixture().await;
    let opened = gateway.open(|config| (config.tls, config.client_ca) = (true, ca.clone())).await;
    let cluster_ca = std::fs::read(&gateway.cluster.configs[0].tls.ca).unwrap();
    let check = async |issuer: Option<&CertifiedIssuer<'static, KeyPair>>| {
        let mut tls =
            ClientTlsConfig::new().domain_name("kvfleet").ca_certificate(Certificate::from_pem(&cluster_ca));
        if let Some(issuer) = issuer {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["envoy.example.org".to_owned()]).unwrap();
            let cert = params.signed_by(&key, issuer).unwrap();
            tls = tls.identity(Identity::from_pem(cert.pem(), key.serialize_pem()));
        }
        let endpoint = Endpoint::from_shared(format!("https://{}", opened.address)).unwrap();
        let mut client = HealthClient::new(endpoint.tls_config(tls).unwrap().connect_lazy());
        client.check(HealthCheckRequest::default()).await.is_ok()
    };
    assert!(check(Some(&of_clients)).await);
    assert!(!check(Some(&other)).await, "a certificate of another CA");
    assert!(!check(None).await, "no certificate");
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}
