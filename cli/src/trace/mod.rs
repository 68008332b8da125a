//! `kvfleet trace stats`, `gen`, `policies`, `joins`, `routers` and `regret`, and opening traces
//! for all commands.
//!
//! `kvfleet-sim` holds the formats, the statistics and the generator.

mod generate;
mod joins;
mod plots;
mod policies;
mod regret;
mod routers;
mod stats;

pub(crate) use generate::write_generated;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use kvfleet_sim::trace::{Format, Reader, Request, Skipped, Strictness, read};

use crate::args::{TraceCommand, TraceFormat};

/// Runs a trace command.
pub fn run(command: &TraceCommand) -> anyhow::Result<()> {
    match command {
        TraceCommand::Stats(args) => stats::run(args),
        TraceCommand::Gen(args) => generate::run(args),
        TraceCommand::Policies(args) => policies::run(args),
        TraceCommand::Joins(args) => joins::run(args),
        TraceCommand::Routers(args) => routers::run(args),
        TraceCommand::Regret(args) => regret::run(args),
    }
}

/// Opens a trace in the given format.
pub(crate) fn open_trace<R: BufRead>(input: R, format: TraceFormat, lenient: bool) -> Reader<R> {
    let format = match format {
        TraceFormat::Auto => Format::Detect,
        TraceFormat::Mooncake => Format::Mooncake,
        TraceFormat::Bailian => Format::Bailian,
    };
    read(input, format, if lenient { Strictness::Lenient } else { Strictness::Strict })
}

/// All requests of a trace in any supported format.
fn read_trace(path: &Path) -> anyhow::Result<Vec<Request>> {
    let shown = path.display();
    let file = File::open(path)
        .map_err(|cause| anyhow::anyhow!("cannot read {shown}: {cause}; give the path of a trace"))?;
    let requests = open_trace(BufReader::new(file), TraceFormat::Auto, false).collect::<Result<_, _>>();
    requests.map_err(|error| anyhow::anyhow!("{shown}: {error}"))
}

/// Describes lines skipped by a lenient reader: `3 (2 malformed JSON, 1 unsorted timestamp)`.
pub(crate) fn skipped_text(skipped: &Skipped) -> String {
    let reasons: Vec<_> = skipped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    format!("{} ({})", skipped.values().sum::<u64>(), reasons.join(", "))
}
