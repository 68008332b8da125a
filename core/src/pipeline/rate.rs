//! Current arrival rate of one fetch: a mean over the last moments that falls during silence.
//!
//! It keeps sums of bytes and of time, both with the same half-life. Silence adds time without
//! bytes, so the estimate halves with each half-life of silence, and recovers as fast. Not here:
//! link estimates across fetches ([`crate::schedule`]), which give the initial value.

/// Bytes over time, with exponential decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArrivalRate {
    bytes: f64,
    ns: f64,
    at_ns: u64,
    half_life_ns: f64,
}

impl ArrivalRate {
    /// An estimate that starts from a prior bandwidth, as if it had been observed for long.
    #[must_use]
    pub fn new(bytes_per_s: u64, half_life_ns: u64, now_ns: u64) -> ArrivalRate {
        let half_life_ns = (half_life_ns as f64).max(1.0);
        // Steady state of the sum of time.
        let ns = half_life_ns / std::f64::consts::LN_2;
        ArrivalRate { bytes: bytes_per_s as f64 * 1e-9 * ns, ns, at_ns: now_ns, half_life_ns }
    }

    /// Adds arrived bytes.
    pub fn add_bytes(&mut self, bytes: u64, now_ns: u64) {
        *self = self.decayed(now_ns);
        self.bytes += bytes as f64;
    }

    /// Ends a pause without requests: the silence until now does not count.
    pub fn resume(&mut self, now_ns: u64) {
        self.at_ns = self.at_ns.max(now_ns);
    }

    /// Time that this many bytes take at the current rate, in nanoseconds; saturates at `u64::MAX`.
    #[must_use]
    pub fn time_ns(&self, bytes: u64, now_ns: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let now = self.decayed(now_ns);
        // Saturates, also after a silence that decayed the sum of bytes to zero.
        (bytes as f64 * now.ns / now.bytes) as u64
    }

    fn decayed(&self, now_ns: u64) -> ArrivalRate {
        let passed_ns = now_ns.saturating_sub(self.at_ns) as f64;
        let share = (-passed_ns / self.half_life_ns).exp2();
        ArrivalRate {
            bytes: self.bytes * share,
            ns: self.ns * share + self.half_life_ns / std::f64::consts::LN_2 * (1.0 - share),
            at_ns: self.at_ns.max(now_ns),
            ..*self
        }
    }
}
