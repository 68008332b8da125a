//! Interface of the compared indexes: fill, empty and look up in their own terms.
//!
//! Not here: the measurements (`index.rs`, `lookups.rs`). Events are converted before the clock
//! starts, so that only the index works while it runs.

mod chain_index;
mod crtc;
mod kvfleet_index;

use std::collections::BTreeMap;
use std::ops::Range;

use benches::TimeSpent;

pub(crate) use chain_index::SmgChainIndex;
pub(crate) use crtc::DynamoCrtc;
pub(crate) use kvfleet_index::KvfleetIndex;

use crate::chains::Chains;
use crate::events::{Action, Event};

/// Leading blocks of a prompt per node; nodes without any are absent.
pub(crate) type Overlaps = BTreeMap<u32, u32>;

/// An index.
pub(crate) trait IndexSide: Sized + Sync {
    /// Name in the rows.
    const NAME: &'static str;
    /// Element of a prompt.
    type Hash: Copy + Send + Sync;

    /// An empty index that `threads` threads will fill.
    fn empty(threads: usize) -> anyhow::Result<Self>;

    /// Applies events, in order for each node, and returns the time spent.
    fn apply(&mut self, chains: &Chains, action: Action, events: &[Event]) -> anyhow::Result<TimeSpent>;

    /// Appends blocks of a chain in this side's prompt form.
    fn append_prompt(chains: &Chains, chain: u32, blocks: Range<usize>, prompt: &mut Vec<Self::Hash>);

    /// Block hashes of a token prompt.
    fn hash(&self, tokens: &[u32]) -> Vec<Self::Hash>;

    /// Looks the prompt up in the side's fastest form; returns the number of holders.
    fn lookup(&self, prompt: &[Self::Hash]) -> usize;

    /// The same result in a common form; not timed.
    fn overlaps(&self, prompt: &[Self::Hash]) -> Overlaps;
}
