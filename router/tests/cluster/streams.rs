//! Route calls over a stream: the order of answers, errors of single requests, and the end of the
//! stream.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::HASH_BYTES;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::route_stream_reply::Answer;
use kvfleet_proto::pb::router_client::RouterClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use kvfleet_testkit::certificates::RoleChannel;
use kvfleet_testkit::cluster::{Cluster, HANG, prefix, tenants};

/// Limit on requests of one stream in flight.
const REQUESTS_MAX: u64 = 256;

fn question(call: u64) -> pb::RouteRequest {
    pb::RouteRequest {
        request: 1,
        call,
        block_tokens: 16,
        input_tokens: 32,
        hashes: prefix(61, 2).concat(),
        ..Default::default()
    }
}

/// A request that waits for a batch that is not announced.
fn waiting(call: u64, node: u32, epoch: u64) -> pb::RouteRequest {
    pb::RouteRequest { after: vec![pb::AnnouncePosition { node, epoch, seq: 1, shard: 1 }], ..question(call) }
}

/// Client end of a stream.
struct RouteStreamClient {
    questions: mpsc::UnboundedSender<pb::RouteRequest>,
    answers: Streaming<pb::RouteStreamReply>,
}

impl RouteStreamClient {
    async fn with(mut router: RouterClient<RoleChannel>) -> RouteStreamClient {
        let (questions, sent) = mpsc::unbounded_channel();
        let answers = router.route_stream(UnboundedReceiverStream::new(sent)).await.unwrap().into_inner();
        RouteStreamClient { questions, answers }
    }

    fn ask(&self, question: pb::RouteRequest) {
        self.questions.send(question).unwrap();
    }

    /// The next answer, or the end of the stream.
    async fn heard(&mut self) -> Result<Option<(u64, Answer)>, Status> {
        let reply = tokio::time::timeout(HANG, self.answers.message()).await.expect("an answer in time")?;
        Ok(reply.map(|reply| {
            assert_eq!(reply.request, 1);
            (reply.call, reply.answer.expect("an answer has contents"))
        }))
    }

    async fn answer(&mut self) -> (u64, Answer) {
        self.heard().await.unwrap().expect("the stream is open")
    }

    async fn refusal(&mut self) -> (u64, Code, String) {
        match self.answer().await {
            (call, Answer::Refused(refused)) => (call, Code::from_i32(refused.code), refused.message),
            other => panic!("{other:?}"),
        }
    }
}

fn is_decision(answer: &Answer) -> bool {
    let Answer::Reply(reply) = answer else { return false };
    matches!(reply.answer, Some(pb::route_reply::Answer::Decision(_))) && reply.freshness.is_some()
}

fn report() -> pb::ReportRequest {
    pb::ReportRequest { instance: 6, address: "i:6".into(), sequence: 1, started_us: 1, ..Default::default() }
}

/// A router that has caught up; until then a request waits, and a later one may be answered first.
async fn one_router() -> Cluster {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    cluster.client(1).report(report()).await.unwrap();
    cluster.client(1).route(pb::RouteRequest { fresh: true, ..question(0) }).await.unwrap();
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_come_as_ready_with_their_call_number() {
    let cluster = one_router().await;
    let mut node = cluster.node(4).await;
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    talk.ask(waiting(10, 4, node.epoch));
    talk.ask(question(11));
    talk.ask(question(12));
    for call in [11, 12] {
        let (of, answer) = talk.answer().await;
        assert!(of == call && is_decision(&answer), "{of}: {answer:?}");
    }
    node.store(&prefix(61, 1)).await;
    let (of, answer) = talk.answer().await;
    assert!(of == 10 && is_decision(&answer), "{of}: {answer:?}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_request_is_refused_alone() {
    let cluster = one_router().await;
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    let wrong = [
        pb::RouteRequest { hashes: vec![1; 17], ..question(1) },
        // Longer than any prompt, but below the message limit.
        pb::RouteRequest { hashes: vec![1; HASH_BYTES * 65_537], ..question(2) },
        pb::RouteRequest { block_tokens: 0, ..question(3) },
        pb::RouteRequest { input_tokens: u32::MAX, ..question(4) },
        pb::RouteRequest {
            after: vec![pb::AnnouncePosition { shard: 99, ..Default::default() }],
            ..question(5)
        },
    ];
    for wrong in wrong {
        let call = wrong.call;
        let alone = cluster.client(1).route(wrong.clone()).await.unwrap_err();
        talk.ask(wrong);
        talk.ask(question(100 + call));
        let (of, code, message) = talk.refusal().await;
        assert_eq!((of, code, message.as_str()), (call, alone.code(), alone.message()));
        let (of, answer) = talk.answer().await;
        assert!(of == 100 + call && is_decision(&answer), "{of}: {answer:?}");
    }
    // Repeated numbers are allowed: each request is answered under its own.
    (0..5).for_each(|_| talk.ask(question(7)));
    for _ in 0..5 {
        let (of, answer) = talk.answer().await;
        assert!(of == 7 && is_decision(&answer), "{of}: {answer:?}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_message_ends_its_stream_after_earlier_answers() {
    let cluster = one_router().await;
    let mut other = RouteStreamClient::with(cluster.client(1)).await;
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    talk.ask(question(1));
    talk.ask(pb::RouteRequest { hashes: vec![1; 9 << 20], ..question(2) });
    let (of, answer) = talk.answer().await;
    assert!(of == 1 && is_decision(&answer), "{of}: {answer:?}");
    let ended = talk.heard().await.unwrap_err();
    assert_eq!(ended.code(), Code::OutOfRange, "{ended}");
    says("a question above the limit on a stream", &ended.message(), &[]);
    other.ask(question(3));
    assert_eq!(other.answer().await.0, 3);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_flight_are_bounded() {
    let cluster = one_router().await;
    let epoch = cluster.join(4).await;
    let (waiting, last) = (|call| waiting(call, 4, epoch), REQUESTS_MAX);
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    (1..last).for_each(|call| talk.ask(waiting(call)));
    talk.ask(question(last));
    assert_eq!(talk.answer().await.0, last, "the last one that fits is answered at once");
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    (0..last).for_each(|call| talk.ask(waiting(call)));
    talk.ask(question(last));
    assert_ne!(talk.answer().await.0, last, "there is no room before another answer");
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    let asked: BTreeMap<u64, u32> = (0..1_000).map(|call| (call, 1)).collect();
    asked.keys().for_each(|call| talk.ask(question(*call)));
    let mut answered = BTreeMap::new();
    for _ in 0..1_000 {
        *answered.entry(talk.answer().await.0).or_insert(0) += 1;
    }
    assert_eq!(answered, asked);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_router_ends_streams_and_serves_new_ones() {
    let mut cluster = one_router().await;
    let node = cluster.node(4).await;
    let mut talk = RouteStreamClient::with(cluster.client(1)).await;
    // The second answer shows that the first request was read.
    talk.ask(waiting(1, 4, node.epoch));
    talk.ask(question(2));
    assert_eq!(talk.answer().await.0, 2);
    let mut idle = RouteStreamClient::with(cluster.client(1)).await;
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    assert_eq!(handle.hand_over_leadership(Duration::ZERO).await, [] as [u16; 0], "there is no other voter");
    let (of, answer) = talk.answer().await;
    assert!(of == 1 && is_decision(&answer), "{of}: {answer:?}");
    assert_eq!(talk.heard().await.unwrap(), None);
    assert_eq!(idle.heard().await.unwrap(), None);
    let mut late = RouteStreamClient::with(cluster.client(1)).await;
    late.ask(question(3));
    assert_eq!(late.answer().await.0, 3);
    cluster.take(1).shutdown().await;
    assert_eq!(late.heard().await.unwrap(), None, "ended, and not cut off");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_rules_apply_to_each_request_of_a_stream() {
    let cluster = one_router().await;
    let tenant = || cluster.client_as(1, tenants());
    let mut client = RouteStreamClient::with(tenant()).await;
    let of_tenant = |call, tenant| pb::RouteRequest { tenant, ..question(call) };
    client.ask(of_tenant(1, 3));
    client.ask(of_tenant(2, 4));
    client.ask(pb::RouteRequest {
        candidates: Some(pb::CandidateSet { instances: vec![6] }),
        ..of_tenant(3, 3)
    });
    client.ask(of_tenant(4, 5));
    // In order of readiness.
    let mut answers = BTreeMap::new();
    for _ in 0..4 {
        let (call, answer) = client.answer().await;
        answers.insert(call, answer);
    }
    assert!(is_decision(&answers[&1]) && is_decision(&answers[&4]));
    for (call, wrong) in [
        (2, of_tenant(2, 4)),
        (3, pb::RouteRequest { candidates: Some(pb::CandidateSet::default()), ..of_tenant(3, 3) }),
    ] {
        let alone = tenant().route(wrong).await.unwrap_err();
        assert_eq!(alone.code(), Code::PermissionDenied);
        let Answer::Refused(no) = &answers[&call] else { panic!("{answers:?}") };
        assert_eq!((Code::from_i32(no.code), no.message.as_str()), (alone.code(), alone.message()));
    }
    // Fresh reads are limited per second over streams too: more of them than the test's duration
    // allows.
    (10..1_010).for_each(|call| client.ask(pb::RouteRequest { fresh: true, ..of_tenant(call, 3) }));
    let mut refused = 0;
    for _ in 0..1_000 {
        if let (_, Answer::Refused(no)) = client.answer().await {
            assert_eq!(Code::from_i32(no.code), Code::ResourceExhausted, "{}", no.message);
            refused += 1;
        }
    }
    assert!(refused > 0, "there is a limit");
    cluster.shutdown().await;
}
