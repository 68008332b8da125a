//! Each instance with equal chance: "Random" of Harchol-Balter, Crovella and Murta, "On Choosing a Task Assignment Policy for a Distributed Server
//! System" (Performance Tools '98), and `random` of the SGLang Model Gateway
//! (documentation, "Load Balancing Policies", commit 0f4513c).
//!
//! Not here: any regard to load or caches.

use kv_core::id::InstanceId;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Route, Router, to};
use crate::fleet::{Ask, View};

/// See the file.
pub(super) struct Random(ChaCha8Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Router for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let drawn = self.0.random_range(0..view.seen.len().max(1) as u32);
        to(ask, view, Some(InstanceId(drawn)))
    }
}
