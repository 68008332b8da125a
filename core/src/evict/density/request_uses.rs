//! The block uses of one request, reported one by one and judged together.
//!
//! A request's reuses are one observation. The point where it leaves known blocks shows whether it
//! continues a session or shares its start with others. Not here: the classes of its blocks
//! ([`super::classes`]).

use super::classes::{CLASSES, ConversationTurn, ReuseClass, ReuseClasses};
use super::ghost_queue::GhostWork;
use super::resident_block::{END, ResidentBlock, SHARED};
use super::{BlockKey, BlockTraits, Density, Links};
use crate::id::{Category, Timestamp};

/// Key of an absent block: no resident block has it.
const ABSENT_KEY: BlockKey = BlockKey(u32::MAX);
/// Highest inferred turn.
const TURN_MAX: u8 = 63;

/// A block used by the running request.
#[derive(Clone, Copy, Debug)]
struct BlockUse {
    key: BlockKey,
    /// The request inserted it: not a reuse.
    is_inserted: bool,
    is_partial: bool,
    /// Another request holds the block from here on.
    is_parked: bool,
    /// Data of an absent block, once its ghost was looked up; it has no key.
    absent: Option<ResidentBlock>,
}

/// Uses of the running request so far, from its tail to its head.
#[derive(Debug)]
pub(super) struct RequestUses {
    uses: Vec<BlockUse>,
    category: Category,
    /// Offset of the first reported block; `offset` is that of the last.
    tail: u32,
    offset: u32,
    /// Blocks of each class that the request reused.
    reused: [u32; CLASSES],
}

impl Default for RequestUses {
    fn default() -> Self {
        let category = Category::default();
        RequestUses { uses: Vec::new(), category, tail: 0, offset: 0, reused: [0; CLASSES] }
    }
}

impl RequestUses {
    pub(super) fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    /// Parks the block when the request is judged, if it was the last one reported; `false` if not.
    pub(super) fn park_last(&mut self, key: BlockKey) -> bool {
        let last = self.uses.last_mut().filter(|touch| touch.key == key);
        last.map(|touch| touch.is_parked = true).is_some()
    }

    /// Counts a reused block of the class.
    pub(super) fn count_reuse(&mut self, class: ReuseClass) {
        self.reused[class.index()] += 1;
    }
}

impl Density {
    /// Records a use. It belongs to the running request if the block is nearer to the head than the
    /// previous one.
    pub(super) fn record_use(
        &mut self,
        key: BlockKey,
        traits: BlockTraits,
        now: Timestamp,
        is_settled: bool,
    ) {
        let follows = now <= self.clock && traits.offset_blocks < self.request.offset;
        if self.request.is_empty() || !follows {
            self.finish_request();
            self.request.category = traits.category;
            self.request.tail = traits.offset_blocks;
        }
        self.advance(now);
        self.request.offset = traits.offset_blocks;
        let is_partial = traits.is_partial;
        self.request.uses.push(BlockUse {
            key,
            is_inserted: is_settled,
            is_partial,
            is_parked: false,
            absent: None,
        });
    }

    /// Records the use of an absent block.
    pub(super) fn record_absent(&mut self, traits: BlockTraits, now: Timestamp) {
        self.record_use(ABSENT_KEY, traits, now, true);
        let (touch, fingerprint) = (self.request.uses.len() - 1, traits.fingerprint);
        self.defer(GhostWork::TakeAbsent { touch, fingerprint });
    }

    /// Applies the ghost of an absent block of the running request.
    pub(super) fn take_absent(&mut self, touch: usize, fingerprint: u64, then: Timestamp) {
        let known = self.ghosts.take(fingerprint, then);
        let mut resident = ResidentBlock::arriving(fingerprint);
        self.recall(&mut resident, known, then);
        if let Some(touch) = self.request.uses.get_mut(touch) {
            touch.absent = Some(resident);
        }
    }

    /// Judges the uses since the last call as those of one request.
    #[inline(always)]
    pub(super) fn finish_request(&mut self) {
        if !self.request.is_empty() {
            self.judge_request();
        }
    }

    fn judge_request(&mut self) {
        self.run_deferred();
        let touches = std::mem::take(&mut self.request.uses);
        let turn = self.infer_turn(&touches);
        let own = self.session_class(&turn);
        let end = touches.iter().position(|touch| !touch.is_partial);
        let (mut is_begun, mut shared) = ([false; CLASSES], None);
        for (at, touch) in touches.iter().enumerate() {
            let resident = touch.absent.or_else(|| {
                let mut resident = self.detach(touch.key)?;
                self.end_wait(&mut resident, touch.is_inserted);
                Some(resident)
            });
            let Some(mut resident) = resident else { continue };
            resident.class = ReuseClass::PARTIAL;
            if !touch.is_partial {
                resident.set(END, end == Some(at));
                update_sharing(&mut resident, &turn, &mut shared);
                resident.class = if shared.is_some() { ReuseClasses::shared(resident.pace) } else { own };
            }
            let class = resident.class.index();
            if touch.absent.is_some() {
                self.remember_absent(resident);
                continue;
            }
            self.enqueue(touch.key, resident);
            if !std::mem::replace(&mut is_begun[class], true) {
                self.set_newest_tail(class, touch.key);
            }
            if touch.is_parked {
                self.unqueue(touch.key, class, Links::park);
            }
        }
        self.request.uses = touches;
        self.request.uses.clear();
        self.finish_cluster();
    }

    /// Stores a ghost of an absent block, as if it had been evicted at once.
    fn remember_absent(&mut self, resident: ResidentBlock) {
        if resident.class == ReuseClass::PARTIAL {
            return;
        }
        self.open_waits.begin(resident.class);
        // With no resident block, allows at least one ghost, so that the wait can end.
        let residents = (self.queued + self.links.parked_len()).max(1);
        let (fingerprint, memory) = (resident.fingerprint(), resident.history());
        self.defer(GhostWork::Remember { fingerprint, memory, last_use: self.clock, residents });
    }

    /// Ends the wait of a block at its next use; counts a reuse unless the request inserted the
    /// block.
    fn end_wait(&mut self, resident: &mut ResidentBlock, is_settled: bool) {
        let last_use = resident.last_use(self.clock);
        self.open_waits.end(resident.class, last_use, self.clock, &mut self.evidence);
        if !is_settled {
            let age_us = self.clock.0.saturating_sub(last_use.0);
            self.evidence.add_reuse(resident.class, age_us);
            self.request.count_reuse(resident.class);
            resident.use_again(age_us);
        }
    }

    /// Counts the request's reuses as one observation per class.
    pub(super) fn finish_cluster(&mut self) {
        for (class, blocks) in self.request.reused.iter_mut().enumerate().filter(|(_, blocks)| **blocks > 0) {
            self.evidence.add_cluster(ReuseClass(class as u8), std::mem::take(blocks));
        }
    }

    /// The class of the blocks that belong to the session alone.
    fn session_class(&mut self, turn: &ConversationTurn) -> ReuseClass {
        let known = self.classes.assigned();
        let class = self.classes.session(turn);
        if self.classes.assigned() > known {
            // Until the next fit it has the values of its wider class.
            let wider = ReuseClasses::coarse(turn.kind, turn.turn).index();
            self.tables.copy_class(wider, class.index());
            self.value_rises[class.index()] = self.value_rises[wider];
        }
        class
    }

    /// Infers the session and turn from the blocks that a request used.
    fn infer_turn(&self, touches: &[BlockUse]) -> ConversationTurn {
        let resident = |touch: &BlockUse| touch.absent.unwrap_or_else(|| self.links.data(touch.key));
        let is_known = |touch: &&BlockUse| resident(touch).uses() + u8::from(!touch.is_inserted) > 1;
        let whole = || touches.iter().filter(|touch| !touch.is_partial);
        let new = whole().take_while(|touch| !is_known(touch)).count() as u32;
        let Category { kind, conversation_turn: stated } = self.request.category;
        let blocks = self.request.tail.saturating_add(1);
        // The deepest known block: the request diverges behind it.
        let Some(parent) = whole().find(is_known) else {
            return ConversationTurn {
                kind,
                turn: stated.max(1),
                blocks,
                new_blocks: new,
                pace: None,
                forks: false,
            };
        };
        let mut last = resident(parent);
        if !parent.is_inserted {
            last.use_again(self.clock.0.saturating_sub(last.last_use(self.clock).0));
        }
        // A request that continues behind the end of an earlier one is its next turn; one that
        // leaves its middle is a fork.
        let (forks, turn) = match stated {
            0 if last.has(END) => (false, last.turn.saturating_add(u8::from(new > 0)).min(TURN_MAX)),
            0 => (true, 1),
            turn => (turn == 1, turn),
        };
        let pace = (!forks && !last.has(SHARED)).then_some(last.pace);
        ConversationTurn { kind, turn, blocks, new_blocks: new, pace, forks }
    }
}

/// Updates a block from its request. `shared` is the pace of the block behind it, if sessions share
/// that one. If a block is shared, so are all blocks before it, also those that returned without a
/// ghost.
fn update_sharing(resident: &mut ResidentBlock, turn: &ConversationTurn, shared: &mut Option<u8>) {
    let is_known = resident.uses() > 1;
    if resident.has(SHARED) || turn.forks && is_known || shared.is_some() {
        if !is_known {
            resident.assume_reused(shared.unwrap_or(0));
        }
        resident.set(SHARED, true);
        *shared = Some(resident.pace);
    } else if !is_known {
        resident.turn = turn.turn;
        resident.pace = turn.pace.unwrap_or(0);
    }
}
