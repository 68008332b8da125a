//! The planners of one request: one for all instances that take the same paths to the nodes that hold the prefix.
//!
//! Most often that is one. Not here: what a plan is (`cost.rs`).

use smallvec::SmallVec;

use super::cost::{Asking, Paths, Planner};
use super::fleet::{Fleet, Instance, InstancePaths};
use super::{LinkPath, RouteRequest};
use crate::id::NodeId;
use crate::index::PrefixMatch;

/// Planners of instances that take another path than their usual one to some holder. Above it such an instance is priced as
/// if it took its usual one: a decision may not cost a pass over the prefix for each instance.
const OTHERWISE_MAX: usize = 8;

/// Most there are: one for each usual path and for none besides.
const PLANNERS_MAX: usize = OTHERWISE_MAX + LinkPath::ALL.len() + 1;

pub(super) struct Planners<'a> {
    request: &'a RouteRequest,
    matched: &'a PrefixMatch,
    fleet: &'a Fleet,
    /// Live nodes that hold any of the prefix, by ascending node.
    holders: SmallVec<[NodeId; 8]>,
    made: SmallVec<[Planner<'a>; 1]>,
}

impl<'a> Planners<'a> {
    pub(super) fn new(request: &'a RouteRequest, matched: &'a PrefixMatch, fleet: &'a Fleet) -> Self {
        let usual = fleet.instances_with_paths().next().and_then(|(_, paths)| paths.usual);
        let first = Planner::new(request, matched, fleet, Paths { usual, ..Paths::default() });
        let holders = first.holders();
        Self { request, matched, fleet, holders, made: SmallVec::from_iter([first]) }
    }

    /// The place of the planner for this instance, which is made if there is none.
    pub(super) fn place(&mut self, asking: Asking<'_>) -> usize {
        let paths = self.paths_that_matter(asking);
        if let Some(place) = self.find(&paths) {
            return place;
        }
        let otherwise = self.made.iter().filter(|planner| !planner.paths().other.is_empty()).count();
        let paths = if otherwise < OTHERWISE_MAX { paths } else { paths.without_other() };
        self.find(&paths).unwrap_or_else(|| {
            self.made.push(Planner::new(self.request, self.matched, self.fleet, paths));
            debug_assert!(self.made.len() <= PLANNERS_MAX, "there are no other keys");
            self.made.len() - 1
        })
    }

    /// Whose plans they are.
    pub(super) fn request(&self) -> &'a RouteRequest {
        self.request
    }

    /// The planner at a place that [`Planners::place`] gave.
    pub(super) fn at(&self, place: usize) -> &Planner<'a> {
        &self.made[place]
    }

    fn find(&self, paths: &Paths) -> Option<usize> {
        self.made.iter().position(|planner| planner.paths() == paths)
    }

    /// What of an instance's paths its plans depend on, its own node left out: nothing is fetched from that one from afar.
    fn paths_that_matter(&self, Asking { own, paths, .. }: Asking<'_>) -> Paths {
        let InstancePaths { usual, other } = paths;
        let mut matter = Paths { usual: *usual, ..Paths::default() };
        if other.is_empty() {
            return matter;
        }
        for node in self.holders.iter().filter(|node| own != Some(**node)) {
            if let Ok(rank) = other.binary_search_by_key(node, |(node, _)| *node) {
                matter.other.push(other[rank]);
            }
        }
        matter
    }
}

/// Whose plan it is.
pub(super) fn asking<'a>((instance, paths): (&Instance, &'a InstancePaths)) -> Asking<'a> {
    Asking { own: instance.node, fetches: instance.fetches, paths }
}
