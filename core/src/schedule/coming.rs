//! Blocks that an instance will have in GPU memory before a request's turn: they are of a prompt that was sent there and is not computed yet.
//!
//! Word of blocks comes when they are there. Of requests that begin alike and come within a moment, each would find nothing before that, and go to an instance of its
//! own to compute the same. What was sent is remembered until word of it must have come. Not here: what is in GPU memory (the soft plane), and what is made
//! of it (`mod.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use super::RouteRequest;
use super::decision::Decision;
use super::moved::Counted;
use crate::id::{BlockHash, InstanceId, Timestamp};

/// Tokens between two places at which prompts are compared: less in common is not worth a search.
const PLACE_TOKENS: u32 = 256;

/// So long after the first token was to be there word of the blocks has come, or they never were.
const GRACE: Duration = Duration::from_millis(500);

/// Longest that anything is remembered, whatever was predicted.
const LIFE_MAX: Duration = Duration::from_secs(60);

/// Places remembered at once, of all prompts: a million tokens' worth and more under way, in a few megabytes.
const PLACES_MAX: usize = 1 << 16;

/// Instances remembered at one place; of more that compute the same, the last ones count.
const INSTANCES_MAX: usize = 8;

/// Leading blocks of a request that an instance will have before its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coming {
    /// The instance.
    pub instance: InstanceId,
    /// How many.
    pub blocks: u32,
    /// The turn of the request that brings them: who wants them goes behind it.
    pub turn: Timestamp,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    instance: InstanceId,
    turn: Timestamp,
    until: Timestamp,
}

/// What was sent lately. Hashes stand for whole prefixes, so that one place tells of all before it.
#[derive(Clone, Debug, Default)]
pub struct SentPrefixes {
    /// By hash, which whoever asks may choose: what orders them cannot be made to collide.
    places: BTreeMap<BlockHash, SmallVec<[Sent; 2]>>,
    /// In the order in which they were entered.
    order: VecDeque<(BlockHash, Timestamp)>,
}

/// Numbers of blocks after which a prompt has a place, the longest first.
pub(super) fn places(
    request: &RouteRequest,
    hashes: usize,
) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let block_tokens = request.block_tokens.max(1);
    let step = (PLACE_TOKENS / block_tokens).max(1) as usize;
    let whole = (request.input_tokens / block_tokens) as usize;
    (1..=whole.min(hashes) / step).rev().map(move |nth| nth * step)
}

/// Until when what was sent now is remembered, whose prompt is predicted to be computed after so long.
fn until(computed_us: u64, now: Timestamp) -> Timestamp {
    now.after(Duration::from_micros(computed_us).saturating_add(GRACE).min(LIFE_MAX))
}

impl SentPrefixes {
    /// A request with these hashes was sent by this decision.
    pub fn sent(
        &mut self,
        request: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        now: Timestamp,
    ) {
        self.forget(now);
        let until = until(decision.predicted.ttft_us(), now);
        let sent = Sent { instance: decision.instance, turn: decision.turn, until };
        for blocks in places(request, hashes.len()).rev() {
            let place = hashes[blocks - 1];
            let all = self.places.entry(place).or_default();
            // What comes first at an instance brings it to all behind it.
            match all.iter_mut().find(|known| known.instance == sent.instance) {
                Some(known) => {
                    known.turn = known.turn.min(sent.turn);
                    known.until = known.until.max(sent.until);
                }
                None => {
                    if all.len() == INSTANCES_MAX {
                        all.remove(0);
                    }
                    all.push(sent);
                }
            }
            self.order.push_back((place, sent.until));
        }
        while self.order.len() > PLACES_MAX {
            self.drop_oldest();
        }
    }

    /// A request with these hashes does not run where it was sent: what it alone was to bring there does not come.
    pub fn take_back(&mut self, request: &RouteRequest, hashes: &[BlockHash], counted: &Counted) {
        let until = until(counted.computed_us, counted.at);
        // Where another one brings it too, its time or its turn is another.
        let is_its =
            |sent: &Sent| (sent.instance, sent.turn, sent.until) == (counted.instance, counted.turn, until);
        for place in places(request, hashes.len()).map(|blocks| hashes[blocks - 1]) {
            if let Some(all) = self.places.get_mut(&place) {
                all.retain(|sent| !is_its(sent));
                if all.is_empty() {
                    self.places.remove(&place);
                }
            }
        }
    }

    /// What of a request's prefix is being computed, and where: the longest that any instance will have, by ascending instance.
    #[must_use]
    pub fn of(&self, request: &RouteRequest, hashes: &[BlockHash], now: Timestamp) -> SmallVec<[Coming; 4]> {
        if self.places.is_empty() {
            return SmallVec::new();
        }
        let alive = |blocks: usize| {
            let all = self.places.get(&hashes[blocks - 1]).map(SmallVec::as_slice).unwrap_or_default();
            all.iter().filter(move |sent| sent.until >= now)
        };
        let found = places(request, hashes.len()).find(|blocks| alive(*blocks).next().is_some());
        let Some(blocks) = found else { return SmallVec::new() };
        let of = |sent: &Sent| Coming {
            instance: sent.instance,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            turn: sent.turn,
        };
        let mut all: SmallVec<[Coming; 4]> = alive(blocks).map(of).collect();
        all.sort_unstable_by_key(|coming| coming.instance);
        all
    }

    /// Forgets what word must have come of. Those entered first may outlast others; they go in turn.
    fn forget(&mut self, now: Timestamp) {
        while self.order.front().is_some_and(|(_, until)| *until < now) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let Some((place, until)) = self.order.pop_front() else { return };
        if let Some(all) = self.places.get_mut(&place) {
            all.retain(|sent| sent.until > until);
            if all.is_empty() {
                self.places.remove(&place);
            }
        }
    }
}
