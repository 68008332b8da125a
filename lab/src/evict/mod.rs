//! Baseline eviction policies of the literature, one file each, behind the trait of
//! `kv_core::evict`.
//!
//! They exist for comparisons and no node can run them. Not here: the policies of a node and their
//! building blocks (`core/src/evict/`).

pub mod arc;
pub mod fifo;
pub mod gdsf;
mod ghost_list;
pub mod lfu;
mod ranked;
pub mod s3fifo;
mod sketch;
#[cfg(test)]
mod suite;
pub mod tinylfu;

use kv_core::evict::Policy;
use kv_core::evict::workload::Workload;

/// The names that [`by_name`] accepts, in display order: baselines, policies of a node, and
/// variants of its workload policy.
pub const NAMES: [&str; 12] = [
    "fifo",
    "lru",
    "lfu",
    "s3fifo",
    "gdsf",
    "arc",
    "tinylfu",
    "workload",
    "workload-share",
    "workload-posterior",
    "workload-aged",
    "density",
];

/// Policies from the literature, for comparison.
pub const BASELINES: [&str; 7] = ["fifo", "lru", "lfu", "s3fifo", "gdsf", "arc", "tinylfu"];

/// A new policy with this name; `None` for an unknown name. `seed` is for randomised policies; no
/// present one uses it.
#[must_use]
pub fn by_name(name: &str, seed: u64) -> Option<Box<dyn Policy>> {
    Some(match name {
        "fifo" => Box::new(fifo::Fifo::new()),
        "lfu" => Box::new(lfu::Lfu::new()),
        "s3fifo" => Box::new(s3fifo::S3Fifo::new()),
        "gdsf" => Box::new(gdsf::Gdsf::new()),
        "arc" => Box::new(arc::Arc::new()),
        "tinylfu" => Box::new(tinylfu::TinyLfu::new()),
        _ => match kv_core::evict::by_name(name, seed) {
            Some(policy) => policy,
            None => Box::new(Workload::by_name(name)?),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gives_the_policy_of_that_name() {
        for name in NAMES {
            assert_eq!(by_name(name, 0).map(|policy| policy.name()), Some(name));
        }
        assert!(by_name("LRU", 0).is_none());
        assert!(BASELINES.iter().chain(&kv_core::evict::NAMES).all(|name| NAMES.contains(name)));
    }
}
