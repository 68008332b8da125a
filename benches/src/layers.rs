//! A history fetched layer by layer into memory of the caller, beside the same history as whole frames: when compute of
//! the first layer may begin, and what all of it takes.
//!
//! Not here: compute beside it (`overlap.rs`), and stores: blocks lie ready in memory, both ends in one process.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{Better, Outcome, Row, Spent, outcome, spend};
use kv_core::id::BlockHash;
use kv_core::pipeline::Arrive;
use kvfleet_proto::frame::{Frame, FrameHead};
use kvfleet_proto::tls::Identity;
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{self, IDENTITY};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{AskedLayers, Dialer, FetchAnswer, Path, SliceSink};

use crate::Effort;
use crate::network::held::Held;
use crate::transport::{ANY, identities};

pub(crate) const ABOUT: &str = "a history of 64 blocks of 512 KiB, 32 layers each, fetched over loopback into memory of the \
     caller and checked: by layers, and as whole frames whose slices are copied there; from asking to the first layer of \
     all blocks, and to the last, in turn in each run";

const LAYERS: usize = 32;
const SLICE_BYTES: u32 = 16 << 10;
const BLOCKS: u32 = 64;
/// Fetches of each side in a run.
const FETCHES: u64 = 10;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (server, client) = identities()?;
    let mut rows = Vec::new();
    for way in ["TLS over TCP", "QUIC"] {
        if !effort.wants(way) {
            continue;
        }
        let node = runtime.block_on(Node::start(way, &server, &client))?;
        rows.extend(compare(effort, &runtime, way, &node)?);
    }
    ensure!(!rows.is_empty(), "no row has this in its name");
    Ok(rows)
}

/// What fetches of one side took, all together.
struct Side {
    first: Duration,
    all: Spent,
}

impl Side {
    fn ms(duration: Duration, fetches: u64) -> f64 {
        duration.as_secs_f64() * 1e3 / fetches as f64
    }
}

fn compare(
    effort: &Effort,
    runtime: &tokio::runtime::Runtime,
    way: &str,
    node: &Node,
) -> anyhow::Result<Vec<Row>> {
    let fetches = effort.scaled(FETCHES);
    let mut memory = Memory::new();
    let mut side = |by_layer: bool| {
        let mut first = Duration::ZERO;
        let (done, all) = spend(|| {
            for _ in 0..fetches {
                first += runtime.block_on(node.fetch(by_layer, &mut memory))?;
            }
            anyhow::Ok(())
        });
        done.map(|()| Side { first, all })
    };
    let mut runs = Vec::new();
    for run in 0..=effort.runs {
        let layers_first = run % 2 == 0;
        let one = side(layers_first)?;
        let other = side(!layers_first)?;
        // The first finds no memory touched and no window open.
        if run > 0 {
            runs.push(if layers_first { (one, other) } else { (other, one) });
        }
    }
    let row = |name: &str, unit: &str, of: &dyn Fn(&Side) -> f64| {
        let pairs: Vec<_> = runs.iter().map(|(layers, frames)| (of(layers), of(frames))).collect();
        let found: Outcome = outcome(&pairs);
        Row::new("layers", &format!("{name}, {way}"), unit, "whole frames", Better::Lower, found)
    };
    Ok(vec![
        row("first layer of all blocks", "ms", &|side| Side::ms(side.first, fetches)),
        row("all layers", "ms", &|side| Side::ms(side.all.wall, fetches)),
        row("all layers", "ms CPU", &|side| Side::ms(side.all.cpu, fetches)),
    ])
}

/// A node and a path to it.
struct Node {
    path: Arc<dyn Path>,
    hashes: Vec<BlockHash>,
    /// Both end when they are dropped.
    _ends: Box<dyn Any + Send + Sync>,
}

impl Node {
    async fn start(way: &str, server: &Identity, client: &Identity) -> anyhow::Result<Node> {
        let hashes = suite::hashes(BLOCKS);
        let frame = |hash: &BlockHash| suite::frame_of(*hash, &[SLICE_BYTES; LAYERS]);
        let held = Arc::new(Held::of(hashes.iter().map(frame)));
        let (path, ends): (_, Box<dyn Any + Send + Sync>) = if way == "QUIC" {
            let server = QuicServer::bind(ANY, server, held)?;
            let dialer = QuicDialer::new(client, QuicConfig::default());
            (dialer.dial(server.local_addr().to_string()).await?, Box::new((server, dialer)))
        } else {
            let server = TcpServer::bind(ANY, server, held)?;
            let dialer = TcpDialer::new(client, TcpConfig::default());
            (dialer.dial(server.local_addr().to_string()).await?, Box::new((server, dialer)))
        };
        Ok(Node { path, hashes, _ends: ends })
    }

    /// Fetches all blocks: the time until the first layer of each was in its place.
    async fn fetch(&self, by_layer: bool, memory: &mut Memory) -> anyhow::Result<Duration> {
        let request = suite::fetch_request(&self.hashes);
        let mut filling = Filling {
            memory,
            hashes: &self.hashes,
            filled: [0; LAYERS],
            came: 0,
            begun: Instant::now(),
            first: None,
        };
        let asked = AskedLayers { layers: 0..LAYERS, arrive: Arrive::ByLayer };
        let answer = if by_layer {
            self.path.fetch_layers(request, asked, &mut filling).await?
        } else {
            self.path.fetch(request, &mut |frame| filling.copy(&frame)).await?
        };
        ensure!(matches!(answer, FetchAnswer::Hit { .. }), "expected a hit, got {answer:?}");
        ensure!(filling.filled == [BLOCKS; LAYERS], "{:?} of {BLOCKS} blocks", filling.filled);
        filling.first.ok_or_else(|| anyhow::anyhow!("no layer came"))
    }
}

/// The caller's: one place for each slice.
struct Memory(Vec<u8>);

impl Memory {
    fn new() -> Memory {
        Memory(vec![1; BLOCKS as usize * LAYERS * SLICE_BYTES as usize])
    }
}

/// A fetch under way.
struct Filling<'a> {
    memory: &'a mut Memory,
    hashes: &'a [BlockHash],
    /// Blocks that have each layer.
    filled: [u32; LAYERS],
    /// Whole frames.
    came: usize,
    begun: Instant,
    first: Option<Duration>,
}

impl Filling<'_> {
    /// As a client does it that is given whole frames.
    fn copy(&mut self, frame: &Frame) {
        let position = self.came;
        self.came += 1;
        if frame.verify(IDENTITY, self.hashes[position]).is_err() {
            return;
        }
        for layer in 0..LAYERS {
            if let (Some(to), Some(from)) = (self.slice(position, layer), frame.slice(layer)) {
                to.copy_from_slice(&from);
            }
        }
        self.filled(position, 0..LAYERS);
    }
}

impl SliceSink for Filling<'_> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        head.verify(IDENTITY, self.hashes[position]).is_ok()
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let at = (position * LAYERS + layer) * SLICE_BYTES as usize;
        self.memory.0.get_mut(at..at + SLICE_BYTES as usize)
    }

    fn filled(&mut self, _: usize, layers: Range<usize>) {
        self.filled[layers].iter_mut().for_each(|count| *count += 1);
        if self.filled[0] == BLOCKS && self.first.is_none() {
            self.first = Some(self.begun.elapsed());
        }
    }

    fn wrong(&mut self, _: usize) {}

    fn received(&mut self, _: usize) {}
}
