//! Tests of routing: builders for fleets and prefixes; then tables, brute force and properties in
//! submodules.
#![allow(clippy::unwrap_used)]

mod brute;
mod decode_forecast;
mod disaggregation;
mod filter;
mod in_flight_prefixes;
mod inferred_prefixes;
mod load;
mod measured_prices;
mod plans;
mod prefill_model;
mod profiles;
mod properties;
mod queue_order;
mod reassignment;
mod resident;
mod ties;

use std::sync::Arc;

use super::*;
use crate::id::{Epoch, InstanceId};
use crate::index::HolderRun;

/// A profile for which every number can be checked by hand: 100 µs a token, no attention term, a
/// step of 1 ms, 1,000 bytes a token. GPU 5 µs + 1 µs a token, DRAM 10 µs + 10 µs, SSD 100 µs + 50
/// µs, network 20 µs + 20 µs.
pub(super) const ROUND: HardwareProfile = HardwareProfile {
    name: "round",
    prefill_ns_per_token: 100_000,
    prefill_ps_per_token_context: 0,
    prompt_step_ns: 1_000_000,
    step_ns: 1_000_000,
    step_ns_per_running: 10_000,
    kv_bytes_per_token: 1_000,
    gpu: PathSpeed { latency_ns: 5_000, bytes_per_s: 1_000_000_000 },
    dram: PathSpeed { latency_ns: 10_000, bytes_per_s: 100_000_000 },
    ssd: PathSpeed { latency_ns: 100_000, bytes_per_s: 20_000_000 },
    network: PathSpeed { latency_ns: 20_000, bytes_per_s: 50_000_000 },
};

pub(super) const NOW: Timestamp = Timestamp(10_000_000);
/// Now, just after a report.
pub(super) const JUST_REPORTED: LoadInstant = LoadInstant { now: NOW, reported_at: NOW };
pub(super) const BLOCK_TOKENS: u32 = 10;

/// A request of `blocks` full blocks.
pub(super) fn request(blocks: u32) -> RouteRequest {
    RouteRequest {
        request: RequestId(7),
        tenant: TenantId(0),
        category: Category::default(),
        blocks,
        first_block: (blocks > 0).then_some(BlockHash([9; _])),
        block_tokens: BLOCK_TOKENS,
        input_tokens: blocks * BLOCK_TOKENS,
        output_tokens: 0,
        ttft_max_us: 0,
        tbt_max_us: 0,
        queue_priority: Default::default(),
        is_untokenized: false,
    }
}

pub(super) fn holder(node: u32, tier: Tier) -> Holder {
    Holder { node: NodeId(node), epoch: Epoch(1), tier }
}

/// Consecutive runs by length and holders.
pub(super) fn prefix(runs: &[(u32, &[(u32, Tier)])]) -> PrefixMatch {
    let mut start_blocks = 0;
    let mut all = Vec::new();
    for &(len_blocks, holders) in runs {
        let holders = holders.iter().map(|&(node, tier)| holder(node, tier)).collect();
        all.push(HolderRun { start_blocks, len_blocks, holders });
        start_blocks += len_blocks;
    }
    PrefixMatch { runs: all }
}

/// Instance `n` whose own node is `n`, idle and just reported.
pub(super) fn instance(n: u32) -> Instance {
    Instance {
        id: InstanceId(n),
        node: Some(NodeId(n)),
        can_fetch: true,
        orders_by_deadline: false,
        load: Load::default(),
        reported_at: NOW,
        joined_at: None,
    }
}

pub(super) fn live(node: u32) -> LiveNode {
    LiveNode {
        node: NodeId(node),
        epoch: Epoch(1),
        weight: 1,
        blocks: 0,
        block_bytes: 0,
        remote_stats: None,
        local_stats: None,
    }
}

/// Measured speeds of the link and of each tier, over unknown paths.
pub(super) fn link_speeds(link: Option<PathSpeed>, tiers: [Option<PathSpeed>; 3]) -> Option<Arc<LinkSpeeds>> {
    let of = |tier, lane: Option<PathSpeed>| lane.map(|lane| (LinkKey { path: None, tier }, lane));
    let all = [of(None, link)].into_iter().chain(Tier::ALL.map(|tier| of(Some(tier), tiers[tier as usize])));
    let lanes = all.flatten().fold(LinkSpeeds::default(), |lanes, (key, lane)| lanes.with_speed(key, lane));
    (!lanes.is_empty()).then(|| Arc::new(lanes))
}

/// `count` idle instances from 1, each with a live node of the same number.
pub(super) fn fleet(count: u32) -> Fleet {
    let mut fleet = Fleet::new(ROUND);
    fleet.set_nodes((1..=count).map(live).collect());
    (1..=count).for_each(|n| fleet.put_instance(instance(n)));
    fleet
}

pub(super) fn with_load(mut fleet: Fleet, n: u32, load: Load) -> Fleet {
    *fleet.load_mut(InstanceId(n)).unwrap() = load;
    fleet
}

/// Sources as (node, start, len).
pub(super) fn sources(decision: &Decision) -> Vec<(u32, u32, u32)> {
    decision.sources.iter().map(|s| (s.node.0, s.start_blocks, s.len_blocks)).collect()
}

pub(super) fn chosen(request: &RouteRequest, matched: &PrefixMatch, fleet: &Fleet) -> Decision {
    choose(request, matched, fleet, NOW).unwrap()
}
