//! One row a run, and the table that a person reads, with the figures of SG#39822 below.
//!
//! Not here: how any of it is counted (`ask.rs`, `load.rs`).

use std::fmt::Write;
use std::time::Duration;

use super::Experiment;

/// What one run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// What was done to the routers.
    pub fault: &'static str,
    /// How often.
    pub faults: u64,
    /// Decisions for which a holder surely existed.
    pub decisions: u64,
    /// Of these, how many named no candidate for a block that surely had one. Unanswered ones are among them.
    pub blind: u64,
    /// Of these, how many got no answer at all.
    pub unanswered: u64,
    /// Times that anything was attributed to a node under an epoch that was over.
    pub stale: u64,
    /// Times that a node restarted with nothing.
    pub empty_restarts: u64,
    /// Pins that were acknowledged and not ended.
    pub pins: u64,
    /// Of these, how many are gone or hold something else; and pins in force that were ended.
    pub pins_lost: u64,
    /// Pins that two owners were given.
    pub double_owners: u64,
    /// Longest that one decision took.
    pub slowest: Duration,
    /// What the first blind decision was, for whoever looks for its cause.
    pub first_blind: Option<String>,
}

impl Row {
    pub(crate) fn of(experiment: &Experiment) -> Row {
        Row { fault: experiment.fault.name(), ..Row::default() }
    }

    /// Whether nothing was lost, in any sense that is counted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        (self.blind, self.unanswered, self.stale, self.pins_lost, self.double_owners) == (0, 0, 0, 0, 0)
    }
}

/// A run of others, as they published it.
struct Theirs {
    name: &'static str,
    decisions: u64,
    blind: u64,
    stale: &'static str,
}

/// SG#39822. Nothing was said there of pins: its index has none.
const THEIRS: [Theirs; 2] = [
    Theirs { name: "SG#39822 restart, in memory", decisions: 1_958, blind: 337, stale: "484" },
    Theirs { name: "SG#39822 restart, persisted", decisions: 2_135, blind: 12, stale: "-" },
];

/// The table, ours above theirs.
#[must_use]
pub fn render(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<28} {:>6} {:>9} {:>6} {:>7} {:>10} {:>6} {:>8} {:>5} {:>5} {:>7} {:>8}\n",
        "index and fault",
        "faults",
        "decisions",
        "blind",
        "blind %",
        "unanswered",
        "stale",
        "restarts",
        "pins",
        "lost",
        "doubled",
        "slowest"
    );
    for row in rows {
        let Row { fault, faults, decisions, blind, unanswered, stale, .. } = row;
        let Row { empty_restarts, pins, pins_lost, double_owners, slowest, .. } = row;
        let (share, slowest) = (percent(*blind, *decisions), format!("{} ms", slowest.as_millis()));
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{fault:<28} {faults:>6} {decisions:>9} {blind:>6} {share:>7} {unanswered:>10} {stale:>6} \
             {empty_restarts:>8} {pins:>5} {pins_lost:>5} {double_owners:>7} {slowest:>8}"
        );
    }
    for Theirs { name, decisions, blind, stale } in THEIRS {
        let share = percent(blind, decisions);
        let _ = writeln!(
            text,
            "{name:<28} {:>6} {decisions:>9} {blind:>6} {share:>7} {:>10} {stale:>6} {:>8} {:>5} {:>5} {:>7} {:>8}",
            1, "-", "-", "-", "-", "-", "-"
        );
    }
    text
}

#[allow(clippy::cast_precision_loss)]
fn percent(part: u64, whole: u64) -> String {
    format!("{:.2}", 100.0 * part as f64 / whole.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_theirs_below_ours_in_the_same_columns() {
        let row = Row { fault: "leader kill", decisions: 2_000, blind: 5, ..Row::default() };
        let text = render(std::slice::from_ref(&row));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(
            lines[1].contains("0.25") && lines[2].contains("17.21") && lines[3].contains("0.56"),
            "{text}"
        );
    }

    #[test]
    fn anything_that_counts_is_not_clean() {
        let clean = Row { decisions: 9, pins: 3, empty_restarts: 2, ..Row::default() };
        assert!(clean.is_clean());
        assert!(!Row { blind: 1, ..clean.clone() }.is_clean());
        assert!(!Row { stale: 1, ..clean.clone() }.is_clean());
        assert!(!Row { pins_lost: 1, ..clean.clone() }.is_clean());
        assert!(!Row { double_owners: 1, ..clean }.is_clean());
    }
}
