//! A prefill beside its load over a real path. Blocks come from a node over TLS, through a relay of
//! a set rate, into the engine's memory. The engine follows [`Client::prefill`] with a calibrated
//! loop as its compute. The peers are the longer of load and compute, and full recomputation if the
//! path fails.
//!
//! Not here: the rules alone beside a source without costs (`overlap.rs`), the relay
//! (`prefill/relay.rs`), and a node's store: blocks lie ready in memory.

mod relay;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{BenchRow, Better, Outcome, side_by_side};
use kv_core::content;
use kv_core::id::{Category, LeaseId, RequestId, TenantId};
use kv_core::pipeline::{ComputeCosts, NextAction};
use kvfleet_client::{
    Client, ClientConfig, FetchCall, LayerEvent, LayerFetchCall, Prefill, PrefillCall, Transport,
};
use kvfleet_net::tls::Identity;
use kvfleet_proto::pb;
use kvfleet_transport::suite::{self, EPOCH, IDENTITY};
use kvfleet_transport::tcp::TcpServer;
use tokio::runtime::Runtime;

use crate::Effort;
use crate::network::memory_blocks::MemoryBlocks;
use crate::overlap::EmulatedEngine;
use crate::transport::{ANY, identities};
use relay::{Relay, RelayFault};

pub(crate) const ABOUT: &str = "a prefill of 32 layers by a calibrated loop after a history of 32 blocks of \
    512 KiB, which comes from a node over TLS through a relay of a set rate, is verified, and is placed in \
    the engine's memory slice by slice; a token's history loads 12.5 times as fast as it is computed. From \
    the job's turn to its last layer, on open connections";

const LAYERS: u32 = 32;
const BLOCKS: u32 = 32;
const SLICE_BYTES: u32 = 16 << 10;
/// Bytes of all slices.
const BYTES: u64 = (LAYERS * BLOCKS) as u64 * SLICE_BYTES as u64;
/// Compute time of the new tokens.
const COMPUTE_MS: u64 = 64;
/// As in `overlap.rs`.
const COMPUTE_OVER_LOAD: u64 = 12;
/// Time to recompute everything if the path fails.
const RECOMPUTE_MS: u64 = 640;

/// A block's slices.
type BlockBuffer = Vec<Box<[u8]>>;

/// How a run is loaded.
#[derive(Clone, Copy, Debug)]
struct LoadPlan {
    /// Load time of all slices over the relay.
    load: Duration,
    fault: RelayFault,
    /// Expected rate of the load.
    bytes_per_s: u64,
    read_buffer_bytes_max: u64,
    /// Compute time of another job before this one's turn.
    compute_before: Duration,
}

impl LoadPlan {
    fn healthy(load: Duration) -> LoadPlan {
        let bytes_per_s = rate(load);
        LoadPlan {
            load,
            fault: RelayFault::None,
            bytes_per_s,
            read_buffer_bytes_max: 0,
            compute_before: Duration::ZERO,
        }
    }
}

fn rate(load: Duration) -> u64 {
    (BYTES as f64 / load.as_secs_f64()) as u64
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let bench = PrefillBench::new(EmulatedEngine::calibrated())?;
    let mut rows = Vec::new();
    for load in [0.25, 0.5, 1.0, 2.0, 4.0] {
        rows.extend(bench.overlapped(effort, load)?);
    }
    rows.extend(bench.buffered(effort, 2.0)?);
    for (name, fault) in FAILURES {
        rows.extend(bench.failing(effort, name, *fault)?);
    }
    ensure!(!rows.is_empty(), "no row name contains the --only text");
    Ok(rows)
}

const THIRD: u64 = BYTES / 3;

const FAILURES: &[(&str, RelayFault)] = &[
    ("at 1 % of its rate", RelayFault::Slow(100)),
    ("silent from the first byte", RelayFault::Silent { after: 0 }),
    ("silent after a third", RelayFault::Silent { after: THIRD }),
    ("cut after a third", RelayFault::Disconnect { after: THIRD }),
];

/// The node, and the connection parameters other than the relay.
struct PrefillBench {
    engine: EmulatedEngine,
    runtime: Runtime,
    node: TcpServer,
    identity: Identity,
}

impl PrefillBench {
    fn new(engine: EmulatedEngine) -> anyhow::Result<PrefillBench> {
        // One thread for the node and the client; the other core belongs to the engine.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (server, identity) = identities()?;
        let frames = suite::hashes(BLOCKS)
            .into_iter()
            .map(|hash| suite::frame_of(hash, &[SLICE_BYTES; LAYERS as usize]));
        let held = Arc::new(MemoryBlocks::from_frames(frames));
        let node = runtime.block_on(async { TcpServer::bind(ANY, &server, held) })?;
        Ok(PrefillBench { engine, runtime, node, identity })
    }

    /// A client connected through a new relay, which does not limit traffic until it is armed.
    fn connect(&self) -> anyhow::Result<(Client, Relay)> {
        let relay = Relay::start(self.node.local_addr())?;
        let client = self.runtime.block_on(async {
            let routers = vec!["127.0.0.1:1".to_owned()];
            let config = ClientConfig {
                transport: Transport::Tcp,
                ..ClientConfig::new(routers, self.identity.clone())
            };
            let client = Client::new(config)?;
            let one = FetchCall { hashes: suite::hashes(1), ..fetch_call(&relay, 1) };
            let came = client.fetch(one).await?;
            ensure!(came.blocks.len() == 1, "a healthy node returned {came:?}");
            anyhow::Ok(client)
        })?;
        Ok((client, relay))
    }

    /// Time from the job's turn to its last layer.
    fn prefill(&self, costs: &ComputeCosts, loading: LoadPlan) -> anyhow::Result<f64> {
        let (client, relay) = self.connect()?;
        let call = PrefillCall {
            fetch: fetch_call(&relay, BLOCKS),
            costs: costs.clone(),
            frame_bytes: frame_bytes(),
            bytes_per_s: loading.bytes_per_s,
            read_buffer_bytes_max: loading.read_buffer_bytes_max,
            in_flight_bytes_max: u64::MAX,
        };
        let rooms = buffers();
        relay.arm(rate(loading.load), loading.fault);
        let mut prefill = {
            let _entered = self.runtime.enter();
            client.prefill(call, rooms)?
        };
        self.engine.compute(u64::try_from(loading.compute_before.as_nanos())?);
        let begun = Instant::now();
        prefill.begin();
        self.follow(costs, &mut prefill);
        let took = begun.elapsed();
        let end = prefill.end();
        for (block, room) in &end.arrived {
            ensure!(content::matches(suite::hash(*block), &room.concat()), "wrong bytes in block {block}");
        }
        Ok(took.as_secs_f64() * 1e3)
    }

    fn follow(&self, costs: &ComputeCosts, prefill: &mut Prefill<BlockBuffer>) {
        loop {
            match self.runtime.block_on(prefill.next()) {
                NextAction::Layer { .. } => {
                    let pass: u64 = prefill.wave().map(|block| costs.block_layer_ns[block as usize]).sum();
                    self.engine.compute(pass + costs.new_layer_ns);
                }
                NextAction::CatchUp { blocks, layers } => {
                    let one: u64 = blocks.iter().map(|block| costs.block_layer_ns[*block as usize]).sum();
                    self.engine.compute(one * u64::from(layers));
                }
                NextAction::Done | NextAction::Wait { .. } => return,
            }
        }
    }

    /// Time of the same load alone.
    fn load(&self, load: Duration) -> anyhow::Result<f64> {
        let (client, relay) = self.connect()?;
        let call = LayerFetchCall {
            fetch: fetch_call(&relay, BLOCKS),
            frame_bytes: frame_bytes(),
            read_buffer_bytes: 0,
            in_flight_bytes_max: u64::MAX,
            layers_per_request: u32::MAX,
            arrival_order: kv_core::pipeline::ArrivalOrder::ByLayer,
        };
        let rooms = buffers();
        relay.arm(rate(load), RelayFault::None);
        let begun = Instant::now();
        let blocks = self.runtime.block_on(async {
            let mut fetch = client.fetch_layers(call, rooms)?;
            fetch.begin();
            let mut blocks = 0;
            while let Some(event) = fetch.next().await {
                blocks += u32::from(matches!(event, LayerEvent::Arrived { .. }));
            }
            anyhow::Ok(blocks)
        })?;
        ensure!(blocks == BLOCKS, "{blocks} of {BLOCKS} blocks came");
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }

    fn compute(&self, costs: &ComputeCosts) -> f64 {
        let begun = Instant::now();
        (0..LAYERS).for_each(|_| self.engine.compute(costs.new_layer_ns));
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// No preload, over a healthy path.
    fn overlapped(&self, effort: &Effort, load: f64) -> anyhow::Result<Option<BenchRow>> {
        let name = format!("prefill over TLS beside its load, load {load} of compute");
        let (costs, load) = job(effort, load);
        let ours = || self.prefill(&costs, LoadPlan::healthy(load));
        let theirs = || Ok(self.load(load)?.max(self.compute(&costs)));
        row(effort, &name, "limit 1.1: the longer of load and compute", ours, theirs)
    }

    /// After a job that ran until the read buffer was full.
    fn buffered(&self, effort: &Effort, load: f64) -> anyhow::Result<Vec<BenchRow>> {
        let name = format!("prefill over TLS behind another job, load {load} of compute");
        let (costs, load) = job(effort, load);
        let behind =
            LoadPlan { compute_before: load, read_buffer_bytes_max: u64::MAX, ..LoadPlan::healthy(load) };
        let none = LoadPlan { read_buffer_bytes_max: 0, ..behind };
        let ours = || self.prefill(&costs, behind);
        let rows = [
            row(effort, &name, "no buffer", ours, || self.prefill(&costs, none))?,
            row(effort, &name, "limit 1.1: compute alone", ours, || Ok(self.compute(&costs)))?,
        ];
        Ok(rows.into_iter().flatten().collect())
    }

    fn failing(&self, effort: &Effort, name: &str, fault: RelayFault) -> anyhow::Result<Option<BenchRow>> {
        let recompute_ns = effort.scaled(RECOMPUTE_MS) * 1_000_000;
        let costs = costs(recompute_ns - recompute_ns / 10, recompute_ns / 10);
        let load = Duration::from_nanos(recompute_ns / 10);
        let ours = || self.prefill(&costs, LoadPlan { fault, ..LoadPlan::healthy(load) });
        let theirs = || Ok(self.engine.recompute(&costs).as_secs_f64() * 1e3);
        row(effort, &format!("path over TLS {name}"), "limit 1.02: recomputing all", ours, theirs)
    }
}

/// A job that loads `load` times as long as it computes its new tokens, and its load time.
fn job(effort: &Effort, load: f64) -> (ComputeCosts, Duration) {
    let compute_ns = effort.scaled(COMPUTE_MS) * 1_000_000;
    let load_ns = (compute_ns as f64 * load) as u64;
    (costs(load_ns * COMPUTE_OVER_LOAD, compute_ns), Duration::from_nanos(load_ns))
}

fn costs(hist_ns: u64, compute_ns: u64) -> ComputeCosts {
    ComputeCosts {
        block_layer_ns: vec![hist_ns / u64::from(LAYERS * BLOCKS); BLOCKS as usize],
        new_layer_ns: compute_ns / u64::from(LAYERS),
        layers: LAYERS,
    }
}

fn buffers() -> Vec<BlockBuffer> {
    // Written once before, as an engine's memory is.
    let room = || (0..LAYERS).map(|_| vec![1; SLICE_BYTES as usize].into()).collect();
    (0..BLOCKS).map(|_| room()).collect()
}

fn frame_bytes() -> u64 {
    suite::frame_of(suite::hash(0), &[SLICE_BYTES; LAYERS as usize]).bytes.len() as u64
}

fn fetch_call(relay: &Relay, blocks: u32) -> FetchCall {
    let source = pb::Source {
        node: 0,
        epoch: EPOCH.0,
        address: relay.address().to_string(),
        start_blocks: 0,
        len_blocks: blocks,
        tier: 1,
    };
    FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: suite::hashes(blocks),
        resident_blocks: 0,
        sources: vec![source],
        deadline: Duration::from_secs(60),
        class: None,
    }
}

/// Both sides in turn; `None` if the row is not selected.
fn row(
    effort: &Effort,
    name: &str,
    peer: &str,
    ours: impl Fn() -> anyhow::Result<f64>,
    theirs: impl Fn() -> anyhow::Result<f64>,
) -> anyhow::Result<Option<BenchRow>> {
    if !effort.is_selected(name) {
        return Ok(None);
    }
    let failed = std::cell::RefCell::new(None);
    let note = |side: anyhow::Result<f64>| {
        side.unwrap_or_else(|error| {
            failed.borrow_mut().get_or_insert(error);
            f64::NAN
        })
    };
    let found: Outcome = side_by_side(effort.runs, || note(ours()), || note(theirs()));
    match failed.into_inner() {
        Some(error) => Err(error),
        None => Ok(Some(BenchRow::new("prefill", name, "ms", peer, Better::Lower, found))),
    }
}
