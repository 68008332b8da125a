//! Turn statistics of conversations: number of turns, probability of a next one, mix of types.
//!
//! A conversation with `k` turns has one request of every turn up to `k`, so counting requests per
//! turn is enough and needs no memory per conversation. Conversations cut off by the ends of the
//! trace bias this slightly towards fewer turns. Not here: reuse of blocks ([`super`]).

use super::{KindShare, share};
use kv_core::id::RequestKind;
use serde::Serialize;

/// How many turns conversations have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TurnStats {
    /// Conversations seen from their first turn.
    pub conversations: u64,
    /// Half of the conversations have at most this many.
    pub p50: u32,
    /// Nine in ten have at most this many.
    pub p90: u32,
    /// The longest.
    pub max: u32,
    /// Share of first turns that are followed by a second.
    pub next_after_first: f64,
    /// Share of later turns that are followed by another.
    pub next_after_later: f64,
}

/// Requests by type and turn. Turns above the limit share the last slot.
#[derive(Default)]
pub(super) struct TurnCounts {
    /// Per kind, requests at turn 1, 2, … in order.
    at_turn: [Vec<u64>; RequestKind::ALL.len()],
    unknown: [u64; RequestKind::ALL.len()],
}

/// Limit of separately counted turns: the longest published conversation has 232.
const TURNS_COUNTED_MAX: u32 = 4096;

impl TurnCounts {
    pub(super) fn add(&mut self, kind: RequestKind, turn: u32) {
        let Some(at) = turn.min(TURNS_COUNTED_MAX).checked_sub(1) else {
            self.unknown[kind as usize] += 1;
            return;
        };
        let counts = &mut self.at_turn[kind as usize];
        counts.resize(counts.len().max(at as usize + 1), 0);
        counts[at as usize] += 1;
    }

    /// Requests at turn 1, 2, … of all types.
    fn totals(&self) -> Vec<u64> {
        let longest = self.at_turn.iter().map(Vec::len).max().unwrap_or(0);
        let at = |turn: usize| self.at_turn.iter().filter_map(|counts| counts.get(turn)).sum();
        (0..longest).map(at).collect()
    }

    pub(super) fn summary(&self) -> Option<TurnStats> {
        let totals = self.totals();
        let &conversations = totals.first().filter(|&&count| count > 0)?;
        let quantile = |above: f64| {
            // The first turn that at most this share of the conversations exceeds.
            let few = |next: &u64| *next as f64 <= above * conversations as f64;
            totals.iter().skip(1).position(few).map_or(totals.len(), |at| at + 1) as u32
        };
        let from = |turn: usize| totals.iter().skip(turn - 1).sum::<u64>();
        Some(TurnStats {
            conversations,
            p50: quantile(0.5),
            p90: quantile(0.1),
            max: totals.len() as u32,
            next_after_first: share(totals.get(1).copied().unwrap_or(0), conversations),
            next_after_later: share(from(3), from(2)),
        })
    }

    pub(super) fn kinds(&self, hits: &[u64; RequestKind::ALL.len()]) -> Vec<KindShare> {
        let of_kind =
            |kind: RequestKind| self.at_turn[kind as usize].iter().sum::<u64>() + self.unknown[kind as usize];
        let requests: u64 = RequestKind::ALL.into_iter().map(of_kind).sum();
        let all_hits: u64 = hits.iter().sum();
        let row = |kind: RequestKind| {
            let turn = |at: usize| self.at_turn[kind as usize].get(at).copied().unwrap_or(0);
            KindShare {
                kind: kind.name(),
                requests: of_kind(kind),
                share: share(of_kind(kind), requests),
                multi_turn: share(turn(1), turn(0)),
                share_of_hits: share(hits[kind as usize], all_hits),
            }
        };
        RequestKind::ALL.into_iter().map(row).filter(|row| row.requests > 0).collect()
    }
}
