//! A row with what it has to reach, as a JSON line and as a line for people.
//!
//! Not here: how the figures came about (`index.rs`, `growth.rs`, `consensus.rs`).

use benches::{Better, Outcome, Row, figure};
use serde::Serialize;

/// What a row has to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Reach {
    /// The median ratio of ours over theirs is at most this.
    RatioAtMost(f64),
    /// The median ratio of ours over theirs is at least this.
    RatioAtLeast(f64),
    /// Our own median is at most this, whatever the peer does.
    OursAtMost(f64),
    /// Our own median is at least this, whatever the peer does.
    OursAtLeast(f64),
    /// Nothing: the row is there to be read.
    Shown,
}

impl Reach {
    /// In words, and whether the outcome is there.
    fn judge(self, row: &Row) -> Option<(String, bool)> {
        match self {
            Reach::RatioAtMost(most) => Some((format!("ratio <= {most}"), row.ratio <= most)),
            Reach::RatioAtLeast(least) => Some((format!("ratio >= {least}"), row.ratio >= least)),
            Reach::OursAtMost(most) => Some((format!("ours <= {most} {}", row.unit), row.ours <= most)),
            Reach::OursAtLeast(least) => Some((format!("ours >= {least} {}", row.unit), row.ours >= least)),
            Reach::Shown => None,
        }
    }
}

/// A row, judged. The keys of [`Row`] and two more.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Judged {
    #[serde(flatten)]
    row: Row,
    /// What it has to reach, or nothing.
    reach: Option<String>,
    /// Whether it does.
    reached: Option<bool>,
}

impl Judged {
    pub(crate) fn new(row: Row, reach: Reach) -> Self {
        let (reach, reached) = reach.judge(&row).unzip();
        Self { row, reach, reached }
    }

    fn line(&self) -> String {
        let Row { row, unit, ours, peer, theirs, ratio, min, max, .. } = &self.row;
        let [ours, theirs, ratio, min, max] = [ours, theirs, ratio, min, max].map(|value| figure(*value));
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

/// Where rows go, each as soon as it is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Printer {
    /// JSON lines instead of lines for people.
    pub(crate) json: bool,
}

impl Printer {
    /// What a run is made of: for people, and beside JSON lines on the error stream.
    pub(crate) fn say(self, text: &str) {
        if self.json {
            eprintln!("{text}");
        } else {
            println!("{text}");
        }
    }

    /// The heads of the columns.
    pub(crate) fn head(self) {
        let [row, unit, ours, theirs] = ["row", "unit", "ours", "theirs"];
        let (spread, peer) = ("ratio (min-max)", "peer");
        self.say(&format!("{row:<60} {unit:<15} {ours:>8} {theirs:>8}  {spread:<22} {peer:<27} to reach"));
    }

    /// One row.
    pub(crate) fn row(self, row: &Judged) -> anyhow::Result<()> {
        self.say(&row.line());
        self.line(row)
    }

    /// One JSON line, when JSON lines are wanted.
    pub(crate) fn line(self, line: &impl Serialize) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string(line)?);
        }
        Ok(())
    }
}

/// One row of figures: its names and which direction is good.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label<'names> {
    pub(crate) bench: &'names str,
    pub(crate) row: &'names str,
    pub(crate) unit: &'names str,
    pub(crate) peer: &'names str,
    pub(crate) better: Better,
}

impl Label<'_> {
    pub(crate) fn judged(&self, outcome: Outcome, reach: Reach) -> Judged {
        Judged::new(Row::new(self.bench, self.row, self.unit, self.peer, self.better, outcome), reach)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(reach: Reach) -> Judged {
        let outcome = Outcome { ours: 0.5, theirs: 2.0, ratio: 0.25, min: 0.2, max: 0.3, runs: 5 };
        let label = Label { bench: "index", row: "lookup", unit: "µs", peer: "p", better: Better::Lower };
        label.judged(outcome, reach)
    }

    #[test]
    fn a_row_is_judged_by_its_median() {
        for (reach, reached) in [
            (Reach::RatioAtMost(0.25), Some(true)),
            (Reach::RatioAtMost(0.24), Some(false)),
            (Reach::RatioAtLeast(0.26), Some(false)),
            (Reach::OursAtMost(0.5), Some(true)),
            (Reach::OursAtLeast(0.51), Some(false)),
            (Reach::Shown, None),
        ] {
            assert_eq!(judged(reach).reached, reached, "{reach:?}");
        }
    }

    #[test]
    fn the_json_has_the_keys_of_a_row_and_two_more() {
        let json = serde_json::to_value(judged(Reach::RatioAtMost(0.25))).expect("a row is plain data");
        assert_eq!(json["reach"], "ratio <= 0.25");
        assert_eq!(json["reached"], true);
        assert_eq!(json["ratio"], 0.25);
        assert_eq!(json.as_object().map(serde_json::Map::len), Some(13));
    }
}
