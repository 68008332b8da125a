//! The planners of one request: instances that take the same paths to the holders of the prefix
//! share a planner.
//!
//! Usually there is only one. Not here: what a plan is (`cost.rs`).

use crate::id::NodeId;
use crate::index::PrefixMatch;
use crate::schedule::fleet::{Fleet, Instance, InstancePaths};
use crate::schedule::predict::cost::{FetchContext, PathSet, Planner};
use crate::schedule::{LinkPath, RouteRequest};
use smallvec::SmallVec;

/// Most planners with path exceptions, for instances that reach some holder over another path than
/// their usual one. Beyond it such an instance is priced by its usual path: a decision must not
/// cost a pass over the prefix per instance.
const EXCEPTION_PLANNERS_MAX: usize = 8;

/// Most planners: one for each usual path, one without a path, and those with exceptions.
const PLANNERS_MAX: usize = EXCEPTION_PLANNERS_MAX + LinkPath::ALL.len() + 1;

pub(in crate::schedule) struct PlannerCache<'a> {
    request: &'a RouteRequest,
    matched: &'a PrefixMatch,
    fleet: &'a Fleet,
    /// Live nodes that hold any of the prefix, ascending.
    holders: SmallVec<[NodeId; 8]>,
    planners: SmallVec<[Planner<'a>; 1]>,
}

impl<'a> PlannerCache<'a> {
    pub(in crate::schedule) fn new(
        request: &'a RouteRequest,
        matched: &'a PrefixMatch,
        fleet: &'a Fleet,
    ) -> Self {
        let usual = fleet.instances_with_paths().next().and_then(|(_, paths)| paths.usual);
        let first = Planner::new(request, matched, fleet, PathSet { usual, ..PathSet::default() });
        let holders = first.holders();
        Self { request, matched, fleet, holders, planners: SmallVec::from_iter([first]) }
    }

    /// Index of the planner for this instance, which is created if missing.
    pub(in crate::schedule) fn index_for(&mut self, asking: FetchContext<'_>) -> usize {
        let paths = self.relevant_paths(asking);
        if let Some(place) = self.find(&paths) {
            return place;
        }
        let with_exceptions =
            self.planners.iter().filter(|planner| !planner.paths().exceptions.is_empty()).count();
        let paths = if with_exceptions < EXCEPTION_PLANNERS_MAX { paths } else { paths.usual_only() };
        self.find(&paths).unwrap_or_else(|| {
            self.planners.push(Planner::new(self.request, self.matched, self.fleet, paths));
            debug_assert!(self.planners.len() <= PLANNERS_MAX, "all possible path sets are counted");
            self.planners.len() - 1
        })
    }

    /// The request that is planned.
    pub(in crate::schedule) fn request(&self) -> &'a RouteRequest {
        self.request
    }

    /// The planner at an index from [`PlannerCache::index_for`].
    pub(in crate::schedule) fn at(&self, place: usize) -> &Planner<'a> {
        &self.planners[place]
    }

    fn find(&self, paths: &PathSet) -> Option<usize> {
        self.planners.iter().position(|planner| planner.paths() == paths)
    }

    /// The part of an instance's paths that its plans depend on. Its own node is left out: it is
    /// not read over the network.
    fn relevant_paths(&self, FetchContext { own_node: own, paths, .. }: FetchContext<'_>) -> PathSet {
        let InstancePaths { usual, exceptions: other } = paths;
        let mut matter = PathSet { usual: *usual, ..PathSet::default() };
        if other.is_empty() {
            return matter;
        }
        for node in self.holders.iter().filter(|node| own != Some(**node)) {
            if let Ok(rank) = other.binary_search_by_key(node, |(node, _)| *node) {
                matter.exceptions.push(other[rank]);
            }
        }
        matter
    }
}

/// The plan inputs of an instance.
pub(in crate::schedule) fn fetch_context<'a>(
    instance: &Instance,
    paths: &'a InstancePaths,
) -> FetchContext<'a> {
    FetchContext { own_node: instance.node, can_fetch: instance.can_fetch, paths }
}
