//! Generations of weights: one call ends every node's epoch, and joins return the current
//! generation.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use tonic::Code;

use kvfleet_testkit::cluster::{Cluster, holders, join_request, prefix, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_generation_ends_all_epochs() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(31, 6);
    let seen = node.store(&blocks).await;
    let leader = cluster.leader().await;
    assert_eq!(holders(&cluster.lookup(leader, &blocks, vec![seen]).await), [(0, 6, vec![(1, node.epoch)])]);

    let next = pb::SetGenerationRequest { generation: 1 };
    let done = cluster.on_leader(|mut client| async move { client.set_generation(next).await }).await;
    assert!(done.changed);
    assert_eq!(node.reply().await, Reply::Fenced(pb::Fenced {}), "it is told without sending a message");
    for id in cluster.running() {
        until("every router says it", async || {
            let status = cluster.status(id).await?;
            (status.generation == 1 && status.nodes.iter().all(|node| !node.live)).then_some(())
        })
        .await;
        assert_eq!(holders(&cluster.lookup(id, &blocks, vec![]).await), [], "router {id} lists no block");
    }
    let joined = cluster.on_leader(|mut client| async move { client.join(join_request(1)).await }).await;
    assert_eq!((joined.generation, joined.epoch), (1, node.epoch + 1));

    // A caller that missed the answer may repeat the call.
    let done = cluster.on_leader(|mut client| async move { client.set_generation(next).await }).await;
    assert!(!done.changed);
    let status = cluster.status(cluster.leader().await).await.unwrap();
    assert!(status.nodes[0].live, "without ending an epoch");
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_generation_and_a_follower_give_errors() {
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
