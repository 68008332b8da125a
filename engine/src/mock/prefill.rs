//! Timed prefill: one request at a time, layer by layer, overlapping with its loads and saves.
//! Every slice is checked on arrival, and a computed layer is saved while the next one is computed.
//!
//! [`Prefill`] decides the next step; this file spends the time that the profile models. Not here:
//! untimed compute, and saving the remaining blocks (`serve.rs`).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::content;
use kv_core::id::{BlockHash, Tier};
use kv_core::pipeline::{ComputeCosts, NextAction};
use kvfleet_client::{FetchCall, HeldLease, Prefill, PrefillCall, PrefillResult, SliceBuffer, SourceMiss};
use kvfleet_proto::pb;
use kvfleet_transport::RequestContext;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::accelerator_queue::AcceleratorQueue;
use super::blocks::BlockShape;
use super::load::WaitingGuard;
use super::request::Job;
use super::serve::{MockEngine, blocks_u32, micros};
use super::streamed_save::StreamedSave;

/// Tolerated wake-up delay after which compute continues as if it were on time; timers have
/// millisecond resolution.
const LATE_MAX: Duration = Duration::from_millis(2);

/// Allocation unit of the read buffer.
const BUFFER_UNIT_BYTES: u64 = 1024;

/// The accelerator, and the read buffer that waiting requests share.
#[derive(Debug)]
pub(super) struct Accelerator {
    queue: AcceleratorQueue,
    buffer: Arc<Semaphore>,
}

impl Accelerator {
    pub(super) fn new(read_buffer_bytes: u64) -> Accelerator {
        let units = usize::try_from(read_buffer_bytes / BUFFER_UNIT_BYTES).unwrap_or(usize::MAX);
        let buffer = Semaphore::new(units.min(Semaphore::MAX_PERMITS).min(u32::MAX as usize));
        Accelerator { queue: AcceleratorQueue::default(), buffer: Arc::new(buffer) }
    }

    /// Takes the whole free part of the buffer.
    fn buffer(&self) -> Option<OwnedSemaphorePermit> {
        let free = u32::try_from(self.buffer.available_permits()).unwrap_or(u32::MAX);
        Arc::clone(&self.buffer).try_acquire_many_owned(free).ok()
    }
}

/// Memory for one block, checked slice by slice. Its pages are untouched until data arrives.
#[derive(Debug)]
struct CheckedBuffer {
    hash: BlockHash,
    bytes: Box<[u8]>,
    shape: Arc<BlockShape>,
    counts: Arc<ByteCounts>,
}

impl CheckedBuffer {
    /// Byte range of a layer's slice.
    fn slice_range(&self, layer: usize) -> Option<Range<usize>> {
        let lengths = self.shape.slice_bytes();
        let start = lengths.get(..layer)?.iter().map(|bytes| *bytes as usize).sum::<usize>();
        Some(start..start + *lengths.get(layer)? as usize)
    }
}

/// Checked bytes of all slices.
#[derive(Debug, Default)]
struct ByteCounts {
    right: AtomicU64,
    wrong: AtomicU64,
}

impl SliceBuffer for CheckedBuffer {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        let place = self.slice_range(layer)?;
        self.bytes.get_mut(place)
    }

    fn filled(&mut self, layer: usize) {
        let Some(place) = self.slice_range(layer) else { return };
        let slice = &self.bytes[place.clone()];
        let is_right = content::matches_at(self.hash, place.start, slice);
        let sum = if is_right { &self.counts.right } else { &self.counts.wrong };
        sum.fetch_add(slice.len() as u64, Ordering::Relaxed);
    }
}

impl MockEngine {
    /// Loads, computes and saves concurrently once the request gets the accelerator. Returns
    /// possible leases, and the save in progress.
    pub(super) async fn prefill(
        &self,
        job: &Job,
        asker: &RequestContext,
        reply: &mut pb::RunReply,
        misses: &mut Vec<SourceMiss>,
    ) -> (BTreeSet<HeldLease>, Option<StreamedSave>) {
        let call = self.fetch_call(job, asker);
        let asked = Instant::now();
        let sources = call.sources.clone();
        let (seen, buffers) = self.block_buffers(&call);
        let costs = self.layer_costs(job, buffers.len());
        let buffer = self.accelerator.buffer();
        let free_bytes = buffer.as_ref().map_or(0, |free| free.num_permits() as u64 * BUFFER_UNIT_BYTES);
        let recompute_us = costs.recompute_ns() / 1000;
        let call = PrefillCall {
            fetch: call,
            costs: costs.clone(),
            frame_bytes: self.blocks.frame_bytes(),
            bytes_per_s: sources
                .iter()
                .map(|source| self.expected_bytes_per_s(source))
                .fold(0, u64::saturating_add),
            read_buffer_bytes_max: free_bytes,
            in_flight_bytes_max: self.config.in_flight_bytes,
        };
        let mut prefill = match self.client.prefill(call, buffers) {
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
        let waits = WaitingGuard::start(&self.counters);
        let permit = self.accelerator.queue.acquire(job.priority_deadline_ms).await;
        drop(waits);
        let begun = Instant::now();
        prefill.begin();
        drop(buffer);
        let mut saving =
            self.start_streamed_save(job, asker, sources.iter().map(|source| source.len_blocks).sum());
        run_layers(&mut prefill, &costs, saving.as_mut()).await;
        drop(permit);
        let took = begun.elapsed();
        let end = prefill.end();
        reply.timed = Some(pb::TimedPrefill {
            queue_us: micros(begun - asked),
            prefill_us: micros(took),
            idle_us: micros(end.idle_time),
            recompute_us,
            computed_blocks: blocks_u32(end.computed.len()),
            read_buffer_bytes,
            streamed_blocks: 0,
        });
        count_arrivals(&end, &sources, &seen, self.blocks.payload_bytes(), reply);
        misses.clone_from(&end.misses);
        (end.leases.into_iter().collect(), saving)
    }

    /// Bandwidth of a source by the profile, in bytes per second.
    fn expected_bytes_per_s(&self, source: &pb::Source) -> u64 {
        let tier = Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier).unwrap_or(Tier::Dram);
        self.profile.tier(tier).through(self.profile.network).bytes_per_s
    }

    /// Compute times of the layers, in scaled time.
    fn layer_costs(&self, job: &Job, blocks: usize) -> ComputeCosts {
        let blocks = blocks_u32(blocks);
        let cached = u64::from(blocks) * u64::from(job.block_tokens);
        let new = u64::from(job.input_tokens).saturating_sub(cached);
        let layers = self.config.layers;
        let mut costs = ComputeCosts::of(&self.profile, blocks, job.block_tokens, new, layers);
        costs.new_layer_ns =
            costs.new_layer_ns.saturating_add(self.profile.step_ns / u64::from(layers.max(1)));
        costs.scaled(self.config.time_scale)
    }

    /// A buffer for each block of the sources.
    fn block_buffers(&self, call: &FetchCall) -> (Arc<ByteCounts>, Vec<CheckedBuffer>) {
        let seen = Arc::<ByteCounts>::default();
        let bytes = usize::try_from(self.blocks.payload_bytes()).unwrap_or(usize::MAX);
        let room = |hash: &BlockHash| CheckedBuffer {
            hash: *hash,
            bytes: vec![0; bytes].into(),
            shape: Arc::clone(&self.blocks),
            counts: Arc::clone(&seen),
        };
        let blocks: u64 = call.sources.iter().map(|source| u64::from(source.len_blocks)).sum();
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let rooms = call.hashes.iter().take(blocks).map(room).collect();
        (seen, rooms)
    }
}

/// Runs the prefill step by step, each for its modelled time, and saves new layers.
async fn run_layers(
    prefill: &mut Prefill<CheckedBuffer>,
    costs: &ComputeCosts,
    mut saving: Option<&mut StreamedSave>,
) {
    let mut due = Instant::now();
    loop {
        let asked = Instant::now();
        let next = prefill.next().await;
        // Only lateness of its own timer is made up; waiting for loads is not.
        due += asked.elapsed();
        let ns = match &next {
            NextAction::Layer { .. } => {
                let of = |block: u32| costs.block_layer_ns.get(block as usize).copied().unwrap_or_default();
                prefill.wave().map(of).fold(costs.new_layer_ns, u64::saturating_add)
            }
            NextAction::CatchUp { blocks, layers } => {
                let of = |block: &u32| costs.block_layer_ns.get(*block as usize).copied().unwrap_or_default();
                blocks.iter().map(of).fold(0, u64::saturating_add).saturating_mul((*layers).into())
            }
            NextAction::Done | NextAction::Wait { .. } => return,
        };
        let now = Instant::now();
        if now.saturating_duration_since(due) > LATE_MAX {
            due = now;
        }
        due += Duration::from_nanos(ns);
        let is_layer = matches!(next, NextAction::Layer { .. });
        let mut saving = saving.as_deref_mut().filter(|_| is_layer);
        // The layer's content is generated within its compute time.
        let made = saving.as_deref().map(StreamedSave::next_layer);
        sleep_until(due).await;
        if let (Some(saving), Some(made)) = (&mut saving, made) {
            saving.put_layer(made);
        }
    }
}

/// Counts arrived bytes by outcome. Leading correct blocks that were not computed are hits.
fn count_arrivals(
    end: &PrefillResult<CheckedBuffer>,
    sources: &[pb::Source],
    seen: &ByteCounts,
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
    // A wrong byte invalidates all hits.
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
        tracing::error!(bytes = wrong, "fetched bytes are wrong");
    }
}
