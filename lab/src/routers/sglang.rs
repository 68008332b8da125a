//! The cache-aware policy of SGLang's router. While load is uneven (the most loaded has over 64
//! requests and half as many more than the least loaded), the least loaded instance. Otherwise the
//! longest prefix, if it exceeds 0.3 of the prompt; otherwise the instance with the emptiest cache.
//!
//! The order follows the description in `cache_aware.rs` of the SGLang Model Gateway (commit
//! 053b63f, although its code takes the least loaded in the last case too). The constants are the
//! defaults of its documentation ("Cache-Aware Policy Tuning", commit 0f4513c).
//!
//! Not here: its tree of sent prompts; instances' reported blocks stand in for it.

use kv_core::id::{InstanceId, NodeId};
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, cheapest, in_flight_load, route_to};

const CACHE_THRESHOLD: f64 = 0.3;
const BALANCE_ABS_THRESHOLD: u32 = 64;
const BALANCE_REL_THRESHOLD: f64 = 1.5;

/// Router with SGLang's cache-aware policy.
pub(super) struct Sglang;

impl Router for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let load = |instance: &InstanceId| view.instance_use[instance.0 as usize].in_flight;
        let most = view.instances().map(|instance| load(&instance)).max().unwrap_or(0);
        let least = view.instances().map(|instance| load(&instance)).min().unwrap_or(0);
        let is_uneven = most - least > BALANCE_ABS_THRESHOLD
            && f64::from(most) > BALANCE_REL_THRESHOLD * f64::from(least);
        if is_uneven {
            return route_to(ask, view, cheapest(view, |instance| in_flight_load(view, instance)));
        }
        let matched = |instance| f64::from(ask.local_blocks(instance));
        let longest = cheapest(view, |instance| in_flight_load(view, instance) / 1e6 - matched(instance));
        let is_worth_it =
            |instance: &InstanceId| matched(*instance) > CACHE_THRESHOLD * f64::from(ask.request.blocks);
        let room =
            |instance: InstanceId| view.fleet.live(NodeId(instance.0)).map_or(0, |live| live.blocks) as f64;
        route_to(
            ask,
            view,
            longest
                .filter(is_worth_it)
                .or_else(|| cheapest(view, |instance| room(instance) + in_flight_load(view, instance) / 1e3)),
        )
    }
}
