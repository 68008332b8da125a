//! The uses of one request, which the policy is told block by block, judged together.
//!
//! What a request uses again is one observation; where it leaves what was used before says whether it goes on with a
//! session or shares its start with others. Not here: the classes its blocks then belong to ([`super::classes`]).

use super::classes::{CLASSES, Class, Classes, Turn};
use super::pending::Work;
use super::resident::{END, Resident, SHARED};
use super::{BlockKey, BlockTraits, Density, Links};
use crate::id::{Category, Timestamp};

/// Key of a block that did not come in: no block has it.
const NOBODY: BlockKey = BlockKey(u32::MAX);
/// Highest turn told apart where none is stated.
const TURN_MAX: u8 = 63;

/// A block used by the request that is being told.
#[derive(Clone, Copy, Debug)]
struct Touch {
    key: BlockKey,
    /// The request brought it: no use of what was here.
    is_settled: bool,
    is_partial: bool,
    /// Something holds the block from here on.
    is_parked: bool,
    /// What is known of a block that did not come in, once it was looked up: it has no key.
    passed: Option<Resident>,
}

/// What was told of the running request, from its tail to its head.
#[derive(Debug)]
pub(super) struct Run {
    touches: Vec<Touch>,
    category: Category,
    /// Offsets of the first and the last block told.
    tail: u32,
    offset: u32,
    /// Blocks of each class the request used again.
    reused: [u32; CLASSES],
}

impl Default for Run {
    fn default() -> Self {
        let category = Category::default();
        Run { touches: Vec::new(), category, tail: 0, offset: 0, reused: [0; CLASSES] }
    }
}

impl Run {
    pub(super) fn is_empty(&self) -> bool {
        self.touches.is_empty()
    }

    /// Has the block parked when the run is judged, if it was told last; `false` if it was not.
    pub(super) fn park_last(&mut self, key: BlockKey) -> bool {
        let last = self.touches.last_mut().filter(|touch| touch.key == key);
        last.map(|touch| touch.is_parked = true).is_some()
    }

    /// The request uses a block of the class again.
    pub(super) fn count_reuse(&mut self, class: Class) {
        self.reused[class.at()] += 1;
    }
}

impl Density {
    /// A resident block is used, by the request of the block told before if it is nearer to the head.
    pub(super) fn touch(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp, is_settled: bool) {
        let follows = now <= self.clock && traits.offset_blocks < self.run.offset;
        if self.run.is_empty() || !follows {
            self.close_run();
            self.run.category = traits.category;
            self.run.tail = traits.offset_blocks;
        }
        self.advance(now);
        self.run.offset = traits.offset_blocks;
        let is_partial = traits.is_partial;
        self.run.touches.push(Touch { key, is_settled, is_partial, is_parked: false, passed: None });
    }

    /// A block of the request did not come in.
    pub(super) fn touch_passed(&mut self, traits: BlockTraits, now: Timestamp) {
        self.touch(NOBODY, traits, now, true);
        let (touch, fingerprint) = (self.run.touches.len() - 1, traits.fingerprint);
        self.put_off(Work::Pass { touch, fingerprint });
    }

    /// What is remembered of a block of the running request that did not come in.
    pub(super) fn take_passed(&mut self, touch: usize, fingerprint: u64, then: Timestamp) {
        let known = self.ghosts.take(fingerprint, then);
        let mut resident = Resident::arriving(fingerprint);
        self.recall(&mut resident, known, then);
        if let Some(touch) = self.run.touches.get_mut(touch) {
            touch.passed = Some(resident);
        }
    }

    /// Judges the uses told since the last call: they are those of one request.
    #[inline(always)]
    pub(super) fn close_run(&mut self) {
        if !self.run.is_empty() {
            self.judge_run();
        }
    }

    fn judge_run(&mut self) {
        self.catch_up();
        let touches = std::mem::take(&mut self.run.touches);
        let turn = self.read(&touches);
        let own = self.own_class(&turn);
        let end = touches.iter().position(|touch| !touch.is_partial);
        let (mut is_begun, mut shared) = ([false; CLASSES], None);
        for (at, touch) in touches.iter().enumerate() {
            let resident = touch.passed.or_else(|| {
                let mut resident = self.take_out(touch.key)?;
                self.end_wait(&mut resident, touch.is_settled);
                Some(resident)
            });
            let Some(mut resident) = resident else { continue };
            resident.class = Class::PARTIAL;
            if !touch.is_partial {
                resident.set(END, end == Some(at));
                judge(&mut resident, &turn, &mut shared);
                resident.class = if shared.is_some() { Classes::shared(resident.pace) } else { own };
            }
            let class = resident.class.at();
            if touch.passed.is_some() {
                self.pass_by(resident);
                continue;
            }
            self.enqueue(touch.key, resident);
            if !std::mem::replace(&mut is_begun[class], true) {
                self.set_freshest(class, touch.key);
            }
            if touch.is_parked {
                self.unqueue(touch.key, class, Links::park);
            }
        }
        self.run.touches = touches;
        self.run.touches.clear();
        self.close_cluster();
    }

    /// Remembers a block that did not come in as if it had left at once.
    fn pass_by(&mut self, resident: Resident) {
        if resident.class == Class::PARTIAL {
            return;
        }
        self.alive.begin(resident.class);
        // Where nothing is resident there is room for one ghost at least, so that a wait that begins has an end.
        let residents = (self.queued + self.links.parked_len()).max(1);
        let (fingerprint, memory) = (resident.fingerprint(), resident.memory());
        self.put_off(Work::Remember { fingerprint, memory, last_use: self.clock, residents });
    }

    /// Ends the wait of a block for its next use: with one, unless the request brought the block itself.
    fn end_wait(&mut self, resident: &mut Resident, is_settled: bool) {
        let last_use = resident.last_use(self.clock);
        self.alive.end(resident.class, last_use, self.clock, &mut self.evidence);
        if !is_settled {
            let age_us = self.clock.0.saturating_sub(last_use.0);
            self.evidence.reused(resident.class, age_us);
            self.run.count_reuse(resident.class);
            resident.use_again(age_us);
        }
    }

    /// Counts what the request used again as one observation a class.
    pub(super) fn close_cluster(&mut self) {
        for (class, blocks) in self.run.reused.iter_mut().enumerate().filter(|(_, blocks)| **blocks > 0) {
            self.evidence.clustered(Class(class as u8), std::mem::take(blocks));
        }
    }

    /// The class of what a request has for its session alone.
    fn own_class(&mut self, turn: &Turn) -> Class {
        let known = self.classes.given_out();
        let class = self.classes.session(turn);
        if self.classes.given_out() > known {
            // Until the next fit it is worth what its wider class is.
            let wider = Classes::coarse(turn.kind, turn.turn).at();
            self.tables.copy(wider, class.at());
            self.rises[class.at()] = self.rises[wider];
        }
        class
    }

    /// What the blocks a request used say of its session.
    fn read(&self, touches: &[Touch]) -> Turn {
        let resident = |touch: &Touch| touch.passed.unwrap_or_else(|| self.links.about(touch.key));
        let is_known = |touch: &&Touch| resident(touch).uses() + u8::from(!touch.is_settled) > 1;
        let whole = || touches.iter().filter(|touch| !touch.is_partial);
        let new = whole().take_while(|touch| !is_known(touch)).count() as u32;
        let Category { kind, turn: stated } = self.run.category;
        let blocks = self.run.tail.saturating_add(1);
        // The deepest block that was used before: where the request goes its own way.
        let Some(parent) = whole().find(is_known) else {
            return Turn { kind, turn: stated.max(1), blocks, new, pace: None, forks: false };
        };
        let mut last = resident(parent);
        if !parent.is_settled {
            last.use_again(self.clock.0.saturating_sub(last.last_use(self.clock).0));
        }
        // Behind the end of an earlier request goes its session; from its middle others.
        let (forks, turn) = match stated {
            0 if last.has(END) => (false, last.turn.saturating_add(u8::from(new > 0)).min(TURN_MAX)),
            0 => (true, 1),
            turn => (turn == 1, turn),
        };
        let pace = (!forks && !last.has(SHARED)).then_some(last.pace);
        Turn { kind, turn, blocks, new, pace, forks }
    }
}

/// Notes what its request says of a block. `shared` is the pace of the block behind it if sessions share that: who
/// shares a block shares all before it, also those that came back unknown.
fn judge(resident: &mut Resident, turn: &Turn, shared: &mut Option<u8>) {
    let is_known = resident.uses() > 1;
    if resident.has(SHARED) || turn.forks && is_known || shared.is_some() {
        if !is_known {
            resident.assume(shared.unwrap_or(0));
        }
        resident.set(SHARED, true);
        *shared = Some(resident.pace);
    } else if !is_known {
        resident.turn = turn.turn;
        resident.pace = turn.pace.unwrap_or(0);
    }
}
