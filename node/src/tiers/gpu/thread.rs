//! The tier on a thread of its own: it receives requests, sends reports, and opens the device as
//! often as requested.
//!
//! A device's driver may block in any call, and the task that owns the blocks must not wait for it.
//! The thread sleeps while no block is in transit. Not here: which block moves, and handling a lost
//! device (`store`).

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use super::device::{DeviceError, GpuDevice};
use super::{GpuCompletion, GpuFault, GpuRecord, GpuShape, GpuTier};
use crate::arena::SlotMut;

/// Poll interval while copies are running: shorter than one copy.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Time that a stopping node waits for its GPU: longer than opening one, or than the end of all
/// possible copies.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// A request to the thread. Each `Put` and `Get` is answered once, by a report with its token.
#[derive(Debug)]
pub(crate) enum GpuRequest {
    /// Opens the device, again if it was open; its content is lost.
    Open,
    /// Stores a verified frame.
    Put { token: u64, frame: Bytes },
    /// Reads a frame into a slot of its length.
    Get { token: u64, record: GpuRecord, into: SlotMut },
    /// Frees a record.
    Free { record: GpuRecord },
}

/// A report of the thread.
#[derive(Debug)]
pub(crate) enum GpuReport {
    /// Result of opening the device.
    Opened(Result<(), DeviceError>),
    /// The frame is in device memory and was verified. `Ok(None)` means that no slot was free.
    Stored { token: u64, result: Result<Option<GpuRecord>, GpuFault> },
    /// The frame was read and verified.
    Loaded { token: u64, result: Result<Bytes, GpuFault> },
    /// The device is lost, with all of its content. Jobs are still answered.
    Lost(DeviceError),
}

/// Handle of the thread. Dropping it ends the thread and frees all memory.
///
/// A driver that never returns from a call, or waits for a copy that never ends, must not block the
/// drop. So after some seconds the thread is abandoned with everything that it owns: device memory,
/// page-locked buffers, and the slots of blocks in transit, which keep the whole arena. This leak
/// is deliberate: the device may write to the buffers and the thread to the slots at any time, so
/// that memory must not be reused. If the call returns later, the thread finds the channel closed
/// and frees everything; otherwise the end of the process does.
#[derive(Debug)]
pub(crate) struct GpuThread {
    jobs: Option<Sender<GpuRequest>>,
    thread: Option<JoinHandle<()>>,
    /// Never receives a value; closes after everything that the thread owns is dropped.
    exit_signal: Receiver<()>,
    shutdown_timeout: Duration,
}

impl GpuThread {
    /// Starts the thread, which opens no device yet. `open` returns the device, or `None` if there
    /// is none.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(crate) fn start<D: GpuDevice + 'static>(
        open: impl FnMut() -> Result<Option<D>, DeviceError> + Send + 'static,
        shape: GpuShape,
        reports: UnboundedSender<GpuReport>,
    ) -> std::io::Result<GpuThread> {
        let (jobs, inbox) = channel();
        let (end, gone) = channel();
        let run = move || {
            // Dropped last: unprocessed requests hold slots too.
            let (_end, inbox): (Sender<()>, _) = (end, inbox);
            GpuRunner { open, shape, reports, tier: None, last_number: 0, is_loss_reported: false }
                .run(&inbox);
        };
        let thread = std::thread::Builder::new().name("kvfleet-gpu".to_owned()).spawn(run)?;
        Ok(GpuThread {
            jobs: Some(jobs),
            thread: Some(thread),
            exit_signal: gone,
            shutdown_timeout: SHUTDOWN_TIMEOUT,
        })
    }

    /// The same with another timeout.
    #[cfg(test)]
    pub(crate) fn with_shutdown_timeout(self, patience: Duration) -> GpuThread {
        let mut thread = self;
        thread.shutdown_timeout = patience;
        thread
    }

    /// Whether the thread ended, which happens only on a panic.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Sends a request; `false` if the thread has ended.
    pub(crate) fn send(&self, job: GpuRequest) -> bool {
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }
}

impl Drop for GpuThread {
    fn drop(&mut self) {
        self.jobs.take();
        let Some(thread) = self.thread.take() else { return };
        if self.exit_signal.recv_timeout(self.shutdown_timeout) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                "the GPU does not complete its copies and is abandoned: its memory, and DRAM that it may \
                 write to, stay allocated until this process ends; check it (nvidia-smi)"
            );
            // Dropping the handle detaches the thread.
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the GPU thread panicked");
        }
    }
}

struct GpuRunner<D: GpuDevice, O> {
    open: O,
    shape: GpuShape,
    reports: UnboundedSender<GpuReport>,
    tier: Option<GpuTier<D>>,
    /// Last record number in use: records of a reopened device must differ from earlier ones.
    last_number: u64,
    is_loss_reported: bool,
}

impl<D: GpuDevice, O: FnMut() -> Result<Option<D>, DeviceError>> GpuRunner<D, O> {
    fn run(mut self, inbox: &Receiver<GpuRequest>) {
        loop {
            let is_idle = self.tier.as_ref().is_none_or(|tier| tier.jobs() == 0);
            let job = if is_idle {
                inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                inbox.recv_timeout(POLL_INTERVAL)
            };
            match job {
                Ok(job) => self.handle(job),
                Err(RecvTimeoutError::Timeout) => {}
                // The handle was dropped.
                Err(RecvTimeoutError::Disconnected) => return,
            }
            inbox.try_iter().for_each(|job| self.handle(job));
            self.poll();
        }
    }

    fn handle(&mut self, job: GpuRequest) {
        match job {
            GpuRequest::Open => self.reopen(),
            GpuRequest::Free { record } => {
                if let Some(tier) = self.tier.as_mut() {
                    tier.free(record);
                }
            }
            GpuRequest::Put { token, frame } => match self.tier().and_then(|tier| tier.put(token, &frame)) {
                Ok(true) => {}
                Ok(false) => self.report(GpuReport::Stored { token, result: Ok(None) }),
                Err(fault) => self.report(GpuReport::Stored { token, result: Err(fault) }),
            },
            GpuRequest::Get { token, record, into } => {
                match self.tier().and_then(|tier| tier.get(token, record, into)) {
                    Ok(true) => {}
                    Ok(false) => self.report(GpuReport::Loaded { token, result: Err(GpuFault::Unknown) }),
                    Err(fault) => self.report(GpuReport::Loaded { token, result: Err(fault) }),
                }
            }
        }
    }

    fn tier(&mut self) -> Result<&mut GpuTier<D>, GpuFault> {
        self.tier.as_mut().ok_or_else(|| DeviceError::Lost("it is not open".to_owned()).into())
    }

    fn reopen(&mut self) {
        // Free the memory of the previous device first.
        self.last_number = self.tier.take().map_or(self.last_number, |tier| tier.last_number());
        self.is_loss_reported = false;
        let opened = (self.open)().and_then(|device| device.ok_or(DeviceError::Absent));
        let opened = opened.and_then(|device| GpuTier::open(device, self.shape.clone()));
        let told = opened.map(|tier| self.tier = Some(tier.with_numbers_above(self.last_number)));
        self.report(GpuReport::Opened(told));
    }

    fn poll(&mut self) {
        let Some(tier) = self.tier.as_mut() else { return };
        let done = tier.poll();
        let lost = tier.lost().filter(|_| !self.is_loss_reported).cloned();
        for done in done {
            match done {
                GpuCompletion::Stored { token, result } => {
                    self.report(GpuReport::Stored { token, result: result.map(Some) });
                }
                GpuCompletion::Loaded { token, result } => self.report(GpuReport::Loaded { token, result }),
                // Never requested here.
                GpuCompletion::Scattered { .. } | GpuCompletion::ScatterFailed { .. } => {}
            }
        }
        if let Some(lost) = lost {
            self.is_loss_reported = true;
            self.report(GpuReport::Lost(lost));
        }
    }

    fn report(&self, report: GpuReport) {
        // A stopped store needs no reports.
        let _ = self.reports.send(report);
    }
}
