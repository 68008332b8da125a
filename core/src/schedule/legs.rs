//! From whom each run of a prefix is fetched: of all choices the one that takes the least time to its end.
//!
//! A source's latency is paid once for consecutive runs, so who is nearest to one run may be the wrong one for two. The least time to the end of a
//! run from a certain holder is that of the run before from the same one, without its latency, or the least of the run before from anybody, with it:
//! one pass over the runs finds it for all of them. Only those holders are looked at that can matter: the nearest, those that go on from the run
//! before, and those that could go on into the next one. That is exact, in O(sources × runs).
//!
//! Not here: where to stop fetching, and what computing the rest takes (`cost.rs`).

use std::ops::Range;

use smallvec::SmallVec;

use super::decision::Source;
use super::lanes::Measure;
use crate::id::NodeId;
use crate::index::Holder;

/// Consecutive blocks with the live nodes that hold all of them.
pub(super) struct Run {
    pub start_blocks: u32,
    pub end_blocks: u32,
    /// By ascending node.
    pub holds: SmallVec<[Hold; 4]>,
    /// Which of them is the best for an instance at no node; none where there is none.
    pub nearest: Option<usize>,
    /// Which of them hold the next run as well, in the same tier.
    going_on: SmallVec<[usize; 4]>,
}

impl Run {
    pub(super) fn new(start_blocks: u32, end_blocks: u32, mut holds: SmallVec<[Hold; 4]>) -> Run {
        holds.sort_unstable_by_key(|hold| hold.holder.node);
        let all = holds.iter().enumerate();
        let nearest = all.min_by_key(|(_, hold)| hold.rank(hold.far.latency_ns)).map(|(at, _)| at);
        Run { start_blocks, end_blocks, holds, nearest, going_on: SmallVec::new() }
    }

    pub(super) fn of_nobody(start_blocks: u32, end_blocks: u32) -> Run {
        Run::new(start_blocks, end_blocks, SmallVec::new())
    }

    /// Notes which run comes behind it.
    pub(super) fn put_before(&mut self, next: Option<&Run>) {
        self.going_on.clear();
        let Some(next) = next else { return };
        let all = self.holds.iter().enumerate().filter(|(_, hold)| next.of(&hold.holder).is_some());
        self.going_on.extend(all.map(|(at, _)| at));
    }

    pub(super) fn held_by(&self, node: NodeId) -> Option<&Hold> {
        self.place_of(node).map(|at| &self.holds[at])
    }

    /// Where this node holds it in the same tier.
    fn of(&self, holder: &Holder) -> Option<usize> {
        self.place_of(holder.node).filter(|at| self.holds[*at].holder == *holder)
    }

    fn place_of(&self, node: NodeId) -> Option<usize> {
        self.holds.binary_search_by_key(&node, |hold| hold.holder.node).ok()
    }
}

/// One live node that holds a run, and how long the run takes from there.
#[derive(Clone, Copy)]
pub(super) struct Hold {
    pub holder: Holder,
    /// To an instance that is not at the same node.
    pub far: Way,
    /// Of what that was measured.
    pub measure: Measure,
    /// Orders equally good holders, another way for every request.
    pub turn: u64,
}

impl Hold {
    /// Orders holders from afar: by time, then by turn.
    pub(super) fn rank(&self, latency_ns: u64) -> (u64, u64, NodeId) {
        (latency_ns.saturating_add(self.far.stream_ns), self.turn, self.holder.node)
    }
}

/// A lane with the time a run takes through it.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub latency_ns: u64,
    pub stream_ns: u64,
}

/// What the asking instance's own node holds of a run, and how long that takes from there.
pub(super) struct Near<'a> {
    pub hold: &'a Hold,
    pub way: Way,
    pub measure: Measure,
}

/// Whose way it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Own,
    Other,
    /// Where the own node holds the run, too.
    OtherThanOwn,
}

/// How long a run takes, and how that counts.
#[derive(Clone, Copy)]
struct Counted {
    way: Way,
    of: Of,
}

/// The least time to the end of a run, with this holder as its source.
#[derive(Clone, Copy)]
struct Step {
    holder: Holder,
    start_blocks: u32,
    end_blocks: u32,
    /// Equal times are ordered by these.
    is_far: bool,
    turn: u64,
    /// Time as it counts in the choice, and as it is.
    counted_ns: u64,
    ns: u64,
    /// The step before: one with the same source, or the best of all.
    before: Option<usize>,
    extends: bool,
}

impl Step {
    fn rank(&self) -> (u64, bool, u64, NodeId) {
        (self.counted_ns, self.is_far, self.turn, self.holder.node)
    }
}

/// All that matters of the runs so far.
#[derive(Default)]
pub(super) struct Legs {
    steps: SmallVec<[Step; 8]>,
    /// Which are those of the last run, by ascending node.
    last: Range<usize>,
    /// The best of the last run.
    best: Option<usize>,
}

/// One of [`Legs`] to the end of some run.
#[derive(Clone, Copy)]
pub(super) struct End(usize);

impl Legs {
    /// Goes on with a run that somebody holds. The own node is asked where it holds it, which spares the network, unless that tier of it was measured
    /// to be clearly slower than that of another: others count as a quarter slower than they are then.
    pub(super) fn push(&mut self, run: &Run, near: Option<&Near<'_>>) {
        let first = self.steps.len();
        for at in self.worth_a_look(run, near.is_some()) {
            let hold = &run.holds[at];
            let way = match near {
                Some(near) if near.hold.holder.node == hold.holder.node => {
                    Counted { way: near.way, of: Of::Own }
                }
                // A price through other tiers is in part the profile's guess of the medium.
                Some(near) if !(is_of_tier(near.measure) && is_of_tier(hold.measure)) => continue,
                Some(_) => Counted { way: hold.far, of: Of::OtherThanOwn },
                None => Counted { way: hold.far, of: Of::Other },
            };
            let step = self.step(run, hold, way);
            self.steps.push(step);
        }
        self.last = first..self.steps.len();
        self.best = self.last.clone().min_by_key(|at| self.steps[*at].rank());
    }

    /// Places of holders, ascending.
    fn worth_a_look(&self, run: &Run, all: bool) -> SmallVec<[usize; 8]> {
        if all {
            return (0..run.holds.len()).collect();
        }
        let before = self.steps[self.last.clone()].iter().filter_map(|step| run.of(&step.holder));
        let mut places: SmallVec<[usize; 8]> =
            run.nearest.into_iter().chain(run.going_on.iter().copied()).chain(before).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The least time to the end of a run by this way.
    fn step(&self, run: &Run, hold: &Hold, Counted { way, of }: Counted) -> Step {
        let counts = |ns: u64| if of == Of::OtherThanOwn { ns.saturating_add(ns / CLEARLY) } else { ns };
        let (counted_ns, ns) = self.best.map_or((0, 0), |at| (self.steps[at].counted_ns, self.steps[at].ns));
        let anew_ns = way.latency_ns.saturating_add(way.stream_ns);
        let anew = Step {
            holder: hold.holder,
            start_blocks: run.start_blocks,
            end_blocks: run.end_blocks,
            is_far: of != Of::Own,
            turn: hold.turn,
            counted_ns: counted_ns.saturating_add(counts(anew_ns)),
            ns: ns.saturating_add(anew_ns),
            before: self.best,
            extends: false,
        };
        let last = &self.steps[self.last.clone()];
        let Ok(at) = last.binary_search_by_key(&hold.holder.node, |step| step.holder.node) else {
            return anew;
        };
        let before = last[at];
        if before.holder != hold.holder {
            return anew;
        }
        let counted_ns = before.counted_ns.saturating_add(counts(way.stream_ns));
        let ns = before.ns.saturating_add(way.stream_ns);
        let on = Step { counted_ns, ns, before: Some(self.last.start + at), extends: true, ..anew };
        if on.counted_ns <= anew.counted_ns { on } else { anew }
    }

    /// The best to the end of the last run.
    pub(super) fn end(&self) -> Option<End> {
        self.best.map(End)
    }

    /// How long it takes.
    pub(super) fn ns(&self, end: End) -> u64 {
        self.steps[end.0].ns
    }

    /// Who is the last source.
    pub(super) fn holder(&self, end: End) -> Holder {
        self.steps[end.0].holder
    }

    /// All sources to that end, in the order of the prefix.
    pub(super) fn sources(&self, end: End) -> SmallVec<[Source; 4]> {
        let mut sources = SmallVec::<[Source; 4]>::new();
        let mut at = Some(end.0);
        let mut is_of_later = false;
        while let Some(step) = at.map(|at| self.steps[at]) {
            let len_blocks = step.end_blocks - step.start_blocks;
            match sources.last_mut().filter(|_| is_of_later) {
                Some(source) => {
                    source.start_blocks = step.start_blocks;
                    source.len_blocks += len_blocks;
                }
                None => {
                    let Holder { node, epoch, tier } = step.holder;
                    sources.push(Source { node, epoch, tier, start_blocks: step.start_blocks, len_blocks });
                }
            }
            (at, is_of_later) = (step.before, step.extends);
        }
        sources.reverse();
        sources
    }
}

/// A quarter more: what is below four fifths is clearly less. Two estimates that are about the same change places with every report, and requests would
/// with them.
const CLEARLY: u64 = 4;

/// Whether the tier itself was measured.
fn is_of_tier(measure: Measure) -> bool {
    matches!(measure, Measure::TierOverPath | Measure::Tier)
}
