//! A device that behaves like a GPU without one: memory apart from the host's, copies that end later and, between
//! streams, in any order, and whatever can go wrong.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::tiers::gpu::device::{Copy, Device, DeviceError, Ended};

/// What goes wrong, by the number of the copy, counted from 0 in the order in which they begin.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// These fail, when half of their bytes are there.
    pub(crate) failing: BTreeSet<u64>,
    /// These end well and have one bit wrong.
    pub(crate) flipping: BTreeSet<u64>,
    /// With this one the device is lost.
    pub(crate) lost_at: Option<u64>,
    /// No copy ends, and closing the device waits for those that are under way, as a driver does.
    pub(crate) is_held: bool,
    /// Page-locked memory that there is, in bytes.
    pub(crate) locked_bytes: Option<usize>,
}

/// The hand on a device's faults.
pub(crate) type Hand = Arc<Mutex<Faults>>;

/// A copy: its caller's number, its place in the order of all, and itself.
type Waiting = (u64, u64, Copy<Vec<u8>>);

#[derive(Debug)]
pub(crate) struct FakeDevice {
    free_bytes: usize,
    memory: BTreeMap<u64, Vec<u8>>,
    streams: [VecDeque<Waiting>; 3],
    begun: u64,
    chance: u64,
    hops_max: usize,
    lost: Option<DeviceError>,
    faults: Hand,
}

impl FakeDevice {
    /// With so much memory; `seed` decides when copies end.
    pub(crate) fn new(bytes: usize, seed: u64) -> (FakeDevice, Hand) {
        let faults = Hand::default();
        (FakeDevice::in_hand(bytes, seed, &faults), faults)
    }

    /// The same under a hand that others are under too.
    pub(crate) fn in_hand(bytes: usize, seed: u64, faults: &Hand) -> FakeDevice {
        FakeDevice {
            free_bytes: bytes,
            memory: BTreeMap::new(),
            streams: Default::default(),
            begun: 0,
            chance: seed | 1,
            // One for each slice, or as many as a kernel would take.
            hops_max: [1, 2, 32][(seed % 3) as usize],
            lost: None,
            faults: Arc::clone(faults),
        }
    }

    /// Xorshift: good enough to mix up streams.
    fn chance(&mut self, of: u64) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % of
    }

    /// Device memory at an address; touching what was not allocated ends a GPU.
    fn at(&mut self, address: u64, len: usize) -> Result<&mut [u8], DeviceError> {
        let place = self.memory.range_mut(..=address).next_back();
        let found = place.and_then(|(base, memory)| {
            let start = usize::try_from(address - base).ok()?;
            memory.get_mut(start..start.checked_add(len)?)
        });
        found.ok_or_else(|| DeviceError::Lost(format!("an illegal address: {address:#x}")))
    }

    /// Moves so many halves of the bytes of a copy, and flips a bit of it on the way.
    fn run(&mut self, copy: &mut Copy<Vec<u8>>, halves: usize, flip: bool) -> Result<(), DeviceError> {
        let wrong = u8::from(flip);
        match copy {
            Copy::In(staging, piece) => {
                let len = piece.host.len() * halves / 2;
                let memory = self.at(piece.device, piece.host.len())?;
                memory[..len].copy_from_slice(&staging[piece.host.clone()][..len]);
                memory[piece.host.len() / 2] ^= wrong;
            }
            Copy::Out(staging, piece) => {
                let len = piece.host.len() * halves / 2;
                let memory = self.at(piece.device, piece.host.len())?;
                let to = &mut staging[piece.host.clone()];
                to[..len].copy_from_slice(&memory[..len]);
                to[piece.host.len() / 2] ^= wrong;
            }
            Copy::Within(hops) => {
                for hop in hops {
                    let bytes = self.at(hop.from, hop.len)?.to_vec();
                    self.at(hop.to, hop.len)?[..hop.len * halves / 2]
                        .copy_from_slice(&bytes[..hop.len * halves / 2]);
                }
            }
        }
        Ok(())
    }

    fn end_one(&mut self, stream: usize) -> Option<Ended<Vec<u8>>> {
        let (number, order, mut copy) = self.streams[stream].pop_front()?;
        let (fails, flips, loses) = {
            let faults = self.faults.lock();
            (faults.failing.contains(&order), faults.flipping.contains(&order), faults.lost_at == Some(order))
        };
        if loses {
            self.lost = Some(DeviceError::Lost("it fell off the bus".to_owned()));
        }
        let result = match self.lost.clone() {
            Some(lost) => Err(lost),
            None => self.run(&mut copy, if fails { 1 } else { 2 }, flips),
        };
        if let Err(lost @ DeviceError::Lost(_)) = &result {
            self.lost = Some(lost.clone());
            return Some(Ended { number, staging: None, result });
        }
        let staging = match copy {
            Copy::In(staging, _) | Copy::Out(staging, _) => Some(staging),
            Copy::Within(_) => None,
        };
        let result = if fails { Err(DeviceError::Copy("an uncorrectable error".to_owned())) } else { result };
        Some(Ended { number, staging, result })
    }
}

impl Device for FakeDevice {
    type Staging = Vec<u8>;

    fn name(&self) -> String {
        "fake".to_owned()
    }

    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        self.free_bytes = self.free_bytes.checked_sub(bytes).ok_or_else(|| DeviceError::NoMemory {
            bytes,
            what: "device",
            cause: "out of memory".to_owned(),
        })?;
        // Far apart, and nowhere near addresses of the host.
        let base = 0x7f00_0000_0000 + (self.memory.len() as u64) * (1 << 36);
        self.memory.insert(base, vec![0xee; bytes]);
        Ok(base)
    }

    fn staging(&mut self, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        if let Some(left) = &mut self.faults.lock().locked_bytes {
            *left = left.checked_sub(bytes).ok_or_else(|| DeviceError::NoMemory {
                bytes,
                what: "page-locked",
                cause: "out of memory".to_owned(),
            })?;
        }
        Ok(vec![0xdd; bytes])
    }

    fn hops_max(&self) -> usize {
        self.hops_max
    }

    fn begin(&mut self, number: u64, copy: Copy<Vec<u8>>) {
        let stream = match copy {
            Copy::In(..) => 0,
            Copy::Out(..) => 1,
            Copy::Within(_) => 2,
        };
        self.streams[stream].push_back((number, self.begun, copy));
        self.begun += 1;
    }

    fn ended(&mut self) -> Vec<Ended<Vec<u8>>> {
        let mut all = Vec::new();
        if self.faults.lock().is_held {
            return all;
        }
        let first = self.chance(3);
        for stream in (0..3).map(|turn| ((first + turn) % 3) as usize) {
            // A lost device says so of everything.
            let count = if self.lost.is_some() { u64::MAX } else { self.chance(3) };
            for _ in 0..count {
                let Some(ended) = self.end_one(stream) else { break };
                all.push(ended);
            }
        }
        all
    }
}

impl Drop for FakeDevice {
    fn drop(&mut self) {
        let is_busy = |device: &FakeDevice| device.streams.iter().any(|stream| !stream.is_empty());
        // A test that failed has no use for it.
        while is_busy(self) && self.lost.is_none() && self.faults.lock().is_held && !std::thread::panicking()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
