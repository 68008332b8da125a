//! Jobs that move blocks to, from and within a GPU: their copies and results.
//!
//! Not here: requests and stored frames (`super`).

use std::ops::Range;

use bytes::Bytes;

use super::device::{CompletedCopy, CopyRange, DeviceCopy, DeviceError, GpuDevice, SliceCopy};
use super::{GpuCompletion, GpuFault, GpuRecord, GpuTier, StoredFrame};
use crate::arena::SlotMut;

/// Bytes that are copied and checksummed together: one stride of the checksum, and small enough to
/// stay in the first-level cache for the second pass.
const STRIDE: usize = 24 << 10;

/// Copies bytes and returns their CRC32C, so that memory is read once for both.
fn copy_with_crc(to: &mut [u8], from: &[u8]) -> u32 {
    to.chunks_mut(STRIDE).zip(from.chunks(STRIDE)).fold(0, |sum, (to, from)| {
        let sum = crc32c::crc32c_append(sum, from);
        to.copy_from_slice(from);
        sum
    })
}

#[derive(Debug)]
pub(super) enum JobStep {
    /// Writes chunks of the frame.
    Write(Bytes),
    /// Reads the written chunks back.
    Verify,
    /// Reads chunks into the slot.
    Read(SlotMut),
    /// Copies slices to these addresses.
    Scatter(Vec<u64>),
}

/// A block in transit.
#[derive(Debug)]
pub(super) struct GpuJob {
    record: GpuRecord,
    step: JobStep,
    /// Copies started and completed for the current step.
    copies_started: usize,
    copies_completed: usize,
    fault: Option<GpuFault>,
}

impl<D: GpuDevice> GpuTier<D> {
    pub(super) fn add_job(&mut self, token: u64, record: GpuRecord, work: JobStep) -> bool {
        if let Some(kept) = self.frames.get_mut(&record) {
            kept.users += 1;
        }
        self.jobs.insert(
            token,
            GpuJob { record, step: work, copies_started: 0, copies_completed: 0, fault: None },
        );
        self.copy_queue.push_back(token);
        self.start_copies();
        true
    }

    /// Starts copies while buffers are free, those of the oldest job first.
    pub(super) fn start_copies(&mut self) {
        for _ in 0..self.copy_queue.len() {
            let Some(token) = self.copy_queue.pop_front() else { return };
            while self.start_next_copy(token) {}
            let Some(job) = self.jobs.get(&token) else { continue };
            if job.fault.is_none() && job.copies_started < self.copy_count(job) {
                self.copy_queue.push_back(token);
            }
        }
    }

    /// Number of copies of a job's current step.
    fn copy_count(&self, job: &GpuJob) -> usize {
        let Some(kept) = self.frames.get(&job.record) else { return 0 };
        if matches!(job.step, JobStep::Scatter(_)) {
            kept.slices.len().div_ceil(self.slices_per_copy_max())
        } else {
            kept.checksums.len()
        }
    }

    fn slices_per_copy_max(&self) -> usize {
        self.device.slices_per_copy_max().max(1)
    }

    fn chunk_range(&self, kept: &StoredFrame, number: usize) -> Range<usize> {
        let start = number * self.shape.chunk_bytes.max(1);
        start..(start + self.shape.chunk_bytes.max(1)).min(kept.len)
    }

    fn start_next_copy(&mut self, token: u64) -> bool {
        let Some(job) = self.jobs.get(&token) else { return false };
        let number = job.copies_started;
        let Some(kept) = self.frames.get(&job.record) else { return false };
        if job.fault.is_some() || number >= self.copy_count(job) {
            return false;
        }
        let copy = if let JobStep::Scatter(to) = &job.step {
            let slices = kept
                .slices
                .iter()
                .zip(to)
                .skip(number * self.slices_per_copy_max())
                .take(self.slices_per_copy_max());
            let hop = |(slice, to): (&Range<usize>, &u64)| SliceCopy {
                from: kept.address + slice.start as u64,
                to: *to,
                len: slice.len(),
            };
            DeviceCopy::DeviceToDevice(slices.map(hop).collect())
        } else {
            let range = self.chunk_range(kept, number);
            let piece = CopyRange { device: kept.address + range.start as u64, host: 0..range.len() };
            let Some(mut staging) = self.staging.pop() else { return false };
            if let JobStep::Write(frame) = &job.step {
                let sum = copy_with_crc(&mut staging.as_mut()[..range.len()], &frame[range]);
                let kept = self.frames.get_mut(&job.record).and_then(|kept| kept.checksums.get_mut(number));
                if let Some(kept) = kept {
                    *kept = sum;
                }
                DeviceCopy::HostToDevice(staging, piece)
            } else {
                DeviceCopy::DeviceToHost(staging, piece)
            }
        };
        let copy_number = self.next_number();
        self.copies.insert(copy_number, (token, number));
        if let Some(job) = self.jobs.get_mut(&token) {
            job.copies_started += 1;
        }
        self.device.start(copy_number, copy);
        true
    }

    pub(super) fn handle_completed(&mut self, ended: CompletedCopy<D::Staging>) {
        let Some((token, number)) = self.copies.remove(&ended.number) else { return };
        if let Err(lost @ DeviceError::Lost(_)) = &ended.result {
            self.mark_lost(lost.clone());
        }
        let result = ended.result.map_err(GpuFault::from);
        let result = result.and_then(|()| self.check_chunk(token, number, ended.staging.as_ref()));
        self.staging.extend(ended.staging);
        let Some(job) = self.jobs.get_mut(&token) else { return };
        job.copies_completed += 1;
        if let Err(fault) = result {
            job.fault.get_or_insert(fault);
        }
        self.advance(token);
    }

    /// Verifies a chunk that was read, and copies it to its slot.
    fn check_chunk(
        &mut self,
        token: u64,
        number: usize,
        staging: Option<&D::Staging>,
    ) -> Result<(), GpuFault> {
        let Some(record) = self.jobs.get(&token).map(|job| job.record) else { return Ok(()) };
        let kept = self.frames.get(&record).ok_or(GpuFault::Unknown)?;
        let (range, sum) = (self.chunk_range(kept, number), kept.checksums.get(number).copied());
        let Some(job) = self.jobs.get_mut(&token) else { return Ok(()) };
        let into = match &mut job.step {
            JobStep::Write(_) | JobStep::Scatter(_) => return Ok(()),
            JobStep::Verify => None,
            JobStep::Read(slot) => Some(slot),
        };
        let bytes =
            staging.and_then(|staging| staging.as_ref().get(..range.len())).ok_or(GpuFault::Unknown)?;
        // Wrong bytes stay in a slot that is not visible: the job owns it until it succeeds.
        let came = match into {
            Some(slot) => copy_with_crc(&mut slot[range.clone()], bytes),
            None => crc32c::crc32c(bytes),
        };
        if Some(came) == sum { Ok(()) } else { Err(GpuFault::Corrupt(range)) }
    }

    /// Advances a job after a copy: to its next step, its end, or no change.
    fn advance(&mut self, token: u64) {
        let Some(job) = self.jobs.get(&token) else { return };
        let all = self.copy_count(job);
        if job.fault.is_some() {
            // Its other copies still use the slot and the record.
            if job.copies_started == job.copies_completed {
                self.finish(token);
            }
            return;
        }
        let (ended, begun) = (job.copies_completed, job.copies_started);
        if let JobStep::Scatter(_) = job.step {
            // They share one stream, so they end in order.
            let slices = self.frames.get(&job.record).map_or(0, |kept| kept.slices.len());
            let slices = slices.min(ended * self.slices_per_copy_max());
            self.done.push(GpuCompletion::Scattered { token, slices, is_last: ended == all });
        }
        if ended < all || begun < all {
            return;
        }
        match self.jobs.get_mut(&token) {
            Some(job) if matches!(job.step, JobStep::Write(_)) => {
                (job.step, job.copies_started, job.copies_completed) = (JobStep::Verify, 0, 0);
                self.copy_queue.push_back(token);
            }
            _ => self.finish(token),
        }
    }

    fn finish(&mut self, token: u64) {
        let Some(job) = self.jobs.remove(&token) else { return };
        let (record, fault) = (job.record, job.fault);
        let is_put = matches!(job.step, JobStep::Write(_) | JobStep::Verify);
        if let Some(kept) = self.frames.get_mut(&record) {
            kept.users -= 1;
            kept.is_freed |= is_put && fault.is_some();
        }
        self.release_if_unused(record);
        match (job.step, fault) {
            (JobStep::Read(_), Some(fault)) => {
                self.done.push(GpuCompletion::Loaded { token, result: Err(fault) });
            }
            (JobStep::Read(slot), None) => {
                self.done.push(GpuCompletion::Loaded { token, result: Ok(slot.freeze()) });
            }
            (JobStep::Scatter(_), Some(fault)) => {
                self.done.push(GpuCompletion::ScatterFailed { token, fault });
            }
            (JobStep::Scatter(_), None) => {}
            (_, fault) => {
                self.done.push(GpuCompletion::Stored { token, result: fault.map_or(Ok(record), Err) });
            }
        }
    }

    /// Frees a record's memory once it is freed by its owner and unused.
    pub(super) fn release_if_unused(&mut self, record: GpuRecord) {
        if self.frames.get(&record).is_some_and(|kept| kept.is_freed && kept.users == 0)
            && let Some(kept) = self.frames.remove(&record)
        {
            self.slabs.release(kept.slot, kept.len);
        }
    }

    /// Marks the device as lost. Jobs without a running copy end here, the others with their last
    /// copy.
    fn mark_lost(&mut self, lost: DeviceError) {
        if self.lost.is_some() {
            return;
        }
        for job in self.jobs.values_mut() {
            job.fault.get_or_insert(GpuFault::Device(lost.clone()));
        }
        self.lost = Some(lost);
        let idle = self.jobs.iter().filter(|(_, job)| job.copies_started == job.copies_completed);
        for token in idle.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.finish(token);
        }
    }
}
