//! A path inside the process: a thread copies slices into the caller's memory at a set rate. It can
//! slow down, fall silent or disconnect.
//!
//! Not here: the use of the slices (`engine.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_core::pipeline::{ArrivalOrder, Preload};

/// Shorter waits do not sleep: a thread that wakes for each slice takes a tenth of a core from the
/// engine if the other core is busy.
const SLEEP_MIN: Duration = Duration::from_micros(400);

/// A fault of the path, and the number of slices before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SourceFault {
    None,
    /// Slower by this factor from the first byte on.
    Slow(f64),
    /// No more slices come, without a signal.
    Silent {
        after: usize,
    },
    /// No more slices come, and the connection closes.
    Disconnect {
        after: usize,
    },
}

/// The slices that a source sends, and how.
#[derive(Clone, Debug)]
pub(crate) struct SourcePlan {
    pub(crate) plan: Preload,
    pub(crate) blocks: u32,
    pub(crate) slice_bytes: u32,
    pub(crate) arrive: ArrivalOrder,
    /// Time to load everything.
    pub(crate) load: Duration,
    pub(crate) fault: SourceFault,
}

/// A slice in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedSlice {
    pub(crate) block: u32,
    pub(crate) layer: u32,
}

/// A running source.
pub(crate) struct Source {
    /// Reference time of its schedule.
    pub(crate) origin: Instant,
    pub(crate) slices: Receiver<LoadedSlice>,
    shared: Arc<SourceState>,
    thread: Option<JoinHandle<()>>,
}

struct SourceState {
    is_begun: AtomicBool,
    is_over: AtomicBool,
    /// Blocks that are computed and need not be sent.
    skipped: Vec<AtomicBool>,
    /// Bytes in the caller's memory before the job's turn.
    ahead_bytes: AtomicU64,
}

impl Source {
    /// Starts to load; before the job's turn, only what fits into its read buffer.
    pub(crate) fn start(sending: &SourcePlan) -> Source {
        let (sender, slices) = channel();
        let shared = Arc::new(SourceState {
            is_begun: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            skipped: (0..sending.blocks).map(|_| AtomicBool::new(false)).collect(),
            ahead_bytes: AtomicU64::new(0),
        });
        let origin = Instant::now();
        let thread = std::thread::spawn({
            let (sending, shared) = (sending.clone(), shared.clone());
            move || send_slices(&sending, &shared, &sender, origin)
        });
        Source { origin, slices, shared, thread: Some(thread) }
    }

    /// Starts the job's turn.
    pub(crate) fn begin(&self) {
        self.shared.is_begun.store(true, Ordering::Release);
    }

    /// Marks these blocks as computed, so that their slices need not come.
    pub(crate) fn skip_blocks(&self, blocks: impl Iterator<Item = u32>) {
        blocks.for_each(|block| self.shared.skipped[block as usize].store(true, Ordering::Relaxed));
    }

    /// Bytes in memory before the job's turn.
    pub(crate) fn ahead_bytes(&self) -> u64 {
        self.shared.ahead_bytes.load(Ordering::Relaxed)
    }

    /// Waits until everything is sent.
    pub(crate) fn wait(mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of the thread shows as missing slices.
            let _ = thread.join();
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl SourceState {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Acquire)
    }
}

/// The sender of slices.
struct SliceSender<'a> {
    sending: &'a SourcePlan,
    shared: &'a SourceState,
    to: &'a mpsc::Sender<LoadedSlice>,
    memory: Vec<u8>,
    /// Due time of the next slice, and the interval between slices.
    due: Instant,
    gap: Duration,
    sent: usize,
}

/// Sends all slices. Blocks that were computed before their turn come last and may still be
/// recorded.
fn send_slices(sending: &SourcePlan, shared: &SourceState, to: &mpsc::Sender<LoadedSlice>, origin: Instant) {
    let order = order(sending);
    let slow = if let SourceFault::Slow(times) = sending.fault { times } else { 1.0 };
    let gap = sending.load.mul_f64(slow / order.len() as f64);
    let memory = vec![0u8; order.len() * sending.slice_bytes as usize];
    let mut sender = SliceSender { sending, shared, to, memory, due: origin, gap, sent: 0 };
    let is_left_out = |there: &LoadedSlice| shared.skipped[there.block as usize].load(Ordering::Relaxed);
    let mut later = Vec::new();
    for (at, &there) in order.iter().enumerate() {
        if is_left_out(&there) {
            later.push((at, there));
        } else if !sender.send(at, there) {
            return;
        }
    }
    later.iter().all(|(at, there)| sender.send(*at, *there));
    std::hint::black_box(sender.memory);
}

impl SliceSender<'_> {
    /// Returns `false` if no more slices are to be sent.
    fn send(&mut self, at: usize, there: LoadedSlice) -> bool {
        while !self.sending.plan.may_load(there.layer, self.shared.is_begun()) && !self.shared.is_over() {
            std::thread::sleep(SLEEP_MIN);
            self.due = Instant::now();
        }
        match self.sending.fault {
            SourceFault::Disconnect { after } if self.sent == after => return false,
            SourceFault::Silent { after } if self.sent == after => {
                stay_silent(self.shared);
                return false;
            }
            _ => {}
        }
        self.due += self.gap;
        if !sleep_until(self.due, self.shared) {
            return false;
        }
        let bytes = self.sending.slice_bytes as usize;
        self.memory[at * bytes..][..bytes].fill(7);
        if !self.shared.is_begun() {
            self.shared.ahead_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        self.sent += 1;
        // The receiver closes when the job is done.
        self.to.send(there).is_ok()
    }
}

/// Slices in sending order.
fn order(sending: &SourcePlan) -> Vec<LoadedSlice> {
    let slots = sending.plan.slots().map(|slot| LoadedSlice { block: slot.block, layer: slot.layer });
    let mut order: Vec<LoadedSlice> = slots.collect();
    if sending.arrive == ArrivalOrder::ByBlock {
        order.sort_by_key(|there| (there.block, there.layer));
    }
    order
}

/// Sleeps until `due` in short steps; returns `false` if the source is stopped.
fn sleep_until(due: Instant, shared: &SourceState) -> bool {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if shared.is_over() {
            return false;
        }
        if left < SLEEP_MIN {
            return true;
        }
        std::thread::sleep(left.min(Duration::from_millis(5)));
    }
}

/// Stays silent and rarely wakes: it must not take time from the engine.
fn stay_silent(shared: &SourceState) {
    while !shared.is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
}
