//! One after the other: "Round-Robin" of Harchol-Balter, Crovella and Murta, "On Choosing a Task Assignment Policy for a Distributed Server System"
//! (Performance Tools '98), and `round_robin` of the SGLang Model Gateway
//! (documentation, "Load Balancing Policies", commit 0f4513c).
//!
//! Not here: any regard to load or caches.

use kv_core::id::InstanceId;

use super::{Route, Router, to};
use crate::fleet::{Ask, View};

/// See the file.
#[derive(Default)]
pub(super) struct RoundRobin(u32);

impl Router for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let next = self.0 % view.seen.len().max(1) as u32;
        self.0 = self.0.wrapping_add(1);
        to(ask, view, Some(InstanceId(next)))
    }
}
