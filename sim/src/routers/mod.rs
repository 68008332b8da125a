//! Routers that the production scheduler is held against, each after its published description, in a file of its own.
//!
//! A router chooses an instance. What that instance fetches, computes and saves is planned by the production planner for all of them, which
//! gives most of them more than they have: only Mooncake's moves blocks between nodes by itself. Not here: the fleet they choose in
//! (`crate::fleet`).

mod compare;
mod dynamo;
mod least_loaded;
mod llm_d;
mod local_prefix;
mod mooncake;
mod power_of_two;
mod production;
mod random;
mod round_robin;
mod sglang;
mod sticky;

use kv_core::id::InstanceId;
use kv_core::schedule::{Decision, choose};

pub use compare::{Comparison, Point, capacity, compare};

use crate::fleet::{Ask, View};

/// Where a request goes.
#[derive(Clone, Debug)]
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
        PRODUCTION => Box::new(production::Production),
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

/// A request goes to this instance, whatever it costs there.
fn to(ask: &Ask<'_>, view: &View, instance: Option<InstanceId>) -> Route {
    let planned = instance.map(|instance| choose(&ask.request, ask.held(), view.single(instance), ask.now));
    match planned {
        Some(Ok(decision)) => Route::To(decision),
        _ => Route::Reject,
    }
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
