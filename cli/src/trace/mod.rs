//! `kvfleet trace stats` and `gen`, and opening traces for all commands.
//!
//! `kvfleet-sim` holds the formats, the statistics and the generator. Not here: comparisons of
//! routers and policies on traces (`lab/`).

mod generate;
mod plots;
mod stats;

pub(crate) use generate::write_generated;

use std::io::BufRead;

use kvfleet_sim::trace::{Format, Reader, Skipped, Strictness, read};

use crate::args::{TraceCommand, TraceFormat};

/// Runs a trace command.
pub fn run(command: &TraceCommand) -> anyhow::Result<()> {
    match command {
        TraceCommand::Stats(args) => stats::run(args),
        TraceCommand::Gen(args) => generate::run(args),
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

/// Describes lines skipped by a lenient reader: `3 (2 malformed JSON, 1 unsorted timestamp)`.
pub(crate) fn skipped_text(skipped: &Skipped) -> String {
    let reasons: Vec<_> = skipped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    format!("{} ({})", skipped.values().sum::<u64>(), reasons.join(", "))
}
