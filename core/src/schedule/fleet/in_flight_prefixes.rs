//! In-flight prefixes: blocks that an instance will have in GPU memory before a request starts,
//! because a prompt that was sent there is not computed yet.
//!
//! Engines report blocks when they exist. Of several requests with the same start within a moment,
//! each would find no cached block and be sent to a different instance to compute the same. So sent
//! prefixes are remembered until the report must have come. Not here: blocks in GPU memory
//! (ephemeral state), and the use of these prefixes (`mod.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use crate::id::{BlockHash, InstanceId, Timestamp};
use crate::schedule::RouteRequest;
use crate::schedule::explain::decision::Decision;
use crate::schedule::fleet::reassignment::RouteRecord;

/// Tokens between two checkpoints of a prompt: a shorter common prefix is not worth a lookup.
const CHECKPOINT_TOKENS: u32 = 256;

/// Grace time after the predicted first token; the report of the blocks must have come before its
/// end.
const GRACE: Duration = Duration::from_millis(500);

/// Longest time that an entry is remembered, regardless of the prediction.
const LIFE_MAX: Duration = Duration::from_secs(60);

/// Checkpoints remembered at once, over all prompts: room for over a million tokens in flight, in a
/// few megabytes.
const CHECKPOINTS_MAX: usize = 1 << 16;

/// Instances remembered at one checkpoint; the latest ones count.
const INSTANCES_MAX: usize = 8;

/// Leading blocks of a request that an instance will have before the request starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightPrefix {
    /// The instance.
    pub instance: InstanceId,
    /// Number of blocks.
    pub blocks: u32,
    /// Priority deadline of the request that computes them; a request that uses them goes after it.
    pub priority_deadline: Timestamp,
}

#[derive(Clone, Copy, Debug)]
struct InFlightEntry {
    instance: InstanceId,
    priority_deadline: Timestamp,
    until: Timestamp,
}

/// Prefixes that were sent lately. A hash covers the whole prefix, so one checkpoint stands for all
/// blocks before it.
#[derive(Clone, Debug, Default)]
pub struct InFlightPrefixes {
    /// Keyed by hash. A caller may choose hashes, so the map must not degrade with collisions.
    checkpoints: BTreeMap<BlockHash, SmallVec<[InFlightEntry; 2]>>,
    /// In insertion order.
    insertion_order: VecDeque<(BlockHash, Timestamp)>,
}

/// Block counts of a prompt at its checkpoints, longest first.
pub(in crate::schedule) fn checkpoints(
    request: &RouteRequest,
    hashes: usize,
) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let block_tokens = request.block_tokens.max(1);
    let step = (CHECKPOINT_TOKENS / block_tokens).max(1) as usize;
    let whole = (request.input_tokens / block_tokens) as usize;
    (1..=whole.min(hashes) / step).rev().map(move |nth| nth * step)
}

/// Expiry of an entry sent now with a prefill predicted to be done after `computed_us`.
fn expiry(computed_us: u64, now: Timestamp) -> Timestamp {
    now.after(Duration::from_micros(computed_us).saturating_add(GRACE).min(LIFE_MAX))
}

impl InFlightPrefixes {
    /// Records the prefix of a request that was sent by this decision.
    pub fn record(
        &mut self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        now: Timestamp,
    ) {
        self.drop_expired(now);
        let until = expiry(decision.predicted.ttft_us(), now);
        let sent = InFlightEntry {
            instance: decision.instance,
            priority_deadline: decision.priority_deadline,
            until,
        };
        for blocks in checkpoints(request, hashes.len()).rev() {
            let place = hashes[blocks - 1];
            let all = self.checkpoints.entry(place).or_default();
            // The earliest request on an instance serves all later ones.
            match all.iter_mut().find(|known| known.instance == sent.instance) {
                Some(known) => {
                    known.priority_deadline = known.priority_deadline.min(sent.priority_deadline);
                    known.until = known.until.max(sent.until);
                }
                None => {
                    if all.len() == INSTANCES_MAX {
                        all.remove(0);
                    }
                    all.push(sent);
                }
            }
            self.insertion_order.push_back((place, sent.until));
        }
        while self.insertion_order.len() > CHECKPOINTS_MAX {
            self.drop_oldest();
        }
    }

    /// Removes the prefix of a request that does not run where it was sent, as far as no other
    /// request brings it.
    pub fn retract(&mut self, request: &RouteRequest, hashes: &[BlockHash], route: &RouteRecord) {
        let until = expiry(route.prefill_done_us, route.recorded_at);
        // An entry that another request also brings has another expiry or deadline.
        let is_from_route = |sent: &InFlightEntry| {
            (sent.instance, sent.priority_deadline, sent.until)
                == (route.instance, route.priority_deadline, until)
        };
        for place in checkpoints(request, hashes.len()).map(|blocks| hashes[blocks - 1]) {
            if let Some(all) = self.checkpoints.get_mut(&place) {
                all.retain(|sent| !is_from_route(sent));
                if all.is_empty() {
                    self.checkpoints.remove(&place);
                }
            }
        }
    }

    /// The longest prefix of the request that is being computed anywhere, with its instances in
    /// ascending order.
    #[must_use]
    pub fn lookup(
        &self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        now: Timestamp,
    ) -> SmallVec<[InFlightPrefix; 4]> {
        if self.checkpoints.is_empty() {
            return SmallVec::new();
        }
        let alive = |blocks: usize| {
            let all = self.checkpoints.get(&hashes[blocks - 1]).map(SmallVec::as_slice).unwrap_or_default();
            all.iter().filter(move |sent| sent.until >= now)
        };
        let found = checkpoints(request, hashes.len()).find(|blocks| alive(*blocks).next().is_some());
        let Some(blocks) = found else { return SmallVec::new() };
        let of = |sent: &InFlightEntry| InFlightPrefix {
            instance: sent.instance,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            priority_deadline: sent.priority_deadline,
        };
        let mut all: SmallVec<[InFlightPrefix; 4]> = alive(blocks).map(of).collect();
        all.sort_unstable_by_key(|coming| coming.instance);
        all
    }

    /// Drops entries that a report must cover by now. Insertion order only approximates expiry
    /// order.
    fn drop_expired(&mut self, now: Timestamp) {
        while self.insertion_order.front().is_some_and(|(_, until)| *until < now) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let Some((place, until)) = self.insertion_order.pop_front() else { return };
        if let Some(all) = self.checkpoints.get_mut(&place) {
            all.retain(|sent| sent.until > until);
            if all.is_empty() {
                self.checkpoints.remove(&place);
            }
        }
    }
}
