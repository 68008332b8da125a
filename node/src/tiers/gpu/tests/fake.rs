//! A fake GPU: memory separate from the host's, copies that end later and, between streams, in any
//! order, and injected faults.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::tiers::gpu::device::{CompletedCopy, DeviceCopy, DeviceError, GpuDevice};

/// Injected faults, by the number of the copy, counted from 0 in start order.
#[derive(Debug, Default)]
pub(crate) struct InjectedFaults {
    /// Copies that fail after half of their bytes.
    pub(crate) failing: BTreeSet<u64>,
    /// Copies that succeed with one flipped bit.
    pub(crate) flipping: BTreeSet<u64>,
    /// Copy at which the device is lost.
    pub(crate) lost_at: Option<u64>,
    /// If set, no copy ends, and closing the device waits for running copies, as a driver does.
    pub(crate) is_stalled: bool,
    /// Available page-locked memory in bytes.
    pub(crate) locked_bytes: Option<usize>,
}

/// Shared control of a device's faults.
pub(crate) type FaultControl = Arc<Mutex<InjectedFaults>>;

/// A copy: its caller's number, its start order, and itself.
type PendingCopy = (u64, u64, DeviceCopy<Vec<u8>>);

#[derive(Debug)]
pub(crate) struct FakeDevice {
    free_bytes: usize,
    memory: BTreeMap<u64, Vec<u8>>,
    streams: [VecDeque<PendingCopy>; 3],
    begun: u64,
    chance: u64,
    hops_max: usize,
    lost: Option<DeviceError>,
    faults: FaultControl,
}

impl FakeDevice {
    /// A device with this much memory; `seed` decides when copies end.
    pub(crate) fn new(bytes: usize, seed: u64) -> (FakeDevice, FaultControl) {
        let faults = FaultControl::default();
        (FakeDevice::with_faults(bytes, seed, &faults), faults)
    }

    /// The same with a shared fault control.
    pub(crate) fn with_faults(bytes: usize, seed: u64, faults: &FaultControl) -> FakeDevice {
        FakeDevice {
            free_bytes: bytes,
            memory: BTreeMap::new(),
            streams: Default::default(),
            begun: 0,
            chance: seed | 1,
            // One slice per copy, or as many as a kernel takes.
            hops_max: [1, 2, 32][(seed % 3) as usize],
            lost: None,
            faults: Arc::clone(faults),
        }
    }

    /// Xorshift: good enough to mix up streams.
    fn random_below(&mut self, of: u64) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % of
    }

    /// Device memory at an address; access to unallocated memory loses the device.
    fn at(&mut self, address: u64, len: usize) -> Result<&mut [u8], DeviceError> {
        let place = self.memory.range_mut(..=address).next_back();
        let found = place.and_then(|(base, memory)| {
            let start = usize::try_from(address - base).ok()?;
            memory.get_mut(start..start.checked_add(len)?)
        });
        found.ok_or_else(|| DeviceError::Lost(format!("an illegal address: {address:#x}")))
    }

    /// Moves the given number of halves of a copy's bytes, and flips a bit if requested.
    fn run(&mut self, copy: &mut DeviceCopy<Vec<u8>>, halves: usize, flip: bool) -> Result<(), DeviceError> {
        let wrong = u8::from(flip);
        match copy {
            DeviceCopy::HostToDevice(staging, piece) => {
                let len = piece.host.len() * halves / 2;
                let memory = self.at(piece.device, piece.host.len())?;
                memory[..len].copy_from_slice(&staging[piece.host.clone()][..len]);
                memory[piece.host.len() / 2] ^= wrong;
            }
            DeviceCopy::DeviceToHost(staging, piece) => {
                let len = piece.host.len() * halves / 2;
                let memory = self.at(piece.device, piece.host.len())?;
                let to = &mut staging[piece.host.clone()];
                to[..len].copy_from_slice(&memory[..len]);
                to[piece.host.len() / 2] ^= wrong;
            }
            DeviceCopy::DeviceToDevice(hops) => {
                for hop in hops {
                    let bytes = self.at(hop.from, hop.len)?.to_vec();
                    self.at(hop.to, hop.len)?[..hop.len * halves / 2]
                        .copy_from_slice(&bytes[..hop.len * halves / 2]);
                }
            }
        }
        Ok(())
    }

    fn complete_one(&mut self, stream: usize) -> Option<CompletedCopy<Vec<u8>>> {
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
            return Some(CompletedCopy { number, staging: None, result });
        }
        let staging = match copy {
            DeviceCopy::HostToDevice(staging, _) | DeviceCopy::DeviceToHost(staging, _) => Some(staging),
            DeviceCopy::DeviceToDevice(_) => None,
        };
        let result = if fails { Err(DeviceError::Copy("an uncorrectable error".to_owned())) } else { result };
        Some(CompletedCopy { number, staging, result })
    }
}

impl GpuDevice for FakeDevice {
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
        // Far apart, and far from host addresses.
        let base = 0x7f00_0000_0000 + (self.memory.len() as u64) * (1 << 36);
        self.memory.insert(base, vec![0xee; bytes]);
        Ok(base)
    }

    fn allocate_staging(&mut self, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        if let Some(left) = &mut self.faults.lock().locked_bytes {
            *left = left.checked_sub(bytes).ok_or_else(|| DeviceError::NoMemory {
                bytes,
                what: "page-locked",
                cause: "out of memory".to_owned(),
            })?;
        }
        Ok(vec![0xdd; bytes])
    }

    fn slices_per_copy_max(&self) -> usize {
        self.hops_max
    }

    fn start(&mut self, number: u64, copy: DeviceCopy<Vec<u8>>) {
        let stream = match copy {
            DeviceCopy::HostToDevice(..) => 0,
            DeviceCopy::DeviceToHost(..) => 1,
            DeviceCopy::DeviceToDevice(_) => 2,
        };
        self.streams[stream].push_back((number, self.begun, copy));
        self.begun += 1;
    }

    fn take_completed(&mut self) -> Vec<CompletedCopy<Vec<u8>>> {
        let mut all = Vec::new();
        if self.faults.lock().is_stalled {
            return all;
        }
        let first = self.random_below(3);
        for stream in (0..3).map(|turn| ((first + turn) % 3) as usize) {
            // A lost device ends all copies.
            let count = if self.lost.is_some() { u64::MAX } else { self.random_below(3) };
            for _ in 0..count {
                let Some(ended) = self.complete_one(stream) else { break };
                all.push(ended);
            }
        }
        all
    }
}

impl Drop for FakeDevice {
    fn drop(&mut self) {
        let is_busy = |device: &FakeDevice| device.streams.iter().any(|stream| !stream.is_empty());
        // Do not block a test that already failed.
        while is_busy(self)
            && self.lost.is_none()
            && self.faults.lock().is_stalled
            && !std::thread::panicking()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
