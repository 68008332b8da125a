//! The source of each run of a prefix: finds the combination with the least time to the end.
//!
//! A source's latency is paid once for consecutive runs, so the fastest source of one run may be
//! the wrong one for two. The least time to the end of a run from a given holder is one of two: the
//! time of the previous run from the same holder, without its latency, or the least time of the
//! previous run from any holder, with it. One pass over the runs finds it for all of them. Only
//! holders that can matter are considered: the fastest, those that continue from the previous run,
//! and those that could continue into the next. That is exact, in O(sources × runs).
//!
//! Not here: where to stop fetching, and the time to compute the rest (`cost.rs`).

use std::ops::Range;

use crate::id::NodeId;
use crate::index::Holder;
use crate::schedule::explain::decision::Source;
use crate::schedule::sources::link_stats::PriceBasis;
use smallvec::SmallVec;

/// Consecutive blocks and the live nodes that hold all of them.
pub(in crate::schedule) struct SourceRun {
    pub start_blocks: u32,
    pub end_blocks: u32,
    /// By ascending node.
    pub holders: SmallVec<[RunHolder; 4]>,
    /// Index of the fastest remote holder; `None` if there is no holder.
    pub fastest: Option<usize>,
    /// Indices of the holders that also hold the next run in the same tier.
    continuing: SmallVec<[usize; 4]>,
}

impl SourceRun {
    pub(in crate::schedule) fn new(
        start_blocks: u32,
        end_blocks: u32,
        mut holders: SmallVec<[RunHolder; 4]>,
    ) -> SourceRun {
        holders.sort_unstable_by_key(|hold| hold.holder.node);
        let all = holders.iter().enumerate();
        let fastest = all.min_by_key(|(_, hold)| hold.rank(hold.remote.latency_ns)).map(|(at, _)| at);
        SourceRun { start_blocks, end_blocks, holders, fastest, continuing: SmallVec::new() }
    }

    pub(in crate::schedule) fn unheld(start_blocks: u32, end_blocks: u32) -> SourceRun {
        SourceRun::new(start_blocks, end_blocks, SmallVec::new())
    }

    /// Sets the run that follows.
    pub(in crate::schedule) fn link_next(&mut self, next: Option<&SourceRun>) {
        self.continuing.clear();
        let Some(next) = next else { return };
        let all =
            self.holders.iter().enumerate().filter(|(_, hold)| next.index_of_holder(&hold.holder).is_some());
        self.continuing.extend(all.map(|(at, _)| at));
    }

    pub(in crate::schedule) fn held_by(&self, node: NodeId) -> Option<&RunHolder> {
        self.index_of_node(node).map(|at| &self.holders[at])
    }

    /// Index of this holder, if the node holds the run in the same tier.
    fn index_of_holder(&self, holder: &Holder) -> Option<usize> {
        self.index_of_node(holder.node).filter(|at| self.holders[*at].holder == *holder)
    }

    fn index_of_node(&self, node: NodeId) -> Option<usize> {
        self.holders.binary_search_by_key(&node, |hold| hold.holder.node).ok()
    }
}

/// One live node that holds a run, with the transfer time from there.
#[derive(Clone, Copy)]
pub(in crate::schedule) struct RunHolder {
    pub holder: Holder,
    /// Transfer time to an instance on another host.
    pub remote: TransferTime,
    /// Basis of that price.
    pub basis: PriceBasis,
    /// Orders equally fast holders, differently for each request.
    pub tie_break: u64,
}

impl RunHolder {
    /// Order of remote holders: by time, then by tie-break.
    pub(in crate::schedule) fn rank(&self, latency_ns: u64) -> (u64, u64, NodeId) {
        (latency_ns.saturating_add(self.remote.stream_ns), self.tie_break, self.holder.node)
    }
}

/// Latency and streaming time of a run over one path.
#[derive(Clone, Copy)]
pub(in crate::schedule) struct TransferTime {
    pub latency_ns: u64,
    pub stream_ns: u64,
}

/// The part of a run that the instance's own node holds, with its transfer time.
pub(in crate::schedule) struct LocalHolder<'a> {
    pub holder: &'a RunHolder,
    pub time: TransferTime,
    pub basis: PriceBasis,
}

/// Location of a source relative to the instance.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Locality {
    Local,
    Remote,
    /// Remote, although the own node holds the run too.
    RemoteDespiteLocal,
}

/// A transfer time with its location.
#[derive(Clone, Copy)]
struct WeightedTime {
    time: TransferTime,
    locality: Locality,
}

/// The least time to the end of a run with this holder as its source.
#[derive(Clone, Copy)]
struct SearchStep {
    holder: Holder,
    start_blocks: u32,
    end_blocks: u32,
    /// Order of equal times.
    is_remote: bool,
    tie_break: u64,
    /// Time with the remote penalty, for comparison, and without it.
    weighted_ns: u64,
    ns: u64,
    /// The previous step: the one with the same source, or the best of all.
    previous: Option<usize>,
    extends_source: bool,
}

impl SearchStep {
    fn rank(&self) -> (u64, bool, u64, NodeId) {
        (self.weighted_ns, self.is_remote, self.tie_break, self.holder.node)
    }
}

/// The state of the search over the runs so far.
#[derive(Default)]
pub(in crate::schedule) struct SourceSearch {
    steps: SmallVec<[SearchStep; 8]>,
    /// Steps of the last run, by ascending node.
    last: Range<usize>,
    /// The best step of the last run.
    best: Option<usize>,
}

/// A step of [`SourceSearch`] that ends some run.
#[derive(Clone, Copy)]
pub(in crate::schedule) struct SearchEnd(usize);

impl SourceSearch {
    /// Adds a run that has a holder. The own node is preferred, which saves network bandwidth,
    /// unless that tier of it was measured to be clearly slower than another node's. Remote sources
    /// then count as a quarter slower than they are.
    pub(in crate::schedule) fn push(&mut self, run: &SourceRun, near: Option<&LocalHolder<'_>>) {
        let first = self.steps.len();
        for at in self.relevant_holders(run, near.is_some()) {
            let hold = &run.holders[at];
            let way = match near {
                Some(near) if near.holder.holder.node == hold.holder.node => {
                    WeightedTime { time: near.time, locality: Locality::Local }
                }
                // A price from other tiers is partly the profile's guess for the medium.
                Some(near) if !(is_tier_measured(near.basis) && is_tier_measured(hold.basis)) => continue,
                Some(_) => WeightedTime { time: hold.remote, locality: Locality::RemoteDespiteLocal },
                None => WeightedTime { time: hold.remote, locality: Locality::Remote },
            };
            let step = self.step(run, hold, way);
            self.steps.push(step);
        }
        self.last = first..self.steps.len();
        self.best = self.last.clone().min_by_key(|at| self.steps[*at].rank());
    }

    /// Indices of holders, ascending.
    fn relevant_holders(&self, run: &SourceRun, consider_all: bool) -> SmallVec<[usize; 8]> {
        if consider_all {
            return (0..run.holders.len()).collect();
        }
        let before =
            self.steps[self.last.clone()].iter().filter_map(|step| run.index_of_holder(&step.holder));
        let mut places: SmallVec<[usize; 8]> =
            run.fastest.into_iter().chain(run.continuing.iter().copied()).chain(before).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The least time to the end of a run with this transfer.
    fn step(
        &self,
        run: &SourceRun,
        hold: &RunHolder,
        WeightedTime { time: way, locality: of }: WeightedTime,
    ) -> SearchStep {
        let counts = |ns: u64| {
            if of == Locality::RemoteDespiteLocal {
                ns.saturating_add(ns / REMOTE_PENALTY_DIVISOR)
            } else {
                ns
            }
        };
        let (counted_ns, ns) = self.best.map_or((0, 0), |at| (self.steps[at].weighted_ns, self.steps[at].ns));
        let restart_ns = way.latency_ns.saturating_add(way.stream_ns);
        let restart = SearchStep {
            holder: hold.holder,
            start_blocks: run.start_blocks,
            end_blocks: run.end_blocks,
            is_remote: of != Locality::Local,
            tie_break: hold.tie_break,
            weighted_ns: counted_ns.saturating_add(counts(restart_ns)),
            ns: ns.saturating_add(restart_ns),
            previous: self.best,
            extends_source: false,
        };
        let last = &self.steps[self.last.clone()];
        let Ok(at) = last.binary_search_by_key(&hold.holder.node, |step| step.holder.node) else {
            return restart;
        };
        let before = last[at];
        if before.holder != hold.holder {
            return restart;
        }
        let counted_ns = before.weighted_ns.saturating_add(counts(way.stream_ns));
        let ns = before.ns.saturating_add(way.stream_ns);
        let extended = SearchStep {
            weighted_ns: counted_ns,
            ns,
            previous: Some(self.last.start + at),
            extends_source: true,
            ..restart
        };
        if extended.weighted_ns <= restart.weighted_ns { extended } else { restart }
    }

    /// The best step of the last run.
    pub(in crate::schedule) fn end(&self) -> Option<SearchEnd> {
        self.best.map(SearchEnd)
    }

    /// Its total time, in nanoseconds.
    pub(in crate::schedule) fn ns(&self, end: SearchEnd) -> u64 {
        self.steps[end.0].ns
    }

    /// The last source.
    pub(in crate::schedule) fn holder(&self, end: SearchEnd) -> Holder {
        self.steps[end.0].holder
    }

    /// All sources up to that end, in prefix order.
    pub(in crate::schedule) fn sources(&self, end: SearchEnd) -> SmallVec<[Source; 4]> {
        let mut sources = SmallVec::<[Source; 4]>::new();
        let mut at = Some(end.0);
        let mut is_same_source = false;
        while let Some(step) = at.map(|at| self.steps[at]) {
            let len_blocks = step.end_blocks - step.start_blocks;
            match sources.last_mut().filter(|_| is_same_source) {
                Some(source) => {
                    source.start_blocks = step.start_blocks;
                    source.len_blocks += len_blocks;
                }
                None => {
                    let Holder { node, epoch, tier } = step.holder;
                    sources.push(Source { node, epoch, tier, start_blocks: step.start_blocks, len_blocks });
                }
            }
            (at, is_same_source) = (step.previous, step.extends_source);
        }
        sources.reverse();
        sources
    }
}

/// Remote sources count a quarter slower, so one below four fifths is clearly faster. Without this
/// margin, two similar estimates would swap with every report, and requests would follow.
const REMOTE_PENALTY_DIVISOR: u64 = 4;

/// Whether the price comes from a measurement of the tier itself.
fn is_tier_measured(measure: PriceBasis) -> bool {
    matches!(measure, PriceBasis::TierOverPath | PriceBasis::Tier)
}
