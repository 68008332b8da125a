//! The commands of `kvfleet-lab`: they run the comparisons and write tables, JSON lines, documents
//! and plots.
//!
//! Not here: the command line (`args.rs`) and the comparisons (`policies/`, `join.rs`, `routers/`).

mod joins;
mod oracle_gap;
mod policies;
mod routers;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use kvfleet_sim::trace::{Format, Request, Strictness, read};

use crate::args::LabCommand;

/// Runs a comparison.
///
/// # Errors
/// If an argument is invalid, or a file cannot be read or written.
pub fn run(command: &LabCommand) -> anyhow::Result<()> {
    match command {
        LabCommand::Policies(args) => policies::run(args),
        LabCommand::Joins(args) => joins::run(args),
        LabCommand::Routers(args) => routers::run(args),
        LabCommand::OracleGap(args) => oracle_gap::run(args),
    }
}

/// All requests of a trace in any supported format.
fn read_trace(path: &Path) -> anyhow::Result<Vec<Request>> {
    let shown = path.display();
    let file = File::open(path)
        .map_err(|cause| anyhow::anyhow!("cannot read {shown}: {cause}; give the path of a trace"))?;
    let requests = read(BufReader::new(file), Format::Detect, Strictness::Strict).collect::<Result<_, _>>();
    requests.map_err(|error| anyhow::anyhow!("{shown}: {error}"))
}

/// Most bytes of a summary: a document of the repository that a person reads.
const SUMMARY_BYTES_MAX: usize = 20_000;

/// Writes a summary of a comparison.
fn write_summary(path: &Path, text: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        text.len() <= SUMMARY_BYTES_MAX,
        "the summary has {} bytes, limit {SUMMARY_BYTES_MAX}: compare less traffic, or write the whole \
         document with --out",
        text.len()
    );
    std::fs::write(path, text).map_err(|cause| {
        anyhow::anyhow!("cannot write {}: {cause}; choose another --summary", path.display())
    })?;
    eprintln!("wrote {}", path.display());
    Ok(())
}
