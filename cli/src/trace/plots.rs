//! Plots of a trace: reuse times per category, skew, hit rate against capacity.
//!
//! `stats.rs` computes the numbers; `crate::report` defines the look.

use std::path::{Path, PathBuf};

use kvfleet_sim::stats::{CurvePoint, ReuseTimes};
use plotters::prelude::SeriesLabelPosition;

use super::stats::TraceStats;
use crate::report::{Axes, Canvas, PALETTE};

/// Category curves drawn next to that of the whole trace; more would be indistinguishable.
const CATEGORIES_DRAWN: usize = 6;

/// Right end of the reuse-time axis in powers of ten above 0.1 s: 10^5 s is more than a day.
const DECADES: f64 = 6.0;

/// Draws every plot into `directory`.
pub(super) fn draw_all(directory: &Path, stats: &TraceStats) -> anyhow::Result<Vec<PathBuf>> {
    std::fs::create_dir_all(directory).map_err(|cause| {
        anyhow::anyhow!("cannot make {}: {cause}; choose another --plots", directory.display())
    })?;
    let file = |name: &str| directory.join(name);
    reuse_times(&file("reuse_times.svg"), stats)?;
    skew(&file("skew.svg"), stats)?;
    capacity(&file("capacity.svg"), stats)?;
    Ok(["reuse_times.svg", "skew.svg", "capacity.svg"].map(file).to_vec())
}

fn reuse_times(path: &Path, stats: &TraceStats) -> anyhow::Result<()> {
    let of = &stats.characteristics;
    let axes = Axes {
        title: "How soon is a block used again?",
        x: "time since its last use (logarithmic)",
        y: "share of reuses within that time (%)",
        x_max: DECADES,
        y_max: 100.0,
        x_labels: 7,
    };
    let mut canvas = Canvas::new(path, &axes, &time_label, &|y| format!("{y:.0}"))?;
    let mut rows: Vec<&ReuseTimes> = of.reuse_by_category.iter().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.reuses));
    let all = std::iter::once((&of.reuse, "whole trace".to_owned()));
    let each =
        rows.into_iter().take(CATEGORIES_DRAWN).map(|row| (row, format!("{}, turn {}", row.kind, row.turn)));
    for ((row, name), color) in all.chain(each).zip(PALETTE) {
        let points = row.cdf.iter().map(|point| (decades(point.x), 100.0 * point.y)).collect::<Vec<_>>();
        canvas.line(&format!("{name} ({} reuses)", row.reuses), color, &points)?;
    }
    canvas.finish(SeriesLabelPosition::LowerRight)
}

fn decades(seconds: f64) -> f64 {
    (seconds.max(0.1) / 0.1).log10().min(DECADES)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by the plotting library")]
fn time_label(decades: &f64) -> String {
    let seconds = 0.1 * 10f64.powf(*decades);
    if seconds < 1.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

fn skew(path: &Path, stats: &TraceStats) -> anyhow::Result<()> {
    let of = &stats.characteristics;
    let title = format!(
        "How uneven is reuse? A tenth of the blocks has {:.0} % of it",
        100.0 * of.reuse_share_of_top_tenth
    );
    let axes = Axes {
        title: &title,
        x: "most reused blocks (%)",
        y: "share of all reuses (%)",
        x_max: 100.0,
        y_max: 100.0,
        x_labels: 11,
    };
    let mut canvas = Canvas::new(path, &axes, &percent, &percent)?;
    let start = std::iter::once((0.0, 0.0));
    let points: Vec<_> =
        start.chain(of.skew.iter().map(|CurvePoint { x, y }| (100.0 * x, 100.0 * y))).collect();
    canvas.line("this trace", PALETTE[0], &points)?;
    canvas.line("if every block were alike", PALETTE[6], &[(0.0, 0.0), (100.0, 100.0)])?;
    canvas.finish(SeriesLabelPosition::LowerRight)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by the plotting library")]
fn percent(value: &f64) -> String {
    format!("{value:.0}")
}

fn capacity(path: &Path, stats: &TraceStats) -> anyhow::Result<()> {
    let points = &stats.capacity_curve;
    let largest = points.iter().map(|point| 100.0 * point.capacity_share).fold(1.0, f64::max);
    let ideal = 100.0 * stats.characteristics.ideal_hit_rate;
    let axes = Axes {
        title: "What does more capacity bring?",
        x: "capacity (% of the unique blocks)",
        y: "hit rate (%)",
        x_max: largest,
        y_max: (ideal * 1.15).min(100.0),
        x_labels: 7,
    };
    let mut canvas = Canvas::new(path, &axes, &percent, &|y| format!("{y:.0}"))?;
    let mut policies: Vec<&str> = vec![];
    for point in points {
        if !policies.contains(&point.policy.as_str()) {
            policies.push(&point.policy);
        }
    }
    for (policy, color) in policies.into_iter().zip(PALETTE) {
        let of_policy = points.iter().filter(|point| point.policy == policy);
        let line: Vec<_> =
            of_policy.map(|point| (100.0 * point.capacity_share, 100.0 * point.hit_rate)).collect();
        canvas.line(policy, color, &line)?;
    }
    canvas.line(&format!("without bound: {ideal:.2} %"), PALETTE[6], &[(0.0, ideal), (largest, ideal)])?;
    canvas.finish(SeriesLabelPosition::LowerRight)
}
