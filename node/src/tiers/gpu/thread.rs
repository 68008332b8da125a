//! The tier on a thread of its own: jobs in, reports out, and the device opened there, as often as it is asked for.
//!
//! A device's driver may take its time in any call, and the task that owns the blocks must not wait for it. Nothing runs
//! here while nothing is on its way. Not here: which block moves, and what comes of a device that is gone (`store`).

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::device::{Device, DeviceError};
use super::{Done, GpuFault, GpuRecord, GpuShape, GpuTier};
use crate::arena::SlotMut;

/// While copies are on their way the device is asked this often how they are: less than one of them takes.
const POLL: Duration = Duration::from_micros(20);

/// A node that stops waits so long for its GPU: longer than it takes to open one, or to end all copies that may be under way.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the thread is to do. Each `Put` and `Get` is answered once, by a report with its token.
#[derive(Debug)]
pub(crate) enum Job {
    /// Opens the device, anew if it was open; all that was there is gone.
    Open,
    /// Stores a verified frame.
    Put { token: u64, frame: Bytes },
    /// Reads a frame into a slot of its length.
    Get { token: u64, record: GpuRecord, into: SlotMut },
    /// Ends a record.
    Free { record: GpuRecord },
}

/// What the thread has to tell.
#[derive(Debug)]
pub(crate) enum GpuReport {
    /// The device has its memory, or has not.
    Opened(Result<(), DeviceError>),
    /// A frame is in device memory and was read back right. `Ok(None)`: there is no slot for it.
    Stored { token: u64, result: Result<Option<GpuRecord>, GpuFault> },
    /// A frame was read and is what was stored.
    Loaded { token: u64, result: Result<Bytes, GpuFault> },
    /// Nothing of the device works any more, and all that was there is gone. Jobs are still answered.
    Lost(DeviceError),
}

/// The thread, for whoever owns the tier. Dropping it ends the thread and gives all memory back.
///
/// A driver that does not return from a call, or waits for a copy that never ends, would keep whoever drops this for good, so
/// after some seconds the thread is left behind with all that it owns: device memory, page-locked buffers, and the slots of
/// blocks on their way, of which each keeps the whole arena. That is a leak, and meant as one: the device may write to the
/// buffers at any time and the thread to the slots, so nobody else may have that memory. Should the call return after all,
/// the thread finds that nobody is left, and gives everything back itself; else the end of the process does.
#[derive(Debug)]
pub(crate) struct GpuThread {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Nothing comes here; it closes behind all that the thread has.
    gone: Receiver<()>,
    patience: Duration,
}

impl GpuThread {
    /// Starts the thread, which opens nothing yet. `open` gives the device, and nothing where there is none.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start<D: Device + 'static>(
        open: impl FnMut() -> Result<Option<D>, DeviceError> + Send + 'static,
        shape: GpuShape,
        reports: UnboundedSender<GpuReport>,
    ) -> std::io::Result<GpuThread> {
        let (jobs, inbox) = channel();
        let (end, gone) = channel();
        let run = move || {
            // The last to go: jobs that nobody took have slots too.
            let (_end, inbox): (Sender<()>, _) = (end, inbox);
            Runner { open, shape, reports, tier: None, numbers: 0, is_told: false }.run(&inbox);
        };
        let thread = std::thread::Builder::new().name("kvfleet-gpu".to_owned()).spawn(run)?;
        Ok(GpuThread { jobs: Some(jobs), thread: Some(thread), gone, patience: PATIENCE })
    }

    /// The same with another patience.
    #[cfg(test)]
    pub(crate) fn waiting(self, patience: Duration) -> GpuThread {
        let mut thread = self;
        thread.patience = patience;
        thread
    }

    /// Whether the thread ended, which only a panic makes it do.
    pub(crate) fn is_gone(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// `false` when the thread is gone.
    pub(crate) fn send(&self, job: Job) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }
}

impl Drop for GpuThread {
    fn drop(&mut self) {
        self.jobs.take();
        let Some(thread) = self.thread.take() else { return };
        if self.gone.recv_timeout(self.patience) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                "the GPU does not end what was begun and is left behind: its memory, and DRAM that it may write to, come back when this process ends; check it (nvidia-smi)"
            );
            // Dropping the handle detaches the thread.
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the GPU thread ended with a panic");
        }
    }
}

struct Runner<D: Device, O> {
    open: O,
    shape: GpuShape,
    reports: UnboundedSender<GpuReport>,
    tier: Option<GpuTier<D>>,
    /// Numbers of records that were given out: those of a device that was opened anew must not be taken for older ones.
    numbers: u64,
    is_told: bool,
}

impl<D: Device, O: FnMut() -> Result<Option<D>, DeviceError>> Runner<D, O> {
    fn run(mut self, inbox: &Receiver<Job>) {
        loop {
            let is_idle = self.tier.as_ref().is_none_or(|tier| tier.jobs() == 0);
            let job = if is_idle {
                inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                inbox.recv_timeout(POLL)
            };
            match job {
                Ok(job) => self.begin(job),
                Err(RecvTimeoutError::Timeout) => {}
                // Nobody is left who could be told anything.
                Err(RecvTimeoutError::Disconnected) => return,
            }
            inbox.try_iter().for_each(|job| self.begin(job));
            self.poll();
        }
    }

    fn begin(&mut self, job: Job) {
        match job {
            Job::Open => self.reopen(),
            Job::Free { record } => {
                if let Some(tier) = self.tier.as_mut() {
                    tier.free(record);
                }
            }
            Job::Put { token, frame } => match self.tier().and_then(|tier| tier.put(token, &frame)) {
                Ok(true) => {}
                Ok(false) => self.tell(GpuReport::Stored { token, result: Ok(None) }),
                Err(fault) => self.tell(GpuReport::Stored { token, result: Err(fault) }),
            },
            Job::Get { token, record, into } => {
                match self.tier().and_then(|tier| tier.get(token, record, into)) {
                    Ok(true) => {}
                    Ok(false) => self.tell(GpuReport::Loaded { token, result: Err(GpuFault::Unknown) }),
                    Err(fault) => self.tell(GpuReport::Loaded { token, result: Err(fault) }),
                }
            }
        }
    }

    fn tier(&mut self) -> Result<&mut GpuTier<D>, GpuFault> {
        self.tier.as_mut().ok_or_else(|| DeviceError::Lost("it is not open".to_owned()).into())
    }

    fn reopen(&mut self) {
        // The memory of the one before goes first.
        self.numbers = self.tier.take().map_or(self.numbers, |tier| tier.numbers());
        self.is_told = false;
        let opened = (self.open)().and_then(|device| device.ok_or(DeviceError::Absent));
        let opened = opened.and_then(|device| GpuTier::open(device, self.shape.clone()));
        let told = opened.map(|tier| self.tier = Some(tier.numbered_from(self.numbers)));
        self.tell(GpuReport::Opened(told));
    }

    fn poll(&mut self) {
        let Some(tier) = self.tier.as_mut() else { return };
        let done = tier.poll();
        let lost = tier.lost().filter(|_| !self.is_told).cloned();
        for done in done {
            match done {
                Done::Stored { token, result } => {
                    self.tell(GpuReport::Stored { token, result: result.map(Some) });
                }
                Done::Loaded { token, result } => self.tell(GpuReport::Loaded { token, result }),
                // Nobody asks for any here.
                Done::Scattered { .. } | Done::ScatterFailed { .. } => {}
            }
        }
        if let Some(lost) = lost {
            self.is_told = true;
            self.tell(GpuReport::Lost(lost));
        }
    }

    fn tell(&self, report: GpuReport) {
        // A store that is gone needs no reports.
        let _ = self.reports.send(report);
    }
}
