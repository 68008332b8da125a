//! Cost of a choice by predicted TTFT against the cheapest possible router: a scan for the least
//! loaded instance.
//!
//! Not here: the quality of the choice, which replays measure.

use std::hint::black_box;
use std::time::Duration;

use benches::{BenchRow, Better, measure_time, side_by_side};
use kv_core::id::{BlockHash, Category, Epoch, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp};
use kv_core::index::{Holder, HolderRun, PrefixMatch};
use kv_core::schedule::{
    Fleet, HardwareProfile, Instance, LiveNode, Load, REPORT_STALE_AFTER, RouteRequest, choose,
};

use crate::Effort;

pub(crate) const ABOUT: &str = "one routing decision (filter, source plan for every instance, candidates, \
    reasons) for a prompt of 500 blocks of 16 tokens, against a scan for the instance with the fewest queued \
    tokens, which ignores the prefix";

pub(crate) const NOW: Timestamp = Timestamp(1_000_000);
const BLOCKS: u32 = 500;
const PEER: &str = "least-loaded scan";

/// One row: its name, the number of instances, and the number of nodes with the shared prefix.
const SETTINGS: &[(&str, u32, u32)] = &[
    ("8 instances, 4 holders", 8, 4),
    ("64 instances, 4 holders", 64, 4),
    ("64 instances, all hold the first 64 blocks", 64, 64),
    ("512 instances, 4 holders", 512, 4),
    ("64 instances, no blocks held", 64, 0),
];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let decisions = effort.scaled(20_000);
    let row = |&(name, instances, holders): &(&str, u32, u32)| {
        let (fleet, matched) = (fleet(instances), prefix(instances, holders));
        let ours = || {
            measure_time(|| (0..decisions).for_each(|id| decide(id, &matched, &fleet)))
                .1
                .cpu_us_per(decisions)
        };
        let scans = decisions * 10;
        let theirs = || measure_time(|| (0..scans).for_each(|_| scan(&fleet))).1.cpu_us_per(scans);
        BenchRow::new("choose", name, "µs CPU", PEER, Better::Lower, side_by_side(effort.runs, ours, theirs))
    };
    Ok(SETTINGS.iter().map(row).collect())
}

fn decide(id: u64, matched: &PrefixMatch, fleet: &Fleet) {
    let request = RouteRequest {
        request: RequestId(id),
        tenant: TenantId(0),
        category: Category::default(),
        blocks: BLOCKS,
        first_block: Some(BlockHash([1; _])),
        block_tokens: 16,
        input_tokens: BLOCKS * 16,
        output_tokens: 0,
        ttft_max_us: 0,
        tbt_max_us: 0,
        queue_priority: Default::default(),
        is_untokenized: false,
    };
    let _ = black_box(choose(black_box(&request), black_box(matched), black_box(fleet), NOW));
}

fn scan(fleet: &Fleet) {
    let fresh = |one: &&Instance| NOW.since(one.reported_at) <= REPORT_STALE_AFTER;
    let instances = black_box(fleet).instances().iter().filter(fresh);
    black_box(instances.min_by_key(|one| (one.load.tokens_ahead(), one.id)));
}

/// Instances with one node and a distinct load each.
pub(crate) fn fleet(instances: u32) -> Fleet {
    let mut fleet = Fleet::new(HardwareProfile::by_name("h100-8b").unwrap_or_default());
    let epoch = Epoch(1);
    let node = |n| LiveNode {
        node: NodeId(n),
        epoch,
        weight: 1,
        blocks: 0,
        block_bytes: 0,
        remote_stats: None,
        local_stats: None,
    };
    fleet.set_nodes((0..instances).map(node).collect());
    for n in 0..instances {
        let load = Load::reported(u64::from(n * 7_919 % 10_007), n % 13, n % 3);
        let reported_at = Timestamp(NOW.0 - Duration::from_millis(u64::from(n % 200)).as_micros() as u64);
        fleet.put_instance(Instance {
            id: InstanceId(n),
            node: Some(NodeId(n)),
            can_fetch: true,
            orders_by_deadline: false,
            load,
            reported_at,
            joined_at: None,
        });
    }
    fleet
}

/// A system prompt of 64 blocks on `holders` nodes, then a conversation of 400 blocks on one of
/// them, with its older half on SSD.
fn prefix(instances: u32, holders: u32) -> PrefixMatch {
    let holder =
        |n: u32, tier| Holder { node: NodeId(n * instances / holders.max(1)), epoch: Epoch(1), tier };
    let run = |start_blocks, len_blocks, holders: Vec<Holder>| HolderRun {
        start_blocks,
        len_blocks,
        holders: holders.into_iter().collect(),
    };
    if holders == 0 {
        return PrefixMatch::default();
    }
    let everyone = (0..holders).map(|n| holder(n, Tier::Dram)).collect();
    let one = holders / 2;
    let runs = vec![
        run(0, 64, everyone),
        run(64, 200, vec![holder(one, Tier::Ssd)]),
        run(264, 200, vec![holder(one, Tier::Dram)]),
    ];
    PrefixMatch { runs }
}
