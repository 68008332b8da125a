//! How fast a lane's device is seen to be, and how much a slow one is given.
//!
//! Not here: when it is slow (`slow`), and what goes elsewhere then (`pick`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::Lane;
use crate::tiers::ssd::device::Device;
use crate::tiers::ssd::engine::SsdFaults;
use crate::tiers::ssd::slow::{Change, Kind, Tally, Watch};

/// What a slow device is given of one kind at once: so many bytes, or blocks of the smallest (few under test, where blocks
/// are). Enough that it shows when it is well again; and it goes on with what it can, while whoever comes beyond that does
/// not wait for it.
const GIVEN_BYTES: u64 = 1 << 20;
const GIVEN_JOBS: usize = if cfg!(test) { 4 } else { 64 };

/// Jobs of one kind that the store asked for and that have not ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    pub(super) jobs: usize,
    bytes: u64,
}

impl Asked {
    pub(super) fn begin(&mut self, bytes: u32) {
        self.jobs += 1;
        self.bytes += u64::from(bytes);
    }

    pub(super) fn end(&mut self, bytes: u32) {
        self.jobs -= 1;
        self.bytes -= u64::from(bytes);
    }

    /// How many blocks of so many bytes more a slow device is given; one it is always given.
    fn left(self, block_bytes: u64) -> usize {
        let by_bytes = GIVEN_BYTES.saturating_sub(self.bytes).div_ceil(block_bytes.max(1));
        GIVEN_JOBS.saturating_sub(self.jobs).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }
}

/// A device, seen from outside its thread.
pub(in crate::tiers::ssd) struct Sight {
    device: Arc<dyn Device>,
    tally: Arc<Mutex<Tally>>,
    watches: [Watch; Kind::ALL.len()],
    faults: Arc<SsdFaults>,
    /// For the log.
    name: String,
}

impl Sight {
    pub(in crate::tiers::ssd) fn new(
        device: Arc<dyn Device>,
        tally: Arc<Mutex<Tally>>,
        faults: Arc<SsdFaults>,
        name: String,
    ) -> Sight {
        Sight { device, tally, watches: Kind::ALL.map(Watch::new), faults, name }
    }

    fn is_slow(&self) -> bool {
        self.watches.iter().any(Watch::is_slow) || self.faults.slow.load(Ordering::Relaxed)
    }

    fn is_slow_at(&self, kind: Kind) -> bool {
        self.watches[kind as usize].is_slow() || self.faults.slow.load(Ordering::Relaxed)
    }
}

impl Lane {
    /// Whether new blocks rather go elsewhere.
    pub(in crate::tiers::ssd) fn is_slow(&self) -> bool {
        self.sight.is_slow()
    }

    /// Whether readers rather do without it.
    pub(in crate::tiers::ssd) fn is_slow_to_read(&self) -> bool {
        self.sight.is_slow_at(Kind::Read)
    }

    /// How many blocks more it may be given to write: a slow device has little to do at once.
    pub(in crate::tiers::ssd) fn writes_left(&self) -> usize {
        if !self.is_slow() {
            return usize::MAX;
        }
        self.saving.left(self.book.shape().frame_bytes_max as u64)
    }

    /// Whether it may be given another block to read.
    pub(in crate::tiers::ssd) fn may_read(&self) -> bool {
        !self.is_slow_to_read() || self.reading.left(1) > 0
    }

    /// Looks at what the device did; `others` is what the other devices take for it.
    pub(in crate::tiers::ssd) fn look(&mut self, others: impl Fn(Kind) -> Option<f64>) {
        let was_slow = self.sight.is_slow();
        let (tally, now) = (*self.sight.tally.lock(), self.sight.device.now());
        let Sight { watches, name, .. } = &mut self.sight;
        for (kind, watch) in Kind::ALL.into_iter().zip(watches) {
            if let Some(Change::Slow { takes_us, usual_us }) = watch.look(&tally, || others(kind), now)
                && !was_slow
            {
                tracing::warn!(
                    file = name,
                    what = kind.name(),
                    takes_us = takes_us as u64,
                    usual_us = usual_us as u64,
                    "an SSD has become slow: new blocks go to other devices, or to none, beyond what it can do; look at its health (smartctl) and at who else uses it, and replace it when this repeats"
                );
            }
        }
        if was_slow && !self.sight.is_slow() {
            tracing::info!(file = self.sight.name, "an SSD that was slow is as it was");
        }
    }

    /// What the device usually takes for a unit of work, once that is known.
    pub(in crate::tiers::ssd) fn usual_us(&self, kind: Kind) -> Option<f64> {
        self.sight.watches[kind as usize].usual_us()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_device_is_given_a_mebibyte_or_a_few_blocks_and_always_one() {
        let asked = |jobs: u32, bytes: u32| {
            let mut asked = Asked::default();
            (0..jobs).for_each(|_| asked.begin(bytes));
            asked
        };
        let left = |jobs, bytes| asked(jobs, bytes).left(u64::from(bytes));
        assert_eq!([left(0, 16 << 20), left(1, 16 << 20)], [1, 0]);
        assert_eq!([left(0, 512 << 10), left(1, 512 << 10), left(2, 512 << 10)], [2, 1, 0]);
        assert_eq!([left(0, 100), left(3, 100), left(4, 100)], [GIVEN_JOBS, 1, 0]);
        let mut one = asked(1, 16 << 20);
        one.end(16 << 20);
        assert_eq!(one.left(100), GIVEN_JOBS);
    }
}
