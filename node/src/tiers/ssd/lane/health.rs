//! Observed speed of a lane's device, and the limit of work for a slow one.
//!
//! Not here: detecting slowness (`slowness`), and redirecting work (`pick`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::Lane;
use crate::tiers::ssd::device::BlockDevice;
use crate::tiers::ssd::engine::SsdFaults;
use crate::tiers::ssd::slowness::{DeviceTotals, HealthChange, IoKind, SlowDetector};

/// Work of one kind given to a slow device at once, in bytes, and in blocks for small ones (few
/// under test). It is enough to notice a recovery, and to use the remaining speed without delaying
/// further requests.
const SLOW_DEVICE_BYTES: u64 = 1 << 20;
const SLOW_DEVICE_JOBS: usize = if cfg!(test) { 4 } else { 64 };

/// Open jobs of one kind requested by the store.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OpenJobs {
    pub(super) jobs: usize,
    bytes: u64,
}

impl OpenJobs {
    pub(super) fn begin(&mut self, bytes: u32) {
        self.jobs += 1;
        self.bytes += u64::from(bytes);
    }

    pub(super) fn end(&mut self, bytes: u32) {
        self.jobs -= 1;
        self.bytes -= u64::from(bytes);
    }

    /// How many more blocks of `block_bytes` a slow device may get; it always gets at least one.
    fn remaining(self, block_bytes: u64) -> usize {
        let by_bytes = SLOW_DEVICE_BYTES.saturating_sub(self.bytes).div_ceil(block_bytes.max(1));
        SLOW_DEVICE_JOBS.saturating_sub(self.jobs).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }
}

/// A device's health, as seen from outside its thread.
pub(in crate::tiers::ssd) struct DeviceHealth {
    device: Arc<dyn BlockDevice>,
    totals: Arc<Mutex<DeviceTotals>>,
    detectors: [SlowDetector; IoKind::ALL.len()],
    faults: Arc<SsdFaults>,
    /// Name for the log.
    name: String,
}

impl DeviceHealth {
    pub(in crate::tiers::ssd) fn new(
        device: Arc<dyn BlockDevice>,
        totals: Arc<Mutex<DeviceTotals>>,
        faults: Arc<SsdFaults>,
        name: String,
    ) -> DeviceHealth {
        DeviceHealth { device, totals, detectors: IoKind::ALL.map(SlowDetector::new), faults, name }
    }

    fn is_slow(&self) -> bool {
        self.detectors.iter().any(SlowDetector::is_slow) || self.faults.slow.load(Ordering::Relaxed)
    }

    fn is_slow_at(&self, kind: IoKind) -> bool {
        self.detectors[kind as usize].is_slow() || self.faults.slow.load(Ordering::Relaxed)
    }
}

impl Lane {
    /// Whether new blocks should go elsewhere.
    pub(in crate::tiers::ssd) fn is_slow(&self) -> bool {
        self.health.is_slow()
    }

    /// Whether readers should avoid it.
    pub(in crate::tiers::ssd) fn is_slow_to_read(&self) -> bool {
        self.health.is_slow_at(IoKind::Read)
    }

    /// How many more blocks it may write now; limited for a slow device.
    pub(in crate::tiers::ssd) fn write_capacity(&self) -> usize {
        if !self.is_slow() {
            return usize::MAX;
        }
        self.writes.remaining(self.book.shape().frame_bytes_max as u64)
    }

    /// Whether it may read another block now.
    pub(in crate::tiers::ssd) fn may_read(&self) -> bool {
        !self.is_slow_to_read() || self.reads.remaining(1) > 0
    }

    /// Updates the health from the device's work; `others` is the usual time of the other devices.
    pub(in crate::tiers::ssd) fn update_health(&mut self, others: impl Fn(IoKind) -> Option<f64>) {
        let was_slow = self.health.is_slow();
        let (tally, now) = (*self.health.totals.lock(), self.health.device.now());
        let DeviceHealth { detectors: watches, name, .. } = &mut self.health;
        for (kind, watch) in IoKind::ALL.into_iter().zip(watches) {
            if let Some(HealthChange::Slow { takes_us, usual_us }) =
                watch.observe(&tally, || others(kind), now)
                && !was_slow
            {
                tracing::warn!(
                    file = name,
                    what = kind.name(),
                    takes_us = takes_us as u64,
                    usual_us = usual_us as u64,
                    "an SSD has become slow: further new blocks go to other devices, or to none; check its \
                     health (smartctl) and its other users, and replace it if this repeats"
                );
            }
        }
        if was_slow && !self.health.is_slow() {
            tracing::info!(file = self.health.name, "a slow SSD has recovered");
        }
    }

    /// Usual time of the device for a unit of work in microseconds, once known.
    pub(in crate::tiers::ssd) fn usual_us(&self, kind: IoKind) -> Option<f64> {
        self.health.detectors[kind as usize].usual_us()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_device_gets_a_bounded_number_of_blocks() {
        let asked = |jobs: u32, bytes: u32| {
            let mut asked = OpenJobs::default();
            (0..jobs).for_each(|_| asked.begin(bytes));
            asked
        };
        let left = |jobs, bytes| asked(jobs, bytes).remaining(u64::from(bytes));
        assert_eq!([left(0, 16 << 20), left(1, 16 << 20)], [1, 0]);
        assert_eq!([left(0, 512 << 10), left(1, 512 << 10), left(2, 512 << 10)], [2, 1, 0]);
        assert_eq!([left(0, 100), left(3, 100), left(4, 100)], [SLOW_DEVICE_JOBS, 1, 0]);
        let mut one = asked(1, 16 << 20);
        one.end(16 << 20);
        assert_eq!(one.remaining(100), SLOW_DEVICE_JOBS);
    }
}
