//! The report of a replay: `report.json` with stable keys, plots, and a table on standard output.
//!
//! Measured values and values from a hardware profile never share an object, a table or a plot.

mod json;
mod plots;
mod table;

use std::path::{Path, PathBuf};

use crate::replay::ReplayMeasurements;

pub use json::{Config, Report, ReportSubject};
pub use plots::{Axes, Canvas, PALETTE};

/// Writes `report.json` and the plots into `directory`; returns the paths written.
pub fn write(
    directory: &Path,
    report: &Report,
    measured: &ReplayMeasurements,
) -> anyhow::Result<Vec<PathBuf>> {
    std::fs::create_dir_all(directory).map_err(|cause| {
        anyhow::anyhow!("cannot make {}: {cause}; choose another --report", directory.display())
    })?;
    let json = directory.join("report.json");
    std::fs::write(&json, serde_json::to_string_pretty(report)? + "\n")
        .map_err(|cause| anyhow::anyhow!("cannot write {}: {cause}", json.display()))?;
    let mut written = vec![json];
    written.extend(plots::draw_all(directory, report, measured)?);
    Ok(written)
}

/// The table printed at the end of a replay. With `verbose` it also says which path each instance
/// uses to each node, and why.
#[must_use]
pub fn table(report: &Report, verbose: bool) -> String {
    table::render(report, verbose)
}
