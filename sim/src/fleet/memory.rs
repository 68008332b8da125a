//! GPU memory of an engine: blocks of running requests, and cached blocks of earlier ones, evicted
//! least recently used first.
//!
//! An admitted request reserves memory for its prompt and its whole output, so that none is
//! preempted. Blocks of its prompt stay cached until their memory is needed. Not here: reports to
//! routers and their delay (`mod.rs`).

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::{Change, DropCause};
use kv_core::tier::ChangeLog;

/// GPU memory of one instance.
pub(super) struct GpuMemory {
    block_tokens: u32,
    capacity_blocks: usize,
    /// Whether prompt blocks stay cached after their request.
    keeps_prompts: bool,
    /// Prompt blocks of every request of the trace.
    prompts: Arc<[Arc<[BlockHash]>]>,
    resident: HashMap<BlockHash, ResidentBlock>,
    /// Unused blocks by last use.
    idle: BTreeMap<u64, BlockHash>,
    /// Reservations by request.
    running: HashMap<usize, RunningRequest>,
    taken_blocks: usize,
    clock: u64,
    changes: ChangeLog,
}

#[derive(Clone, Copy)]
struct ResidentBlock {
    users: u32,
    /// Last use, the key in `idle` while `users` is 0.
    last_used: u64,
}

#[derive(Clone, Copy)]
struct RunningRequest {
    /// Leading prompt blocks that the request references.
    held_blocks: usize,
    /// Reserved blocks without a hash: prompt blocks not computed yet, and output.
    unnamed_blocks: usize,
}

impl GpuMemory {
    pub(super) fn new(
        block_tokens: u32,
        capacity_blocks: usize,
        prompts: Arc<[Arc<[BlockHash]>]>,
    ) -> GpuMemory {
        GpuMemory {
            block_tokens,
            capacity_blocks,
            keeps_prompts: true,
            prompts,
            resident: HashMap::new(),
            idle: BTreeMap::new(),
            running: HashMap::new(),
            taken_blocks: 0,
            clock: 0,
            changes: ChangeLog::default(),
        }
    }

    /// Memory that keeps no blocks after a request.
    pub(super) fn without_prefix_cache(self) -> GpuMemory {
        GpuMemory { keeps_prompts: false, ..self }
    }

    /// A copy without the pending changes.
    pub(super) fn snapshot(&self) -> GpuMemory {
        GpuMemory {
            prompts: Arc::clone(&self.prompts),
            resident: self.resident.clone(),
            idle: self.idle.clone(),
            running: self.running.clone(),
            changes: ChangeLog::default(),
            ..*self
        }
    }

    /// Share of the memory reserved by running requests, 0 to 1.
    pub(super) fn used_share(&self) -> f64 {
        (self.taken_blocks - self.idle.len()) as f64 / self.capacity_blocks.max(1) as f64
    }

    /// Capacity, and reservations of running requests, in tokens.
    pub(super) fn tokens(&self) -> (u64, u64) {
        let tokens = |blocks: usize| (blocks as u64).saturating_mul(self.block_tokens.into());
        (tokens(self.capacity_blocks), tokens(self.taken_blocks - self.idle.len()))
    }

    /// Reserves memory for a request; returns the cached leading tokens of its prompt, or `None`
    /// while memory is short.
    pub(super) fn admit(&mut self, nth: usize, input_tokens: u32, output_tokens: u32) -> Option<u32> {
        let prompts = Arc::clone(&self.prompts);
        let blocks = &prompts[nth];
        let held = blocks.iter().take_while(|block| self.resident.contains_key(*block)).count();
        let all =
            (u64::from(input_tokens) + u64::from(output_tokens)).div_ceil(self.block_tokens.into()) as usize;
        let unnamed_blocks = all.saturating_sub(held);
        blocks[..held].iter().for_each(|block| self.hold(block));
        let free = self.capacity_blocks - self.taken_blocks;
        // A request larger than the memory runs alone, as if it fitted.
        let fits = free + self.idle.len() >= unnamed_blocks;
        if !fits && !self.running.is_empty() {
            blocks[..held].iter().for_each(|block| self.release(block));
            return None;
        }
        for _ in 0..unnamed_blocks.saturating_sub(free) {
            let Some((_, block)) = self.idle.pop_first() else { break };
            self.resident.remove(&block);
            self.taken_blocks -= 1;
            self.changes.dropped(block, Tier::Gpu, DropCause::Capacity);
        }
        let unnamed_blocks = unnamed_blocks.min(self.capacity_blocks - self.taken_blocks);
        self.taken_blocks += unnamed_blocks;
        self.running.insert(nth, RunningRequest { held_blocks: held, unnamed_blocks });
        Some((held as u32 * self.block_tokens).min(input_tokens))
    }

    /// The prompt of a request is computed, so its blocks get their hashes.
    pub(super) fn on_computed(&mut self, nth: usize) {
        if !self.keeps_prompts {
            return;
        }
        let prompts = Arc::clone(&self.prompts);
        let blocks = &prompts[nth];
        let Some(mut running) = self.running.remove(&nth) else { return };
        for at in running.held_blocks..blocks.len() {
            match self.resident.entry(blocks[at]) {
                // Another request computed the block meanwhile; that copy stays.
                Entry::Occupied(_) => self.hold(&blocks[at]),
                Entry::Vacant(free) if running.unnamed_blocks > 0 => {
                    running.unnamed_blocks -= 1;
                    free.insert(ResidentBlock { users: 1, last_used: 0 });
                    self.changes.stored(
                        at.checked_sub(1).map(|before| blocks[before]),
                        blocks[at],
                        Tier::Gpu,
                    );
                }
                Entry::Vacant(_) => break,
            }
            running.held_blocks = at + 1;
        }
        self.running.insert(nth, running);
    }

    /// Releases the memory of a finished request.
    pub(super) fn on_end(&mut self, nth: usize) {
        let Some(running) = self.running.remove(&nth) else { return };
        let prompts = Arc::clone(&self.prompts);
        // In reverse order, so that the last block is evicted first.
        prompts[nth][..running.held_blocks].iter().rev().for_each(|block| self.release(block));
        self.taken_blocks -= running.unnamed_blocks;
    }

    fn hold(&mut self, block: &BlockHash) {
        if let Some(resident) = self.resident.get_mut(block) {
            if resident.users == 0 {
                self.idle.remove(&resident.last_used);
            }
            resident.users += 1;
        }
    }

    fn release(&mut self, block: &BlockHash) {
        if let Some(resident) = self.resident.get_mut(block) {
            resident.users -= 1;
            if resident.users == 0 {
                self.clock += 1;
                resident.last_used = self.clock;
                self.idle.insert(self.clock, *block);
            }
        }
    }

    /// Changes since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        self.changes.take()
    }
}
