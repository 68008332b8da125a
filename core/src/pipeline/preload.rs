//! Layer-wise preloading: how much is loaded before a job starts to compute, and in which order
//! (the read buffer).
//!
//! Layer *l* is computed over the new tokens once layer *l* of the whole history is loaded, while
//! later layers load. That hides loading if it is the faster of the two. If it is not, compute
//! catches up with it and waits, unless some layers were loaded into a read buffer before, while
//! the job ahead computed. The paper sizes the buffer by the excess of loading:
//!
//! S_buf = B · (T_load · L_hist − T_pref · L_new)
//!
//! That is a fluid approximation. Layers are loaded and computed as a whole, so with a buffer of
//! S_buf in whole layers compute still waits for up to one layer. If loading is faster, that is the
//! load of the first layer. Otherwise it is the delay of the last layer after the compute before it
//! ends, which is less than one layer's compute. [`Preload::hiding_layers`] is the least number of
//! layers with which it does not wait at all: at most one more.
//!
//! Not here: late or missing bytes (`deadline.rs`).

use super::{ComputeCosts, NS_PER_S};

/// The symbols of the formula: a job with its history, and the assumed speeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreloadWork {
    /// B: load bandwidth in bytes a second.
    pub bytes_per_s: u64,
    /// T_load: time to load one token's KV of all layers, in nanoseconds.
    pub load_ns_per_token: u64,
    /// L_hist: tokens to load.
    pub hist_tokens: u64,
    /// T_pref: time to compute one token through all layers, in nanoseconds.
    pub prefill_ns_per_token: u64,
    /// L_new: tokens to compute after them.
    pub new_tokens: u64,
}

impl PreloadWork {
    /// The symbols for a job with these costs that loads `history_bytes` at this bandwidth.
    #[must_use]
    pub fn of(costs: &ComputeCosts, history_bytes: u64, bytes_per_s: u64) -> PreloadWork {
        let load_ns = (u128::from(history_bytes) * NS_PER_S).div_ceil(u128::from(bytes_per_s.max(1)));
        let compute_ns = costs.new_layer_ns.saturating_mul(costs.layers.into());
        // Only the two products matter, so each is expressed as one token.
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

    /// S_buf in bytes, rounded up; zero if loading is faster.
    #[must_use]
    pub fn read_buffer_bytes(&self) -> u64 {
        let late_ns = self.load_ns().saturating_sub(self.compute_ns());
        clamp((u128::from(self.bytes_per_s) * u128::from(late_ns)).div_ceil(NS_PER_S))
    }
}

/// One slice in the load order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceSlot {
    /// The layer.
    pub layer: u32,
    /// The block, counted from the first loaded one.
    pub block: u32,
    /// When its last byte arrives as planned, in nanoseconds from the first byte.
    pub due_ns: u64,
}

/// Load plan for the history of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preload {
    work: PreloadWork,
    slice_bytes: Vec<u32>,
    blocks: u32,
    buffer_layers: u32,
}

impl Preload {
    /// A plan that loads `blocks` blocks with slices of these lengths in bytes, layer by layer. Its
    /// read buffer is S_buf, rounded up to whole layers of the history, and at most `bytes_max`
    /// bytes.
    #[must_use]
    pub fn new(work: PreloadWork, slice_bytes: &[u32], blocks: u32, bytes_max: u64) -> Preload {
        let mut plan = Preload { work, slice_bytes: slice_bytes.to_vec(), blocks, buffer_layers: 0 };
        plan.buffer_layers =
            plan.layers_for_bytes(work.read_buffer_bytes()).min(plan.layers_within(bytes_max));
        plan
    }

    /// Layers in the read buffer.
    #[must_use]
    pub fn buffer_layers(&self) -> u32 {
        self.buffer_layers
    }

    /// Bytes of those layers.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.bytes_through(self.buffer_layers)
    }

    /// Whether slices of this layer may be requested now: all of them once the job computes, before
    /// that those in the read buffer.
    #[must_use]
    pub fn may_load(&self, layer: u32, is_started: bool) -> bool {
        is_started || layer < self.buffer_layers
    }

    /// All slices in load order: layer by layer, each from the head of the prefix.
    pub fn slots(&self) -> impl Iterator<Item = SliceSlot> + '_ {
        let (mut bytes, total) = (0u128, u128::from(self.bytes_through(self.layers())).max(1));
        let each = (0..self.layers()).flat_map(|layer| (0..self.blocks).map(move |block| (layer, block)));
        each.map(move |(layer, block)| {
            bytes += u128::from(self.slice_bytes[layer as usize]);
            let due_ns = clamp((u128::from(self.work.load_ns()) * bytes).div_ceil(total));
            SliceSlot { layer, block, due_ns }
        })
    }

    /// Time from the start of compute until the job is computed, in nanoseconds. The first `ahead`
    /// layers are loaded at the start, loading continues with the next one at that moment, and a
    /// layer may be computed once it is loaded.
    #[must_use]
    pub fn finish_ns(&self, ahead: u32) -> u64 {
        let (layers, compute_ns) = (self.layers(), self.work.compute_ns());
        let begun_ns = self.loaded_ns(ahead);
        // After the last layer that compute waits for, it and all later ones run without a pause.
        let behind = |layer: u32| {
            let there_ns = self.loaded_ns(layer + 1).saturating_sub(begun_ns);
            there_ns.saturating_add(compute_ns - proportional_ns(compute_ns, layer, layers))
        };
        (ahead..layers).map(behind).fold(compute_ns, u64::max)
    }

    /// Lower bound of any overlap of loading and computing: the longer of the two, in nanoseconds
    /// from the first byte.
    #[must_use]
    pub fn lower_bound_ns(&self) -> u64 {
        self.work.load_ns().max(self.work.compute_ns())
    }

    /// Least number of layers that must be loaded at the start for compute never to wait.
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

    /// When the first `layers` layers are loaded, in nanoseconds from the first byte.
    fn loaded_ns(&self, layers: u32) -> u64 {
        let total = u128::from(self.bytes_through(self.layers())).max(1);
        let bytes = u128::from(self.bytes_through(layers));
        clamp((u128::from(self.work.load_ns()) * bytes).div_ceil(total))
    }

    /// Fewest layers with at least this many bytes; all of them if there are fewer bytes.
    fn layers_for_bytes(&self, bytes: u64) -> u32 {
        (0..self.layers()).find(|layers| self.bytes_through(*layers) >= bytes).unwrap_or(self.layers())
    }

    /// Most layers with at most this many bytes.
    fn layers_within(&self, bytes: u64) -> u32 {
        (0..=self.layers()).rev().find(|layers| self.bytes_through(*layers) <= bytes).unwrap_or(0)
    }
}

/// Part of a time that `done` of `all` equal layers take.
fn proportional_ns(ns: u64, done: u32, all: u32) -> u64 {
    clamp(u128::from(ns) * u128::from(done) / u128::from(all.max(1)))
}

fn clamp(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
