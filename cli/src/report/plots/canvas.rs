//! Shared look of all plots: size, colours, fonts, axes, fault marks.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Width and height of a plot in pixels: fits a page and half a screen.
const SIZE: (u32, u32) = (1100, 620);

/// Font sizes in pixels.
const TITLE_PX: u32 = 24;
const LABEL_PX: u32 = 17;
const TICK_PX: u32 = 15;

/// Colours distinguishable by colour-blind readers (Okabe and Ito).
pub const PALETTE: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(100, 100, 100),
];

/// Colour of fault marks.
const MARK_COLOR: RGBColor = RGBColor(190, 0, 0);

/// Colour of texts.
const TEXT_COLOR: RGBColor = RGBColor(45, 45, 45);

/// A chart with linear axes.
type Chart<'a, 'p> = ChartContext<'a, SVGBackend<'p>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Title and axes of a plot.
#[derive(Clone, Debug)]
pub struct Axes<'a> {
    /// The question the plot answers.
    pub title: &'a str,
    /// Horizontal quantity with its unit.
    pub x: &'a str,
    /// Vertical quantity with its unit.
    pub y: &'a str,
    /// Largest horizontal value.
    pub x_max: f64,
    /// Largest vertical value.
    pub y_max: f64,
    /// Approximate number of labels on the horizontal axis.
    pub x_labels: usize,
}

/// A plot being drawn.
pub struct Canvas<'p> {
    chart: Chart<'p, 'p>,
    area: DrawingArea<SVGBackend<'p>, Shift>,
    axes: (f64, f64),
}

/// Formats a value for an axis label.
pub(crate) type LabelFormat<'f> = &'f dyn Fn(&f64) -> String;

impl<'p> Canvas<'p> {
    /// An empty plot with axes from 0.
    pub fn new(
        path: &'p Path,
        axes: &Axes<'_>,
        x_label: LabelFormat<'_>,
        y_label: LabelFormat<'_>,
    ) -> anyhow::Result<Self> {
        let area = SVGBackend::new(path, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(|cause| cannot_draw(path, &cause))?;
        let (x_max, y_max) = (axes.x_max.max(f64::MIN_POSITIVE), axes.y_max.max(f64::MIN_POSITIVE));
        let chart = ChartBuilder::on(&area)
            .caption(axes.title, ("sans-serif", TITLE_PX).into_font().color(&TEXT_COLOR))
            .margin(18)
            .margin_right(30)
            .x_label_area_size(55)
            .y_label_area_size(90)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max)
            .map_err(|cause| cannot_draw(path, &cause))?;
        let mut canvas = Self { chart, area, axes: (x_max, y_max) };
        canvas.mesh(axes, x_label, y_label).map_err(|cause| cannot_draw(path, &cause))?;
        Ok(canvas)
    }

    fn mesh(
        &mut self,
        axes: &Axes<'_>,
        x_label: LabelFormat<'_>,
        y_label: LabelFormat<'_>,
    ) -> anyhow::Result<()> {
        let text = |px| ("sans-serif", px).into_font().color(&TEXT_COLOR);
        let mesh = self
            .chart
            .configure_mesh()
            .x_desc(axes.x)
            .y_desc(axes.y)
            .x_labels(axes.x_labels)
            .y_labels(9)
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .axis_desc_style(text(LABEL_PX))
            .label_style(text(TICK_PX))
            .bold_line_style(RGBColor(222, 222, 222))
            .light_line_style(WHITE)
            .axis_style(RGBColor(120, 120, 120))
            .draw();
        mesh.map_err(|cause| anyhow::anyhow!("{cause}"))
    }

    /// A filled region from `lower` to `upper`, with a legend entry.
    pub fn band(
        &mut self,
        name: &str,
        color: RGBColor,
        lower: &[(f64, f64)],
        upper: &[(f64, f64)],
    ) -> anyhow::Result<()> {
        let outline: Vec<_> = upper.iter().chain(lower.iter().rev()).copied().collect();
        let drawn = self.chart.draw_series(std::iter::once(Polygon::new(outline, color.mix(0.75).filled())));
        drawn
            .map_err(|cause| anyhow::anyhow!("{cause}"))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 20, y + 6)], color.mix(0.75).filled()));
        Ok(())
    }

    /// A line through `points`, with a legend entry.
    pub fn line(&mut self, name: &str, color: RGBColor, points: &[(f64, f64)]) -> anyhow::Result<()> {
        let drawn = self.chart.draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(3)));
        drawn
            .map_err(|cause| anyhow::anyhow!("{cause}"))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3)));
        Ok(())
    }

    /// Shades an interval of the horizontal axis, for the duration of a fault's effect.
    pub fn shade(&mut self, from: f64, to: f64) -> anyhow::Result<()> {
        let corners = [(from, 0.0), (to.min(self.axes.0), self.axes.1)];
        let drawn =
            self.chart.draw_series(std::iter::once(Rectangle::new(corners, MARK_COLOR.mix(0.12).filled())));
        drawn.map(|_| ()).map_err(|cause| anyhow::anyhow!("{cause}"))
    }

    /// A vertical line with a text. A different `rank` moves the text lower, so that texts do not
    /// overlap.
    pub fn mark(&mut self, at: f64, text: &str, rank: usize) -> anyhow::Result<()> {
        let (x_max, y_max) = self.axes;
        let line = PathElement::new(vec![(at, 0.0), (at, y_max)], MARK_COLOR.stroke_width(2));
        self.chart.draw_series(std::iter::once(line)).map_err(|cause| anyhow::anyhow!("{cause}"))?;
        #[expect(clippy::cast_precision_loss)]
        let height = y_max * (0.985 - 0.045 * (rank % 4) as f64);
        // Near the right edge the text goes to the left of its line.
        let is_right = at > 0.7 * x_max;
        let anchor = if is_right {
            plotters::style::text_anchor::HPos::Right
        } else {
            plotters::style::text_anchor::HPos::Left
        };
        let style = ("sans-serif", TICK_PX)
            .into_font()
            .color(&MARK_COLOR)
            .pos(plotters::style::text_anchor::Pos::new(anchor, plotters::style::text_anchor::VPos::Top));
        let offset = x_max * if is_right { -0.006 } else { 0.006 };
        let label = Text::new(text.to_owned(), (at + offset, height), style);
        let drawn = self.chart.draw_series(std::iter::once(label));
        drawn.map(|_| ()).map_err(|cause| anyhow::anyhow!("{cause}"))
    }

    /// Draws the legend and writes the file.
    pub fn finish(mut self, place: SeriesLabelPosition) -> anyhow::Result<()> {
        self.chart
            .configure_series_labels()
            .position(place)
            .margin(14)
            .legend_area_size(34)
            .label_font(("sans-serif", LABEL_PX).into_font().color(&TEXT_COLOR))
            .background_style(WHITE.mix(0.9))
            .border_style(RGBColor(200, 200, 200))
            .draw()
            .map_err(|cause| anyhow::anyhow!("{cause}"))?;
        self.area.present().map_err(|cause| anyhow::anyhow!("{cause}"))
    }
}

fn cannot_draw(path: &Path, cause: &dyn std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("cannot draw {}: {cause}", path.display())
}

/// Bytes in a readable decimal unit.
#[must_use]
pub(crate) fn human_bytes(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss)]
    let exact = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", exact / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", exact / 1e6),
        _ => format!("{:.2} GB", exact / 1e9),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn writes_all_texts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plot.svg");
        let axes = Axes {
            title: "A question?",
            x: "time (s)",
            y: "share (%)",
            x_max: 10.0,
            y_max: 100.0,
            x_labels: 5,
        };
        let mut canvas = Canvas::new(&path, &axes, &|x| format!("{x}"), &|y| format!("{y}")).unwrap();
        canvas.line("a line", PALETTE[0], &[(0.0, 1.0), (10.0, 50.0)]).unwrap();
        canvas.band("a band", PALETTE[1], &[(0.0, 0.0), (10.0, 0.0)], &[(0.0, 5.0), (10.0, 9.0)]).unwrap();
        canvas.shade(2.0, 3.0).unwrap();
        canvas.mark(2.0, "node-2 killed", 0).unwrap();
        canvas.finish(SeriesLabelPosition::UpperRight).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for word in ["A question?", "time (s)", "share (%)", "a line", "a band", "node-2 killed"] {
            assert!(svg.contains(word), "{word} is missing");
        }
    }

    #[test]
    fn formats_bytes() {
        assert_eq!(human_bytes(999), "999 B");
        assert_eq!(human_bytes(1_500_000), "1.5 MB");
        assert_eq!(human_bytes(2_345_000_000), "2.35 GB");
    }
}
