//! A path inside the process: a thread that copies one slice after the other into the caller's memory, at a set
//! rate, and can be slow, fall silent or end.
//!
//! Not here: what is done with the slices (`engine.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_core::pipeline::{Arrive, Preload};

/// What is due sooner goes at once: a thread that wakes for each slice takes a tenth of a core from the engine, where
/// somebody else has the other.
const SLEEP_MIN: Duration = Duration::from_micros(400);

/// What happens to the path, after how many slices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// So many times as slow from the first byte on.
    Slow(f64),
    /// Nothing more comes, and nobody says so.
    Silent {
        after: usize,
    },
    /// Nothing more comes, and the other end is known to be gone.
    Cut {
        after: usize,
    },
}

/// What a source sends.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) plan: Preload,
    pub(crate) blocks: u32,
    pub(crate) slice_bytes: u32,
    pub(crate) arrive: Arrive,
    /// Of all of it.
    pub(crate) load: Duration,
    pub(crate) fault: Fault,
}

/// A slice lies in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct There {
    pub(crate) block: u32,
    pub(crate) layer: u32,
}

/// A running source.
pub(crate) struct Source {
    /// The moment its times are counted from.
    pub(crate) origin: Instant,
    pub(crate) there: Receiver<There>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    is_begun: AtomicBool,
    is_over: AtomicBool,
    /// Blocks that are computed and not to be sent.
    left_out: Vec<AtomicBool>,
    /// Bytes that lay in the caller's memory before the job's turn.
    ahead_bytes: AtomicU64,
}

impl Source {
    /// Begins to load: before the job's turn, what its read buffer takes.
    pub(crate) fn start(sending: &Sending) -> Source {
        let (sender, there) = channel();
        let shared = Arc::new(Shared {
            is_begun: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            left_out: (0..sending.blocks).map(|_| AtomicBool::new(false)).collect(),
            ahead_bytes: AtomicU64::new(0),
        });
        let origin = Instant::now();
        let thread = std::thread::spawn({
            let (sending, shared) = (sending.clone(), shared.clone());
            move || send(&sending, &shared, &sender, origin)
        });
        Source { origin, there, shared, thread: Some(thread) }
    }

    /// The job's turn has come.
    pub(crate) fn begin(&self) {
        self.shared.is_begun.store(true, Ordering::Release);
    }

    /// These blocks are computed: their slices need not come.
    pub(crate) fn leave_out(&self, blocks: impl Iterator<Item = u32>) {
        blocks.for_each(|block| self.shared.left_out[block as usize].store(true, Ordering::Relaxed));
    }

    /// Bytes that were there before the job's turn.
    pub(crate) fn ahead_bytes(&self) -> u64 {
        self.shared.ahead_bytes.load(Ordering::Relaxed)
    }

    /// Waits until all was sent.
    pub(crate) fn wait(mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of the thread shows in what did not come.
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

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Acquire)
    }
}

/// What sends.
struct Sender<'a> {
    sending: &'a Sending,
    shared: &'a Shared,
    to: &'a mpsc::Sender<There>,
    memory: Vec<u8>,
    /// When the next slice is due, and the time of one.
    due: Instant,
    gap: Duration,
    sent: usize,
}

/// Sends all slices: last those of blocks that were computed before their turn came, which may still end that.
fn send(sending: &Sending, shared: &Shared, to: &mpsc::Sender<There>, origin: Instant) {
    let order = order(sending);
    let slow = if let Fault::Slow(times) = sending.fault { times } else { 1.0 };
    let gap = sending.load.mul_f64(slow / order.len() as f64);
    let memory = vec![0u8; order.len() * sending.slice_bytes as usize];
    let mut sender = Sender { sending, shared, to, memory, due: origin, gap, sent: 0 };
    let is_left_out = |there: &There| shared.left_out[there.block as usize].load(Ordering::Relaxed);
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

impl Sender<'_> {
    /// `false` when nothing more is to be sent.
    fn send(&mut self, at: usize, there: There) -> bool {
        while !self.sending.plan.may_load(there.layer, self.shared.is_begun()) && !self.shared.is_over() {
            std::thread::sleep(SLEEP_MIN);
            self.due = Instant::now();
        }
        match self.sending.fault {
            Fault::Cut { after } if self.sent == after => return false,
            Fault::Silent { after } if self.sent == after => {
                hang(self.shared);
                return false;
            }
            _ => {}
        }
        self.due += self.gap;
        if !pause(self.due, self.shared) {
            return false;
        }
        let bytes = self.sending.slice_bytes as usize;
        self.memory[at * bytes..][..bytes].fill(7);
        if !self.shared.is_begun() {
            self.shared.ahead_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        self.sent += 1;
        // Nobody listens once the job is done.
        self.to.send(there).is_ok()
    }
}

/// Slices in the order in which they are sent.
fn order(sending: &Sending) -> Vec<There> {
    let slots = sending.plan.slots().map(|slot| There { block: slot.block, layer: slot.layer });
    let mut order: Vec<There> = slots.collect();
    if sending.arrive == Arrive::ByBlock {
        order.sort_by_key(|there| (there.block, there.layer));
    }
    order
}

/// Sleeps until it is due, in short steps; `false` when nobody wants it any more.
fn pause(due: Instant, shared: &Shared) -> bool {
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

/// Silent, and seldom awake: it must not take time from the engine.
fn hang(shared: &Shared) {
    while !shared.is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
}
