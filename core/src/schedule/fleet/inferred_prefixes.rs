//! Inferred prefixes: prompts that instances probably keep in GPU memory although no engine reports
//! them, because they were hashed as text for want of a tokenizer.
//!
//! Engines report blocks of tokens, and pieces of text are none. So sent prompts count instead.
//! From its first token on, an instance is assumed to have the prompt. That ends when it has
//! computed about as many tokens as its memory holds, and after [`RETENTION`] at the latest. A
//! wrong guess shows in the TTFT, which corrects predictions. Not here: blocks reported by engines
//! (ephemeral state), and prompts that are not computed yet (`in_flight_prefixes.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use crate::id::{BlockHash, InstanceId, Timestamp};
use crate::schedule::explain::decision::Decision;
use crate::schedule::fleet::in_flight_prefixes::checkpoints;
use crate::schedule::fleet::reassignment::RouteRecord;
use crate::schedule::{ResidentPrefix, RouteRequest};

/// Longest time that an instance is assumed to keep a prompt, however little it computed since.
pub(in crate::schedule) const RETENTION: Duration = Duration::from_secs(600);

/// Checkpoints remembered at once, one for each 256 tokens: 64 million tokens of text, in some
/// thirty megabytes.
const CHECKPOINTS_MAX: usize = 1 << 18;

/// Checkpoints of one prompt: of a longer one the first million tokens count, so that one request
/// does not evict all others.
const PROMPT_CHECKPOINTS_MAX: usize = 1 << 12;

/// Expired checkpoints removed in one call. Only calls with the longest prompts insert more than
/// that.
const DROPPED_MAX: usize = 2 * PROMPT_CHECKPOINTS_MAX;

/// A checkpoint is inserted again if it was used after this much of its time; so most checkpoints
/// appear once in the insertion order.
const REINSERT_AFTER: Duration = Duration::from_secs(60);

/// Instances remembered at one checkpoint; the latest ones count.
const INSTANCES_MAX: usize = 8;

/// Known instances above which unused ones are forgotten.
const INSTANCES_KNOWN_MAX: usize = 1 << 14;

/// Checkpoints checked below the longest match: a much shorter match is worth little beside it.
const SHORTER_CHECKPOINTS_MAX: usize = 64;

#[derive(Clone, Copy, Debug)]
struct InferredEntry {
    instance: InstanceId,
    sent_at: Timestamp,
    /// Predicted time of its first token.
    resident_from: Timestamp,
    expiry: Timestamp,
    /// The instance's `computed_tokens` at that time.
    computed_tokens: u64,
}

/// Data of one instance.
#[derive(Clone, Copy, Debug, Default)]
struct InstanceHistory {
    /// Its current incarnation, by start time.
    incarnation: u64,
    /// When that became known: earlier prompts are gone.
    incarnation_since: Timestamp,
    /// Tokens of such prompts that it was sent to compute.
    computed_tokens: u64,
}

/// Prompts that were sent to instances. A hash covers the whole prefix, so one checkpoint stands
/// for all blocks before it.
#[derive(Clone, Debug, Default)]
pub struct InferredPrefixes {
    /// Keyed by hash. A caller may choose hashes, so the map must not degrade with collisions.
    checkpoints: BTreeMap<BlockHash, SmallVec<[InferredEntry; 2]>>,
    /// In insertion order.
    insertion_order: VecDeque<(BlockHash, Timestamp)>,
    instances: BTreeMap<InstanceId, InstanceHistory>,
}

impl InferredPrefixes {
    /// Records the incarnation of an instance, a number above 0 that grows with each start. Prompts
    /// sent before a restart are gone.
    pub fn set_incarnation(&mut self, instance: InstanceId, incarnation: u64, now: Timestamp) {
        if self.instances.len() >= INSTANCES_KNOWN_MAX {
            // Forgets instances without any remembered prompt.
            let are_in_use: BTreeSet<InstanceId> =
                self.checkpoints.values().flatten().map(|kept| kept.instance).collect();
            self.instances.retain(|instance, _| are_in_use.contains(instance));
        }
        let known = self.instances.entry(instance).or_default();
        // For the first known incarnation, no earlier one was sent prompts.
        let since = if known.incarnation == 0 { known.incarnation_since } else { now };
        if known.incarnation < incarnation {
            *known = InstanceHistory { incarnation, incarnation_since: since, ..*known };
        }
    }

    /// Records a request that was sent by this decision, to an instance with a KV capacity of
    /// `kv_tokens_max` tokens; 0 if unknown.
    pub fn record(
        &mut self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        kv_tokens_max: u64,
        now: Timestamp,
    ) {
        let is_front_expired =
            |order: &VecDeque<(BlockHash, Timestamp)>| order.front().is_some_and(|(_, until)| *until < now);
        for _ in 0..DROPPED_MAX {
            if !is_front_expired(&self.insertion_order) {
                break;
            }
            self.drop_oldest();
        }
        let instance = decision.instance;
        let known = self.instances.entry(instance).or_default();
        known.computed_tokens = known.computed_tokens.saturating_add(decision.recompute_tokens.into());
        let from = now.after(Duration::from_micros(decision.ttft_us()));
        let computed_tokens = known.computed_tokens;
        let kept = InferredEntry {
            instance,
            sent_at: now,
            resident_from: from,
            expiry: now.after(RETENTION),
            computed_tokens,
        };
        let all = checkpoints(request, hashes.len()).rev().take(PROMPT_CHECKPOINTS_MAX);
        for place in all.map(|blocks| hashes[blocks - 1]) {
            let before =
                self.checkpoints.get(&place).and_then(|all| all.iter().find(|one| one.instance == instance));
            // A prompt that is resident now stays resident.
            let since = before
                .filter(|before| self.is_resident(before, kv_tokens_max, now))
                .map(|before| before.resident_from);
            let entered = before.map_or(Timestamp::default(), |before| before.expiry);
            let kept = InferredEntry {
                resident_from: since.map_or(kept.resident_from, |since| since.min(kept.resident_from)),
                ..kept
            };
            let all = self.checkpoints.entry(place).or_default();
            match all.iter_mut().find(|known| known.instance == instance) {
                Some(known) if kept.expiry.since(entered) < REINSERT_AFTER => {
                    *known = InferredEntry { expiry: entered, ..kept };
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
            self.insertion_order.push_back((place, kept.expiry));
        }
        while self.insertion_order.len() > CHECKPOINTS_MAX {
            self.drop_oldest();
        }
    }

    /// Removes the prefix of a request that does not run where it was sent. Blocks from earlier
    /// requests stay.
    pub fn retract(&mut self, request: &RouteRequest, hashes: &[BlockHash], route: &RouteRecord) {
        if let Some(known) = self.instances.get_mut(&route.instance) {
            known.computed_tokens = known.computed_tokens.saturating_sub(route.tokens.into());
        }
        let from = route.recorded_at.after(Duration::from_micros(route.ttft_us));
        let is_from_route = |kept: &InferredEntry| {
            (kept.instance, kept.sent_at, kept.resident_from) == (route.instance, route.recorded_at, from)
        };
        for place in checkpoints(request, hashes.len())
            .rev()
            .take(PROMPT_CHECKPOINTS_MAX)
            .map(|blocks| hashes[blocks - 1])
        {
            if let Some(all) = self.checkpoints.get_mut(&place) {
                all.retain(|kept| !is_from_route(kept));
                if all.is_empty() {
                    self.checkpoints.remove(&place);
                }
            }
        }
    }

    /// Leading blocks of a request that instances probably have, by ascending instance.
    /// `kv_tokens_max` returns the KV capacity of an instance in tokens; 0 if unknown.
    #[must_use]
    pub fn lookup(
        &self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        kv_tokens_max: impl Fn(InstanceId) -> u64,
        now: Timestamp,
    ) -> Vec<ResidentPrefix> {
        let mut found: Vec<ResidentPrefix> = Vec::new();
        let mut shorter = 0;
        for blocks in checkpoints(request, hashes.len()) {
            if shorter > SHORTER_CHECKPOINTS_MAX {
                break;
            }
            for kept in self.checkpoints.get(&hashes[blocks - 1]).into_iter().flatten() {
                let is_new = found.iter().all(|resident| resident.instance != kept.instance);
                if is_new && self.is_resident(kept, kv_tokens_max(kept.instance), now) {
                    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
                    found.push(ResidentPrefix { instance: kept.instance, blocks });
                }
            }
            shorter += usize::from(!found.is_empty());
        }
        found.sort_unstable_by_key(|resident| resident.instance);
        found
    }

    /// Number of entries in the insertion order, for tests of the cost.
    #[cfg(test)]
    pub(in crate::schedule) fn insertions(&self) -> usize {
        self.insertion_order.len()
    }

    fn is_resident(&self, kept: &InferredEntry, kv_tokens_max: u64, now: Timestamp) -> bool {
        let Some(known) = self.instances.get(&kept.instance) else { return false };
        let since = known.computed_tokens.saturating_sub(kept.computed_tokens);
        kept.resident_from <= now
            && now < kept.expiry
            && kept.sent_at >= known.incarnation_since
            && (kv_tokens_max == 0 || since <= kv_tokens_max)
    }

    fn drop_oldest(&mut self) {
        let Some((place, until)) = self.insertion_order.pop_front() else { return };
        if let Some(all) = self.checkpoints.get_mut(&place) {
            all.retain(|kept| kept.expiry > until);
            if all.is_empty() {
                self.checkpoints.remove(&place);
            }
        }
    }
}
