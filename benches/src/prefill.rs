//! A prefill beside its load over a real path: blocks of a node come over TLS through a relay of a set rate into memory of the
//! engine, which follows [`Client::prefill`] with a loop of counted turns for its compute; against the longer of load and compute,
//! and against recomputing everything where the path fails.
//!
//! Not here: the rules by themselves, beside a source that costs nothing (`overlap.rs`), the relay (`prefill/relay.rs`), and a
//! node's store: blocks lie ready in memory.

mod relay;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{Better, Outcome, Row, side_by_side};
use kv_core::id::{Category, LeaseId, RequestId, TenantId};
use kv_core::pipeline::{Costs, Next};
use kvfleet_client::{
    Client, ClientConfig, FetchCall, LayerEvent, LayersCall, Prefill, PrefillCall, Transport,
};
use kvfleet_proto::tls::Identity;
use kvfleet_proto::{content, pb};
use kvfleet_transport::suite::{self, EPOCH, IDENTITY};
use kvfleet_transport::tcp::TcpServer;
use tokio::runtime::Runtime;

use crate::Effort;
use crate::network::held::Held;
use crate::overlap::Engine;
use crate::transport::{ANY, identities};
use relay::{Fault, Relay};

pub(crate) const ABOUT: &str = "a prefill of 32 layers by a loop of counted turns behind a history of 32 blocks of 512 KiB, which comes from a \
     node over TLS through a relay of a set rate, is checked, and lies in the engine's memory slice by slice; a token's history \
     loads 12.5 times as fast as it is computed. From the job's turn to its last layer; connections are open before";

const LAYERS: u32 = 32;
const BLOCKS: u32 = 32;
const SLICE_BYTES: u32 = 16 << 10;
/// Bytes of all slices.
const BYTES: u64 = (LAYERS * BLOCKS) as u64 * SLICE_BYTES as u64;
/// Compute of the new tokens.
const COMPUTE_MS: u64 = 64;
/// As in `overlap.rs`.
const COMPUTE_OVER_LOAD: u64 = 12;
/// All of recomputing, where the path fails.
const RECOMPUTE_MS: u64 = 640;

/// A block's slices.
type Room = Vec<Box<[u8]>>;

/// How a run is loaded.
#[derive(Clone, Copy, Debug)]
struct Loading {
    /// All of it, over the relay.
    load: Duration,
    fault: Fault,
    /// What was expected of it.
    bytes_per_s: u64,
    read_buffer_bytes_max: u64,
    /// A job that computes so long before its turn.
    ahead: Duration,
}

impl Loading {
    fn well(load: Duration) -> Loading {
        let bytes_per_s = rate(load);
        Loading { load, fault: Fault::None, bytes_per_s, read_buffer_bytes_max: 0, ahead: Duration::ZERO }
    }
}

fn rate(load: Duration) -> u64 {
    (BYTES as f64 / load.as_secs_f64()) as u64
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let bench = Bench::new(Engine::calibrated())?;
    let mut rows = Vec::new();
    for load in [0.25, 0.5, 1.0, 2.0, 4.0] {
        rows.extend(bench.beside(effort, load)?);
    }
    rows.extend(bench.buffered(effort, 2.0)?);
    for (name, fault) in FAILURES {
        rows.extend(bench.failing(effort, name, *fault)?);
    }
    ensure!(!rows.is_empty(), "no row has this in its name");
    Ok(rows)
}

const THIRD: u64 = BYTES / 3;

const FAILURES: &[(&str, Fault)] = &[
    ("at 1 % of its rate", Fault::Slow(100)),
    ("silent from the first byte", Fault::Silent { after: 0 }),
    ("silent after a third", Fault::Silent { after: THIRD }),
    ("cut after a third", Fault::Cut { after: THIRD }),
];

/// The node, and everything to reach it but the relay.
struct Bench {
    engine: Engine,
    runtime: Runtime,
    node: TcpServer,
    identity: Identity,
}

impl Bench {
    fn new(engine: Engine) -> anyhow::Result<Bench> {
        // One for the node and the client, as the other core is the engine's.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (server, identity) = identities()?;
        let frames = suite::hashes(BLOCKS)
            .into_iter()
            .map(|hash| suite::frame_of(hash, &[SLICE_BYTES; LAYERS as usize]));
        let held = Arc::new(Held::of(frames));
        let node = runtime.block_on(async { TcpServer::bind(ANY, &server, held) })?;
        Ok(Bench { engine, runtime, node, identity })
    }

    /// A client that is connected through a new relay, which lets everything pass until it is armed.
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
            ensure!(came.blocks.len() == 1, "a node that is well gave {came:?}");
            anyhow::Ok(client)
        })?;
        Ok((client, relay))
    }

    /// From the job's turn to its last layer.
    fn prefill(&self, costs: &Costs, loading: Loading) -> anyhow::Result<f64> {
        let (client, relay) = self.connect()?;
        let call = PrefillCall {
            fetch: fetch_call(&relay, BLOCKS),
            costs: costs.clone(),
            frame_bytes: frame_bytes(),
            bytes_per_s: loading.bytes_per_s,
            read_buffer_bytes_max: loading.read_buffer_bytes_max,
            in_flight_bytes_max: u64::MAX,
        };
        let rooms = rooms();
        relay.arm(rate(loading.load), loading.fault);
        let mut prefill = {
            let _entered = self.runtime.enter();
            client.prefill(call, rooms)?
        };
        self.engine.compute(u64::try_from(loading.ahead.as_nanos())?);
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

    fn follow(&self, costs: &Costs, prefill: &mut Prefill<Room>) {
        loop {
            match self.runtime.block_on(prefill.next()) {
                Next::Layer { .. } => {
                    let pass: u64 = prefill.pass().map(|block| costs.block_layer_ns[block as usize]).sum();
                    self.engine.compute(pass + costs.new_layer_ns);
                }
                Next::CatchUp { blocks, layers } => {
                    let one: u64 = blocks.iter().map(|block| costs.block_layer_ns[*block as usize]).sum();
                    self.engine.compute(one * u64::from(layers));
                }
                Next::Done | Next::Wait { .. } => return,
            }
        }
    }

    /// The same load by itself.
    fn load(&self, load: Duration) -> anyhow::Result<f64> {
        let (client, relay) = self.connect()?;
        let call = LayersCall {
            fetch: fetch_call(&relay, BLOCKS),
            frame_bytes: frame_bytes(),
            read_buffer_bytes: 0,
            in_flight_bytes_max: u64::MAX,
            layers_at_once: u32::MAX,
            arrive: kv_core::pipeline::Arrive::ByLayer,
        };
        let rooms = rooms();
        relay.arm(rate(load), Fault::None);
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

    fn compute(&self, costs: &Costs) -> f64 {
        let begun = Instant::now();
        (0..LAYERS).for_each(|_| self.engine.compute(costs.new_layer_ns));
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// Nothing loaded ahead, over a path that is well.
    fn beside(&self, effort: &Effort, load: f64) -> anyhow::Result<Option<Row>> {
        let name = format!("prefill over TLS beside its load, load {load} of compute");
        let (costs, load) = job(effort, load);
        let ours = || self.prefill(&costs, Loading::well(load));
        let theirs = || Ok(self.load(load)?.max(self.compute(&costs)));
        row(effort, &name, "limit 1.1: the longer of load and compute", ours, theirs)
    }

    /// Behind a job that computed so long that the read buffer was full.
    fn buffered(&self, effort: &Effort, load: f64) -> anyhow::Result<Vec<Row>> {
        let name = format!("prefill over TLS behind another job, load {load} of compute");
        let (costs, load) = job(effort, load);
        let behind = Loading { ahead: load, read_buffer_bytes_max: u64::MAX, ..Loading::well(load) };
        let none = Loading { read_buffer_bytes_max: 0, ..behind };
        let ours = || self.prefill(&costs, behind);
        let rows = [
            row(effort, &name, "no buffer", ours, || self.prefill(&costs, none))?,
            row(effort, &name, "limit 1.1: compute alone", ours, || Ok(self.compute(&costs)))?,
        ];
        Ok(rows.into_iter().flatten().collect())
    }

    fn failing(&self, effort: &Effort, name: &str, fault: Fault) -> anyhow::Result<Option<Row>> {
        let recompute_ns = effort.scaled(RECOMPUTE_MS) * 1_000_000;
        let costs = costs(recompute_ns - recompute_ns / 10, recompute_ns / 10);
        let load = Duration::from_nanos(recompute_ns / 10);
        let ours = || self.prefill(&costs, Loading { fault, ..Loading::well(load) });
        let theirs = || Ok(self.engine.recompute(&costs).as_secs_f64() * 1e3);
        row(effort, &format!("path over TLS {name}"), "limit 1.02: recomputing all", ours, theirs)
    }
}

/// A job of which loading takes `load` times as long as computing its new tokens, and how long that is.
fn job(effort: &Effort, load: f64) -> (Costs, Duration) {
    let compute_ns = effort.scaled(COMPUTE_MS) * 1_000_000;
    let load_ns = (compute_ns as f64 * load) as u64;
    (costs(load_ns * COMPUTE_OVER_LOAD, compute_ns), Duration::from_nanos(load_ns))
}

fn costs(hist_ns: u64, compute_ns: u64) -> Costs {
    Costs {
        block_layer_ns: vec![hist_ns / u64::from(LAYERS * BLOCKS); BLOCKS as usize],
        new_layer_ns: compute_ns / u64::from(LAYERS),
        layers: LAYERS,
    }
}

fn rooms() -> Vec<Room> {
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

/// Both sides in turn, unless the row is not wanted.
fn row(
    effort: &Effort,
    name: &str,
    peer: &str,
    ours: impl Fn() -> anyhow::Result<f64>,
    theirs: impl Fn() -> anyhow::Result<f64>,
) -> anyhow::Result<Option<Row>> {
    if !effort.wants(name) {
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
        None => Ok(Some(Row::new("prefill", name, "ms", peer, Better::Lower, found))),
    }
}
