//! Wait or recompute: what compute does next while the history comes, slice by slice, from a path nobody can trust.
//!
//! **The game.** History blocks 0, 1, … have a slice in each layer. A *cell* is one layer of one block;
//! computing it takes what comes out of the cell below and the slices of that layer of all earlier blocks. All
//! tokens that are computed go through the layers together: they are the *pass*. At first it has the new tokens
//! only, and layer *l* of it can run when each block that is not in it has its slice *l*. A block whose slices
//! do not come *catches up*: its cells below the pass are computed, which never waits (whatever ran there had
//! all slices of those layers), and it is in the pass from there on. A block of the pass whose last slice came
//! after all leaves it, and its cells above are never computed. So nothing is computed twice, and every block
//! that arrives in time counts, however late.
//!
//! **Why it never takes longer than recomputing.** Let R be the time of all cells, which is what recomputing
//! takes. Each is computed once at most, and of a block that is there whole and not in the pass, none any more:
//! that is *saved*. So
//!
//! total = computed + idle ≤ R − saved + idle,
//!
//! and compute idles only while idle < R / [`WAIT_SHARE`] + saved. Hence total ≤ R · (1 + 1/64), plus what the
//! caller takes to decide and to wake up, *whatever* arrives and whenever: no estimate is part of the argument.
//! Blocks that arrive pay for the wait for others, and a path that gives nothing costs 1/64. Any rule that
//! waits for the first byte at all pays that: who never sends makes it pay exactly what it would wait. The rest
//! up to 2 % is for the caller's lateness. Where the costs are wrong, it is by their share that this is.
//!
//! **Where R is small.** Who waits wakes up no more exactly than its clock turns, a millisecond with most timers. A 64th of R is
//! less than that where R is below 64 of them, and then it would be the clock that decides: the first wait is over before
//! anything can have come, and the rate has halved several times while nobody could look. So compute may idle for
//! [`GRAINS`] turns of the caller's clock at least, and the rate halves no sooner: total ≤ R + max(R / 64, two turns). In one
//! silence it still idles no longer than what has not come would take to compute, so never for more than R.
//!
//! **When it waits, within that.** Three judgements, which only make it better:
//! - In one silence it never idles longer than what has not come would take to compute (as who rents skis until
//!   they would have been bought): so a silence costs twice what the best foresight would have paid, at most.
//! - If at the rate of the last moments (`rate.rs`) what is awaited comes later than compute would end, tail
//!   blocks are computed until both end together. Tail blocks, because the head comes first and every block
//!   needs it. With slices that come layer by layer, compute then has something to do at each moment, and the
//!   total falls below that of loading alone.
//! - Where blocks come whole, nothing runs before the last awaited one is there: load and compute add up, the
//!   sum has its least value at one of the ends (see `schedule/cost.rs`), and so all or nothing is awaited.
//!
//! Not here: the clock, the bytes and their checks, and which slices are asked for (`preload.rs`, `client/`).

use super::Rate;
use crate::schedule::HardwareProfile;

/// The share of recomputing that compute may idle for bytes that never come: 1/64 = 1.6 %, and 0.4 % of the 2 %
/// are left to whoever is late.
pub const WAIT_SHARE: u64 = 64;

/// Turns of the caller's clock that compute may idle for bytes that never come, where that is longer than the share of recomputing: one
/// may be over as soon as it began, so only with a second is there one whole turn in which something can come.
pub const GRAINS: u64 = 2;

/// Looks in a half-life of silence: what is decided follows the rate that closely.
const LOOKS: u64 = 4;

/// What computing takes, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// One layer of each history block.
    pub block_layer_ns: Vec<u64>,
    /// One layer of the new tokens.
    pub new_layer_ns: u64,
    /// Layers.
    pub layers: u32,
}

impl Costs {
    /// The costs under a profile: `blocks` full blocks of `block_tokens`, and `new_tokens` behind them.
    #[must_use]
    pub fn of(
        profile: &HardwareProfile,
        blocks: u32,
        block_tokens: u32,
        new_tokens: u64,
        layers: u32,
    ) -> Costs {
        let (tokens, layers) = (u64::from(block_tokens), layers.max(1));
        let each = |block: u32| profile.prefill_ns(u64::from(block) * tokens, tokens).div_ceil(layers.into());
        let new_layer_ns = profile.prefill_ns(u64::from(blocks) * tokens, new_tokens).div_ceil(layers.into());
        Costs { block_layer_ns: (0..blocks).map(each).collect(), new_layer_ns, layers }
    }

    /// The costs of an engine that takes `times` as long for everything.
    #[must_use]
    pub fn scaled(&self, times: f64) -> Costs {
        let scaled = |ns: &u64| (*ns as f64 * times) as u64;
        let block_layer_ns = self.block_layer_ns.iter().map(scaled).collect();
        Costs { block_layer_ns, new_layer_ns: scaled(&self.new_layer_ns), layers: self.layers }
    }

    /// R: everything computed and nothing fetched.
    #[must_use]
    pub fn recompute_ns(&self) -> u64 {
        let blocks = self.block_layer_ns.iter().fold(0u64, |sum, ns| sum.saturating_add(*ns));
        blocks.saturating_add(self.new_layer_ns).saturating_mul(self.layers.into())
    }

    /// The longest that compute idles for bytes that never come, by a clock that turns every `grain_ns` (0 for one that is exact).
    #[must_use]
    pub fn wait_ns(&self, grain_ns: u64) -> u64 {
        (self.recompute_ns() / WAIT_SHARE).max(grain_ns.saturating_mul(GRAINS))
    }

    /// The longest that any of it may take by such a clock: what comes later than this after the job's turn is of no use.
    #[must_use]
    pub fn deadline_ns(&self, grain_ns: u64) -> u64 {
        self.recompute_ns().saturating_add(self.wait_ns(grain_ns))
    }
}

/// How slices come. It changes what is worth waiting for, never what holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrive {
    /// A layer of all blocks, then the next layer.
    ByLayer,
    /// All layers of a block, then the next block.
    ByBlock,
}

/// What compute does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// This layer of the pass: of the new tokens and the blocks of [`Race::pass`].
    Layer {
        /// The layer.
        layer: u32,
    },
    /// The first layers of these blocks, which are in the pass then.
    CatchUp {
        /// The blocks, in ascending order.
        blocks: Vec<u32>,
        /// So many layers, from the first.
        layers: u32,
    },
    /// Nothing until this moment, or until something arrives.
    Wait {
        /// The moment.
        until_ns: u64,
    },
    /// All layers are computed.
    Done,
}

/// Where a block's KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// It is to come.
    Awaited,
    /// It was all there before the pass needed it, or before it was computed to the end.
    Arrived,
    /// It is computed with the pass.
    Computed,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    origin: Origin,
    /// Leading slices that are here.
    here: u32,
    is_lost: bool,
}

/// What was said last, and is over when somebody asks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    Layer,
    Wait { since_ns: u64 },
}

/// One job's compute against the arrival of its history.
#[derive(Clone, Debug)]
pub struct Race {
    costs: Costs,
    slice_bytes: Vec<u32>,
    arrive: Arrive,
    blocks: Vec<Block>,
    /// The next layer of the pass.
    layer: u32,
    /// For each layer, the awaited blocks whose slice of it is not here.
    missing: Vec<u32>,
    /// Bytes of all slices that are awaited and not here.
    missing_bytes: u64,
    /// Time of all cells of awaited blocks.
    awaited_ns: u64,
    /// Awaited blocks that will not come.
    lost: u32,
    /// One layer of the pass.
    pass_layer_ns: u64,
    /// Blocks of the pass that are all here.
    leaving: Vec<u32>,
    /// What may be idled in vain.
    wait_ns: u64,
    saved_ns: u64,
    idle_ns: u64,
    is_begun: bool,
    heard_ns: u64,
    half_life_ns: u64,
    rate: Rate,
    said: Said,
}

impl Race {
    /// A job whose history has one slice of each of these lengths in bytes in every block, expected at this rate.
    /// The costs say how many layers and blocks there are; a length that is not there counts as zero.
    #[must_use]
    pub fn new(costs: Costs, slice_bytes: &[u32], arrive: Arrive, bytes_per_s: u64, now_ns: u64) -> Race {
        Race::by_clock(costs, slice_bytes, arrive, bytes_per_s, now_ns, 0)
    }

    /// The same for a caller that wakes up no more exactly than every `grain_ns`.
    #[must_use]
    pub fn by_clock(
        costs: Costs,
        slice_bytes: &[u32],
        arrive: Arrive,
        bytes_per_s: u64,
        now_ns: u64,
        grain_ns: u64,
    ) -> Race {
        let layers = costs.layers as usize;
        let mut slice_bytes = slice_bytes.to_vec();
        slice_bytes.resize(layers, 0);
        let blocks = costs.block_layer_ns.len();
        let one: u64 = slice_bytes.iter().map(|bytes| u64::from(*bytes)).sum();
        let recompute_ns = costs.recompute_ns();
        let wait_ns = costs.wait_ns(grain_ns);
        let half_life_ns = wait_ns.max(1);
        let new_ns = costs.new_layer_ns.saturating_mul(costs.layers.into());
        Race {
            slice_bytes,
            arrive,
            blocks: vec![Block { origin: Origin::Awaited, here: 0, is_lost: false }; blocks],
            layer: 0,
            missing: vec![u32::try_from(blocks).unwrap_or(u32::MAX); layers],
            missing_bytes: one.saturating_mul(blocks as u64),
            awaited_ns: recompute_ns.saturating_sub(new_ns),
            lost: 0,
            pass_layer_ns: costs.new_layer_ns,
            leaving: Vec::new(),
            wait_ns,
            saved_ns: 0,
            idle_ns: 0,
            is_begun: false,
            heard_ns: now_ns,
            half_life_ns,
            rate: Rate::new(bytes_per_s, half_life_ns, now_ns),
            said: Said::Nothing,
            costs,
        }
    }

    /// It is the job's turn. How slices came before says nothing: the read buffer was full, or nobody looked.
    pub fn begin(&mut self, now_ns: u64) {
        self.is_begun = true;
        self.heard_ns = self.heard_ns.max(now_ns);
        self.rate.resume(now_ns);
    }

    /// It is known now how slices come.
    pub fn comes(&mut self, arrive: Arrive) {
        self.arrive = arrive;
    }

    /// The first `layers` slices of a block are here, and proven. What is known already, or of no block,
    /// changes nothing.
    pub fn arrived(&mut self, block: u32, layers: u32, now_ns: u64) {
        let layers = layers.min(self.costs.layers);
        let Some(found) = self.blocks.get_mut(block as usize).filter(|found| found.here < layers) else {
            return;
        };
        let came = found.here as usize..layers as usize;
        found.here = layers;
        let (origin, is_whole) = (found.origin, layers == self.costs.layers);
        let bytes = self.slice_bytes[came.clone()].iter().map(|bytes| u64::from(*bytes)).sum();
        if self.is_begun {
            self.rate.arrived(bytes, now_ns);
        }
        self.heard_ns = self.heard_ns.max(now_ns);
        if origin == Origin::Awaited {
            self.missing[came].iter_mut().for_each(|count| *count -= 1);
            self.missing_bytes -= bytes;
        }
        match origin {
            Origin::Awaited if is_whole => {
                self.end_wait(block, Origin::Arrived);
                self.saved_ns = self.saved_ns.saturating_add(self.cells_ns(block, self.costs.layers));
            }
            Origin::Computed if is_whole => self.leaving.push(block),
            _ => {}
        }
    }

    /// What has not come of this block will not come: its path is gone.
    pub fn lost(&mut self, block: u32) {
        let Some(found) = self.blocks.get_mut(block as usize) else { return };
        if found.origin == Origin::Awaited && !found.is_lost {
            found.is_lost = true;
            self.lost += 1;
        }
    }

    /// What compute does next. Whatever was said before is over: a layer and a catching up are computed, and
    /// the time since a wait was idle.
    pub fn next(&mut self, now_ns: u64) -> Next {
        match std::mem::replace(&mut self.said, Said::Nothing) {
            Said::Layer => self.layer += 1,
            Said::Wait { since_ns } => {
                self.idle_ns = self.idle_ns.saturating_add(now_ns.saturating_sub(since_ns));
            }
            Said::Nothing => {}
        }
        self.leave();
        if self.layer == self.costs.layers {
            return Next::Done;
        }
        if self.is_blocked() {
            let blocks = self.give_up(now_ns);
            if !blocks.is_empty() && self.layer > 0 {
                return Next::CatchUp { blocks, layers: self.layer };
            }
        }
        if self.is_blocked() {
            self.said = Said::Wait { since_ns: now_ns };
            let look_ns = (self.half_life_ns / LOOKS).max(1);
            return Next::Wait {
                until_ns: now_ns.saturating_add(self.patience_ns(now_ns).min(look_ns).max(1)),
            };
        }
        self.said = Said::Layer;
        Next::Layer { layer: self.layer }
    }

    /// Whether the pass cannot go on with what is here.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.missing.get(self.layer as usize).is_some_and(|count| *count > 0)
    }

    /// The blocks of the pass, in ascending order: those that are computed.
    pub fn pass(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.blocks).filter(|(_, block)| block.origin == Origin::Computed).map(|(at, _)| at)
    }

    /// Whether the block is to come. One that is computed may come too, and is computed no further then; but
    /// it stands behind those that are awaited.
    #[must_use]
    pub fn is_awaited(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|block| block.origin == Origin::Awaited)
    }

    /// Bytes that are awaited and not here.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.missing_bytes
    }

    /// Time that compute idled so far, in nanoseconds.
    #[must_use]
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
    }

    /// Time of the cells that will not be computed, because their blocks came, in nanoseconds.
    #[must_use]
    pub fn saved_ns(&self) -> u64 {
        self.saved_ns
    }

    /// How long compute may idle from now on.
    fn patience_ns(&self, now_ns: u64) -> u64 {
        let budget_ns = self.wait_ns.saturating_add(self.saved_ns);
        let silent_ns = now_ns.saturating_sub(self.heard_ns);
        budget_ns.saturating_sub(self.idle_ns).min(self.awaited_ns.saturating_sub(silent_ns))
    }

    /// Blocks of the pass that came after all.
    fn leave(&mut self) {
        for block in std::mem::take(&mut self.leaving) {
            self.blocks[block as usize].origin = Origin::Arrived;
            let layer_ns = self.costs.block_layer_ns[block as usize];
            self.pass_layer_ns = self.pass_layer_ns.saturating_sub(layer_ns);
            let above = self.cells_ns(block, self.costs.layers - self.layer);
            self.saved_ns = self.saved_ns.saturating_add(above);
        }
    }

    /// Decides which blocks are not waited for any longer, and lets them into the pass. Ascending.
    fn give_up(&mut self, now_ns: u64) -> Vec<u32> {
        let is_over = self.patience_ns(now_ns) == 0;
        if self.lost == 0 && !is_over && !self.is_late(0, now_ns) {
            return Vec::new();
        }
        let (mut given_up, mut catch_up_ns) = (Vec::new(), 0u64);
        for block in self.blocked() {
            // What is begun is done to its end: not for longer than a rate may be trusted. Below the first
            // layer there is nothing to be done.
            if catch_up_ns >= self.half_life_ns {
                break;
            }
            // Also with this block, compute must end before what is awaited now is there: else waiting is sooner.
            let with_it_ns = catch_up_ns.saturating_add(self.cells_ns(block, self.costs.layers));
            if is_over || self.blocks[block as usize].is_lost || self.is_late(with_it_ns, now_ns) {
                self.end_wait(block, Origin::Computed);
                catch_up_ns = catch_up_ns.saturating_add(self.cells_ns(block, self.layer));
                given_up.push(block);
            }
        }
        given_up.reverse();
        given_up
    }

    /// Whether what is awaited comes later than compute ends that has `more_ns` to do besides, at the rate of now.
    fn is_late(&self, more_ns: u64, now_ns: u64) -> bool {
        let load_ns = self.rate.time_ns(self.missing_bytes, now_ns);
        let compute_ns = self.pass_layer_ns.saturating_mul(u64::from(self.costs.layers - self.layer));
        let ends_behind = load_ns > compute_ns.saturating_add(more_ns);
        match (self.arrive, self.layer) {
            (Arrive::ByBlock, 0) => load_ns > self.awaited_ns,
            (Arrive::ByLayer, 0) => {
                let bytes = u64::from(self.slice_bytes[0]).saturating_mul(self.missing[0].into());
                ends_behind && self.rate.time_ns(bytes, now_ns) > self.patience_ns(now_ns)
            }
            _ => ends_behind,
        }
    }

    /// The awaited blocks without the next slice, from the tail.
    fn blocked(&self) -> Vec<u32> {
        let is_blocked = |block: &Block| block.origin == Origin::Awaited && block.here <= self.layer;
        let mut found: Vec<u32> =
            (0u32..).zip(&self.blocks).filter(|(_, block)| is_blocked(block)).map(|(at, _)| at).collect();
        found.reverse();
        found
    }

    /// A block is awaited no longer.
    fn end_wait(&mut self, at: u32, origin: Origin) {
        let block = &mut self.blocks[at as usize];
        block.origin = origin;
        let absent = block.here as usize..self.costs.layers as usize;
        self.lost -= u32::from(block.is_lost);
        self.missing[absent.clone()].iter_mut().for_each(|count| *count -= 1);
        self.missing_bytes -= self.slice_bytes[absent].iter().map(|bytes| u64::from(*bytes)).sum::<u64>();
        self.awaited_ns = self.awaited_ns.saturating_sub(self.cells_ns(at, self.costs.layers));
        if origin == Origin::Computed {
            self.pass_layer_ns = self.pass_layer_ns.saturating_add(self.costs.block_layer_ns[at as usize]);
        }
    }

    /// Time of so many cells of a block.
    fn cells_ns(&self, block: u32, layers: u32) -> u64 {
        self.costs.block_layer_ns[block as usize].saturating_mul(layers.into())
    }

    /// Everything that is kept is what it would be if it were added up now.
    #[cfg(test)]
    pub(super) fn assert_adds_up(&self) {
        let of = |origin: Origin| (0u32..).zip(&self.blocks).filter(move |(_, block)| block.origin == origin);
        let layers = self.costs.layers;
        for (layer, missing) in (0..layers).zip(&self.missing) {
            let absent = of(Origin::Awaited).filter(|(_, block)| block.here <= layer).count();
            assert_eq!(*missing as usize, absent, "layer {layer}");
        }
        let bytes = |block: &Block| {
            self.slice_bytes[block.here as usize..].iter().map(|b| u64::from(*b)).sum::<u64>()
        };
        assert_eq!(self.missing_bytes, of(Origin::Awaited).map(|(_, block)| bytes(block)).sum::<u64>());
        assert_eq!(
            self.awaited_ns,
            of(Origin::Awaited).map(|(at, _)| self.cells_ns(at, layers)).sum::<u64>()
        );
        let pass_ns = of(Origin::Computed).map(|(at, _)| self.cells_ns(at, 1)).sum::<u64>();
        assert_eq!(self.pass_layer_ns, pass_ns + self.costs.new_layer_ns);
        assert_eq!(self.lost as usize, of(Origin::Awaited).filter(|(_, block)| block.is_lost).count());
    }
}
