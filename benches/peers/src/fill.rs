//! Fills an index with events and empties it again, with the time each takes and the memory it holds.
//!
//! Not here: lookups (`lookups.rs`).

use std::time::Duration;

use benches::Spent;

use crate::allocated::allocated;
use crate::chains::Chains;
use crate::events::{Action, Event, events};
use crate::side::Side;

/// Events that are turned into a side's own form at a time, before the clock starts: 64 Ki blocks, so
/// that they are still in the cache, as events that have just been decoded are.
const READY_EVENTS: usize = 4_096;

/// What filling one index once and emptying it came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    /// Blocks stored a CPU-second, in millions.
    pub(crate) stored_cpu: f64,
    /// Blocks stored a second, in millions.
    pub(crate) stored_wall: f64,
    /// Blocks removed a CPU-second, in millions.
    pub(crate) removed_cpu: f64,
    /// Bytes held for each pair of node and block, when full.
    pub(crate) entry_bytes: f64,
}

/// The events of one shape, in order.
pub(crate) struct Replay<'chains> {
    chains: &'chains Chains,
    store: Vec<Event>,
    remove: Vec<Event>,
    threads: usize,
}

impl<'chains> Replay<'chains> {
    pub(crate) fn new(chains: &'chains Chains, threads: usize) -> Self {
        let events = |action| events(chains.shape, action);
        Self { chains, store: events(Action::Store), remove: events(Action::Remove), threads }
    }

    /// Fills an index and empties it.
    pub(crate) fn cycle<S: Side>(&self) -> anyhow::Result<Cycle> {
        let (mut side, stored, bytes) = self.filled::<S>()?;
        let removed = self.apply(&mut side, Action::Remove)?;
        let blocks = self.chains.shape.entries();
        Ok(Cycle {
            stored_cpu: stored.per_cpu_s(blocks) / 1e6,
            stored_wall: stored.per_wall_s(blocks) / 1e6,
            removed_cpu: removed.per_cpu_s(blocks) / 1e6,
            entry_bytes: bytes as f64 / blocks as f64,
        })
    }

    /// A full index, what filling it took, and the bytes it holds.
    pub(crate) fn filled<S: Side>(&self) -> anyhow::Result<(S, Spent, u64)> {
        let before = allocated()?;
        let mut side = S::empty(self.threads)?;
        let spent = self.apply(&mut side, Action::Store)?;
        Ok((side, spent, allocated()?.saturating_sub(before)))
    }

    fn apply<S: Side>(&self, side: &mut S, action: Action) -> anyhow::Result<Spent> {
        let events = if action == Action::Store { &self.store } else { &self.remove };
        let mut spent = Spent { wall: Duration::ZERO, cpu: Duration::ZERO };
        for events in events.chunks(READY_EVENTS) {
            spent += side.apply(self.chains, action, events)?;
        }
        Ok(spent)
    }
}
