//! The behaviour suite of `kv_core::evict::suite` with random sequences of calls.
//!
//! Not here: the cases.

pub(super) use kv_core::evict::suite::eviction_order;

use kv_core::evict::Policy;
use kv_core::evict::suite::{CALLS_MAX, check_sequence, check_situations};
use proptest::prelude::*;

/// Checks a policy against the contract of [`Policy`].
pub(super) fn policy_suite(make: fn() -> Box<dyn Policy>) {
    check_situations(make);
    proptest!(|(numbers in prop::collection::vec(any::<[u64; 2]>(), 0..CALLS_MAX))| {
        check_sequence(make, &numbers);
    });
}
