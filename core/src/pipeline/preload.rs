//! How much is loaded before a job's turn, and in which order: the read buffer of layer-wise preloading.
//!
//! Layer *l* is computed over the new tokens once layer *l* of the whole history is there, while later layers are on
//! their way. That hides loading where it is the faster of the two. Where it is not, compute catches up with it and
//! waits, unless some of it was loaded before: while the job ahead computes, into a read buffer. The paper
//! sizes it by what loading takes longer:
//!
//! S_buf = B · (T_load · L_hist − T_pref · L_new)
//!
//! That is a fluid's formula. Layers come and are computed whole, so behind a buffer of S_buf in whole layers
//! compute waits for one layer at most: for the load of the first where loading is the faster, else for what
//! the last layer comes later than the compute before it ends, which is less than one layer's compute.
//! [`Preload::hiding_layers`] is the least number of layers behind which it does not wait at all: at most one
//! more.
//!
//! Not here: what to do when bytes do not come as they should (`deadline.rs`).

use super::{Costs, NS_PER_S};

/// The symbols of the formula: a job behind its history, and the speeds it is reckoned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreloadWork {
    /// B: bytes a second that come.
    pub bytes_per_s: u64,
    /// T_load: time to load one token's KV of all layers, in nanoseconds.
    pub load_ns_per_token: u64,
    /// L_hist: tokens that are loaded.
    pub hist_tokens: u64,
    /// T_pref: time to compute one token through all layers, in nanoseconds.
    pub prefill_ns_per_token: u64,
    /// L_new: tokens that are computed behind them.
    pub new_tokens: u64,
}

impl PreloadWork {
    /// The symbols for a job with these costs, of whose history so many bytes are loaded at such a rate.
    #[must_use]
    pub fn of(costs: &Costs, history_bytes: u64, bytes_per_s: u64) -> PreloadWork {
        let load_ns = (u128::from(history_bytes) * NS_PER_S).div_ceil(u128::from(bytes_per_s.max(1)));
        let compute_ns = costs.new_layer_ns.saturating_mul(costs.layers.into());
        // Only the two products count, and these are of tokens that all take the same.
        PreloadWork {
            bytes_per_s,
            load_ns_per_token: clamp(load_ns),
            hist_tokens: 1,
            prefill_ns_per_token: compute_ns,
            new_tokens: 1,
        }
    }

    /// T_load · L_hist in nanoseconds.
    #[must_use]
    pub fn load_ns(&self) -> u64 {
        self.load_ns_per_token.saturating_mul(self.hist_tokens)
    }

    /// T_pref · L_new in nanoseconds.
    #[must_use]
    pub fn compute_ns(&self) -> u64 {
        self.prefill_ns_per_token.saturating_mul(self.new_tokens)
    }

    /// S_buf in bytes, rounded up; zero where loading is the faster.
    #[must_use]
    pub fn read_buffer_bytes(&self) -> u64 {
        let late_ns = self.load_ns().saturating_sub(self.compute_ns());
        clamp((u128::from(self.bytes_per_s) * u128::from(late_ns)).div_ceil(NS_PER_S))
    }
}

/// One slice's place in the order of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The layer.
    pub layer: u32,
    /// The block, counted from the first that is loaded.
    pub block: u32,
    /// When its last byte is there if all goes as reckoned, in nanoseconds from the first byte.
    pub due_ns: u64,
}

/// How the history of one job is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    work: PreloadWork,
    slice_bytes: Vec<u32>,
    blocks: u32,
    buffer_layers: u32,
}

impl Preload {
    /// The plan of loading `blocks` blocks whose slices have these lengths in bytes, layer by layer: a read buffer of
    /// S_buf, rounded up to whole layers of the history, and of at most `bytes_max` bytes.
    #[must_use]
    pub fn new(work: PreloadWork, slice_bytes: &[u32], blocks: u32, bytes_max: u64) -> Preload {
        let mut plan = Preload { work, slice_bytes: slice_bytes.to_vec(), blocks, buffer_layers: 0 };
        plan.buffer_layers = plan.layers_of(work.read_buffer_bytes()).min(plan.layers_within(bytes_max));
        plan
    }

    /// Layers that the read buffer takes.
    #[must_use]
    pub fn buffer_layers(&self) -> u32 {
        self.buffer_layers
    }

    /// Bytes of those layers.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.bytes_through(self.buffer_layers)
    }

    /// Whether slices of this layer may be asked for now: all of them once compute of the job has begun, and before
    /// that what the read buffer takes.
    #[must_use]
    pub fn may_load(&self, layer: u32, is_begun: bool) -> bool {
        is_begun || layer < self.buffer_layers
    }

    /// All slices in the order of loading: layer by layer, in each layer from the head of the prefix.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let (mut bytes, total) = (0u128, u128::from(self.bytes_through(self.layers())).max(1));
        let each = (0..self.layers()).flat_map(|layer| (0..self.blocks).map(move |block| (layer, block)));
        each.map(move |(layer, block)| {
            bytes += u128::from(self.slice_bytes[layer as usize]);
            let due_ns = clamp((u128::from(self.work.load_ns()) * bytes).div_ceil(total));
            Slot { layer, block, due_ns }
        })
    }

    /// Time from the job's turn until all of it is computed, in nanoseconds, when the first `ahead` layers are
    /// there at its turn, loading goes on with the next one at that moment, and the first layer may be computed
    /// once it is there.
    #[must_use]
    pub fn finish_ns(&self, ahead: u32) -> u64 {
        let (layers, compute_ns) = (self.layers(), self.work.compute_ns());
        let begun_ns = self.loaded_ns(ahead);
        // Whichever layer is the last that compute waits for, it and all behind it are computed without a pause then.
        let behind = |layer: u32| {
            let there_ns = self.loaded_ns(layer + 1).saturating_sub(begun_ns);
            there_ns.saturating_add(compute_ns - part(compute_ns, layer, layers))
        };
        (ahead..layers).map(behind).fold(compute_ns, u64::max)
    }

    /// No way of loading and computing side by side takes less than the longer of the two, in nanoseconds from the
    /// first byte on.
    #[must_use]
    pub fn bound_ns(&self) -> u64 {
        self.work.load_ns().max(self.work.compute_ns())
    }

    /// The least number of layers that must be there at the job's turn for its compute never to wait.
    #[must_use]
    pub fn hiding_layers(&self) -> u32 {
        let is_hidden = |ahead: &u32| self.finish_ns(*ahead) <= self.work.compute_ns();
        (0..self.layers()).find(is_hidden).unwrap_or(self.layers())
    }

    /// Layers of the model.
    #[must_use]
    pub fn layers(&self) -> u32 {
        u32::try_from(self.slice_bytes.len()).unwrap_or(u32::MAX)
    }

    /// Bytes of the first `layers` layers of all blocks.
    fn bytes_through(&self, layers: u32) -> u64 {
        let one: u64 = self.slice_bytes.iter().take(layers as usize).map(|bytes| u64::from(*bytes)).sum();
        one.saturating_mul(self.blocks.into())
    }

    /// When the first `layers` layers are there, in nanoseconds from the first byte.
    fn loaded_ns(&self, layers: u32) -> u64 {
        let total = u128::from(self.bytes_through(self.layers())).max(1);
        let bytes = u128::from(self.bytes_through(layers));
        clamp((u128::from(self.work.load_ns()) * bytes).div_ceil(total))
    }

    /// The fewest layers that have so many bytes; all of them when there are fewer.
    fn layers_of(&self, bytes: u64) -> u32 {
        (0..self.layers()).find(|layers| self.bytes_through(*layers) >= bytes).unwrap_or(self.layers())
    }

    /// The most layers that do not have more bytes.
    fn layers_within(&self, bytes: u64) -> u32 {
        (0..=self.layers()).rev().find(|layers| self.bytes_through(*layers) <= bytes).unwrap_or(0)
    }
}

/// What `done` of `all` layers take of a time that is the same for each.
fn part(ns: u64, done: u32, all: u32) -> u64 {
    clamp(u128::from(ns) * u128::from(done) / u128::from(all.max(1)))
}

fn clamp(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
