//! A history fetched layer by layer into the caller's memory, beside the same history as whole
//! frames. It measures the times until the first layer is complete and until all are.
//!
//! Not here: concurrent compute (`overlap.rs`), and stores: blocks lie ready in memory, with both
//! ends in one process.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{BenchRow, Better, Outcome, TimeSpent, measure_time, outcome};
use kv_core::id::BlockHash;
use kv_core::pipeline::ArrivalOrder;
use kvfleet_net::tls::Identity;
use kvfleet_proto::frame::{Frame, FrameHead};
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{self, IDENTITY};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{Dialer, FetchAnswer, LayerRequest, Path, SliceSink};

use crate::Effort;
use crate::network::memory_blocks::MemoryBlocks;
use crate::transport::{ANY, identities};

pub(crate) const ABOUT: &str = "a history of 64 blocks of 512 KiB, 32 layers each, fetched over loopback \
    into the caller's memory and verified: by layers, and as whole frames with their slices copied there; \
    from the request to the first layer of all blocks, and to the last layer; the sides alternate in each \
    run";

const LAYERS: usize = 32;
const SLICE_BYTES: u32 = 16 << 10;
const BLOCKS: u32 = 64;
/// Fetches of each side per run.
const FETCHES: u64 = 10;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (server, client) = identities()?;
    let mut rows = Vec::new();
    for transport in ["TLS over TCP", "QUIC"] {
        if !effort.is_selected(transport) {
            continue;
        }
        let node = runtime.block_on(LayerServer::start(transport, &server, &client))?;
        rows.extend(compare(effort, &runtime, transport, &node)?);
    }
    ensure!(!rows.is_empty(), "no row name contains the --only text");
    Ok(rows)
}

/// Total times of one side's fetches.
struct SideTimes {
    first_layer: Duration,
    all: TimeSpent,
}

impl SideTimes {
    fn ms_per_fetch(duration: Duration, fetches: u64) -> f64 {
        duration.as_secs_f64() * 1e3 / fetches as f64
    }
}

fn compare(
    effort: &Effort,
    runtime: &tokio::runtime::Runtime,
    transport: &str,
    node: &LayerServer,
) -> anyhow::Result<Vec<BenchRow>> {
    let fetches = effort.scaled(FETCHES);
    let mut memory = CallerMemory::new();
    let mut side = |by_layer: bool| {
        let mut first = Duration::ZERO;
        let (done, all) = measure_time(|| {
            for _ in 0..fetches {
                first += runtime.block_on(node.fetch(by_layer, &mut memory))?;
            }
            anyhow::Ok(())
        });
        done.map(|()| SideTimes { first_layer: first, all })
    };
    let mut runs = Vec::new();
    for run in 0..=effort.runs {
        let layers_first = run % 2 == 0;
        let one = side(layers_first)?;
        let other = side(!layers_first)?;
        // The first run touches new memory and opens the windows.
        if run > 0 {
            runs.push(if layers_first { (one, other) } else { (other, one) });
        }
    }
    let row = |name: &str, unit: &str, of: &dyn Fn(&SideTimes) -> f64| {
        let pairs: Vec<_> = runs.iter().map(|(layers, frames)| (of(layers), of(frames))).collect();
        let found: Outcome = outcome(&pairs);
        BenchRow::new("layers", &format!("{name}, {transport}"), unit, "whole frames", Better::Lower, found)
    };
    Ok(vec![
        row("first layer of all blocks", "ms", &|side| SideTimes::ms_per_fetch(side.first_layer, fetches)),
        row("all layers", "ms", &|side| SideTimes::ms_per_fetch(side.all.wall, fetches)),
        row("all layers", "ms CPU", &|side| SideTimes::ms_per_fetch(side.all.cpu, fetches)),
    ])
}

/// A server with blocks, and a path to it.
struct LayerServer {
    path: Arc<dyn Path>,
    hashes: Vec<BlockHash>,
    /// Dropping it stops both ends.
    _ends: Box<dyn Any + Send + Sync>,
}

impl LayerServer {
    async fn start(transport: &str, server: &Identity, client: &Identity) -> anyhow::Result<LayerServer> {
        let hashes = suite::hashes(BLOCKS);
        let frame = |hash: &BlockHash| suite::frame_of(*hash, &[SLICE_BYTES; LAYERS]);
        let held = Arc::new(MemoryBlocks::from_frames(hashes.iter().map(frame)));
        let (path, ends): (_, Box<dyn Any + Send + Sync>) = if transport == "QUIC" {
            let server = QuicServer::bind(ANY, server, held)?;
            let dialer = QuicDialer::new(client, QuicConfig::default());
            (dialer.dial(server.local_addr().to_string()).await?, Box::new((server, dialer)))
        } else {
            let server = TcpServer::bind(ANY, server, held)?;
            let dialer = TcpDialer::new(client, TcpConfig::default());
            (dialer.dial(server.local_addr().to_string()).await?, Box::new((server, dialer)))
        };
        Ok(LayerServer { path, hashes, _ends: ends })
    }

    /// Fetches all blocks; returns the time until the first layer of each is in place.
    async fn fetch(&self, by_layer: bool, memory: &mut CallerMemory) -> anyhow::Result<Duration> {
        let request = suite::fetch_request(&self.hashes);
        let mut filling = LayerSink {
            memory,
            hashes: &self.hashes,
            filled_blocks: [0; LAYERS],
            frames_received: 0,
            begun: Instant::now(),
            first_layer: None,
        };
        let asked = LayerRequest { layers: 0..LAYERS, arrive: ArrivalOrder::ByLayer };
        let answer = if by_layer {
            self.path.fetch_layers(request, asked, &mut filling).await?
        } else {
            self.path.fetch(request, &mut |frame| filling.copy(&frame)).await?
        };
        ensure!(matches!(answer, FetchAnswer::Hit { .. }), "expected a hit, got {answer:?}");
        ensure!(filling.filled_blocks == [BLOCKS; LAYERS], "{:?} of {BLOCKS} blocks", filling.filled_blocks);
        filling.first_layer.ok_or_else(|| anyhow::anyhow!("no layer came"))
    }
}

/// The caller's memory: one place per slice.
struct CallerMemory(Vec<u8>);

impl CallerMemory {
    fn new() -> CallerMemory {
        CallerMemory(vec![1; BLOCKS as usize * LAYERS * SLICE_BYTES as usize])
    }
}

/// State of a fetch in progress.
struct LayerSink<'a> {
    memory: &'a mut CallerMemory,
    hashes: &'a [BlockHash],
    /// Number of blocks with each layer.
    filled_blocks: [u32; LAYERS],
    /// Number of whole frames received.
    frames_received: usize,
    begun: Instant,
    first_layer: Option<Duration>,
}

impl LayerSink<'_> {
    /// Verifies and copies a whole frame, as a client does.
    fn copy(&mut self, frame: &Frame) {
        let position = self.frames_received;
        self.frames_received += 1;
        if frame.verify(IDENTITY, self.hashes[position]).is_err() {
            return;
        }
        for layer in 0..LAYERS {
            if let (Some(to), Some(from)) = (self.slice(position, layer), frame.slice(layer)) {
                to.copy_from_slice(&from);
            }
        }
        self.slices_filled(position, 0..LAYERS);
    }
}

impl SliceSink for LayerSink<'_> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        head.verify(IDENTITY, self.hashes[position]).is_ok()
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let at = (position * LAYERS + layer) * SLICE_BYTES as usize;
        self.memory.0.get_mut(at..at + SLICE_BYTES as usize)
    }

    fn slices_filled(&mut self, _: usize, layers: Range<usize>) {
        self.filled_blocks[layers].iter_mut().for_each(|count| *count += 1);
        if self.filled_blocks[0] == BLOCKS && self.first_layer.is_none() {
            self.first_layer = Some(self.begun.elapsed());
        }
    }

    fn slice_rejected(&mut self, _: usize) {}

    fn count_received(&mut self, _: usize) {}
}
