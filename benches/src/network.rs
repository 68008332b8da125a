//! Both network paths beside each other and beside the wires they run on: GB/s, and GB for a CPU-second of both ends.
//!
//! Every side serves bytes that lie ready in memory, client and server in one process, so a CPU-second counts both ends; then the
//! better path once more in front of a node (`node.rs`), and what such a node keeps under load (`bound.rs`). Not here: what a fetch costs with more blocks in it (`transport.rs`).

mod bound;
pub(crate) mod held;
mod node;
mod threads;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{Better, Row, Spent, outcome, spend};
use kv_core::id::BlockHash;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::tls::Identity;
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{self, IDENTITY, PATIENCE};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{BoxFuture, Dialer, FetchAnswer, Path};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::Effort;
use crate::transport::raw::{RawQuic, RawTcp, Tuning};
use crate::transport::{ANY, identities};
use held::Held;
use threads::ThreadTcp;

pub(crate) const ABOUT: &str = "fetches over loopback, by both network paths, every frame verified (CRC32C, hash, identity); \
     against each other, bare stream loops on quinn with stock settings and with ours (same certificates, nothing verified; one piece from a cache, dropped as it comes, \
     or bytes from memory put together in memory), and as \
     limits bare TCP loops without encryption, on the runtime and on blocking threads; all sides in turn in each run. Of a node: a \
     node in a process of its own, what is fetched leased and from its DRAM tier";

/// What is fetched.
struct Shape {
    name: &'static str,
    block_bytes: u32,
    /// Blocks of one fetch.
    blocks: u32,
    in_flight: usize,
}

impl Shape {
    fn fetch_bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }
}

const SHAPES: &[Shape] = &[
    Shape { name: "GET 64 KiB, 1 in flight", block_bytes: 64 << 10, blocks: 1, in_flight: 1 },
    Shape { name: "GET 16 x 64 KiB, 1 in flight", block_bytes: 64 << 10, blocks: 16, in_flight: 1 },
    Shape { name: "GET 1 MiB, 1 in flight", block_bytes: 1 << 20, blocks: 1, in_flight: 1 },
    Shape { name: "GET 64 KiB, 64 in flight", block_bytes: 64 << 10, blocks: 1, in_flight: 64 },
];

/// Bytes fetched per run and side.
const RUN_BYTES: u64 = 512 << 20;

/// Bytes of different blocks, so that what is sent does not lie in a cache.
const HELD_BYTES: u32 = 64 << 20;

const TLS: &str = "TLS over TCP";
const QUIC: &str = "QUIC";

/// Sides in the order in which `measure` gives them.
const SIDES: [&str; 7] = [
    TLS,
    QUIC,
    "quinn 0.11.12, stock settings",
    "quinn 0.11.12 with our settings",
    "the same from memory into memory",
    "limit: tokio TCP, no encryption",
    "limit: blocking TCP, no encryption",
];

/// Which are set beside which, and what has to be reached of the other for a CPU-second.
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

/// A loop that moves as many other bytes as our path does.
const MOVING: Tuning = Tuning { moves_memory: true, ..Tuning::OURS };

/// What is said of each pair.
const RATES: [(&str, Rate); 2] = [
    ("GB/CPU-s", |spent, bytes| spent.per_cpu_s(bytes) / 1e9),
    ("GB/s", |spent, bytes| spent.per_wall_s(bytes) / 1e9),
];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let identities = identities()?;
    let mut rows = Vec::new();
    for shape in SHAPES.iter().filter(|shape| effort.wants(shape.name)) {
        let sides = runtime.block_on(Sides::start(&identities, shape))?;
        rows.extend(compare(effort, &runtime, shape, &sides)?);
    }
    rows.extend(node::rows(effort, &runtime, &identities)?);
    rows.extend(bound::rows(effort, &runtime)?);
    Ok(rows)
}

/// Something that fetches one block of a shape's size when asked.
pub(crate) trait Side: Send + Sync {
    /// Fetches with different numbers may run at a time as long as their remainders by the shape's `in_flight`
    /// differ.
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>>;
}

/// All of them, ready to be asked.
struct Sides {
    asked: [Arc<dyn Side>; 6],
    threads: ThreadTcp,
}

impl Sides {
    async fn start((server, client): &(Identity, Identity), shape: &Shape) -> anyhow::Result<Self> {
        let bytes = shape.fetch_bytes();
        Ok(Self {
            asked: [
                Arc::new(Ours::start_tls(server, client, shape).await?),
                Arc::new(Ours::start_quic(server, client, shape).await?),
                Arc::new((RawQuic::start(server, client).await?, bytes)),
                Arc::new((RawQuic::tuned(server, client, &Tuning::OURS).await?, bytes)),
                Arc::new((RawQuic::tuned(server, client, &MOVING).await?, bytes)),
                Arc::new((RawTcp::start(shape.in_flight).await?, bytes)),
            ],
            threads: ThreadTcp::start(shape.in_flight).await?,
        })
    }

    /// One run of every side, the one with this number first.
    fn measure(
        &self,
        runtime: &Runtime,
        shape: &Shape,
        fetches: u64,
        first: usize,
    ) -> anyhow::Result<[Spent; SIDES.len()]> {
        let mut spent = [Spent { wall: Duration::ZERO, cpu: Duration::ZERO }; SIDES.len()];
        for turn in 0..SIDES.len() {
            let side = (first + turn) % SIDES.len();
            let (done, took) = spend(|| match self.asked.get(side) {
                Some(asked) => runtime.block_on(share(asked, fetches, shape.in_flight)),
                None => self.threads.fetch_all(fetches, shape.fetch_bytes()),
            });
            done.with_context(|| format!("{} broke: {}", SIDES[side], shape.name))?;
            spent[side] = took;
        }
        Ok(spent)
    }
}

/// So many fetches, so many at a time.
pub(crate) async fn share(side: &Arc<dyn Side>, fetches: u64, at_once: usize) -> anyhow::Result<()> {
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

/// What so many bytes come to.
pub(crate) type Rate = fn(&Spent, u64) -> f64;

fn compare(effort: &Effort, runtime: &Runtime, shape: &Shape, sides: &Sides) -> anyhow::Result<Vec<Row>> {
    let bytes = shape.fetch_bytes();
    let at_once = shape.in_flight as u64;
    let fetches = effort.scaled(RUN_BYTES).div_ceil(bytes * at_once) * at_once;
    let mut runs = Vec::new();
    for run in 0..=effort.runs {
        let spent = sides.measure(runtime, shape, fetches, run)?;
        // The first finds no cache warm and no window open.
        if run > 0 {
            runs.push(spent);
        }
    }
    let mut rows = Vec::new();
    for (unit, rate) in RATES {
        for &(ours, theirs, reach) in PAIRS {
            let of = |side: usize, spent: &[Spent; SIDES.len()]| rate(&spent[side], fetches * bytes);
            let pairs: Vec<_> = runs.iter().map(|spent| (of(ours, spent), of(theirs, spent))).collect();
            let name = format!("{}, {}", shape.name, SIDES[ours]);
            let reach = if unit == "GB/CPU-s" { reach } else { "" };
            let peer = format!("{reach}{}", SIDES[theirs]);
            rows.push(Row::new("network", &name, unit, &peer, Better::Higher, outcome(&pairs)));
        }
    }
    Ok(rows)
}

/// One of our paths, and the blocks behind it.
struct Ours {
    path: Arc<dyn Path>,
    hashes: Vec<BlockHash>,
    /// Blocks of one fetch.
    blocks: usize,
    /// Both end when they are dropped.
    _ends: Box<dyn Any + Send + Sync>,
}

impl Ours {
    fn held(shape: &Shape) -> (Arc<Held>, Vec<BlockHash>) {
        let blocks = HELD_BYTES / shape.block_bytes;
        (Arc::new(Held::new(blocks, shape.block_bytes)), suite::hashes(blocks))
    }

    async fn start_tls(server: &Identity, client: &Identity, shape: &Shape) -> anyhow::Result<Self> {
        let (held, hashes) = Self::held(shape);
        let server = TcpServer::bind(ANY, server, held)?;
        let dialer = TcpDialer::new(client, TcpConfig::default());
        let path = dialer.dial(server.local_addr().to_string()).await?;
        Ok(Self { path, hashes, blocks: shape.blocks as usize, _ends: Box::new((server, dialer)) })
    }

    async fn start_quic(server: &Identity, client: &Identity, shape: &Shape) -> anyhow::Result<Self> {
        let (held, hashes) = Self::held(shape);
        let server = QuicServer::bind(ANY, server, held)?;
        let dialer = QuicDialer::new(client, QuicConfig::default());
        let path = dialer.dial(server.local_addr().to_string()).await?;
        Ok(Self { path, hashes, blocks: shape.blocks as usize, _ends: Box::new((server, dialer)) })
    }
}

impl Side for Ours {
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

impl Side for (RawQuic, u64) {
    fn fetch(&self, _: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(self.0.fetch(self.1))
    }
}

impl Side for (RawTcp, u64) {
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(self.0.fetch_as(at, self.1))
    }
}
