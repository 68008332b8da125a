//! What an engine has in GPU memory: blocks of requests that run, and of those that ran, least recently used first to leave.
//!
//! A request takes room for its prompt and all that it will say when it is admitted, so that none is stopped half way. Blocks of its
//! prompt stay behind it until their room is wanted. Not here: what a router hears of it, and when (`mod.rs`).

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::{Change, DropCause};
use kv_core::tier::ChangeLog;

/// GPU memory of one instance.
pub(super) struct Memory {
    block_tokens: u32,
    capacity_blocks: usize,
    /// Whether blocks of prompts stay behind their requests, to be found by others.
    keeps: bool,
    /// Of every request of the trace.
    prompts: Arc<[Arc<[BlockHash]>]>,
    resident: HashMap<BlockHash, Resident>,
    /// Unused ones, by when they were used last.
    idle: BTreeMap<u64, BlockHash>,
    /// By request: whole blocks of its prompt, and blocks besides.
    running: HashMap<usize, Running>,
    taken_blocks: usize,
    clock: u64,
    changes: ChangeLog,
}

#[derive(Clone, Copy)]
struct Resident {
    users: u32,
    /// In `idle`, while nobody uses it.
    used: u64,
}

#[derive(Clone, Copy)]
struct Running {
    /// Of the prompt, those that were there when it came.
    held: usize,
    /// Room that is not of blocks with a name: what is computed, and what is said.
    unnamed_blocks: usize,
}

impl Memory {
    pub(super) fn new(block_tokens: u32, capacity_blocks: usize, prompts: Arc<[Arc<[BlockHash]>]>) -> Memory {
        Memory {
            block_tokens,
            capacity_blocks,
            keeps: true,
            prompts,
            resident: HashMap::new(),
            idle: BTreeMap::new(),
            running: HashMap::new(),
            taken_blocks: 0,
            clock: 0,
            changes: ChangeLog::default(),
        }
    }

    /// The same where nothing stays behind a request.
    pub(super) fn keeping_nothing(self) -> Memory {
        Memory { keeps: false, ..self }
    }

    /// A copy; what came and went before it is left out.
    pub(super) fn copy(&self) -> Memory {
        Memory {
            prompts: Arc::clone(&self.prompts),
            resident: self.resident.clone(),
            idle: self.idle.clone(),
            running: self.running.clone(),
            changes: ChangeLog::default(),
            ..*self
        }
    }

    /// Share of it that requests which run have taken, 0 to 1.
    pub(super) fn in_use(&self) -> f64 {
        (self.taken_blocks - self.idle.len()) as f64 / self.capacity_blocks.max(1) as f64
    }

    /// Tokens that it holds at most, and those of requests that run.
    pub(super) fn tokens(&self) -> (u64, u64) {
        let tokens = |blocks: usize| (blocks as u64).saturating_mul(self.block_tokens.into());
        (tokens(self.capacity_blocks), tokens(self.taken_blocks - self.idle.len()))
    }

    /// Takes room for a request; answers how many leading tokens of its prompt are there, or nothing while there is no room.
    pub(super) fn admit(&mut self, nth: usize, input_tokens: u32, output_tokens: u32) -> Option<u32> {
        let prompts = Arc::clone(&self.prompts);
        let blocks = &prompts[nth];
        let held = blocks.iter().take_while(|block| self.resident.contains_key(*block)).count();
        let all =
            (u64::from(input_tokens) + u64::from(output_tokens)).div_ceil(self.block_tokens.into()) as usize;
        let unnamed_blocks = all.saturating_sub(held);
        blocks[..held].iter().for_each(|block| self.hold(block));
        let free = self.capacity_blocks - self.taken_blocks;
        // One that is larger than all of it runs alone, as if it fitted.
        let fits = free + self.idle.len() >= unnamed_blocks;
        if !fits && !self.running.is_empty() {
            blocks[..held].iter().for_each(|block| self.release(block));
            return None;
        }
        for _ in 0..unnamed_blocks.saturating_sub(free) {
            let Some((_, block)) = self.idle.pop_first() else { break };
            self.resident.remove(&block);
            self.taken_blocks -= 1;
            self.changes.dropped(block, Tier::Gpu, DropCause::Room);
        }
        let unnamed_blocks = unnamed_blocks.min(self.capacity_blocks - self.taken_blocks);
        self.taken_blocks += unnamed_blocks;
        self.running.insert(nth, Running { held, unnamed_blocks });
        Some((held as u32 * self.block_tokens).min(input_tokens))
    }

    /// The prompt of a request is computed: its blocks have names.
    pub(super) fn computed(&mut self, nth: usize) {
        if !self.keeps {
            return;
        }
        let prompts = Arc::clone(&self.prompts);
        let blocks = &prompts[nth];
        let Some(mut running) = self.running.remove(&nth) else { return };
        for at in running.held..blocks.len() {
            match self.resident.entry(blocks[at]) {
                // Another computed it meanwhile; its room is the one that stays.
                Entry::Occupied(_) => self.hold(&blocks[at]),
                Entry::Vacant(free) if running.unnamed_blocks > 0 => {
                    running.unnamed_blocks -= 1;
                    free.insert(Resident { users: 1, used: 0 });
                    self.changes.stored(
                        at.checked_sub(1).map(|before| blocks[before]),
                        blocks[at],
                        Tier::Gpu,
                    );
                }
                Entry::Vacant(_) => break,
            }
            running.held = at + 1;
        }
        self.running.insert(nth, running);
    }

    /// A request is over.
    pub(super) fn ended(&mut self, nth: usize) {
        let Some(running) = self.running.remove(&nth) else { return };
        let prompts = Arc::clone(&self.prompts);
        // From the last to the first, so that the last leaves first.
        prompts[nth][..running.held].iter().rev().for_each(|block| self.release(block));
        self.taken_blocks -= running.unnamed_blocks;
    }

    fn hold(&mut self, block: &BlockHash) {
        if let Some(resident) = self.resident.get_mut(block) {
            if resident.users == 0 {
                self.idle.remove(&resident.used);
            }
            resident.users += 1;
        }
    }

    fn release(&mut self, block: &BlockHash) {
        if let Some(resident) = self.resident.get_mut(block) {
            resident.users -= 1;
            if resident.users == 0 {
                self.clock += 1;
                resident.used = self.clock;
                self.idle.insert(self.clock, *block);
            }
        }
    }

    /// What came and went since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        self.changes.take()
    }
}
