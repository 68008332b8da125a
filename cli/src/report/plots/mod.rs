//! Plots of a replay as SVG: hit rate by tier, latency percentiles, bytes, events.
//!
//! Each plot answers one question and says so in its title. Not here: numbers; plots draw what
//! `Measured` holds.

mod bytes;
mod canvas;
mod events;
mod hit_rate;
mod latency;
mod timeline;

use std::path::{Path, PathBuf};

use super::json::Report;
use crate::replay::Measured;

pub(super) use canvas::human_bytes;
pub(crate) use canvas::{Axes, Canvas, PALETTE};

/// Draws every plot for which there is data.
pub(super) fn draw_all(
    directory: &Path,
    report: &Report,
    measured: &Measured,
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
