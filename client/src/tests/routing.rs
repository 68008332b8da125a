//! Route with failover, against fake routers over mutual TLS. Streams alone are tested in
//! `streams.rs`.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::id::{Category, HASH_BYTES, IdentityDigest, InstanceId, RequestId, TenantId};
use kvfleet_net::tls::Identity;
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_server::{Router, RouterServer};
use kvfleet_transport::suite::{PATIENCE, hashes};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status, Streaming};

use super::authority::{Authority, config};
use crate::{Client, ClientError, DecodeAdmission, RouteAnswer, RouteCall, RouteError, RouterError};

/// How a fake router handles route streams.
#[derive(Clone, Default)]
pub(super) enum StreamBehavior {
    /// Answers them like unary calls.
    #[default]
    Answer,
    /// Refuses them, as earlier releases do.
    Refused(Code),
    /// Hands them to the test.
    Manual(mpsc::UnboundedSender<RouterStreamEnd>),
}

/// The router's end of one stream.
pub(super) struct RouterStreamEnd {
    pub(super) requests: Streaming<pb::RouteRequest>,
    pub(super) answers: mpsc::UnboundedSender<Result<pb::RouteStreamReply, Status>>,
}

impl RouterStreamEnd {
    pub(super) async fn next_request(&mut self) -> pb::RouteRequest {
        self.requests.message().await.unwrap().expect("a question")
    }

    /// Answers a call with an instance.
    pub(super) fn answer(&self, call: u64, instance: u32) {
        let answer = pb::route_stream_reply::Answer::Reply(decision(instance));
        self.send(call, answer);
    }

    pub(super) fn refuse(&self, call: u64, code: Code) {
        let refused = pb::Refused { code: code.into(), message: "as told".into() };
        self.send(call, pb::route_stream_reply::Answer::Refused(refused));
    }

    fn send(&self, call: u64, answer: pb::route_stream_reply::Answer) {
        let reply = pb::RouteStreamReply { request: 1, call, answer: Some(answer) };
        // The client may have closed the stream.
        drop(self.answers.send(Ok(reply)));
    }
}

/// Gives every route call the same answer, counts calls, and keeps accepted reports.
#[derive(Clone)]
pub(super) struct FakeRouter {
    answer: Result<pb::RouteReply, Code>,
    pub(super) streams: StreamBehavior,
    /// Number of streams requested.
    pub(super) opened: Arc<AtomicU32>,
    pub(super) calls: Arc<AtomicU32>,
    pub(super) reports: Arc<Mutex<Vec<pb::ReportRequest>>>,
    pub(super) refused_reports: Arc<AtomicU32>,
    pub(super) refuses_reports: Arc<AtomicBool>,
}

impl FakeRouter {
    pub(super) fn new(answer: Result<pb::RouteReply, Code>) -> FakeRouter {
        FakeRouter {
            answer,
            streams: StreamBehavior::default(),
            opened: Arc::default(),
            calls: Arc::default(),
            reports: Arc::default(),
            refused_reports: Arc::default(),
            refuses_reports: Arc::default(),
        }
    }
}

impl FakeRouter {
    /// The answer to a unary or streamed route call.
    fn answer_route(&self, request: &pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        assert!([3 * HASH_BYTES, TOO_LONG_BYTES].contains(&request.hashes.len()), "{}", request.hashes.len());
        self.answer.clone().map_err(|code| Status::new(code, "as told"))
    }
}

/// Bytes of hashes of a prompt that is too long for a stream.
pub(super) const TOO_LONG_BYTES: usize = 65_537 * HASH_BYTES;

type RpcResult<T> = Result<Response<T>, Status>;

fn unimplemented<T>() -> RpcResult<T> {
    Err(Status::unimplemented("not implemented in this fake"))
}

#[tonic::async_trait]
impl Router for FakeRouter {
    type AnnounceStream = ReceiverStream<Result<pb::AnnounceReply, Status>>;
    type RouteStreamStream = Pin<Box<dyn Stream<Item = Result<pb::RouteStreamReply, Status>> + Send>>;

    async fn route(&self, request: Request<pb::RouteRequest>) -> RpcResult<pb::RouteReply> {
        self.answer_route(request.get_ref()).map(Response::new)
    }
    async fn route_stream(
        &self,
        request: Request<Streaming<pb::RouteRequest>>,
    ) -> RpcResult<Self::RouteStreamStream> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        assert_eq!(request.metadata().get("grpc-timeout"), None, "a deadline would limit the whole stream");
        let questions = request.into_inner();
        match &self.streams {
            StreamBehavior::Refused(code) => Err(Status::new(*code, "as told")),
            StreamBehavior::Manual(test) => {
                let (answers, said) = mpsc::unbounded_channel();
                drop(test.send(RouterStreamEnd { requests: questions, answers }));
                Ok(Response::new(Box::pin(UnboundedReceiverStream::new(said))))
            }
            StreamBehavior::Answer => {
                let fake = self.clone();
                let answers = questions.map(move |question| {
                    let question = question?;
                    let answer = match fake.answer_route(&question) {
                        Ok(reply) => pb::route_stream_reply::Answer::Reply(reply),
                        Err(status) => pb::route_stream_reply::Answer::Refused(pb::Refused {
                            code: status.code().into(),
                            message: status.message().into(),
                        }),
                    };
                    let (request, call) = (question.request, question.call);
                    Ok(pb::RouteStreamReply { request, call, answer: Some(answer) })
                });
                Ok(Response::new(Box::pin(answers)))
            }
        }
    }
    async fn lookup(&self, request: Request<pb::LookupRequest>) -> RpcResult<pb::LookupReply> {
        let len_blocks = u32::try_from(request.get_ref().hashes.len() / HASH_BYTES).unwrap();
        let run = pb::HolderRun { len_blocks, ..Default::default() };
        Ok(Response::new(pb::LookupReply { runs: vec![run], ..Default::default() }))
    }
    async fn report(&self, request: Request<pb::ReportRequest>) -> RpcResult<pb::ReportReply> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.refuses_reports.load(Ordering::Relaxed) {
            self.refused_reports.fetch_add(1, Ordering::Relaxed);
            return Err(Status::unavailable("as told"));
        }
        self.reports.lock().unwrap().push(request.into_inner());
        Ok(Response::new(pb::ReportReply::default()))
    }

    async fn report_residency(&self, _: Request<pb::ResidencyRequest>) -> RpcResult<pb::ResidencyReply> {
        unimplemented()
    }
    async fn admit_decode(&self, asked: Request<pb::AdmitDecodeRequest>) -> RpcResult<pb::AdmitDecodeReply> {
        let asked = asked.into_inner();
        let (may, reason) =
            (asked.tbt_max_us != 1, format!("request {} of {}", asked.request, asked.instance));
        Ok(Response::new(pb::AdmitDecodeReply { admitted: may, reason, retry_after_ms: 30, tbt_us: 2 }))
    }
    async fn why(&self, _: Request<pb::WhyRequest>) -> RpcResult<pb::WhyReply> {
        unimplemented()
    }
    async fn status(&self, _: Request<pb::StatusRequest>) -> RpcResult<pb::StatusReply> {
        Ok(Response::new(pb::StatusReply { term: 4, ..pb::StatusReply::default() }))
    }
    async fn join(&self, _: Request<pb::JoinRequest>) -> RpcResult<pb::JoinReply> {
        unimplemented()
    }
    async fn announce(&self, _: Request<Streaming<pb::AnnounceRequest>>) -> RpcResult<Self::AnnounceStream> {
        unimplemented()
    }
    async fn pin(&self, _: Request<pb::PinRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn unpin(&self, _: Request<pb::UnpinRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn set_quota(&self, _: Request<pb::SetQuotaRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn set_ttl(&self, _: Request<pb::SetTtlRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn set_generation(&self, _: Request<pb::SetGenerationRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn leave(&self, _: Request<pb::LeaveRequest>) -> RpcResult<pb::AdminReply> {
        unimplemented()
    }
    async fn drain(&self, _: Request<pb::DrainRequest>) -> RpcResult<pb::DrainReply> {
        unimplemented()
    }
    async fn change_member(&self, _: Request<pb::ChangeMemberRequest>) -> RpcResult<pb::ChangeMemberReply> {
        unimplemented()
    }
    async fn transfer_lead(&self, _: Request<pb::TransferLeadRequest>) -> RpcResult<pb::TransferLeadReply> {
        unimplemented()
    }
}

pub(super) fn decision(instance: u32) -> pb::RouteReply {
    let decision = pb::Decision { instance, ..pb::Decision::default() };
    pb::RouteReply { answer: Some(pb::route_reply::Answer::Decision(decision)), freshness: None }
}

/// Serves a fake router; returns its address, call counter and task.
async fn serve(
    identity: &Identity,
    answer: Result<pb::RouteReply, Code>,
) -> (String, Arc<AtomicU32>, tokio::task::JoinHandle<()>) {
    let fake = FakeRouter::new(answer);
    let calls = Arc::clone(&fake.calls);
    let (address, serving) = serve_fake(identity, fake).await;
    (address, calls, serving)
}

/// Serves the given fake router.
pub(super) async fn serve_fake(
    identity: &Identity,
    fake: FakeRouter,
) -> (String, tokio::task::JoinHandle<()>) {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = tokio::net::TcpListener::bind(any).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let incoming = kvfleet_net::tls::listen::incoming(listener, identity);
    let serving = tokio::spawn(async move {
        let mut server = tonic::transport::Server::builder();
        server.add_service(RouterServer::new(fake)).serve_with_incoming(incoming).await.unwrap();
    });
    (address, serving)
}

/// An address without a listener.
pub(super) fn unused_address() -> String {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    held.local_addr().unwrap().to_string()
}

pub(super) fn route_call() -> RouteCall {
    RouteCall {
        request: RequestId(1),
        tenant: TenantId(0),
        category: Category::default(),
        hashes: hashes(3),
        block_tokens: 16,
        input_tokens: 48,
        output_tokens: 0,
        tbt_max_us: 0,
        identity: IdentityDigest([1; 16]),
        after: vec![],
        fresh: false,
    }
}

pub(super) fn instance(answer: RouteAnswer) -> u32 {
    match answer {
        RouteAnswer::Decided(decision) => decision.instance,
        other => panic!("expected a decision, got {other:?}"),
    }
}

#[tokio::test]
async fn dead_router_is_skipped_and_working_one_kept() {
    let authority = Authority::new();
    let (good, calls, _serving) = serve(&authority.router(), Ok(decision(7))).await;
    let (full, refusals, _serving_full) = serve(&authority.router(), Err(Code::ResourceExhausted)).await;
    let client = Client::new(config(vec![unused_address(), full, good], authority.member())).unwrap();
    for _ in 0..5 {
        assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 5);
    assert_eq!(refusals.load(Ordering::Relaxed), 1, "asked once, then the working one is kept");
    assert_eq!(client.status().await.unwrap().term, 4);
    assert_eq!(client.lookup(&hashes(3), vec![], false).await.unwrap().runs[0].len_blocks, 3);
}

#[tokio::test]
async fn another_router_answers_when_the_kept_one_dies() {
    let authority = Authority::new();
    // On a separate runtime, so that shutting it down closes the connections.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let member = authority.router();
    let (first, ..) = doomed.spawn(async move { serve(&member, Ok(decision(1))).await }).await.unwrap();
    let (second, _, _serving) = serve(&authority.router(), Ok(decision(2))).await;
    let client = Client::new(config(vec![first, second], authority.member())).unwrap();
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 1);
    doomed.shutdown_background();
    let mut answers = Vec::new();
    while answers.last() != Some(&2) {
        answers.push(instance(client.route(route_call()).await.unwrap()));
    }
}

#[tokio::test]
async fn permanent_refusals_end_the_call() {
    let authority = Authority::new();
    let (wrong, calls, _serving) = serve(&authority.router(), Err(Code::InvalidArgument)).await;
    let (other, others, _serving_other) = serve(&authority.router(), Ok(decision(1))).await;
    let client = Client::new(config(vec![wrong.clone(), other], authority.member())).unwrap();
    let error = client.route(route_call()).await.unwrap_err();
    assert_eq!(error.to_string(), format!("router {wrong} refused the call: as told"));
    assert_eq!((calls.load(Ordering::Relaxed), others.load(Ordering::Relaxed)), (1, 0));
}

#[tokio::test]
async fn rejections_differ_from_empty_answers() {
    let authority = Authority::new();
    let rejected = pb::Rejected { reason: "no instance".into(), retry_after_ms: 30, no_instance: true };
    let reply = pb::RouteReply { answer: Some(pb::route_reply::Answer::Rejected(rejected)), freshness: None };
    let (address, _, _serving) = serve(&authority.router(), Ok(reply)).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let expected =
        RouteAnswer::Rejected { reason: "no instance".into(), retry_after: Duration::from_millis(30) };
    assert_eq!(client.route(route_call()).await.unwrap(), expected);

    let (address, _, _serving) = serve(&authority.router(), Ok(pb::RouteReply::default())).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    assert!(matches!(client.route(route_call()).await, Err(RouteError::Empty)));
}

#[tokio::test]
async fn error_lists_all_unreachable_routers() {
    let authority = Authority::new();
    let (a, b) = (unused_address(), unused_address());
    let client = Client::new(config(vec![a.clone(), b.clone()], authority.member())).unwrap();
    let error = client.route(route_call()).await.unwrap_err();
    assert!(matches!(error, RouteError::Router(RouterError::NoneAnswered { .. })), "{error}");
    assert!(error.to_string().starts_with(&format!("none of the routers {a}, {b} answered")), "{error}");
}

#[tokio::test]
async fn router_of_another_authority_is_not_trusted() {
    let (address, calls, _serving) = serve(&Authority::new().router(), Ok(decision(1))).await;
    let client = Client::new(config(vec![address], Authority::new().member())).unwrap();
    assert!(client.route(route_call()).await.is_err());
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn decode_is_admitted_if_no_router_answers() {
    let authority = Authority::new();
    let (address, _, _serving) = serve(&authority.router(), Ok(decision(1))).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let ask =
        async |client: &Client, limit_us| client.admit_decode(RequestId(7), InstanceId(2), limit_us).await;
    assert_eq!(ask(&client, 9_000).await, DecodeAdmission::Admitted);
    let ends =
        DecodeAdmission::Rejected { reason: "request 7 of 2".into(), retry_after: Duration::from_millis(30) };
    // Without an answer in time decode is admitted.
    let deadline = Instant::now() + PATIENCE;
    while ask(&client, 1).await != ends {
        assert!(Instant::now() < deadline, "the router's answer was not returned");
    }
    let alone = Client::new(config(vec![unused_address()], authority.member())).unwrap();
    assert_eq!(ask(&alone, 1).await, DecodeAdmission::Admitted, "no router is reachable");
}

#[tokio::test]
async fn report_goes_to_every_router() {
    let authority = Authority::new();
    let (first, one, _serving) = serve(&authority.router(), Ok(decision(1))).await;
    let (second, two, _serving_second) = serve(&authority.router(), Ok(decision(1))).await;
    let dead = unused_address();
    let client = Client::new(config(vec![first, dead.clone(), second], authority.member())).unwrap();
    let failed = client.report(&pb::ReportRequest::default()).await;
    assert_eq!(failed.iter().map(|(address, _)| address.clone()).collect::<Vec<_>>(), [dead]);
    assert_eq!((one.load(Ordering::Relaxed), two.load(Ordering::Relaxed)), (1, 1));
}

#[tokio::test]
async fn malformed_addresses_are_named() {
    let identity = Authority::new().member();
    let error = |routers| Client::new(config(routers, identity.clone())).unwrap_err();
    assert_eq!(error(vec![]), ClientError::NoRouters);
    for bad in ["localhost", "host:port", "host:99999", "a b:1"] {
        let message = error(vec![bad.to_owned()]).to_string();
        assert!(message.starts_with(&format!("router {bad:?} is not HOST:PORT: ")), "{message}");
    }
}
