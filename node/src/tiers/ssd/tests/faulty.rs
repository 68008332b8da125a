//! A device in memory that breaks as devices do: errors, short and torn writes, another order, flushes that
//! lie, no room, flipped bits, and a crash after any write.
//!
//! What was flushed is on the medium; of what was not, any pages may be there after a crash.

use std::io;
use std::os::fd::RawFd;

use kv_core::id::Timestamp;
use parking_lot::Mutex;

use super::super::device::Device;

const PAGE: usize = 4096;

/// What goes wrong, each with a chance in 256.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plan {
    pub(super) read_error: u8,
    pub(super) write_error: u8,
    pub(super) sync_error: u8,
    /// Calls that do a part of what they are asked.
    pub(super) short: u8,
    /// Writes that seem to work and do nothing.
    pub(super) lost_write: u8,
    /// Flushes that seem to work and do nothing.
    pub(super) lost_sync: u8,
    /// Ends are told in another order.
    pub(super) reorders: bool,
    /// Room in bytes; 0 for enough.
    pub(super) room: u64,
    /// The device dies with this write, counted from 1; 0 for never.
    pub(super) dies_at_write: u64,
    /// Microseconds that each call takes, by its own clock.
    pub(super) delay_us: u64,
}

#[derive(Debug)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    unflushed: Vec<(usize, Vec<u8>)>,
    plan: Plan,
    chance: u64,
    writes: u64,
    is_dead: bool,
    now_us: u64,
}

#[derive(Debug)]
pub(super) struct FaultyDevice(Mutex<State>);

impl FaultyDevice {
    pub(super) fn new(image: Vec<u8>, plan: Plan, seed: u64) -> FaultyDevice {
        let (live, durable) = (image.clone(), image);
        let state = State {
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

    /// After a process died and the system did not: nothing of what it wrote is on the medium yet.
    pub(super) fn unflushed(image: Vec<u8>, plan: Plan, seed: u64) -> FaultyDevice {
        let device = FaultyDevice::new(image, plan, seed);
        {
            let mut state = device.0.lock();
            state.unflushed = vec![(0, state.live.clone())];
            state.durable.fill(0);
        }
        device
    }

    pub(super) fn set_plan(&self, plan: Plan) {
        self.0.lock().plan = plan;
    }

    pub(super) fn is_dead(&self) -> bool {
        self.0.lock().is_dead
    }

    /// What is on the medium after power failed: all that was flushed, and any pages of the rest, in any order.
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

impl State {
    fn draw(&mut self) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance >> 8
    }

    fn happens(&mut self, chance: fn(&Plan) -> u8) -> bool {
        let chance = chance(&self.plan);
        chance > 0 && self.draw() % 256 < u64::from(chance)
    }

    /// What a flush does that fails: of some pages it forgets that they are not on the medium, and they read
    /// as they are there. No later flush knows of them.
    fn lose_some(&mut self) {
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

impl Device for FaultyDevice {
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
        assert!(from.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64), "not at whole pages");
        state.writes += 1;
        state.now_us += state.plan.delay_us;
        if state.writes == state.plan.dies_at_write {
            state.is_dead = true;
            // The write that was under way is as torn as any.
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
            state.lose_some();
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

    fn next_told(&self, open: usize) -> usize {
        let mut state = self.0.lock();
        if state.plan.reorders { state.draw() as usize % open } else { 0 }
    }

    fn now(&self) -> Timestamp {
        Timestamp(self.0.lock().now_us)
    }
}
