//! Limits on the time between tokens: choice of the instance, rejection, and decode admission.

use std::time::Duration;

use kv_core::id::InstanceId;
use kvfleet_proto::pb;

use crate::residency::load;
use kvfleet_testkit::cluster::Cluster;

/// The limit in these tests: an engine with two hundred requests takes 20 ms per token, one without
/// load 8 ms.
const LIMIT_US: u64 = 15_000;

async fn cluster(tbt_max_us: u64) -> Cluster {
    let cluster = Cluster::start(1, |config| {
        config.profile = "h100-8b".into();
        config.admission.tbt_max_us = tbt_max_us;
    })
    .await;
    cluster.leader().await;
    cluster.client(1).report(pb::ReportRequest { running: 200, ..load(1, 1) }).await.unwrap();
    let full =
        pb::ReportRequest { queue_tokens: 2_000, kv_tokens_max: 10_000, kv_tokens: 10_000, ..load(2, 1) };
    cluster.client(1).report(full).await.unwrap();
    cluster
}

async fn route(cluster: &Cluster, request: u64, tbt_max_us: u64, among: &[u32]) -> pb::RouteReply {
    let among = (!among.is_empty()).then(|| pb::CandidateSet { instances: among.to_vec() });
    let (block_tokens, input_tokens) = (16, 160);
    let request = pb::RouteRequest {
        request,
        block_tokens,
        input_tokens,
        tbt_max_us,
        candidates: among,
        ..Default::default()
    };
    cluster.client(1).route(request).await.unwrap().into_inner()
}

fn decision(reply: pb::RouteReply) -> pb::Decision {
    match reply.answer {
        Some(pb::route_reply::Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

async fn why(cluster: &Cluster, request: u64) -> pb::WhyReply {
    cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tbt_limit_selects_an_instance_or_rejects() {
    let cluster = cluster(0).await;
    let kept = decision(route(&cluster, 1, LIMIT_US, &[]).await);
    let predicted = kept.predicted.unwrap();
    assert_eq!(kept.instance, 2);
    assert!(predicted.tbt_us < LIMIT_US && predicted.kv_wait_us > 0, "{predicted:?}");
    assert!(predicted.queue_us >= predicted.kv_wait_us, "it is part of the queue");
    let slow = decision(route(&cluster, 2, 0, &[1]).await).predicted.unwrap();
    assert!(slow.tbt_us > 20_000 && slow.kv_wait_us == 0, "{slow:?}");
    let reply = route(&cluster, 3, LIMIT_US, &[1]).await;
    let Some(pb::route_reply::Answer::Rejected(rejected)) = reply.answer else { panic!("{reply:?}") };
    assert!(!rejected.no_instance && rejected.retry_after_ms > 0, "{rejected:?}");
    assert!(why(&cluster, 3).await.rejected.contains("its limit is 15000 us"));

    // It ends, and its measured values are shown beside the predicted ones, once.
    for (sequence, tbt_us) in [(2, 9_000), (3, 1)] {
        let outcomes = vec![pb::Outcome { request: 1, output_tokens: 70, tbt_us, ..Default::default() }];
        cluster.client(1).report(pb::ReportRequest { outcomes, ..load(2, sequence) }).await.unwrap();
        let told = why(&cluster, 1).await;
        assert_eq!((told.tbt_us, told.output_tokens, told.predicted), (9_000, 70, Some(predicted)));
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_counts_once_from_gateway_or_instance() {
    let cluster = cluster(0).await;
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    let outcome =
        |request, output_tokens, tbt_us| pb::Outcome { request, output_tokens, tbt_us, ..Default::default() };
    let tell = async |sequence, outcomes| {
        let report = pb::ReportRequest { outcomes, ..load(1, sequence) };
        cluster.client(1).report(report).await.unwrap();
    };
    let told = async |request| {
        let told = why(&cluster, request).await;
        (told.output_tokens, told.tbt_us)
    };
    let sent = async |request| assert_eq!(decision(route(&cluster, request, 0, &[1]).await).instance, 1);
    assert_eq!(expected_output_tokens(&cluster, 100).await, 256);
    for request in 1..41 {
        tell(1 + request, vec![]).await;
        sent(request).await;
        handle.record_end(request, InstanceId(2), 7, None);
        assert_eq!(told(request).await, (0, 0), "it was not sent there");
        handle.record_end(request, InstanceId(1), 20, Some(Duration::from_millis(9)));
        assert_eq!(told(request).await, (20, 9_000));
    }
    let after = expected_output_tokens(&cluster, 200).await;
    assert!((20..35).contains(&after), "{after} tokens");
    // A repeated report of the same end teaches no change, from either source.
    tell(50, (1..41).map(|request| outcome(request, 2_000, 1)).collect()).await;
    assert_eq!(told(40).await, (20, 9_000));
    let again = expected_output_tokens(&cluster, 300).await;
    assert!(again.abs_diff(after) <= 2, "{after} tokens became {again}");
    sent(41).await;
    tell(51, vec![outcome(41, 30, 0)]).await;
    handle.record_end(41, InstanceId(1), 31, Some(Duration::from_millis(8)));
    assert_eq!(told(41).await, (30, 8_000), "the time between tokens was still unknown");
    // An aborted request has an unrepresentative length, while its time between tokens is valid.
    for request in 42..82 {
        tell(10 + request, vec![]).await;
        sent(request).await;
        handle.record_abort(request);
    }
    tell(100, (42..82).map(|request| outcome(request, 2_000, 7_000)).collect()).await;
    assert_eq!(told(42).await, (0, 7_000));
    let left = expected_output_tokens(&cluster, 400).await;
    assert!(left.abs_diff(after) <= 2, "{after} tokens became {left}");
    // One absurd report is one of many.
    sent(90).await;
    handle.record_end(90, InstanceId(1), u32::MAX, Some(Duration::MAX));
    let wild = expected_output_tokens(&cluster, 500).await;
    assert!(wild < 256, "{wild} tokens");
    cluster.shutdown().await;
}

/// Output length that the router expects of a request: derived from its longer wait for room
/// compared to a request of one token.
async fn expected_output_tokens(cluster: &Cluster, first: u64) -> u64 {
    let input_tokens = 16;
    let room_us = async |nth: u64, output_tokens| {
        let full = pb::ReportRequest { kv_tokens_max: 10_000, kv_tokens: 10_000, ..load(2, first + nth) };
        cluster.client(1).report(full).await.unwrap();
        let (request, among) = (first + nth, Some(pb::CandidateSet { instances: vec![2] }));
        let asked = pb::RouteRequest {
            request,
            block_tokens: 16,
            input_tokens,
            output_tokens,
            candidates: among,
            ..Default::default()
        };
        let reply = cluster.client(1).route(asked).await.unwrap().into_inner();
        decision(reply).predicted.unwrap().kv_wait_us as f64
    };
    let [one, all] = [room_us(0, 1).await, room_us(1, 0).await];
    ((f64::from(input_tokens) + 1.0) * all / one - f64::from(input_tokens)).round() as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_admission_keeps_the_tbt_limit() {
    let cluster = cluster(LIMIT_US).await;
    let ask = async |request, instance, tbt_max_us| {
        let asked = pb::AdmitDecodeRequest { request, instance, tbt_max_us };
        cluster.client(1).admit_decode(asked).await.unwrap().into_inner()
    };
    for (request, tbt_max_us) in [(5, 9_000), (1, 0)] {
        assert_eq!(decision(route(&cluster, request, tbt_max_us, &[]).await).instance, 2);
    }
    let begins = ask(1, 2, 0).await;
    assert!(begins.admitted && (8_000..LIMIT_US).contains(&begins.tbt_us), "{begins:?}");
    assert!(ask(1, 1, 0).await.admitted, "it was not sent there");
    assert!(ask(7, 1, 0).await.admitted, "unknown request");
    assert_eq!(
        ask(1, 99, 0).await,
        pb::AdmitDecodeReply { admitted: true, ..Default::default() },
        "unknown instance"
    );
    let ends = ask(7, 1, LIMIT_US).await;
    assert!(
        !ends.admitted && ends.tbt_us > LIMIT_US && ends.retry_after_ms > 0,
        "with an explicit limit: {ends:?}"
    );
    // The limit of the decision precedes the router's own, which applies if the request named none.
    cluster.client(1).report(pb::ReportRequest { running: 200, ..load(2, 2) }).await.unwrap();
    for (request, limit_us) in [(1, LIMIT_US), (5, 9_000)] {
        let ends = ask(request, 2, 0).await;
        assert!(!ends.admitted && ends.reason.contains(&format!("its limit is {limit_us} us")), "{ends:?}");
        assert!(ask(request, 2, 30_000).await.admitted, "with its own limit");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absurd_decode_reports_are_bounded() {
    let cluster = cluster(0).await;
    let most = pb::ReportRequest {
        running: u32::MAX,
        kv_tokens_max: u64::MAX,
        kv_tokens: u64::MAX,
        tbt_us: u32::MAX,
        chunk_tokens: u32::MAX,
        ..load(2, 2)
    };
    cluster.client(1).report(most).await.unwrap();
    let outcomes =
        vec![pb::Outcome { request: 1, output_tokens: u32::MAX, tbt_us: u64::MAX, ..Default::default() }];
    decision(route(&cluster, 1, u64::MAX, &[1]).await);
    let full = pb::ReportRequest { kv_tokens_max: 10_000, kv_tokens: 10_000, outcomes, ..load(1, 2) };
    cluster.client(1).report(full).await.unwrap();
    let told = why(&cluster, 1).await;
    assert_eq!((told.output_tokens, told.tbt_us), (u32::MAX, u64::MAX), "it was recorded");
    let next = decision(route(&cluster, 2, LIMIT_US, &[1]).await).predicted.unwrap();
    assert!(next.tbt_us < LIMIT_US, "one absurd outcome has a small effect: {next:?}");
    assert!(next.kv_wait_us > 0 && next.queue_us < 10_000_000, "and does not delay other requests: {next:?}");
    cluster.shutdown().await;
}
