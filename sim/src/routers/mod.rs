//! Routers that the production scheduler is held against, each after its published description, in a file of its own.
//!
//! A router chooses an instance. What that instance fetches, computes and saves is planned by the production planner for all of them, out of
//! what the router's own system has ([`Plane`]). Not here: the fleet they choose in (`crate::fleet`).

pub(crate) mod admitting;
mod compare;
mod dynamo;
mod goodput;
mod least_loaded;
mod led;
mod llm_d;
mod local_prefix;
mod mooncake;
mod power_of_two;
mod production;
mod random;
mod regret;
mod round_robin;
mod sglang;
mod sticky;

use kv_core::id::{InstanceId, NodeId};
use kv_core::index::PrefixMatch;
use kv_core::schedule::{Decision, Held, choose};

pub use compare::{Comparison, Draw, Point, capacity, compare, spread};
pub use goodput::{Good, Goodput, Limits, goodput};
pub use led::Led;
pub use regret::{Knowing, Knowledge, Regret, Shares, regret};

use crate::fleet::{Ask, View};

/// Where a request goes.
#[derive(Clone, Debug)]
// There is one at a time.
#[expect(clippy::large_enum_variant)]
pub enum Route {
    /// To an instance, with its plan.
    To(Decision),
    /// Nowhere: its caller is to come back later.
    Reject,
}

/// Something that routes.
pub trait Router {
    /// Name as written on the command line.
    fn name(&self) -> &'static str;

    /// Routes one request.
    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route;

    /// Whether an instance saves to its own node what it fetched from another one as well, and not only what it computed.
    fn keeps_fetched(&self) -> bool {
        false
    }
}

/// The production scheduler.
pub const PRODUCTION: &str = "kvfleet";

/// What it is held against.
pub const BASELINES: [&str; 10] = [
    "random",
    "round-robin",
    "least-loaded",
    "local-prefix",
    "sticky",
    "power-of-two",
    "mooncake",
    "dynamo",
    "llm-d",
    "sglang",
];

/// A fresh router of this name; `seed` feeds those that draw.
#[must_use]
pub fn by_name(name: &str, seed: u64) -> Option<Box<dyn Router>> {
    Some(match name {
        PRODUCTION => Box::<production::Production>::default(),
        "random" => Box::new(random::Random::new(seed)),
        "round-robin" => Box::new(round_robin::RoundRobin::default()),
        "least-loaded" => Box::new(least_loaded::LeastLoaded),
        "local-prefix" => Box::new(local_prefix::LocalPrefix),
        "sticky" => Box::new(sticky::Sticky::default()),
        "power-of-two" => Box::new(power_of_two::PowerOfTwo::new(seed)),
        "mooncake" => Box::new(mooncake::Mooncake),
        "dynamo" => Box::new(dynamo::Dynamo),
        "llm-d" => Box::new(llm_d::LlmD),
        "sglang" => Box::new(sglang::Sglang),
        _ => return None,
    })
}

/// From where an instance may fetch under a router that is not the production scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Plane {
    /// Its own node, as engines with a tier of their host's memory have it; of Mooncake's, also the node with the longest prefix.
    #[default]
    Own,
    /// Every node, so that routers differ by where they send and nothing else.
    Pool,
}

/// A request goes to this instance, whatever it costs there, which fetches from its own node.
fn to(ask: &Ask<'_>, view: &View, instance: Option<InstanceId>) -> Route {
    let Some(instance) = instance else { return Route::Reject };
    to_with(ask, view, instance, &[NodeId(instance.0)])
}

/// The same, fetching from these nodes.
fn to_with(ask: &Ask<'_>, view: &View, instance: InstanceId, nodes: &[NodeId]) -> Route {
    let few;
    let matched = match view.plane {
        Plane::Pool => ask.matched,
        Plane::Own => {
            few = held_by(ask.matched, nodes);
            &few
        }
    };
    let held = Held { matched, resident: ask.resident, coming: &[] };
    choose(&ask.request, held, view.single(instance), ask.now).map_or(Route::Reject, Route::To)
}

/// What these nodes hold of a prefix.
fn held_by(matched: &PrefixMatch, nodes: &[NodeId]) -> PrefixMatch {
    let mut runs = matched.runs.clone();
    runs.iter_mut().for_each(|run| run.holders.retain(|holder| nodes.contains(&holder.node)));
    // A run that nobody has is no end: what is in GPU memory may reach behind it.
    runs.retain(|run| !run.holders.is_empty());
    PrefixMatch { runs }
}

/// The instance of least cost; of equal ones that with the lower number.
fn cheapest(view: &View, cost: impl Fn(InstanceId) -> f64) -> Option<InstanceId> {
    view.instances()
        .map(|instance| (cost(instance), instance))
        .min_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, instance)| instance)
}

/// Requests and then prompt tokens that whoever sends them knows to be under way, as one figure to compare.
fn in_flight(view: &View, instance: InstanceId) -> f64 {
    let seen = view.seen[instance.0 as usize];
    f64::from(seen.in_flight) + seen.in_flight_tokens as f64 / 1e12
}

#[cfg(test)]
mod tests;
