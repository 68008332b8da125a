//! Requests that run elsewhere than they were sent: what the router counts of them goes along.

use std::time::Duration;

use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use kvfleet_router::{Besides, Desk};

use crate::harness::{Cluster, prefix, until};
use crate::residency::load;

/// Blocks of a prompt that takes seconds to compute.
const BLOCKS: u64 = 4_096;

async fn cluster() -> (Cluster, Desk) {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    let desk = cluster.routers[0].as_ref().unwrap().desk();
    for instance in 1..=3 {
        let bare = pb::ReportRequest { fetches_nothing: true, ..load(instance, 1) };
        cluster.client(1).report(bare).await.unwrap();
    }
    (cluster, desk)
}

/// A request that was read as text, with a prompt of its own.
fn request(number: u64, among: &[u32]) -> pb::RouteRequest {
    pb::RouteRequest {
        request: number,
        hashes: prefix(number, BLOCKS).concat(),
        block_tokens: 16,
        input_tokens: 16 * BLOCKS as u32,
        text: true,
        among: Some(pb::Among { instances: among.to_vec() }),
        ..Default::default()
    }
}

async fn decided(desk: &Desk, request: pb::RouteRequest, besides: Besides) -> pb::Decision {
    match desk.route_with(request, besides).await.unwrap().answer {
        Some(pb::route_reply::Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

/// Instances where a request would wait now; it is counted nowhere.
async fn busy(desk: &Desk) -> Vec<u32> {
    let mut busy = vec![];
    for instance in 1..=3 {
        let asked = pb::RouteRequest { runs_there: true, sent_there: true, ..request(99, &[instance]) };
        let decision = decided(desk, asked, Besides::default()).await;
        busy.extend((decision.predicted.unwrap().queue_us > 0).then_some(instance));
    }
    busy
}

/// Blocks of a prompt that an instance is taken to have.
async fn had(desk: &Desk, asked: &pb::RouteRequest, instance: u32) -> u32 {
    let among = Some(pb::Among { instances: vec![instance] });
    let there = pb::RouteRequest { runs_there: true, sent_there: true, among, ..asked.clone() };
    decided(desk, there, Besides::default()).await.resident_blocks
}

async fn why(cluster: &Cluster, request: u64) -> pb::WhyReply {
    cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_counted_of_a_request_is_where_it_runs() {
    let (cluster, desk) = cluster().await;
    let asked = request(7, &[1]);
    assert_eq!(decided(&desk, asked.clone(), Besides::default()).await.instance, 1);
    assert_eq!(busy(&desk).await, [1]);
    // What makes no sense, is not known or is no news changes nothing.
    let to = |instance| (InstanceId(instance), None);
    desk.moved(&request(9, &[1]), to(2));
    desk.moved(&asked, to(1));
    desk.moved(&pb::RouteRequest { hashes: vec![1], ..asked.clone() }, to(2));
    assert_eq!(busy(&desk).await, [1]);
    assert_eq!(why(&cluster, 7).await.answered_by, None);

    desk.moved(&asked, to(2));
    assert_eq!(busy(&desk).await, [2]);
    let story = why(&cluster, 7).await;
    assert_eq!((story.instance, story.answered_by), (1, Some(2)));
    // Who runs it tells what became of it; the time until its first token teaches nothing.
    let learnt = cluster.registries[0].gather();
    desk.first_token(7, InstanceId(1), Duration::from_secs(9));
    desk.first_token(7, InstanceId(2), Duration::from_secs(9));
    desk.ended(7, InstanceId(1), 5, None);
    assert_eq!(why(&cluster, 7).await.output_tokens, 0);
    desk.ended(7, InstanceId(2), 6, None);
    assert_eq!(why(&cluster, 7).await.output_tokens, 6);
    let observed = |families: &[prometheus::proto::MetricFamily]| {
        let error = families.iter().find(|family| family.name() == "kvfleet_ttft_prediction_error");
        error.map(|error| error.get_metric()[0].get_histogram().get_sample_count())
    };
    assert_eq!(observed(&cluster.registries[0].gather()), observed(&learnt));
    // It is over, and stays what it is.
    desk.moved(&asked, to(3));
    assert_eq!(why(&cluster, 7).await.answered_by, Some(2));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_where_it_was_computed_and_not_where_it_was_sent() {
    let (cluster, desk) = cluster().await;
    let short = pb::RouteRequest { hashes: prefix(5, 64).concat(), input_tokens: 1_024, ..request(5, &[1]) };
    decided(&desk, short.clone(), Besides::default()).await;
    desk.moved(&short, (InstanceId(2), None));
    until("its prompt", || async { (had(&desk, &short, 2).await == 64).then_some(()) }).await;
    assert_eq!(had(&desk, &short, 1).await, 0);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_decided_anew_is_counted_once() {
    let (cluster, desk) = cluster().await;
    let all = [1, 2, 3];
    let first = decided(&desk, request(7, &all), Besides::default()).await.instance;
    let again = Besides { again: true, ..Besides::default() };
    let without = pb::RouteRequest { without: vec![first], ..request(7, &all) };
    let second = decided(&desk, without.clone(), again.clone()).await.instance;
    assert_ne!(first, second);
    assert_eq!(busy(&desk).await, [second]);
    // Where nobody takes it, it is counted nowhere.
    let none = pb::RouteRequest { without: all.to_vec(), ..without };
    let answer = desk.route_with(none, again).await.unwrap().answer;
    assert!(matches!(answer, Some(pb::route_reply::Answer::Rejected(_))), "{answer:?}");
    assert_eq!(busy(&desk).await, Vec::<u32>::new());
    // To one that this router does not know: it is taken back, and told of.
    decided(&desk, request(9, &[3]), Besides::default()).await;
    desk.moved(&request(9, &[3]), (InstanceId(77), Some(InstanceId(78))));
    assert_eq!(busy(&desk).await, Vec::<u32>::new());
    assert_eq!(why(&cluster, 9).await.answered_by, Some(78), "who goes on says its tokens");
    cluster.shutdown().await;
}
