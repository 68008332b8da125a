//! Requests that run elsewhere than they were sent: their counted load moves along.

use std::time::Duration;

use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use kvfleet_router::{RouteHints, RouterHandle};

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, prefix, until};

/// Blocks of a prompt with seconds of prefill.
const BLOCKS: u64 = 4_096;

async fn cluster() -> (Cluster, RouterHandle) {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    for instance in 1..=3 {
        let bare = pb::ReportRequest { cannot_fetch: true, ..load(instance, 1) };
        cluster.client(1).report(bare).await.unwrap();
    }
    (cluster, handle)
}

/// A request that was read as text, with its own prompt.
fn request(number: u64, among: &[u32]) -> pb::RouteRequest {
    pb::RouteRequest {
        request: number,
        hashes: prefix(number, BLOCKS).concat(),
        block_tokens: 16,
        input_tokens: 16 * BLOCKS as u32,
        text: true,
        candidates: Some(pb::CandidateSet { instances: among.to_vec() }),
        ..Default::default()
    }
}

async fn decided(handle: &RouterHandle, request: pb::RouteRequest, hints: RouteHints) -> pb::Decision {
    match handle.route_with(request, hints).await.unwrap().answer {
        Some(pb::route_reply::Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

/// Instances with a queue; the probe itself is not counted.
async fn busy(handle: &RouterHandle) -> Vec<u32> {
    let mut busy = vec![];
    for instance in 1..=3 {
        let asked =
            pb::RouteRequest { pinned_instance: true, prior_instance: true, ..request(99, &[instance]) };
        let decision = decided(handle, asked, RouteHints::default()).await;
        busy.extend((decision.predicted.unwrap().queue_us > 0).then_some(instance));
    }
    busy
}

/// Blocks of a prompt that an instance is assumed to have.
async fn expected_blocks(handle: &RouterHandle, asked: &pb::RouteRequest, instance: u32) -> u32 {
    let among = Some(pb::CandidateSet { instances: vec![instance] });
    let there =
        pb::RouteRequest { pinned_instance: true, prior_instance: true, candidates: among, ..asked.clone() };
    decided(handle, there, RouteHints::default()).await.resident_blocks
}

async fn why(cluster: &Cluster, request: u64) -> pb::WhyReply {
    cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counted_load_moves_with_its_request() {
    let (cluster, handle) = cluster().await;
    let asked = request(7, &[1]);
    assert_eq!(decided(&handle, asked.clone(), RouteHints::default()).await.instance, 1);
    assert_eq!(busy(&handle).await, [1]);
    // Invalid, unknown or repeated moves have no effect.
    handle.record_move(&request(9, &[1]), InstanceId(2), None);
    handle.record_move(&asked, InstanceId(1), None);
    handle.record_move(&pb::RouteRequest { hashes: vec![1], ..asked.clone() }, InstanceId(2), None);
    assert_eq!(busy(&handle).await, [1]);
    assert_eq!(why(&cluster, 7).await.answered_by, None);

    handle.record_move(&asked, InstanceId(2), None);
    assert_eq!(busy(&handle).await, [2]);
    let record = why(&cluster, 7).await;
    assert_eq!((record.instance, record.answered_by), (1, Some(2)));
    // The new instance reports the outcome; its time to first token teaches no correction.
    let learned = cluster.registries[0].gather();
    handle.record_first_token(7, InstanceId(1), Duration::from_secs(9));
    handle.record_first_token(7, InstanceId(2), Duration::from_secs(9));
    handle.record_end(7, InstanceId(1), 5, None);
    assert_eq!(why(&cluster, 7).await.output_tokens, 0);
    handle.record_end(7, InstanceId(2), 6, None);
    assert_eq!(why(&cluster, 7).await.output_tokens, 6);
    let observed = |families: &[prometheus::proto::MetricFamily]| {
        let error = families.iter().find(|family| family.name() == "kvfleet_ttft_prediction_error");
        error.map(|error| error.get_metric()[0].get_histogram().get_sample_count())
    };
    assert_eq!(observed(&cluster.registries[0].gather()), observed(&learned));
    // After its end it does not move.
    handle.record_move(&asked, InstanceId(3), None);
    assert_eq!(why(&cluster, 7).await.answered_by, Some(2));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_is_expected_where_it_was_computed() {
    let (cluster, handle) = cluster().await;
    let short = pb::RouteRequest { hashes: prefix(5, 64).concat(), input_tokens: 1_024, ..request(5, &[1]) };
    decided(&handle, short.clone(), RouteHints::default()).await;
    handle.record_move(&short, InstanceId(2), None);
    until("its prompt", || async { (expected_blocks(&handle, &short, 2).await == 64).then_some(()) }).await;
    assert_eq!(expected_blocks(&handle, &short, 1).await, 0);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rerouted_request_is_counted_once() {
    let (cluster, handle) = cluster().await;
    let all = [1, 2, 3];
    let first = decided(&handle, request(7, &all), RouteHints::default()).await.instance;
    let again = RouteHints { is_retry: true, ..RouteHints::default() };
    let without = pb::RouteRequest { excluded: vec![first], ..request(7, &all) };
    let second = decided(&handle, without.clone(), again.clone()).await.instance;
    assert_ne!(first, second);
    assert_eq!(busy(&handle).await, [second]);
    // If no instance takes it, it is counted nowhere.
    let none = pb::RouteRequest { excluded: all.to_vec(), ..without };
    let answer = handle.route_with(none, again).await.unwrap().answer;
    assert!(matches!(answer, Some(pb::route_reply::Answer::Rejected(_))), "{answer:?}");
    assert_eq!(busy(&handle).await, Vec::<u32>::new());
    // A move to an unknown instance removes the counted load and is still recorded.
    decided(&handle, request(9, &[3]), RouteHints::default()).await;
    handle.record_move(&request(9, &[3]), InstanceId(77), Some(InstanceId(78)));
    assert_eq!(busy(&handle).await, Vec::<u32>::new());
    assert_eq!(why(&cluster, 9).await.answered_by, Some(78), "the decoding instance");
    cluster.shutdown().await;
}
