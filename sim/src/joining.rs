//! A node that joins a fleet in the middle of a trace: what it hits at first when it begins blind, and when it is
//! told what the others saw.
//!
//! Every request of a session goes to one node, sessions are spread by a hash, and each node has one tier of its own
//! under the same policy; at the join the new node takes its share of all sessions, those under way too. Two such
//! fleets serve the same requests: in one nobody is told anything, in the other all are told the merged sums every
//! minute, and the one that joins at once. Not here: routers and links, which are the same in both.

use crate::cache::{Cache, Outcome};
use crate::ids::{IdMap, mixed};
use crate::policies::Traffic;
use crate::trace::Request;
use kv_core::evict;
use kv_core::evict::statistics::{NODE_REQUESTS, Statistics};
use kv_core::id::Timestamp;
use serde::Serialize;

/// Time between two tellings. In a fleet it is seconds; what is told changes as slowly as what is learnt.
const TELL_EVERY_US: u64 = 60_000_000;
/// Share of the requests that are served before the join.
const JOIN_AT: f64 = 0.5;

/// How a fleet is made.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Policy of every tier, one of [`evict::NAMES`].
    pub policy: &'a str,
    /// Nodes before the join; at least one.
    pub nodes: u32,
    /// Blocks of all nodes together after the join, as a share of the unique blocks of the traffic.
    pub capacity_share: f64,
    /// The joiner's hits are counted over so many of its first requests, each apart.
    pub first: &'a [u64],
}

/// What the joiner hit over its first requests, and what the whole fleet did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Joining {
    /// Name of the traffic.
    pub traffic: String,
    /// Its seed, where it was generated.
    pub seed: Option<u64>,
    /// Policy of the nodes.
    pub policy: String,
    /// Nodes before the join.
    pub nodes: u32,
    /// Capacity of all of them over unique blocks.
    pub capacity_share: f64,
    /// Capacity of one node, in blocks.
    pub node_blocks: usize,
    /// The joiner over its first so many requests; fewer where the trace ends before.
    pub first: Vec<First>,
    /// All nodes over the whole trace: hits over blocks asked, 0 to 1, where nobody is told, and where all are.
    pub fleet: [f64; 2],
}

/// Hit rates of the joiner over its first requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct First {
    /// Requests asked for.
    pub first: u64,
    /// Requests there were.
    pub requests: u64,
    /// Hits over blocks asked, 0 to 1, of one that begins blind.
    pub blind: f64,
    /// The same of one that is told.
    pub told: f64,
}

/// Has a node join in the middle of the traffic. Nothing when no policy has the name.
#[must_use]
pub fn join(traffic: &Traffic, plan: &Plan<'_>) -> Option<Joining> {
    let nodes = plan.nodes.max(1);
    let all_blocks = plan.capacity_share * traffic.unique_blocks() as f64;
    let node_blocks = ((all_blocks / f64::from(nodes + 1)) as usize).max(1);
    let fresh = || Some(Cache::new(evict::by_name(plan.policy, traffic.seed.unwrap_or(0))?, node_blocks));
    let fleet = || (0..nodes).map(|_| fresh()).collect::<Option<Vec<Cache>>>();
    let mut fleets = [Fleet::of(fleet()?, false), Fleet::of(fleet()?, true)];
    let joins = (traffic.all().len() as f64 * JOIN_AT) as usize;
    let mut sessions = Sessions::default();
    let mut first: Vec<First> =
        plan.first.iter().map(|&first| First { first, requests: 0, blind: 0.0, told: 0.0 }).collect();
    for (at, request) in traffic.all().iter().enumerate() {
        if at == joins {
            for fleet in &mut fleets {
                fleet.nodes.push(fresh()?);
                fleet.tell(request.arrival_us);
            }
        }
        let session = sessions.of(request);
        fleets.iter_mut().for_each(|fleet| fleet.serve(session, request));
        let outcomes = fleets.each_ref().map(|fleet| fleet.joiner(nodes));
        let [Some(blind), Some(told)] = outcomes else { continue };
        for row in first.iter_mut().filter(|row| blind.requests <= row.first) {
            (row.requests, row.blind, row.told) = (blind.requests, blind.hit_rate(), told.hit_rate());
        }
    }
    Some(Joining {
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

struct Fleet {
    nodes: Vec<Cache>,
    tells: bool,
    told_us: u64,
}

impl Fleet {
    fn of(nodes: Vec<Cache>, tells: bool) -> Fleet {
        Fleet { nodes, tells, told_us: 0 }
    }

    fn serve(&mut self, session: u64, request: &Request) {
        if request.arrival_us >= self.told_us.saturating_add(TELL_EVERY_US) {
            self.tell(request.arrival_us);
        }
        // Rendezvous: of those there were, each keeps the sessions that do not go to the one that joins.
        let weight = |node: usize| mixed(session ^ (node as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let node = (0..self.nodes.len()).max_by_key(|&node| weight(node));
        if let Some(node) = node {
            self.nodes[node].serve(request);
        }
    }

    /// Everybody is told what all saw.
    fn tell(&mut self, now_us: u64) {
        self.told_us = now_us;
        if !self.tells {
            return;
        }
        let mut all = Statistics::default();
        for node in &mut self.nodes {
            all.merge_at_most(&node.statistics(Timestamp(now_us)).in_requests(), NODE_REQUESTS);
        }
        for node in &mut self.nodes {
            node.inform(&all, Timestamp(now_us));
        }
    }

    fn joiner(&self, nodes: u32) -> Option<Outcome> {
        self.nodes.get(nodes as usize).map(Cache::outcome)
    }

    fn hit_rate(&self) -> f64 {
        let outcomes = self.nodes.iter().map(Cache::outcome);
        let (hits, asked) = outcomes.fold((0, 0), |(hits, asked), outcome| {
            (hits + outcome.block_hits, asked + outcome.block_accesses)
        });
        if asked == 0 { 0.0 } else { hits as f64 / asked as f64 }
    }
}

/// Which session a request is of: that which brought the deepest block of its prefix that was there, unless it is a
/// first turn.
#[derive(Default)]
struct Sessions {
    by_block: IdMap<u64>,
    count: u64,
}

impl Sessions {
    fn of(&mut self, request: &Request) -> u64 {
        let known = request.blocks.iter().map_while(|block| self.by_block.get(block)).last().copied();
        let session = known.filter(|_| request.category.turn > 1).unwrap_or_else(|| {
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
    use crate::generate::{Kind, Spec};

    #[test]
    fn both_fleets_are_the_same_where_the_policy_does_not_learn() {
        let traffic = Traffic::generated(Spec { block_tokens: 64, ..Spec::new(Kind::Business, 1, 600) });
        let plan = Plan { policy: "lru", nodes: 2, capacity_share: 0.02, first: &[20, 1_000_000] };
        let joining = join(&traffic, &plan).unwrap();
        assert!(joining.fleet[0] > 0.0 && joining.fleet[0] == joining.fleet[1]);
        assert!(joining.first.iter().all(|first| first.blind == first.told));
        assert_eq!(joining.first[0].requests, 20);
        let rest = joining.first[1].requests;
        assert!((50..200).contains(&rest), "a third of 300, not {rest}");
        assert_eq!(join(&traffic, &Plan { policy: "clairvoyant", ..plan }), None);
    }

    /// The seeds were not chosen: they are those that `kvfleet trace joins` runs, whose rows are in docs/adr/0065. One alone says little.
    #[test]
    fn who_is_told_hits_more_at_first_where_much_is_asked_for_once() {
        let gain = |seed| {
            let spec = Spec { block_tokens: 64, ..Spec::new(Kind::Business, seed, 10_000) };
            let plan = Plan { policy: evict::DEFAULT, nodes: 4, capacity_share: 0.005, first: &[500] };
            let First { blind, told, .. } = join(&Traffic::generated(spec), &plan).unwrap().first[0];
            told - blind
        };
        let gains = [1, 2].map(gain);
        assert!(gains.iter().sum::<f64>() > 0.0, "seeds 1 and 2: {gains:?}");
    }

    #[test]
    fn a_session_stays_together_and_who_begins_anew_is_another() {
        let request = |turn: u8, blocks: &[u64]| {
            let mut request = Traffic::generated(Spec::new(Kind::Consumer, 1, 1)).all()[0].clone();
            (request.category.turn, request.blocks) = (turn, blocks.to_vec());
            request
        };
        let mut sessions = Sessions::default();
        let first = sessions.of(&request(1, &[1, 2]));
        let other = sessions.of(&request(1, &[1, 3]));
        assert_ne!(first, other);
        assert_eq!(sessions.of(&request(2, &[1, 2, 4])), first);
        assert_eq!(sessions.of(&request(2, &[1, 3, 5])), other);
        assert_eq!(sessions.of(&request(3, &[1, 2, 4, 6])), first);
    }
}
