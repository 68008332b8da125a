//! Both network paths beside each other and beside bare transports: GB/s, and GB per CPU-second of
//! both ends.
//!
//! Every side serves bytes that lie ready in memory. Client and server share one process, so a
//! CPU-second counts both ends. Further rows measure the better path in front of a node
//! (`node.rs`), and a node's memory under load (`bound.rs`). Not here: the cost of a fetch by its
//! number of blocks (`transport.rs`).

mod bound;
pub(crate) mod memory_blocks;
mod node;
mod threads;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{BenchRow, Better, TimeSpent, measure_time, outcome};
use kv_core::id::BlockHash;
use kvfleet_net::tls::Identity;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{self, IDENTITY, PATIENCE};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{BoxFuture, Dialer, FetchAnswer, Path};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::Effort;
use crate::transport::raw::{RawQuic, RawTcp, Tuning};
use crate::transport::{ANY, identities};
use memory_blocks::MemoryBlocks;
use threads::ThreadTcp;

pub(crate) const ABOUT: &str = "fetches over loopback, by both network paths, every frame verified (CRC32C, \
    hash, identity); against each other, bare stream loops on quinn with stock settings and with ours (same \
    certificates, no verification; one cached piece, dropped on arrival, or bytes from memory reassembled in \
    memory), and as limits bare TCP loops without encryption, on the runtime and on blocking threads; the \
    starting side alternates. For a node: a node in a separate process, with blocks leased and read from its \
    DRAM tier";

/// Parameters of the fetches.
struct FetchShape {
    name: &'static str,
    block_bytes: u32,
    /// Blocks per fetch.
    blocks: u32,
    in_flight: usize,
}

impl FetchShape {
    fn fetch_bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }
}

const SHAPES: &[FetchShape] = &[
    FetchShape { name: "GET 64 KiB, 1 in flight", block_bytes: 64 << 10, blocks: 1, in_flight: 1 },
    FetchShape { name: "GET 16 x 64 KiB, 1 in flight", block_bytes: 64 << 10, blocks: 16, in_flight: 1 },
    FetchShape { name: "GET 1 MiB, 1 in flight", block_bytes: 1 << 20, blocks: 1, in_flight: 1 },
    FetchShape { name: "GET 64 KiB, 64 in flight", block_bytes: 64 << 10, blocks: 1, in_flight: 64 },
];

/// Bytes fetched per run and side.
const RUN_BYTES: u64 = 512 << 20;

/// Bytes of distinct blocks: more than a cache holds.
const HELD_BYTES: u32 = 64 << 20;

const TLS: &str = "TLS over TCP";
const QUIC: &str = "QUIC";

/// Sides in the order of `measure`.
const SIDES: [&str; 7] = [
    TLS,
    QUIC,
    "quinn 0.11.12, stock settings",
    "quinn 0.11.12 with our settings",
    "the same from memory into memory",
    "limit: tokio TCP, no encryption",
    "limit: blocking TCP, no encryption",
];

/// Compared sides, and the target ratio per CPU-second.
const PAIRS: &[(usize, usize, &str)] = &[
    (0, 2, "limit 3: "),
    (0, 1, ""),
    (0, 5, ""),
    (0, 6, ""),
    (1, 2, "limit 1.8: "),
    (1, 3, "limit 0.9: "),
    (1, 4, ""),
    (1, 5, ""),
];

/// A loop that moves as many distinct bytes as our path does.
const MEMORY_TUNING: Tuning = Tuning { moves_memory: true, ..Tuning::OURS };

/// The reported rates of each pair.
const RATES: [(&str, RateFn); 2] = [
    ("GB/CPU-s", |spent, bytes| spent.per_cpu_s(bytes) / 1e9),
    ("GB/s", |spent, bytes| spent.per_wall_s(bytes) / 1e9),
];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (server, client) = identities()?;
    let mut rows = Vec::new();
    for shape in SHAPES.iter().filter(|shape| effort.is_selected(shape.name)) {
        let sides = runtime.block_on(NetworkSides::start(&server, &client, shape))?;
        rows.extend(compare(effort, &runtime, shape, &sides)?);
    }
    rows.extend(node::rows(effort, &runtime, &server, &client)?);
    rows.extend(bound::rows(effort, &runtime)?);
    Ok(rows)
}

/// A source that fetches one block of a shape's size per request.
pub(crate) trait FetchSide: Send + Sync {
    /// Fetches with different numbers may run concurrently if their remainders by the shape's
    /// `in_flight` differ.
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>>;
}

/// All sides, connected.
struct NetworkSides {
    async_sides: [Arc<dyn FetchSide>; 6],
    threads: ThreadTcp,
}

impl NetworkSides {
    async fn start(server: &Identity, client: &Identity, shape: &FetchShape) -> anyhow::Result<Self> {
        let bytes = shape.fetch_bytes();
        Ok(Self {
            async_sides: [
                Arc::new(OwnPath::start_tls(server, client, shape).await?),
                Arc::new(OwnPath::start_quic(server, client, shape).await?),
                Arc::new((RawQuic::start(server, client).await?, bytes)),
                Arc::new((RawQuic::tuned(server, client, &Tuning::OURS).await?, bytes)),
                Arc::new((RawQuic::tuned(server, client, &MEMORY_TUNING).await?, bytes)),
                Arc::new((RawTcp::start(shape.in_flight).await?, bytes)),
            ],
            threads: ThreadTcp::start(shape.in_flight).await?,
        })
    }

    /// One run of every side, starting with number `first`.
    fn measure(
        &self,
        runtime: &Runtime,
        shape: &FetchShape,
        fetches: u64,
        first: usize,
    ) -> anyhow::Result<[TimeSpent; SIDES.len()]> {
        let mut spent = [TimeSpent { wall: Duration::ZERO, cpu: Duration::ZERO }; SIDES.len()];
        for turn in 0..SIDES.len() {
            let side = (first + turn) % SIDES.len();
            let (done, took) = measure_time(|| match self.async_sides.get(side) {
                Some(asked) => runtime.block_on(fetch_concurrently(asked, fetches, shape.in_flight)),
                None => self.threads.fetch_all(fetches, shape.fetch_bytes()),
            });
            done.with_context(|| format!("{} broke: {}", SIDES[side], shape.name))?;
            spent[side] = took;
        }
        Ok(spent)
    }
}

/// Runs `fetches` fetches, `at_once` at a time.
pub(crate) async fn fetch_concurrently(
    side: &Arc<dyn FetchSide>,
    fetches: u64,
    at_once: usize,
) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    for task in 0..at_once as u64 {
        let side = Arc::clone(side);
        tasks.spawn(async move {
            for at in (task..fetches).step_by(at_once) {
                side.fetch(at).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// Converts time and bytes to a rate.
pub(crate) type RateFn = fn(&TimeSpent, u64) -> f64;

fn compare(
    effort: &Effort,
    runtime: &Runtime,
    shape: &FetchShape,
    sides: &NetworkSides,
) -> anyhow::Result<Vec<BenchRow>> {
    let bytes = shape.fetch_bytes();
    let at_once = shape.in_flight as u64;
    let fetches = effort.scaled(RUN_BYTES).div_ceil(bytes * at_once) * at_once;
    let mut runs = Vec::new();
    for run in 0..=effort.runs {
        let spent = sides.measure(runtime, shape, fetches, run)?;
        // The first run warms caches and opens windows.
        if run > 0 {
            runs.push(spent);
        }
    }
    let mut rows = Vec::new();
    for (unit, rate) in RATES {
        for &(ours, theirs, reach) in PAIRS {
            let of = |side: usize, spent: &[TimeSpent; SIDES.len()]| rate(&spent[side], fetches * bytes);
            let pairs: Vec<_> = runs.iter().map(|spent| (of(ours, spent), of(theirs, spent))).collect();
            let name = format!("{}, {}", shape.name, SIDES[ours]);
            let reach = if unit == "GB/CPU-s" { reach } else { "" };
            let peer = format!("{reach}{}", SIDES[theirs]);
            rows.push(BenchRow::new("network", &name, unit, &peer, Better::Higher, outcome(&pairs)));
        }
    }
    Ok(rows)
}

/// One of our paths, and the blocks it serves.
struct OwnPath {
    path: Arc<dyn Path>,
    hashes: Vec<BlockHash>,
    /// Blocks per fetch.
    blocks: usize,
    /// Dropping it stops both ends.
    _ends: Box<dyn Any + Send + Sync>,
}

impl OwnPath {
    fn memory_blocks(shape: &FetchShape) -> (Arc<MemoryBlocks>, Vec<BlockHash>) {
        let blocks = HELD_BYTES / shape.block_bytes;
        (Arc::new(MemoryBlocks::new(blocks, shape.block_bytes)), suite::hashes(blocks))
    }

    async fn start_tls(server: &Identity, client: &Identity, shape: &FetchShape) -> anyhow::Result<Self> {
        let (held, hashes) = Self::memory_blocks(shape);
        let server = TcpServer::bind(ANY, server, held)?;
        let dialer = TcpDialer::new(client, TcpConfig::default());
        let path = dialer.dial(server.local_addr().to_string()).await?;
        Ok(Self { path, hashes, blocks: shape.blocks as usize, _ends: Box::new((server, dialer)) })
    }

    async fn start_quic(server: &Identity, client: &Identity, shape: &FetchShape) -> anyhow::Result<Self> {
        let (held, hashes) = Self::memory_blocks(shape);
        let server = QuicServer::bind(ANY, server, held)?;
        let dialer = QuicDialer::new(client, QuicConfig::default());
        let path = dialer.dial(server.local_addr().to_string()).await?;
        Ok(Self { path, hashes, blocks: shape.blocks as usize, _ends: Box::new((server, dialer)) })
    }
}

impl FetchSide for OwnPath {
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(async move {
            let from = at as usize * self.blocks % self.hashes.len();
            let wanted = &self.hashes[from..from + self.blocks];
            let mut verified = 0;
            let mut sink = |frame: Frame| {
                let hash = wanted.get(verified).copied().unwrap_or_default();
                verified += usize::from(frame.verify(IDENTITY, hash).is_ok());
            };
            let answer = self.path.fetch(suite::fetch_request(wanted), &mut sink).await?;
            ensure!(matches!(answer, FetchAnswer::Hit { .. }), "expected a hit, got {answer:?}");
            ensure!(verified == wanted.len(), "{verified} of {} blocks were verified", wanted.len());
            Ok(())
        })
    }
}

impl FetchSide for (RawQuic, u64) {
    fn fetch(&self, _: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(self.0.fetch(self.1))
    }
}

impl FetchSide for (RawTcp, u64) {
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(self.0.fetch_as(at, self.1))
    }
}
