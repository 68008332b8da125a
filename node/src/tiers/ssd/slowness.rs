//! Detects a device that is slow at one kind of work: its time per unit of work, compared with its
//! usual time, or with the other devices while that is unknown. Pure: the time is an argument.
//!
//! Busy time per unit separates a slow device from a busy one, where each operation takes longer
//! because many are in flight. A long time per operation separates it from a device with little
//! work. Both must hold by a large factor and for a while. Reads, writes and flushes are judged
//! separately: a device that reads well and writes badly is slow. Not here: the consequences
//! (`lane`, `pick`).

use kv_core::id::Timestamp;

/// An operation counts as one unit of work, plus one for each multiple of this many bytes.
const UNIT_BYTES: usize = 64 << 10;

/// A window ends after this much busy time, if an operation ended in it;
const WINDOW_US: u64 = 500_000;

/// or after this many units;
const WINDOW_UNITS: u64 = 256;

/// if no operation ends, it is judged each time this much more busy time has passed, and continues:
/// the first end accounts for all of it.
const HANG_US: u64 = 1_000_000;

/// A device is slow if it takes this many times the usual time,
const SLOW_FACTOR: f64 = 8.0;

/// for this many consecutive windows: a single one may be a pause for internal work of the medium.
/// As many healthy windows end it, and twice as many after each early relapse, up to a limit.
const CHANGE_WINDOWS: u32 = 3;
const CHANGE_WINDOWS_MAX: u32 = 48;

/// A slow device's window also ends after this time, even with little work: a little fast work
/// counts.
const SLOW_WINDOW_US: u64 = 5_000_000;

/// A device without slow windows for this long counts as healthy, even without work: new work will
/// tell.
const RECOVERY_US: u64 = 60_000_000;

/// A relapse is early within this time; after it counting starts anew.
const RELAPSE_US: u64 = 60_000_000;

/// An operation that takes at most this long is not slow in any case.
const HEALTHY_WAIT_US: f64 = 25_000.0;

/// While the device does much work of other kinds, an operation counts as slow only if it takes
/// this long, because it queues behind that work.
const BUSY_WAIT_US: f64 = 1_000_000.0;

/// Windows until the usual time is known.
const USUAL_WINDOWS: u32 = 8;

/// Seemingly slow windows, while the usual time is unknown, before they count as usual: long enough
/// for the other devices to become known.
const UNJUDGED_WINDOWS_MAX: u32 = 64;

/// Weight of a window in the usual time, once known.
const USUAL_WEIGHT: f64 = 1.0 / 16.0;

/// A window above this many times the usual time does not update it.
const OUTLIER_FACTOR: f64 = 2.0;

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoKind {
    Read,
    Write,
    Flush,
}

impl IoKind {
    pub(crate) const ALL: [IoKind; 3] = [IoKind::Read, IoKind::Write, IoKind::Flush];

    /// Name for the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            IoKind::Read => "reads",
            IoKind::Write => "writes",
            IoKind::Flush => "flushes",
        }
    }

    /// Minimum time per unit of work and per operation of a slow device, in microseconds: 16 MB/s
    /// and a tenth of a second. A flush of the maximum unflushed data takes a second at that rate.
    fn slow_us_min(self) -> (f64, f64) {
        match self {
            IoKind::Read | IoKind::Write => (4_000.0, 100_000.0),
            IoKind::Flush => (1_000_000.0, 1_000_000.0),
        }
    }
}

/// Totals of one kind of work on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct IoTotals {
    in_flight: u64,
    /// Time up to which the totals are computed.
    updated_at: Timestamp,
    /// Time with at least one operation in flight.
    busy_us: u64,
    /// Sum of the in-flight times of all operations.
    waited_us: u64,
    ops: u64,
    units: u64,
}

impl IoTotals {
    fn up_to(mut self, now: Timestamp) -> IoTotals {
        let span_us = now.0.saturating_sub(self.updated_at.0);
        if self.in_flight > 0 {
            self.busy_us += span_us;
            self.waited_us += span_us.saturating_mul(self.in_flight);
        }
        self.updated_at = now;
        self
    }
}

/// Totals of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceTotals([IoTotals; IoKind::ALL.len()]);

impl DeviceTotals {
    /// Records the start of an operation.
    pub(crate) fn record_start(&mut self, kind: IoKind, now: Timestamp) {
        let work = &mut self.0[kind as usize];
        *work = work.up_to(now);
        work.in_flight += 1;
    }

    /// Records the end of an operation with its bytes; a failed one (`None`) did no work.
    pub(crate) fn record_end(&mut self, kind: IoKind, bytes: Option<usize>, now: Timestamp) {
        let work = &mut self.0[kind as usize];
        *work = work.up_to(now);
        work.in_flight = work.in_flight.saturating_sub(1);
        if let Some(bytes) = bytes {
            work.ops += 1;
            work.units += 1 + (bytes / UNIT_BYTES) as u64;
        }
    }

    /// Units of all kinds.
    fn units(&self) -> u64 {
        self.0.iter().map(|work| work.units).sum()
    }
}

/// Times of a device in a window, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WindowTimes {
    /// Per unit of work.
    unit_us: f64,
    /// Mean time of an operation from start to end.
    wait_us: f64,
    /// Per unit of work of any kind, while this kind was in flight.
    any_unit_us: f64,
}

/// A change of a device's health.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum HealthChange {
    /// It became slow: its time per unit and the usual time, in microseconds.
    Slow { takes_us: f64, usual_us: f64 },
    /// It recovered.
    Recovered,
}

/// Detector for one kind of work on one device.
#[derive(Debug)]
pub(crate) struct SlowDetector {
    kind: IoKind,
    is_slow: bool,
    /// Totals of this kind, units of all kinds, and time at the start of the window.
    window_start_totals: IoTotals,
    window_start_units: u64,
    window_start: Timestamp,
    /// Busy time after which the window is judged without an end, in microseconds.
    hang_us: u64,
    /// Consecutive windows that indicate a change.
    windows: u32,
    /// Number of windows needed for a recovery.
    windows_to_recover: u32,
    /// Time of the last change.
    changed_at: Timestamp,
    /// Time of the last slow window.
    last_slow_at: Timestamp,
    usual_us: f64,
    usual_windows: u32,
    unjudged_windows: u32,
}

impl SlowDetector {
    pub(crate) fn new(kind: IoKind) -> SlowDetector {
        SlowDetector {
            kind,
            is_slow: false,
            window_start_totals: IoTotals::default(),
            window_start_units: 0,
            window_start: Timestamp(0),
            hang_us: HANG_US,
            windows: 0,
            windows_to_recover: CHANGE_WINDOWS,
            changed_at: Timestamp(0),
            last_slow_at: Timestamp(0),
            usual_us: 0.0,
            usual_windows: 0,
            unjudged_windows: 0,
        }
    }

    /// Whether the device is slow at this kind.
    pub(crate) fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Usual time per unit of work in microseconds, once known.
    pub(crate) fn usual_us(&self) -> Option<f64> {
        (self.usual_windows >= USUAL_WINDOWS).then_some(self.usual_us)
    }

    /// Evaluates the work so far. `others` gives the usual time of the other devices, if known.
    /// Cheap unless a window ends.
    pub(crate) fn observe(
        &mut self,
        tally: &DeviceTotals,
        others: impl FnOnce() -> Option<f64>,
        now: Timestamp,
    ) -> Option<HealthChange> {
        let work = tally.0[self.kind as usize].up_to(now);
        let busy_us = work.busy_us - self.window_start_totals.busy_us;
        let (ops, units) =
            (work.ops - self.window_start_totals.ops, work.units - self.window_start_totals.units);
        let age_us = now.0.saturating_sub(self.window_start.0);
        if self.is_slow && units == 0 && work.in_flight == 0 {
            let is_over = age_us >= RECOVERY_US;
            return is_over.then(|| self.mark_recovered(now));
        }
        let is_over = units >= WINDOW_UNITS
            || busy_us >= if units > 0 { WINDOW_US } else { self.hang_us }
            || (self.is_slow && units > 0 && age_us >= SLOW_WINDOW_US);
        if !is_over {
            return None;
        }
        let per = |sum: u64, count: u64| sum as f64 / count.max(1) as f64;
        let took = WindowTimes {
            unit_us: per(busy_us, units),
            wait_us: per(
                work.waited_us - self.window_start_totals.waited_us,
                if units > 0 { ops } else { work.in_flight },
            ),
            any_unit_us: per(busy_us, tally.units() - self.window_start_units),
        };
        if units > 0 {
            (self.window_start_totals, self.hang_us) = (work, HANG_US);
            (self.window_start_units, self.window_start) = (tally.units(), now);
        } else {
            self.hang_us += HANG_US;
        }
        self.judge_window(took, others(), now)
    }

    fn judge_window(
        &mut self,
        took: WindowTimes,
        others: Option<f64>,
        now: Timestamp,
    ) -> Option<HealthChange> {
        // Prefer its own usual time: a device of a slower type is not slow.
        let usual_us = self.usual_us().or(others);
        let (unit_us_min, wait_us_min) = self.kind.slow_us_min();
        let is_unusual = usual_us.is_none_or(|usual_us| took.unit_us >= SLOW_FACTOR * usual_us);
        let is_little = is_unusual && took.unit_us >= unit_us_min;
        let does_much = took.any_unit_us < unit_us_min;
        if self.is_slow {
            // With little work it may be fast and still slow under load, which shows when there is
            // more.
            let is_well = !is_little || took.wait_us < if does_much { BUSY_WAIT_US } else { HEALTHY_WAIT_US };
            if !is_well {
                self.last_slow_at = now;
            }
            let is_over = is_well && now.0.saturating_sub(self.last_slow_at.0) >= RECOVERY_US;
            return (self.count_window(is_well, self.windows_to_recover) || is_over)
                .then(|| self.mark_recovered(now));
        }
        let wait_us_min = if does_much { wait_us_min.max(BUSY_WAIT_US) } else { wait_us_min };
        let seems_slow = is_little && took.wait_us >= wait_us_min;
        self.learn_usual(took.unit_us, seems_slow);
        let is_slow = seems_slow && usual_us.is_some();
        self.count_window(is_slow, CHANGE_WINDOWS).then(|| {
            let is_relapse =
                self.changed_at > Timestamp(0) && now.0.saturating_sub(self.changed_at.0) < RELAPSE_US;
            self.windows_to_recover = if is_relapse {
                (self.windows_to_recover * 2).min(CHANGE_WINDOWS_MAX)
            } else {
                CHANGE_WINDOWS
            };
            (self.is_slow, self.changed_at, self.window_start, self.last_slow_at) = (true, now, now, now);
            HealthChange::Slow { takes_us: took.unit_us, usual_us: usual_us.unwrap_or_default() }
        })
    }

    fn mark_recovered(&mut self, now: Timestamp) -> HealthChange {
        (self.is_slow, self.changed_at, self.windows) = (false, now, 0);
        HealthChange::Recovered
    }

    /// Counts a window for or against a change; `true` after enough consecutive ones.
    fn count_window(&mut self, speaks_for: bool, wanted: u32) -> bool {
        self.windows = if speaks_for { self.windows + 1 } else { 0 };
        let is_enough = self.windows >= wanted;
        if is_enough {
            self.windows = 0;
        }
        is_enough
    }

    fn learn_usual(&mut self, unit_us: f64, seems_slow: bool) {
        let is_far = self.usual_us().is_some_and(|usual_us| unit_us > OUTLIER_FACTOR * usual_us);
        // A window that cannot be judged yet may be of a device that was always slow, and the
        // others may soon show it.
        self.unjudged_windows += u32::from(seems_slow);
        if is_far || (seems_slow && self.unjudged_windows <= UNJUDGED_WINDOWS_MAX) {
            return;
        }
        self.usual_windows = self.usual_windows.saturating_add(1);
        let part = USUAL_WEIGHT.max(1.0 / f64::from(self.usual_windows));
        self.usual_us += (unit_us - self.usual_us) * part;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with one kind of work.
    struct SimulatedDevice {
        kind: IoKind,
        tally: DeviceTotals,
        watch: SlowDetector,
        now: u64,
        others: Option<f64>,
    }

    impl SimulatedDevice {
        fn new(kind: IoKind) -> SimulatedDevice {
            SimulatedDevice {
                kind,
                tally: DeviceTotals::default(),
                watch: SlowDetector::new(kind),
                now: 1_000_000,
                others: None,
            }
        }

        /// Runs `ops` operations of `bytes` bytes, `in_flight` at a time; each round takes
        /// `takes_us`.
        fn work(&mut self, ops: u64, in_flight: u64, bytes: usize, takes_us: u64) -> Vec<HealthChange> {
            let mut changes = Vec::new();
            for _ in 0..ops / in_flight {
                (0..in_flight).for_each(|_| self.tally.record_start(self.kind, Timestamp(self.now)));
                changes.extend(self.pass_time(takes_us));
                (0..in_flight)
                    .for_each(|_| self.tally.record_end(self.kind, Some(bytes), Timestamp(self.now)));
                changes.extend(self.pass_time(10));
            }
            changes
        }

        /// Advances the time, with an observation every 20 ms.
        fn pass_time(&mut self, mut time_us: u64) -> Vec<HealthChange> {
            let mut changes = Vec::new();
            while time_us > 0 {
                let step = time_us.min(20_000);
                (self.now, time_us) = (self.now + step, time_us - step);
                changes.extend(self.watch.observe(&self.tally, || self.others, Timestamp(self.now)));
            }
            changes
        }

        /// Normal work: 64 KiB, 8 in flight, 400 us: 25 us per unit.
        fn work_normally(&mut self) {
            assert_eq!(self.work(20_000, 8, UNIT_BYTES, 400), []);
        }
    }

    #[test]
    fn slowdown_and_recovery_are_reported_once_each() {
        let mut fake = SimulatedDevice::new(IoKind::Write);
        fake.work_normally();
        let changes = fake.work(100, 1, UNIT_BYTES, 200_000);
        assert!(
            matches!(changes[..], [HealthChange::Slow { takes_us, usual_us }]
            if takes_us > 99_000.0 && (20.0..60.0).contains(&usual_us)),
            "{changes:?}"
        );
        assert!(fake.watch.is_slow());
        assert_eq!(fake.work(4_000, 8, UNIT_BYTES, 400), [HealthChange::Recovered]);
        assert!(!fake.watch.is_slow());
        let changes = fake.work(100, 1, UNIT_BYTES, 200_000);
        assert!(matches!(changes[..], [HealthChange::Slow { .. }]), "the usual time was not forgotten");
    }

    #[test]
    fn relapses_lengthen_the_recovery() {
        let mut fake = SimulatedDevice::new(IoKind::Write);
        fake.work_normally();
        let mut wells = Vec::new();
        for _ in 0..9 {
            while !fake.watch.is_slow() {
                fake.work(1, 1, UNIT_BYTES, 200_000);
            }
            let mut well = 0;
            while fake.watch.is_slow() {
                fake.work(8, 8, UNIT_BYTES, 400);
                well += 8;
            }
            wells.push(well / (WINDOW_UNITS / 2));
        }
        assert_eq!(wells, [3, 6, 12, 24, 48, 48, 48, 48, 48]);
        // After a minute the relapses are forgotten.
        fake.pass_time(RELAPSE_US);
        fake.work_normally();
        assert_eq!(fake.work(100, 1, UNIT_BYTES, 200_000).len(), 1);
        assert_eq!(fake.work(WINDOW_UNITS / 2 * 4, 8, UNIT_BYTES, 400), [HealthChange::Recovered]);
    }

    #[test]
    fn busy_or_briefly_paused_device_is_not_slow() {
        let mut fake = SimulatedDevice::new(IoKind::Read);
        fake.work_normally();
        // Three hundred times as long per operation, but with sixty-four times as many in flight: 1
        // ms per unit.
        assert_eq!(fake.work(6_400, 64, UNIT_BYTES, 128_000), []);
        // Little work, delayed by the device's other work: 10 ms per unit.
        assert_eq!(fake.work(400, 1, UNIT_BYTES, 20_000), []);
        assert_eq!(fake.work(2, 1, UNIT_BYTES, 700_000), []);
        fake.work_normally();
    }

    #[test]
    fn slow_device_recovers_under_low_load_and_relapses_under_high_load() {
        let mut fake = SimulatedDevice::new(IoKind::Write);
        fake.work_normally();
        // 5 MB/s.
        assert_eq!(fake.work(640, 16, UNIT_BYTES, 200_000).len(), 1);
        assert!(fake.watch.is_slow());
        assert_eq!(fake.work(200, 1, UNIT_BYTES, 13_000), [HealthChange::Recovered]);
        assert!(matches!(fake.work(640, 16, UNIT_BYTES, 200_000)[..], [HealthChange::Slow { .. }]));
        // The limited work of a slow device is enough to keep it slow.
        assert_eq!(fake.work(1_600, 16, UNIT_BYTES, 200_000), []);
    }

    #[test]
    fn always_slow_device_is_detected_only_against_other_devices() {
        let slow = |others| {
            let mut fake = SimulatedDevice::new(IoKind::Read);
            fake.others = others;
            !fake.work(400, 8, UNIT_BYTES, 800_000).is_empty()
        };
        assert_eq!(
            [None, Some(100.0)].map(slow),
            [false, true],
            "it may have no other device to compare with"
        );
        assert!(!slow(Some(10_000.0)), "five times slower is not slow");
    }

    #[test]
    fn initially_slow_device_is_detected_once_others_are_known() {
        let mut fake = SimulatedDevice::new(IoKind::Write);
        // 5 MB/s from the start, for as long as a busy device needs to become known.
        assert_eq!(fake.work(640, 16, UNIT_BYTES, 400_000), []);
        fake.others = Some(25.0);
        assert_eq!(fake.work(320, 16, UNIT_BYTES, 400_000).len(), 1);
        // Without others its speed finally counts as usual.
        let mut fake = SimulatedDevice::new(IoKind::Write);
        assert_eq!(fake.work(3_200, 16, UNIT_BYTES, 400_000), []);
        fake.others = Some(25.0);
        assert_eq!(fake.work(320, 16, UNIT_BYTES, 400_000), []);
    }

    #[test]
    fn reads_queued_behind_writes_are_not_slow() {
        let mut fake = SimulatedDevice::new(IoKind::Read);
        fake.work_normally();
        let mut reads = |wait_us: u64, chunks_each: u64| {
            let mut changes = Vec::new();
            for _ in 0..20 {
                fake.tally.record_start(IoKind::Read, Timestamp(fake.now));
                for _ in 0..chunks_each {
                    fake.tally.record_start(IoKind::Write, Timestamp(fake.now));
                    changes.extend(fake.pass_time(wait_us / chunks_each));
                    fake.tally.record_end(IoKind::Write, Some(512 << 10), Timestamp(fake.now));
                }
                fake.tally.record_end(IoKind::Read, Some(UNIT_BYTES), Timestamp(fake.now));
                changes.extend(fake.pass_time(10));
            }
            changes
        };
        assert_eq!(reads(134_000, 32), [], "125 MB/s are written meanwhile");
        assert_eq!(reads(134_000, 2).len(), 1, "8 MB/s are not much");
    }

    #[test]
    fn failed_operations_do_not_count_as_work() {
        let mut fake = SimulatedDevice::new(IoKind::Read);
        fake.work_normally();
        assert_eq!(fake.work(100, 1, UNIT_BYTES, 200_000).len(), 1);
        for _ in 0..10_000 {
            fake.tally.record_start(IoKind::Read, Timestamp(fake.now));
            assert_eq!(fake.pass_time(50), []);
            fake.tally.record_end(IoKind::Read, None, Timestamp(fake.now));
        }
        assert!(fake.watch.is_slow());
    }

    #[test]
    fn low_healthy_load_or_idle_time_ends_slowness() {
        let slow = || {
            let mut fake = SimulatedDevice::new(IoKind::Flush);
            assert_eq!(fake.work(4_000, 1, 0, 1_000), []);
            assert_eq!(fake.work(10, 1, 0, 1_500_000).len(), 1);
            fake
        };
        let mut fake = slow();
        let mut changes = Vec::new();
        for _ in 0..20 {
            changes.extend(fake.work(1, 1, 0, 1_000));
            changes.extend(fake.pass_time(1_000_000));
        }
        assert_eq!(changes, [HealthChange::Recovered], "one flush per second");
        let mut fake = slow();
        assert_eq!(fake.pass_time(RECOVERY_US - 1_000_000), []);
        assert_eq!(fake.pass_time(2_000_000), [HealthChange::Recovered]);
    }

    #[test]
    fn hanging_operations_are_detected() {
        for kind in IoKind::ALL {
            let mut fake = SimulatedDevice::new(kind);
            fake.work(20_000, 8, 0, 400);
            fake.tally.record_start(kind, Timestamp(fake.now));
            assert_eq!(fake.pass_time(2_900_000), [], "{kind:?}");
            assert!(matches!(fake.pass_time(700_000)[..], [HealthChange::Slow { .. }]), "{kind:?}");
            assert_eq!(fake.pass_time(2 * RECOVERY_US), [], "{kind:?}: no sign of recovery");
            fake.tally.record_end(kind, Some(0), Timestamp(fake.now));
            assert_eq!(fake.work(2_000, 8, 0, 400), [HealthChange::Recovered], "{kind:?}");
        }
    }

    #[test]
    fn large_flush_is_not_slow() {
        let mut fake = SimulatedDevice::new(IoKind::Flush);
        assert_eq!(fake.work(4_000, 1, 0, 1_000), []);
        assert_eq!(fake.work(100, 1, 0, 300_000), []);
        assert!(matches!(fake.work(10, 1, 0, 1_500_000)[..], [HealthChange::Slow { .. }]));
    }
}
