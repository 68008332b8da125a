//! The order of an instance's queue.
//!
//! A short prompt behind a long one waits many times its own length, and a long one hardly notices
//! short ones before it: running shorter ones first lowers the mean wait. Strict shortest-first
//! would starve long prompts. So each request has a *priority deadline*: its arrival time plus
//! [`DEADLINE_STRETCH`] times its own prefill. The earliest deadline runs first, so only requests
//! that arrive within that time overtake. A tenant with less waiting work gets an earlier deadline,
//! enough to share the instance fairly (`fair_queue.rs`). A request with positive priority goes
//! before those of the last half minute. Neither makes any request wait for ever.
//!
//! Not here: keeping the order (the instance), and its effect on cost (`cost.rs`).

use std::time::Duration;

use crate::id::Timestamp;
use crate::schedule::fleet::Instance;

/// Multiple of its own prefill during which a request can be overtaken.
pub(in crate::schedule) const DEADLINE_STRETCH: u32 = 4;

/// Shift of the deadline by a positive or negative priority.
const PRIORITY_SHIFT: Duration = Duration::from_secs(30);

/// Position of a request relative to other waiting ones, independent of its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePriority {
    /// Lead over requests of other tenants
    /// ([`Admission::queue_priority`](crate::schedule::Admission::queue_priority)).
    pub lead: Duration,
    /// Above 0: before requests of the last half minute. Below 0: behind those of the next half
    /// minute.
    pub priority: i32,
}

/// The priority deadline at an instance of a request that arrives now with this prefill time; `now`
/// if the instance does not order its queue.
#[must_use]
pub fn priority_deadline(
    instance: &Instance,
    queue_priority: QueuePriority,
    prefill_us: u64,
    now: Timestamp,
) -> Timestamp {
    if !instance.orders_by_deadline {
        return now;
    }
    let deadline = now.after(Duration::from_micros(prefill_us).saturating_mul(DEADLINE_STRETCH));
    let sooner = |turn: Timestamp, by: Duration| Timestamp(turn.0.saturating_sub(by.as_micros() as u64));
    let turn = sooner(deadline, queue_priority.lead);
    match queue_priority.priority {
        1.. => sooner(turn, PRIORITY_SHIFT),
        0 => turn,
        _ => turn.after(PRIORITY_SHIFT),
    }
}
