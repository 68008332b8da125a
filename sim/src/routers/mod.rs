//! What routes requests of a simulated fleet: the trait, the production scheduler in three forms, and
//! least-loaded routing as the measure of capacity.
//!
//! A router chooses an instance. For all of them the production planner plans what that instance
//! fetches, computes and saves, limited to the nodes that the router's own system has
//! ([`FetchScope`]). Not here: the fleet (`crate::fleet`), and routers of other systems
//! (`lab/src/routers/`).

mod admitting;
mod capacity;
mod least_loaded;
mod production;
mod replayed_decisions;

use kv_core::id::{InstanceId, NodeId};
use kv_core::index::PrefixMatch;
use kv_core::schedule::{Decision, PrefixLocations, choose};

pub use admitting::{AdmittingRouter, limits_of};
pub use capacity::{capacity, unloaded_ns};
pub use least_loaded::LeastLoaded;
pub use production::Production;
pub use replayed_decisions::ReplayedDecisions;

use crate::fleet::{RouteQuery, RouterView};

/// Result of routing a request.
#[derive(Clone, Debug)]
// Only one exists at a time.
#[expect(clippy::large_enum_variant)]
pub enum Route {
    /// To an instance, with its plan.
    To(Decision),
    /// Rejected: the caller should retry later.
    Reject,
}

/// A routing policy.
pub trait Router {
    /// Name as written on the command line.
    fn name(&self) -> &'static str;

    /// Routes one request.
    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route;

    /// Whether an instance also saves blocks to its own node that it fetched from another, not only
    /// computed ones.
    fn keeps_fetched(&self) -> bool {
        false
    }
}

/// The production scheduler.
pub const PRODUCTION: &str = "kvfleet";

/// Nodes that an instance may fetch from under routers other than the production scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FetchScope {
    /// Its own node, as in engines with a host memory tier; for Mooncake, also the node with the
    /// longest prefix.
    #[default]
    Own,
    /// Every node, so that routers differ only by the chosen instance.
    Pool,
}

/// Routes a request to this instance at any cost; it fetches from its own node.
#[must_use]
pub fn route_to(ask: &RouteQuery<'_>, view: &RouterView, instance: Option<InstanceId>) -> Route {
    let Some(instance) = instance else { return Route::Reject };
    route_fetching_from(ask, view, instance, &[NodeId(instance.0)])
}

/// Routes a request to this instance, which fetches from these nodes.
#[must_use]
pub fn route_fetching_from(
    ask: &RouteQuery<'_>,
    view: &RouterView,
    instance: InstanceId,
    nodes: &[NodeId],
) -> Route {
    let few;
    let matched = match view.fetch_scope {
        FetchScope::Pool => ask.matched,
        FetchScope::Own => {
            few = held_by(ask.matched, nodes);
            &few
        }
    };
    let held = PrefixLocations { matched, resident: ask.resident, in_flight: &[] };
    choose(&ask.request, held, view.single_fleet(instance), ask.now).map_or(Route::Reject, Route::To)
}

/// The part of a match that these nodes hold.
fn held_by(matched: &PrefixMatch, nodes: &[NodeId]) -> PrefixMatch {
    let mut runs = matched.runs.clone();
    runs.iter_mut().for_each(|run| run.holders.retain(|holder| nodes.contains(&holder.node)));
    // A run without holders does not end the prefix: GPU memory may reach behind it.
    runs.retain(|run| !run.holders.is_empty());
    PrefixMatch { runs }
}

/// The instance of least cost; ties go to the lower number.
#[must_use]
pub fn cheapest(view: &RouterView, cost: impl Fn(InstanceId) -> f64) -> Option<InstanceId> {
    view.instances()
        .map(|instance| (cost(instance), instance))
        .min_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, instance)| instance)
}

/// In-flight requests, then prompt tokens, known to the router without reports, as one number to
/// compare.
#[must_use]
pub fn in_flight_load(view: &RouterView, instance: InstanceId) -> f64 {
    let seen = view.instance_use[instance.0 as usize];
    f64::from(seen.in_flight) + seen.in_flight_tokens as f64 / 1e12
}
