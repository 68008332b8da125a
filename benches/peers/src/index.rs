//! Our index beside those of the peers: memory, store, remove, lookups; each size, each number of holders,
//! one and two threads.
//!
//! Not here: how memory and lookups grow with the number of entries (`growth.rs`).

use benches::{Better, Outcome, outcome};

use crate::Effort;
use crate::chains::{Chains, Shape};
use crate::fill::{Cycle, Replay};
use crate::judge::{Label, Printer, Reach};
use crate::lookups::{Asked, Prompts};
use crate::side::{DynamoCrtc, Ours, Side, SmgChainIndex};

/// Blocks of the usual chain.
pub(crate) const CHAIN_BLOCKS: u32 = 500;
/// Blocks of the long chain: 128 Ki tokens.
const LONG_CHAIN_BLOCKS: u32 = 8_000;
/// Chains that nobody holds: more hashes than any cache has room for.
const STRANGE_BLOCKS: u64 = 2_000_000;
/// From here on the memory of an entry has to be as small as asked; below, fixed parts weigh more.
const JUDGED_ENTRIES: u64 = 10_000_000;
/// Chains on which all sides must agree before anything is timed.
const AGREED_CHAINS: usize = 200;

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

/// All combinations that were asked for, row by row.
pub(crate) fn run(effort: &Effort, printer: Printer) -> anyhow::Result<()> {
    printer.head();
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

/// What each side came to in each round: ours, then the peers.
struct Rounds<T>([Vec<T>; 3]);

const PEERS: [&str; 2] = [SmgChainIndex::NAME, DynamoCrtc::NAME];

impl<T> Rounds<T> {
    /// Every round starts with another side, so that none always finds the machine as another left it.
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

    /// One figure of ours against the same of each peer, with the peer's name.
    fn outcomes(&self, figure: impl Fn(&T) -> f64) -> [(&'static str, Outcome); 2] {
        let [ours, peers @ ..] = &self.0;
        std::array::from_fn(|peer| {
            let pairs: Vec<_> = ours.iter().map(&figure).zip(peers[peer].iter().map(&figure)).collect();
            (PEERS[peer], outcome(&pairs))
        })
    }

    /// One row for each peer; only the first one's is judged.
    fn print(&self, row: RowOf<'_>, figure: impl Fn(&T) -> f64, printer: Printer) -> anyhow::Result<()> {
        for (peer, outcome) in self.outcomes(figure) {
            let label = Label { bench: "index", row: row.name, unit: row.unit, peer, better: row.better };
            let reach = if peer == PEERS[0] { row.reach } else { Reach::Shown };
            printer.row(&label.judged(outcome, reach))?;
        }
        Ok(())
    }
}

/// A row, whoever the peer is.
#[derive(Clone, Copy)]
struct RowOf<'names> {
    name: &'names str,
    unit: &'names str,
    better: Better,
    reach: Reach,
}

fn events(effort: &Effort, setting: Setting, printer: Printer) -> anyhow::Result<()> {
    let chains = Chains::for_all(Shape::of(setting.entries, CHAIN_BLOCKS, setting.holders));
    let replay = Replay::new(&chains, setting.threads);
    let rounds: Rounds<Cycle> = Rounds::run(
        effort.rounds,
        [&|_| replay.cycle::<Ours>(), &|_| replay.cycle::<SmgChainIndex>(), &|_| {
            replay.cycle::<DynamoCrtc>()
        }],
    )?;
    let memory = match setting.holders {
        _ if setting.entries < JUDGED_ENTRIES => Reach::Shown,
        1 => Reach::RatioAtMost(0.45),
        4 => Reach::RatioAtMost(0.25),
        _ => Reach::Shown,
    };
    let row = |name: &str, unit, better, reach, figure: fn(&Cycle) -> f64| {
        rounds.print(RowOf { name: &setting.name(name), unit, better, reach }, figure, printer)
    };
    let higher = Better::Higher;
    row("memory", "bytes/entry", Better::Lower, memory, |cycle| cycle.entry_bytes)?;
    row("store", "M blocks/CPU-s", higher, Reach::RatioAtLeast(3.0), |cycle| cycle.stored_cpu)?;
    if setting.threads > 1 {
        row("store", "M blocks/s", higher, Reach::Shown, |cycle| cycle.stored_wall)?;
    }
    row("remove by hash", "M blocks/CPU-s", higher, Reach::RatioAtLeast(2.0), |cycle| cycle.removed_cpu)
}

/// What the lookups of one round came to, in microseconds. Unasked ones stay zero.
#[derive(Clone, Copy, Debug, Default)]
struct Looked {
    held: f64,
    held_p50: f64,
    held_p99: f64,
    diverging: f64,
    missing: f64,
    from_tokens: f64,
}

impl Looked {
    fn measure<S: Side>(side: &S, prompts: &Prompts<'_>, round: u64) -> Self {
        let is_usual = prompts.chains.shape.chain_blocks == CHAIN_BLOCKS;
        let held = prompts.cpu_us(side, Asked::Held, round);
        let (held_p50, held_p99) = prompts.percentiles(side, round);
        let mut looked = Self { held, held_p50, held_p99, ..Self::default() };
        if is_usual {
            looked.diverging = prompts.cpu_us(side, Asked::Diverging, round);
            looked.missing = prompts.cpu_us(side, Asked::Missing, round);
        }
        if is_usual && prompts.threads == 1 {
            looked.from_tokens = prompts.hashed_us(side, round);
        }
        looked
    }
}

fn lookups(effort: &Effort, setting: Setting, chain_blocks: u32, printer: Printer) -> anyhow::Result<()> {
    let chains = Chains::for_all(Shape::of(setting.entries, chain_blocks, setting.holders));
    let strange = Chains::strange(STRANGE_BLOCKS.div_ceil(chain_blocks.into()) as u32, chain_blocks);
    let prompts = Prompts { chains: &chains, strange: &strange, threads: setting.threads };
    let replay = Replay::new(&chains, setting.threads);
    let (ours, _, _) = replay.filled::<Ours>()?;
    let (chain_index, _, _) = replay.filled::<SmgChainIndex>()?;
    let (crtc, _, _) = replay.filled::<DynamoCrtc>()?;
    agree(&prompts, &ours, &chain_index, &crtc)?;
    // A round that does not count goes first.
    let sides: [&dyn Fn(u64) -> anyhow::Result<Looked>; 3] = [
        &|round| Ok(Looked::measure(&ours, &prompts, round)),
        &|round| Ok(Looked::measure(&chain_index, &prompts, round)),
        &|round| Ok(Looked::measure(&crtc, &prompts, round)),
    ];
    Rounds::run(1, sides)?;
    let rounds = Rounds::run(effort.rounds, sides)?;
    let row = |name: &str, unit, reach, figure: fn(&Looked) -> f64| {
        rounds.print(RowOf { name: &setting.name(name), unit, better: Better::Lower, reach }, figure, printer)
    };
    let is_usual = chain_blocks == CHAIN_BLOCKS;
    let times_faster = if is_usual { 4.0 } else { 10.0 };
    let held = format!("lookup, {chain_blocks} held");
    row(&held, "µs CPU", Reach::RatioAtMost(1.0 / times_faster), |looked| looked.held)?;
    row(&held, "µs wall, p50", Reach::Shown, |looked| looked.held_p50)?;
    row(&held, "µs wall, p99", Reach::Shown, |looked| looked.held_p99)?;
    if is_usual {
        row("lookup, 64 of 500 held", "µs CPU", Reach::Shown, |looked| looked.diverging)?;
        row("lookup, miss", "µs CPU", Reach::OursAtMost(0.08), |looked| looked.missing)?;
    }
    if is_usual && setting.threads == 1 {
        let reach = Reach::RatioAtMost(1.0);
        row("hash 8,000 tokens and look up", "µs CPU", reach, |looked| looked.from_tokens)?;
    }
    Ok(())
}

/// Makes sure that all sides give the same answers before anything is timed.
fn agree(
    prompts: &Prompts<'_>,
    ours: &Ours,
    chain_index: &SmgChainIndex,
    crtc: &DynamoCrtc,
) -> anyhow::Result<()> {
    let chains = prompts.chains.shape.chains.min(prompts.strange.shape.chains);
    let step = (chains as usize).div_ceil(AGREED_CHAINS);
    for asked in [Asked::Held, Asked::Diverging, Asked::Missing] {
        for chain in (0..chains).step_by(step) {
            let mine = ours.overlaps(&prompts.one::<Ours>(asked, chain));
            let first = chain_index.overlaps(&prompts.one::<SmgChainIndex>(asked, chain));
            let second = crtc.overlaps(&prompts.one::<DynamoCrtc>(asked, chain));
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
