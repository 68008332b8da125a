//! Consistent hashing of the first block with bounded load. An instance with a quarter more than
//! its share of the requests in flight passes a request on. The next instance on the ring takes it
//! (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018).
//!
//! Not here: the ring (`kv_core::place`), and cache awareness.

use kv_core::id::{InstanceId, NodeId};
use kv_core::place::Ring;
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, route_to};

/// Bound over the mean, as in the paper's example.
const LOAD_BOUND: f64 = 1.25;

/// Consistent-hash routing.
#[derive(Default)]
pub(super) struct Sticky {
    ring: Option<Ring>,
}

impl Router for Sticky {
    fn name(&self) -> &'static str {
        "sticky"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let members = || view.instances().map(|instance| (NodeId(instance.0), 1)).collect::<Vec<_>>();
        let ring = self.ring.get_or_insert_with(|| Ring::new(&members()));
        let key = ask.request.first_block.unwrap_or_default();
        let load = |node: NodeId| u64::from(view.instance_use[node.0 as usize].in_flight);
        route_to(ask, view, ring.place(&key.0, load, LOAD_BOUND).map(|node| InstanceId(node.0)))
    }
}
