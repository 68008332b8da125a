//! The weighted scorers of llm-d's inference scheduler, each from 0 to 1; the highest sum wins.
//! Cached share of the prompt (3), short queue (2), free KV memory (2), as weighted in the guide
//! `inference-scheduling` (llm-d, commit 086f217, `inference-scheduling.values.yaml`).
//!
//! Each scorer follows llm-d-router (`prefix` at commit 068b68d, `queuedepth` at 2342697,
//! `kvcacheutilization` at e05ae34). Blocks in host memory count 0.8 of one in GPU memory
//! (llm-d-kv-cache, `docs/configuration.md`, "KV Cache Backend Configuration", commit 0cabba5).
//!
//! Not here: filters and flow control.

use kv_core::id::{InstanceId, NodeId};
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, cheapest, in_flight_load, route_to};

const PREFIX_WEIGHT: f64 = 3.0;
const QUEUE_WEIGHT: f64 = 2.0;
const MEMORY_WEIGHT: f64 = 2.0;
const HOST_CREDIT: f64 = 0.8;

/// Router with llm-d's scorers.
pub(super) struct LlmD;

impl Router for LlmD {
    fn name(&self) -> &'static str {
        "llm-d"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let waiting = |instance| view.load(instance).requests_ahead();
        let longest = view.instances().map(waiting).max().unwrap_or(0);
        let shortest = view.instances().map(waiting).min().unwrap_or(0);
        let cost = |instance: InstanceId| {
            let queue = match longest - shortest {
                0 => 1.0,
                spread => (longest - waiting(instance)) as f64 / spread as f64,
            };
            let resident = f64::from(ask.resident_blocks(instance));
            let host = f64::from(ask.matched.node_prefix_blocks(NodeId(instance.0)));
            let prefix =
                (resident + HOST_CREDIT * (host - resident).max(0.0)) / f64::from(ask.request.blocks.max(1));
            let memory = 1.0 - view.instance_use[instance.0 as usize].memory_in_use;
            let score = PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + MEMORY_WEIGHT * memory;
            in_flight_load(view, instance) / 1e6 - score
        };
        route_to(ask, view, cheapest(view, cost))
    }
}
