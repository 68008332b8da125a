//! Algorithm 1 of "Mooncake: Trading More Storage for Less Computation" (FAST '25): for each
//! instance the time to transfer, to wait, and to prefill. The longest prefix of any instance is
//! transferred if it exceeds the own one by a balancing threshold.
//!
//! Not here: the choice of a decoding instance, and rejections.

use kv_core::id::{InstanceId, NodeId};
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, cheapest, route_fetching_from};

/// The paper names the threshold but not its value.
const BALANCING_THRESHOLD: f64 = 2.0;

/// Router with Mooncake's Algorithm 1.
pub(super) struct Mooncake;

impl Router for Mooncake {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let longest = cheapest(view, |instance| -f64::from(ask.local_blocks(instance)));
        let best = longest.map_or(0, |instance| ask.local_blocks(instance));
        let Some(chosen) = cheapest(view, |instance| ttft_ns(ask, view, instance, best)) else {
            return Route::Reject;
        };
        let mut nodes = vec![NodeId(chosen.0)];
        if is_transferred(ask, chosen, best) {
            nodes.extend(longest.map(|instance| NodeId(instance.0)));
        }
        route_fetching_from(ask, view, chosen, &nodes)
    }

    /// Transferred blocks stay, so that hot prefixes spread.
    fn keeps_fetched(&self) -> bool {
        true
    }
}

/// Whether the longest prefix is transferred to an instance.
fn is_transferred(ask: &RouteQuery<'_>, instance: InstanceId, best: u32) -> bool {
    f64::from(best) > BALANCING_THRESHOLD * f64::from(ask.local_blocks(instance))
}

fn ttft_ns(ask: &RouteQuery<'_>, view: &RouterView, instance: InstanceId, best: u32) -> f64 {
    let (request, profile) = (&ask.request, &view.fleet.profile);
    let tokens =
        |blocks: u32| u64::from(blocks.saturating_mul(request.block_tokens).min(request.input_tokens));
    let own = ask.local_blocks(instance);
    let prefix = if is_transferred(ask, instance, best) { best } else { own };
    let moved_tokens = tokens(prefix) - tokens(own);
    let transfer = profile.stream_ns(profile.dram.through(profile.network), moved_tokens);
    let queue = view.load(instance).tokens_ahead() * profile.prefill_ns_per_token;
    let prefill = profile.prefill_ns(tokens(prefix), u64::from(request.input_tokens) - tokens(prefix));
    transfer as f64 + queue as f64 + prefill as f64
}
