//! SVG plots of a replay: hit rate by tier, latency percentiles, bytes, events.
//!
//! Each plot answers one question, which is its title.

mod bytes;
mod canvas;
mod events;
mod hit_rate;
mod latency;
mod timeline;

use std::path::{Path, PathBuf};

use super::json::Report;
use crate::replay::ReplayMeasurements;

pub(super) use canvas::human_bytes;
pub use canvas::{Axes, Canvas, PALETTE};

/// Draws every plot with data.
pub(super) fn draw_all(
    directory: &Path,
    report: &Report,
    measured: &ReplayMeasurements,
) -> anyhow::Result<Vec<PathBuf>> {
    if measured.samples.is_empty() {
        return Ok(vec![]);
    }
    let timeline = timeline::Timeline::new(measured, report.config.block_bytes);
    let file = |name: &str| directory.join(name);
    hit_rate::draw(&file("hit_rate.svg"), &timeline, report)?;
    latency::draw(&file("latency.svg"), measured)?;
    bytes::draw(&file("bytes.svg"), &timeline, report)?;
    events::draw(&file("events.svg"), &timeline, report)?;
    Ok(["hit_rate.svg", "latency.svg", "bytes.svg", "events.svg"].map(file).to_vec())
}
