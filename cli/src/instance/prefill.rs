//! A prefill that takes its time: one request's at a time, layer by layer beside its load, and every slice compared as it comes. What is
//! computed leaves for its node while the next layer is.
//!
//! What the engine does next [`Prefill`] says; here its layers take the time that the profile says they take. Not here: what is
//! done where compute takes no time, and saving what is left behind it (`serve.rs`).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::id::{BlockHash, Tier};
use kv_core::pipeline::{Costs, Next};
use kvfleet_client::{BlockRoom, FetchCall, HeldLease, Prefill, PrefillCall, PrefillEnd, SourceMiss};
use kvfleet_proto::{content, pb};
use kvfleet_transport::Asker;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::blocks::BlockShape;
use super::load::Waiting;
use super::request::Job;
use super::saving::Saving;
use super::serve::{Engine, blocks_u32, micros};
use super::turns::Turns;

/// How much later than it was due compute may wake up and go on as if it had not: timers have a grain of a millisecond.
const LATE_MAX: Duration = Duration::from_millis(2);

/// Unit in which the read buffer is shared out.
const BUFFER_UNIT_BYTES: u64 = 1024;

/// What requests wait for: the one accelerator, and the read buffer that they share.
#[derive(Debug)]
pub(super) struct Accelerator {
    turns: Turns,
    buffer: Arc<Semaphore>,
}

impl Accelerator {
    pub(super) fn new(read_buffer_bytes: u64) -> Accelerator {
        let units = usize::try_from(read_buffer_bytes / BUFFER_UNIT_BYTES).unwrap_or(usize::MAX);
        let buffer = Semaphore::new(units.min(Semaphore::MAX_PERMITS).min(u32::MAX as usize));
        Accelerator { turns: Turns::default(), buffer: Arc::new(buffer) }
    }

    /// All of the buffer that is free.
    fn buffer(&self) -> Option<OwnedSemaphorePermit> {
        let free = u32::try_from(self.buffer.available_permits()).unwrap_or(u32::MAX);
        Arc::clone(&self.buffer).try_acquire_many_owned(free).ok()
    }
}

/// Memory for one block, compared with what must be there slice by slice. It is not touched before something comes.
#[derive(Debug)]
struct CheckedRoom {
    hash: BlockHash,
    bytes: Box<[u8]>,
    shape: Arc<BlockShape>,
    seen: Arc<Seen>,
}

impl CheckedRoom {
    /// Where a layer's slice lies.
    fn place(&self, layer: usize) -> Option<Range<usize>> {
        let lengths = self.shape.slice_bytes();
        let start = lengths.get(..layer)?.iter().map(|bytes| *bytes as usize).sum::<usize>();
        Some(start..start + *lengths.get(layer)? as usize)
    }
}

/// Bytes of all slices that came.
#[derive(Debug, Default)]
struct Seen {
    right: AtomicU64,
    wrong: AtomicU64,
}

impl BlockRoom for CheckedRoom {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let place = self.place(layer)?;
        self.bytes.get_mut(place)
    }

    fn filled(&mut self, layer: usize) {
        let Some(place) = self.place(layer) else { return };
        let slice = &self.bytes[place.clone()];
        let is_right = content::matches_at(self.hash, place.start, slice);
        let sum = if is_right { &self.seen.right } else { &self.seen.wrong };
        sum.fetch_add(slice.len() as u64, Ordering::Relaxed);
    }
}

impl Engine {
    /// Loads, computes and saves side by side once it is the request's turn. Answers where leases may be held now, and what is being
    /// saved.
    pub(super) async fn prefill(
        &self,
        job: &Job,
        asker: &Asker,
        reply: &mut pb::RunReply,
        misses: &mut Vec<SourceMiss>,
    ) -> (BTreeSet<HeldLease>, Option<Saving>) {
        let call = self.call(job, asker);
        let asked = Instant::now();
        let sources = call.sources.clone();
        let (seen, rooms) = self.rooms(&call);
        let costs = self.costs(job, rooms.len());
        let buffer = self.accelerator.buffer();
        let free_bytes = buffer.as_ref().map_or(0, |free| free.num_permits() as u64 * BUFFER_UNIT_BYTES);
        let recompute_us = costs.recompute_ns() / 1000;
        let call = PrefillCall {
            fetch: call,
            costs: costs.clone(),
            frame_bytes: self.blocks.frame_bytes(),
            bytes_per_s: sources.iter().map(|source| self.expected(source)).fold(0, u64::saturating_add),
            read_buffer_bytes_max: free_bytes,
            in_flight_bytes_max: self.config.in_flight_bytes,
        };
        let mut prefill = match self.client.prefill(call, rooms) {
            Ok(prefill) => prefill,
            Err(error) => {
                reply.misses.push(error.to_string());
                return (BTreeSet::new(), None);
            }
        };
        let read_buffer_bytes = prefill.read_buffer_bytes();
        let buffer = buffer.and_then(|mut free| {
            free.split(usize::try_from(read_buffer_bytes.div_ceil(BUFFER_UNIT_BYTES)).unwrap_or(usize::MAX))
        });
        let waits = Waiting::begin(&self.working);
        let turn = self.accelerator.turns.take(job.turn_ms).await;
        drop(waits);
        let begun = Instant::now();
        prefill.begin();
        drop(buffer);
        let mut saving = self.saving(job, asker, sources.iter().map(|source| source.len_blocks).sum());
        run(&mut prefill, &costs, saving.as_mut()).await;
        drop(turn);
        let took = begun.elapsed();
        let end = prefill.end();
        reply.timed = Some(pb::TimedPrefill {
            queue_us: micros(begun - asked),
            prefill_us: micros(took),
            idle_us: micros(end.idle),
            recompute_us,
            computed_blocks: blocks_u32(end.computed.len()),
            read_buffer_bytes,
            streamed_blocks: 0,
        });
        count(&end, &sources, &seen, self.blocks.payload_bytes(), reply);
        misses.clone_from(&end.misses);
        (end.leases.into_iter().collect(), saving)
    }

    /// Bytes a second that the profile says of a source.
    fn expected(&self, source: &pb::Source) -> u64 {
        let tier = Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier).unwrap_or(Tier::Dram);
        self.profile.tier(tier).through(self.profile.network).bytes_per_s
    }

    /// What the engine's layers take, in the time of this instance.
    fn costs(&self, job: &Job, blocks: usize) -> Costs {
        let blocks = blocks_u32(blocks);
        let cached = u64::from(blocks) * u64::from(job.block_tokens);
        let new = u64::from(job.input_tokens).saturating_sub(cached);
        let layers = self.config.layers;
        let mut costs = Costs::of(&self.profile, blocks, job.block_tokens, new, layers);
        costs.new_layer_ns =
            costs.new_layer_ns.saturating_add(self.profile.step_ns / u64::from(layers.max(1)));
        costs.scaled(self.config.time_scale)
    }

    /// A room for each block of the sources.
    fn rooms(&self, call: &FetchCall) -> (Arc<Seen>, Vec<CheckedRoom>) {
        let seen = Arc::<Seen>::default();
        let bytes = usize::try_from(self.blocks.payload_bytes()).unwrap_or(usize::MAX);
        let room = |hash: &BlockHash| CheckedRoom {
            hash: *hash,
            bytes: vec![0; bytes].into(),
            shape: Arc::clone(&self.blocks),
            seen: Arc::clone(&seen),
        };
        let blocks: u64 = call.sources.iter().map(|source| u64::from(source.len_blocks)).sum();
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let rooms = call.hashes.iter().take(blocks).map(room).collect();
        (seen, rooms)
    }
}

/// Computes what is said, each layer as long as it costs, and puts what is new of it.
async fn run(prefill: &mut Prefill<CheckedRoom>, costs: &Costs, mut saving: Option<&mut Saving>) {
    let mut due = Instant::now();
    loop {
        let asked = Instant::now();
        let next = prefill.next().await;
        // Only what its own timer is late is made up for.
        due += asked.elapsed();
        let ns = match &next {
            Next::Layer { .. } => {
                let of = |block: u32| costs.block_layer_ns.get(block as usize).copied().unwrap_or_default();
                prefill.pass().map(of).fold(costs.new_layer_ns, u64::saturating_add)
            }
            Next::CatchUp { blocks, layers } => {
                let of = |block: &u32| costs.block_layer_ns.get(*block as usize).copied().unwrap_or_default();
                blocks.iter().map(of).fold(0, u64::saturating_add).saturating_mul((*layers).into())
            }
            Next::Done | Next::Wait { .. } => return,
        };
        let now = Instant::now();
        if now.saturating_duration_since(due) > LATE_MAX {
            due = now;
        }
        due += Duration::from_nanos(ns);
        let is_layer = matches!(next, Next::Layer { .. });
        let mut saving = saving.as_deref_mut().filter(|_| is_layer);
        // Made within the layer's own time: an engine has it at the end of that.
        let made = saving.as_deref().map(Saving::next);
        sleep_until(due).await;
        if let (Some(saving), Some(made)) = (&mut saving, made) {
            saving.put(made);
        }
    }
}

/// Counts what came by what became of it, and leading right blocks that were not computed as hits.
fn count(
    end: &PrefillEnd<CheckedRoom>,
    sources: &[pb::Source],
    seen: &Seen,
    block_bytes: u64,
    reply: &mut pb::RunReply,
) {
    let (right, wrong) = (seen.right.load(Ordering::Relaxed), seen.wrong.load(Ordering::Relaxed));
    let refused = u64::from(end.wrong_blocks) * block_bytes;
    reply.verified_bytes += right;
    reply.wrong_bytes += wrong + refused;
    reply.wrong_blocks +=
        end.wrong_blocks + u32::try_from(wrong.div_ceil(block_bytes.max(1))).unwrap_or(u32::MAX);
    reply.fetched_bytes += right + wrong + refused;
    reply.misses = end.misses.iter().map(|miss| miss.reason.name().to_owned()).collect();
    let tier_of = |block: u32| {
        let holds = |source: &&pb::Source| {
            (source.start_blocks..source.start_blocks + source.len_blocks).contains(&block)
        };
        sources.iter().find(holds).map(|source| source.tier)
    };
    // With a wrong byte among them none is believed.
    let is_hit = |block: &u32| {
        wrong == 0 && end.arrived.contains_key(block) && end.computed.binary_search(block).is_err()
    };
    for block in (0u32..).take_while(is_hit) {
        reply.hit_blocks += 1;
        match Tier::ALL.into_iter().find(|tier| Some(*tier as u32) == tier_of(block)) {
            Some(Tier::Gpu) => reply.hit_gpu_blocks += 1,
            Some(Tier::Ssd) => reply.hit_ssd_blocks += 1,
            Some(Tier::Dram) | None => reply.hit_dram_blocks += 1,
        }
    }
    if wrong > 0 {
        tracing::error!(bytes = wrong, "fetched bytes are not what they must be");
    }
}
