//! The router's clocks: microseconds since process start, as the core's [`Timestamp`], and Unix
//! time. Unix time is only for pin expiry, which must mean the same on another router and after a
//! restart.
//!
//! Only differences of timestamps have a meaning, and only inside one process. Unix time here never
//! goes back and is never slower than the monotonic clock. If the system clock is set back, expired
//! pins stay expired and no expiry is delayed.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kv_core::id::Timestamp;
use parking_lot::Mutex;

/// Offset of a clock's first timestamp, so that a span before "now" can always be expressed.
const START_OFFSET: Duration = Duration::from_secs(3600);

/// A monotonic clock; clones share one origin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    started: Instant,
}

impl Clock {
    pub(crate) fn start() -> Clock {
        Clock { started: Instant::now() }
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp(0).after(START_OFFSET + self.started.elapsed())
    }
}

/// Unix time that never goes back; clones share their last reading.
#[derive(Clone, Debug)]
pub(crate) struct UnixClock {
    clock: Clock,
    last: Arc<Mutex<LastReading>>,
}

impl UnixClock {
    pub(crate) fn start() -> UnixClock {
        UnixClock { clock: Clock::start(), last: Arc::default() }
    }

    /// Unix time in milliseconds.
    pub(crate) fn now_ms(&self) -> u64 {
        let system = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let system_us = u64::try_from(system.as_micros()).unwrap_or(u64::MAX);
        self.last.lock().read(system_us, self.clock.now()) / 1_000
    }
}

/// The last reading in microseconds, and its time on the monotonic clock.
#[derive(Debug, Default)]
struct LastReading(Option<(u64, Timestamp)>);

impl LastReading {
    /// Returns the system's time, or the last reading plus the elapsed time if that is later.
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
    fn a_system_clock_set_back_does_not_stop_time() {
        let mut unix = LastReading::default();
        assert_eq!(unix.read(1_000_000, Timestamp(7)), 1_000_000);
        assert_eq!(unix.read(5_000_000, Timestamp(8)), 5_000_000, "set forward");
        assert_eq!(unix.read(1_000_000, Timestamp(1_008)), 5_001_000, "set back: elapsed time counts");
        assert_eq!(unix.read(5_000_500, Timestamp(2_008)), 5_002_000);
        assert_eq!(unix.read(9_000_000, Timestamp(2_009)), 9_000_000);
    }
}
