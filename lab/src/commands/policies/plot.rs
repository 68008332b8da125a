//! Plots hit rate against capacity for the baselines, the evaluated policy and the bounds, one plot
//! per trace.
//!
//! The paper's policy and its variants are only in the tables, because no colours are left for
//! them.

use std::path::Path;

use crate::evict;
use crate::policies::{KNOWABLE, SHARES, hit_rate_spread};
use kvfleet_sim::stats::curve::OPTIMAL;
use plotters::prelude::{RGBColor, SeriesLabelPosition};

use super::Evaluation;
use kvfleet::report::{Axes, Canvas, PALETTE};

/// Colours of the evaluated policy and of the bounds, in addition to the palette.
const JUDGED_COLOR: RGBColor = RGBColor(190, 0, 0);
const KNOWABLE_COLOR: RGBColor = RGBColor(150, 150, 150);
const BOUND_COLOR: RGBColor = RGBColor(0, 0, 0);

/// Draws the plot of one kind of traffic. The horizontal axis is logarithmic.
pub(super) fn draw(path: &Path, traffic: &str, evaluation: &Evaluation) -> anyhow::Result<()> {
    let mut lines: Vec<(&str, RGBColor)> = evict::BASELINES.into_iter().zip(PALETTE).collect();
    lines.extend([
        (evaluation.judged.as_str(), JUDGED_COLOR),
        (KNOWABLE, KNOWABLE_COLOR),
        (OPTIMAL, BOUND_COLOR),
    ]);
    let points = |policy: &str| -> Vec<(f64, f64)> {
        let at = |share: f64| {
            Some((decades(share), hit_rate_spread(&evaluation.trials, traffic, policy, share)?.mean))
        };
        SHARES.into_iter().filter_map(at).collect()
    };
    let highest = points(OPTIMAL).iter().map(|point| point.1).fold(1.0, f64::max);
    let title = format!("{traffic}: what does each policy make of the capacity?");
    let axes = Axes {
        title: &title,
        x: "capacity (% of the unique blocks, logarithmic)",
        y: "hit rate (%)",
        x_max: SHARES.into_iter().map(decades).fold(0.0, f64::max),
        y_max: (highest * 1.1).min(100.0),
        x_labels: 6,
    };
    let mut canvas = Canvas::new(path, &axes, &share_label, &|y| format!("{y:.0}"))?;
    // The knowable bound does not exist for recorded traffic.
    let drawn = lines.into_iter().map(|(policy, color)| (policy, color, points(policy)));
    for (policy, color, points) in drawn.filter(|(.., points)| !points.is_empty()) {
        canvas.line(policy, color, &points)?;
    }
    canvas.finish(SeriesLabelPosition::LowerRight)
}

/// Powers of ten above the smallest share.
fn decades(share: f64) -> f64 {
    let [least, ..] = SHARES;
    (share / least).log10()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by the plotting library")]
fn share_label(decades: &f64) -> String {
    let [least, ..] = SHARES;
    let percent = 100.0 * least * 10f64.powf(*decades);
    if percent < 1.0 { format!("{percent:.2}") } else { format!("{percent:.1}") }
}
