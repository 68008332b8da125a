//! Simulates a node that joins a fleet in the middle of a trace: its hit rate if it starts without
//! statistics, and if the other nodes share theirs.
//!
//! Every request of a session goes to one node, a hash spreads the sessions, and each node has its
//! own tier under the same policy. At the join the new node takes its share of all sessions,
//! including running ones. Two such fleets serve the same requests. In one no statistics are
//! shared; in the other all nodes get the merged sums every minute, and the joiner gets them at
//! once. Not here: routers and links, which are the same in both.

use crate::evict;
use crate::policies::Traffic;
use kv_core::evict::reuse_stats::{NODE_REQUESTS_MAX, ReuseStats};
use kv_core::id::Timestamp;
use kvfleet_sim::cache::{CacheReplay, ReplayOutcome};
use kvfleet_sim::ids::{IdMap, mix_bits};
use kvfleet_sim::trace::Request;
use serde::Serialize;

/// Interval of sharing. A real fleet shares every few seconds, but the statistics change only
/// slowly.
const SHARE_INTERVAL_US: u64 = 60_000_000;
/// Share of the requests that are served before the join.
const JOIN_AT_SHARE: f64 = 0.5;

/// Parameters of the fleet.
#[derive(Clone, Copy, Debug)]
pub struct JoinPlan<'a> {
    /// Policy of every tier, one of [`evict::NAMES`].
    pub policy: &'a str,
    /// Nodes before the join; at least one.
    pub nodes: u32,
    /// Blocks of all nodes together after the join, as a share of the unique blocks of the traffic.
    pub capacity_share: f64,
    /// Numbers of first requests over which the joiner's hit rate is reported, each separately.
    pub first: &'a [u64],
}

/// Hit rates of the joiner over its first requests, and of the whole fleet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JoinResult {
    /// Name of the traffic.
    pub traffic: String,
    /// Seed of generated traffic; `None` for recorded traffic.
    pub seed: Option<u64>,
    /// Policy of the nodes.
    pub policy: String,
    /// Nodes before the join.
    pub nodes: u32,
    /// Capacity of all nodes over unique blocks.
    pub capacity_share: f64,
    /// Capacity of one node, in blocks.
    pub node_blocks: usize,
    /// The joiner over its first requests; fewer if the trace ends before.
    pub first: Vec<JoinerHitRate>,
    /// Hits over blocks requested of all nodes over the whole trace, 0 to 1: without and with
    /// shared statistics.
    pub fleet: [f64; 2],
}

/// Hit rates of the joiner over its first requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct JoinerHitRate {
    /// Requested number of first requests.
    pub first: u64,
    /// Actual number of requests.
    pub requests: u64,
    /// Hits over blocks requested, 0 to 1, of a joiner without statistics.
    pub blind: f64,
    /// The same of a joiner with shared statistics.
    pub told: f64,
}

/// Simulates a join in the middle of the traffic. `None` if no policy has the name.
#[must_use]
pub fn simulate_join(traffic: &Traffic, plan: &JoinPlan<'_>) -> Option<JoinResult> {
    let nodes = plan.nodes.max(1);
    let all_blocks = plan.capacity_share * traffic.unique_blocks() as f64;
    let node_blocks = ((all_blocks / f64::from(nodes + 1)) as usize).max(1);
    let fresh =
        || Some(CacheReplay::new(evict::by_name(plan.policy, traffic.seed.unwrap_or(0))?, node_blocks));
    let fleet = || (0..nodes).map(|_| fresh()).collect::<Option<Vec<CacheReplay>>>();
    let mut fleets = [JoinFleet::new(fleet()?, false), JoinFleet::new(fleet()?, true)];
    let joins = (traffic.all().len() as f64 * JOIN_AT_SHARE) as usize;
    let mut sessions = SessionTracker::default();
    let mut first: Vec<JoinerHitRate> =
        plan.first.iter().map(|&first| JoinerHitRate { first, requests: 0, blind: 0.0, told: 0.0 }).collect();
    for (at, request) in traffic.all().iter().enumerate() {
        if at == joins {
            for fleet in &mut fleets {
                fleet.nodes.push(fresh()?);
                fleet.share_stats(request.arrival_us);
            }
        }
        let session = sessions.session_of(request);
        fleets.iter_mut().for_each(|fleet| fleet.serve(session, request));
        let outcomes = fleets.each_ref().map(|fleet| fleet.joiner(nodes));
        let [Some(blind), Some(told)] = outcomes else { continue };
        for row in first.iter_mut().filter(|row| blind.requests <= row.first) {
            (row.requests, row.blind, row.told) = (blind.requests, blind.hit_rate(), told.hit_rate());
        }
    }
    Some(JoinResult {
        traffic: traffic.name.clone(),
        seed: traffic.seed,
        policy: plan.policy.to_owned(),
        nodes,
        capacity_share: plan.capacity_share,
        node_blocks,
        first,
        fleet: fleets.map(|fleet| fleet.hit_rate()),
    })
}

struct JoinFleet {
    nodes: Vec<CacheReplay>,
    shares_stats: bool,
    shared_at_us: u64,
}

impl JoinFleet {
    fn new(nodes: Vec<CacheReplay>, shares_stats: bool) -> JoinFleet {
        JoinFleet { nodes, shares_stats, shared_at_us: 0 }
    }

    fn serve(&mut self, session: u64, request: &Request) {
        if request.arrival_us >= self.shared_at_us.saturating_add(SHARE_INTERVAL_US) {
            self.share_stats(request.arrival_us);
        }
        // Rendezvous hashing: existing nodes keep the sessions that do not move to the joiner.
        let weight = |node: usize| mix_bits(session ^ (node as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let node = (0..self.nodes.len()).max_by_key(|&node| weight(node));
        if let Some(node) = node {
            self.nodes[node].serve(request);
        }
    }

    /// Gives every node the merged statistics of all.
    fn share_stats(&mut self, now_us: u64) {
        self.shared_at_us = now_us;
        if !self.shares_stats {
            return;
        }
        let mut all = ReuseStats::default();
        for node in &mut self.nodes {
            all.merge_capped(&node.category_stats(Timestamp(now_us)).to_requests(), NODE_REQUESTS_MAX);
        }
        for node in &mut self.nodes {
            node.set_fleet_stats(&all, Timestamp(now_us));
        }
    }

    fn joiner(&self, nodes: u32) -> Option<ReplayOutcome> {
        self.nodes.get(nodes as usize).map(CacheReplay::outcome)
    }

    fn hit_rate(&self) -> f64 {
        let outcomes = self.nodes.iter().map(CacheReplay::outcome);
        let (hits, asked) = outcomes.fold((0, 0), |(hits, asked), outcome| {
            (hits + outcome.block_hits, asked + outcome.block_accesses)
        });
        if asked == 0 { 0.0 } else { hits as f64 / asked as f64 }
    }
}

/// The session of a request: that of the deepest known block of its prefix, unless the request is a
/// first turn.
#[derive(Default)]
struct SessionTracker {
    by_block: IdMap<u64>,
    count: u64,
}

impl SessionTracker {
    fn session_of(&mut self, request: &Request) -> u64 {
        let known = request.blocks.iter().map_while(|block| self.by_block.get(block)).last().copied();
        let session = known.filter(|_| request.category.conversation_turn > 1).unwrap_or_else(|| {
            self.count += 1;
            self.count
        });
        for &block in &request.blocks {
            self.by_block.entry(block).or_insert(session);
        }
        session
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kvfleet_sim::generate::{TraceSpec, TrafficKind};

    #[test]
    fn shared_stats_change_nothing_for_a_policy_that_does_not_learn() {
        let traffic = Traffic::generated(TraceSpec {
            block_tokens: 64,
            ..TraceSpec::new(TrafficKind::Business, 1, 600)
        });
        let plan = JoinPlan { policy: "lru", nodes: 2, capacity_share: 0.02, first: &[20, 1_000_000] };
        let joining = simulate_join(&traffic, &plan).unwrap();
        assert!(joining.fleet[0] > 0.0 && joining.fleet[0] == joining.fleet[1]);
        assert!(joining.first.iter().all(|first| first.blind == first.told));
        assert_eq!(joining.first[0].requests, 20);
        let rest = joining.first[1].requests;
        assert!((50..200).contains(&rest), "a third of 300, not {rest}");
        assert_eq!(simulate_join(&traffic, &JoinPlan { policy: "clairvoyant", ..plan }), None);
    }

    /// The seeds were not chosen: `kvfleet-lab joins` runs the same ones (docs/adr/0065). A
    /// single seed shows little.
    #[test]
    fn a_joiner_with_shared_stats_hits_more_at_first() {
        let gain = |seed| {
            let spec = TraceSpec { block_tokens: 64, ..TraceSpec::new(TrafficKind::Business, seed, 10_000) };
            let plan =
                JoinPlan { policy: kv_core::evict::DEFAULT, nodes: 4, capacity_share: 0.005, first: &[500] };
            let JoinerHitRate { blind, told, .. } =
                simulate_join(&Traffic::generated(spec), &plan).unwrap().first[0];
            told - blind
        };
        let gains = [1, 2].map(gain);
        assert!(gains.iter().sum::<f64>() > 0.0, "seeds 1 and 2: {gains:?}");
    }

    #[test]
    fn turns_of_a_session_stay_together() {
        let request = |turn: u8, blocks: &[u64]| {
            let mut request =
                Traffic::generated(TraceSpec::new(TrafficKind::Consumer, 1, 1)).all()[0].clone();
            (request.category.conversation_turn, request.blocks) = (turn, blocks.to_vec());
            request
        };
        let mut sessions = SessionTracker::default();
        let first = sessions.session_of(&request(1, &[1, 2]));
        let other = sessions.session_of(&request(1, &[1, 3]));
        assert_ne!(first, other);
        assert_eq!(sessions.session_of(&request(2, &[1, 2, 4])), first);
        assert_eq!(sessions.session_of(&request(2, &[1, 3, 5])), other);
        assert_eq!(sessions.session_of(&request(3, &[1, 2, 4, 6])), first);
    }
}
