//! Actions out, results in: how bytes follow the places that the book has decided.
//!
//! At most one move per block is in flight. When it ends, the book looks at where the block should be
//! *now*, so a block demoted and wanted back meanwhile costs nothing more.

use std::collections::VecDeque;

use super::book::Book;
use super::numbers::Left;
use super::order::Told;
use crate::evict::BlockKey;
use crate::id::{BlockHash, Generation, Tier, Timestamp};
use crate::index::command::DropCause;

/// Something to do with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the block's DRAM bytes to SSD; then [`Book::on_moved`] to SSD.
    Demote {
        /// The block.
        key: BlockKey,
        /// Its hash, for the medium's header and for logs.
        hash: BlockHash,
    },
    /// Read the block's SSD bytes into DRAM; then [`Book::on_moved`] to DRAM.
    Promote {
        /// The block.
        key: BlockKey,
        /// Its hash, to check what was read.
        hash: BlockHash,
    },
    /// Write the block's DRAM bytes to the GPU; then [`Book::on_moved`] to GPU.
    Lift {
        /// The block.
        key: BlockKey,
        /// Its hash, for logs.
        hash: BlockHash,
    },
    /// Read the block's GPU bytes into DRAM; then [`Book::on_moved`] to DRAM.
    Lower {
        /// The block.
        key: BlockKey,
        /// Its hash, to check what was read.
        hash: BlockHash,
    },
    /// Free the block's DRAM bytes (readers that hold them keep them). Needs no answer.
    DropDram {
        /// The block; its key may be given out again after this.
        key: BlockKey,
    },
    /// Free the block's SSD slot. Needs no answer.
    DropSsd {
        /// The block; its key may be given out again after this.
        key: BlockKey,
        /// Its hash: whoever still waits for its bytes gets none.
        hash: BlockHash,
        /// The weights it is of: there may be another of this hash.
        generation: Generation,
    },
    /// Free the block's GPU memory. Needs no answer.
    DropGpu {
        /// The block; its key may be given out again after this.
        key: BlockKey,
        /// Its hash: whoever still waits for its bytes gets none.
        hash: BlockHash,
        /// The weights it is of: there may be another of this hash.
        generation: Generation,
    },
}

/// Which moves can start now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// A DRAM slot for a promotion is free.
    pub dram: bool,
    /// An SSD slot for a demotion is free.
    pub ssd: bool,
    /// A DRAM slot for a promotion that nobody waits for is free: enough are left for those somebody waits for.
    pub prefetch: bool,
    /// The GPU can read a block for somebody who waits, and a DRAM slot for it is free beside those that loads from SSD
    /// need: a block that keeps its place on the GPU is on no account of DRAM meanwhile.
    pub gpu_read: bool,
    /// The GPU can read a block that nobody waits for, and a DRAM slot for it is free beside those that loads from SSD need.
    pub lower: bool,
    /// The GPU can take a block.
    pub lift: bool,
}

/// Where moves that may start wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// To DRAM, because somebody waits.
    Promotes,
    /// To SSD.
    Demotes,
    /// To DRAM, because somebody will ask.
    Prefetches,
    /// From GPU to DRAM, because somebody waits.
    Reads,
    /// From GPU to DRAM, because it leaves.
    Lowers,
    /// To GPU.
    Lifts,
}

impl Book {
    /// The next thing to do: drops first, then loads (someone waits), then demotions, then loads that nobody waits for
    /// yet; and last what leaves a GPU, and what comes to it.
    pub fn next_action(&mut self, room: Room) -> Option<Action> {
        // What stood in line and is of earlier weights goes instead.
        self.next_drop().or_else(|| self.next_move(room)).or_else(|| self.next_drop())
    }

    fn next_drop(&mut self) -> Option<Action> {
        let action = self.drops.pop_front()?;
        self.on_gpu -= usize::from(matches!(action, Action::DropGpu { .. }));
        Some(action)
    }

    fn next_move(&mut self, room: Room) -> Option<Action> {
        if room.dram
            && let Some(key) = self.next_due(Line::Promotes)
        {
            return self.start(key, Tier::Dram);
        }
        if room.gpu_read
            && let Some(key) = self.next_due(Line::Reads)
        {
            return self.start(key, Tier::Dram);
        }
        if room.ssd
            && let Some(key) = self.next_due(Line::Demotes)
        {
            return self.start(key, Tier::Ssd);
        }
        if room.prefetch
            && let Some(key) = self.next_due(Line::Prefetches)
        {
            return self.start(key, Tier::Dram);
        }
        if room.lower
            && let Some(key) = self.next_due(Line::Lowers)
        {
            return self.start(key, Tier::Dram);
        }
        if room.lift
            && let Some(key) = self.next_due(Line::Lifts)
        {
            return self.start(key, Tier::Gpu);
        }
        None
    }

    fn next_due(&mut self, line: Line) -> Option<BlockKey> {
        loop {
            let key = self.line(line).pop_front()?;
            let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.queued == Some(line)) else {
                continue;
            };
            entry.queued = None;
            if self.drop_if_void(key) {
                continue;
            }
            if self.due_line(key) == Some(line) {
                return Some(key);
            }
            // It changed its mind while it waited: it may have to stand in another line.
            self.enqueue(key);
        }
    }

    fn line(&mut self, line: Line) -> &mut VecDeque<BlockKey> {
        match line {
            Line::Promotes => &mut self.promotes,
            Line::Demotes => &mut self.demotes,
            Line::Prefetches => &mut self.prefetches,
            Line::Reads => &mut self.reads,
            Line::Lowers => &mut self.lowers,
            Line::Lifts => &mut self.lifts,
        }
    }

    /// Where a block stands that needs a move now.
    pub(super) fn due_line(&self, key: BlockKey) -> Option<Line> {
        let to = self.due(key)?;
        let entry = self.slab.get(key)?;
        Some(match to {
            Tier::Ssd => Line::Demotes,
            Tier::Gpu => Line::Lifts,
            Tier::Dram if entry.copies.gpu && entry.awaited => Line::Reads,
            Tier::Dram if entry.copies.gpu => Line::Lowers,
            Tier::Dram if entry.prefetch => Line::Prefetches,
            Tier::Dram => Line::Promotes,
        })
    }

    fn start(&mut self, key: BlockKey, to: Tier) -> Option<Action> {
        let entry = self.slab.get_mut(key)?;
        entry.moving = Some(to);
        let hash = entry.meta.hash;
        Some(match to {
            Tier::Dram if entry.copies.gpu => Action::Lower { key, hash },
            Tier::Dram => Action::Promote { key, hash },
            Tier::Ssd => Action::Demote { key, hash },
            Tier::Gpu => Action::Lift { key, hash },
        })
    }

    /// The move this block needs now, if it can start.
    fn due(&self, key: BlockKey) -> Option<Tier> {
        let entry = self.slab.get(key)?;
        if entry.moving.is_some() || entry.writing {
            return None;
        }
        let place = entry.place?;
        // What leaves the GPU for the SSD goes by way of DRAM.
        let passes = place == Tier::Ssd && !entry.copies.ssd;
        let load = !entry.copies.dram && (entry.awaited || place == Tier::Dram || passes);
        if load && (entry.copies.ssd || entry.copies.gpu) {
            return Some(Tier::Dram);
        }
        (!entry.copies.has(place) && entry.copies.dram).then_some(place)
    }

    fn enqueue(&mut self, key: BlockKey) {
        let Some(line) = self.due_line(key) else { return };
        let Some(entry) = self.slab.get_mut(key) else { return };
        if entry.queued.replace(line) != Some(line) {
            self.line(line).push_back(key);
        }
    }

    /// Takes a block that will not be prefetched out of the line of those that will: that line is as short as
    /// [`super::PREFETCHES_MAX`], and its key may stand for another block soon.
    pub(super) fn leave_prefetches(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.queued == Some(Line::Prefetches))
        else {
            return;
        };
        entry.queued = None;
        self.prefetches.retain(|queued| *queued != key);
    }

    /// A move ended well.
    pub fn on_moved(&mut self, key: BlockKey, to: Tier) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        entry.copies.set(to, true);
        self.on_gpu += usize::from(to == Tier::Gpu);
        self.lifting -= usize::from(to == Tier::Gpu && entry.place == Some(Tier::Gpu));
        if to == Tier::Dram {
            entry.awaited = false;
            self.end_prefetch(key);
        }
        self.settle(key);
    }

    /// A move found no slot after all: nothing is wrong, it stands in line again.
    pub fn on_move_delayed(&mut self, key: BlockKey, to: Tier) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        if !entry.copies.any() && entry.place.is_some() {
            // What was to be moved was lost meanwhile.
            self.count_left(key, Left::Failed);
            return self.drop_block(key, DropCause::Failed);
        }
        self.settle(key);
    }

    /// A move failed. A block that could not be read is gone; one that could not be written stays in
    /// DRAM if there is room and is gone otherwise. One that could not be lifted is as if it left the GPU.
    pub fn on_move_failed(&mut self, key: BlockKey, to: Tier, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(to)) else { return };
        entry.moving = None;
        entry.awaited = false;
        let place = entry.place;
        if to == Tier::Dram {
            self.end_prefetch(key);
        }
        if to == Tier::Dram && place.is_some() {
            self.count_left(key, Left::Failed);
            self.drop_block(key, DropCause::Failed);
        } else if to == Tier::Gpu && place == Some(Tier::Gpu) {
            self.lower(key, Left::Failed, now);
        } else if to == Tier::Ssd && place == Some(Tier::Ssd) {
            self.keep_in_dram(key, now);
        } else {
            self.settle(key);
        }
    }

    /// A load from SSD is not even tried: its device is slow, and whoever waits rather computes the block. It stays there.
    /// One that waiting requests need is no longer taken for one until they say so again, or it would be asked for at once.
    pub fn on_load_refused(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(Tier::Dram)) else {
            return;
        };
        entry.moving = None;
        entry.awaited = false;
        let (hash, was_prefetch) = (entry.meta.hash, entry.prefetch);
        // Its room in DRAM is for a block that comes.
        let goes_back = entry.place == Some(Tier::Dram) && entry.copies.ssd && !entry.copies.dram;
        self.end_prefetch(key);
        if was_prefetch {
            self.unwant(&hash, now);
        }
        if goes_back { self.go_back(key, now) } else { self.settle(key) }
    }

    /// To SSD, where its bytes are: nobody has to leave for it there, though the room it had may be taken by whoever made
    /// room for it in DRAM. Who comes next there makes room for both.
    fn go_back(&mut self, key: BlockKey, now: Timestamp) {
        self.discharge(key);
        self.charge(key, Tier::Ssd);
        if self.slab.get(key).is_some_and(|entry| !entry.held()) {
            self.tell(key, Told::MovedIn, now);
        }
        self.settle(key);
    }

    /// The SSD copy of a block is gone although nobody asked for it. A read that is under way may bring its
    /// bytes still.
    pub fn on_lost(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.copies.ssd) else { return };
        entry.copies.ssd = false;
        if entry.moving.is_some() {
            return;
        }
        if entry.copies.dram {
            return self.settle(key);
        }
        self.count_left(key, Left::Failed);
        self.drop_block(key, DropCause::Failed);
    }

    /// A write to SSD is not even tried, since that is slow and has enough to do: the block leaves as if there were none.
    pub fn on_write_refused(&mut self, key: BlockKey, now: Timestamp) {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.moving == Some(Tier::Ssd)) else {
            return;
        };
        if entry.held() || entry.place != Some(Tier::Ssd) {
            return self.on_move_failed(key, Tier::Ssd, now);
        }
        entry.moving = None;
        self.dram.stats.unwritten_blocks += 1;
        self.count_left(key, Left::Dropped);
        self.drop_block(key, DropCause::Room);
    }

    /// A block on SSD is to be written there once more, or its room could not be made free: it goes instead, if it is not
    /// likely enough to be used ([`Book::with_ssd_reuse_min`]) and nobody holds, pinned or waits for it.
    pub fn on_rewrite(&mut self, key: BlockKey, now: Timestamp) {
        let is_asked = self.reuse_min > 0.0 && !self.pins.is_beginning();
        if self.drop_if_void(key) {
            return;
        }
        let Some(entry) = self.slab.get(key).filter(|entry| is_asked && !entry.parked()) else { return };
        let is_there = entry.place == Some(Tier::Ssd) && entry.copies.ssd && entry.moving.is_none();
        let is_full = self.ssd.shares.has_most(entry.share);
        if is_there && is_full && self.ssd.policy.prospect_of(key, now) < self.reuse_min {
            self.ssd.stats.dropped_blocks += 1;
            self.count_evicted(key, Left::Dropped, now);
            self.drop_block(key, DropCause::Room);
        }
    }

    fn keep_in_dram(&mut self, key: BlockKey, now: Timestamp) {
        // An older block may not push out a newer one because the disk failed, unless it is held.
        let Some(entry) = self.slab.get(key) else { return };
        let (held, cost) = (entry.held(), self.cost(entry, Tier::Dram).0);
        // Nor may it come back above the mark, or it would drive out blocks that then come back in its turn.
        let welcome = held || self.dram.limits.goal(self.dram.used, cost).is_none();
        if !welcome || !self.promote(key, now) {
            self.count_left(key, Left::Failed);
            self.drop_block(key, DropCause::Failed);
        } else if self.slab.get(key).is_some_and(|entry| entry.leases == 0) {
            self.tell(key, Told::MovedIn, now);
        }
    }

    /// Brings what exists in line with what should: drops surplus copies, announces, queues a move.
    pub(super) fn settle(&mut self, key: BlockKey) {
        let is_void = self.slab.is_void(key);
        let Some(entry) = self.slab.get_mut(key) else { return };
        if entry.moving.is_some() || entry.writing {
            return;
        }
        let Some(place) = entry.place else { return self.clear_out(key) };
        if is_void && entry.leases == 0 {
            return self.drop_void(key);
        }
        if place != Tier::Gpu && entry.copies.dram && std::mem::take(&mut entry.copies.gpu) {
            // Its bytes are out of the GPU, wherever they go from here.
            self.drops.push_back(drop_action(key, entry.meta.hash, entry.generation, Tier::Gpu));
        }
        if !entry.copies.has(place) || (entry.awaited && !entry.copies.dram) {
            return self.enqueue(key);
        }
        let (hash, generation) = (entry.meta.hash, entry.generation);
        let announced = entry.announced.replace(place).filter(|_| !is_void);
        entry.awaited = false;
        for other in Tier::ALL {
            if other != place && entry.copies.has(other) {
                entry.copies.set(other, false);
                self.drops.push_back(drop_action(key, hash, generation, other));
            }
        }
        if let Some(from) = announced.filter(|&from| from != place) {
            self.changes.moved(hash, from, place);
        }
    }

    /// The block is over: free its copies, then its key.
    fn clear_out(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get_mut(key) else { return };
        let (copies, hash, generation) =
            (std::mem::take(&mut entry.copies), entry.meta.hash, entry.generation);
        for tier in [Tier::Dram, Tier::Ssd, Tier::Gpu] {
            if copies.has(tier) {
                self.drops.push_back(drop_action(key, hash, generation, tier));
            }
        }
        self.slab.remove(key);
    }
}

fn drop_action(key: BlockKey, hash: BlockHash, generation: Generation, tier: Tier) -> Action {
    match tier {
        Tier::Dram => Action::DropDram { key },
        Tier::Ssd => Action::DropSsd { key, hash, generation },
        Tier::Gpu => Action::DropGpu { key, hash, generation },
    }
}
