//! Reasons of missing blocks: each one, as a router shows it for a decision.

use std::cell::Cell;
use std::collections::BTreeMap;

use kv_core::schedule::MissReason;
use kvfleet_proto::pb;
use prometheus::Registry;

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, FakeNode, HashBytes, prefix, until};

const BLOCKS: u64 = 8;

/// Routes a request of these blocks to one eligible instance.
async fn route(cluster: &Cluster, request: u64, hashes: &[HashBytes], instance: u32) {
    let blocks = hashes.len() as u32;
    let request = pb::RouteRequest {
        request,
        hashes: hashes.concat(),
        block_tokens: 16,
        input_tokens: 16 * blocks,
        candidates: Some(pb::CandidateSet { instances: vec![instance] }),
        ..Default::default()
    };
    let reply = cluster.client(1).route(request).await.unwrap().into_inner();
    assert!(matches!(reply.answer, Some(pb::route_reply::Answer::Decision(_))), "{reply:?}");
}

async fn why(cluster: &Cluster, request: u64) -> pb::WhyReply {
    cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner()
}

fn told(reply: &pb::WhyReply) -> Vec<(u32, u32, &str)> {
    reply.missing.iter().map(|one| (one.start_blocks, one.len_blocks, one.reason.as_str())).collect()
}

/// Missing blocks by reason, from the router's metrics.
fn counted(registry: &Registry) -> BTreeMap<String, u64> {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "kvfleet_missing_blocks_total");
    let metrics = family.into_iter().flat_map(|family| family.get_metric());
    metrics
        .map(|metric| {
            let [reason] = metric.get_label() else { panic!("{metric:?}") };
            (reason.value().to_owned(), metric.get_counter().get_value() as u64)
        })
        .collect()
}

async fn applied(node: &mut FakeNode, change: pb::change::Change) {
    let seq = node.seq;
    node.seq += 1;
    node.send(seq, vec![pb::Change { change: Some(change) }]).await;
    node.reply().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_reason_for_missing_blocks_is_shown() {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    let registry = &cluster.registries[0];
    // Blocks of a departed node are swept in steps: these give the sweep more work.
    let mut other = cluster.node(2).await;
    for seed in 0..3 {
        other.store(&prefix(800 + seed, 12_000)).await;
    }
    let mut node = cluster.node(1).await;
    let sequence = Cell::new(0);
    let report = async |outcomes: Vec<pb::Outcome>, links: Vec<pb::LinkSample>| {
        sequence.set(sequence.get() + 1);
        let sequence = sequence.get();
        let near = pb::ReportRequest { outcomes, links, node: 1, has_node: true, ..load(1, sequence) };
        cluster.client(1).report(near).await.unwrap();
        let bare = pb::ReportRequest { cannot_fetch: true, ..load(2, sequence) };
        cluster.client(1).report(bare).await.unwrap();
    };
    report(vec![], vec![]).await;
    let mut seen = Vec::new();
    let next = Cell::new(1_000);
    let fresh = || {
        next.set(next.get() + 1);
        next.get()
    };

    // Unknown blocks; and held blocks that the instance cannot fetch.
    let unknown = prefix(700, BLOCKS);
    route(&cluster, 1, &unknown, 1).await;
    assert_eq!(told(&why(&cluster, 1).await), [(0, 8, "never_seen")]);
    seen.push("never_seen");
    let held = prefix(701, BLOCKS);
    node.store(&held[..6]).await;
    route(&cluster, 2, &held, 2).await;
    assert_eq!(told(&why(&cluster, 2).await), [(0, 6, "fetches_nothing"), (6, 2, "never_seen")]);
    seen.push("fetches_nothing");

    // Dropped, for each cause.
    for (cause, name) in (0..).zip(["evicted_room", "evicted_quota", "evicted_ttl", "evicted_failed"]) {
        let blocks = prefix(710 + u64::from(cause), BLOCKS);
        node.store(&blocks[..6]).await;
        let gone = pb::Dropped { blocks: blocks[2..6].concat(), tier: 1, cause };
        applied(&mut node, pb::change::Change::Dropped(gone)).await;
        let request = fresh();
        route(&cluster, request, &blocks, 1).await;
        let reply = why(&cluster, request).await;
        assert_eq!(told(&reply), [(2, 4, name), (6, 2, "never_seen")]);
        assert!(reply.missing[0].text.starts_with("node-1 dropped"), "{reply:?}");
        seen.push(name);
    }

    // Promised but not delivered, for each reported reason.
    let promised = [
        "not_held",
        "stale_epoch",
        "identity_differs",
        "corrupt",
        "too_late",
        "unreachable",
        "busy",
        "medium_failed",
        "generation_differs",
    ];
    for (reason, name) in (1..).zip(promised) {
        let request = fresh();
        route(&cluster, request, &held, 1).await;
        assert_eq!(why(&cluster, request).await.fetch_blocks, 6);
        let miss = pb::SourceMiss { node: 1, start_blocks: 4, reason };
        let outcome =
            pb::Outcome { request, hit_blocks: 4, ttft_us: 1_000, misses: vec![miss], ..Default::default() };
        report(vec![outcome], vec![]).await;
        let reply = why(&cluster, request).await;
        assert_eq!(told(&reply), [(4, 2, name), (6, 2, "never_seen")]);
        assert_eq!((reply.has_outcome, reply.hit_blocks, reply.ttft_us), (true, 4, 1_000));
        seen.push(name);
    }

    // Each reason is counted with its blocks. Of fourteen requests the last two blocks were
    // unknown, and of the first all.
    let of = |name: &&str| match *name {
        "never_seen" => 8 + 2 * 14,
        "fetches_nothing" => 6,
        name if promised.contains(&name) => 2,
        _ => 4,
    };
    let expected: BTreeMap<_, _> = seen.iter().map(|name| ((*name).to_owned(), of(name))).collect();
    assert_eq!(counted(registry), expected);

    // Held, but over a link so slow that recomputing is faster.
    let slow = |path| pb::LinkSample {
        node: 1,
        epoch: node.epoch,
        fetches: 50,
        latency_us: 500_000_000,
        bytes: 1_000,
        stream_us: 500_000_000,
        path,
        tier: 2,
    };
    let slow = vec![slow(1), slow(3), slow(4)];
    until("the links to count", || async {
        report(vec![], slow.clone()).await;
        let request = fresh();
        route(&cluster, request, &held, 1).await;
        let reply = why(&cluster, request).await;
        (told(&reply) == [(0, 6, "slower_than_recompute"), (6, 2, "never_seen")]).then_some(())
    })
    .await;
    seen.push("slower_than_recompute");

    // Their holder is gone.
    let leave = pb::LeaveRequest { node: 1, epoch: node.epoch };
    cluster.on_leader(|mut client| async move { client.leave(leave).await }).await;
    until("the end of node 1 in the shard", || async {
        report(vec![], vec![]).await;
        let request = fresh();
        route(&cluster, request, &held, 1).await;
        let reply = why(&cluster, request).await;
        (told(&reply) == [(0, 6, "node_lost"), (6, 2, "never_seen")]).then_some(())
    })
    .await;
    seen.push("node_lost");
    let counts = counted(registry);
    assert!(counts["slower_than_recompute"] >= 6 && counts["node_lost"] >= 6, "{counts:?}");

    seen.sort_unstable();
    let mut all = MissReason::NAMES.to_vec();
    all.sort_unstable();
    assert_eq!(seen, all, "every reason occurred");
    assert!(!why(&cluster, 999_999).await.known);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_request_has_a_reason() {
    let cluster = Cluster::start(1, |config| {
        config.profile = "h100-8b".into();
        config.admission.ttft_max_ms = 30_000;
    })
    .await;
    cluster.leader().await;
    cluster.client(1).report(load(1, 1)).await.unwrap();
    let request = |request, ttft_max_ms| pb::RouteRequest {
        request,
        block_tokens: 16,
        input_tokens: 20_000,
        ttft_max_ms,
        ..Default::default()
    };
    let reply = cluster.client(1).route(request(7, 50)).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Rejected(rejected)) = reply.answer else { panic!("{reply:?}") };
    assert!(!rejected.no_instance && rejected.retry_after_ms > 0, "{rejected:?}");
    let told = why(&cluster, 7).await;
    assert!(told.rejected.contains("its limit is 50 ms"), "{told:?}");
    // Without its own limit it has the router's.
    let reply = cluster.client(1).route(request(8, 0)).await.unwrap().into_inner();
    assert!(matches!(reply.answer, Some(pb::route_reply::Answer::Decision(_))), "{reply:?}");
    cluster.shutdown().await;
}
