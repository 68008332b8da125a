//! One device of the tier: its segment book, and the jobs that make the medium follow it.
//!
//! Not here: how a job is done (`engine`), and which blocks are kept (`store`).

mod scrub;
mod sight;
mod tend;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use kv_core::id::{BlockHash, Generation};
use tokio::sync::mpsc::UnboundedSender;

use super::book::{Member, Purpose, RecordId, Rescue, RescueEnd, SegmentBook};
use super::engine::{Job, MoveFault, Outcome, ReadFault, Report};
use super::format::RecordHeader;
use super::mailbox::Mailbox;
use super::{JOBS_MAX, Wear};
use crate::arena::SlotMut;
use scrub::Scrub;
use sight::Asked;
pub(super) use sight::Sight;
#[cfg(test)]
pub(super) use tend::RESCUES_BESIDE_READERS_MAX;
pub(super) use tend::RESCUES_MAX;

/// Records that lie in memory of the lane's own: those being moved, and one that is checked.
pub(super) const RECORDS_HELD_MAX: usize = RESCUES_MAX + 1;

/// How a job of a lane ended, for whoever owns the lanes.
#[derive(Debug)]
pub(super) enum Ended {
    Written {
        token: u64,
        result: io::Result<()>,
    },
    Read {
        token: u64,
        result: Result<Bytes, ReadFault>,
    },
    /// A record that was to be moved cannot be read.
    Lost {
        record: RecordId,
        owner: u32,
        fault: ReadFault,
    },
    /// A record was read though nobody asked.
    Checked {
        result: io::Result<u64>,
    },
    /// The lane cannot write for itself.
    Failed {
        cause: io::Error,
    },
}

/// A job under way.
enum Pending {
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
    Rescue(Rescue),
    /// A record that is read though nobody asked.
    Check {
        segment: u32,
        member: Member,
        bytes: u64,
    },
    /// A record that has to go so that others can be written, as it was when that was decided.
    GiveUp {
        segment: u32,
        member: Member,
    },
    /// The medium is full of what is wanted.
    Full,
}

impl Pending {
    /// How it ends when the thread does; nothing for what no thread has a part in.
    fn broken(&self) -> Option<Outcome> {
        let cause = io::Error::new(io::ErrorKind::BrokenPipe, "the SSD thread is gone");
        Some(match self {
            Pending::Save { .. } | Pending::Head { .. } | Pending::Seal { .. } => Outcome::Put(Err(cause)),
            Pending::Read { .. } | Pending::Check { .. } => Outcome::Got(Err(ReadFault::Medium(cause))),
            Pending::Rescue(_) => Outcome::Moved(Err(MoveFault::Write(cause))),
            Pending::GiveUp { .. } | Pending::Full => return None,
        })
    }
}

/// A segment that is being emptied.
struct Drain {
    segment: u32,
    left: Vec<Member>,
    /// Of how many of what is left, from the first on, nobody has been asked yet whether it is worth being moved.
    unasked: usize,
    /// Somebody was asked, and what he let go of is free.
    is_answered: bool,
    open: usize,
}

impl Drain {
    fn new((segment, left): (u32, Vec<Member>)) -> Drain {
        Drain { segment, unasked: left.len(), left, is_answered: false, open: 0 }
    }
}

pub(super) struct Lane {
    pub(super) book: SegmentBook,
    number: usize,
    pub(super) mailbox: Arc<Mailbox<Job>>,
    /// For what the lane has to tell by itself.
    reports: UnboundedSender<Report>,
    thread: Option<JoinHandle<()>>,
    pending: HashMap<u64, Pending>,
    next_job: u64,
    saving: Asked,
    reading: Asked,
    nonce: u64,
    drain: Option<Drain>,
    scrub: Scrub,
    sight: Sight,
    /// Why nothing is written; the store says when to try again.
    stopped: Option<(Option<i32>, io::ErrorKind)>,
    /// [`Pending::Full`] is on its way.
    is_told_full: bool,
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
        mailbox: Arc<Mailbox<Job>>,
        reports: UnboundedSender<Report>,
        thread: JoinHandle<()>,
        sight: Sight,
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
            saving: Asked::default(),
            reading: Asked::default(),
            nonce: seed,
            drain: None,
            scrub: Scrub::default(),
            sight,
            stopped: None,
            is_told_full: false,
            wear: Wear::default(),
        };
        lane.tend();
        lane
    }

    pub(super) fn has_room(&self) -> bool {
        !self.is_stopped() && self.book.has_room()
    }

    /// Whether nothing is written until the store says so.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Records that it has, or that are on their way.
    pub(super) fn records(&self) -> u64 {
        self.book.records()
    }

    /// Writes and reads that the store asked for and that have not ended.
    pub(super) fn moves(&self) -> (usize, usize) {
        (self.saving.jobs, self.reading.jobs)
    }

    /// Writes a block; `Ok(None)` while there is no room.
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
        let Some((record, spot)) = self.book.place(header.traits.bytes, owner, Purpose::Save) else {
            return Ok(None);
        };
        let at = self.book.shape().at(spot.place.head.segment, spot.place.page);
        self.wear.saved_bytes += u64::from(header.traits.bytes);
        self.saving.begin(header.traits.bytes);
        let pending = Pending::Save { token, record, header };
        self.send(pending, |job| Job::Save { job, spot, at, header, frame });
        self.tend();
        Ok(Some(record))
    }

    /// Reads a block into `into`, which has its length.
    pub(super) fn read(
        &mut self,
        token: u64,
        record: RecordId,
        (hash, generation): (BlockHash, Generation),
        into: SlotMut,
    ) -> io::Result<()> {
        self.admit_job()?;
        let spot = self.book.spot(record).ok_or(io::ErrorKind::NotFound)?;
        if into.len() != spot.frame_bytes as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let segment = spot.place.head.segment;
        let at = self.book.shape().at(segment, spot.place.page);
        self.book.read_began(segment);
        let bytes = spot.frame_bytes;
        self.reading.begin(bytes);
        self.send(Pending::Read { token, segment, bytes }, |job| Job::Read {
            job,
            at,
            hash,
            generation,
            into,
        });
        Ok(())
    }

    /// Nobody needs the record any more.
    pub(super) fn free(&mut self, record: RecordId) {
        self.book.free(record);
        self.tend();
    }

    /// Tries to write again.
    pub(super) fn resume(&mut self) {
        self.stopped = None;
        self.probe();
        self.tend();
    }

    /// Whether nothing is on its way that could change anything.
    #[cfg(test)]
    pub(super) fn is_quiet(&self) -> bool {
        self.pending.is_empty()
    }

    fn admit_job(&self) -> io::Result<()> {
        if self.saving.jobs + self.reading.jobs >= JOBS_MAX {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    }

    fn send(&mut self, pending: Pending, job: impl FnOnce(u64) -> Job) {
        self.next_job += 1;
        self.pending.insert(self.next_job, pending);
        if !self.mailbox.send(job(self.next_job)) {
            self.thread_gone();
        }
    }

    /// Ends whatever is under way: nobody works on it any more. What the thread told before it went comes
    /// first, and a job ends once.
    fn thread_gone(&mut self) {
        tracing::error!("the SSD thread is gone: nothing more is read or written; start the node again");
        let mut jobs: Vec<u64> = self.pending.keys().copied().collect();
        jobs.sort_unstable();
        for job in jobs {
            let Some(outcome) = self.pending.get(&job).and_then(Pending::broken) else { continue };
            // The store is gone only while the process stops; nobody waits then.
            let _ = self.reports.send(Report { lane: self.number, job, outcome });
        }
    }

    /// The end of a job.
    pub(super) fn take_in(&mut self, job: u64, outcome: Outcome) -> Option<Ended> {
        let pending = self.pending.remove(&job)?;
        let ended = match (pending, outcome) {
            (Pending::Save { token, record, header }, Outcome::Put(result)) => {
                self.saving.end(header.traits.bytes);
                match &result {
                    Ok(()) => self.book.committed(record, header),
                    Err(_) => self.book.failed(record),
                }
                Some(Ended::Written { token, result })
            }
            (Pending::Read { token, segment, bytes }, Outcome::Got(result)) => {
                self.reading.end(bytes);
                self.book.read_ended(segment);
                Some(Ended::Read { token, result })
            }
            (Pending::Head { segment }, Outcome::Put(result)) => self.head_ended(segment, result),
            (Pending::Seal { segment }, Outcome::Put(result)) => {
                self.book.sealed(segment);
                result.err().map(|cause| self.stop(cause))
            }
            (Pending::Rescue(rescue), Outcome::Moved(result)) => self.rescued(rescue, result),
            (check @ Pending::Check { .. }, Outcome::Got(result)) => self.checked(&check, result.err()),
            (Pending::GiveUp { segment, member }, Outcome::Got(Err(fault))) => {
                self.gave_up(segment, member, fault)
            }
            (Pending::Full, Outcome::Put(Err(cause))) => {
                self.is_told_full = false;
                // Something may have gone meanwhile.
                (!self.book.has_room()).then(|| self.stop(cause))
            }
            _ => None,
        };
        self.tend();
        ended
    }

    fn stop(&mut self, cause: io::Error) -> Ended {
        self.stopped = Some((cause.raw_os_error(), cause.kind()));
        Ended::Failed { cause }
    }

    fn head_ended(&mut self, segment: u32, result: io::Result<()>) -> Option<Ended> {
        let Err(cause) = result else {
            self.book.opened(segment);
            return None;
        };
        let was_capped = self.book.is_capped();
        let is_full = matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let is_capped = is_full && self.book.full(segment);
        self.book.unopened(segment);
        // That a full medium is full still, found out by trying, is no news.
        if was_capped && is_capped { None } else { Some(self.stop(cause)) }
    }

    fn gave_up(&mut self, segment: u32, member: Member, fault: ReadFault) -> Option<Ended> {
        if let Some(drain) = &mut self.drain {
            drain.open -= 1;
        }
        let (record, owner) = (member.0, self.book.owner(member.0));
        let is_wanted = self.book.is_left(segment, member);
        is_wanted.then(|| {
            self.book.free(record);
            Ended::Lost { record, owner, fault }
        })
    }

    fn rescued(&mut self, rescue: Rescue, result: Result<RecordHeader, MoveFault>) -> Option<Ended> {
        if let Some(drain) = &mut self.drain {
            drain.open -= 1;
        }
        match result {
            Ok(header) => {
                self.book.rescued(rescue, RescueEnd::Moved(header));
                self.wear.rescued_bytes += u64::from(header.traits.bytes);
                None
            }
            Err(MoveFault::Read(fault)) => {
                let (record, owner) = (rescue.record, self.book.owner(rescue.record));
                let is_lost = self.book.rescued(rescue, RescueEnd::NotRead);
                is_lost.then_some(Ended::Lost { record, owner, fault })
            }
            Err(MoveFault::Write(cause)) => {
                self.book.rescued(rescue, RescueEnd::NotWritten);
                if let Some(drain) = &mut self.drain {
                    drain.left.push((rescue.record, rescue.from.place.page));
                }
                Some(self.stop(cause))
            }
        }
    }

    /// An end that comes from here, in its turn.
    fn tell(&mut self, pending: Pending, outcome: Outcome) {
        self.next_job += 1;
        self.pending.insert(self.next_job, pending);
        // The store is gone only while the process stops; nobody waits then.
        let _ = self.reports.send(Report { lane: self.number, job: self.next_job, outcome });
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the SSD thread ended with a panic");
        }
    }
}
