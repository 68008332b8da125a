//! Measures the ingest of three router processes: announced blocks per second, time to visibility,
//! and the time of one small proposal.
//!
//! Fake nodes announce events of 16 blocks to every shard, batched as real nodes do. First, one
//! client pins and unpins a block, sequentially. Then every stream keeps a fixed number of batches
//! in flight, which gives the rate. Then batches are sent at fixed times, at half that rate. The
//! time of a batch runs from its due time to its acknowledgement, when it is committed and visible
//! to readers of the leader. Last, one index applies the same batches in this process, without
//! replication. Prints one line of JSON. Not here: an evaluation of the figures.
//!
//! `chaos-ingest ROUTER-PROGRAM [SECONDS] [SHARDS] [NODES] [BATCHES-IN-FLIGHT]`

mod announcer;

mod events;

mod pins;

mod processor;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use announcer::{Announcer, Pace, Phase, PhaseReport};
use chaos_tests::cluster::{Cluster, RouterClients, SuiteError};
use events::{EVENT_BLOCKS, Events};
use kv_core::id::{Epoch, IdentityDigest, NodeId};
use kv_core::index::command::{Command, NodeRecord};
use kv_core::index::{Index, IndexLimits};
use kvfleet_proto::pb;
use tokio::task::JoinSet;

/// Events of one batch under full load: 2,048 blocks including drops, as in real nodes' batches.
const BATCH_EVENTS: u64 = 64;

/// Interval of batches of one stream at half load.
const HALF_LOAD_INTERVAL: Duration = Duration::from_millis(10);

/// Time for streams to open, leaders to spread and nodes to fill, before counting starts.
const WARM_UP: Duration = Duration::from_secs(6);

/// Warm-up at half load.
const HALF_LOAD_WARM_UP: Duration = Duration::from_secs(2);

/// Result of one phase.
struct PhaseFigures {
    seconds: f64,
    report: PhaseReport,
    routers_us: u64,
    sender_us: u64,
}

impl PhaseFigures {
    fn blocks_per_second(&self) -> f64 {
        self.report.blocks as f64 / self.seconds
    }

    fn per_block(&self, micros: u64) -> f64 {
        micros as f64 / self.report.blocks.max(1) as f64
    }
}

async fn join(contacts: &RouterClients, node: u32) -> u64 {
    for position in 0.. {
        let request = pb::JoinRequest {
            node,
            data_address: "127.0.0.1:1".into(),
            control_address: "127.0.0.1:2".into(),
            host: "localhost".into(),
            identity: vec![7; 16],
            block_bytes: 4096,
            ..pb::JoinRequest::default()
        };
        if let Ok(reply) = contacts.client(position).join(request).await {
            return reply.into_inner().epoch;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    unreachable!("positions do not end")
}

/// Runs all announcers for one phase, and counts after a warm-up.
async fn run_phase(
    cluster: &Cluster,
    announcers: Vec<Announcer>,
    pace: Pace,
    batch_events: u64,
    warm_up: Duration,
    seconds: u64,
) -> (Vec<Announcer>, PhaseFigures) {
    let from = Instant::now() + warm_up;
    let until = from + Duration::from_secs(seconds);
    let phase = Phase { pace, batch_events, from, until };
    let mut running: JoinSet<(Announcer, PhaseReport)> =
        announcers.into_iter().map(|announcer| announcer.run(phase)).collect();
    let used = || {
        let routers = cluster.process_ids().into_iter().map(processor::process_us).sum::<u64>();
        (routers, processor::process_us(std::process::id()))
    };
    tokio::time::sleep_until(from.into()).await;
    let before = used();
    tokio::time::sleep_until(until.into()).await;
    let after = used();
    let (mut announcers, mut tally) = (Vec::new(), PhaseReport::default());
    while let Some(Ok((announcer, one))) = running.join_next().await {
        announcers.push(announcer);
        tally.blocks += one.blocks;
        tally.events += one.events;
        tally.micros.extend(one.micros);
    }
    tally.micros.sort_unstable();
    let (routers_us, sender_us) = (after.0 - before.0, after.1 - before.1);
    (announcers, PhaseFigures { seconds: seconds as f64, report: tally, routers_us, sender_us })
}

/// Blocks per second that one index applies on one core without replication: the same batches,
/// decoded.
fn unreplicated(nodes: u32) -> f64 {
    const BATCHES: u64 = 512;
    const WARM_UP_BATCHES: u64 = 160;
    let mut index = Index::new(IndexLimits::default());
    let mut blocks = 0;
    let mut spent = Duration::ZERO;
    for node in 1..=nodes {
        let record = NodeRecord {
            node: NodeId(node),
            data_address: "a:1".into(),
            control_address: "a:2".into(),
            host: "a".into(),
            instance: None,
            identity: IdentityDigest([7; 16]),
            block_bytes: 4096,
        };
        index.apply(&Command::Admit { record, epoch: Epoch(1) });
    }
    for batch in 0..BATCHES {
        let events = batch * BATCH_EVENTS..(batch + 1) * BATCH_EVENTS;
        let of_node = |node| Events { node, shard: 1, shards: 1 }.announcement(1, batch + 1, events.clone());
        let command = Command::Announce((1..=nodes).map(of_node).collect());
        let start = Instant::now();
        index.apply(&command);
        if batch >= WARM_UP_BATCHES {
            spent += start.elapsed();
            blocks += u64::from(nodes) * events.map(Events::blocks).sum::<u64>();
        }
    }
    blocks as f64 / spent.as_secs_f64()
}

fn percentile(sorted: &[u64], share: usize) -> u64 {
    sorted.get(sorted.len() * share / 100).copied().unwrap_or(0)
}

fn print(full: &PhaseFigures, half: &PhaseFigures, pins: &[u64], unreplicated: f64) {
    println!(
        "{{\"blocks_per_second\": {:.0}, \"stored_per_second\": {:.0}, \"routers_us_per_block\": {:.3}, \
         \"sender_us_per_block\": {:.3}, \"visible_p50_us\": {}, \"visible_p99_us\": {}, \
         \"half_blocks_per_second\": {:.0}, \"half_routers_us_per_block\": {:.3}, \"half_visible_p50_us\": {}, \
         \"half_visible_p99_us\": {}, \"pin_p50_us\": {}, \"pin_p99_us\": {}, \
         \"unreplicated_blocks_per_second\": {unreplicated:.0}}}",
        full.blocks_per_second(),
        (full.report.events * EVENT_BLOCKS) as f64 / full.seconds,
        full.per_block(full.routers_us),
        full.per_block(full.sender_us),
        percentile(&full.report.micros, 50),
        percentile(&full.report.micros, 99),
        half.blocks_per_second(),
        half.per_block(half.routers_us),
        percentile(&half.report.micros, 50),
        percentile(&half.report.micros, 99),
        percentile(pins, 50),
        percentile(pins, 99),
    );
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), SuiteError> {
    let mut arguments = std::env::args().skip(1);
    let program =
        PathBuf::from(arguments.next().ok_or("usage: chaos-ingest ROUTER-PROGRAM [SECONDS] [SHARDS] …")?);
    let numbers: Vec<u64> = arguments.map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |at: usize, default: u64| numbers.get(at).copied().unwrap_or(default);
    let (seconds, shards, nodes, under_way) = (number(0, 10), number(1, 4), number(2, 4), number(3, 4));
    let (seconds, shards, nodes) = (seconds.max(1), u16::try_from(shards)?, u32::try_from(nodes)?);
    let cluster = Cluster::start_with(&program, |config| {
        // Default settings, except that a busy machine must not fence a fake node.
        (config.shards, config.snapshot_every_entries) = (shards, 5_000);
        config.timings.silence_ms = 60_000;
    })?;
    let contacts = cluster.router_clients();
    let mut announcers = Vec::new();
    let mut hearts = JoinSet::new();
    for node in 1..=nodes {
        let epoch = join(&contacts, node).await;
        hearts.spawn(announcer::send_heartbeats(contacts.clone(), node, epoch));
        let events = (1..=shards).map(|shard| Events { node, shard, shards });
        announcers.extend(events.map(|events| Announcer::new(contacts.clone(), epoch, events)));
    }
    // In a task, so that answers wake no other thread: clients of other systems are measured the
    // same way.
    let pins =
        tokio::spawn(pins::call_times(contacts.clone(), Duration::from_secs(seconds.div_ceil(2)))).await??;
    let pace = Pace::InFlight(usize::try_from(under_way)?);
    let (announcers, full) = run_phase(&cluster, announcers, pace, BATCH_EVENTS, WARM_UP, seconds).await;
    let streams = f64::from(nodes) * f64::from(shards);
    let events_per_second = full.report.events as f64 / full.seconds / 2.0 / streams;
    let half_events = (events_per_second * HALF_LOAD_INTERVAL.as_secs_f64()).round().max(1.0) as u64;
    let pace = Pace::Every(HALF_LOAD_INTERVAL);
    let (_, half) = run_phase(&cluster, announcers, pace, half_events, HALF_LOAD_WARM_UP, seconds).await;
    drop(cluster);
    print(&full, &half, &pins, unreplicated(nodes));
    Ok(())
}
