//! `kvfleet trace gen`: writes a generated trace.
//!
//! `kvfleet_sim::generate` defines the traces.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use kvfleet_sim::generate::{TraceGenerator, TraceSpec, TrafficKind};
use kvfleet_sim::trace::{BAILIAN_BLOCK_TOKENS, Format, MOONCAKE_BLOCK_TOKENS, Writer};

use crate::args::{GenArgs, TraceFormat};

/// Generates to a file or to standard output.
pub(super) fn run(args: &GenArgs) -> anyhow::Result<()> {
    let format = match args.format {
        TraceFormat::Mooncake => Format::Mooncake,
        TraceFormat::Auto | TraceFormat::Bailian => Format::Bailian,
    };
    let spec = spec(args.kind, args.seed, args.requests as u64, format, args.sessions_per_s)?;
    match &args.output {
        Some(path) => {
            write(&spec, format, create(path)?)?;
            eprintln!("wrote {} requests to {}", args.requests, path.display());
            Ok(())
        }
        None => write(&spec, format, std::io::stdout().lock()),
    }
}

/// Generates a trace in Mooncake format into `path`, for `kvfleet demo`.
pub(crate) fn write_generated(
    kind: TrafficKind,
    seed: u64,
    requests: usize,
    path: &Path,
) -> anyhow::Result<()> {
    let spec = spec(kind, seed, requests as u64, Format::Mooncake, Some(DEMO_SESSIONS_PER_S))?;
    write(&spec, Format::Mooncake, create(path)?)
}

/// New sessions per second in the demo: few enough for several turns per session within its
/// requests.
const DEMO_SESSIONS_PER_S: f64 = 0.5;

fn spec(
    kind: TrafficKind,
    seed: u64,
    requests: u64,
    format: Format,
    sessions_per_s: Option<f64>,
) -> anyhow::Result<TraceSpec> {
    if sessions_per_s.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
        anyhow::bail!("--sessions-per-s must be above 0");
    }
    let block_tokens = if format == Format::Mooncake { MOONCAKE_BLOCK_TOKENS } else { BAILIAN_BLOCK_TOKENS };
    Ok(TraceSpec { block_tokens, sessions_per_s, ..TraceSpec::new(kind, seed, requests) })
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path).map_err(|cause| anyhow::anyhow!("cannot write {}: {cause}", path.display()))
}

fn write(spec: &TraceSpec, format: Format, output: impl Write) -> anyhow::Result<()> {
    let mut writer = Writer::new(BufWriter::new(output), format);
    for request in TraceGenerator::new(*spec) {
        writer.write(&request)?;
    }
    writer.finish()?.flush()?;
    Ok(())
}
