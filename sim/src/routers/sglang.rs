//! The cache-aware policy of SGLang's router: while load is uneven (more than 64 requests and half as much again between the most and the least
//! loaded), the least loaded; else the longest prefix, if that is more than 0.3 of the prompt; else the instance with the most room in its
//! cache. The order is that of the description in `cache_aware.rs` of the SGLang Model Gateway (commit 053b63f, whose code takes the least
//! loaded for the last as well), the numbers are the defaults of its documentation ("Cache-Aware Policy Tuning", commit 0f4513c).
//!
//! Not here: its tree of what was sent where. What instances say they have is taken for it.

use kv_core::id::{InstanceId, NodeId};

use super::{Route, Router, cheapest, in_flight, to};
use crate::fleet::{Ask, View};

const CACHE_THRESHOLD: f64 = 0.3;
const BALANCE_ABS_THRESHOLD: u32 = 64;
const BALANCE_REL_THRESHOLD: f64 = 1.5;

/// See the file.
pub(super) struct Sglang;

impl Router for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let load = |instance: &InstanceId| view.seen[instance.0 as usize].in_flight;
        let most = view.instances().map(|instance| load(&instance)).max().unwrap_or(0);
        let least = view.instances().map(|instance| load(&instance)).min().unwrap_or(0);
        let is_uneven = most - least > BALANCE_ABS_THRESHOLD
            && f64::from(most) > BALANCE_REL_THRESHOLD * f64::from(least);
        if is_uneven {
            return to(ask, view, cheapest(view, |instance| in_flight(view, instance)));
        }
        let matched = |instance| f64::from(ask.local_blocks(instance));
        let longest = cheapest(view, |instance| in_flight(view, instance) / 1e6 - matched(instance));
        let is_worth_it =
            |instance: &InstanceId| matched(*instance) > CACHE_THRESHOLD * f64::from(ask.request.blocks);
        let room =
            |instance: InstanceId| view.fleet.live(NodeId(instance.0)).map_or(0, |live| live.blocks) as f64;
        to(
            ask,
            view,
            longest
                .filter(is_worth_it)
                .or_else(|| cheapest(view, |instance| room(instance) + in_flight(view, instance) / 1e3)),
        )
    }
}
