//! The router's clock: microseconds since the process started, as the core's [`Timestamp`].
//!
//! Not here: wall-clock time. Only differences of these mean anything, and only inside one process.

use std::time::{Duration, Instant};

use kv_core::id::Timestamp;

/// Where a clock starts, so that a span before "now" is always expressible.
const START: Duration = Duration::from_secs(3600);

/// A monotonic clock; clones agree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    started: Instant,
}

impl Clock {
    pub(crate) fn start() -> Clock {
        Clock { started: Instant::now() }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(0).after(START + self.started.elapsed())
    }
}
