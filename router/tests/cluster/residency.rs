//! GPU residency over real connections: reports in lookups, decisions and status; gaps, restarts,
//! silence; and links.

use std::cell::Cell;

use kv_core::id::HASH_BYTES;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::residency_reply::Body as Reply;
use tonic::Code;

use kvfleet_testkit::cluster::{Cluster, HashBytes, cleared, prefix, resident, stored, until};

const EPOCH: u64 = 1_000;

fn batch(seq: u64, changes: Vec<pb::Change>) -> pb::Batch {
    pb::Batch { seq, changes, digest: vec![] }
}

fn request(instance: u32, batches: Vec<pb::Batch>) -> pb::ResidencyRequest {
    let last_seq = batches.last().map_or(0, |batch| batch.seq);
    pb::ResidencyRequest { instance, epoch: EPOCH, batches, last_seq }
}

pub fn load(instance: u32, sequence: u64) -> pb::ReportRequest {
    let address = format!("i:{instance}");
    pb::ReportRequest { instance, address, sequence, started_us: EPOCH, ..Default::default() }
}

fn ack(seq: u64) -> Option<Reply> {
    Some(Reply::Ack(pb::Ack { seq }))
}

fn replay(from: u64) -> Option<Reply> {
    Some(Reply::Replay(pb::Replay { from }))
}

async fn report(cluster: &Cluster, router: u64, request: &pb::ResidencyRequest) -> pb::ResidencyReply {
    cluster.client(router).report_residency(request.clone()).await.unwrap().into_inner()
}

/// Start, length, nodes, instances.
type MergedRunRow = (u32, u32, Vec<u32>, Vec<u32>);

fn runs(reply: &pb::LookupReply) -> Vec<MergedRunRow> {
    let nodes = |run: &pb::HolderRun| run.holders.iter().map(|holder| holder.node).collect();
    let run = |run: &pb::HolderRun| (run.start_blocks, run.len_blocks, nodes(run), run.instances.clone());
    reply.runs.iter().map(run).collect()
}

pub async fn decided(cluster: &Cluster, hashes: &[HashBytes]) -> pb::Decision {
    let blocks = u32::try_from(hashes.len()).unwrap();
    let request = pb::RouteRequest {
        request: 1,
        hashes: hashes.concat(),
        block_tokens: 16,
        input_tokens: 16 * blocks,
        ..Default::default()
    };
    let reply = cluster.client(1).route(request).await.unwrap().into_inner();
    match reply.answer {
        Some(pb::route_reply::Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_merges_index_and_residency() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(4).await;
    let blocks = prefix(71, 8);
    let seen = node.store(&blocks[..4]).await;
    let router = cluster.follower().await;
    cluster.lookup(router, &blocks, vec![seen]).await;
    let groups = |status: pb::StatusReply| -> Vec<_> {
        status.groups.into_iter().map(|group| (group.last_log_index, group.digest)).collect()
    };
    let before = groups(cluster.status(router).await.unwrap());

    for (instance, until) in [(1, 6), (2, 2)] {
        cluster.client(router).report(load(instance, 1)).await.unwrap();
        let told = request(instance, vec![batch(1, vec![resident(&blocks[..until])])]);
        assert_eq!(report(&cluster, router, &told).await.body, ack(1));
    }
    let found = cluster.lookup(router, &blocks, vec![seen]).await;
    let expected: [MergedRunRow; 3] =
        [(0, 2, vec![4], vec![1, 2]), (2, 2, vec![4], vec![1]), (4, 2, vec![], vec![1])];
    assert_eq!(runs(&found), expected);
    let fresh: Vec<_> =
        found.residency.iter().map(|one| (one.instance, one.epoch, one.seq, one.blocks)).collect();
    assert_eq!(fresh, [(1, EPOCH, 1, 6), (2, EPOCH, 1, 2)]);
    assert!(found.residency.iter().all(|one| !one.uncertain && one.age_ms < 60_000));
    assert!(found.freshness.unwrap().applied_index > 0);
    let status = cluster.status(router).await.unwrap();
    let told: Vec<_> =
        status.instances.iter().map(|one| (one.instance, one.residency.unwrap().blocks)).collect();
    assert_eq!(told, [(1, 6), (2, 2)]);
    assert_eq!(groups(status), before, "residency is not in the log");
    // Each router knows only its own reports.
    let other = cluster.running().into_iter().find(|id| *id != router).unwrap();
    assert_eq!(runs(&cluster.lookup(other, &blocks, vec![seen]).await), [(0, 4, vec![4], vec![])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_to_its_resident_prefix() {
    let cluster = Cluster::start(1, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(72, 8);
    let seen = node.store(&blocks[..6]).await;
    cluster.lookup(1, &blocks, vec![seen]).await;
    let reports = async |sequence| {
        for instance in [1, 2] {
            cluster.client(1).report(load(instance, sequence)).await.unwrap();
        }
    };
    reports(1).await;
    let before = decided(&cluster, &blocks).await;
    assert_eq!((before.fetch_blocks, before.resident_blocks), (6, 0));

    // Both idle again, so that only residency differs.
    reports(2).await;
    let pb::ResidencyReply { body, .. } =
        report(&cluster, 1, &request(2, vec![batch(1, vec![resident(&blocks[..5])])])).await;
    assert_eq!(body, ack(1));
    let decision = decided(&cluster, &blocks).await;
    assert_eq!((decision.instance, decision.resident_blocks), (2, 5), "{decision:?}");
    assert_eq!((decision.fetch_blocks, decision.recompute_blocks), (1, 2));
    assert_eq!((decision.sources[0].start_blocks, decision.sources[0].len_blocks), (5, 1));
    assert!(decision.predicted.unwrap().transfer_us < before.predicted.unwrap().transfer_us);
    assert!(decision.reasons.iter().any(|why| why.contains("first 5 blocks are in its GPU memory")));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_batches_are_replayed_and_a_restarted_router_gets_all() {
    let mut cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let blocks = prefix(73, 6);
    let one = |at: usize| batch(at as u64 + 1, vec![resident(&blocks[at..=at])]);
    assert_eq!(report(&cluster, 1, &request(1, vec![one(0)])).await.body, ack(1));
    assert_eq!(report(&cluster, 1, &request(1, vec![one(2), one(3)])).await.body, replay(2));
    let found = cluster.lookup(1, &blocks, vec![]).await;
    assert_eq!(runs(&found), [(0, 1, vec![], vec![1])], "earlier reports still count");
    assert!(found.residency[0].uncertain);
    let again = report(&cluster, 1, &request(1, vec![one(0), one(1), one(2), one(3)])).await;
    assert_eq!((again.body, again.duplicate_batches), (ack(4), 1));
    let heartbeat = pb::ResidencyRequest { last_seq: 5, ..request(1, vec![]) };
    assert_eq!(report(&cluster, 1, &heartbeat).await.body, replay(5), "a lost last batch");
    let late = pb::ResidencyRequest { epoch: EPOCH - 1, ..request(1, vec![one(0)]) };
    let outdated = Some(Reply::Outdated(pb::Outdated { epoch: EPOCH }));
    assert_eq!(report(&cluster, 1, &late).await.body, outdated);

    cluster.take(1).shutdown().await;
    cluster.start_router(1).await;
    until("a leader", || async { cluster.status(1).await.filter(|status| status.leader == 1) }).await;
    assert_eq!(report(&cluster, 1, &request(1, vec![one(4)])).await.body, replay(1));
    let all = batch(6, vec![cleared(), resident(&blocks)]);
    assert_eq!(report(&cluster, 1, &request(1, vec![all])).await.body, ack(6));
    let found = until("an answer", || async {
        let lookup = pb::LookupRequest { hashes: blocks.concat(), ..Default::default() };
        cluster.client(1).lookup(lookup).await.ok()
    });
    assert_eq!(runs(&found.await.into_inner()), [(0, 6, vec![], vec![1])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_restart_and_departure_invalidate_an_instance() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let blocks = prefix(74, 4);
    let all = request(1, vec![batch(1, vec![resident(&blocks)])]);
    let held = async || runs(&cluster.lookup(1, &blocks, vec![]).await);
    assert_eq!(report(&cluster, 1, &all).await.body, ack(1));
    assert_eq!(held().await.len(), 1);
    until("silence to invalidate it", || async { held().await.is_empty().then_some(()) }).await;
    // After the invalidation, everything is requested again.
    let beat = pb::ResidencyRequest { last_seq: 1, ..request(1, vec![]) };
    until("a replay", || async { (report(&cluster, 1, &beat).await.body == replay(1)).then_some(()) }).await;

    assert_eq!(report(&cluster, 1, &all).await.body, ack(1));
    let mut client = cluster.client(1);
    let restarted = pb::ReportRequest { started_us: EPOCH + 5, ..load(1, 1) };
    client.report(restarted).await.unwrap();
    assert_eq!(held().await, []);
    let outdated = Some(Reply::Outdated(pb::Outdated { epoch: EPOCH + 5 }));
    assert_eq!(report(&cluster, 1, &all).await.body, outdated);
    let is_full = pb::ResidencyRequest { epoch: EPOCH + 5, ..all };
    assert_eq!(report(&cluster, 1, &is_full).await.body, ack(1));
    assert_eq!(held().await.len(), 1);
    let leaving = pb::ReportRequest { started_us: EPOCH + 5, leaving: true, ..load(1, 2) };
    client.report(leaving).await.unwrap();
    assert_eq!(held().await, []);
    assert!(matches!(report(&cluster, 1, &is_full).await.body, Some(Reply::Outdated(_))));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_measured_link_replaces_the_profile() {
    let cluster = Cluster::start(1, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(75, 64);
    let seen = node.store(&blocks).await;
    cluster.lookup(1, &blocks, vec![seen]).await;
    let mut client = cluster.client(1);
    client.report(load(2, 1)).await.unwrap();
    let by_profile = decided(&cluster, &blocks).await.predicted.unwrap().transfer_us;
    // A tenth of the profile's speed, over enough transfers to count.
    let sample = pb::LinkSample {
        node: 1,
        epoch: node.epoch,
        fetches: 4,
        latency_us: 4 * 200,
        bytes: 30_000_000,
        stream_us: 1_000_000,
        path: 4,
        tier: 0,
    };
    client.report(pb::ReportRequest { links: vec![sample], ..load(2, 2) }).await.unwrap();
    let sequence = Cell::new(3);
    let slow = until("the link to count", || async {
        cluster.client(1).report(load(2, sequence.replace(sequence.get() + 1))).await.unwrap();
        let now = decided(&cluster, &blocks).await.predicted.unwrap().transfer_us;
        (now > 5 * by_profile).then_some(now)
    });
    let slow = slow.await;
    assert!(slow < 20 * by_profile, "{slow} us, {by_profile} us by the profile");
    // The blocks' own tier is as fast as the profile, and takes precedence.
    let stored_in = 2;
    let quick = pb::LinkSample { bytes: 300_000_000, tier: stored_in, ..sample };
    let quick = until("the tier to count", || async {
        let report =
            pb::ReportRequest { links: vec![quick], ..load(2, sequence.replace(sequence.get() + 1)) };
        cluster.client(1).report(report).await.unwrap();
        let now = decided(&cluster, &blocks).await.predicted.unwrap().transfer_us;
        (now < 2 * by_profile).then_some(now)
    });
    quick.await;
    let many = pb::ReportRequest { links: vec![sample; 257], ..load(2, sequence.get()) };
    let status = client.report(many).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("more link samples than a report may have", &status.message(), &[]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_reports_are_refused_as_a_whole() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let blocks = prefix(76, 4);
    let refused = async |request: pb::ResidencyRequest| {
        let status = cluster.client(1).report_residency(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        status.message().to_owned()
    };
    let good = || batch(1, vec![resident(&blocks)]);
    let with = |bad: pb::Batch| pb::ResidencyRequest { last_seq: 9, ..request(1, vec![good(), bad]) };
    says("a batch of no number", &refused(with(batch(0, vec![]))).await, &[]);
    let behind = pb::ResidencyRequest { last_seq: 1, ..with(batch(2, vec![])) };
    says("a batch behind the newest one", &refused(behind).await, &[]);
    let far = pb::ResidencyRequest { last_seq: u64::MAX, ..with(batch(u64::MAX, vec![])) };
    says("an uncountable batch number", &refused(far).await, &[]);
    let many = pb::ResidencyRequest { last_seq: 1, ..request(1, vec![good(); 1_025]) };
    says("more batches than a report may have", &refused(many).await, &[]);
    let large = batch(2, vec![resident(&prefix(77, 4_097))]);
    says("more blocks than a batch may have", &refused(with(large)).await, &[]);
    let full = (1..=17).map(|seq| batch(seq, vec![resident(&prefix(seq, 4_096))])).collect();
    says("more blocks than a report may have", &refused(request(1, full)).await, &[]);
    let dram = with(batch(2, vec![stored(&blocks)]));
    says("a report of GPU memory in another tier", &refused(dram).await, &[]);
    let mut cut = resident(&blocks);
    if let Some(pb::change::Change::Stored(stored)) = &mut cut.change {
        stored.blocks.pop();
    }
    says("a report of GPU memory with truncated hashes", &refused(with(batch(2, vec![cut]))).await, &[]);
    assert!(refused(with(batch(2, vec![pb::Change { change: None }]))).await.contains("change is absent"));
    let mut orphan = resident(&blocks);
    if let Some(pb::change::Change::Stored(stored)) = &mut orphan.change {
        stored.parent = vec![7; 3];
    }
    assert!(refused(with(batch(2, vec![orphan]))).await.contains("stored.parent has 3 bytes"));
    assert_eq!(runs(&cluster.lookup(1, &blocks, vec![]).await), [], "a refused report has no effect");

    // Unknown parents and blocks are no error: an engine may have lost their ancestors.
    let stray = pb::Stored { parent: vec![9; HASH_BYTES], blocks: blocks.concat(), tier: 2 };
    let gone = pb::Dropped { blocks: prefix(78, 9).concat(), tier: 2, cause: 0 };
    let changes = [pb::change::Change::Stored(stray), pb::change::Change::Dropped(gone)];
    let changes = changes.map(|change| pb::Change { change: Some(change) }).to_vec();
    assert_eq!(report(&cluster, 1, &request(1, vec![batch(1, changes)])).await.body, ack(1));
    assert_eq!(runs(&cluster.lookup(1, &blocks, vec![]).await), [(0, 4, vec![], vec![1])]);
    // After a large jump, everything in between is requested.
    assert_eq!(report(&cluster, 1, &request(1, vec![batch(1 << 40, vec![])])).await.body, replay(2));
    cluster.shutdown().await;
}
