//! Reported link measurements: priced by path and tier with coarser fallbacks, and shown in the
//! status.
//!
//! Not here: how samples become link statistics, and the basis of a price (`kv_core::schedule`).

use std::cell::Cell;

use kvfleet_proto::pb;

use crate::residency::{decided, load};
use kvfleet_testkit::cluster::{Cluster, FakeNode, HashBytes, prefix, until};

const QUIC: u32 = 3;
const TCP: u32 = 4;
/// Tier numbers of samples.
const SSD: u32 = 1;
const DRAM: u32 = 2;

/// Four fetches, each with its first byte after 200 µs.
fn sample(node: &FakeNode, (path, tier): (u32, u32), bytes_per_s: u64) -> pb::LinkSample {
    pb::LinkSample {
        node: node.node,
        epoch: node.epoch,
        fetches: 4,
        latency_us: 4 * 200,
        bytes: bytes_per_s,
        stream_us: 1_000_000,
        path,
        tier,
    }
}

/// Reports of an instance without its own node, until the decision is as expected.
struct ReportingInstance<'a> {
    cluster: &'a Cluster,
    blocks: &'a [HashBytes],
    sequence: Cell<u64>,
}

impl ReportingInstance<'_> {
    async fn report(&self, links: &[pb::LinkSample]) {
        let sequence = self.sequence.replace(self.sequence.get() + 1);
        let report = pb::ReportRequest { links: links.to_vec(), ..load(5, sequence) };
        self.cluster.client(1).report(report).await.unwrap();
    }

    async fn until(
        &self,
        what: &str,
        links: &[pb::LinkSample],
        is_so: impl Fn(&pb::Decision) -> bool,
    ) -> pb::Decision {
        until(what, || async {
            self.report(links).await;
            Some(decided(self.cluster, self.blocks).await).filter(&is_so)
        })
        .await
    }
}

fn on_ssd(blocks: &[HashBytes]) -> pb::Change {
    let stored = pb::Stored { parent: Vec::new(), blocks: blocks.concat(), tier: 0 };
    pb::Change { change: Some(pb::change::Change::Stored(stored)) }
}

/// Two nodes with the same blocks, the first in DRAM and the second on SSD.
async fn nodes(cluster: &Cluster, blocks: &[HashBytes]) -> (FakeNode, FakeNode) {
    let (mut memory, ssd) = (cluster.node(1).await, cluster.node(2).await);
    memory.store(blocks).await;
    ssd.send(ssd.seq, vec![on_ssd(blocks)]).await;
    until("both to be listed", || async {
        let found = cluster.lookup(1, blocks, vec![]).await;
        (found.runs.first()?.holders.len() == 2).then_some(())
    })
    .await;
    (memory, ssd)
}

fn from(decision: &pb::Decision) -> Vec<u32> {
    decision.sources.iter().map(|source| source.node).collect()
}

fn why(decision: &pb::Decision, part: &str) -> bool {
    decision.reasons.iter().any(|reason| reason.contains(part))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetches_use_the_fastest_tier_over_the_current_path() {
    let cluster = Cluster::start(1, |_| {}).await;
    let blocks = prefix(81, 64);
    let (memory, ssd) = nodes(&cluster, &blocks).await;
    let engine = ReportingInstance { cluster: &cluster, blocks: &blocks, sequence: Cell::new(1) };
    let by_profile = engine.until("the profile's choice", &[], |decision| from(decision) == [1]).await;
    assert!(!why(&by_profile, "measured"), "{by_profile:?}");

    // Over TCP node 1's memory is slow and node 2's SSD is fast.
    let (slow, fast) = (20_000_000, 900_000_000);
    let by_tcp = [sample(&memory, (TCP, DRAM), slow), sample(&ssd, (TCP, SSD), fast)];
    let decision = engine.until("the fast SSD", &by_tcp, |decision| from(decision) == [2]).await;
    assert!(why(&decision, "ssd of node-2 over tcp at 900000000 B/s after 200 us"), "{decision:?}");
    assert!(why(&decision, "as measured of that tier over that path: taken"), "{decision:?}");
    assert!(why(&decision, "dram of node-1 over tcp at 20000000 B/s after 200 us"), "{decision:?}");
    assert!(why(&decision, "passed over"), "{decision:?}");

    // Over QUIC the reverse; the instance uses that path from now on.
    let by_quic = [sample(&memory, (QUIC, DRAM), fast), sample(&ssd, (QUIC, SSD), slow)];
    let decision = engine.until("the fast memory", &by_quic, |decision| from(decision) == [1]).await;
    assert!(why(&decision, "dram of node-1 over quic at 900000000 B/s"), "{decision:?}");

    // The status shows all four.
    let status = cluster.status(1).await.unwrap();
    let told = |node, path, tier, bytes_per_s| {
        status.links.contains(&pb::LinkStatus { node, own: false, path, tier, latency_us: 200, bytes_per_s })
    };
    assert!(told(1, TCP, DRAM, slow) && told(2, TCP, SSD, fast), "{:?}", status.links);
    assert!(told(1, QUIC, DRAM, fast) && told(2, QUIC, SSD, slow), "{:?}", status.links);
    assert_eq!(status.links.len(), 4);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_paths_and_tiers_count_for_coarser_keys() {
    let cluster = Cluster::start(1, |_| {}).await;
    let blocks = prefix(82, 64);
    let (memory, ssd) = nodes(&cluster, &blocks).await;
    let engine = ReportingInstance { cluster: &cluster, blocks: &blocks, sequence: Cell::new(1) };
    // Numbers of a later release: a path, then a tier too.
    let (slow, fast) = (20_000_000, 900_000_000);
    let later = [sample(&memory, (9, DRAM), slow), sample(&ssd, (9, SSD), fast)];
    let decision = engine.until("the fast SSD", &later, |decision| from(decision) == [2]).await;
    assert!(why(
        &decision,
        "ssd of node-2 at 900000000 B/s after 200 us, as measured of that tier over any path"
    ));
    let later = [sample(&memory, (9, 9), slow / 10)];
    let coarse = |decision: &pb::Decision| why(decision, "dram of node-1");
    let decision = engine.until("the statistics of unknown tiers", &later, coarse).await;
    assert!(why(&decision, "passed over"), "{decision:?}");
    let told: Vec<_> = cluster.status(1).await.unwrap().links;
    assert!(told.iter().any(|link| (link.path, link.tier) == (0, 0)), "{told:?}");
    // Too few bytes over TCP for an estimate: the statistics of the tier still apply.
    let few = pb::LinkSample { bytes: 900, stream_us: 1, ..sample(&ssd, (TCP, SSD), 0) };
    let still = |decision: &pb::Decision| why(decision, "over tcp at");
    let all = [few, sample(&ssd, (9, SSD), fast)];
    let decision = engine.until("the current path", &all, still).await;
    assert!(why(&decision, "ssd of node-2 over tcp at 900000000 B/s"), "{decision:?}");
    assert!(why(&decision, "as measured of that tier over any path: taken"), "{decision:?}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_only_router_still_shows_links() {
    let cluster = Cluster::start(1, |config| config.price_links = false).await;
    let blocks = prefix(83, 64);
    let (memory, _ssd) = nodes(&cluster, &blocks).await;
    let engine = ReportingInstance { cluster: &cluster, blocks: &blocks, sequence: Cell::new(1) };
    let slow = [sample(&memory, (TCP, DRAM), 2_000_000)];
    until("the status to show the link", || async {
        engine.report(&slow).await;
        (!cluster.status(1).await?.links.is_empty()).then_some(())
    })
    .await;
    // A membership change refreshes the fleet at once, so later decisions would use the link if it
    // counted.
    let _third = cluster.node(3).await;
    until("the third node", || async {
        let nodes = cluster.status(1).await?.nodes;
        (nodes.iter().filter(|node| node.live).count() == 3).then_some(())
    })
    .await;
    engine.report(&slow).await;
    let decision = decided(&cluster, &blocks).await;
    assert_eq!(from(&decision), [1], "{decision:?}");
    assert!(!why(&decision, "measured"), "{decision:?}");
    cluster.shutdown().await;
}
