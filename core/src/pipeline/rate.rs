//! How fast bytes of one fetch come, as known now: a mean over the last moments that falls while nothing comes.
//!
//! Sums of bytes and of time, both halved after each half-life. Silence adds time and no bytes, so an estimate
//! halves with each half-life of it, and comes back as fast. Not here: what is known of a link from fetch to
//! fetch ([`crate::schedule`]), which is what this one begins with.

/// Bytes over time, of which the older count less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    bytes: f64,
    ns: f64,
    at_ns: u64,
    half_life_ns: f64,
}

impl Rate {
    /// An estimate that begins with what was known before, as if it had been seen for long.
    #[must_use]
    pub fn new(bytes_per_s: u64, half_life_ns: u64, now_ns: u64) -> Rate {
        let half_life_ns = (half_life_ns as f64).max(1.0);
        // What the sum of time comes to when it neither grows nor falls any more.
        let ns = half_life_ns / std::f64::consts::LN_2;
        Rate { bytes: bytes_per_s as f64 * 1e-9 * ns, ns, at_ns: now_ns, half_life_ns }
    }

    /// Bytes came.
    pub fn arrived(&mut self, bytes: u64, now_ns: u64) {
        *self = self.aged(now_ns);
        self.bytes += bytes as f64;
    }

    /// Nobody asked for bytes until now: that none came says nothing.
    pub fn resume(&mut self, now_ns: u64) {
        self.at_ns = self.at_ns.max(now_ns);
    }

    /// Time that so many bytes take at the rate known at this moment, in nanoseconds; `u64::MAX` when they take
    /// longer.
    #[must_use]
    pub fn time_ns(&self, bytes: u64, now_ns: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let now = self.aged(now_ns);
        // Saturates, also where nothing came for so long that the sum of bytes is zero.
        (bytes as f64 * now.ns / now.bytes) as u64
    }

    fn aged(&self, now_ns: u64) -> Rate {
        let passed_ns = now_ns.saturating_sub(self.at_ns) as f64;
        let share = (-passed_ns / self.half_life_ns).exp2();
        Rate {
            bytes: self.bytes * share,
            ns: self.ns * share + self.half_life_ns / std::f64::consts::LN_2 * (1.0 - share),
            at_ns: self.at_ns.max(now_ns),
            ..*self
        }
    }
}
