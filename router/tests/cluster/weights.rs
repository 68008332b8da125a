//! Generations of weights: one call ends what every node announced, and joins say what is in force.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use tonic::Code;

use crate::harness::{Cluster, holders, join_request, prefix, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_ends_what_was_announced_and_nodes_hear_of_it_as_they_join() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(31, 6);
    let seen = node.store(&blocks).await;
    let leader = cluster.leader().await;
    assert_eq!(holders(&cluster.lookup(leader, &blocks, vec![seen]).await), [(0, 6, vec![(1, node.epoch)])]);

    let next = pb::SetGenerationRequest { generation: 1 };
    let done = cluster.on_leader(|mut client| async move { client.set_generation(next).await }).await;
    assert!(done.changed);
    assert_eq!(node.reply().await, Reply::Fenced(pb::Fenced {}), "it need not speak to hear of it");
    for id in cluster.running() {
        until("every router says it", async || {
            let status = cluster.status(id).await?;
            (status.generation == 1 && status.nodes.iter().all(|node| !node.live)).then_some(())
        })
        .await;
        assert_eq!(holders(&cluster.lookup(id, &blocks, vec![]).await), [], "router {id} lists nothing");
    }
    let joined = cluster.on_leader(|mut client| async move { client.join(join_request(1)).await }).await;
    assert_eq!((joined.generation, joined.epoch), (1, node.epoch + 1));

    // Who did not hear the answer may say it again.
    let done = cluster.on_leader(|mut client| async move { client.set_generation(next).await }).await;
    assert!(!done.changed);
    let status = cluster.status(cluster.leader().await).await.unwrap();
    assert!(status.nodes[0].live, "and ends no epoch by it");
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generation_that_does_not_follow_and_a_router_that_does_not_lead_say_so() {
    let cluster = Cluster::start(3, |_| {}).await;
    let leader = cluster.leader().await;
    let wrong = pb::SetGenerationRequest { generation: 2 };
    let refused = cluster.client(leader).set_generation(wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    says("a generation of weights that is ahead of the next", &refused.message(), &[]);
    let follower = cluster.follower().await;
    let next = pb::SetGenerationRequest { generation: 1 };
    let refused = cluster.client(follower).set_generation(next).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.metadata().get("kvfleet-leader").is_some());
    assert_eq!(cluster.status(leader).await.unwrap().generation, 0);
    cluster.shutdown().await;
}
