//! One of the indexes that are compared: how it is filled, emptied and asked, in its own words.
//!
//! Not here: what is timed and how often (`index.rs`, `lookups.rs`). Events are turned into what a side takes
//! before the clock starts, so that only the index works while it runs.

mod chain_index;
mod crtc;
mod ours;

use std::collections::BTreeMap;
use std::ops::Range;

use benches::Spent;

pub(crate) use chain_index::SmgChainIndex;
pub(crate) use crtc::DynamoCrtc;
pub(crate) use ours::Ours;

use crate::chains::Chains;
use crate::events::{Action, Event};

/// Leading blocks of a prompt that each node holds; nodes without any are left out.
pub(crate) type Overlaps = BTreeMap<u32, u32>;

/// An index.
pub(crate) trait Side: Sized + Sync {
    /// As rows call it.
    const NAME: &'static str;
    /// What a prompt consists of.
    type Hash: Copy + Send + Sync;

    /// An empty index that `threads` threads are going to fill.
    fn empty(threads: usize) -> anyhow::Result<Self>;

    /// Applies events, in order for each node, and says what it took.
    fn apply(&mut self, chains: &Chains, action: Action, events: &[Event]) -> anyhow::Result<Spent>;

    /// Appends blocks of a chain as this side wants them in a prompt.
    fn append_prompt(chains: &Chains, chain: u32, blocks: Range<usize>, prompt: &mut Vec<Self::Hash>);

    /// Blocks of a prompt that comes as tokens.
    fn hash(&self, tokens: &[u32]) -> Vec<Self::Hash>;

    /// Who holds how much of the prompt, in the form the side likes best; answers how many do.
    fn lookup(&self, prompt: &[Self::Hash]) -> usize;

    /// The same in one form for all sides, however long it takes.
    fn overlaps(&self, prompt: &[Self::Hash]) -> Overlaps;
}
