//! One row per run, and the table, with the published figures of SG#39822 below.
//!
//! Not here: the counting (`deciders.rs`, `load.rs`).

use std::fmt::Write;
use std::time::Duration;

use super::Experiment;

/// Result of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResultRow {
    /// The injected fault.
    pub fault: &'static str,
    /// Number of faults.
    pub faults: u64,
    /// Decisions with a certain holder.
    pub decisions: u64,
    /// Decisions without a candidate for a block that certainly had one, including unanswered ones.
    pub blind: u64,
    /// Decisions without an answer.
    pub unanswered: u64,
    /// Number of holders named under an ended epoch.
    pub stale: u64,
    /// Number of empty node restarts.
    pub empty_restarts: u64,
    /// Pins that were acknowledged and not ended.
    pub pins: u64,
    /// Pins that are missing or changed, and ended pins still in force.
    pub pins_lost: u64,
    /// Pins granted to two owners.
    pub double_owners: u64,
    /// Longest decision.
    pub slowest: Duration,
    /// The first blind decision, to find its cause.
    pub first_blind: Option<String>,
}

impl ResultRow {
    pub(crate) fn of(experiment: &Experiment) -> ResultRow {
        ResultRow { fault: experiment.fault.name(), ..ResultRow::default() }
    }

    /// Whether no loss of any counted kind occurred.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        (self.blind, self.unanswered, self.stale, self.pins_lost, self.double_owners) == (0, 0, 0, 0, 0)
    }
}

/// A published run.
struct PublishedRow {
    name: &'static str,
    decisions: u64,
    blind: u64,
    stale: &'static str,
}

/// SG#39822. Its index has no pins.
const PUBLISHED: [PublishedRow; 2] = [
    PublishedRow { name: "SG#39822 restart, in memory", decisions: 1_958, blind: 337, stale: "484" },
    PublishedRow { name: "SG#39822 restart, persisted", decisions: 2_135, blind: 12, stale: "-" },
];

/// The table, our rows above the published ones.
#[must_use]
pub fn render(rows: &[ResultRow]) -> String {
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
        let ResultRow { fault, faults, decisions, blind, unanswered, stale, .. } = row;
        let ResultRow { empty_restarts, pins, pins_lost, double_owners, slowest, .. } = row;
        let (share, slowest) = (percent(*blind, *decisions), format!("{} ms", slowest.as_millis()));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{fault:<28} {faults:>6} {decisions:>9} {blind:>6} {share:>7} {unanswered:>10} {stale:>6} \
             {empty_restarts:>8} {pins:>5} {pins_lost:>5} {double_owners:>7} {slowest:>8}"
        );
    }
    for PublishedRow { name, decisions, blind, stale } in PUBLISHED {
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
    fn table_aligns_published_rows_below_ours() {
        let row = ResultRow { fault: "leader kill", decisions: 2_000, blind: 5, ..ResultRow::default() };
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
    fn any_nonzero_loss_is_not_clean() {
        let clean = ResultRow { decisions: 9, pins: 3, empty_restarts: 2, ..ResultRow::default() };
        assert!(clean.is_clean());
        assert!(!ResultRow { blind: 1, ..clean.clone() }.is_clean());
        assert!(!ResultRow { stale: 1, ..clean.clone() }.is_clean());
        assert!(!ResultRow { pins_lost: 1, ..clean.clone() }.is_clean());
        assert!(!ResultRow { double_owners: 1, ..clean }.is_clean());
    }
}
