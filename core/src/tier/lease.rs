//! Leases: which requests hold a block, and what the end of a request does to the order of eviction.
//!
//! A lease is one request on this node. At its end the request's blocks are touched from tail to
//! head, so that the head of a prefix is always younger than its tail.

use std::cmp::Reverse;
#[cfg(test)]
use std::collections::BTreeMap;
use std::collections::{BTreeSet, btree_map};

use super::book::Book;
use super::entry::Entry;
use super::order::Told;
use super::{Asker, LeasesFull};
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, CallerId, Category, LeaseId, TenantId, Tier, Timestamp};

/// One request under way.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    caller: CallerId,
    category: Category,
    deadline: Timestamp,
    blocks: Holds,
    /// What was offered and not let in, in the order of offers, for the policy to be told.
    passed: Vec<Passed>,
}

/// A block that was not let in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed {
    pub(super) hash: BlockHash,
    pub(super) tenant: TenantId,
    pub(super) traits: BlockTraits,
}

/// The blocks that a lease holds, each once, by offset. Requests name them in that order, so most are appended.
#[derive(Clone, Debug, Default)]
struct Holds {
    ordered: Vec<Hold>,
    /// Those of them that are held no more.
    gone: BTreeSet<Hold>,
    /// Those that came after one behind them.
    late: BTreeSet<Hold>,
    /// Those that a save found here, and that nothing asked for yet.
    unused: BTreeSet<Hold>,
}

impl Holds {
    /// `false` when it was there.
    fn insert(&mut self, hold: Hold) -> bool {
        if self.gone.remove(&hold) {
            return true;
        }
        let is_behind = |last: Option<&Hold>| last.is_none_or(|last| *last < hold);
        if is_behind(self.ordered.last()) && is_behind(self.late.last()) {
            self.ordered.push(hold);
            return true;
        }
        self.ordered.binary_search(&hold).is_err() && self.late.insert(hold)
    }

    fn remove(&mut self, hold: &Hold) {
        self.unused.remove(hold);
        if self.ordered.last() == Some(hold) {
            self.ordered.pop();
            self.gone.remove(hold);
        } else if self.ordered.binary_search(hold).is_ok() {
            // A save that is given up lets go of all it offered: none of that may move the rest.
            self.gone.insert(*hold);
        } else {
            self.late.remove(hold);
        }
    }

    /// All of them, the last first.
    fn into_tail_first(self) -> Vec<Hold> {
        let mut all = self.ordered;
        if !self.gone.is_empty() {
            all.retain(|hold| !self.gone.contains(hold));
        }
        if !self.late.is_empty() {
            all.extend(self.late);
            all.sort_unstable();
        }
        all.reverse();
        all
    }

    fn len(&self) -> usize {
        self.ordered.len() + self.late.len() - self.gone.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Hold {
    offset_blocks: u32,
    key: BlockKey,
    serial: u64,
}

/// Blocks of leases whose time is over that are let go in one call, unless one lease alone has more: about a millisecond of
/// the task that owns the book. Called every 20 ms.
pub const EXPIRED_LEASE_BLOCKS_MAX: usize = 4096;

/// Blocks that were not let in of which one lease keeps note until it ends, a prompt of 65,536 tokens in blocks of sixteen, and
/// all leases together, in 10 MiB at most. Of more the policy is not told, and learns that much less.
const PASSED_BY_LEASE_MAX: usize = 4096;
const PASSED_BLOCKS_MAX: usize = 131_072;

impl Book {
    /// Opens the lease or renews it.
    pub(super) fn open_lease(&mut self, asker: Asker, now: Timestamp) -> Result<(), LeasesFull> {
        if let Some(lease) = self.leases.get_mut(&asker.lease) {
            lease.category = asker.category;
            self.renew(asker.lease, now);
            return Ok(());
        }
        let Asker { lease: id, caller, category, .. } = asker;
        let (limit, held) = (self.leases_max, self.leases.len());
        let own = self.callers.get(&caller).copied().unwrap_or(0);
        // Alone it may have half of them, the next one half of the rest: whoever comes finds some, however long others keep theirs.
        if own >= limit.saturating_sub(held) {
            return Err(LeasesFull { limit, held, own });
        }
        self.callers.insert(caller, own + 1);
        let deadline = now.after(self.lease_span);
        let lease = Lease { caller, category, deadline, blocks: Holds::default(), passed: Vec::new() };
        self.leases.insert(id, lease);
        self.deadlines.insert((deadline, id));
        Ok(())
    }

    /// One lease less of this caller.
    fn leave(&mut self, caller: CallerId) {
        if let btree_map::Entry::Occupied(mut own) = self.callers.entry(caller) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }

    /// Starts the lease's time anew; it is unknown once it ended.
    pub fn renew(&mut self, id: LeaseId, now: Timestamp) {
        let deadline = now.after(self.lease_span);
        if let Some(lease) = self.leases.get_mut(&id) {
            self.deadlines.remove(&(lease.deadline, id));
            lease.deadline = deadline;
            self.deadlines.insert((deadline, id));
        }
    }

    pub(super) fn hold(&mut self, id: LeaseId, key: BlockKey) {
        self.hold_all(id, &[key]);
    }

    /// Holds blocks that an open lease asks for. Says of each whether it does for the first time: what it brought itself it
    /// does not, nor what it asked for before.
    pub(super) fn hold_all(&mut self, id: LeaseId, keys: &[BlockKey]) -> Vec<bool> {
        self.hold_each(id, keys, |holds, hold, is_new| holds.unused.remove(&hold) || is_new)
    }

    /// Holds blocks for an open lease that would have brought them. That they were here is no hit, for it may ask for them yet; policies hear of it
    /// when the lease ends, as of any other use.
    pub(super) fn hold_found(&mut self, id: LeaseId, keys: &[BlockKey]) {
        self.hold_each(id, keys, |holds, hold, is_new| is_new && holds.unused.insert(hold));
    }

    fn hold_each(
        &mut self,
        id: LeaseId,
        keys: &[BlockKey],
        note: impl Fn(&mut Holds, Hold, bool) -> bool,
    ) -> Vec<bool> {
        // Out of the table meanwhile: it is found once for all blocks.
        let Some(mut holds) = self.leases.get_mut(&id).map(|lease| std::mem::take(&mut lease.blocks)) else {
            return vec![false; keys.len()];
        };
        holds.ordered.reserve(keys.len());
        let one = |&key: &BlockKey| {
            let held = self.hold_one(&mut holds, key);
            held.is_some_and(|(hold, is_new)| note(&mut holds, hold, is_new))
        };
        let are_said = keys.iter().map(one).collect();
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.blocks = holds;
        }
        are_said
    }

    /// The hold, and whether the lease did not have it before.
    fn hold_one(&mut self, holds: &mut Holds, key: BlockKey) -> Option<(Hold, bool)> {
        let entry = self.slab.get_mut(key)?;
        let hold = Hold { offset_blocks: entry.meta.traits.offset_blocks, key, serial: entry.serial };
        let is_new = holds.insert(hold);
        if is_new {
            entry.leases += 1;
            if entry.leases == 1 {
                self.park(key);
            }
        }
        Some((hold, is_new))
    }

    /// Notes that a block of an open lease was not let in.
    pub(super) fn pass(&mut self, id: LeaseId, passed: Passed) {
        if self.passed_blocks < PASSED_BLOCKS_MAX
            && let Some(lease) = self.leases.get_mut(&id)
            && lease.passed.len() < PASSED_BY_LEASE_MAX
        {
            lease.passed.push(passed);
            self.passed_blocks += 1;
        }
    }

    /// Whether this was the last block of a lease that was not let in, and is not here for its tenant since.
    pub(super) fn was_passed_last(&self, asker: Asker, hash: &BlockHash) -> bool {
        let last = self.leases.get(&asker.lease).and_then(|lease| lease.passed.last());
        last.is_some_and(|last| last.hash == *hash && last.tenant == asker.tenant)
            && self.owner(hash) != Some(asker.tenant)
    }

    /// Forgets that a lease held a block that never came.
    pub(super) fn unhold(&mut self, key: BlockKey) {
        let Some(entry) = self.slab.get(key) else { return };
        let hold = Hold { offset_blocks: entry.meta.traits.offset_blocks, key, serial: entry.serial };
        if let Some(lease) = entry.writer.and_then(|writer| self.leases.get_mut(&writer)) {
            lease.blocks.remove(&hold);
        }
    }

    /// Leases of each caller that has some, as they were counted and as they are.
    #[cfg(test)]
    pub(super) fn callers(&self) -> [BTreeMap<CallerId, usize>; 2] {
        let mut are = BTreeMap::new();
        self.leases.values().for_each(|lease| *are.entry(lease.caller).or_default() += 1);
        [self.callers.clone(), are]
    }

    /// Blocks a lease holds, for tests of what it costs.
    #[cfg(test)]
    pub(super) fn held_by(&self, id: LeaseId) -> usize {
        self.leases.get(&id).map_or(0, |lease| lease.blocks.len())
    }

    /// Ends a request: its blocks are free to go, and have just been used, tail first.
    pub fn release(&mut self, id: LeaseId, now: Timestamp) {
        let Some(lease) = self.leases.remove(&id) else { return };
        self.deadlines.remove(&(lease.deadline, id));
        self.leave(lease.caller);
        self.passed_blocks -= lease.passed.len();
        let holds = lease.blocks.into_tail_first();
        let mut live: Vec<BlockKey> = holds.into_iter().filter_map(|hold| self.let_go(hold)).collect();
        let passed = self.sort_passed(lease.passed, &mut live);
        let mut tenants: Vec<TenantId> =
            live.iter().filter_map(|key| self.slab.get(*key)).map(|entry| entry.meta.tenant).collect();
        // Hashes are keyed per tenant, so a request's blocks are as good as always one tenant's.
        tenants.dedup();
        tenants.sort_unstable();
        tenants.dedup();
        self.touch(&live, lease.category, &passed, now);
        // A quota lowered while the request ran holds from here on.
        tenants.into_iter().for_each(|tenant| self.enforce_quota(tenant));
    }

    /// What a request was not let in with, each block once, from the tail to the head. What somebody else brought since for
    /// the same tenant was used by it like any other, and joins `live`; of another tenant's block it is no use.
    fn sort_passed(&self, mut passed: Vec<Passed>, live: &mut Vec<BlockKey>) -> Vec<BlockTraits> {
        if passed.is_empty() {
            return Vec::new();
        }
        passed.sort_unstable_by_key(|passed| (Reverse(passed.traits.offset_blocks), passed.hash));
        passed.dedup_by_key(|passed| passed.hash);
        let before = live.len();
        passed.retain(|passed| match self.slab.find(&passed.hash) {
            Some(key) => {
                let is_readable = |entry: &Entry| {
                    !entry.writing && entry.place.is_some() && entry.meta.tenant == passed.tenant
                };
                if self.slab.get(key).is_some_and(is_readable) {
                    live.push(key);
                }
                false
            }
            None => true,
        });
        if live.len() > before {
            let offset =
                |key: &BlockKey| self.slab.get(*key).map_or(0, |entry| entry.meta.traits.offset_blocks);
            live.sort_by_key(|key| (Reverse(offset(key)), *key));
            live.dedup();
        }
        passed.into_iter().map(|passed| passed.traits).collect()
    }

    fn let_go(&mut self, hold: Hold) -> Option<BlockKey> {
        let entry = self.slab.get_mut(hold.key).filter(|entry| entry.serial == hold.serial)?;
        entry.leases -= 1;
        let is_used = !entry.writing && entry.place.is_some();
        let is_void = self.slab.is_void(hold.key);
        // That a block of earlier weights was read is no use of it: nobody will ask for it again.
        self.drop_if_void(hold.key);
        (is_used && !is_void).then_some(hold.key)
    }

    /// A request used these blocks, tail first: newest in their tier's policy, and up to DRAM if they are below.
    ///
    /// New ones come in first, then all are told without a break, those that were not let in, `passed`, in their places:
    /// policies judge what one request used as a whole.
    fn touch(&mut self, blocks: &[BlockKey], category: Category, passed: &[BlockTraits], now: Timestamp) {
        let mut passed = passed.iter().map(|traits| BlockTraits { category, ..*traits }).peekable();
        let used_again = self.used_again(blocks, now);
        let are_new: Vec<bool> = blocks.iter().map(|&key| self.bring_in(key, category, now)).collect();
        for (&key, is_new) in blocks.iter().zip(are_new) {
            // One that came in later may have pushed it out.
            let Some(entry) = self.slab.get(key).filter(|entry| entry.place.is_some()) else { continue };
            let traits = entry.meta.traits;
            while let Some(passed) = passed.next_if(|passed| passed.offset_blocks > traits.offset_blocks) {
                self.tell_passed(passed, now);
            }
            self.curve.used(traits.fingerprint);
            let how = if is_new { Told::Settled } else { Told::Used };
            self.tell(key, how, now);
            self.tell_others(self.place(key), traits, now);
        }
        passed.for_each(|passed| self.tell_passed(passed, now));
        for (key, gap_us) in used_again {
            self.lift(key, gap_us, now);
        }
    }

    fn tell_passed(&mut self, passed: BlockTraits, now: Timestamp) {
        self.curve.used(passed.fingerprint);
        self.tell_others(None, passed, now);
    }

    /// Tells the policies of all tiers but `place` of a use of a block that is not there. A block comes to a slower tier when
    /// it is used no more, and leaves it when it is: what is worth keeping there is learned from uses elsewhere.
    fn tell_others(&mut self, place: Option<Tier>, traits: BlockTraits, now: Timestamp) {
        for tier in Tier::ALL {
            if place != Some(tier) && self.exists(tier) {
                self.shelf_mut(tier).policy.pass(traits, now);
            }
        }
    }

    /// Whether the policy of the block's tier did not know it; it does now.
    fn bring_in(&mut self, key: BlockKey, category: Category, now: Timestamp) -> bool {
        let Some(entry) = self.slab.get_mut(key).filter(|entry| entry.place.is_some()) else { return false };
        entry.meta.traits.category = category;
        entry.last_use = Some(now);
        if entry.place == Some(Tier::Ssd) && self.may_come_up(key) {
            self.promote(key, now);
        }
        let is_new = self.slab.get(key).is_some_and(|entry| !entry.ranked);
        if is_new {
            self.tell(key, Told::Inserted, now);
        }
        is_new
    }

    /// Ends leases whose time is over, those that have been for longest first and [`EXPIRED_LEASE_BLOCKS_MAX`] of their
    /// blocks. Returns how many.
    pub fn expire(&mut self, now: Timestamp) -> usize {
        let (mut ended, mut blocks) = (0, 0);
        while let Some(&(deadline, id)) = self.deadlines.first() {
            let more =
                self.leases.get(&id).map_or(0, |lease| (lease.blocks.len() + lease.passed.len()).max(1));
            if deadline > now || ended > 0 && blocks + more > EXPIRED_LEASE_BLOCKS_MAX {
                break;
            }
            blocks += more;
            self.release(id, now);
            ended += 1;
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hold(number: u32) -> Hold {
        Hold { offset_blocks: number, key: BlockKey(number), serial: 1 }
    }

    proptest! {
        #[test]
        fn holds_are_a_set_in_order_of_offsets(steps in prop::collection::vec((any::<bool>(), 0u32..12), 0..200)) {
            let (mut holds, mut expected) = (Holds::default(), BTreeSet::new());
            for (is_new, number) in steps {
                if is_new {
                    prop_assert_eq!(holds.insert(hold(number)), expected.insert(hold(number)));
                } else {
                    holds.remove(&hold(number));
                    expected.remove(&hold(number));
                }
                prop_assert_eq!(holds.len(), expected.len());
            }
            prop_assert_eq!(holds.into_tail_first(), expected.into_iter().rev().collect::<Vec<_>>());
        }
    }
}
