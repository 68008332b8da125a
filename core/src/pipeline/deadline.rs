//! Wait or recompute: decides what compute does next while history blocks arrive, slice by slice,
//! over an unreliable path.
//!
//! **The setting.** History blocks 0, 1, … have a slice in each layer. A *layer task* is one layer
//! of one block. It takes the output of the layer task below and the slices of that layer of all
//! earlier blocks. All tokens that are computed go through the layers together, in the *wave*. At
//! first the wave has the new tokens only. Its layer *l* can run once each block outside the wave
//! has its slice *l*. A block that does not arrive in time *catches up*: its layer tasks below the
//! wave are computed, which never waits, since the wave only ran where all slices of those layers
//! had arrived. The block is part of the wave from there on. A block of the wave leaves it if its
//! last slice arrives after all, and its layer tasks above are never computed. So no task is
//! computed twice, and every block that arrives in time counts, however late.
//!
//! **Why it never takes longer than recomputing.** Let R be the time of all layer tasks, which is
//! the time to recompute. Each task is computed at most once. The tasks of a block that arrived as
//! a whole and is not in the wave are never computed; their time is *saved*. So
//!
//! total = computed + idle ≤ R − saved + idle,
//!
//! and compute idles only while idle < R / [`WAIT_SHARE`] + saved. Hence total ≤ R · (1 + 1/64),
//! plus the caller's time to decide and to wake up, *whatever* arrives and whenever: no estimate is
//! part of the argument. Blocks that arrive pay for waiting for others, and a path that delivers no
//! byte costs 1/64. Any rule that waits for the first byte at all pays that: a silent sender costs
//! exactly the wait. The rest up to 2 % is for the caller's lateness. Wrong costs scale the bound
//! by their error.
//!
//! **Small R.** A waiting caller wakes up with the granularity of its timer, a millisecond with
//! most timers. If R is below 64 such ticks, a 64th of R is less than one tick, and the timer would
//! decide: the first wait would end before anything can arrive, and the rate would halve several
//! times unobserved. So compute may always idle for [`WAIT_TICKS`] ticks of the caller's timer, and
//! the rate halves no sooner: total ≤ R + max(R / 64, two ticks). In one silence it still idles no
//! longer than the missing blocks take to compute, so never for more than R.
//!
//! **When to wait within that bound.** Three heuristics, which only improve it:
//! - In one silence it never idles longer than the missing blocks take to compute (the ski-rental
//!   rule): a silence costs at most twice the optimum with perfect foresight.
//! - If the awaited bytes arrive later than compute ends, at the recent rate (`rate.rs`), tail
//!   blocks are computed until both end together. Tail blocks, because the head arrives first and
//!   every block needs it. With slices in layer order, compute then always has work, and the total
//!   falls below that of loading alone.
//! - With slices in block order, nothing runs before the last awaited block arrived: load and
//!   compute add up. The sum has its least value at one of the ends (see `schedule/cost.rs`), so
//!   either all or no blocks are awaited.
//!
//! Not here: the clock, the bytes and their checks, and which slices are requested (`preload.rs`,
//! `client/`).

use super::ArrivalRate;
use crate::schedule::HardwareProfile;

/// Share of the recompute time that compute may idle for bytes that never arrive: 1/64 = 1.6 %,
/// which leaves 0.4 % of the allowed 2 % for late wake-ups.
pub const WAIT_SHARE: u64 = 64;

/// Ticks of the caller's timer that compute may idle for bytes that never arrive, if longer than
/// the share above. The first tick may end as soon as the wait begins; only two include one whole
/// tick.
pub const WAIT_TICKS: u64 = 2;

/// Rechecks per half-life of silence; the decision follows the rate this closely.
const RECHECKS_PER_HALF_LIFE: u64 = 4;

/// Compute times, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeCosts {
    /// Time of one layer of each history block.
    pub block_layer_ns: Vec<u64>,
    /// Time of one layer of the new tokens.
    pub new_layer_ns: u64,
    /// Number of layers.
    pub layers: u32,
}

impl ComputeCosts {
    /// The costs under a profile: `blocks` full blocks of `block_tokens`, then `new_tokens`.
    #[must_use]
    pub fn of(
        profile: &HardwareProfile,
        blocks: u32,
        block_tokens: u32,
        new_tokens: u64,
        layers: u32,
    ) -> ComputeCosts {
        let (tokens, layers) = (u64::from(block_tokens), layers.max(1));
        let each = |block: u32| profile.prefill_ns(u64::from(block) * tokens, tokens).div_ceil(layers.into());
        let new_layer_ns = profile.prefill_ns(u64::from(blocks) * tokens, new_tokens).div_ceil(layers.into());
        ComputeCosts { block_layer_ns: (0..blocks).map(each).collect(), new_layer_ns, layers }
    }

    /// The costs of an engine that takes `factor` times as long.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> ComputeCosts {
        let scaled = |ns: &u64| (*ns as f64 * factor) as u64;
        let block_layer_ns = self.block_layer_ns.iter().map(scaled).collect();
        ComputeCosts { block_layer_ns, new_layer_ns: scaled(&self.new_layer_ns), layers: self.layers }
    }

    /// R: the time to compute everything without fetching.
    #[must_use]
    pub fn recompute_ns(&self) -> u64 {
        let blocks = self.block_layer_ns.iter().fold(0u64, |sum, ns| sum.saturating_add(*ns));
        blocks.saturating_add(self.new_layer_ns).saturating_mul(self.layers.into())
    }

    /// Longest idle time for bytes that never arrive, with a timer granularity of `grain_ns` (0 for
    /// an exact one).
    #[must_use]
    pub fn wait_ns(&self, grain_ns: u64) -> u64 {
        (self.recompute_ns() / WAIT_SHARE).max(grain_ns.saturating_mul(WAIT_TICKS))
    }

    /// Latest end with such a timer, counted from the start of compute: bytes that arrive later are
    /// of no use.
    #[must_use]
    pub fn deadline_ns(&self, grain_ns: u64) -> u64 {
        self.recompute_ns().saturating_add(self.wait_ns(grain_ns))
    }
}

/// Arrival order of slices. It affects which waits pay off, never the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalOrder {
    /// One layer of all blocks, then the next layer.
    ByLayer,
    /// All layers of one block, then the next block.
    ByBlock,
}

/// Next action of compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextAction {
    /// Compute this layer of the wave: of the new tokens and the blocks in
    /// [`LoadComputeOverlap::wave`].
    Layer {
        /// The layer.
        layer: u32,
    },
    /// Compute the first layers of these blocks, which join the wave.
    CatchUp {
        /// The blocks, in ascending order.
        blocks: Vec<u32>,
        /// Number of layers, from the first.
        layers: u32,
    },
    /// Wait until this time, or until a slice arrives.
    Wait {
        /// End of the wait, in nanoseconds.
        until_ns: u64,
    },
    /// All layers are computed.
    Done,
}

/// Source of a block's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockOrigin {
    /// Still expected to arrive.
    Awaited,
    /// Arrived as a whole before the wave needed it, or before its computation ended.
    Arrived,
    /// Computed with the wave.
    Computed,
}

#[derive(Clone, Copy, Debug)]
struct HistoryBlock {
    origin: BlockOrigin,
    /// Leading slices that have arrived.
    arrived_slices: u32,
    is_lost: bool,
}

/// The last action, which ends when the caller asks for the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastAction {
    Nothing,
    Layer,
    Wait { since_ns: u64 },
}

/// One job's compute, overlapped with the loading of its history.
#[derive(Clone, Debug)]
pub struct LoadComputeOverlap {
    costs: ComputeCosts,
    slice_bytes: Vec<u32>,
    arrival_order: ArrivalOrder,
    blocks: Vec<HistoryBlock>,
    /// Next layer of the wave.
    layer: u32,
    /// For each layer, the number of awaited blocks without their slice.
    missing: Vec<u32>,
    /// Bytes of all awaited slices that have not arrived.
    missing_bytes: u64,
    /// Compute time of all layer tasks of awaited blocks.
    awaited_ns: u64,
    /// Awaited blocks that will not arrive.
    lost: u32,
    /// Time of one layer of the wave.
    wave_layer_ns: u64,
    /// Blocks of the wave that have arrived as a whole.
    leaving_wave: Vec<u32>,
    /// Idle time allowed for bytes that never arrive.
    wait_ns: u64,
    saved_ns: u64,
    idle_ns: u64,
    is_started: bool,
    last_arrival_ns: u64,
    half_life_ns: u64,
    rate: ArrivalRate,
    last_action: LastAction,
}

impl LoadComputeOverlap {
    /// A job with slices of these lengths in bytes in every history block, and an expected rate.
    /// `costs` gives the number of layers and blocks; a missing length counts as zero.
    #[must_use]
    pub fn new(
        costs: ComputeCosts,
        slice_bytes: &[u32],
        arrive: ArrivalOrder,
        bytes_per_s: u64,
        now_ns: u64,
    ) -> LoadComputeOverlap {
        LoadComputeOverlap::with_timer(costs, slice_bytes, arrive, bytes_per_s, now_ns, 0)
    }

    /// Same, for a caller that wakes up with a granularity of `grain_ns`.
    #[must_use]
    pub fn with_timer(
        costs: ComputeCosts,
        slice_bytes: &[u32],
        arrival_order: ArrivalOrder,
        bytes_per_s: u64,
        now_ns: u64,
        grain_ns: u64,
    ) -> LoadComputeOverlap {
        let layers = costs.layers as usize;
        let mut slice_bytes = slice_bytes.to_vec();
        slice_bytes.resize(layers, 0);
        let blocks = costs.block_layer_ns.len();
        let one: u64 = slice_bytes.iter().map(|bytes| u64::from(*bytes)).sum();
        let recompute_ns = costs.recompute_ns();
        let wait_ns = costs.wait_ns(grain_ns);
        let half_life_ns = wait_ns.max(1);
        let new_ns = costs.new_layer_ns.saturating_mul(costs.layers.into());
        LoadComputeOverlap {
            slice_bytes,
            arrival_order,
            blocks: vec![
                HistoryBlock { origin: BlockOrigin::Awaited, arrived_slices: 0, is_lost: false };
                blocks
            ],
            layer: 0,
            missing: vec![u32::try_from(blocks).unwrap_or(u32::MAX); layers],
            missing_bytes: one.saturating_mul(blocks as u64),
            awaited_ns: recompute_ns.saturating_sub(new_ns),
            lost: 0,
            wave_layer_ns: costs.new_layer_ns,
            leaving_wave: Vec::new(),
            wait_ns,
            saved_ns: 0,
            idle_ns: 0,
            is_started: false,
            last_arrival_ns: now_ns,
            half_life_ns,
            rate: ArrivalRate::new(bytes_per_s, half_life_ns, now_ns),
            last_action: LastAction::Nothing,
            costs,
        }
    }

    /// Compute starts. The earlier arrival of slices says nothing about the rate: the read buffer
    /// was full, or the caller did not read.
    pub fn begin(&mut self, now_ns: u64) {
        self.is_started = true;
        self.last_arrival_ns = self.last_arrival_ns.max(now_ns);
        self.rate.resume(now_ns);
    }

    /// Sets the arrival order once it is known.
    pub fn set_arrival_order(&mut self, arrive: ArrivalOrder) {
        self.arrival_order = arrive;
    }

    /// The first `layers` slices of a block have arrived and passed their checks. Known slices and
    /// unknown blocks have no effect.
    pub fn slices_arrived(&mut self, block: u32, layers: u32, now_ns: u64) {
        let layers = layers.min(self.costs.layers);
        let Some(found) = self.blocks.get_mut(block as usize).filter(|found| found.arrived_slices < layers)
        else {
            return;
        };
        let came = found.arrived_slices as usize..layers as usize;
        found.arrived_slices = layers;
        let (origin, is_whole) = (found.origin, layers == self.costs.layers);
        let bytes = self.slice_bytes[came.clone()].iter().map(|bytes| u64::from(*bytes)).sum();
        if self.is_started {
            self.rate.add_bytes(bytes, now_ns);
        }
        self.last_arrival_ns = self.last_arrival_ns.max(now_ns);
        if origin == BlockOrigin::Awaited {
            self.missing[came].iter_mut().for_each(|count| *count -= 1);
            self.missing_bytes -= bytes;
        }
        match origin {
            BlockOrigin::Awaited if is_whole => {
                self.end_wait(block, BlockOrigin::Arrived);
                self.saved_ns = self.saved_ns.saturating_add(self.layer_tasks_ns(block, self.costs.layers));
            }
            BlockOrigin::Computed if is_whole => self.leaving_wave.push(block),
            _ => {}
        }
    }

    /// The missing slices of this block will not arrive: its path failed.
    pub fn mark_lost(&mut self, block: u32) {
        let Some(found) = self.blocks.get_mut(block as usize) else { return };
        if found.origin == BlockOrigin::Awaited && !found.is_lost {
            found.is_lost = true;
            self.lost += 1;
        }
    }

    /// The next action of compute. This call ends the previous one: a layer or a catch-up was
    /// computed, and the time since a wait began counts as idle.
    pub fn next(&mut self, now_ns: u64) -> NextAction {
        match std::mem::replace(&mut self.last_action, LastAction::Nothing) {
            LastAction::Layer => self.layer += 1,
            LastAction::Wait { since_ns } => {
                self.idle_ns = self.idle_ns.saturating_add(now_ns.saturating_sub(since_ns));
            }
            LastAction::Nothing => {}
        }
        self.remove_arrived_from_wave();
        if self.layer == self.costs.layers {
            return NextAction::Done;
        }
        if self.is_blocked() {
            let blocks = self.stop_waiting(now_ns);
            if !blocks.is_empty() && self.layer > 0 {
                return NextAction::CatchUp { blocks, layers: self.layer };
            }
        }
        if self.is_blocked() {
            self.last_action = LastAction::Wait { since_ns: now_ns };
            let look_ns = (self.half_life_ns / RECHECKS_PER_HALF_LIFE).max(1);
            return NextAction::Wait {
                until_ns: now_ns.saturating_add(self.wait_budget_ns(now_ns).min(look_ns).max(1)),
            };
        }
        self.last_action = LastAction::Layer;
        NextAction::Layer { layer: self.layer }
    }

    /// Whether the wave cannot continue with the slices that have arrived.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.missing.get(self.layer as usize).is_some_and(|count| *count > 0)
    }

    /// The blocks of the wave, ascending: those that are computed.
    pub fn wave(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..)
            .zip(&self.blocks)
            .filter(|(_, block)| block.origin == BlockOrigin::Computed)
            .map(|(at, _)| at)
    }

    /// Whether the block is expected to arrive. A computed block may still arrive, which stops its
    /// computation; but awaited blocks take precedence.
    #[must_use]
    pub fn is_awaited(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.origin == BlockOrigin::Awaited)
    }

    /// Bytes that are awaited and have not arrived.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.missing_bytes
    }

    /// Idle time of compute so far, in nanoseconds.
    #[must_use]
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
    }

    /// Time of layer tasks that will not be computed because their blocks arrived, in nanoseconds.
    #[must_use]
    pub fn saved_ns(&self) -> u64 {
        self.saved_ns
    }

    /// Time that compute may idle from now.
    fn wait_budget_ns(&self, now_ns: u64) -> u64 {
        let budget_ns = self.wait_ns.saturating_add(self.saved_ns);
        let silent_ns = now_ns.saturating_sub(self.last_arrival_ns);
        budget_ns.saturating_sub(self.idle_ns).min(self.awaited_ns.saturating_sub(silent_ns))
    }

    /// Removes blocks from the wave that arrived after all.
    fn remove_arrived_from_wave(&mut self) {
        for block in std::mem::take(&mut self.leaving_wave) {
            self.blocks[block as usize].origin = BlockOrigin::Arrived;
            let layer_ns = self.costs.block_layer_ns[block as usize];
            self.wave_layer_ns = self.wave_layer_ns.saturating_sub(layer_ns);
            let above = self.layer_tasks_ns(block, self.costs.layers - self.layer);
            self.saved_ns = self.saved_ns.saturating_add(above);
        }
    }

    /// Decides which blocks are no longer awaited, and adds them to the wave. Ascending.
    fn stop_waiting(&mut self, now_ns: u64) -> Vec<u32> {
        let is_over = self.wait_budget_ns(now_ns) == 0;
        if self.lost == 0 && !is_over && !self.is_late(0, now_ns) {
            return Vec::new();
        }
        let (mut given_up, mut catch_up_ns) = (Vec::new(), 0u64);
        for block in self.blocked() {
            // A catch-up runs to its end, so it takes no longer than a rate may be trusted. Below
            // the first layer no task remains.
            if catch_up_ns >= self.half_life_ns {
                break;
            }
            // Compute must end before the currently awaited bytes arrive, even with this block:
            // otherwise waiting is faster.
            let with_it_ns = catch_up_ns.saturating_add(self.layer_tasks_ns(block, self.costs.layers));
            if is_over || self.blocks[block as usize].is_lost || self.is_late(with_it_ns, now_ns) {
                self.end_wait(block, BlockOrigin::Computed);
                catch_up_ns = catch_up_ns.saturating_add(self.layer_tasks_ns(block, self.layer));
                given_up.push(block);
            }
        }
        given_up.reverse();
        given_up
    }

    /// Whether the awaited bytes arrive, at the current rate, after compute would end with
    /// `more_ns` of additional work.
    fn is_late(&self, more_ns: u64, now_ns: u64) -> bool {
        let load_ns = self.rate.time_ns(self.missing_bytes, now_ns);
        let compute_ns = self.wave_layer_ns.saturating_mul(u64::from(self.costs.layers - self.layer));
        let ends_behind = load_ns > compute_ns.saturating_add(more_ns);
        match (self.arrival_order, self.layer) {
            (ArrivalOrder::ByBlock, 0) => load_ns > self.awaited_ns,
            (ArrivalOrder::ByLayer, 0) => {
                let bytes = u64::from(self.slice_bytes[0]).saturating_mul(self.missing[0].into());
                ends_behind && self.rate.time_ns(bytes, now_ns) > self.wait_budget_ns(now_ns)
            }
            _ => ends_behind,
        }
    }

    /// The awaited blocks without the next slice, from the tail.
    fn blocked(&self) -> Vec<u32> {
        let is_blocked =
            |block: &HistoryBlock| block.origin == BlockOrigin::Awaited && block.arrived_slices <= self.layer;
        let mut found: Vec<u32> =
            (0u32..).zip(&self.blocks).filter(|(_, block)| is_blocked(block)).map(|(at, _)| at).collect();
        found.reverse();
        found
    }

    /// A block is no longer awaited.
    fn end_wait(&mut self, at: u32, origin: BlockOrigin) {
        let block = &mut self.blocks[at as usize];
        block.origin = origin;
        let absent = block.arrived_slices as usize..self.costs.layers as usize;
        self.lost -= u32::from(block.is_lost);
        self.missing[absent.clone()].iter_mut().for_each(|count| *count -= 1);
        self.missing_bytes -= self.slice_bytes[absent].iter().map(|bytes| u64::from(*bytes)).sum::<u64>();
        self.awaited_ns = self.awaited_ns.saturating_sub(self.layer_tasks_ns(at, self.costs.layers));
        if origin == BlockOrigin::Computed {
            self.wave_layer_ns = self.wave_layer_ns.saturating_add(self.costs.block_layer_ns[at as usize]);
        }
    }

    /// Time of this many layers of a block.
    fn layer_tasks_ns(&self, block: u32, layers: u32) -> u64 {
        self.costs.block_layer_ns[block as usize].saturating_mul(layers.into())
    }

    /// Checks every cached sum against its recomputed value.
    #[cfg(test)]
    pub(super) fn assert_adds_up(&self) {
        let of =
            |origin: BlockOrigin| (0u32..).zip(&self.blocks).filter(move |(_, block)| block.origin == origin);
        let layers = self.costs.layers;
        for (layer, missing) in (0..layers).zip(&self.missing) {
            let absent = of(BlockOrigin::Awaited).filter(|(_, block)| block.arrived_slices <= layer).count();
            assert_eq!(*missing as usize, absent, "layer {layer}");
        }
        let bytes = |block: &HistoryBlock| {
            self.slice_bytes[block.arrived_slices as usize..].iter().map(|b| u64::from(*b)).sum::<u64>()
        };
        assert_eq!(self.missing_bytes, of(BlockOrigin::Awaited).map(|(_, block)| bytes(block)).sum::<u64>());
        assert_eq!(
            self.awaited_ns,
            of(BlockOrigin::Awaited).map(|(at, _)| self.layer_tasks_ns(at, layers)).sum::<u64>()
        );
        let pass_ns = of(BlockOrigin::Computed).map(|(at, _)| self.layer_tasks_ns(at, 1)).sum::<u64>();
        assert_eq!(self.wave_layer_ns, pass_ns + self.costs.new_layer_ns);
        assert_eq!(self.lost as usize, of(BlockOrigin::Awaited).filter(|(_, block)| block.is_lost).count());
    }
}
