//! Devices that become slow, by their own clock: their limited work, redirection of the rest, and
//! recovery.
//!
//! Not here: detection (`slowness`).

use super::faulty::{FaultPlan, FaultyDevice};
use super::*;

const USUAL_US: u64 = 100;
const SLOW_US: u64 = 200_000;

/// Maximum jobs of a slow device.
const SLOW_DEVICE_JOBS: usize = 4;

struct DelayedDevices {
    bench: SsdBench,
    devices: Vec<Arc<FaultyDevice>>,
}

impl DelayedDevices {
    fn open(count: u64) -> DelayedDevices {
        let (send, reports) = unbounded_channel();
        let config = config(Path::new("/nowhere"), false);
        let shape = SegmentShape { segment_pages: 32, segments: 9, frame_bytes_max: config.frame_bytes_max };
        let (mut report, mut ssd) = (ScanReport::default(), SsdTier::empty());
        let device = |seed| Arc::new(FaultyDevice::new(Vec::new(), FaultPlan::default(), seed));
        let devices: Vec<_> = (0..count).map(device).collect();
        for device in &devices {
            let theirs: Arc<dyn BlockDevice> = Arc::<FaultyDevice>::clone(device);
            ssd.open_device(&config, theirs, shape, "device".to_owned(), send.clone(), &mut report).unwrap();
        }
        let arena = Arena::new(ArenaShape::equal(8192, 64, 0)).unwrap();
        let run = DelayedDevices { bench: SsdBench { ssd, reports, report, arena }, devices };
        (0..run.devices.len()).for_each(|number| run.set_delay(number, USUAL_US));
        run
    }

    /// Sets the duration of each call of a device.
    fn set_delay(&self, number: usize, delay_us: u64) {
        self.devices[number].set_plan(FaultPlan { delay_us, ..FaultPlan::default() });
    }

    /// Saves and frees blocks, up to `most`, or until `slow` devices are slow.
    fn save_until(&mut self, most: usize, slow: Option<usize>) {
        for _ in 0..most {
            let record = self.bench.save(1).unwrap();
            self.bench.ssd.free(record);
            self.bench.ssd.update_health();
            if slow == Some(self.bench.ssd.slow_devices()) {
                return;
            }
        }
        assert!(slow.is_none(), "{slow:?} devices are not slow after {most} saves");
    }

    fn until_slow(&mut self, count: usize) {
        self.save_until(3_000, Some(count));
    }

    /// Reads block 3.
    fn read(&mut self, record: SsdRecord) {
        assert_eq!(self.bench.load(3, record).unwrap(), frame(3));
        self.bench.ssd.update_health();
    }

    /// Starts saves while there is space, up to `most`, and counts them by device; then lets them
    /// end.
    fn burst(&mut self, most: usize) -> Vec<usize> {
        let mut records = Vec::new();
        while records.len() < most
            && let Some(record) = self.bench.ssd.write(1, 0, header(1), &frame(1)).unwrap()
        {
            records.push(record);
        }
        assert_eq!(self.bench.ssd.is_overloaded(), records.len() < most);
        assert!(self.bench.ssd.has_room(), "there is space, or waiting is pointless");
        let mut counts = vec![0; self.devices.len()];
        for record in records {
            self.bench.next_completion();
            counts[usize::from(record.lane)] += 1;
            self.bench.ssd.free(record);
        }
        counts
    }
}

#[test]
fn slow_device_gets_limited_work_and_others_the_rest() {
    let mut run = DelayedDevices::open(2);
    run.save_until(6_000, None);
    assert_eq!(run.burst(20), [10, 10]);
    let kept = run.bench.save(3).unwrap();
    let slow = usize::from(kept.lane);
    let whole = Capacity::Blocks(100);
    assert_eq!(run.bench.ssd.usable_capacity(whole, 4096), 100);
    let log = Log::start();
    run.set_delay(slow, SLOW_US);
    run.until_slow(1);
    let line = log.line("become slow");
    says("an SSD that has become slow", &line.split(" file=").next().unwrap(), &[]);
    let counts = run.burst(20);
    assert_eq!((counts[slow], counts[1 - slow]), (SLOW_DEVICE_JOBS, 16));
    assert_eq!(run.bench.ssd.usable_capacity(whole, 4096), 51, "half of it plus the slow device's block");
    assert_eq!(run.bench.load(3, kept).unwrap(), frame(3), "its blocks are served");
    run.set_delay(slow, USUAL_US);
    run.until_slow(0);
    assert_eq!(log.count("become slow"), 1, "logged once");
    assert_eq!(run.burst(20), [10, 10]);
    assert_eq!(run.bench.ssd.usable_capacity(whole, 4096), 100);
}

#[test]
fn excess_work_is_refused_if_all_devices_are_slow() {
    for count in [1, 2] {
        let mut run = DelayedDevices::open(count);
        run.save_until(6_000, None);
        let kept = run.bench.save(3).unwrap();
        (0..3_000).for_each(|_| run.read(kept));
        (0..run.devices.len()).for_each(|number| run.set_delay(number, SLOW_US));
        run.until_slow(run.devices.len());
        assert_eq!(run.burst(20), vec![SLOW_DEVICE_JOBS; run.devices.len()], "the rest is refused");
        assert_eq!(
            run.bench.ssd.usable_capacity(Capacity::Blocks(100), 4096),
            100,
            "there is no other device"
        );
        assert!(!run.bench.ssd.is_overloaded());
        assert!(
            (0..SLOW_DEVICE_JOBS).all(|_| run.bench.ssd.may_read(kept, false)),
            "slowness to read is not known yet"
        );
        // The same holds for readers, once slowness to read is known.
        (0..30).for_each(|_| run.read(kept));
        let into = |run: &DelayedDevices| run.bench.arena.take(frame(3).len(), Purpose::Load).unwrap();
        for _ in 0..SLOW_DEVICE_JOBS {
            assert!(run.bench.ssd.may_read(kept, true));
            let slot = into(&run);
            run.bench.ssd.read(9, kept, version(3, 0), slot).unwrap();
        }
        assert!(!run.bench.ssd.may_read(kept, true));
        assert_eq!(run.bench.ssd.slow_device_jobs(), (0, SLOW_DEVICE_JOBS));
        for _ in 0..SLOW_DEVICE_JOBS {
            assert!(matches!(
                run.bench.next_completion(),
                SsdCompletion::Read { token: 9, result: Ok(bytes) } if bytes == frame(3)
            ));
        }
        assert!(run.bench.ssd.may_read(kept, true) && !run.bench.ssd.may_read(kept, false));
        (0..run.devices.len()).for_each(|number| run.set_delay(number, USUAL_US));
        (0..3_000).for_each(|_| run.read(kept));
        run.until_slow(0);
        assert_eq!(run.bench.ssd.slow_device_jobs(), (0, 0));
    }
}
