//! The cost of NVIDIA Dynamo's KV router: blocks to prefill, times a weight, and blocks that decode, each with what the request would
//! add; the least one is taken (documentation of the KV router, `kv_overlap_score_weight` 1, temperature 0; blocks in the host's memory count
//! three quarters of one in GPU memory, on a disk a quarter).

use kv_core::id::{InstanceId, NodeId, Tier};

use super::{Route, Router, cheapest, to};
use crate::fleet::{Ask, View};

const OVERLAP_WEIGHT: f64 = 1.0;
const HOST_CREDIT: f64 = 0.75;
const DISK_CREDIT: f64 = 0.25;

/// See the file.
pub(super) struct Dynamo;

impl Router for Dynamo {
    fn name(&self) -> &'static str {
        "dynamo"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let block_tokens = f64::from(ask.request.block_tokens.max(1));
        let cost = |instance: InstanceId| {
            let prefill = view.load(instance).tokens_ahead() as f64 / block_tokens
                + f64::from(ask.request.blocks)
                - overlap(ask, instance);
            let decode = view.seen[instance.0 as usize].in_flight_tokens as f64 / block_tokens
                + f64::from(ask.request.blocks);
            OVERLAP_WEIGHT * prefill + decode
        };
        to(ask, view, cheapest(view, cost))
    }
}

/// Blocks that the instance has, each counted by where it is.
fn overlap(ask: &Ask<'_>, instance: InstanceId) -> f64 {
    let resident = ask.resident_blocks(instance);
    let mut credit = f64::from(resident);
    for run in &ask.matched.runs {
        let Some(holder) = run.holder(NodeId(instance.0)) else { break };
        let blocks = f64::from(run.end_blocks().saturating_sub(run.start_blocks.max(resident)));
        credit += blocks * if holder.tier == Tier::Ssd { DISK_CREDIT } else { HOST_CREDIT };
    }
    credit
}
