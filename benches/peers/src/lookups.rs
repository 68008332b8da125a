//! Lookup times for random prompts. Each prompt is copied into the cache first, as a router has
//! just received or hashed it. The clock runs only during the lookup.
//!
//! Not here: filling the index (`fill.rs`).

use std::hint::black_box;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use benches::{sorted, thread_cpu_time};

use crate::chains::{Chains, SHARED_BLOCKS};
use crate::events::shuffled;
use crate::side::IndexSide;

/// Prompt hashes prepared at a time: 256 KiB of ours, well inside the second-level cache.
const PREPARED_BLOCKS: usize = 16 * 1_024;
/// Blocks looked up per run: long enough for the clock, short enough for many runs.
const LOOKUP_BLOCKS: usize = 20_000_000;
/// Misses per run; each inspects only one block.
const MISSES: usize = 40_000;
/// Prompts per run that come as tokens.
const TOKEN_PROMPTS: usize = 4_000;
/// Token prompts prepared at a time: 256 KiB of 8,000-token prompts.
const PREPARED_TOKEN_PROMPTS: usize = 8;
/// Lookups per run that are timed individually.
const TIMED_PROMPTS: usize = 4_000;

/// Kind of prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromptKind {
    /// Whole chains that are held.
    Held,
    /// Chains with only the shared blocks held; the rest is new.
    Diverging,
    /// Chains without any held block.
    Missing,
}

/// The prompts, independent of the index.
pub(crate) struct Prompts<'chains> {
    pub(crate) chains: &'chains Chains,
    pub(crate) unknown: &'chains Chains,
    pub(crate) threads: usize,
}

impl Prompts<'_> {
    /// CPU microseconds per lookup.
    pub(crate) fn cpu_us<S: IndexSide>(&self, side: &S, asked: PromptKind, round: u64) -> f64 {
        let order = self.order(asked, round);
        let count = match asked {
            PromptKind::Missing => MISSES,
            _ => LOOKUP_BLOCKS / self.chains.shape.chain_blocks as usize,
        };
        let picks: Vec<u32> = order.iter().copied().cycle().take(count).collect();
        let thread = |picks: &[u32]| self.time_batches::<S>(asked, picks, |one| batch_time(side, one));
        let spent: Duration = std::thread::scope(|scope| {
            let share = picks.len().div_ceil(self.threads);
            let threads: Vec<_> =
                picks.chunks(share).map(|picks| scope.spawn(move || thread(picks))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.map(|spent| spent.unwrap_or_else(|panic| resume_unwind(panic))).sum()
        });
        spent.as_secs_f64() * 1e6 / picks.len() as f64
    }

    /// Wall microseconds of one lookup at the 50th and 99th percentiles, including the clock's own
    /// 30 ns.
    pub(crate) fn percentiles<S: IndexSide>(&self, side: &S, round: u64) -> (f64, f64) {
        let picks: Vec<u32> =
            self.order(PromptKind::Held, round).iter().copied().cycle().take(TIMED_PROMPTS).collect();
        let mut times = Vec::new();
        self.time_batches::<S>(PromptKind::Held, &picks, |prompts| {
            times.extend(prompts.iter().map(|prompt| {
                let start = Instant::now();
                black_box(side.lookup(black_box(prompt)));
                start.elapsed().as_secs_f64() * 1e6
            }));
            Duration::ZERO
        });
        let times = sorted(times.into_iter());
        (times[times.len() / 2], times[times.len() * 99 / 100])
    }

    /// CPU microseconds to hash one prompt and look it up, on one thread.
    pub(crate) fn hash_and_lookup_us<S: IndexSide>(&self, side: &S, round: u64) -> f64 {
        let order = self.order(PromptKind::Held, round);
        let picks: Vec<u32> = order.iter().copied().cycle().take(TOKEN_PROMPTS).collect();
        let mut spent = Duration::ZERO;
        for picks in picks.chunks(PREPARED_TOKEN_PROMPTS) {
            let prompts: Vec<Vec<u32>> = picks.iter().map(|&chain| self.chains.tokens(chain)).collect();
            spent += cpu_time_of(|| {
                for tokens in &prompts {
                    black_box(side.lookup(&side.hash(black_box(tokens))));
                }
            });
        }
        spent.as_secs_f64() * 1e6 / picks.len() as f64
    }

    fn order(&self, asked: PromptKind, round: u64) -> Vec<u32> {
        shuffled(if asked == PromptKind::Missing { self.unknown } else { self.chains }, round)
    }

    /// Prepares prompts in batches and passes each batch to `time`.
    fn time_batches<S: IndexSide>(
        &self,
        asked: PromptKind,
        picks: &[u32],
        mut time: impl FnMut(&[&[S::Hash]]) -> Duration,
    ) -> Duration {
        let blocks = self.chains.shape.chain_blocks as usize;
        let mut ready = Vec::with_capacity(PREPARED_BLOCKS.max(blocks));
        let mut spent = Duration::ZERO;
        for picks in picks.chunks((PREPARED_BLOCKS / blocks).max(1)) {
            ready.clear();
            picks.iter().for_each(|&chain| self.append::<S>(asked, chain, &mut ready));
            let prompts: Vec<&[S::Hash]> = ready.chunks(blocks).collect();
            spent += time(&prompts);
        }
        spent
    }

    fn append<S: IndexSide>(&self, asked: PromptKind, chain: u32, ready: &mut Vec<S::Hash>) {
        let (blocks, shared) = (self.chains.shape.chain_blocks as usize, SHARED_BLOCKS as usize);
        match asked {
            PromptKind::Held => S::append_prompt(self.chains, chain, 0..blocks, ready),
            PromptKind::Missing => S::append_prompt(self.unknown, chain, 0..blocks, ready),
            PromptKind::Diverging => {
                S::append_prompt(self.chains, chain, 0..shared, ready);
                S::append_prompt(self.unknown, chain % self.unknown.shape.chains, shared..blocks, ready);
            }
        }
    }

    /// A single prompt of one kind.
    pub(crate) fn prompt<S: IndexSide>(&self, asked: PromptKind, chain: u32) -> Vec<S::Hash> {
        let mut prompt = Vec::new();
        self.append::<S>(asked, chain, &mut prompt);
        prompt
    }
}

fn batch_time<S: IndexSide>(side: &S, prompts: &[&[S::Hash]]) -> Duration {
    cpu_time_of(|| {
        for prompt in prompts {
            black_box(side.lookup(black_box(prompt)));
        }
    })
}

/// CPU time of this thread in `action`, without the cost of reading the clock.
fn cpu_time_of(action: impl FnOnce()) -> Duration {
    let before = thread_cpu_time();
    action();
    (thread_cpu_time() - before).saturating_sub(clock_cost())
}

/// Time between two adjacent readings of the clock.
fn clock_cost() -> Duration {
    static COST: std::sync::OnceLock<Duration> = std::sync::OnceLock::new();
    *COST.get_or_init(|| {
        let mut gaps: Vec<Duration> = (0..1_001)
            .map(|_| {
                let before = thread_cpu_time();
                thread_cpu_time() - before
            })
            .collect();
        gaps.sort_unstable();
        gaps[gaps.len() / 2]
    })
}
