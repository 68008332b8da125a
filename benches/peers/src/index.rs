//! kvfleet's index beside the peers' indexes: memory, store, remove and lookups. Rows vary size,
//! holders and threads.
//!
//! Not here: growth with the number of entries (`growth.rs`).

use benches::{Better, Outcome, outcome};

use crate::Effort;
use crate::chains::{Chains, Shape};
use crate::fill::{Cycle, Replay};
use crate::judge::{Printer, RowLabel, Target};
use crate::lookups::{PromptKind, Prompts};
use crate::side::{DynamoCrtc, IndexSide, KvfleetIndex, SmgChainIndex};

/// Blocks of the usual chain.
pub(crate) const CHAIN_BLOCKS: u32 = 500;
/// Blocks of the long chain: 128 Ki tokens.
const LONG_CHAIN_BLOCKS: u32 = 8_000;
/// Blocks in chains that no node holds: more hashes than any cache can hold.
const UNKNOWN_BLOCKS: u64 = 2_000_000;
/// From this size on, memory per entry has a target; below it, fixed parts dominate.
const TARGET_ENTRIES_MIN: u64 = 10_000_000;
/// Chains that all sides must agree on before timing starts.
const CHECKED_CHAINS: usize = 200;

/// One combination of size, holders and threads.
#[derive(Clone, Copy, Debug)]
struct Setting {
    entries: u64,
    holders: u32,
    threads: usize,
}

impl Setting {
    fn name(&self, what: &str) -> String {
        let Setting { entries, holders, threads } = self;
        let millions = *entries as f64 / 1e6;
        format!("{what}; {millions} M, holders {holders}, threads {threads}")
    }
}

/// Runs all requested combinations.
pub(crate) fn run(effort: &Effort, printer: Printer) -> anyhow::Result<()> {
    printer.header();
    for &entries in &effort.entries {
        for &holders in &effort.holders {
            for &threads in &effort.threads {
                let setting = Setting { entries, holders, threads };
                events(effort, setting, printer)?;
                lookups(effort, setting, CHAIN_BLOCKS, printer)?;
                if holders == 1 {
                    lookups(effort, setting, LONG_CHAIN_BLOCKS, printer)?;
                }
            }
        }
    }
    Ok(())
}

/// Results of each side in each round: kvfleet first, then the peers.
struct SideRounds<T>([Vec<T>; 3]);

const PEERS: [&str; 2] = [SmgChainIndex::NAME, DynamoCrtc::NAME];

impl<T> SideRounds<T> {
    /// Each round starts with a different side, so that none always inherits the same machine
    /// state.
    fn run(rounds: usize, sides: [&dyn Fn(u64) -> anyhow::Result<T>; 3]) -> anyhow::Result<Self> {
        let mut figures = [const { Vec::new() }; 3];
        for round in 0..rounds {
            for turn in 0..sides.len() {
                let side = (round + turn) % sides.len();
                figures[side].push(sides[side](round as u64)?);
            }
        }
        Ok(Self(figures))
    }

    /// One kvfleet figure against the same of each peer, with the peer's name.
    fn outcomes(&self, figure: impl Fn(&T) -> f64) -> [(&'static str, Outcome); 2] {
        let [ours, peers @ ..] = &self.0;
        std::array::from_fn(|peer| {
            let pairs: Vec<_> = ours.iter().map(&figure).zip(peers[peer].iter().map(&figure)).collect();
            (PEERS[peer], outcome(&pairs))
        })
    }

    /// Prints one row per peer; only the first peer's row has a target.
    fn print(&self, row: RowSpec<'_>, figure: impl Fn(&T) -> f64, printer: Printer) -> anyhow::Result<()> {
        for (peer, outcome) in self.outcomes(figure) {
            let label = RowLabel { bench: "index", row: row.name, unit: row.unit, peer, better: row.better };
            let reach = if peer == PEERS[0] { row.target } else { Target::Unjudged };
            printer.row(&label.judge(outcome, reach))?;
        }
        Ok(())
    }
}

/// A row without its peer.
#[derive(Clone, Copy)]
struct RowSpec<'names> {
    name: &'names str,
    unit: &'names str,
    better: Better,
    target: Target,
}

fn events(effort: &Effort, setting: Setting, printer: Printer) -> anyhow::Result<()> {
    let chains = Chains::for_all(Shape::of(setting.entries, CHAIN_BLOCKS, setting.holders));
    let replay = Replay::new(&chains, setting.threads);
    let rounds: SideRounds<Cycle> = SideRounds::run(
        effort.rounds,
        [&|_| replay.cycle::<KvfleetIndex>(), &|_| replay.cycle::<SmgChainIndex>(), &|_| {
            replay.cycle::<DynamoCrtc>()
        }],
    )?;
    let memory = match setting.holders {
        _ if setting.entries < TARGET_ENTRIES_MIN => Target::Unjudged,
        1 => Target::RatioAtMost(0.45),
        4 => Target::RatioAtMost(0.25),
        _ => Target::Unjudged,
    };
    let row = |name: &str, unit, better, reach, figure: fn(&Cycle) -> f64| {
        rounds.print(RowSpec { name: &setting.name(name), unit, better, target: reach }, figure, printer)
    };
    let higher = Better::Higher;
    row("memory", "bytes/entry", Better::Lower, memory, |cycle| cycle.entry_bytes)?;
    row("store", "M blocks/CPU-s", higher, Target::RatioAtLeast(3.0), |cycle| cycle.stored_cpu)?;
    if setting.threads > 1 {
        row("store", "M blocks/s", higher, Target::Unjudged, |cycle| cycle.stored_wall)?;
    }
    row("remove by hash", "M blocks/CPU-s", higher, Target::RatioAtLeast(2.0), |cycle| cycle.removed_cpu)
}

/// Lookup times of one round, in microseconds. Unmeasured ones stay zero.
#[derive(Clone, Copy, Debug, Default)]
struct LookupTimes {
    held: f64,
    held_p50: f64,
    held_p99: f64,
    diverging: f64,
    missing: f64,
    from_tokens: f64,
}

impl LookupTimes {
    fn measure<S: IndexSide>(side: &S, prompts: &Prompts<'_>, round: u64) -> Self {
        let is_usual = prompts.chains.shape.chain_blocks == CHAIN_BLOCKS;
        let held = prompts.cpu_us(side, PromptKind::Held, round);
        let (held_p50, held_p99) = prompts.percentiles(side, round);
        let mut looked = Self { held, held_p50, held_p99, ..Self::default() };
        if is_usual {
            looked.diverging = prompts.cpu_us(side, PromptKind::Diverging, round);
            looked.missing = prompts.cpu_us(side, PromptKind::Missing, round);
        }
        if is_usual && prompts.threads == 1 {
            looked.from_tokens = prompts.hash_and_lookup_us(side, round);
        }
        looked
    }
}

fn lookups(effort: &Effort, setting: Setting, chain_blocks: u32, printer: Printer) -> anyhow::Result<()> {
    let chains = Chains::for_all(Shape::of(setting.entries, chain_blocks, setting.holders));
    let unknown = Chains::unknown(UNKNOWN_BLOCKS.div_ceil(chain_blocks.into()) as u32, chain_blocks);
    let prompts = Prompts { chains: &chains, unknown: &unknown, threads: setting.threads };
    let replay = Replay::new(&chains, setting.threads);
    let (ours, _, _) = replay.fill::<KvfleetIndex>()?;
    let (chain_index, _, _) = replay.fill::<SmgChainIndex>()?;
    let (crtc, _, _) = replay.fill::<DynamoCrtc>()?;
    ensure_agreement(&prompts, &ours, &chain_index, &crtc)?;
    // A warm-up round goes first.
    let sides: [&dyn Fn(u64) -> anyhow::Result<LookupTimes>; 3] = [
        &|round| Ok(LookupTimes::measure(&ours, &prompts, round)),
        &|round| Ok(LookupTimes::measure(&chain_index, &prompts, round)),
        &|round| Ok(LookupTimes::measure(&crtc, &prompts, round)),
    ];
    SideRounds::run(1, sides)?;
    let rounds = SideRounds::run(effort.rounds, sides)?;
    let row = |name: &str, unit, reach, figure: fn(&LookupTimes) -> f64| {
        rounds.print(
            RowSpec { name: &setting.name(name), unit, better: Better::Lower, target: reach },
            figure,
            printer,
        )
    };
    let is_usual = chain_blocks == CHAIN_BLOCKS;
    let times_faster = if is_usual { 4.0 } else { 10.0 };
    let held = format!("lookup, {chain_blocks} held");
    row(&held, "µs CPU", Target::RatioAtMost(1.0 / times_faster), |looked| looked.held)?;
    row(&held, "µs wall, p50", Target::Unjudged, |looked| looked.held_p50)?;
    row(&held, "µs wall, p99", Target::Unjudged, |looked| looked.held_p99)?;
    if is_usual {
        row("lookup, 64 of 500 held", "µs CPU", Target::Unjudged, |looked| looked.diverging)?;
        row("lookup, miss", "µs CPU", Target::OursAtMost(0.08), |looked| looked.missing)?;
    }
    if is_usual && setting.threads == 1 {
        let reach = Target::RatioAtMost(1.0);
        row("hash 8,000 tokens and look up", "µs CPU", reach, |looked| looked.from_tokens)?;
    }
    Ok(())
}

/// Ensures that all sides give the same answers before timing starts.
fn ensure_agreement(
    prompts: &Prompts<'_>,
    ours: &KvfleetIndex,
    chain_index: &SmgChainIndex,
    crtc: &DynamoCrtc,
) -> anyhow::Result<()> {
    let chains = prompts.chains.shape.chains.min(prompts.unknown.shape.chains);
    let step = (chains as usize).div_ceil(CHECKED_CHAINS);
    for asked in [PromptKind::Held, PromptKind::Diverging, PromptKind::Missing] {
        for chain in (0..chains).step_by(step) {
            let mine = ours.overlaps(&prompts.prompt::<KvfleetIndex>(asked, chain));
            let first = chain_index.overlaps(&prompts.prompt::<SmgChainIndex>(asked, chain));
            let second = crtc.overlaps(&prompts.prompt::<DynamoCrtc>(asked, chain));
            anyhow::ensure!(
                mine == first && mine == second,
                "the sides disagree on {asked:?} {chain}: ours {mine:?}, {} {first:?}, {} {second:?}",
                PEERS[0],
                PEERS[1],
            );
        }
    }
    Ok(())
}
