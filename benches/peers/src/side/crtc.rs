//! `dynamo_kv_router::ConcurrentRadixTreeCompressed`, the concurrent index of Dynamo's router,
//! driven as its thread pool drives it. Events pass through a channel to their worker's thread;
//! readers run in place.
//!
//! Not here: that pool itself, which needs a runtime and counters; the hand-over of events is part
//! of the time.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;
use benches::{TimeSpent, measure_time};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_block_hash_for_seq,
};
use tokio::sync::oneshot;

use super::{IndexSide, Overlaps};
use crate::chains::{BLOCK_TOKENS, Chains};
use crate::events::{Action, Event};

/// Maximum events queued for a lane: enough that no lane ever waits for the sender.
const QUEUED_EVENTS_MAX: usize = 1_024;

pub(crate) struct DynamoCrtc {
    index: Arc<ConcurrentRadixTreeCompressed>,
    lanes: Vec<Lane>,
}

struct Lane {
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Lane {
    fn start(index: &Arc<ConcurrentRadixTreeCompressed>) -> Self {
        let (tasks, receiver) = flume::bounded(QUEUED_EVENTS_MAX);
        let index = Arc::clone(index);
        let thread = std::thread::spawn(move || index.worker(receiver, None));
        Self { tasks, thread: Some(thread) }
    }

    fn send(&self, task: WorkerTask) -> anyhow::Result<()> {
        self.tasks.send(task).map_err(|_| anyhow::anyhow!("a lane of CRTC ended early"))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn event(chains: &Chains, action: Action, event: &Event) -> WorkerTask {
    let (rolling, local) = (chains.rolling(event.chain), chains.local(event.chain));
    let stored = |(&rolling, &local): (&u64, &u64)| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(rolling),
        tokens_hash: LocalBlockHash(local),
        mm_extra_info: None,
    };
    let data = match action {
        Action::Store => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: event.parent(rolling).map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: event.of(rolling).iter().zip(event.of(local)).map(stored).collect(),
        }),
        Action::Remove => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: event.of(rolling).iter().rev().copied().map(ExternalSequenceBlockHash).collect(),
        }),
    };
    let event = RouterEvent::new(u64::from(event.node), KvCacheEvent { event_id: 0, data, dp_rank: 0 });
    WorkerTask::Event(event)
}

impl IndexSide for DynamoCrtc {
    const NAME: &'static str = "dynamo-kv-router 1.6.1 CRTC";
    type Hash = LocalBlockHash;

    fn empty(threads: usize) -> anyhow::Result<Self> {
        let index = Arc::new(ConcurrentRadixTreeCompressed::new());
        let lanes = (0..threads).map(|_| Lane::start(&index)).collect();
        Ok(Self { index, lanes })
    }

    fn apply(&mut self, chains: &Chains, action: Action, events: &[Event]) -> anyhow::Result<TimeSpent> {
        let lane_of = |one: &Event| &self.lanes[one.node as usize % self.lanes.len()];
        let tasks: Vec<_> = events.iter().map(|one| (lane_of(one), event(chains, action, one))).collect();
        let (sent, spent) = measure_time(|| {
            tasks.into_iter().try_for_each(|(lane, task)| lane.send(task))?;
            let mut flushed = Vec::new();
            for lane in &self.lanes {
                let (sender, receiver) = oneshot::channel();
                lane.send(WorkerTask::Flush(sender))?;
                flushed.push(receiver);
            }
            flushed.into_iter().try_for_each(|one| one.blocking_recv().context("a lane of CRTC ended early"))
        });
        sent?;
        Ok(spent)
    }

    fn append_prompt(chains: &Chains, chain: u32, blocks: Range<usize>, prompt: &mut Vec<LocalBlockHash>) {
        prompt.extend(chains.local(chain)[blocks].iter().copied().map(LocalBlockHash));
    }

    fn hash(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        compute_block_hash_for_seq(tokens, BLOCK_TOKENS, BlockHashOptions::default())
    }

    fn lookup(&self, prompt: &[LocalBlockHash]) -> usize {
        self.index.find_matches(prompt, false).scores.len()
    }

    fn overlaps(&self, prompt: &[LocalBlockHash]) -> Overlaps {
        let found = self.index.find_matches(prompt, false);
        found.scores.into_iter().map(|(worker, score)| (worker.worker_id as u32, score)).collect()
    }
}
