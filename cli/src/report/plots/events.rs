//! Plot of requests per second with kills and restarts marked.

use std::path::Path;

use plotters::prelude::SeriesLabelPosition;

use super::canvas::{Axes, Canvas, PALETTE};
use super::timeline::Timeline;
use crate::replay::FaultMark;
use crate::report::json::Report;

/// Draws the plot.
pub(super) fn draw(path: &Path, timeline: &Timeline, report: &Report) -> anyhow::Result<()> {
    #[expect(clippy::cast_precision_loss)]
    let rate: Vec<(f64, f64)> =
        timeline.spans.iter().map(|span| (span.at_s, span.ended as f64 / timeline.width_s())).collect();
    let peak = rate.iter().map(|(_, rate)| *rate).fold(1.0, f64::max);
    let faults = report.kills.len() + report.restarts.len();
    let title = format!(
        "What did {faults} fault{} do to the flow? {} of {} requests ended",
        if faults == 1 { "" } else { "s" },
        report.requests_ended,
        report.requests
    );
    let axes = Axes {
        title: &title,
        x: "time of the replay (s)",
        y: "requests ended per second",
        x_max: timeline.end_s,
        y_max: peak * 1.25,
        x_labels: 11,
    };
    let mut canvas = Canvas::new(path, &axes, &|x| format!("{x:.1}"), &|y| format!("{y:.0}"))?;
    let floor: Vec<_> = rate.iter().map(|(at, _)| (*at, 0.0)).collect();
    for fault in &timeline.faults {
        if let Some(lost_ms) = fault.unrouted_ms.or(fault.leader_ms).or(fault.serving_ms) {
            canvas.shade(fault.at.as_secs_f64(), fault.at.as_secs_f64() + lost_ms / 1e3)?;
        }
    }
    canvas.band("requests ended per second", PALETTE[5], &floor, &rate)?;
    mark_faults(&mut canvas, timeline)?;
    canvas.finish(SeriesLabelPosition::LowerRight)
}

/// Marks every fault on a plot over time.
pub(super) fn mark_faults(canvas: &mut Canvas<'_>, timeline: &Timeline) -> anyhow::Result<()> {
    for (rank, fault) in timeline.faults.iter().enumerate() {
        canvas.mark(fault.at.as_secs_f64(), &fault_text(fault), rank)?;
    }
    Ok(())
}

fn fault_text(fault: &FaultMark) -> String {
    let what = if fault.kind == "kill" { "killed" } else { "restarted" };
    let lost = [
        (fault.unrouted_ms, "unrouted after"),
        (fault.leader_ms, "new leader after"),
        (fault.serving_ms, "served after"),
    ];
    let lost = lost.iter().find_map(|(ms, what)| ms.map(|ms| format!(", {what} {ms:.0} ms")));
    format!("{} {what}{}", fault.process, lost.unwrap_or_default())
}
