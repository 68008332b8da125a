//! Fills an index with events and empties it again; measures time and memory.
//!
//! Not here: lookups (`lookups.rs`).

use std::time::Duration;

use benches::TimeSpent;

use crate::allocated::allocated;
use crate::chains::Chains;
use crate::events::{Action, Event, events};
use crate::side::IndexSide;

/// Events that are converted to a side's own form before the clock starts: 64 Ki blocks. They then
/// still lie in the cache, as freshly decoded events do.
const READY_EVENTS: usize = 4_096;

/// Figures of one cycle of filling and emptying.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    /// Blocks stored per CPU-second, in millions.
    pub(crate) stored_cpu: f64,
    /// Blocks stored per second, in millions.
    pub(crate) stored_wall: f64,
    /// Blocks removed per CPU-second, in millions.
    pub(crate) removed_cpu: f64,
    /// Bytes per pair of node and block in a full index.
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
    pub(crate) fn cycle<S: IndexSide>(&self) -> anyhow::Result<Cycle> {
        let (mut side, stored, bytes) = self.fill::<S>()?;
        let removed = self.apply(&mut side, Action::Remove)?;
        let blocks = self.chains.shape.entries();
        Ok(Cycle {
            stored_cpu: stored.per_cpu_s(blocks) / 1e6,
            stored_wall: stored.per_wall_s(blocks) / 1e6,
            removed_cpu: removed.per_cpu_s(blocks) / 1e6,
            entry_bytes: bytes as f64 / blocks as f64,
        })
    }

    /// A full index, the time to fill it, and its bytes.
    pub(crate) fn fill<S: IndexSide>(&self) -> anyhow::Result<(S, TimeSpent, u64)> {
        let before = allocated()?;
        let mut side = S::empty(self.threads)?;
        let spent = self.apply(&mut side, Action::Store)?;
        Ok((side, spent, allocated()?.saturating_sub(before)))
    }

    fn apply<S: IndexSide>(&self, side: &mut S, action: Action) -> anyhow::Result<TimeSpent> {
        let events = if action == Action::Store { &self.store } else { &self.remove };
        let mut spent = TimeSpent { wall: Duration::ZERO, cpu: Duration::ZERO };
        for events in events.chunks(READY_EVENTS) {
            spent += side.apply(self.chains, action, events)?;
        }
        Ok(spent)
    }
}
