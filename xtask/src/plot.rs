//! Chart of a bench's ratios: a dot for each row, a line from its minimum to its maximum run, and
//! its limit.
//!
//! Not here: the rows (`bench.rs`).

use std::fmt::Write;

/// A row of a bench.
pub(crate) struct ChartDot {
    pub(crate) label: String,
    /// Median of the runs.
    pub(crate) ratio: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// The upper limit of the ratio, if there is one.
    pub(crate) limit: Option<f64>,
}

/// Lengths in pixels.
const ROW: f64 = 22.0;
const LABELS: f64 = 470.0;
const AXIS: f64 = 480.0;
const TOP: f64 = 56.0;
const MARGIN: f64 = 24.0;

/// The chart as SVG. Without rows it is just an axis.
pub(crate) fn chart_svg(title: &str, axis: &str, dots: &[ChartDot]) -> String {
    let highest = dots.iter().map(|dot| dot.max.max(dot.limit.unwrap_or(1.0))).fold(1.0, f64::max);
    let end = (highest * 10.0 + 0.5).ceil() / 10.0;
    let x = |ratio: f64| LABELS + AXIS * (ratio / end).clamp(0.0, 1.0);
    let bottom = TOP + ROW * dots.len() as f64;
    let (width, height) = (LABELS + AXIS + MARGIN, bottom + 48.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{MARGIN:.0}\" y=\"26\" font-size=\"15\">{}</text>\n",
        escaped(title)
    );
    let steps = (end * 5.0).floor() as u32;
    for step in 0..=steps {
        let ratio = f64::from(step) / 5.0;
        let (at, shade) = (x(ratio), if step == 5 { "#888" } else { "#ddd" });
        let _ = writeln!(
            svg,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP:.0}\" y2=\"{bottom:.0}\" stroke=\"{shade}\"/>\
             <text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{ratio:.1}</text>",
            bottom + 16.0
        );
    }
    for (row, dot) in dots.iter().enumerate() {
        let y = TOP + ROW * (row as f64 + 0.5);
        let is_passed = dot.limit.is_some_and(|limit| dot.ratio > limit);
        let color = if is_passed { "#c62828" } else { "#1565c0" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LABELS - 10.0,
            y + 4.0,
            escaped(&dot.label)
        );
        if let Some(limit) = dot.limit {
            let (at, from, to) = (x(limit), y - 8.0, y + 8.0);
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{from:.1}\" y2=\"{to:.1}\" stroke=\"#e65100\" \
                 stroke-width=\"2\"/>"
            );
        }
        let _ = writeln!(
            svg,
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{color}\"/>\
             <circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\"/>",
            x(dot.min),
            x(dot.max),
            x(dot.ratio)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\n</svg>",
        LABELS + AXIS / 2.0,
        bottom + 38.0,
        escaped(axis)
    );
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(ratio: f64, limit: Option<f64>) -> ChartDot {
        ChartDot { label: "a < b & c".into(), ratio, min: ratio - 0.1, max: ratio + 0.1, limit }
    }

    #[test]
    fn dots_follow_the_ratio_and_are_red_above_the_limit() {
        let svg = chart_svg("\"t\"", "axis", &[dot(0.5, None), dot(1.05, Some(1.1)), dot(1.15, Some(1.1))]);
        // The axis ends at 1.3, so a ratio of 0.5 is at 0.5 / 1.3 of its width.
        let at = |ratio: f64| format!("cx=\"{:.1}\"", LABELS + AXIS * ratio / 1.3);
        assert!([0.5, 1.05, 1.15].iter().all(|ratio| svg.contains(&at(*ratio))), "{svg}");
        let red = format!("{} cy=\"111.0\" r=\"4\" fill=\"#c62828\"", at(1.15));
        assert_eq!(svg.matches("fill=\"#c62828\"").count(), 1);
        assert!(svg.contains(&red), "{svg}");
        assert_eq!(svg.matches("a &lt; b &amp; c").count(), 3);
        assert!(svg.contains("&quot;t&quot;") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn chart_without_rows_is_an_axis() {
        assert!(chart_svg("t", "axis", &[]).contains("</svg>"));
    }
}
