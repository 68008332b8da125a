//! In which order an instance begins what waits there.
//!
//! A short prompt behind a long one waits many times its own length, and a long one hardly notices the short ones before it: where the shorter go first,
//! all wait less on average. Shortest first alone would keep a long prompt waiting for as long as short ones come. So each request has a *turn*, a time:
//! when it came, and [`STRETCH`] times its own prefill besides. What has the earlier turn goes first, and a request is passed by those alone
//! that come within that time. That of a tenant for which less waits than for others is sooner by as much as makes the tenants take turns (`fair.rs`), and who asks
//! to go before others goes before those that came in the last half minute. Neither lets anybody wait for ever.
//! Not here: who keeps the order (the instance), and what it is worth (`cost.rs`).

use std::time::Duration;

use super::fleet::Instance;
use crate::id::Timestamp;

/// Times its own prefill that a request lets shorter ones pass.
pub(super) const STRETCH: u32 = 4;

/// By how much requests go sooner that ask to go before others, and later those that ask to go behind them.
const AHEAD: Duration = Duration::from_secs(30);

/// Where a request stands among others, whatever it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// For how long it goes before those of other tenants ([`Admission::standing`](super::Admission::standing)).
    pub lead: Duration,
    /// Above 0: before those that came in the last half minute. Below: behind those that come in the next.
    pub priority: i32,
}

/// The turn at an instance of a request that comes now and takes it so long to compute: by time alone, where the instance keeps no order.
#[must_use]
pub fn turn_of(instance: &Instance, standing: Standing, prefill_us: u64, now: Timestamp) -> Timestamp {
    if !instance.orders {
        return now;
    }
    let turn = now.after(Duration::from_micros(prefill_us).saturating_mul(STRETCH));
    let sooner = |turn: Timestamp, by: Duration| Timestamp(turn.0.saturating_sub(by.as_micros() as u64));
    let turn = sooner(turn, standing.lead);
    match standing.priority {
        1.. => sooner(turn, AHEAD),
        0 => turn,
        _ => turn.after(AHEAD),
    }
}
