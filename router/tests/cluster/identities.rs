//! Identity mismatches: the error lists differing fields if both manifests are known, otherwise the
//! digests.
//!
//! Not here: nodes that are asked for their manifest (`cli/tests/command/why.rs`, with real ones).

use kv_core::id::{Generation, IdentityDigest};
use kv_core::prefix::IdentityManifest;
use kvfleet_errors_doc::says;
use kvfleet_proto::{convert, pb};
use kvfleet_router::RouteHints;
use tonic::Code;

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, join_request, prefix};

fn of_dtype(dtype: &str) -> IdentityManifest {
    IdentityManifest { dtype: dtype.to_owned(), ..IdentityManifest::default() }
}

fn join_of(node: u32, manifest: &IdentityManifest) -> pb::JoinRequest {
    let identity = manifest.digest().0.to_vec();
    pb::JoinRequest { identity, manifest: Some(convert::manifest_to_pb(manifest)), ..join_request(node) }
}

/// One router that follows engines of type bf16, and a node with the same identity.
async fn cluster() -> Cluster {
    let cluster = Cluster::start(1, |_| {}).await;
    let joined =
        cluster.on_leader(|mut client| async move { client.join(join_of(1, &of_dtype("bf16"))).await });
    assert!(joined.await.epoch > 0);
    cluster
}

fn request(number: u64, identity: Option<IdentityDigest>) -> pb::RouteRequest {
    pb::RouteRequest {
        request: number,
        hashes: prefix(number, 4).concat(),
        block_tokens: 16,
        input_tokens: 64,
        identity: identity.map(|identity| identity.0.to_vec()).unwrap_or_default(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_node_gets_the_differing_fields() {
    let cluster = cluster().await;
    let (ours, other) = (of_dtype("bf16").digest().to_string(), of_dtype("fp8"));
    let refused = cluster.client(1).join(join_of(2, &other)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let varying = [other.digest().to_string(), ours];
    let varying = varying.each_ref().map(String::as_str);
    says("a node of another identity that tells its manifest", &refused.message(), &varying);
    // A manifest that does not match the identity yields no fields.
    let liar = pb::JoinRequest { identity: vec![9; 16], ..join_of(2, &other) };
    let refused = cluster.client(1).join(liar).await.unwrap_err();
    assert!(!refused.message().contains("it differs in"), "{refused}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_gets_the_fields_of_a_reported_manifest() {
    let cluster = cluster().await;
    let (ours, other) = (of_dtype("bf16").digest().to_string(), of_dtype("fp8"));
    let report = async |sequence, manifest: Option<pb::Manifest>| {
        let report = pb::ReportRequest { manifest, ..load(1, sequence) };
        cluster.client(1).report(report).await.unwrap();
    };
    let refused = async || {
        let foreign = request(1, Some(other.digest().with_generation(Generation(2))));
        let refused = cluster.client(1).route(foreign).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        refused.message().to_owned()
    };
    report(1, None).await;
    assert!(!refused().await.contains(" in dtype"), "no manifest is known");
    report(2, Some(convert::manifest_to_pb(&other))).await;
    let theirs = other.digest().with_generation(Generation(2)).to_string();
    let varying = [theirs, ours];
    let varying = varying.each_ref().map(String::as_str);
    says("a request of another identity that an instance tells of", &refused().await, &varying);
    // An unreadable manifest is ignored, and its report still counts.
    let long = pb::Manifest { rope: "r".repeat(257), ..convert::manifest_to_pb(&other) };
    report(3, Some(long)).await;
    assert!(!refused().await.contains(" in dtype"), "the instance may have changed");
    let status = cluster.status(1).await.unwrap();
    assert_eq!(status.instances.len(), 1, "{status:?}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_hashes_miss_all_blocks_for_that_reason() {
    let cluster = cluster().await;
    cluster.client(1).report(load(1, 1)).await.unwrap();
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    let [bf16, fp8] = ["bf16", "fp8"].map(|dtype| of_dtype(dtype).digest());
    let missing = async |request: pb::RouteRequest, hashed_under: &[IdentityDigest]| {
        let number = request.request;
        let hints = RouteHints { hashed_under: hashed_under.into(), ..RouteHints::default() };
        handle.route_with(request, hints).await.unwrap();
        let record = cluster.client(1).why(pb::WhyRequest { request: number }).await.unwrap().into_inner();
        record
            .missing
            .into_iter()
            .map(|one| (one.start_blocks, one.len_blocks, one.reason))
            .collect::<Vec<_>>()
    };
    let all_for = |reason: &str| vec![(0, 4, reason.to_owned())];
    assert_eq!(missing(request(1, None), &[]).await, all_for("never_seen"), "identity unknown");
    assert_eq!(missing(request(2, None), &[bf16]).await, all_for("never_seen"), "the nodes' identity");
    assert_eq!(missing(request(3, None), &[fp8, bf16]).await, all_for("never_seen"), "an adapter's identity");
    assert_eq!(missing(request(4, None), &[fp8]).await, all_for("identity_differs"));
    let text = pb::RouteRequest { text: true, ..request(5, None) };
    assert_eq!(missing(text, &[fp8]).await, [], "nodes hold no text blocks");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_nodes_no_hash_is_foreign() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    cluster.client(1).report(load(1, 1)).await.unwrap();
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    let hints = RouteHints { hashed_under: [of_dtype("fp8").digest()].into(), ..RouteHints::default() };
    handle.route_with(request(1, None), hints).await.unwrap();
    let record = cluster.client(1).why(pb::WhyRequest { request: 1 }).await.unwrap().into_inner();
    assert_eq!(record.missing[0].reason, "never_seen");
    cluster.shutdown().await;
}
