//! Choice of the device for the next block, and the usable capacity with slow devices.
//!
//! Devices are used in turn. A slow one gets only limited work; the rest goes to the others, or is
//! rejected if there is no other, so that no request waits for it. So the usable capacity is that
//! of the healthy devices plus the current content of slow ones. Not here: detecting slowness
//! (`slowness`), and handling a rejected block (`store`).

use std::io;

use bytes::Bytes;
use kv_core::tier::Capacity;

use super::lane::Lane;
use super::slowness::IoKind;
use super::{RecordHeader, SsdRecord, SsdTier};

impl SsdTier {
    /// Whether [`Self::write`] would find space now, or waiting is pointless because all devices
    /// are slow.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.lanes.iter().any(|lane| lane.has_room() && lane.write_capacity() > 0) || self.is_overloaded()
    }

    /// Whether a new block would wait for a slow device: all writable devices are slow and have
    /// their maximum work.
    #[must_use]
    pub fn is_overloaded(&self) -> bool {
        self.write_capacity() == 0
    }

    /// How many more blocks can be written without waiting for a slow device; no limit if all are
    /// healthy.
    #[must_use]
    pub fn write_capacity(&self) -> usize {
        let left = |lane: &Lane| match (lane.is_stopped(), lane.is_slow()) {
            (true, _) => 0,
            (false, true) if !lane.has_room() => 0,
            (false, _) => lane.write_capacity(),
        };
        if self.slow_devices() == 0 {
            return usize::MAX;
        }
        self.lanes.iter().map(left).fold(0, usize::saturating_add)
    }

    /// Whether a read would not queue behind others on a slow device. An optional read
    /// (`is_awaited` false) avoids slow devices entirely.
    #[must_use]
    pub fn may_read(&self, record: SsdRecord, is_awaited: bool) -> bool {
        let lane = self.lanes.get(usize::from(record.lane));
        lane.is_none_or(|lane| if is_awaited { lane.may_read() } else { !lane.is_slow_to_read() })
    }

    /// Number of slow devices.
    #[must_use]
    pub fn slow_devices(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_slow()).count()
    }

    /// Number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.lanes.len()
    }

    /// Writes and reads on slow devices, which delay no other work.
    #[must_use]
    pub fn slow_device_jobs(&self) -> (usize, usize) {
        let to_write = self.lanes.iter().filter(|lane| lane.is_slow()).map(|lane| lane.open_jobs().0).sum();
        let to_read =
            self.lanes.iter().filter(|lane| lane.is_slow_to_read()).map(|lane| lane.open_jobs().1).sum();
        (to_write, to_read)
    }

    /// Usable part of a capacity, in its own unit: all of it unless some devices are slow; then
    /// that of the others plus the content of the slow ones. Each block takes `slot_bytes`.
    #[must_use]
    pub fn usable_capacity(&self, capacity: Capacity, slot_bytes: u32) -> u64 {
        let slow = self.slow_devices();
        if slow == 0 || slow == self.lanes.len() {
            return capacity.amount();
        }
        let share = capacity.amount() / self.lanes.len() as u64;
        let held = |lane: &Lane| lane.records().saturating_mul(capacity.cost(slot_bytes)).min(share);
        let on_slow: u64 = self.lanes.iter().filter(|lane| lane.is_slow()).map(held).sum();
        share * (self.lanes.len() - slow) as u64 + on_slow
    }

    /// Updates the health of all devices. Call it often.
    pub fn update_health(&mut self) {
        for number in 0..self.lanes.len() {
            let (before, rest) = self.lanes.split_at_mut(number);
            let Some((lane, after)) = rest.split_first_mut() else { return };
            lane.update_health(|kind| median_usual_us(before.iter().chain(&*after), kind));
        }
    }

    /// Writes a frame; [`super::SsdCompletion::Written`] follows. It sets the header's sequence.
    /// `Ok(None)` while there is no space. [`super::SsdCompletion::Lost`] returns `owner`.
    ///
    /// # Errors
    /// If [`super::JOBS_MAX`] are open, or every device has stopped writing.
    pub fn write(
        &mut self,
        token: u64,
        owner: u32,
        mut header: RecordHeader,
        frame: &Bytes,
    ) -> io::Result<Option<SsdRecord>> {
        self.sequence += 1;
        header.sequence = self.sequence;
        let count = self.lanes.len();
        let first = self.next_device;
        self.next_device = (first + 1) % count.max(1);
        let mut refused = None;
        for number in (first..count).chain(0..first) {
            let Some(lane) = self.lanes.get_mut(number).filter(|lane| lane.write_capacity() > 0) else {
                continue;
            };
            match lane.write(token, owner, header, frame.clone()) {
                Ok(Some(id)) => {
                    let lane = u8::try_from(number).map_err(|_| io::ErrorKind::InvalidInput)?;
                    return Ok(Some(SsdRecord { lane, id }));
                }
                Ok(None) => {}
                Err(cause) => refused = Some(cause),
            }
        }
        refused.map_or(Ok(None), Err)
    }
}

/// The median of these devices' usual time for a unit of work.
fn median_usual_us<'a>(lanes: impl Iterator<Item = &'a Lane>, kind: IoKind) -> Option<f64> {
    let mut usual: Vec<f64> = lanes.filter_map(|lane| lane.usual_us(kind)).collect();
    usual.sort_by(f64::total_cmp);
    usual.get(usual.len() / 2).copied()
}
