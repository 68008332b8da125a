//! Consistent hashing of the first block, with bounded load: an instance that has a quarter more than its share of the requests under way passes a
//! request on to the next on the ring (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018).
//!
//! Not here: the ring (`kv_core::place`), and any regard to caches.

use kv_core::id::{InstanceId, NodeId};
use kv_core::place::Ring;

use super::{Route, Router, to};
use crate::fleet::{Ask, View};

/// Bound over the mean, as the paper's example.
const BOUND: f64 = 1.25;

/// See the file.
#[derive(Default)]
pub(super) struct Sticky {
    ring: Option<Ring>,
}

impl Router for Sticky {
    fn name(&self) -> &'static str {
        "sticky"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let members = || view.instances().map(|instance| (NodeId(instance.0), 1)).collect::<Vec<_>>();
        let ring = self.ring.get_or_insert_with(|| Ring::new(&members()));
        let key = ask.request.first_block.unwrap_or_default();
        let load = |node: NodeId| u64::from(view.seen[node.0 as usize].in_flight);
        to(ask, view, ring.place(&key.0, load, BOUND).map(|node| InstanceId(node.0)))
    }
}
