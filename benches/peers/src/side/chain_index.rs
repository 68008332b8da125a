//! `kv_index::ChainIndex`, the run-compressed index of the SMG gateway, driven as its README
//! prescribes. Every worker belongs to one lane, a lane keeps a map per worker, and readers take no
//! lock.
//!
//! Not here: its lane pool, which queues events and balances lanes; kvfleet's side has no such
//! queue either.

use std::hint::black_box;
use std::ops::Range;

use anyhow::{anyhow, ensure};
use benches::{TimeSpent, measure_time};
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, compute_block_hash_for_seq};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use super::{IndexSide, Overlaps};
use crate::chains::{BLOCK_TOKENS, Chains, NODES};
use crate::events::{Action, Event};

pub(crate) struct SmgChainIndex {
    index: ChainIndex,
    /// Worker of each node.
    workers: Vec<u32>,
    /// Maps of the nodes of each lane; node `n` is number `n / lanes` of lane `n % lanes`.
    lanes: Vec<Vec<ChainBlockMap>>,
}

/// Events of one lane, contiguous in memory.
#[derive(Default)]
struct Batch {
    stored: Vec<StoredBlock>,
    removed: Vec<SequenceHash>,
    events: Vec<(u32, Option<SequenceHash>, Range<usize>)>,
}

impl Batch {
    fn push(&mut self, chains: &Chains, action: Action, event: &Event) {
        let (rolling, local) = (chains.rolling(event.chain), chains.local(event.chain));
        let start = self.stored.len() + self.removed.len();
        let stored = |(&rolling, &local): (&u64, &u64)| StoredBlock {
            seq_hash: SequenceHash(rolling),
            content_hash: ContentHash(local),
        };
        match action {
            Action::Store => {
                self.stored.extend(event.of(rolling).iter().zip(event.of(local)).map(stored));
            }
            Action::Remove => {
                self.removed.extend(event.of(rolling).iter().rev().copied().map(SequenceHash));
            }
        }
        let end = self.stored.len() + self.removed.len();
        self.events.push((event.node, event.parent(rolling).map(SequenceHash), start..end));
    }
}

impl SmgChainIndex {
    /// Applies the events of one lane; returns whether each was accepted.
    fn apply_batch(
        index: &ChainIndex,
        workers: &[u32],
        lanes: usize,
        maps: &mut [ChainBlockMap],
        batch: &Batch,
    ) -> bool {
        batch.events.iter().all(|(node, parent, range)| {
            let (worker, map) = (workers[*node as usize], &mut maps[*node as usize / lanes]);
            if batch.removed.is_empty() {
                index.apply_stored(worker, &batch.stored[range.clone()], *parent, map).is_ok()
            } else {
                index.apply_removed(worker, &batch.removed[range.clone()], map);
                true
            }
        })
    }

    fn score(&self, prompt: &[LocalBlockHash], report: impl FnMut(u32, u32)) {
        self.index.score_into(prompt, |hash| hash.0, false, report);
    }
}

impl IndexSide for SmgChainIndex {
    const NAME: &'static str = "kv-index 2.0.0 ChainIndex";
    type Hash = LocalBlockHash;

    fn empty(threads: usize) -> anyhow::Result<Self> {
        let index = ChainIndex::with_max_workers(NODES as usize);
        let intern = |node: u32| index.intern_worker(&node.to_string()).map_err(|full| anyhow!("{full}"));
        let workers = (0..NODES).map(intern).collect::<anyhow::Result<_>>()?;
        let nodes_of = |lane| (lane..NODES as usize).step_by(threads);
        let lanes = (0..threads).map(|lane| nodes_of(lane).map(|_| ChainBlockMap::new()).collect()).collect();
        Ok(Self { index, workers, lanes })
    }

    fn apply(&mut self, chains: &Chains, action: Action, events: &[Event]) -> anyhow::Result<TimeSpent> {
        let lanes = self.lanes.len();
        let mut batches: Vec<Batch> = (0..lanes).map(|_| Batch::default()).collect();
        events.iter().for_each(|event| batches[event.node as usize % lanes].push(chains, action, event));
        let (index, workers) = (&self.index, &self.workers[..]);
        let run = |maps: &mut Vec<ChainBlockMap>, batch: &Batch| {
            Self::apply_batch(index, workers, lanes, maps, batch)
        };
        let (took, spent) = match (&mut self.lanes[..], &batches[..]) {
            ([maps], [batch]) => measure_time(|| run(maps, batch)),
            (lanes, batches) => measure_time(|| {
                std::thread::scope(|scope| {
                    let start = |(maps, batch)| scope.spawn(move || run(maps, batch));
                    let threads: Vec<_> = lanes.iter_mut().zip(batches).map(start).collect();
                    threads.into_iter().all(|thread| thread.join().unwrap_or(false))
                })
            }),
        };
        ensure!(took, "ChainIndex rejected an event");
        Ok(spent)
    }

    fn append_prompt(chains: &Chains, chain: u32, blocks: Range<usize>, prompt: &mut Vec<LocalBlockHash>) {
        prompt.extend(chains.local(chain)[blocks].iter().copied().map(LocalBlockHash));
    }

    fn hash(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        // Dynamo's hash: the faster of the two peers' hashes.
        compute_block_hash_for_seq(tokens, BLOCK_TOKENS, BlockHashOptions::default())
    }

    fn lookup(&self, prompt: &[LocalBlockHash]) -> usize {
        let mut holders = 0;
        self.score(prompt, |worker, score| {
            black_box((worker, score));
            holders += 1;
        });
        holders
    }

    fn overlaps(&self, prompt: &[LocalBlockHash]) -> Overlaps {
        let mut overlaps = Overlaps::new();
        self.score(prompt, |worker, score| {
            let node = self.workers.iter().position(|known| *known == worker);
            overlaps.extend(node.map(|node| (node as u32, score)));
        });
        overlaps
    }
}
