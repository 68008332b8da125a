//! The cost function of NVIDIA Dynamo's KV router: weighted blocks to prefill, plus decoding
//! blocks, each including the request. The instance of least cost wins (documentation, "Routing
//! Concepts", the linear score of "Cost Calculation", commit 03037af).
//!
//! Defaults of "Configuration and Tuning" (v1.3.0): a weight of 1 (`prefill_load_scale`, earlier
//! `overlap_score_weight`). A block in GPU memory counts whole, one in host memory three quarters,
//! on disk a quarter; no decay, and temperature 0.
//!
//! Not here: its queues, and the multiplicative score.

use kv_core::id::{InstanceId, NodeId, Tier};
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, cheapest, route_to};

const OVERLAP_WEIGHT: f64 = 1.0;
const HOST_CREDIT: f64 = 0.75;
const DISK_CREDIT: f64 = 0.25;

/// Router with Dynamo's cost function.
pub(super) struct Dynamo;

impl Router for Dynamo {
    fn name(&self) -> &'static str {
        "dynamo"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let block_tokens = f64::from(ask.request.block_tokens.max(1));
        let cost = |instance: InstanceId| {
            let prefill = view.load(instance).tokens_ahead() as f64 / block_tokens
                + f64::from(ask.request.blocks)
                - overlap(ask, instance);
            let decode = view.instance_use[instance.0 as usize].in_flight_tokens as f64 / block_tokens
                + f64::from(ask.request.blocks);
            OVERLAP_WEIGHT * prefill + decode
        };
        route_to(ask, view, cheapest(view, cost))
    }
}

/// Blocks that the instance has, weighted by their tier.
fn overlap(ask: &RouteQuery<'_>, instance: InstanceId) -> f64 {
    let resident = ask.resident_blocks(instance);
    let mut credit = f64::from(resident);
    for run in &ask.matched.runs {
        let Some(holder) = run.holder(NodeId(instance.0)) else { break };
        let blocks = f64::from(run.end_blocks().saturating_sub(run.start_blocks.max(resident)));
        credit += blocks * if holder.tier == Tier::Ssd { DISK_CREDIT } else { HOST_CREDIT };
    }
    credit
}
