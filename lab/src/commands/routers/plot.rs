//! Plots mean TTFT against load for each fleet and workload: the production scheduler and the best
//! of the others at some load.
//!
//! The tables list all others.

use std::path::Path;

use kvfleet::report::{Axes, Canvas, PALETTE};
use kvfleet_sim::routers::PRODUCTION;
use plotters::prelude::{RGBColor, SeriesLabelPosition};

use super::ComparisonRow;
use super::document::plane;
use crate::routers::Comparison;

/// Colour of the production scheduler, in addition to the palette.
const PRODUCTION_COLOR: RGBColor = RGBColor(190, 0, 0);

/// Maximum number of other routers drawn: one per colour.
const OTHERS_MAX: usize = PALETTE.len();

/// A router, its colour, and its mean TTFT by load.
type PlotLine<'a> = (&'a str, RGBColor, Vec<(f64, f64)>);

/// Rows grouped by fleet and workload, with the name of their plot, in order of measurement.
pub(super) fn groups(rows: &[ComparisonRow]) -> Vec<(String, Vec<&ComparisonRow>)> {
    let mut all: Vec<(String, Vec<&ComparisonRow>)> = Vec::new();
    for row in rows {
        let name = format!("{}-{}-{}", row.traffic, row.instances, plane(row.plane));
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, rows)) => rows.push(row),
            None => all.push((name, vec![row])),
        }
    }
    all
}

/// The question a plot answers.
pub(super) fn title(rows: &[&ComparisonRow]) -> String {
    let of = |row: &&ComparisonRow| {
        format!(
            "{}, {} instances, others fetch from {}: how long until the first token?",
            row.traffic,
            row.instances,
            plane(row.plane)
        )
    };
    rows.first().map(of).unwrap_or_default()
}

/// Draws one plot. The vertical axis is logarithmic: the worst routers are a hundred times slower
/// than the best.
pub(super) fn draw(path: &Path, rows: &[&ComparisonRow]) -> anyhow::Result<()> {
    let compared: Vec<&Comparison> = rows.iter().map(|row| &row.compared).collect();
    let others = best_baselines(&compared);
    let mean = |of: &str, one: &Comparison| {
        let all = std::iter::once(&one.production).chain(&one.baselines);
        all.into_iter().find(|point| point.router == of).map(|point| (one.load * 100.0, point.ttft.mean_ms))
    };
    let lines = std::iter::once((PRODUCTION, PRODUCTION_COLOR)).chain(others.iter().copied().zip(PALETTE));
    let lines: Vec<PlotLine<'_>> = lines
        .map(|(router, color)| (router, color, compared.iter().filter_map(|one| mean(router, one)).collect()))
        .collect();
    let heights = || lines.iter().flat_map(|(.., points)| points.iter().map(|point| point.1));
    let least = 10f64.powf(heights().fold(f64::INFINITY, f64::min).max(1.0).log10().floor());
    let decades = |ms: f64| (ms.max(least) / least).log10();
    let axes = Axes {
        title: &title(rows),
        x: "load (% of what the fleet gets through)",
        y: "mean TTFT (ms, logarithmic)",
        x_max: compared.iter().map(|one| one.load * 110.0).fold(0.0, f64::max),
        y_max: heights().map(decades).fold(0.0, f64::max) * 1.1,
        x_labels: 8,
    };
    let height = |decades: &f64| format!("{:.0}", least * 10f64.powf(*decades));
    let mut canvas = Canvas::new(path, &axes, &|load| format!("{load:.0}"), &height)?;
    for (router, color, points) in lines {
        let points: Vec<_> = points.into_iter().map(|(load, ms)| (load, decades(ms))).collect();
        canvas.line(router, color, &points)?;
    }
    canvas.finish(SeriesLabelPosition::UpperLeft)
}

/// The best other routers at any load, best first.
fn best_baselines<'a>(compared: &[&'a Comparison]) -> Vec<&'a str> {
    let mut all: Vec<&str> = Vec::new();
    for rank in 0..compared.iter().map(|one| one.baselines.len()).max().unwrap_or_default() {
        for one in compared {
            let router = one.baselines.get(rank).map(|point| point.router.as_str());
            all.extend(router.filter(|router| all.len() < OTHERS_MAX && !all.contains(router)));
        }
    }
    all
}
