//! A large fetch in stripes, which several lanes bring at once and which are handed on in prefix order.
//!
//! Stripes are begun in order and few ahead of the first that is not whole, so that what came too early is bounded. Frames of that
//! first one are handed on as they come; those of others wait. Once one comes short no more are begun: what lies behind it is of
//! no use. Not here: how a stripe is fetched, and what becomes of its lane's failure (`path.rs`).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvfleet_proto::frame::Frame;
use tokio::sync::Notify;

use super::parts::{Parts, skip};
use crate::{FetchAnswer, FetchRequest, MissReason, PathError};

/// How a fetch is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Blocks of each stripe but the last.
    blocks: usize,
    stripes: usize,
    /// Stripes under way at once.
    pub(super) at_once: usize,
    /// Stripes that may have begun from the first on that is not whole.
    window: usize,
}

impl Plan {
    /// Two stripes at once for each lane, so that the question of one is answered while the other's blocks come; nothing when there
    /// are too few lanes or bytes. `waiting_bytes_max` is for what came too early.
    pub(super) fn new(
        (blocks, frame_bytes): (usize, u64),
        lanes: usize,
        (stripe_bytes, waiting_bytes_max): (u64, u64),
    ) -> Option<Plan> {
        let of_stripe = usize::try_from((stripe_bytes / frame_bytes.max(1)).max(1)).unwrap_or(usize::MAX);
        let stripes = blocks.div_ceil(of_stripe);
        if lanes < 2 || frame_bytes == 0 || stripes < 2 || blocks as u64 * frame_bytes < 2 * stripe_bytes {
            return None;
        }
        let at_once = (2 * lanes).min(stripes);
        let fit = usize::try_from(waiting_bytes_max / stripe_bytes.max(1)).unwrap_or(usize::MAX);
        let window = (2 * at_once).min(fit.max(at_once));
        Some(Plan { blocks: of_stripe, stripes, at_once, window })
    }

    /// What is asked for one stripe.
    pub(super) fn request(&self, whole: &FetchRequest, stripe: usize) -> FetchRequest {
        let mut request = whole.clone();
        skip(&mut request, stripe * self.blocks);
        request.hashes.truncate(self.blocks);
        request
    }
}

/// What there is to do.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Stripe(usize),
    Wait,
    Nothing,
}

/// How far a striped fetch is.
struct Order<'a> {
    plan: Plan,
    sink: &'a mut (dyn FnMut(Frame) + Send),
    begun: usize,
    /// The first stripe that is not whole.
    head: usize,
    is_short: bool,
    /// Frames of stripes behind it.
    waiting: BTreeMap<usize, Vec<Frame>>,
    /// What became of them.
    ended: BTreeMap<usize, Result<FetchAnswer, PathError>>,
    parts: Parts,
    answer: Option<Result<FetchAnswer, PathError>>,
}

impl<'a> Order<'a> {
    fn new(plan: Plan, sink: &'a mut (dyn FnMut(Frame) + Send)) -> Order<'a> {
        let (waiting, ended) = (BTreeMap::new(), BTreeMap::new());
        let parts = Parts::default();
        Order { plan, sink, begun: 0, head: 0, is_short: false, waiting, ended, parts, answer: None }
    }

    fn begin(&mut self) -> Next {
        if self.is_short || self.begun == self.plan.stripes {
            return Next::Nothing;
        }
        if self.begun >= self.head + self.plan.window {
            return Next::Wait;
        }
        self.begun += 1;
        Next::Stripe(self.begun - 1)
    }

    fn put(&mut self, stripe: usize, frame: Frame) {
        if stripe == self.head {
            (self.sink)(frame);
        } else {
            self.waiting.entry(stripe).or_default().push(frame);
        }
    }

    fn end(&mut self, stripe: usize, answer: Result<FetchAnswer, PathError>) {
        self.is_short |= !matches!(answer, Ok(FetchAnswer::Hit { .. }));
        self.ended.insert(stripe, answer);
        while self.answer.is_none()
            && let Some(answer) = self.ended.remove(&self.head)
        {
            match answer {
                Ok(hit @ FetchAnswer::Hit { .. }) => self.parts.add(&hit, hit.tiers().len()),
                short => {
                    self.answer = Some(std::mem::take(&mut self.parts).end(short));
                    break;
                }
            }
            self.head += 1;
            self.waiting.remove(&self.head).into_iter().flatten().for_each(&mut self.sink);
            if self.head == self.plan.stripes {
                let all = Ok(FetchAnswer::Hit { tiers: Vec::new() });
                self.answer = Some(std::mem::take(&mut self.parts).end(all));
            }
        }
    }
}

/// A striped fetch, shared by those that bring its stripes.
pub(super) struct Stripes<'a> {
    order: Mutex<Order<'a>>,
    moved: Notify,
}

impl<'a> Stripes<'a> {
    pub(super) fn new(plan: Plan, sink: &'a mut (dyn FnMut(Frame) + Send)) -> Stripes<'a> {
        Stripes { order: Mutex::new(Order::new(plan, sink)), moved: Notify::new() }
    }

    fn order(&self) -> MutexGuard<'_, Order<'a>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once `look` finds something; looks whenever something ended.
    async fn until<T>(&self, mut look: impl FnMut(&mut Order<'a>) -> Option<T>) -> T {
        loop {
            let moved = self.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            if let Some(found) = look(&mut self.order()) {
                return found;
            }
            moved.await;
        }
    }

    /// The next stripe to be fetched, once it may be; nothing when there is none any more.
    pub(super) async fn next(&self) -> Option<usize> {
        let next = |order: &mut Order<'a>| match order.begin() {
            Next::Stripe(stripe) => Some(Some(stripe)),
            Next::Nothing => Some(None),
            Next::Wait => None,
        };
        self.until(next).await
    }

    /// A frame of this stripe came, behind those before it.
    pub(super) fn put(&self, stripe: usize, frame: Frame) {
        self.order().put(stripe, frame);
    }

    /// This became of a stripe.
    pub(super) fn end(&self, stripe: usize, answer: Result<FetchAnswer, PathError>) {
        self.order().end(stripe, answer);
        self.moved.notify_waiters();
    }

    /// Returns once it is known what the answer is.
    pub(super) async fn known(&self) {
        self.until(|order| order.answer.is_some().then_some(())).await;
    }

    /// The answer.
    ///
    /// # Errors
    /// That of the first stripe.
    pub(super) fn answer(self) -> Result<FetchAnswer, PathError> {
        let order = self.order.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Those that bring stripes end once there is an answer; were it not so, what came would stand all the same.
        let late = Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
        order.answer.unwrap_or_else(|| order.parts.end(late))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rand::seq::SliceRandom;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::suite::{fetch_request, frame, hash, hashes, in_dram};

    const MIB: u64 = 1 << 20;

    fn plan(blocks: usize, frame_bytes: u64, lanes: usize) -> Option<Plan> {
        Plan::new((blocks, frame_bytes), lanes, (8 * MIB, 128 * MIB))
    }

    #[test]
    fn only_what_is_large_is_divided_and_over_several_lanes() {
        assert_eq!(plan(16, MIB, 2), Some(Plan { blocks: 8, stripes: 2, at_once: 2, window: 4 }));
        assert_eq!(plan(160, MIB, 2), Some(Plan { blocks: 8, stripes: 20, at_once: 4, window: 8 }));
        assert_eq!(plan(1000, MIB, 8), Some(Plan { blocks: 8, stripes: 125, at_once: 16, window: 16 }));
        assert_eq!(plan(3, 20 * MIB, 2), Some(Plan { blocks: 1, stripes: 3, at_once: 3, window: 6 }));
        assert_eq!(plan(15, MIB, 2), None, "too little");
        assert_eq!(plan(160, MIB, 1), None, "over what");
        assert_eq!(plan(160, 0, 2), None, "nobody knows how much");
        assert_eq!(plan(1, 1 << 40, 2), None);
    }

    #[test]
    fn stripes_are_all_of_it_and_each_once() {
        let whole = FetchRequest { first_offset_blocks: 5, ..fetch_request(&hashes(19)) };
        let plan = plan(19, MIB, 2).unwrap();
        let stripes: Vec<_> = (0..3).map(|stripe| plan.request(&whole, stripe)).collect();
        let offsets: Vec<_> =
            stripes.iter().map(|stripe| (stripe.first_offset_blocks, stripe.hashes.len())).collect();
        assert_eq!(offsets, [(5, 8), (13, 8), (21, 3)]);
        assert_eq!(stripes.into_iter().flat_map(|stripe| stripe.hashes).collect::<Vec<_>>(), whole.hashes);
    }

    /// Whatever order stripes come in and wherever one comes short: what is handed on is in order, each once, as the answer says,
    /// and what waits is within the window.
    #[test]
    fn frames_are_handed_on_in_prefix_order() {
        for seed in 0..300 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let blocks = random.random_range(16..80);
            let plan = Plan::new((blocks, MIB), 2, (4 * MIB, 64 * MIB)).unwrap();
            let short = random.random_bool(0.5).then(|| random.random_range(0..blocks));
            let whole = fetch_request(&hashes(blocks as u32));
            let mut came = Vec::new();
            let mut sink = |frame: Frame| came.push(frame.hash);
            let mut order = Order::new(plan, &mut sink);
            // Stripes under way: which, and what is to come of each.
            let mut under_way: Vec<(usize, Vec<Frame>, Result<FetchAnswer, PathError>)> = Vec::new();
            loop {
                while under_way.len() < plan.at_once
                    && let Next::Stripe(stripe) = order.begin()
                {
                    assert!(stripe < order.head + plan.window, "seed {seed}");
                    let first = stripe * plan.blocks;
                    let count = plan.request(&whole, stripe).hashes.len();
                    let good = short.map_or(count, |short| short.saturating_sub(first).min(count));
                    let frames = (first..first + good).map(|number| frame(hash(number as u32), 8)).collect();
                    let hit = FetchAnswer::Hit { tiers: in_dram(count) };
                    let answer = Ok(hit.cut_short(good, MissReason::NotHeld));
                    under_way.push((stripe, frames, answer));
                }
                if under_way.is_empty() {
                    break;
                }
                under_way.shuffle(&mut random);
                let (stripe, frames, _) = &mut under_way[0];
                if frames.is_empty() {
                    let (stripe, _, answer) = under_way.swap_remove(0);
                    order.end(stripe, answer);
                } else {
                    order.put(*stripe, frames.remove(0));
                }
            }
            let answer = order.answer.take().expect("known once all ended").unwrap();
            let expected = short.unwrap_or(blocks);
            assert_eq!(answer.tiers().len(), expected, "seed {seed}");
            assert_eq!(matches!(answer, FetchAnswer::Hit { .. }), short.is_none(), "seed {seed}");
            assert_eq!(came, hashes(expected as u32), "seed {seed}");
        }
    }

    #[test]
    fn an_error_of_the_first_stripe_is_that_of_the_fetch_and_of_a_later_one_a_loss() {
        let broken = || Err(PathError::Broken { peer: "node".to_owned(), cause: "gone".to_owned() });
        let mut sink = |_| {};
        let mut order = Order::new(plan(16, MIB, 2).unwrap(), &mut sink);
        assert_eq!((order.begin(), order.begin()), (Next::Stripe(0), Next::Stripe(1)));
        order.end(1, broken());
        assert!(order.answer.is_none());
        order.end(0, Ok(FetchAnswer::Hit { tiers: in_dram(8) }));
        let lost = FetchAnswer::Partial { tiers: in_dram(8), reason: MissReason::NodeLost };
        assert_eq!(order.answer.take().unwrap().unwrap(), lost);
        let mut order = Order::new(plan(32, MIB, 2).unwrap(), &mut sink);
        order.begin();
        order.end(0, broken());
        assert!(order.answer.take().unwrap().is_err() && order.begin() == Next::Nothing);
    }
}
