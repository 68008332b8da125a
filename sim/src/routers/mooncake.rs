//! Algorithm 1 of "Mooncake: Trading More Storage for Less Computation" (FAST '25): for each instance the time to transfer, to wait, and to
//! prefill; the prefix of the instance that has the longest is transferred where that is longer than the own one by more than a
//! balancing threshold.
//!
//! Not here: the choice of a decoding instance, and turning away.

use kv_core::id::{InstanceId, NodeId};

use super::{Route, Router, cheapest, to_with};
use crate::fleet::{Ask, View};

/// The paper names a threshold and not its value.
const BALANCING_THRESHOLD: f64 = 2.0;

/// See the file.
pub(super) struct Mooncake;

impl Router for Mooncake {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let longest = cheapest(view, |instance| -f64::from(ask.local_blocks(instance)));
        let best = longest.map_or(0, |instance| ask.local_blocks(instance));
        let Some(chosen) = cheapest(view, |instance| ttft_ns(ask, view, instance, best)) else {
            return Route::Reject;
        };
        let mut nodes = vec![NodeId(chosen.0)];
        if is_moved(ask, chosen, best) {
            nodes.extend(longest.map(|instance| NodeId(instance.0)));
        }
        to_with(ask, view, chosen, &nodes)
    }

    /// What is transferred stays there: so hot prefixes spread.
    fn keeps_fetched(&self) -> bool {
        true
    }
}

/// Whether the longest prefix is transferred to an instance.
fn is_moved(ask: &Ask<'_>, instance: InstanceId, best: u32) -> bool {
    f64::from(best) > BALANCING_THRESHOLD * f64::from(ask.local_blocks(instance))
}

fn ttft_ns(ask: &Ask<'_>, view: &View, instance: InstanceId, best: u32) -> f64 {
    let (request, profile) = (&ask.request, &view.fleet.profile);
    let tokens =
        |blocks: u32| u64::from(blocks.saturating_mul(request.block_tokens).min(request.input_tokens));
    let own = ask.local_blocks(instance);
    let prefix = if is_moved(ask, instance, best) { best } else { own };
    let moved_tokens = tokens(prefix) - tokens(own);
    let transfer = profile.stream_ns(profile.dram.through(profile.network), moved_tokens);
    let queue = view.load(instance).tokens_ahead() * profile.prefill_ns_per_token;
    let prefill = profile.prefill_ns(tokens(prefix), u64::from(request.input_tokens) - tokens(prefix));
    transfer as f64 + queue as f64 + prefill as f64
}
