//! A naive workload policy: the same queues, and two exponentials of `F(t + life) - F(t)` for every
//! category with a block.
//!
//! Not here: operations that the bench does not call (accesses, fits, held blocks).

use kv_core::evict::workload::Workload;
use kv_core::evict::{BlockKey, BlockTraits};
use kv_core::id::Timestamp;

use super::load::{categories, number};

const NONE: u32 = u32::MAX;

/// One block: its queue neighbours and its traits, contiguous as in the product.
#[derive(Clone, Copy, Default)]
struct Block {
    colder: u32,
    warmer: u32,
    last_use_us: u64,
    offset_blocks: u32,
    category: u16,
}

/// A queue's ends, its head, and its curve.
struct Queue {
    cold: u32,
    warm: u32,
    last_use_us: u64,
    offset_blocks: u32,
    interval_us: f64,
    life_us: f64,
}

pub(super) struct Naive {
    blocks: Vec<Block>,
    queues: Vec<Queue>,
}

impl Naive {
    /// An empty policy with the curves of `taught`.
    pub(super) fn new(taught: &Workload) -> Self {
        let queue = |category| {
            let curve = taught.curve(category);
            let (interval_us, life_us) = (curve.interval_us(), curve.life_us());
            Queue { cold: NONE, warm: NONE, last_use_us: 0, offset_blocks: 0, interval_us, life_us }
        };
        Self { blocks: Vec::new(), queues: categories().map(queue).collect() }
    }

    /// The head of the category with the least likely reuse within its life; the deeper block on a
    /// tie.
    pub(super) fn victim(&self, now: Timestamp) -> Option<BlockKey> {
        let mut least = (f64::INFINITY, 0, NONE);
        for queue in self.queues.iter().filter(|queue| queue.cold != NONE) {
            let within = |time_us: f64| 1.0 - (-time_us / queue.interval_us).exp();
            let idle_us = (now.0 - queue.last_use_us) as f64;
            let chance = within(idle_us + queue.life_us) - within(idle_us);
            if chance < least.0 || (chance == least.0 && queue.offset_blocks > least.1) {
                least = (chance, queue.offset_blocks, queue.cold);
            }
        }
        (least.2 != NONE).then_some(BlockKey(least.2))
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        let Block { colder, warmer, category, .. } = self.blocks[key.0 as usize];
        let queue = &mut self.queues[usize::from(category)];
        match colder {
            NONE => queue.cold = warmer,
            colder => self.blocks[colder as usize].warmer = warmer,
        }
        match warmer {
            NONE => queue.warm = colder,
            warmer => self.blocks[warmer as usize].colder = colder,
        }
        if let Some(head) = self.blocks.get(queue.cold as usize) {
            (queue.last_use_us, queue.offset_blocks) = (head.last_use_us, head.offset_blocks);
        }
    }

    /// Appends a block to its queue; queues are FIFO.
    pub(super) fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        let category = number(traits.category);
        let at = key.0 as usize;
        if at >= self.blocks.len() {
            self.blocks.resize(at + 1, Block::default());
        }
        let queue = &mut self.queues[category];
        self.blocks[at] = Block {
            colder: queue.warm,
            warmer: NONE,
            last_use_us: now.0,
            offset_blocks: traits.offset_blocks,
            category: category as u16,
        };
        match queue.warm {
            NONE => {
                queue.cold = key.0;
                (queue.last_use_us, queue.offset_blocks) = (now.0, traits.offset_blocks);
            }
            warm => self.blocks[warm as usize].warmer = key.0,
        }
        queue.warm = key.0;
    }
}
