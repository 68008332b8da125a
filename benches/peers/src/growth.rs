//! How our lookups and our memory grow with the number of entries.
//!
//! Not here: peers. Sizes that would not fit are left out, and said to be.

use benches::{Better, outcome};

use crate::Effort;
use crate::chains::{Chains, Shape};
use crate::fill::Replay;
use crate::index::CHAIN_BLOCKS;
use crate::judge::{Label, Printer, Reach};
use crate::lookups::{Asked, Prompts};
use crate::side::Ours;

/// Memory of one index, at most: leaves room for the chains themselves on a machine of 16 GiB.
const INDEX_BYTES_MAX: u64 = 8 << 30;

/// An index of one size.
struct Grown {
    entries: u64,
    chains: Chains,
    index: Ours,
    bytes: u64,
}

/// The least size against each larger one.
pub(crate) fn run(effort: &Effort, printer: Printer) -> anyhow::Result<()> {
    let strange = Chains::strange(1, CHAIN_BLOCKS);
    let mut sizes: Vec<Grown> = Vec::new();
    for &entries in &effort.grown_entries {
        let expected = sizes.last().map_or(0, |last| last.bytes * entries / last.entries);
        if expected > INDEX_BYTES_MAX {
            printer.say(&format!(
                "{} M entries would take about {} GiB: left out",
                entries / 1_000_000,
                expected >> 30
            ));
            continue;
        }
        let chains = Chains::for_ours(Shape::of(entries, CHAIN_BLOCKS, 1));
        let (index, _, bytes) = Replay::new(&chains, 1).filled()?;
        sizes.push(Grown { entries: chains.shape.entries(), chains, index, bytes });
    }
    let lookup = |grown: &Grown, round| {
        Prompts { chains: &grown.chains, strange: &strange, threads: 1 }.cpu_us(
            &grown.index,
            Asked::Held,
            round,
        )
    };
    let mut rounds: Vec<Vec<f64>> = Vec::new();
    for round in 0..=effort.rounds as u64 {
        let figures = sizes.iter().map(|grown| lookup(grown, round)).collect();
        // The first round does not count.
        if round > 0 {
            rounds.push(figures);
        }
    }
    printer.head();
    let Some((first, larger)) = sizes.split_first() else { return Ok(()) };
    let millions = |entries: u64| format!("{} M entries", entries as f64 / 1e6);
    for (place, grown) in (1..).zip(larger) {
        let peer = format!("ours at {}", millions(first.entries));
        let row = |what: &str, unit: &str, pairs: &[(f64, f64)], reach| {
            let name = format!("{what}; {}", millions(grown.entries));
            let label = Label { bench: "growth", row: &name, unit, peer: &peer, better: Better::Lower };
            printer.row(&label.judged(outcome(pairs), reach))
        };
        let entry_bytes = |grown: &Grown| grown.bytes as f64 / grown.entries as f64;
        let memory = vec![(entry_bytes(grown), entry_bytes(first)); effort.rounds];
        row("memory", "bytes/entry", &memory, Reach::RatioAtMost(1.1))?;
        let pairs: Vec<_> = rounds.iter().map(|round| (round[place], round[0])).collect();
        row("lookup, 500 held", "µs CPU", &pairs, Reach::RatioAtMost(1.5))?;
    }
    Ok(())
}
