//! In which order an instance begins what waits there.
//!
//! A short prompt behind a long one waits many times its own length, and a long one hardly notices the short ones before it: where the shorter go first,
//! all wait less on average. Shortest first alone would keep a long prompt waiting for as long as short ones come. So each request has a *turn*, a time:
//! when it came, and [`STRETCH`] times its own prefill besides. What has the earlier turn goes first, and a request is passed by those alone
//! that come within that time. Not here: who keeps the order (the instance), and what it is worth (`cost.rs`).

use std::time::Duration;

use super::fleet::Instance;
use crate::id::Timestamp;

/// Times its own prefill that a request lets shorter ones pass.
pub(super) const STRETCH: u32 = 4;

/// The turn at an instance of a request that comes now and takes it so long to compute: by time alone, where the instance keeps no order.
#[must_use]
pub fn turn_of(instance: &Instance, prefill_us: u64, now: Timestamp) -> Timestamp {
    if instance.orders { now.after(Duration::from_micros(prefill_us).saturating_mul(STRETCH)) } else { now }
}
