//! Plot of cumulative bytes by path over the time of the replay.

use std::path::Path;

use plotters::prelude::SeriesLabelPosition;

use super::canvas::{Axes, Canvas, PALETTE};
use super::events::mark_faults;
use super::human_bytes;
use super::timeline::Timeline;
use crate::report::json::Report;

/// Draws the plot. The series names give the tier that bytes were read from.
pub(super) fn draw(path: &Path, timeline: &Timeline, report: &Report) -> anyhow::Result<()> {
    let ssd = timeline.running_sum(|span| span.fetched_ssd_bytes);
    let dram = timeline.running_sum(|span| span.fetched_bytes - span.fetched_ssd_bytes);
    let saved = timeline.running_sum(|span| span.saved_bytes);
    let last = |sums: &[u64]| sums.last().copied().unwrap_or_default();
    let total = last(&ssd) + last(&dram) + last(&saved);
    let title = format!(
        "Which bytes moved? {} fetched, {} saved",
        human_bytes(report.fetched_bytes),
        human_bytes(report.saved_bytes)
    );
    let axes = Axes {
        title: &title,
        x: "time of the replay (s)",
        y: "bytes moved so far, stacked",
        x_max: timeline.end_s,
        y_max: float(total) * 1.1,
        x_labels: 11,
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let y_label = |y: &f64| human_bytes(*y as u64);
    let mut canvas = Canvas::new(path, &axes, &|x| format!("{x:.1}"), &y_label)?;
    let mut lower = vec![0; saved.len()];
    let bands = [
        ("saved to nodes (QUIC)", saved),
        ("fetched from DRAM (QUIC)", dram),
        ("fetched from SSD (QUIC)", ssd),
    ];
    for ((name, sums), color) in
        bands.into_iter().zip([PALETTE[2], PALETTE[5], PALETTE[1]]).filter(|((_, sums), _)| last(sums) > 0)
    {
        let upper: Vec<u64> = lower.iter().zip(&sums).map(|(below, own)| below + own).collect();
        let label = format!("{name}: {}", human_bytes(last(&sums)));
        canvas.band(&label, color, &points(timeline, &lower), &points(timeline, &upper))?;
        lower = upper;
    }
    mark_faults(&mut canvas, timeline)?;
    canvas.finish(SeriesLabelPosition::MiddleLeft)
}

fn points(timeline: &Timeline, sums: &[u64]) -> Vec<(f64, f64)> {
    timeline.spans.iter().zip(sums).map(|(span, sum)| (span.at_s, float(*sum))).collect()
}

fn float(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss)]
    let exact = bytes as f64;
    exact
}
