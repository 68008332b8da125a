//! A row with its target, as a JSON line and as a text line.
//!
//! Not here: the measurements (`index.rs`, `growth.rs`, `consensus.rs`).

use benches::{BenchRow, Better, Outcome, format_figure};
use serde::Serialize;

/// Target of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// Maximum of the median ratio of ours over theirs.
    RatioAtMost(f64),
    /// Minimum of the median ratio of ours over theirs.
    RatioAtLeast(f64),
    /// Maximum of our median, independent of the peer.
    OursAtMost(f64),
    /// Minimum of our median, independent of the peer.
    OursAtLeast(f64),
    /// No target: the row is informative.
    Unjudged,
}

impl Target {
    /// The target in words, and whether the row meets it.
    fn judge(self, row: &BenchRow) -> Option<(String, bool)> {
        match self {
            Target::RatioAtMost(most) => Some((format!("ratio <= {most}"), row.ratio <= most)),
            Target::RatioAtLeast(least) => Some((format!("ratio >= {least}"), row.ratio >= least)),
            Target::OursAtMost(most) => Some((format!("ours <= {most} {}", row.unit), row.ours <= most)),
            Target::OursAtLeast(least) => Some((format!("ours >= {least} {}", row.unit), row.ours >= least)),
            Target::Unjudged => None,
        }
    }
}

/// A row with its verdict: the keys of [`BenchRow`] and two more.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct JudgedRow {
    #[serde(flatten)]
    row: BenchRow,
    /// Target in words; `None` without one.
    reach: Option<String>,
    /// Whether the target is met.
    reached: Option<bool>,
}

impl JudgedRow {
    pub(crate) fn new(row: BenchRow, reach: Target) -> Self {
        let (reach, reached) = reach.judge(&row).unzip();
        Self { row, reach, reached }
    }

    fn line(&self) -> String {
        let BenchRow { row, unit, ours, peer, theirs, ratio, min, max, .. } = &self.row;
        let [ours, theirs, ratio, min, max] =
            [ours, theirs, ratio, min, max].map(|value| format_figure(*value));
        let verdict = match (&self.reach, self.reached) {
            (Some(reach), Some(true)) => format!("PASS   {reach}"),
            (Some(reach), _) => format!("short  {reach}"),
            (None, _) => String::new(),
        };
        let spread = format!("{ratio} ({min}-{max})");
        let line = format!("{row:<60} {unit:<15} {ours:>8} {theirs:>8}  {spread:<22} {peer:<27} {verdict}");
        line.trim_end().to_owned()
    }
}

/// Prints each row as soon as it is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Printer {
    /// JSON lines instead of text lines.
    pub(crate) json: bool,
}

impl Printer {
    /// Prints text for people; to standard error if JSON lines are on.
    pub(crate) fn text(self, text: &str) {
        if self.json {
            eprintln!("{text}");
        } else {
            println!("{text}");
        }
    }

    /// The column headers.
    pub(crate) fn header(self) {
        let [row, unit, ours, theirs] = ["row", "unit", "ours", "theirs"];
        let (spread, peer) = ("ratio (min-max)", "peer");
        self.text(&format!("{row:<60} {unit:<15} {ours:>8} {theirs:>8}  {spread:<22} {peer:<27} to reach"));
    }

    /// One row.
    pub(crate) fn row(self, row: &JudgedRow) -> anyhow::Result<()> {
        self.text(&row.line());
        self.json_line(row)
    }

    /// One JSON line, if JSON lines are on.
    pub(crate) fn json_line(self, line: &impl Serialize) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(line)?);
        }
        Ok(())
    }
}

/// Names of one row and its better direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowLabel<'names> {
    pub(crate) bench: &'names str,
    pub(crate) row: &'names str,
    pub(crate) unit: &'names str,
    pub(crate) peer: &'names str,
    pub(crate) better: Better,
}

impl RowLabel<'_> {
    pub(crate) fn judge(&self, outcome: Outcome, reach: Target) -> JudgedRow {
        JudgedRow::new(BenchRow::new(self.bench, self.row, self.unit, self.peer, self.better, outcome), reach)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(reach: Target) -> JudgedRow {
        let outcome = Outcome { ours: 0.5, theirs: 2.0, ratio: 0.25, min: 0.2, max: 0.3, runs: 5 };
        let label = RowLabel { bench: "index", row: "lookup", unit: "µs", peer: "p", better: Better::Lower };
        label.judge(outcome, reach)
    }

    #[test]
    fn judges_the_median() {
        for (reach, reached) in [
            (Target::RatioAtMost(0.25), Some(true)),
            (Target::RatioAtMost(0.24), Some(false)),
            (Target::RatioAtLeast(0.26), Some(false)),
            (Target::OursAtMost(0.5), Some(true)),
            (Target::OursAtLeast(0.51), Some(false)),
            (Target::Unjudged, None),
        ] {
            assert_eq!(judged(reach).reached, reached, "{reach:?}");
        }
    }

    #[test]
    fn json_extends_the_row_with_two_keys() {
        let json = serde_json::to_value(judged(Target::RatioAtMost(0.25))).expect("a row is plain data");
        assert_eq!(json["reach"], "ratio <= 0.25");
        assert_eq!(json["reached"], true);
        assert_eq!(json["ratio"], 0.25);
        assert_eq!(json.as_object().map(serde_json::Map::len), Some(13));
    }
}
