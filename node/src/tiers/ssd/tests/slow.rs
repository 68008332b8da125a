//! Devices that become slow, by a clock of their own: what they are given, where the rest goes, and that they come back.
//!
//! Not here: when a device counts as slow (`slow`).

use super::faulty::{FaultyDevice, Plan};
use super::*;

const USUAL_US: u64 = 100;
const SLOW_US: u64 = 200_000;

/// As many as a slow device is given.
const GIVEN: usize = 4;

struct Devices {
    bench: Bench,
    devices: Vec<Arc<FaultyDevice>>,
}

impl Devices {
    fn open(count: u64) -> Devices {
        let (send, reports) = unbounded_channel();
        let config = config(Path::new("/nowhere"), false);
        let shape = Shape { segment_pages: 32, segments: 9, frame_bytes_max: config.frame_bytes_max };
        let (mut report, mut ssd) = (ScanReport::default(), Ssd::empty());
        let device = |seed| Arc::new(FaultyDevice::new(Vec::new(), Plan::default(), seed));
        let devices: Vec<_> = (0..count).map(device).collect();
        for device in &devices {
            let theirs: Arc<dyn Device> = Arc::<FaultyDevice>::clone(device);
            ssd.open_device(&config, theirs, shape, "device".to_owned(), send.clone(), &mut report).unwrap();
        }
        let arena = Arena::new(ArenaShape::equal(8192, 64, 0)).unwrap();
        let run = Devices { bench: Bench { ssd, reports, report, arena }, devices };
        (0..run.devices.len()).for_each(|number| run.takes(number, USUAL_US));
        run
    }

    /// Each call of a device takes so long from now on.
    fn takes(&self, number: usize, delay_us: u64) {
        self.devices[number].set_plan(Plan { delay_us, ..Plan::default() });
    }

    /// Saves blocks that nobody needs, until so many were or so many devices are slow.
    fn save_until(&mut self, most: usize, slow: Option<usize>) {
        for _ in 0..most {
            let record = self.bench.save(1).unwrap();
            self.bench.ssd.free(record);
            self.bench.ssd.look();
            if slow == Some(self.bench.ssd.slow_devices()) {
                return;
            }
        }
        assert!(slow.is_none(), "{slow:?} are not slow after {most} saves");
    }

    fn until_slow(&mut self, count: usize) {
        self.save_until(3_000, Some(count));
    }

    /// Reads block 3.
    fn read(&mut self, record: SsdRecord) {
        assert_eq!(self.bench.load(3, record).unwrap(), frame(3));
        self.bench.ssd.look();
    }

    /// Begins saves as long as there is room, at most so many, and counts them by device; then lets them end.
    fn burst(&mut self, most: usize) -> Vec<usize> {
        let mut records = Vec::new();
        while records.len() < most
            && let Some(record) = self.bench.ssd.write(1, 0, header(1), &frame(1)).unwrap()
        {
            records.push(record);
        }
        assert_eq!(self.bench.ssd.is_behind(), records.len() < most);
        assert!(self.bench.ssd.has_room(), "there is room, or nothing to wait for");
        let mut counts = vec![0; self.devices.len()];
        for record in records {
            self.bench.done();
            counts[usize::from(record.lane)] += 1;
            self.bench.ssd.free(record);
        }
        counts
    }
}

#[test]
fn a_slow_device_is_given_what_it_can_do_and_the_others_the_rest() {
    let mut run = Devices::open(2);
    run.save_until(6_000, None);
    assert_eq!(run.burst(20), [10, 10]);
    let kept = run.bench.save(3).unwrap();
    let slow = usize::from(kept.lane);
    let whole = Capacity::Blocks(100);
    assert_eq!(run.bench.ssd.usable(whole, 4096), 100);
    let log = Log::start();
    run.takes(slow, SLOW_US);
    run.until_slow(1);
    let line = log.line("become slow");
    says("an SSD that has become slow", &line.split(" file=").next().unwrap(), &[]);
    let counts = run.burst(20);
    assert_eq!((counts[slow], counts[1 - slow]), (GIVEN, 16));
    assert_eq!(run.bench.ssd.usable(whole, 4096), 51, "half of it and the block that the slow one has");
    assert_eq!(run.bench.load(3, kept).unwrap(), frame(3), "what it holds is served");
    run.takes(slow, USUAL_US);
    run.until_slow(0);
    assert_eq!(log.count("become slow"), 1, "said once");
    assert_eq!(run.burst(20), [10, 10]);
    assert_eq!(run.bench.ssd.usable(whole, 4096), 100);
}

#[test]
fn where_all_are_slow_nobody_waits_for_what_they_cannot_do() {
    for count in [1, 2] {
        let mut run = Devices::open(count);
        run.save_until(6_000, None);
        let kept = run.bench.save(3).unwrap();
        (0..3_000).for_each(|_| run.read(kept));
        (0..run.devices.len()).for_each(|number| run.takes(number, SLOW_US));
        run.until_slow(run.devices.len());
        assert_eq!(run.burst(20), vec![GIVEN; run.devices.len()], "the rest is refused");
        assert_eq!(run.bench.ssd.usable(Capacity::Blocks(100), 4096), 100, "there is nowhere else");
        assert!(!run.bench.ssd.is_behind());
        assert!(
            (0..GIVEN).all(|_| run.bench.ssd.may_read(kept, false)),
            "that it is slow to read is not known"
        );
        // Readers likewise, once it is.
        (0..30).for_each(|_| run.read(kept));
        let into = |run: &Devices| run.bench.arena.take(frame(3).len(), Purpose::Load).unwrap();
        for _ in 0..GIVEN {
            assert!(run.bench.ssd.may_read(kept, true));
            let slot = into(&run);
            run.bench.ssd.read(9, kept, (hash(3), Generation(0)), slot).unwrap();
        }
        assert!(!run.bench.ssd.may_read(kept, true));
        assert_eq!(run.bench.ssd.slow_moves(), (0, GIVEN));
        for _ in 0..GIVEN {
            assert!(
                matches!(run.bench.done(), Done::Read { token: 9, result: Ok(bytes) } if bytes == frame(3))
            );
        }
        assert!(run.bench.ssd.may_read(kept, true) && !run.bench.ssd.may_read(kept, false));
        (0..run.devices.len()).for_each(|number| run.takes(number, USUAL_US));
        (0..3_000).for_each(|_| run.read(kept));
        run.until_slow(0);
        assert_eq!(run.bench.ssd.slow_moves(), (0, 0));
    }
}
