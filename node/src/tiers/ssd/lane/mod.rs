//! One device of the tier: its segment book, and the jobs that apply it to the medium.
//!
//! Not here: performing a job (`engine`), and which blocks are kept (`store`).

mod health;
mod maintenance;
mod scrub;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::book::{Member, RecordId, Relocation, RelocationResult, SegmentBook, WritePurpose};
use super::engine::{DeviceJob, JobOutcome, ReadFault, RelocationFault, Report};
use super::format::RecordHeader;
use super::mailbox::Mailbox;
use super::{JOBS_MAX, Wear};
use crate::arena::SlotMut;
use crate::tiers::BlockVersion;
pub(super) use health::DeviceHealth;
use health::OpenJobs;
pub(super) use maintenance::RELOCATIONS_MAX;
#[cfg(test)]
pub(super) use maintenance::RELOCATIONS_WHILE_READERS_WAIT_MAX;
use scrub::ScrubState;

/// Records in the lane's own memory: those being relocated, and one that is checked.
pub(super) const RECORDS_IN_MEMORY_MAX: usize = RELOCATIONS_MAX + 1;

/// Result of a lane's job, for the owner of the lanes.
#[derive(Debug)]
pub(super) enum LaneEvent {
    Written {
        token: u64,
        result: io::Result<()>,
    },
    Read {
        token: u64,
        result: Result<Bytes, ReadFault>,
    },
    /// A record to be relocated cannot be read.
    Lost {
        record: RecordId,
        owner: u32,
        fault: ReadFault,
    },
    /// The scrubber checked a record.
    Checked {
        result: io::Result<u64>,
    },
    /// A maintenance write of the lane failed.
    Failed {
        cause: io::Error,
    },
}

/// A job in progress.
enum PendingJob {
    Save {
        token: u64,
        record: RecordId,
        header: RecordHeader,
    },
    Read {
        token: u64,
        segment: u32,
        bytes: u32,
    },
    Head {
        segment: u32,
    },
    Seal {
        segment: u32,
    },
    Relocate(Relocation),
    /// A check by the scrubber.
    Check {
        segment: u32,
        member: Member,
        bytes: u64,
    },
    /// A record to drop so that others can be written, as it was at that decision.
    DropRecord {
        segment: u32,
        member: Member,
    },
    /// Report that the medium is full of live records.
    ReportFull,
}

impl PendingJob {
    /// Its outcome if the thread ends; `None` for jobs without the thread.
    fn failure_outcome(&self) -> Option<JobOutcome> {
        let cause = io::Error::new(io::ErrorKind::BrokenPipe, "the SSD thread has ended");
        Some(match self {
            PendingJob::Save { .. } | PendingJob::Head { .. } | PendingJob::Seal { .. } => {
                JobOutcome::Written(Err(cause))
            }
            PendingJob::Read { .. } | PendingJob::Check { .. } => {
                JobOutcome::Read(Err(ReadFault::Medium(cause)))
            }
            PendingJob::Relocate(_) => JobOutcome::Relocated(Err(RelocationFault::Write(cause))),
            PendingJob::DropRecord { .. } | PendingJob::ReportFull => return None,
        })
    }
}

/// A segment that is being drained.
struct SegmentDrain {
    segment: u32,
    remaining: Vec<Member>,
    /// Number of leading `remaining` records that were not yet offered for release.
    unoffered: usize,
    /// Whether an offer was answered, so that unneeded records are freed.
    is_offer_answered: bool,
    open: usize,
}

impl SegmentDrain {
    fn new(segment: u32, remaining: Vec<Member>) -> SegmentDrain {
        SegmentDrain { segment, unoffered: remaining.len(), remaining, is_offer_answered: false, open: 0 }
    }
}

pub(super) struct Lane {
    pub(super) book: SegmentBook,
    number: usize,
    pub(super) mailbox: Arc<Mailbox<DeviceJob>>,
    /// For events that the lane reports by itself.
    reports: UnboundedSender<Report>,
    thread: Option<JoinHandle<()>>,
    pending: HashMap<u64, PendingJob>,
    next_job: u64,
    writes: OpenJobs,
    reads: OpenJobs,
    nonce: u64,
    drain: Option<SegmentDrain>,
    scrub: ScrubState,
    health: DeviceHealth,
    /// The error that stopped writes; the store decides when to retry.
    stopped: Option<(Option<i32>, io::ErrorKind)>,
    /// Whether a [`PendingJob::ReportFull`] is queued.
    is_full_reported: bool,
    pub(super) wear: Wear,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("jobs", &self.pending.len()).finish_non_exhaustive()
    }
}

impl Lane {
    pub(super) fn new(
        book: SegmentBook,
        number: usize,
        mailbox: Arc<Mailbox<DeviceJob>>,
        reports: UnboundedSender<Report>,
        thread: JoinHandle<()>,
        sight: DeviceHealth,
        seed: u64,
    ) -> Lane {
        let mut lane = Lane {
            book,
            number,
            mailbox,
            reports,
            thread: Some(thread),
            pending: HashMap::new(),
            next_job: 0,
            writes: OpenJobs::default(),
            reads: OpenJobs::default(),
            nonce: seed,
            drain: None,
            scrub: ScrubState::default(),
            health: sight,
            stopped: None,
            is_full_reported: false,
            wear: Wear::default(),
        };
        lane.maintain();
        lane
    }

    pub(super) fn has_room(&self) -> bool {
        !self.is_stopped() && self.book.has_room()
    }

    /// Whether writes are stopped until the store resumes them.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Records stored or in flight.
    pub(super) fn records(&self) -> u64 {
        self.book.records()
    }

    /// Open writes and reads requested by the store.
    pub(super) fn open_jobs(&self) -> (usize, usize) {
        (self.writes.jobs, self.reads.jobs)
    }

    /// Writes a block; `Ok(None)` while there is no space.
    pub(super) fn write(
        &mut self,
        token: u64,
        owner: u32,
        header: RecordHeader,
        frame: Bytes,
    ) -> io::Result<Option<RecordId>> {
        if let Some((errno, kind)) = self.stopped {
            return Err(errno.map_or_else(|| kind.into(), io::Error::from_raw_os_error));
        }
        self.admit_job()?;
        let Some((record, spot)) = self.book.allocate(header.traits.bytes, owner, WritePurpose::Save) else {
            return Ok(None);
        };
        let at = self.book.shape().offset(spot.position.head.segment, spot.position.page);
        self.wear.saved_bytes += u64::from(header.traits.bytes);
        self.writes.begin(header.traits.bytes);
        let pending = PendingJob::Save { token, record, header };
        self.send(pending, |job| DeviceJob::Save { job, spot, at, header, frame });
        self.maintain();
        Ok(Some(record))
    }

    /// Reads a block into `into`, which has its length.
    pub(super) fn read(
        &mut self,
        token: u64,
        record: RecordId,
        block: BlockVersion,
        into: SlotMut,
    ) -> io::Result<()> {
        self.admit_job()?;
        let spot = self.book.extent(record).ok_or(io::ErrorKind::NotFound)?;
        if into.len() != spot.frame_bytes as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let segment = spot.position.head.segment;
        let at = self.book.shape().offset(segment, spot.position.page);
        self.book.begin_read(segment);
        let bytes = spot.frame_bytes;
        self.reads.begin(bytes);
        self.send(PendingJob::Read { token, segment, bytes }, |job| DeviceJob::Read {
            job,
            at,
            hash: block.hash,
            generation: block.generation,
            into,
        });
        Ok(())
    }

    /// Frees a record.
    pub(super) fn free(&mut self, record: RecordId) {
        self.book.free(record);
        self.maintain();
    }

    /// Resumes writing.
    pub(super) fn resume(&mut self) {
        self.stopped = None;
        self.probe_growth();
        self.maintain();
    }

    /// Whether no operation is in flight.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    fn admit_job(&self) -> io::Result<()> {
        if self.writes.jobs + self.reads.jobs >= JOBS_MAX {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    }

    fn send(&mut self, pending: PendingJob, job: impl FnOnce(u64) -> DeviceJob) {
        self.next_job += 1;
        self.pending.insert(self.next_job, pending);
        if !self.mailbox.send(job(self.next_job)) {
            self.fail_all_jobs();
        }
    }

    /// Fails all jobs after the thread ended. Reports sent by the thread come first, and each job
    /// ends once.
    fn fail_all_jobs(&mut self) {
        tracing::error!("the SSD thread has ended: reads and writes fail; restart the node");
        let mut jobs: Vec<u64> = self.pending.keys().copied().collect();
        jobs.sort_unstable();
        for job in jobs {
            let Some(outcome) = self.pending.get(&job).and_then(PendingJob::failure_outcome) else {
                continue;
            };
            // The store is gone only at shutdown, when it needs no reports.
            let _ = self.reports.send(Report { lane: self.number, job, outcome });
        }
    }

    /// Processes the end of a job.
    pub(super) fn complete(&mut self, job: u64, outcome: JobOutcome) -> Option<LaneEvent> {
        let pending = self.pending.remove(&job)?;
        let ended = match (pending, outcome) {
            (PendingJob::Save { token, record, header }, JobOutcome::Written(result)) => {
                self.writes.end(header.traits.bytes);
                match &result {
                    Ok(()) => self.book.mark_committed(record, header),
                    Err(_) => self.book.mark_failed(record),
                }
                Some(LaneEvent::Written { token, result })
            }
            (PendingJob::Read { token, segment, bytes }, JobOutcome::Read(result)) => {
                self.reads.end(bytes);
                self.book.end_read(segment);
                Some(LaneEvent::Read { token, result })
            }
            (PendingJob::Head { segment }, JobOutcome::Written(result)) => self.head_ended(segment, result),
            (PendingJob::Seal { segment }, JobOutcome::Written(result)) => {
                self.book.mark_sealed(segment);
                result.err().map(|cause| self.stop(cause))
            }
            (PendingJob::Relocate(rescue), JobOutcome::Relocated(result)) => {
                self.end_relocation(rescue, result)
            }
            (check @ PendingJob::Check { .. }, JobOutcome::Read(result)) => {
                self.end_check(&check, result.err())
            }
            (PendingJob::DropRecord { segment, member }, JobOutcome::Read(Err(fault))) => {
                self.end_drop(segment, member, fault)
            }
            (PendingJob::ReportFull, JobOutcome::Written(Err(cause))) => {
                self.is_full_reported = false;
                // Space may have been freed meanwhile.
                (!self.book.has_room()).then(|| self.stop(cause))
            }
            _ => None,
        };
        self.maintain();
        ended
    }

    fn stop(&mut self, cause: io::Error) -> LaneEvent {
        self.stopped = Some((cause.raw_os_error(), cause.kind()));
        LaneEvent::Failed { cause }
    }

    fn head_ended(&mut self, segment: u32, result: io::Result<()>) -> Option<LaneEvent> {
        let Err(cause) = result else {
            self.book.mark_opened(segment);
            return None;
        };
        let was_capped = self.book.is_capped();
        let is_full = matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let is_capped = is_full && self.book.mark_full(segment);
        self.book.mark_unopened(segment);
        // A growth probe on a medium that is still full is not reported.
        if was_capped && is_capped { None } else { Some(self.stop(cause)) }
    }

    fn end_drop(&mut self, segment: u32, member: Member, fault: ReadFault) -> Option<LaneEvent> {
        if let Some(drain) = &mut self.drain {
            drain.open -= 1;
        }
        let (record, owner) = (member.0, self.book.owner(member.0));
        let is_wanted = self.book.is_still_there(segment, member);
        is_wanted.then(|| {
            self.book.free(record);
            LaneEvent::Lost { record, owner, fault }
        })
    }

    fn end_relocation(
        &mut self,
        rescue: Relocation,
        result: Result<RecordHeader, RelocationFault>,
    ) -> Option<LaneEvent> {
        if let Some(drain) = &mut self.drain {
            drain.open -= 1;
        }
        match result {
            Ok(header) => {
                self.book.end_relocation(rescue, RelocationResult::Moved(header));
                self.wear.rewritten_bytes += u64::from(header.traits.bytes);
                None
            }
            Err(RelocationFault::Read(fault)) => {
                let (record, owner) = (rescue.record, self.book.owner(rescue.record));
                let is_lost = self.book.end_relocation(rescue, RelocationResult::NotRead);
                is_lost.then_some(LaneEvent::Lost { record, owner, fault })
            }
            Err(RelocationFault::Write(cause)) => {
                self.book.end_relocation(rescue, RelocationResult::NotWritten);
                if let Some(drain) = &mut self.drain {
                    drain.remaining.push((rescue.record, rescue.from.position.page));
                }
                Some(self.stop(cause))
            }
        }
    }

    /// Queues an event of the lane itself, in order with the others.
    fn report(&mut self, pending: PendingJob, outcome: JobOutcome) {
        self.next_job += 1;
        self.pending.insert(self.next_job, pending);
        // The store is gone only at shutdown, when it needs no reports.
        let _ = self.reports.send(Report { lane: self.number, job: self.next_job, outcome });
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the SSD thread panicked");
        }
    }
}
