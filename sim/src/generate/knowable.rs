//! The bound no policy passes that does not know the future, even if it knew how its traffic is made.
//!
//! At every moment each block has a rate at which it is expected to be used, given how traffic is made and what has
//! happened so far. Whoever does not know the future expects no more hits from a tier of `B` blocks than the `B` highest
//! rates come to; here a tier holds those at the time of every request, also blocks that it would have had to fetch
//! back. So this is above the best policy there can be, and `opt` less this is what only the future says.
//! Not here: recorded traffic, of which nobody knows how it is made.

use super::{Generator, Session, Spec};
use crate::cache::Outcome;
use std::collections::BTreeMap;

/// A session as who has seen it so far knows it.
struct Known {
    profile: usize,
    turn: u32,
    asked_us: u64,
    shared: Option<usize>,
    /// Whole blocks that are its own.
    own_blocks: usize,
}

/// Blocks that are used together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    /// The shared start of this number.
    Shared(usize),
    /// What this session has for itself.
    Own(u64),
}

/// Replays the traffic at each capacity, in blocks.
#[must_use]
pub fn simulate_knowable(spec: Spec, capacities_blocks: &[usize]) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::default(); capacities_blocks.len()];
    let mut generator = Generator::new(spec);
    let mut known: BTreeMap<u64, Known> = BTreeMap::new();
    let mut shared_blocks: BTreeMap<usize, usize> = BTreeMap::new();
    while let Some((number, session)) = generator.step() {
        let request = &session.request;
        // A session goes by the number of its last request.
        let last = request.parent.unwrap_or(number);
        let before = known.get(&last).map_or(0, |session| session.own_blocks);
        let order = by_rate(&generator, &known, &shared_blocks, request.arrival_us);
        let asked = [
            session
                .shared
                .map(|shared| (Group::Shared(shared), shared_blocks.get(&shared).copied().unwrap_or(0))),
            Some((Group::Own(last), before)),
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
        known.insert(number, Known::of(&session, start));
    }
    outcomes
}

impl Known {
    fn of(session: &Session, start: usize) -> Known {
        let request = &session.request;
        let whole = (request.input_tokens / request.block_tokens) as usize;
        Known {
            profile: session.profile,
            turn: request.turn,
            asked_us: request.arrival_us,
            shared: session.shared,
            own_blocks: whole.saturating_sub(start),
        }
    }
}

/// All that was ever asked for with its number of blocks, the highest rate first. What has a rate of nothing is left out.
fn by_rate(
    generator: &Generator,
    known: &BTreeMap<u64, Known>,
    shared_blocks: &BTreeMap<usize, usize>,
    now_us: u64,
) -> Vec<(f64, usize, Group)> {
    let mut shared_rates: BTreeMap<usize, f64> =
        shared_blocks.keys().map(|&shared| (shared, generator.opened_per_s(shared))).collect();
    let mut order = Vec::with_capacity(known.len() + shared_blocks.len());
    for (&number, session) in known {
        let age_s = now_us.saturating_sub(session.asked_us) as f64 / 1e6;
        let rate = generator.model.next_per_s(session.profile, session.turn, age_s);
        if let Some(shared) = session.shared.and_then(|shared| shared_rates.get_mut(&shared)) {
            *shared += rate;
        }
        order.push((rate, session.own_blocks, Group::Own(number)));
    }
    order.extend(shared_rates.into_iter().map(|(shared, rate)| {
        (rate, shared_blocks.get(&shared).copied().unwrap_or(0), Group::Shared(shared))
    }));
    order.retain(|&(rate, blocks, _)| rate > 0.0 && blocks > 0);
    order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
    order
}
