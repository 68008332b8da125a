//! What instances probably keep in GPU memory of prompts that nobody tells of: those that were read as text, for want of a tokenizer.
//!
//! Engines tell of blocks of tokens, and pieces of text are none. So what was sent counts: from its first token on an instance is taken to have a prompt,
//! until about as much was computed there since as its memory holds, and for [`KEPT_FOR`] at most. It is a guess; that it is wrong shows in the time
//! until first tokens, which corrects predictions. Not here: blocks that engines tell of (the soft plane), and prompts that are not computed yet
//! (`coming.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use super::coming::places;
use super::decision::Decision;
use super::moved::Counted;
use super::{Resident, RouteRequest};
use crate::id::{BlockHash, InstanceId, Timestamp};

/// Longest that an instance is taken to keep what it was sent, however little came since.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(600);

/// Places remembered at once, one for each 256 tokens: 64 million tokens of text, in some thirty megabytes.
const PLACES_MAX: usize = 1 << 18;

/// Places of one prompt: of a longer one the first million tokens count, so that one request does not put out what all others were sent.
const OF_PROMPT_MAX: usize = 1 << 12;

/// Places that are let go in one call where their time is over. More is entered than that in no call but those of the longest prompts.
const DROPPED_MAX: usize = 2 * OF_PROMPT_MAX;

/// A place is entered anew when it was used after so much of its time: what orders places has most of them once.
const ENTERED_AGAIN: Duration = Duration::from_secs(60);

/// Instances remembered at one place; of more, the last ones count.
const INSTANCES_MAX: usize = 8;

/// Instances that are known before those are forgotten that nothing was sent to.
const KNOWN_MAX: usize = 1 << 14;

/// Places of a prompt that are looked at behind the longest that somebody has: more than that shorter is worth little beside it.
const SHORTER_MAX: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Kept {
    instance: InstanceId,
    sent: Timestamp,
    /// When its first token is to be out.
    from: Timestamp,
    until: Timestamp,
    /// What had been computed there by then.
    computed_tokens: u64,
}

/// What is known of an instance.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Which of its lives, by when it began.
    life: u64,
    /// Since when that is known: what it was sent before is gone.
    since: Timestamp,
    /// Tokens of such prompts that it was sent to compute.
    computed_tokens: u64,
}

/// What was sent to whom. Hashes stand for whole prefixes, so that one place tells of all before it.
#[derive(Clone, Debug, Default)]
pub struct GuessedPrefixes {
    /// By hash, which whoever asks may choose: what orders them cannot be made to collide.
    places: BTreeMap<BlockHash, SmallVec<[Kept; 2]>>,
    /// In the order in which they were entered.
    order: VecDeque<(BlockHash, Timestamp)>,
    instances: BTreeMap<InstanceId, Known>,
}

impl GuessedPrefixes {
    /// An instance lives since `life`, a number above 0 that grows from one start to the next. What it was sent before it was started is gone.
    pub fn lives(&mut self, instance: InstanceId, life: u64, now: Timestamp) {
        if self.instances.len() >= KNOWN_MAX {
            // Of those that nothing was sent to of late nothing is kept.
            let are_in_use: BTreeSet<InstanceId> =
                self.places.values().flatten().map(|kept| kept.instance).collect();
            self.instances.retain(|instance, _| are_in_use.contains(instance));
        }
        let known = self.instances.entry(instance).or_default();
        // Of the first that is heard nothing was sent before.
        let since = if known.life == 0 { known.since } else { now };
        if known.life < life {
            *known = Known { life, since, ..*known };
        }
    }

    /// A request with these hashes was sent by this decision, to an instance whose memory holds `room_tokens` tokens, 0 where that is not known.
    pub fn sent(
        &mut self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        (decision, room_tokens): (&Decision, u64),
        now: Timestamp,
    ) {
        let over =
            |order: &VecDeque<(BlockHash, Timestamp)>| order.front().is_some_and(|(_, until)| *until < now);
        for _ in 0..DROPPED_MAX {
            if !over(&self.order) {
                break;
            }
            self.drop_oldest();
        }
        let instance = decision.instance;
        let known = self.instances.entry(instance).or_default();
        known.computed_tokens = known.computed_tokens.saturating_add(decision.recompute_tokens.into());
        let from = now.after(Duration::from_micros(decision.ttft_us()));
        let computed_tokens = known.computed_tokens;
        let kept = Kept { instance, sent: now, from, until: now.after(KEPT_FOR), computed_tokens };
        let all = places(request, hashes.len()).rev().take(OF_PROMPT_MAX);
        for place in all.map(|blocks| hashes[blocks - 1]) {
            let before =
                self.places.get(&place).and_then(|all| all.iter().find(|one| one.instance == instance));
            // What is there now stays there.
            let since =
                before.filter(|before| self.is_there(before, room_tokens, now)).map(|before| before.from);
            let entered = before.map_or(Timestamp::default(), |before| before.until);
            let kept = Kept { from: since.map_or(kept.from, |since| since.min(kept.from)), ..kept };
            let all = self.places.entry(place).or_default();
            match all.iter_mut().find(|known| known.instance == instance) {
                Some(known) if kept.until.since(entered) < ENTERED_AGAIN => {
                    *known = Kept { until: entered, ..kept };
                    continue;
                }
                Some(known) => *known = kept,
                None => {
                    if all.len() == INSTANCES_MAX {
                        all.remove(0);
                    }
                    all.push(kept);
                }
            }
            self.order.push_back((place, kept.until));
        }
        while self.order.len() > PLACES_MAX {
            self.drop_oldest();
        }
    }

    /// A request with these hashes does not run where it was sent: what is there since before that stays, and nothing else of it will be.
    pub fn take_back(&mut self, request: &RouteRequest, hashes: &[BlockHash], counted: &Counted) {
        if let Some(known) = self.instances.get_mut(&counted.instance) {
            known.computed_tokens = known.computed_tokens.saturating_sub(counted.tokens.into());
        }
        let from = counted.at.after(Duration::from_micros(counted.ttft_us));
        let is_its =
            |kept: &Kept| (kept.instance, kept.sent, kept.from) == (counted.instance, counted.at, from);
        for place in places(request, hashes.len()).rev().take(OF_PROMPT_MAX).map(|blocks| hashes[blocks - 1])
        {
            if let Some(all) = self.places.get_mut(&place) {
                all.retain(|kept| !is_its(kept));
                if all.is_empty() {
                    self.places.remove(&place);
                }
            }
        }
    }

    /// Leading blocks of a request that instances probably have, by ascending instance. `room_tokens` says how many tokens the memory of one holds, 0 where
    /// that is not known.
    #[must_use]
    pub fn of(
        &self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        room_tokens: impl Fn(InstanceId) -> u64,
        now: Timestamp,
    ) -> Vec<Resident> {
        let mut found: Vec<Resident> = Vec::new();
        let mut shorter = 0;
        for blocks in places(request, hashes.len()) {
            if shorter > SHORTER_MAX {
                break;
            }
            for kept in self.places.get(&hashes[blocks - 1]).into_iter().flatten() {
                let is_new = found.iter().all(|resident| resident.instance != kept.instance);
                if is_new && self.is_there(kept, room_tokens(kept.instance), now) {
                    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
                    found.push(Resident { instance: kept.instance, blocks });
                }
            }
            shorter += usize::from(!found.is_empty());
        }
        found.sort_unstable_by_key(|resident| resident.instance);
        found
    }

    /// How many times places were entered, for tests of what it costs.
    #[cfg(test)]
    pub(super) fn entered(&self) -> usize {
        self.order.len()
    }

    fn is_there(&self, kept: &Kept, room_tokens: u64, now: Timestamp) -> bool {
        let Some(known) = self.instances.get(&kept.instance) else { return false };
        let since = known.computed_tokens.saturating_sub(kept.computed_tokens);
        kept.from <= now
            && now < kept.until
            && kept.sent >= known.since
            && (room_tokens == 0 || since <= room_tokens)
    }

    fn drop_oldest(&mut self) {
        let Some((place, until)) = self.order.pop_front() else { return };
        if let Some(all) = self.places.get_mut(&place) {
            all.retain(|kept| kept.until > until);
            if all.is_empty() {
                self.places.remove(&place);
            }
        }
    }
}
