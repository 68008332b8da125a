//! What lookups cost: prompts drawn from all chains, copied into the cache just before, as a router has just
//! received or hashed them, and the clock runs only while the index works.
//!
//! Not here: filling the index (`fill.rs`).

use std::hint::black_box;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use benches::{sorted, thread_cpu_time};

use crate::chains::{Chains, SHARED_BLOCKS};
use crate::events::shuffled;
use crate::side::Side;

/// Hashes of prompts that lie ready at a time: 256 KiB of ours, well inside the second-level cache.
const READY_BLOCKS: usize = 16 * 1_024;
/// Lookups of one run, in blocks asked for: long enough for the clock, short enough for many runs.
const ASKED_BLOCKS: usize = 20_000_000;
/// Lookups of one run that find nothing; each looks at one block only.
const MISSES: usize = 40_000;
/// Prompts of one run that come as tokens.
const TOKEN_PROMPTS: usize = 4_000;
/// Prompts that lie ready as tokens: 256 KiB of 8,000-token prompts.
const READY_TOKEN_PROMPTS: usize = 8;
/// Lookups of one run that are timed one by one.
const TIMED_PROMPTS: usize = 4_000;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Whole chains.
    Held,
    /// Chains of which only the shared blocks are held, and the rest is new.
    Diverging,
    /// Chains that nobody holds any block of.
    Missing,
}

/// Everything lookups need besides the index.
pub(crate) struct Prompts<'chains> {
    pub(crate) chains: &'chains Chains,
    pub(crate) strange: &'chains Chains,
    pub(crate) threads: usize,
}

impl Prompts<'_> {
    /// CPU microseconds of one lookup.
    pub(crate) fn cpu_us<S: Side>(&self, side: &S, asked: Asked, round: u64) -> f64 {
        let order = self.order(asked, round);
        let count = match asked {
            Asked::Missing => MISSES,
            _ => ASKED_BLOCKS / self.chains.shape.chain_blocks as usize,
        };
        let picks: Vec<u32> = order.iter().copied().cycle().take(count).collect();
        let thread = |picks: &[u32]| self.timed::<S>(asked, picks, |one| batch_time(side, one));
        let spent: Duration = std::thread::scope(|scope| {
            let share = picks.len().div_ceil(self.threads);
            let threads: Vec<_> =
                picks.chunks(share).map(|picks| scope.spawn(move || thread(picks))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.map(|spent| spent.unwrap_or_else(|panic| resume_unwind(panic))).sum()
        });
        spent.as_secs_f64() * 1e6 / picks.len() as f64
    }

    /// Wall microseconds of one lookup at the 50th and the 99th percentile, the clock's own 30 ns included.
    pub(crate) fn percentiles<S: Side>(&self, side: &S, round: u64) -> (f64, f64) {
        let picks: Vec<u32> =
            self.order(Asked::Held, round).iter().copied().cycle().take(TIMED_PROMPTS).collect();
        let mut times = Vec::new();
        self.timed::<S>(Asked::Held, &picks, |prompts| {
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

    /// CPU microseconds of hashing one prompt and looking it up, on one thread.
    pub(crate) fn hashed_us<S: Side>(&self, side: &S, round: u64) -> f64 {
        let order = self.order(Asked::Held, round);
        let picks: Vec<u32> = order.iter().copied().cycle().take(TOKEN_PROMPTS).collect();
        let mut spent = Duration::ZERO;
        for picks in picks.chunks(READY_TOKEN_PROMPTS) {
            let prompts: Vec<Vec<u32>> = picks.iter().map(|&chain| self.chains.tokens(chain)).collect();
            spent += clocked(|| {
                for tokens in &prompts {
                    black_box(side.lookup(&side.hash(black_box(tokens))));
                }
            });
        }
        spent.as_secs_f64() * 1e6 / picks.len() as f64
    }

    fn order(&self, asked: Asked, round: u64) -> Vec<u32> {
        shuffled(if asked == Asked::Missing { self.strange } else { self.chains }, round)
    }

    /// Lays prompts ready, as many as fit, and gives them to `time`, again and again.
    fn timed<S: Side>(
        &self,
        asked: Asked,
        picks: &[u32],
        mut time: impl FnMut(&[&[S::Hash]]) -> Duration,
    ) -> Duration {
        let blocks = self.chains.shape.chain_blocks as usize;
        let mut ready = Vec::with_capacity(READY_BLOCKS.max(blocks));
        let mut spent = Duration::ZERO;
        for picks in picks.chunks((READY_BLOCKS / blocks).max(1)) {
            ready.clear();
            picks.iter().for_each(|&chain| self.append::<S>(asked, chain, &mut ready));
            let prompts: Vec<&[S::Hash]> = ready.chunks(blocks).collect();
            spent += time(&prompts);
        }
        spent
    }

    fn append<S: Side>(&self, asked: Asked, chain: u32, ready: &mut Vec<S::Hash>) {
        let (blocks, shared) = (self.chains.shape.chain_blocks as usize, SHARED_BLOCKS as usize);
        match asked {
            Asked::Held => S::append_prompt(self.chains, chain, 0..blocks, ready),
            Asked::Missing => S::append_prompt(self.strange, chain, 0..blocks, ready),
            Asked::Diverging => {
                S::append_prompt(self.chains, chain, 0..shared, ready);
                S::append_prompt(self.strange, chain % self.strange.shape.chains, shared..blocks, ready);
            }
        }
    }

    /// A prompt of one kind, alone.
    pub(crate) fn one<S: Side>(&self, asked: Asked, chain: u32) -> Vec<S::Hash> {
        let mut prompt = Vec::new();
        self.append::<S>(asked, chain, &mut prompt);
        prompt
    }
}

fn batch_time<S: Side>(side: &S, prompts: &[&[S::Hash]]) -> Duration {
    clocked(|| {
        for prompt in prompts {
            black_box(side.lookup(black_box(prompt)));
        }
    })
}

/// CPU time of this thread in `action`, without what reading the clock takes.
fn clocked(action: impl FnOnce()) -> Duration {
    let before = thread_cpu_time();
    action();
    (thread_cpu_time() - before).saturating_sub(clock_cost())
}

/// What two readings of the clock are apart when nothing lies between them.
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
