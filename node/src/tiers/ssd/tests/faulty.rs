//! A device in memory with faults: errors, short and torn writes, reordering, lying flushes, no
//! space, flipped bits, and a crash after any write.
//!
//! Flushed data survives a crash; of the rest, any subset of pages does.

use std::io;
use std::os::fd::RawFd;

use kv_core::id::Timestamp;
use parking_lot::Mutex;

use super::super::device::BlockDevice;

const PAGE: usize = 4096;

/// Injected faults, each with a chance in 256.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FaultPlan {
    pub(super) read_error: u8,
    pub(super) write_error: u8,
    pub(super) sync_error: u8,
    /// Short reads and writes.
    pub(super) short: u8,
    /// Writes that report success without effect.
    pub(super) lost_write: u8,
    /// Flushes that report success without effect.
    pub(super) lost_sync: u8,
    /// Whether completions are reordered.
    pub(super) reorders: bool,
    /// Available space in bytes; 0 for unlimited.
    pub(super) room: u64,
    /// The write at which the device dies, counted from 1; 0 for never.
    pub(super) dies_at_write: u64,
    /// Duration of each call in microseconds, by its own clock.
    pub(super) delay_us: u64,
}

#[derive(Debug)]
struct FaultyState {
    live: Vec<u8>,
    durable: Vec<u8>,
    unflushed: Vec<(usize, Vec<u8>)>,
    plan: FaultPlan,
    chance: u64,
    writes: u64,
    is_dead: bool,
    now_us: u64,
}

#[derive(Debug)]
pub(super) struct FaultyDevice(Mutex<FaultyState>);

impl FaultyDevice {
    pub(super) fn new(image: Vec<u8>, plan: FaultPlan, seed: u64) -> FaultyDevice {
        let (live, durable) = (image.clone(), image);
        let state = FaultyState {
            live,
            durable,
            unflushed: Vec::new(),
            plan,
            chance: seed | 1,
            writes: 0,
            is_dead: false,
            now_us: 0,
        };
        FaultyDevice(Mutex::new(state))
    }

    /// The state after a process died and the system survived: none of its writes is on the medium
    /// yet.
    pub(super) fn unflushed(image: Vec<u8>, plan: FaultPlan, seed: u64) -> FaultyDevice {
        let device = FaultyDevice::new(image, plan, seed);
        {
            let mut state = device.0.lock();
            state.unflushed = vec![(0, state.live.clone())];
            state.durable.fill(0);
        }
        device
    }

    pub(super) fn set_plan(&self, plan: FaultPlan) {
        self.0.lock().plan = plan;
    }

    pub(super) fn is_dead(&self) -> bool {
        self.0.lock().is_dead
    }

    /// Content of the medium after a power failure: all flushed data, and any subset of the other
    /// pages.
    pub(super) fn crash(&self) -> Vec<u8> {
        let mut state = self.0.lock();
        let mut image = state.durable.clone();
        let mut pages: Vec<(usize, Vec<u8>)> = state
            .unflushed
            .iter()
            .flat_map(|(at, bytes)| (*at..).step_by(PAGE).zip(bytes.chunks(PAGE).map(<[u8]>::to_vec)))
            .collect();
        while !pages.is_empty() {
            let next = state.draw() as usize % pages.len();
            let (at, bytes) = pages.swap_remove(next);
            if state.draw().is_multiple_of(2) {
                put(&mut image, at, &bytes);
            }
        }
        image
    }
}

impl FaultyState {
    fn draw(&mut self) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance >> 8
    }

    fn happens(&mut self, chance: fn(&FaultPlan) -> u8) -> bool {
        let chance = chance(&self.plan);
        chance > 0 && self.draw() % 256 < u64::from(chance)
    }

    /// Effect of a failed flush: some pages are dropped, and reads return their durable content. No
    /// later flush writes them.
    fn lose_unflushed_pages(&mut self) {
        for (at, bytes) in std::mem::take(&mut self.unflushed) {
            for (at, page) in (at..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
                if self.draw().is_multiple_of(2) {
                    self.unflushed.push((at, page.to_vec()));
                } else {
                    let old = self.durable.get(at..at + page.len()).map(<[u8]>::to_vec);
                    put(&mut self.live, at, &old.unwrap_or_else(|| vec![0; page.len()]));
                }
            }
        }
    }

    fn length(&mut self, wanted: usize) -> usize {
        if wanted > PAGE && self.happens(|plan| plan.short) {
            PAGE * (1 + self.draw() as usize % (wanted / PAGE))
        } else {
            wanted
        }
    }
}

fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if image.len() < at + bytes.len() {
        image.resize(at + bytes.len(), 0);
    }
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn error() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl BlockDevice for FaultyDevice {
    fn fd(&self) -> Option<RawFd> {
        None
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let mut state = self.0.lock();
        state.now_us += state.plan.delay_us;
        if state.is_dead || state.happens(|plan| plan.read_error) {
            return Err(error());
        }
        let start = usize::try_from(at).unwrap().min(state.live.len());
        let count = into.len().min(state.live.len() - start);
        let count = state.length(count).min(count);
        into[..count].copy_from_slice(&state.live[start..start + count]);
        Ok(count)
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        let mut state = self.0.lock();
        assert!(from.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64), "not in whole pages");
        state.writes += 1;
        state.now_us += state.plan.delay_us;
        if state.writes == state.plan.dies_at_write {
            state.is_dead = true;
            // The write in progress may be torn like the others.
            state.unflushed.push((usize::try_from(at).unwrap(), from.to_vec()));
        }
        if state.is_dead || state.happens(|plan| plan.write_error) {
            return Err(error());
        }
        let count = state.length(from.len()).min(from.len());
        if !state.happens(|plan| plan.lost_write) {
            let start = usize::try_from(at).unwrap();
            put(&mut state.live, start, &from[..count]);
            state.unflushed.push((start, from[..count].to_vec()));
        }
        Ok(count)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        state.now_us += state.plan.delay_us;
        if state.is_dead {
            return Err(error());
        }
        if state.happens(|plan| plan.sync_error) {
            state.lose_unflushed_pages();
            return Err(error());
        }
        if !state.happens(|plan| plan.lost_sync) {
            for (at, bytes) in std::mem::take(&mut state.unflushed) {
                put(&mut state.durable, at, &bytes);
            }
        }
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().live.len() as u64)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.plan.room > 0 && bytes > state.plan.room {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let bytes = usize::try_from(bytes).unwrap();
        if bytes > state.live.len() {
            state.live.resize(bytes, 0);
            state.durable.resize(bytes, 0);
        }
        Ok(())
    }

    fn next_reported(&self, open: usize) -> usize {
        let mut state = self.0.lock();
        if state.plan.reorders { state.draw() as usize % open } else { 0 }
    }

    fn now(&self) -> Timestamp {
        Timestamp(self.0.lock().now_us)
    }
}
