//! Plot of the hit rate by tier over the time of the replay.

use std::path::Path;

use plotters::prelude::SeriesLabelPosition;

use super::canvas::{Axes, Canvas, PALETTE};
use super::events::mark_faults;
use super::timeline::{Span, Timeline};
use crate::replay::ratio;
use crate::report::json::Report;

/// Draws the plot.
pub(super) fn draw(path: &Path, timeline: &Timeline, report: &Report) -> anyhow::Result<()> {
    let title = format!("Which blocks came from the cache? {:.2} % overall", 100.0 * report.hit_rate);
    let axes = Axes {
        title: &title,
        x: "time of the replay (s)",
        y: "share of requested blocks (%)",
        x_max: timeline.end_s,
        y_max: 100.0,
        x_labels: 11,
    };
    let mut canvas = Canvas::new(path, &axes, &|x| format!("{x:.1}"), &|y| format!("{y:.0}"))?;
    let share = |of: fn(&Span) -> u64| -> Vec<(f64, f64)> {
        let asked = timeline.spans.iter().filter(|span| span.requested > 0);
        asked.map(|span| (span.at_s, 100.0 * ratio(of(span), span.requested))).collect()
    };
    let floor = share(|_| 0);
    let dram = share(|span| span.dram);
    let both = share(|span| span.dram + span.ssd);
    canvas.band("from DRAM", PALETTE[5], &floor, &dram)?;
    if report.hits_by_tier.ssd > 0 {
        canvas.band("from SSD", PALETTE[1], &dram, &both)?;
    }
    canvas.line("cumulative", PALETTE[0], &timeline.running_hit_rate())?;
    mark_faults(&mut canvas, timeline)?;
    canvas.finish(SeriesLabelPosition::MiddleRight)
}
