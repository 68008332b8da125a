//! Queues of the actions that the caller will run next: drops, and one queue per kind of move.
//!
//! Not here: which move a block needs (`moves.rs`).

use std::collections::VecDeque;

use super::moves::Action;
use crate::evict::BlockKey;

/// Queue of pending moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MoveQueue {
    /// To DRAM, for a waiting reader.
    Promotes,
    /// To SSD.
    Demotes,
    /// To DRAM, ahead of a queued request.
    Prefetches,
    /// From GPU to DRAM, for a waiting reader.
    GpuReads,
    /// From GPU to DRAM, because the block leaves the GPU.
    GpuReadBacks,
    /// To GPU.
    GpuPromotions,
}

/// Actions that are not handed out yet.
#[derive(Debug, Default)]
pub(super) struct ActionQueues {
    drops: VecDeque<Action>,
    promotes: VecDeque<BlockKey>,
    demotes: VecDeque<BlockKey>,
    prefetches: VecDeque<BlockKey>,
    gpu_reads: VecDeque<BlockKey>,
    gpu_read_backs: VecDeque<BlockKey>,
    gpu_promotions: VecDeque<BlockKey>,
}

impl ActionQueues {
    pub(super) fn push_drop(&mut self, action: Action) {
        self.drops.push_back(action);
    }

    pub(super) fn pop_drop(&mut self) -> Option<Action> {
        self.drops.pop_front()
    }

    pub(super) fn push(&mut self, line: MoveQueue, key: BlockKey) {
        self.queue_mut(line).push_back(key);
    }

    pub(super) fn pop(&mut self, line: MoveQueue) -> Option<BlockKey> {
        self.queue_mut(line).pop_front()
    }

    /// Removes a block from the prefetch queue, which has at most [`super::PREFETCHES_MAX`] blocks.
    pub(super) fn remove_prefetch(&mut self, key: BlockKey) {
        self.prefetches.retain(|queued| *queued != key);
    }

    /// Blocks queued for SSD. A block that needs no demotion any more counts until it is popped.
    pub(super) fn demotion_count(&self) -> usize {
        self.demotes.len()
    }

    fn queue_mut(&mut self, line: MoveQueue) -> &mut VecDeque<BlockKey> {
        match line {
            MoveQueue::Promotes => &mut self.promotes,
            MoveQueue::Demotes => &mut self.demotes,
            MoveQueue::Prefetches => &mut self.prefetches,
            MoveQueue::GpuReads => &mut self.gpu_reads,
            MoveQueue::GpuReadBacks => &mut self.gpu_read_backs,
            MoveQueue::GpuPromotions => &mut self.gpu_promotions,
        }
    }

    /// The blocks in a queue.
    #[cfg(test)]
    pub(super) fn queued(&self, line: MoveQueue) -> &VecDeque<BlockKey> {
        match line {
            MoveQueue::Promotes => &self.promotes,
            MoveQueue::Demotes => &self.demotes,
            MoveQueue::Prefetches => &self.prefetches,
            MoveQueue::GpuReads => &self.gpu_reads,
            MoveQueue::GpuReadBacks => &self.gpu_read_backs,
            MoveQueue::GpuPromotions => &self.gpu_promotions,
        }
    }
}
