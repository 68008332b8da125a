//! How many announced blocks a second three router processes take, and how soon each is visible.
//!
//! Nodes announce batches to every shard with as many under way as a real node allows; the time of a batch runs
//! from its sending to its acknowledgement, when it is committed and readers of the leader see it. Prints one
//! line of JSON. Not here: any judgement of the figures.
//!
//! `chaos-ingest ROUTER-PROGRAM [SECONDS] [SHARDS] [NODES] [BATCHES-UNDER-WAY]`

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chaos_tests::cluster::{Cluster, Contacts, Trouble};
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Blocks of one batch, as nodes send them.
const BATCH_BLOCKS: u64 = 2_048;

/// Batches that a node holds in each shard; beyond them it drops the oldest, as a full node does.
const HELD_BATCHES: u64 = 64;

/// Time for streams to open and leaders to spread, before anything counts.
const WARM_UP: Duration = Duration::from_secs(4);

/// What was acknowledged to all nodes, and how long each batch took.
#[derive(Default)]
struct Tally {
    blocks: u64,
    micros: Vec<u64>,
}

struct Announcer {
    contacts: Contacts,
    node: u32,
    epoch: u64,
    shard: u16,
    shards: u16,
    under_way: usize,
    tally: Arc<Mutex<Tally>>,
}

impl Announcer {
    fn word(&self, body: Word) -> pb::AnnounceRequest {
        pb::AnnounceRequest { node: self.node, epoch: self.epoch, group: self.shard.into(), body: Some(body) }
    }

    /// Batch `seq`: new blocks of one chain of this shard, in the place of those that came [`HELD_BATCHES`] ago.
    fn batch(&self, seq: u64) -> pb::AnnounceRequest {
        let stored = pb::Stored { parent: Vec::new(), blocks: self.blocks(seq), tier: 1 };
        let mut changes = vec![pb::Change { change: Some(pb::change::Change::Stored(stored)) }];
        if seq > HELD_BATCHES {
            let dropped = pb::Dropped { blocks: self.blocks(seq - HELD_BATCHES), tier: 1 };
            changes.push(pb::Change { change: Some(pb::change::Change::Dropped(dropped)) });
        }
        self.word(Word::Batch(pb::Batch { seq, changes, ..pb::Batch::default() }))
    }

    fn blocks(&self, seq: u64) -> Vec<u8> {
        let tag = (u32::from(self.shard - 1) * 256 / u32::from(self.shards)) as u8;
        let mut blocks = Vec::with_capacity(16 * BATCH_BLOCKS as usize);
        for number in seq * BATCH_BLOCKS..(seq + 1) * BATCH_BLOCKS {
            // Spread as hashes are.
            let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(self.node) << 40;
            let mut block = [tag; 16];
            block[1..9].copy_from_slice(&spread.to_le_bytes());
            block[9..13].copy_from_slice(&self.node.to_le_bytes());
            blocks.extend_from_slice(&block);
        }
        blocks
    }

    async fn open(&self) -> (mpsc::Sender<pb::AnnounceRequest>, Streaming<pb::AnnounceReply>) {
        for position in 0.. {
            let (words, receiver) = mpsc::channel(2 * self.under_way);
            if words.send(self.word(Word::Heartbeat(pb::Heartbeat::default()))).await.is_ok()
                && let Ok(replies) =
                    self.contacts.client(position).announce(ReceiverStream::new(receiver)).await
            {
                return (words, replies.into_inner());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        unreachable!("positions do not end")
    }

    /// Announces until `until`; what is acknowledged after `from` counts.
    async fn run(self, from: Instant, until: Instant) {
        let (mut words, mut replies) = self.open().await;
        let mut sent: VecDeque<(u64, Instant)> = VecDeque::new();
        let (mut next, mut acked) = (1, 0);
        while Instant::now() < until {
            while sent.len() < self.under_way {
                if words.send(self.batch(next)).await.is_err() {
                    break;
                }
                sent.push_back((next, Instant::now()));
                next += 1;
            }
            match replies.message().await.ok().flatten().and_then(|reply| reply.body) {
                Some(Reply::Ack(ack)) => {
                    let now = Instant::now();
                    acked = acked.max(ack.seq);
                    while let Some((seq, at)) = sent.front().copied().filter(|(seq, _)| *seq <= ack.seq) {
                        sent.pop_front();
                        if now > from && seq > 0 {
                            let mut tally = self.tally.lock().await;
                            tally.blocks += BATCH_BLOCKS;
                            tally.micros.push(u64::try_from((now - at).as_micros()).unwrap_or(u64::MAX));
                        }
                    }
                }
                Some(Reply::Directives(_)) => {}
                Some(Reply::Busy(busy)) => {
                    tokio::time::sleep(Duration::from_millis(busy.retry_after_ms)).await;
                    next = acked + 1;
                    sent.clear();
                }
                _ => {
                    (words, replies) = self.open().await;
                    next = acked + 1;
                    sent.clear();
                }
            }
        }
    }
}

async fn join(contacts: &Contacts, node: u32) -> u64 {
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

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Trouble> {
    let mut arguments = std::env::args().skip(1);
    let program =
        PathBuf::from(arguments.next().ok_or("usage: chaos-ingest ROUTER-PROGRAM [SECONDS] [SHARDS] …")?);
    let numbers: Vec<u64> = arguments.map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |at: usize, default: u64| numbers.get(at).copied().unwrap_or(default);
    let (seconds, shards, nodes, under_way) = (number(0, 10), number(1, 4), number(2, 2), number(3, 8));
    let shards = u16::try_from(shards)?;
    let cluster = Cluster::start_with(&program, |config| {
        (config.shards, config.snapshot_every_entries) = (shards, 5_000);
        config.timings.silence_ms = 60_000;
    })?;
    let contacts = cluster.contacts();
    let tally = Arc::<Mutex<Tally>>::default();
    let from = Instant::now() + WARM_UP;
    let until = from + Duration::from_secs(seconds);
    let mut announcers = JoinSet::new();
    for node in 1..=u32::try_from(nodes)? {
        let epoch = join(&contacts, node).await;
        for shard in 1..=shards {
            let (contacts, tally, under_way) =
                (contacts.clone(), Arc::clone(&tally), usize::try_from(under_way)?);
            let announcer = Announcer { contacts, node, epoch, shard, shards, under_way, tally };
            announcers.spawn(announcer.run(from, until));
        }
    }
    announcers.join_all().await;
    let mut tally = tally.lock().await;
    tally.micros.sort_unstable();
    let at = |share: usize| tally.micros.get(tally.micros.len() * share / 100).copied().unwrap_or(0);
    println!(
        "{{\"blocks_per_second\": {}, \"visible_p50_us\": {}, \"visible_p99_us\": {}, \"shards\": {shards}, \
         \"nodes\": {nodes}, \"under_way\": {under_way}}}",
        tally.blocks / seconds.max(1),
        at(50),
        at(99)
    );
    Ok(())
}
