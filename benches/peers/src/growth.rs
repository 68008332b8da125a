//! Growth of kvfleet's lookup time and memory with the number of entries.
//!
//! Not here: peers. Sizes that exceed the memory are skipped with a message.

use benches::{Better, outcome};

use crate::Effort;
use crate::chains::{Chains, Shape};
use crate::fill::Replay;
use crate::index::CHAIN_BLOCKS;
use crate::judge::{Printer, RowLabel, Target};
use crate::lookups::{PromptKind, Prompts};
use crate::side::KvfleetIndex;

/// Maximum memory of one index: leaves room for the chains on a machine of 16 GiB.
const INDEX_BYTES_MAX: u64 = 8 << 30;

/// An index of one size.
struct SizedIndex {
    entries: u64,
    chains: Chains,
    index: KvfleetIndex,
    bytes: u64,
}

/// Compares the smallest size with each larger one.
pub(crate) fn run(effort: &Effort, printer: Printer) -> anyhow::Result<()> {
    let strange = Chains::unknown(1, CHAIN_BLOCKS);
    let mut sizes: Vec<SizedIndex> = Vec::new();
    for &entries in &effort.growth_entries {
        let expected = sizes.last().map_or(0, |last| last.bytes * entries / last.entries);
        if expected > INDEX_BYTES_MAX {
            printer.text(&format!(
                "{} M entries would need about {} GiB: skipped",
                entries / 1_000_000,
                expected >> 30
            ));
            continue;
        }
        let chains = Chains::for_ours(Shape::of(entries, CHAIN_BLOCKS, 1));
        let (index, _, bytes) = Replay::new(&chains, 1).fill()?;
        sizes.push(SizedIndex { entries: chains.shape.entries(), chains, index, bytes });
    }
    let lookup = |grown: &SizedIndex, round| {
        Prompts { chains: &grown.chains, unknown: &strange, threads: 1 }.cpu_us(
            &grown.index,
            PromptKind::Held,
            round,
        )
    };
    let mut rounds: Vec<Vec<f64>> = Vec::new();
    for round in 0..=effort.rounds as u64 {
        let figures = sizes.iter().map(|grown| lookup(grown, round)).collect();
        // The first round is a warm-up.
        if round > 0 {
            rounds.push(figures);
        }
    }
    printer.header();
    let Some((first, larger)) = sizes.split_first() else { return Ok(()) };
    let millions = |entries: u64| format!("{} M entries", entries as f64 / 1e6);
    for (place, grown) in (1..).zip(larger) {
        let peer = format!("ours at {}", millions(first.entries));
        let row = |what: &str, unit: &str, pairs: &[(f64, f64)], reach| {
            let name = format!("{what}; {}", millions(grown.entries));
            let label = RowLabel { bench: "growth", row: &name, unit, peer: &peer, better: Better::Lower };
            printer.row(&label.judge(outcome(pairs), reach))
        };
        let entry_bytes = |grown: &SizedIndex| grown.bytes as f64 / grown.entries as f64;
        let memory = vec![(entry_bytes(grown), entry_bytes(first)); effort.rounds];
        row("memory", "bytes/entry", &memory, Target::RatioAtMost(1.1))?;
        let pairs: Vec<_> = rounds.iter().map(|round| (round[place], round[0])).collect();
        row("lookup, 500 held", "µs CPU", &pairs, Target::RatioAtMost(1.5))?;
    }
    Ok(())
}
