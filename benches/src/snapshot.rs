//! A snapshot of a large replica: its cost for entries that are applied meanwhile, and the time to
//! install it on an empty replica.
//!
//! Not here: the connection between two routers. The parts go from one replica's file to the other
//! as the call would carry them, in one process.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use benches::{BenchRow, Better, next_hash, outcome, thread_cpu_time};
use kv_core::id::{BlockHash, Epoch, IdentityDigest, NodeId, Seq, Tier};
use kv_core::index::command::{Announcement, Change, Command, NodeRecord};
use kvfleet_router::ReplicaProbe;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Effort;

pub(crate) const ABOUT: &str = "one replica of 10 M entries (64 nodes, chains of 500 blocks) with its files \
    on disk: the longest time to apply one command of 1,024 blocks during a snapshot, against the same \
    commands without a snapshot and against 10 ms; and the installation of that snapshot on an empty replica \
    (file, stream of parts, checks, restore, file, sync; without TCP and TLS), against 5 s";

const ENTRIES: u64 = 10_000_000;
const NODES: u32 = 64;
const CHAIN_BLOCKS: usize = 500;
/// Blocks per announcement; one per node makes a command of 1,024.
const RUN_BLOCKS: usize = 16;
const COMMAND_BLOCKS: u64 = NODES as u64 * RUN_BLOCKS as u64;
const SEED: u64 = 20_240_712;

/// Limits of a stall and of an installation.
const STALL_MS: f64 = 10.0;
const INSTALL_S: f64 = 5.0;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let directory = tempfile::tempdir()?;
    let replica = ReplicaProbe::open(directory.path())?;
    let mut load = ReplicaLoad::new();
    for command in load.joins().chain((0..effort.scaled(ENTRIES) / COMMAND_BLOCKS).map(|_| load.growth())) {
        replica.apply(&command)?;
    }
    let mut rows = Vec::new();
    rows.extend(stalls(effort, &replica, &mut load, "growing chains", ReplicaLoad::growth)?);
    rows.extend(stalls(
        effort,
        &replica,
        &mut load,
        "dropping scattered chain ends",
        ReplicaLoad::scattered_drops,
    )?);
    rows.push(installs(effort, &replica)?);
    Ok(rows)
}

/// Longest times of a run, in milliseconds.
#[derive(Clone, Copy, Default)]
struct LongestTimes {
    wall: f64,
    cpu: f64,
    commands: u64,
}

impl LongestTimes {
    fn apply(&mut self, replica: &ReplicaProbe, command: &Command) -> anyhow::Result<()> {
        let before = thread_cpu_time();
        let wall = replica.apply(command)?;
        let cpu = thread_cpu_time() - before;
        self.wall = self.wall.max(wall.as_secs_f64() * 1e3);
        self.cpu = self.cpu.max(cpu.as_secs_f64() * 1e3);
        self.commands += 1;
        Ok(())
    }
}

/// Applies commands during a snapshot, then as many without.
fn stalls(
    effort: &Effort,
    replica: &ReplicaProbe,
    load: &mut ReplicaLoad,
    name: &str,
    next: impl Fn(&mut ReplicaLoad) -> Command,
) -> anyhow::Result<Vec<BenchRow>> {
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..effort.runs {
        let making = replica.clone();
        let making = std::thread::spawn(move || making.snapshot());
        let mut with = LongestTimes::default();
        while !making.is_finished() {
            with.apply(replica, &next(load))?;
        }
        making.join().ok().context("the snapshot thread panicked")??;
        let mut without = LongestTimes::default();
        while without.commands < with.commands {
            without.apply(replica, &next(load))?;
        }
        wall.push((with.wall, without.wall));
        cpu.push((with.cpu, without.cpu));
    }
    let limits: Vec<_> = wall.iter().map(|(with, _)| (*with, STALL_MS)).collect();
    let row = |clock: &str, peer: &str, pairs: &[(f64, f64)]| {
        let row = format!("longest command of 1,024 blocks during a snapshot, {name}");
        BenchRow::new("snapshot", &row, clock, peer, Better::Lower, outcome(pairs))
    };
    Ok(vec![
        row("ms", "limit: 10 ms", &limits),
        row("ms", "the same without a snapshot", &wall),
        row("ms CPU", "the same without a snapshot", &cpu),
    ])
}

/// Installs the snapshot on empty replicas.
fn installs(effort: &Effort, replica: &ReplicaProbe) -> anyhow::Result<BenchRow> {
    replica.snapshot()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut pairs = Vec::new();
    for _ in 0..effort.runs {
        let directory = tempfile::tempdir()?;
        let empty = ReplicaProbe::open(directory.path())?;
        let start = Instant::now();
        runtime.block_on(empty.install_from(replica))?;
        pairs.push((start.elapsed().as_secs_f64(), INSTALL_S));
        anyhow::ensure!(empty.digest() == replica.digest(), "the installed state differs");
        assert_on_disk(directory.path(), replica)?;
    }
    let row = "install on an empty replica";
    Ok(BenchRow::new("snapshot", row, "s", "limit: 5 s", Better::Lower, outcome(&pairs)))
}

/// Asserts that the installed state is on disk.
fn assert_on_disk(directory: &Path, replica: &ReplicaProbe) -> anyhow::Result<()> {
    anyhow::ensure!(ReplicaProbe::open(directory)?.digest() == replica.digest(), "the state on disk differs");
    Ok(())
}

/// Nodes that grow and shrink their chains.
struct ReplicaLoad {
    random: ChaCha8Rng,
    nodes: Vec<Vec<Vec<BlockHash>>>,
    seqs: Vec<u64>,
}

impl ReplicaLoad {
    fn new() -> Self {
        let nodes = (0..NODES).map(|_| Vec::new()).collect();
        Self { random: ChaCha8Rng::seed_from_u64(SEED), nodes, seqs: vec![0; NODES as usize] }
    }

    fn joins(&self) -> impl Iterator<Item = Command> + use<> {
        (0..NODES).map(|node| Command::Join(record(node)))
    }

    /// Every node stores the next blocks of its last chain, or starts a new one.
    fn growth(&mut self) -> Command {
        self.command(|random, chains| {
            if chains.last().is_none_or(|chain| chain.len() + RUN_BLOCKS > CHAIN_BLOCKS) {
                chains.push(Vec::with_capacity(CHAIN_BLOCKS));
            }
            let chain = &mut chains.last_mut()?;
            let before = chain.len();
            let parent = chain.last().copied();
            (0..RUN_BLOCKS).for_each(|_| chain.push(next_hash(random, chain)));
            let blocks = chain[before..].to_vec();
            Some(Change::Stored { parent, blocks, tier: Tier::Dram })
        })
    }

    /// Every node drops the last blocks of random chains, scattered over the index.
    fn scattered_drops(&mut self) -> Command {
        self.command(|random, chains| {
            let ends = (0..RUN_BLOCKS).filter_map(|_| {
                let chain = random.random_range(0..chains.len());
                chains[chain].pop()
            });
            Some(Change::Dropped { blocks: ends.collect(), tier: Tier::Dram, cause: Default::default() })
        })
    }

    fn command(
        &mut self,
        mut change: impl FnMut(&mut ChaCha8Rng, &mut Vec<Vec<BlockHash>>) -> Option<Change>,
    ) -> Command {
        let nodes = (0..NODES).zip(&mut self.nodes).zip(&mut self.seqs);
        let announcements = nodes.map(|((node, chains), seq)| {
            *seq += 1;
            let changes = change(&mut self.random, chains).into_iter().collect();
            Announcement { node: NodeId(node), epoch: Epoch(1), seq: Seq(*seq), changes }
        });
        Command::Announce(announcements.collect())
    }
}

fn record(node: u32) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 1,
    }
}
