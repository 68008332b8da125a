//! The longest prefix in the instance's own memory and node: the highest hit rate, as the vLLM Production Stack describes its routing (documentation,
//! "KV Cache Aware Routing", commit a7d2672). Of equal ones the least loaded, which is ours.
//!
//! Not here: any other regard to load; later versions of that page have a least length and say what happens below it.

use super::{Route, Router, cheapest, in_flight, to};
use crate::fleet::{Ask, View};

/// See the file.
pub(super) struct LocalPrefix;

impl Router for LocalPrefix {
    fn name(&self) -> &'static str {
        "local-prefix"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let cost = |instance| in_flight(view, instance) / 1e6 - f64::from(ask.local_blocks(instance));
        to(ask, view, cheapest(view, cost))
    }
}
