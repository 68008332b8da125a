//! Mean time to first token against load, one plot for each fleet and traffic: the production scheduler and those of the others that are best somewhere.
//!
//! Not here: all others, which are in the tables.

use std::path::Path;

use kvfleet_sim::routers::{Comparison, PRODUCTION};
use plotters::prelude::{RGBColor, SeriesLabelPosition};

use super::Row;
use super::document::plane;
use crate::report::{Axes, Canvas, PALETTE};

/// Colour of the production scheduler, beside those of the palette.
const OURS: RGBColor = RGBColor(190, 0, 0);

/// How many of the others are drawn at most: as many as there are colours for.
const OTHERS_MAX: usize = PALETTE.len();

/// A router, its colour, and loads with what it came to.
type Line<'a> = (&'a str, RGBColor, Vec<(f64, f64)>);

/// Rows of one fleet under one traffic, with the name of their plot, in the order in which they were measured.
pub(super) fn groups(rows: &[Row]) -> Vec<(String, Vec<&Row>)> {
    let mut all: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in rows {
        let name = format!("{}-{}-{}", row.traffic, row.instances, plane(row.plane));
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, rows)) => rows.push(row),
            None => all.push((name, vec![row])),
        }
    }
    all
}

/// What a plot answers.
pub(super) fn title(rows: &[&Row]) -> String {
    let of = |row: &&Row| {
        format!(
            "{}, {} instances, others fetch from {}: how long until the first token?",
            row.traffic,
            row.instances,
            plane(row.plane)
        )
    };
    rows.first().map(of).unwrap_or_default()
}

/// Draws one. The vertical axis is logarithmic: the worst of the others are a hundred times the best.
pub(super) fn draw(path: &Path, rows: &[&Row]) -> anyhow::Result<()> {
    let compared: Vec<&Comparison> = rows.iter().map(|row| &row.compared).collect();
    let others = best_of(&compared);
    let mean = |of: &str, one: &Comparison| {
        let all = std::iter::once(&one.production).chain(&one.baselines);
        all.into_iter().find(|point| point.router == of).map(|point| (one.load * 100.0, point.ttft.mean_ms))
    };
    let lines = std::iter::once((PRODUCTION, OURS)).chain(others.iter().copied().zip(PALETTE));
    let lines: Vec<Line<'_>> = lines
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

/// The others that come nearest at any load, best first.
fn best_of<'a>(compared: &[&'a Comparison]) -> Vec<&'a str> {
    let mut all: Vec<&str> = Vec::new();
    for place in 0..compared.iter().map(|one| one.baselines.len()).max().unwrap_or_default() {
        for one in compared {
            let router = one.baselines.get(place).map(|point| point.router.as_str());
            all.extend(router.filter(|router| all.len() < OTHERS_MAX && !all.contains(router)));
        }
    }
    all
}
