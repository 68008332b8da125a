//! kvfleet's index as a router runs it: each shard behind a lock, filled by the commands of its
//! log.
//!
//! Not here: the log.

use std::hint::black_box;
use std::ops::Range;

use anyhow::{bail, ensure};
use benches::{TimeSpent, measure_time};
use kv_core::id::{BlockHash, Epoch, IdentityDigest, NodeId, Seq, Tier};
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Change, Command, NodeRecord};
use kv_core::index::{Index, IndexLimits};
use parking_lot::RwLock;

use super::{IndexSide, Overlaps};
use crate::chains::{Chains, NODES, OurHasher};
use crate::events::{Action, Event};

/// Announcements per command, as in a router.
const BATCH: usize = 64;

pub(crate) struct KvfleetIndex {
    shards: Vec<Shard>,
    hasher: OurHasher,
}

/// One shard: the chains with its tag.
struct Shard {
    index: RwLock<Index>,
    nodes: Vec<(Epoch, Seq)>,
}

impl Shard {
    fn empty() -> anyhow::Result<Self> {
        let limits = IndexLimits { copies_max: u64::MAX, ..IndexLimits::default() };
        let mut index = Index::new(limits);
        let mut nodes = Vec::new();
        for node in 0..NODES {
            match index.apply(&Command::Join(record(node))) {
                Applied::Joined(epoch) => nodes.push((epoch, Seq(1))),
                other => bail!("node {node} could not join: {other:?}"),
            }
        }
        Ok(Self { index: RwLock::new(index), nodes })
    }

    fn commands<'event>(
        &mut self,
        chains: &Chains,
        action: Action,
        events: impl Iterator<Item = &'event Event>,
    ) -> Vec<Command> {
        let announcements: Vec<_> =
            events.map(|event| self.announcement(event, change(chains, action, event))).collect();
        announcements.chunks(BATCH).map(|batch| Command::Announce(batch.to_vec())).collect()
    }

    fn announcement(&mut self, event: &Event, change: Change) -> Announcement {
        let (epoch, seq) = &mut self.nodes[event.node as usize];
        let mine = *seq;
        seq.0 += 1;
        Announcement { node: NodeId(event.node), epoch: *epoch, seq: mine, changes: vec![change] }
    }

    /// Applies all commands; returns whether each was fully accepted.
    fn apply(&self, commands: &[Command]) -> bool {
        let took =
            |outcome: &AnnounceOutcome| matches!(outcome, AnnounceOutcome::Applied { unlisted: 0, .. });
        commands.iter().all(|command| match black_box(self.index.write().apply(command)) {
            Applied::Announced(outcomes) => outcomes.iter().all(took),
            _ => false,
        })
    }
}

fn change(chains: &Chains, action: Action, event: &Event) -> Change {
    let hashes = chains.ours(event.chain);
    let (blocks, tier) = (event.of(hashes), Tier::Dram);
    match action {
        Action::Store => Change::Stored { parent: event.parent(hashes), blocks: blocks.to_vec(), tier },
        Action::Remove => Change::Dropped {
            blocks: blocks.iter().rev().copied().collect(),
            tier,
            cause: Default::default(),
        },
    }
}

impl KvfleetIndex {
    fn shard_of(&self, hash: BlockHash) -> usize {
        usize::from(hash.0[0]) % self.shards.len()
    }

    fn shard(&self, prompt: &[BlockHash]) -> &RwLock<Index> {
        &self.shards[prompt.first().map_or(0, |&hash| self.shard_of(hash))].index
    }
}

impl IndexSide for KvfleetIndex {
    const NAME: &'static str = "ours";
    type Hash = BlockHash;

    fn empty(threads: usize) -> anyhow::Result<Self> {
        let shards = (0..threads).map(|_| Shard::empty()).collect::<anyhow::Result<_>>()?;
        Ok(Self { shards, hasher: OurHasher::new() })
    }

    fn apply(&mut self, chains: &Chains, action: Action, events: &[Event]) -> anyhow::Result<TimeSpent> {
        let places: Vec<_> = events.iter().map(|event| self.shard_of(chains.ours(event.chain)[0])).collect();
        let mut commands = Vec::new();
        for (number, shard) in self.shards.iter_mut().enumerate() {
            let mine = events.iter().zip(&places).filter(|(_, place)| **place == number);
            commands.push(shard.commands(chains, action, mine.map(|(event, _)| event)));
        }
        let (took, spent) = match (&self.shards[..], &commands[..]) {
            ([shard], [commands]) => measure_time(|| shard.apply(commands)),
            (shards, commands) => measure_time(|| {
                std::thread::scope(|scope| {
                    let pairs = shards.iter().zip(commands);
                    let threads: Vec<_> =
                        pairs.map(|(shard, commands)| scope.spawn(|| shard.apply(commands))).collect();
                    threads.into_iter().all(|thread| thread.join().unwrap_or(false))
                })
            }),
        };
        ensure!(took, "the index rejected an announcement");
        Ok(spent)
    }

    fn append_prompt(chains: &Chains, chain: u32, blocks: Range<usize>, prompt: &mut Vec<BlockHash>) {
        prompt.extend_from_slice(&chains.ours(chain)[blocks]);
    }

    fn hash(&self, tokens: &[u32]) -> Vec<BlockHash> {
        self.hasher.blocks(tokens)
    }

    fn lookup(&self, prompt: &[BlockHash]) -> usize {
        let found = black_box(self.shard(prompt).read().longest_prefix(prompt));
        found.runs.first().map_or(0, |run| run.holders.len())
    }

    fn overlaps(&self, prompt: &[BlockHash]) -> Overlaps {
        let found = self.shard(prompt).read().longest_prefix(prompt);
        let mut overlaps = Overlaps::new();
        for run in &found.runs {
            for holder in &run.holders {
                let reached = overlaps.entry(holder.node.0).or_default();
                if *reached == run.start_blocks {
                    *reached += run.len_blocks;
                }
            }
        }
        overlaps.retain(|_, reached| *reached > 0);
        overlaps
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
