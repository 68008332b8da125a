//! Collects the residency changes of events.
//!
//! Not here: the effect of an event (`aliases.rs`), and reporting (`reporter.rs`).

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::Change;

/// Residency changes in order.
#[derive(Debug, Default)]
pub(in crate::engines) struct Changes {
    list: Vec<Change>,
    /// Number of blocks in the list.
    blocks: usize,
}

impl Changes {
    /// Number of collected blocks.
    pub(in crate::engines) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Takes the collected changes.
    pub(in crate::engines) fn take(&mut self) -> Vec<Change> {
        self.blocks = 0;
        std::mem::take(&mut self.list)
    }

    #[inline]
    pub(super) fn push(&mut self, is_stored: bool, before: Option<BlockHash>, new: &[BlockHash]) {
        self.blocks += new.len();
        match self.list.last_mut() {
            _ if new.is_empty() => {}
            Some(Change::Stored { blocks, .. })
                if is_stored && before.is_some() && blocks.last().copied() == before =>
            {
                blocks.extend_from_slice(new);
            }
            Some(Change::Dropped { blocks, .. }) if !is_stored => blocks.extend_from_slice(new),
            _ => self.begin(is_stored, before, new),
        }
    }

    fn begin(&mut self, is_stored: bool, parent: Option<BlockHash>, new: &[BlockHash]) {
        let blocks = new.into();
        self.list.push(match is_stored {
            true => Change::Stored { parent, blocks, tier: Tier::Gpu },
            false => Change::Dropped { blocks, tier: Tier::Gpu, cause: Default::default() },
        });
    }

    /// Replaces all changes with `Cleared`.
    pub(super) fn clear(&mut self) {
        (self.list, self.blocks) = (vec![Change::Cleared], 1);
    }
}
