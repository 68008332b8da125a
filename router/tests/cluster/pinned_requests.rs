//! Requests that run on an instance already: an engine behind the gateway asks for its fetch plan.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use pb::route_reply::Answer;

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, HashBytes, prefix, until};

const BLOCKS: u64 = 8;

fn request(number: u64, hashes: &[HashBytes]) -> pb::RouteRequest {
    let blocks = hashes.len() as u32;
    pb::RouteRequest {
        request: number,
        hashes: hashes.concat(),
        block_tokens: 16,
        input_tokens: 16 * blocks,
        ..Default::default()
    }
}

fn runs_at(instance: u32, request: pb::RouteRequest) -> pb::RouteRequest {
    let among = Some(pb::CandidateSet { instances: vec![instance] });
    pb::RouteRequest { candidates: among, pinned_instance: true, ..request }
}

async fn asked(cluster: &Cluster, request: pb::RouteRequest) -> Answer {
    cluster.client(1).route(request).await.unwrap().into_inner().answer.unwrap()
}

async fn decided(cluster: &Cluster, request: pb::RouteRequest) -> pb::Decision {
    match asked(cluster, request).await {
        Answer::Decision(decision) => decision,
        Answer::Rejected(rejected) => panic!("{rejected:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_request_gets_a_fetch_plan() {
    let cluster = Cluster::start(1, |config| config.admission.ttft_max_ms = 1).await;
    cluster.leader().await;
    let mut node = cluster.node(1).await;
    let held = prefix(3, BLOCKS);
    node.store(&held[..6]).await;
    let full = pb::ReportRequest { node: 1, has_node: true, queue_tokens: u64::MAX, ..load(1, 1) };
    cluster.client(1).report(full).await.unwrap();
    until("the blocks to be known", || async {
        let request = pb::LookupRequest { hashes: held.concat(), ..Default::default() };
        let reply = cluster.client(1).lookup(request).await.unwrap().into_inner();
        (!reply.runs.is_empty()).then_some(())
    })
    .await;
    let turned_away = asked(&cluster, request(1, &held)).await;
    assert!(matches!(turned_away, Answer::Rejected(_)), "its queue is full");
    let decision = decided(&cluster, runs_at(1, request(2, &held))).await;
    assert_eq!((decision.instance, decision.fetch_blocks, decision.recompute_blocks), (1, 6, 2));
    assert_eq!((decision.sources[0].node, decision.save_to.unwrap().node), (1, 1));
    let idle = pb::ReportRequest { node: 1, has_node: true, ..load(1, 2) };
    cluster.client(1).report(idle).await.unwrap();
    let late = asked(&cluster, request(3, &held)).await;
    assert!(matches!(late, Answer::Rejected(_)), "its TTFT limit cannot be met");
    decided(&cluster, runs_at(1, request(3, &held))).await;
    let nowhere = pb::RouteRequest { candidates: None, ..runs_at(1, request(9, &held)) };
    let refused = cluster.client(1).route(nowhere).await.unwrap_err();
    says("a request that runs nowhere in particular", &refused.message(), &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_request_is_counted_once() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    cluster.client(1).report(load(1, 1)).await.unwrap();
    // Seconds of prefill each: an instance works longer than the test.
    let long = |number| request(number, &prefix(number, 4_096));
    let waits = async |request| decided(&cluster, request).await.predicted.unwrap().queue_us;
    for number in 1..4 {
        assert_eq!(waits(runs_at(1, long(number))).await, 0);
    }
    assert_eq!(waits(long(4)).await, 0);
    assert!(waits(runs_at(1, long(5))).await > 0, "behind the request that was sent");
}

/// On an instance that reports residency, a sent prompt counts as in flight for other requests, but
/// not for its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_does_not_count_on_its_own_prefix() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    let mut node = cluster.node(1).await;
    let held = prefix(3, 64);
    node.store(&held).await;
    let near = pb::ReportRequest { node: 1, has_node: true, ..load(1, 1) };
    cluster.client(1).report(near).await.unwrap();
    let tells = pb::ResidencyRequest { instance: 1, epoch: load(1, 1).started_us, ..Default::default() };
    cluster.client(1).report_residency(tells).await.unwrap();
    let sent = until("the blocks to be known", || async {
        let decision = decided(&cluster, request(7, &held)).await;
        (decision.fetch_blocks == 64).then_some(decision)
    })
    .await;
    let again = pb::RouteRequest { prior_instance: true, ..runs_at(sent.instance, request(7, &held)) };
    let plan = decided(&cluster, again).await;
    assert_eq!((plan.resident_blocks, plan.fetch_blocks), (0, 64));
    assert_eq!(plan.sources, sent.sources);
    let other = decided(&cluster, request(8, &held)).await;
    assert_eq!(other.resident_blocks, 64, "in flight for other requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_senders_router_has_the_decision_record() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    for instance in [1, 2] {
        cluster.client(1).report(load(instance, 1)).await.unwrap();
    }
    let blocks = prefix(3, BLOCKS);
    let sent = decided(&cluster, request(5, &blocks)).await;
    let record =
        async |request| cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    let first = record(5).await;
    let again = pb::RouteRequest { prior_instance: true, ..runs_at(sent.instance, request(5, &blocks)) };
    decided(&cluster, again).await;
    assert_eq!(record(5).await.reasons, first.reasons, "the original decision");
    // A request that was sent another way has no other record.
    assert!(!record(6).await.known);
    decided(&cluster, runs_at(1, request(6, &blocks))).await;
    assert!(record(6).await.known);
}
