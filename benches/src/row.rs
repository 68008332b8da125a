//! One row of a bench: its JSON line (the same keys everywhere) and its place in a text table.
//!
//! Not here: the measurements (`measure.rs`).

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::measure::Outcome;

/// The better direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Lower is better: time, memory.
    Lower,
    /// Higher is better: rates.
    Higher,
}

/// One comparison. Field names are the JSON keys, and stay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchRow {
    /// Name of the bench.
    pub bench: String,
    /// Name of the row.
    pub row: String,
    /// Unit of `ours` and `theirs`.
    pub unit: String,
    /// Median figure of our side.
    pub ours: f64,
    /// Name and version of the other side, or the limit's name.
    pub peer: String,
    /// Median figure of the other side.
    pub theirs: f64,
    /// Median of ours over theirs.
    pub ratio: f64,
    /// The better direction.
    pub better: Better,
    /// Number of runs.
    pub runs: usize,
    /// Smallest ratio of a run.
    pub min: f64,
    /// Largest ratio of a run.
    pub max: f64,
}

impl BenchRow {
    /// A row for an outcome.
    #[must_use]
    pub fn new(bench: &str, row: &str, unit: &str, peer: &str, better: Better, outcome: Outcome) -> Self {
        let Outcome { ours, theirs, ratio, min, max, runs } = outcome;
        let [bench, row, unit, peer] = [bench, row, unit, peer].map(str::to_owned);
        Self { bench, row, unit, ours, peer, theirs, ratio, better, runs, min, max }
    }
}

const HEAD: [&str; 7] = ["row", "unit", "ours", "theirs", "peer", "ratio (min-max)", "better"];

/// The rows as an aligned table.
#[must_use]
pub fn table(rows: &[BenchRow]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 7] = std::array::from_fn(width);
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    }
    text
}

fn cells(row: &BenchRow) -> [String; 7] {
    let better = match row.better {
        Better::Lower => "lower",
        Better::Higher => "higher",
    };
    [
        row.row.clone(),
        row.unit.clone(),
        format_figure(row.ours),
        format_figure(row.theirs),
        row.peer.clone(),
        format!("{} ({}-{})", format_figure(row.ratio), format_figure(row.min), format_figure(row.max)),
        better.to_owned(),
    ]
}

/// About three significant digits, without an exponent.
#[must_use]
pub fn format_figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> BenchRow {
        let outcome = Outcome { ours: 1.5, theirs: 3.0, ratio: 0.5, min: 0.4, max: 0.62, runs: 5 };
        BenchRow::new("choose", "64 instances", "µs CPU", "least-loaded scan", Better::Lower, outcome)
    }

    #[test]
    fn json_has_the_documented_keys() {
        let json = serde_json::to_string(&row()).expect("a row is plain data");
        let expected = concat!(
            r#"{"bench":"choose","row":"64 instances","unit":"µs CPU","ours":1.5,"#,
            r#""peer":"least-loaded scan","theirs":3.0,"ratio":0.5,"better":"lower","#,
            r#""runs":5,"min":0.4,"max":0.62}"#
        );
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<BenchRow>(&json).expect("its own output"), row());
    }

    #[test]
    fn aligns_the_table() {
        let expected = "\
row           unit    ours  theirs  peer               ratio (min-max)   better
64 instances  µs CPU  1.50  3.00    least-loaded scan  0.50 (0.40-0.62)  lower
";
        assert_eq!(table(&[row()]), expected);
    }

    #[test]
    fn formats_three_significant_digits() {
        for (value, text) in [(1234.5, "1234"), (12.34, "12.3"), (0.999, "1.00"), (0.0123, "0.0123")] {
            assert_eq!(format_figure(value), text);
        }
    }
}
