//! Requests that run somewhere already: an engine behind a door asks how their KV gets there.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use pb::route_reply::Answer;

use crate::harness::{Cluster, prefix, until};
use crate::residency::load;

const BLOCKS: u64 = 8;

fn request(number: u64, hashes: &[[u8; 16]]) -> pb::RouteRequest {
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
    let among = Some(pb::Among { instances: vec![instance] });
    pb::RouteRequest { among, runs_there: true, ..request }
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
async fn who_runs_somewhere_is_told_how_its_kv_gets_there() {
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
    assert!(matches!(late, Answer::Rejected(_)), "its first token would come too late");
    decided(&cluster, runs_at(1, request(3, &held))).await;
    let nowhere = pb::RouteRequest { among: None, ..runs_at(1, request(9, &held)) };
    let refused = cluster.client(1).route(nowhere).await.unwrap_err();
    says("a request that runs nowhere in particular", &refused.message(), &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_runs_somewhere_counts_where_it_was_sent() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    cluster.client(1).report(load(1, 1)).await.unwrap();
    // Seconds of prefill each: an instance goes on while the test does.
    let long = |number| request(number, &prefix(number, 4_096));
    let waits = async |request| decided(&cluster, request).await.predicted.unwrap().queue_us;
    for number in 1..4 {
        assert_eq!(waits(runs_at(1, long(number))).await, 0);
    }
    assert_eq!(waits(long(4)).await, 0);
    assert!(waits(runs_at(1, long(5))).await > 0, "behind the one that was sent");
}

/// Where an instance tells what it has in GPU memory, what it was sent counts as what it will have: for others, and not for the one that was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_request_brings_itself_is_not_there_for_it() {
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
    let again = pb::RouteRequest { sent_there: true, ..runs_at(sent.instance, request(7, &held)) };
    let plan = decided(&cluster, again).await;
    assert_eq!((plan.resident_blocks, plan.fetch_blocks), (0, 64));
    assert_eq!(plan.sources, sent.sources);
    let other = decided(&cluster, request(8, &held)).await;
    assert_eq!(other.resident_blocks, 64, "for others they come");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_story_of_a_request_is_with_who_sent_it() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    for instance in [1, 2] {
        cluster.client(1).report(load(instance, 1)).await.unwrap();
    }
    let blocks = prefix(3, BLOCKS);
    let sent = decided(&cluster, request(5, &blocks)).await;
    let story = async |request| cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    let first = story(5).await;
    let again = pb::RouteRequest { sent_there: true, ..runs_at(sent.instance, request(5, &blocks)) };
    decided(&cluster, again).await;
    assert_eq!(story(5).await.reasons, first.reasons, "as it was chosen");
    // Nobody else tells of one that came by another way.
    assert!(!story(6).await.known);
    decided(&cluster, runs_at(1, request(6, &blocks))).await;
    assert!(story(6).await.known);
}
