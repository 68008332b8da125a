//! The cost of memory alone: one random slot per block, read or written, without any decision.
//!
//! Not here: an index. This table finds no holders; it is the lower bound of any per-block lookup.

use kv_core::id::BlockHash;

use super::workload::Workload;

pub(super) struct TouchTable {
    /// A power of two of slots, at least as many as distinct blocks.
    slots: Vec<u128>,
}

impl TouchTable {
    pub(super) fn filled(workload: &Workload) -> Self {
        let mut table = Self { slots: vec![0; workload.stored_blocks().next_power_of_two() as usize] };
        for (node, run) in workload.runs() {
            run.iter().for_each(|&hash| table.write(u128::from(node.0), hash));
        }
        table
    }

    fn write(&mut self, value: u128, hash: BlockHash) {
        let place = self.place(hash);
        self.slots[place] ^= value;
    }

    pub(super) fn sum(&self, hashes: &[BlockHash]) -> u128 {
        hashes.iter().fold(0, |sum, &hash| sum ^ self.slots[self.place(hash)])
    }

    fn place(&self, hash: BlockHash) -> usize {
        hash.words().first as usize & (self.slots.len() - 1)
    }
}
