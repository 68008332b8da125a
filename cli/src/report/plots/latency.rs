//! Plot of route, fetch and save durations by percentile.

use std::path::Path;

use plotters::prelude::SeriesLabelPosition;

use super::canvas::{Axes, Canvas, PALETTE};
use crate::replay::{Percentiles, ReplayMeasurements, RequestSample};

/// Number of nines shown: 3 is 99.9 %.
const NINES_MAX: f64 = 3.0;

/// Points per curve.
const POINTS: u32 = 120;

/// Draws the plot. The horizontal axis gives each nine the same width; the vertical axis is
/// logarithmic.
pub(super) fn draw(path: &Path, measured: &ReplayMeasurements) -> anyhow::Result<()> {
    let all: [(&str, Percentiles); 4] = [
        ("route", percentiles_of(measured, |sample| Some(sample.route_us))),
        ("fetch", percentiles_of(measured, |sample| sample.fetch_us)),
        ("save", percentiles_of(measured, |sample| sample.save_us)),
        ("whole request", percentiles_of(measured, |sample| Some(sample.total_us))),
    ];
    let slowest = all.iter().map(|(_, values)| values.at(1.0)).max().unwrap_or(1);
    let axes = Axes {
        title: "How long did route, fetch and save take?",
        x: "percentile of calls",
        y: "time, measured (logarithmic)",
        x_max: NINES_MAX,
        y_max: decades(slowest).ceil().max(1.0),
        x_labels: 4,
    };
    let mut canvas = Canvas::new(path, &axes, &percentile_label, &time_label)?;
    for ((name, values), color) in all.iter().zip(PALETTE).filter(|((_, values), _)| values.count() > 0) {
        let label = format!("{name}: p50 {}, p99 {}", time_text(values.at(0.5)), time_text(values.at(0.99)));
        canvas.line(&label, color, &curve(values))?;
    }
    canvas.finish(SeriesLabelPosition::LowerRight)
}

fn percentiles_of(measured: &ReplayMeasurements, quantity: fn(&RequestSample) -> Option<u64>) -> Percentiles {
    measured.samples.iter().filter_map(quantity).collect()
}

fn curve(values: &Percentiles) -> Vec<(f64, f64)> {
    let nines = (0..=POINTS).map(|step| NINES_MAX * f64::from(step) / f64::from(POINTS));
    nines.map(|nines| (nines, decades(values.at(1.0 - 10f64.powf(-nines))))).collect()
}

/// Powers of ten above one microsecond.
fn decades(us: u64) -> f64 {
    #[expect(clippy::cast_precision_loss)]
    let us = us.max(1) as f64;
    us.log10()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by the plotting library")]
fn percentile_label(nines: &f64) -> String {
    let percent = 100.0 * (1.0 - 10f64.powf(-nines));
    if *nines <= 1.0 {
        format!("p{percent:.0}")
    } else {
        format!("p{percent:.4}").trim_end_matches('0').trim_end_matches('.').chars().take(6).collect()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by the plotting library")]
fn time_label(decades: &f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let us = 10f64.powf(*decades).round() as u64;
    time_text(us)
}

fn time_text(us: u64) -> String {
    #[expect(clippy::cast_precision_loss)]
    let exact = us as f64;
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{:.3} ms", exact / 1e3).replace(".000", ""),
        _ => format!("{:.3} s", exact / 1e6).replace(".000", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_axis_labels() {
        assert_eq!([percentile_label(&0.0), percentile_label(&1.0)], ["p0", "p90"]);
        assert_eq!([percentile_label(&2.0), percentile_label(&3.0)], ["p99", "p99.9"]);
        assert_eq!([time_label(&0.0), time_label(&3.0), time_label(&6.0)], ["1 us", "1 ms", "1 s"]);
    }
}
