//! Which device takes the next block, and what the tier is without those that are slow.
//!
//! Devices take turns. A slow one is given what it can do and no more: what comes beyond that goes to the others, or to
//! none when there is no other, rather than wait for it. So the tier is as large as what the others hold and what is on
//! the slow one still. Not here: when a device is slow (`slow`), and what becomes of a block that none takes (`store`).

use std::io;

use bytes::Bytes;
use kv_core::tier::Capacity;

use super::lane::Lane;
use super::slow::Kind;
use super::{RecordHeader, Ssd, SsdRecord};

impl Ssd {
    /// Whether [`Self::write`] would find room now, or no device that is well could ever make some.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.lanes.iter().any(|lane| lane.has_room() && lane.writes_left() > 0) || self.is_behind()
    }

    /// Whether a block that is to be written would wait for a slow device: no other one writes, and it has as much to do
    /// as it is given.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.writes_left() == 0
    }

    /// How many blocks more can be written without waiting for a slow device; all of them where one is well.
    #[must_use]
    pub fn writes_left(&self) -> usize {
        let left = |lane: &Lane| match (lane.is_stopped(), lane.is_slow()) {
            (true, _) => 0,
            (false, true) if !lane.has_room() => 0,
            (false, _) => lane.writes_left(),
        };
        if self.slow_devices() == 0 {
            return usize::MAX;
        }
        self.lanes.iter().map(left).fold(0, usize::saturating_add)
    }

    /// Whether a block that is to be read would not stand behind others on a slow device. For one that nobody waits for
    /// it is enough that the device is slow.
    #[must_use]
    pub fn may_read(&self, record: SsdRecord, is_awaited: bool) -> bool {
        let lane = self.lanes.get(usize::from(record.lane));
        lane.is_none_or(|lane| if is_awaited { lane.may_read() } else { !lane.is_slow_to_read() })
    }

    /// Devices that are slow now.
    #[must_use]
    pub fn slow_devices(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_slow()).count()
    }

    /// All of them.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.lanes.len()
    }

    /// Writes and reads that slow devices have: nobody else has to wait for these.
    #[must_use]
    pub fn slow_moves(&self) -> (usize, usize) {
        let to_write = self.lanes.iter().filter(|lane| lane.is_slow()).map(|lane| lane.moves().0).sum();
        let to_read =
            self.lanes.iter().filter(|lane| lane.is_slow_to_read()).map(|lane| lane.moves().1).sum();
        (to_write, to_read)
    }

    /// How much of a capacity, in its own unit, can be used: all of it unless some devices are slow; then what the others
    /// have, and what is on those still. Each block takes `slot_bytes`.
    #[must_use]
    pub fn usable(&self, capacity: Capacity, slot_bytes: u32) -> u64 {
        let slow = self.slow_devices();
        if slow == 0 || slow == self.lanes.len() {
            return capacity.amount();
        }
        let share = capacity.amount() / self.lanes.len() as u64;
        let held = |lane: &Lane| lane.records().saturating_mul(capacity.cost(slot_bytes)).min(share);
        let on_slow: u64 = self.lanes.iter().filter(|lane| lane.is_slow()).map(held).sum();
        share * (self.lanes.len() - slow) as u64 + on_slow
    }

    /// Looks at how fast the devices are. Call it often.
    pub fn look(&mut self) {
        for number in 0..self.lanes.len() {
            let (before, rest) = self.lanes.split_at_mut(number);
            let Some((lane, after)) = rest.split_first_mut() else { return };
            lane.look(|kind| median(before.iter().chain(&*after), kind));
        }
    }

    /// Writes a frame; [`super::Done::Written`] follows. The header's sequence is set here. `Ok(None)` while there
    /// is no room. `owner` comes back with [`super::Done::Lost`].
    ///
    /// # Errors
    /// When [`super::JOBS_MAX`] are open, or every device has stopped writing.
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
        let first = self.turn;
        self.turn = (first + 1) % count.max(1);
        let mut refused = None;
        for number in (first..count).chain(0..first) {
            let Some(lane) = self.lanes.get_mut(number).filter(|lane| lane.writes_left() > 0) else {
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

/// What these devices usually take for a unit of work: the middle of them.
fn median<'a>(lanes: impl Iterator<Item = &'a Lane>, kind: Kind) -> Option<f64> {
    let mut usual: Vec<f64> = lanes.filter_map(|lane| lane.usual_us(kind)).collect();
    usual.sort_by(f64::total_cmp);
    usual.get(usual.len() / 2).copied()
}
