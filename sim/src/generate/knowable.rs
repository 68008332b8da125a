//! An upper bound for policies that do not know the future, even if they knew how the traffic is
//! generated.
//!
//! At every moment each block has an expected rate of use, given the traffic model and the past.
//! Without the future, a tier of `B` blocks cannot expect more hits than the sum of the `B` highest
//! rates. Here a tier holds exactly those at the time of every request, even blocks that it would
//! have to fetch back. So this bound is above the best possible policy, and the difference to `opt`
//! is available only from the future. Not here: recorded traffic, because its model is unknown.

use super::{Session, TraceGenerator, TraceSpec};
use crate::cache::ReplayOutcome;
use std::collections::BTreeMap;

/// A session as known from its requests so far.
struct SeenSession {
    profile: usize,
    turn: u32,
    last_request_us: u64,
    shared: Option<usize>,
    /// Whole blocks that are not shared.
    own_blocks: usize,
}

/// Blocks that are used together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum BlockGroup {
    /// The shared text of this number.
    Shared(usize),
    /// The blocks of this session alone.
    Own(u64),
}

/// Replays the traffic at each capacity, in blocks.
#[must_use]
pub fn simulate_knowable(spec: TraceSpec, capacities_blocks: &[usize]) -> Vec<ReplayOutcome> {
    let mut outcomes = vec![ReplayOutcome::default(); capacities_blocks.len()];
    let mut generator = TraceGenerator::new(spec);
    let mut known: BTreeMap<u64, SeenSession> = BTreeMap::new();
    let mut shared_blocks: BTreeMap<usize, usize> = BTreeMap::new();
    while let Some((number, session)) = generator.next_due() {
        let request = &session.request;
        // A session has the number of its last request.
        let last = request.parent.unwrap_or(number);
        let before = known.get(&last).map_or(0, |session| session.own_blocks);
        let order = by_rate(&generator, &known, &shared_blocks, request.arrival_us);
        let asked = [
            session
                .shared
                .map(|shared| (BlockGroup::Shared(shared), shared_blocks.get(&shared).copied().unwrap_or(0))),
            Some((BlockGroup::Own(last), before)),
        ];
        for (outcome, &capacity) in outcomes.iter_mut().zip(capacities_blocks) {
            let hits = asked.iter().flatten().map(|&(group, blocks)| {
                let ahead =
                    order.iter().take_while(|(_, _, other)| *other != group).map(|(_, blocks, _)| blocks);
                capacity.saturating_sub(ahead.sum()).min(blocks)
            });
            outcome.count(request.blocks.len(), hits.sum());
        }
        let start = session.shared_blocks;
        if let Some(shared) = session.shared {
            shared_blocks.insert(shared, start);
        }
        known.remove(&last);
        known.insert(number, SeenSession::new(&session, start));
    }
    outcomes
}

impl SeenSession {
    fn new(session: &Session, start: usize) -> SeenSession {
        let request = &session.request;
        let whole = (request.input_tokens / request.block_tokens) as usize;
        SeenSession {
            profile: session.profile,
            turn: request.turn,
            last_request_us: request.arrival_us,
            shared: session.shared,
            own_blocks: whole.saturating_sub(start),
        }
    }
}

/// All block groups requested so far with their block counts, the highest rate first. Groups with a
/// rate of zero are skipped.
fn by_rate(
    generator: &TraceGenerator,
    known: &BTreeMap<u64, SeenSession>,
    shared_blocks: &BTreeMap<usize, usize>,
    now_us: u64,
) -> Vec<(f64, usize, BlockGroup)> {
    let mut shared_rates: BTreeMap<usize, f64> =
        shared_blocks.keys().map(|&shared| (shared, generator.shared_starts_per_s(shared))).collect();
    let mut order = Vec::with_capacity(known.len() + shared_blocks.len());
    for (&number, session) in known {
        let age_s = now_us.saturating_sub(session.last_request_us) as f64 / 1e6;
        let rate = generator.model.expected_rate_per_s(session.profile, session.turn, age_s);
        if let Some(shared) = session.shared.and_then(|shared| shared_rates.get_mut(&shared)) {
            *shared += rate;
        }
        order.push((rate, session.own_blocks, BlockGroup::Own(number)));
    }
    order.extend(shared_rates.into_iter().map(|(shared, rate)| {
        (rate, shared_blocks.get(&shared).copied().unwrap_or(0), BlockGroup::Shared(shared))
    }));
    order.retain(|&(rate, blocks, _)| rate > 0.0 && blocks > 0);
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
    order
}
