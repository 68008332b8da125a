//! Blocks on their way to a GPU, from it and within it: which copies they take, and what comes of each.
//!
//! Not here: what is asked for and what is kept (`super`).

use std::ops::Range;

use bytes::Bytes;

use super::device::{Copy, Device, DeviceError, Ended, Hop, Piece};
use super::{Done, GpuFault, GpuRecord, GpuTier, Kept};
use crate::arena::SlotMut;

/// Bytes that are copied and summed together: what the sum takes in one stride, and little enough to be in the processor's nearest cache the second time.
const STRIDE: usize = 24 << 10;

/// Copies bytes and gives their CRC32C: memory is read once for both.
fn copy_and_sum(to: &mut [u8], from: &[u8]) -> u32 {
    to.chunks_mut(STRIDE).zip(from.chunks(STRIDE)).fold(0, |sum, (to, from)| {
        let sum = crc32c::crc32c_append(sum, from);
        to.copy_from_slice(from);
        sum
    })
}

#[derive(Debug)]
pub(super) enum Work {
    /// Writes chunks of the frame.
    Write(Bytes),
    /// Reads back what was written.
    Check,
    /// Reads chunks into the slot.
    Read(SlotMut),
    /// Copies slices to these addresses.
    Scatter(Vec<u64>),
}

/// A block on its way.
#[derive(Debug)]
pub(super) struct Job {
    record: GpuRecord,
    work: Work,
    /// Copies begun, and ended well, of the present work.
    begun: usize,
    ended: usize,
    fault: Option<GpuFault>,
}

impl<D: Device> GpuTier<D> {
    pub(super) fn add(&mut self, token: u64, record: GpuRecord, work: Work) -> bool {
        if let Some(kept) = self.kept.get_mut(&record) {
            kept.users += 1;
        }
        self.jobs.insert(token, Job { record, work, begun: 0, ended: 0, fault: None });
        self.line.push_back(token);
        self.begin();
        true
    }

    /// Begins copies, those of the oldest job first, while there are buffers for them.
    pub(super) fn begin(&mut self) {
        for _ in 0..self.line.len() {
            let Some(token) = self.line.pop_front() else { return };
            while self.begin_next(token) {}
            let Some(job) = self.jobs.get(&token) else { continue };
            if job.fault.is_none() && job.begun < self.copies_of(job) {
                self.line.push_back(token);
            }
        }
    }

    /// Copies that the present work of a job takes.
    fn copies_of(&self, job: &Job) -> usize {
        let Some(kept) = self.kept.get(&job.record) else { return 0 };
        if matches!(job.work, Work::Scatter(_)) {
            kept.slices.len().div_ceil(self.hops_max())
        } else {
            kept.sums.len()
        }
    }

    fn hops_max(&self) -> usize {
        self.device.hops_max().max(1)
    }

    fn chunk(&self, kept: &Kept, number: usize) -> Range<usize> {
        let start = number * self.shape.chunk_bytes.max(1);
        start..(start + self.shape.chunk_bytes.max(1)).min(kept.len)
    }

    fn begin_next(&mut self, token: u64) -> bool {
        let Some(job) = self.jobs.get(&token) else { return false };
        let number = job.begun;
        let Some(kept) = self.kept.get(&job.record) else { return false };
        if job.fault.is_some() || number >= self.copies_of(job) {
            return false;
        }
        let copy = if let Work::Scatter(to) = &job.work {
            let slices = kept.slices.iter().zip(to).skip(number * self.hops_max()).take(self.hops_max());
            let hop = |(slice, to): (&Range<usize>, &u64)| Hop {
                from: kept.address + slice.start as u64,
                to: *to,
                len: slice.len(),
            };
            Copy::Within(slices.map(hop).collect())
        } else {
            let range = self.chunk(kept, number);
            let piece = Piece { device: kept.address + range.start as u64, host: 0..range.len() };
            let Some(mut staging) = self.staging.pop() else { return false };
            if let Work::Write(frame) = &job.work {
                let sum = copy_and_sum(&mut staging.as_mut()[..range.len()], &frame[range]);
                let kept = self.kept.get_mut(&job.record).and_then(|kept| kept.sums.get_mut(number));
                if let Some(kept) = kept {
                    *kept = sum;
                }
                Copy::In(staging, piece)
            } else {
                Copy::Out(staging, piece)
            }
        };
        let copy_number = self.number();
        self.copies.insert(copy_number, (token, number));
        if let Some(job) = self.jobs.get_mut(&token) {
            job.begun += 1;
        }
        self.device.begin(copy_number, copy);
        true
    }

    pub(super) fn take_in(&mut self, ended: Ended<D::Staging>) {
        let Some((token, number)) = self.copies.remove(&ended.number) else { return };
        if let Err(lost @ DeviceError::Lost(_)) = &ended.result {
            self.lose(lost.clone());
        }
        let result = ended.result.map_err(GpuFault::from);
        let result = result.and_then(|()| self.arrived(token, number, ended.staging.as_ref()));
        self.staging.extend(ended.staging);
        let Some(job) = self.jobs.get_mut(&token) else { return };
        job.ended += 1;
        if let Err(fault) = result {
            job.fault.get_or_insert(fault);
        }
        self.go_on(token);
    }

    /// Checks what was read, and keeps it where it is wanted.
    fn arrived(&mut self, token: u64, number: usize, staging: Option<&D::Staging>) -> Result<(), GpuFault> {
        let Some(record) = self.jobs.get(&token).map(|job| job.record) else { return Ok(()) };
        let kept = self.kept.get(&record).ok_or(GpuFault::Unknown)?;
        let (range, sum) = (self.chunk(kept, number), kept.sums.get(number).copied());
        let Some(job) = self.jobs.get_mut(&token) else { return Ok(()) };
        let into = match &mut job.work {
            Work::Write(_) | Work::Scatter(_) => return Ok(()),
            Work::Check => None,
            Work::Read(slot) => Some(slot),
        };
        let bytes =
            staging.and_then(|staging| staging.as_ref().get(..range.len())).ok_or(GpuFault::Unknown)?;
        // What is wrong lies in a slot that nobody sees: the job has it until it ended well.
        let came = match into {
            Some(slot) => copy_and_sum(&mut slot[range.clone()], bytes),
            None => crc32c::crc32c(bytes),
        };
        if Some(came) == sum { Ok(()) } else { Err(GpuFault::Corrupt(range)) }
    }

    /// After a copy ended: the job's next work, its end, or nothing yet.
    fn go_on(&mut self, token: u64) {
        let Some(job) = self.jobs.get(&token) else { return };
        let all = self.copies_of(job);
        if job.fault.is_some() {
            // Its copies still use the slot and the record.
            if job.begun == job.ended {
                self.end(token);
            }
            return;
        }
        let (ended, begun) = (job.ended, job.begun);
        if let Work::Scatter(_) = job.work {
            // One stream: they end in their order.
            let slices = self.kept.get(&job.record).map_or(0, |kept| kept.slices.len());
            let slices = slices.min(ended * self.hops_max());
            self.done.push(Done::Scattered { token, slices, is_last: ended == all });
        }
        if ended < all || begun < all {
            return;
        }
        match self.jobs.get_mut(&token) {
            Some(job) if matches!(job.work, Work::Write(_)) => {
                (job.work, job.begun, job.ended) = (Work::Check, 0, 0);
                self.line.push_back(token);
            }
            _ => self.end(token),
        }
    }

    fn end(&mut self, token: u64) {
        let Some(job) = self.jobs.remove(&token) else { return };
        let (record, fault) = (job.record, job.fault);
        let is_put = matches!(job.work, Work::Write(_) | Work::Check);
        if let Some(kept) = self.kept.get_mut(&record) {
            kept.users -= 1;
            kept.is_over |= is_put && fault.is_some();
        }
        self.close(record);
        match (job.work, fault) {
            (Work::Read(_), Some(fault)) => self.done.push(Done::Loaded { token, result: Err(fault) }),
            (Work::Read(slot), None) => self.done.push(Done::Loaded { token, result: Ok(slot.freeze()) }),
            (Work::Scatter(_), Some(fault)) => self.done.push(Done::ScatterFailed { token, fault }),
            (Work::Scatter(_), None) => {}
            (_, fault) => self.done.push(Done::Stored { token, result: fault.map_or(Ok(record), Err) }),
        }
    }

    /// Gives a record's memory back once it is over and nobody uses it.
    pub(super) fn close(&mut self, record: GpuRecord) {
        if self.kept.get(&record).is_some_and(|kept| kept.is_over && kept.users == 0)
            && let Some(kept) = self.kept.remove(&record)
        {
            self.slabs.give_back(kept.place, kept.len);
        }
    }

    /// Nothing works any more: jobs without a copy in flight end here, the others with their last one.
    fn lose(&mut self, lost: DeviceError) {
        if self.lost.is_some() {
            return;
        }
        for job in self.jobs.values_mut() {
            job.fault.get_or_insert(GpuFault::Device(lost.clone()));
        }
        self.lost = Some(lost);
        let idle = self.jobs.iter().filter(|(_, job)| job.begun == job.ended);
        for token in idle.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.end(token);
        }
    }
}
