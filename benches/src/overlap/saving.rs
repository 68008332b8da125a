//! Saving beside computing: a line of jobs whose new KV goes out through a writer of a set rate, by layers
//! through a write buffer, against waiting for it at each job's end.
//!
//! Not here: what is written and where to.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use benches::{Row, side_by_side};
use kv_core::pipeline::{JobEnd, WriteBuffer, write_buffer_bytes};

use super::engine::Engine;
use super::{COMPUTE_MS, LAYERS, milliseconds, row};
use crate::Effort;

/// Jobs in a line.
const JOBS: u32 = 4;
/// Bytes that one layer of a job saves.
const LAYER_BYTES: u64 = 1 << 20;

/// A thread that writes layers at a set rate, and says when each is out.
struct Writer {
    layers: Sender<Instant>,
    out: Receiver<()>,
}

impl Writer {
    fn start(layer: Duration) -> Writer {
        let (layers, computed) = channel::<Instant>();
        let (done, out) = channel();
        std::thread::spawn(move || {
            let mut free = Instant::now();
            for computed in computed {
                free = free.max(computed) + layer;
                std::thread::sleep(free.saturating_duration_since(Instant::now()));
                if done.send(()).is_err() {
                    return;
                }
            }
        });
        Writer { layers, out }
    }

    fn write(&self) {
        // Fails only when the thread is gone, which shows in what is never out.
        let _ = self.layers.send(Instant::now());
    }
}

/// Rows of jobs of whose time, when they wait for it, saving takes `share` percent.
pub(super) fn rows(effort: &Effort, engine: Engine, share: u64) -> Vec<Row> {
    let name = format!("save of {share} % of the time, by layers beside compute");
    if !effort.wants(&name) {
        return Vec::new();
    }
    let compute_ns = effort.scaled(COMPUTE_MS) * 1_000_000;
    let save = Duration::from_nanos(compute_ns * share / (100 - share));
    let layer_ns = compute_ns / u64::from(LAYERS);
    let beside = || milliseconds(jobs(engine, layer_ns, save / LAYERS));
    let blocking = || milliseconds(jobs_that_wait(engine, layer_ns, save / LAYERS));
    let outcome = side_by_side(effort.runs, beside, blocking);
    vec![row(&name, "ms", "limit 0.9: waiting for it at each end", outcome)]
}

/// Each layer goes out while the next ones are computed.
fn jobs(engine: Engine, layer_ns: u64, save: Duration) -> Duration {
    let writer = Writer::start(save);
    let bytes_per_s = (LAYER_BYTES as f64 / save.as_secs_f64()) as u64;
    let size = write_buffer_bytes(&[LAYER_BYTES; LAYERS as usize], layer_ns, bytes_per_s);
    // Twice what a job needs: the machine is not always as fast as its loop was.
    let mut buffer = WriteBuffer::new(size * 2);
    let begun = Instant::now();
    for _ in 0..JOBS {
        for _ in 0..LAYERS {
            engine.compute(layer_ns);
            for () in writer.out.try_iter() {
                buffer.written(LAYER_BYTES);
            }
            buffer.computed(LAYER_BYTES);
            writer.write();
        }
        let mut end = buffer.end_job();
        while end != JobEnd::Free && writer.out.recv().is_ok() {
            end = buffer.written(LAYER_BYTES);
        }
    }
    // What is left after the last one counts too: nothing is gained by not saving.
    while buffer.unwritten_bytes() > 0 && writer.out.recv().is_ok() {
        buffer.written(LAYER_BYTES);
    }
    begun.elapsed()
}

/// Each job ends when all of it is out.
fn jobs_that_wait(engine: Engine, layer_ns: u64, save: Duration) -> Duration {
    let begun = Instant::now();
    for _ in 0..JOBS {
        (0..LAYERS).for_each(|_| engine.compute(layer_ns));
        let writer = Writer::start(save);
        (0..LAYERS).for_each(|_| writer.write());
        // Ends early only if the writer is gone, and then too soon to be believed.
        writer.out.iter().take(LAYERS as usize).for_each(|()| ());
    }
    begun.elapsed()
}
