//! The router's clocks: microseconds since the process started, as the core's [`Timestamp`]; and Unix time, for what must
//! mean the same on another router and after a restart, which are the ends of pins and nothing else.
//!
//! Only differences of timestamps mean anything, and only inside one process. Unix time never goes back here, and never
//! slower than the other clock: setting the system's clock back neither brings back what is over nor puts an end off.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kv_core::id::Timestamp;
use parking_lot::Mutex;

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

/// Unix time that never goes back; clones agree.
#[derive(Clone, Debug)]
pub(crate) struct UnixClock {
    clock: Clock,
    last: Arc<Mutex<Unix>>,
}

impl UnixClock {
    pub(crate) fn start() -> UnixClock {
        UnixClock { clock: Clock::start(), last: Arc::default() }
    }

    /// In milliseconds.
    pub(crate) fn now_ms(&self) -> u64 {
        let system = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let system_us = u64::try_from(system.as_micros()).unwrap_or(u64::MAX);
        self.last.lock().read(system_us, self.clock.now()) / 1_000
    }
}

/// What was read last, in microseconds, and when.
#[derive(Debug, Default)]
struct Unix(Option<(u64, Timestamp)>);

impl Unix {
    /// The system's time, unless that is earlier than the time before and what has passed since.
    fn read(&mut self, system_us: u64, now: Timestamp) -> u64 {
        let least = self.0.map_or(0, |(before, at)| Timestamp(before).after(now.since(at)).0);
        let read = system_us.max(least);
        self.0 = Some((read, now));
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_clock_that_is_set_back_stops_no_time() {
        let mut unix = Unix::default();
        assert_eq!(unix.read(1_000_000, Timestamp(7)), 1_000_000);
        assert_eq!(unix.read(5_000_000, Timestamp(8)), 5_000_000, "set forward");
        assert_eq!(unix.read(1_000_000, Timestamp(1_008)), 5_001_000, "set back: what has passed counts");
        assert_eq!(unix.read(5_000_500, Timestamp(2_008)), 5_002_000);
        assert_eq!(unix.read(9_000_000, Timestamp(2_009)), 9_000_000);
    }
}
