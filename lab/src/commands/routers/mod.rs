//! `kvfleet-lab routers`: the production scheduler and others on equal simulated fleets, as JSON
//! lines and as a document with tables and plots.
//!
//! `kvfleet_sim::fleet` and `crate::routers` hold the fleet and the routers.

mod document;
mod plot;

use std::path::Path;

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{BatchLimits, FleetSetup, Workload};
use kvfleet_sim::generate::{TraceGenerator, TraceSpec};
use kvfleet_sim::routers::{FetchScope, capacity};
use kvfleet_sim::trace::Request;
use serde::{Deserialize, Serialize};

use super::{read_trace, write_summary};
use crate::args::RoutersArgs;
use crate::routers::{Comparison, Goodput, LatencyLimits, LoadDraw, compare, goodput};

/// Name of the document and of the folder with its plots.
const DOCUMENT: &str = "ROUTERS.md";
const PLOTS: &str = "routers";

/// Instances per copy of a trace: a recorded trace of an hour saturates only a few of them.
const INSTANCES_PER_COPY: u32 = 4;

/// The settings shared by all rows of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RunSettings {
    profile: String,
    seed: u64,
}

/// One line of JSON output.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum OutputLine {
    Comparison(ComparisonRow),
    Overload(OverloadRow),
}

/// One fleet with one workload at one load.
#[derive(Serialize, Deserialize)]
struct ComparisonRow {
    #[serde(flatten)]
    terms: RunSettings,
    traffic: String,
    /// Requests of all copies.
    requests: usize,
    instances: u32,
    /// From where instances fetch under the other routers.
    plane: FetchScope,
    capacity_per_s: f64,
    #[serde(flatten)]
    compared: Comparison,
}

/// Performs all runs and writes the results.
pub(super) fn run(args: &RoutersArgs) -> anyhow::Result<()> {
    let Some(profile) = HardwareProfile::by_name(&args.profile) else {
        let known: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
        anyhow::bail!("profile {} is unknown: choose one of {}", args.profile, known.join(", "));
    };
    let terms = RunSettings { profile: args.profile.clone(), seed: args.seed };
    let (mut rows, mut overload_rows) = read_earlier_rows(args, &terms)?;
    let draws = LoadDraw::all(args.draws, args.seed);
    for (name, trace) in workloads(args)? {
        for instances in &args.instances {
            let workload = Workload::new(&trace, u64::from(instances.div_ceil(INSTANCES_PER_COPY)));
            let setup = FleetSetup::new(*instances, profile, workload.block_tokens);
            let capacity_per_s = capacity(&workload, &setup);
            let planes = [FetchScope::Own, FetchScope::Pool].into_iter();
            for (plane, load) in planes.flat_map(|plane| args.loads.iter().map(move |load| (plane, *load))) {
                let share = load * 100.0;
                eprintln!(
                    "{name}: {instances} instances at {share:.0} % of {capacity_per_s:.1} requests/s, {plane:?}"
                );
                let setup = FleetSetup { fetch_scope: plane, ..setup.clone() };
                let compared = compare(&workload, &setup, load, capacity_per_s, &draws);
                let (terms, traffic, instances) = (terms.clone(), name.clone(), *instances);
                let requests = workload.len();
                let row =
                    ComparisonRow { terms, traffic, requests, instances, plane, capacity_per_s, compared };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                rows.push(row);
            }
        }
    }
    overload_rows.extend(run_overloads(args, &terms)?);
    if let Some(path) = &args.summary {
        write_summary(path, &document::render_summary(&rows, &overload_rows, &terms))?;
    }
    match &args.out {
        Some(folder) => write_document(folder, &rows, &overload_rows, &terms)?,
        None if !args.json && args.summary.is_none() => {
            print!("{}", document::render(&rows, &overload_rows, &terms));
        }
        None => {}
    }
    Ok(())
}

/// Reads the output of earlier runs, which take long and give the same results.
fn read_earlier_rows(
    args: &RoutersArgs,
    terms: &RunSettings,
) -> anyhow::Result<(Vec<ComparisonRow>, Vec<OverloadRow>)> {
    let (mut rows, mut beyond) = (Vec::new(), Vec::new());
    for path in &args.rows {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            anyhow::anyhow!(
                "cannot read {}: {cause}; give what `kvfleet-lab routers --json` printed",
                path.display()
            )
        })?;
        for (number, line) in (1..).zip(text.lines()) {
            let at = || format!("{} line {number}", path.display());
            let line: OutputLine = serde_json::from_str(line).map_err(|_| {
                anyhow::anyhow!("{}: no row of `kvfleet-lab routers --json`; leave the line out", at())
            })?;
            let settings = match &line {
                OutputLine::Comparison(row) => &row.terms,
                OutputLine::Overload(row) => &row.terms,
            };
            anyhow::ensure!(
                settings == terms,
                "{}: measured with --profile {} --seed {}; give the same, or leave the file out",
                at(),
                settings.profile,
                settings.seed
            );
            match line {
                OutputLine::Comparison(row) => rows.push(row),
                OutputLine::Overload(row) => beyond.push(row),
            }
        }
    }
    Ok((rows, beyond))
}

/// Writes the document and its plots into `folder`.
fn write_document(
    folder: &Path,
    rows: &[ComparisonRow],
    beyond: &[OverloadRow],
    terms: &RunSettings,
) -> anyhow::Result<()> {
    let plots = folder.join(PLOTS);
    std::fs::create_dir_all(&plots)
        .map_err(|cause| anyhow::anyhow!("cannot make {}: {cause}; choose another --out", plots.display()))?;
    for (name, rows) in plot::groups(rows) {
        plot::draw(&plots.join(format!("{name}.svg")), &rows)?;
    }
    let path = folder.join(DOCUMENT);
    std::fs::write(&path, document::render(rows, beyond, terms))
        .map_err(|cause| anyhow::anyhow!("cannot write {}: {cause}", path.display()))?;
    eprintln!("wrote {} and {}", path.display(), plots.display());
    Ok(())
}

fn workloads(args: &RoutersArgs) -> anyhow::Result<Vec<(String, Vec<Request>)>> {
    let mut all = Vec::new();
    for path in &args.files {
        let name =
            path.file_stem().map_or_else(|| "trace".to_owned(), |stem| stem.to_string_lossy().into_owned());
        let mut trace = read_trace(path)?;
        trace.truncate(args.limit.unwrap_or(usize::MAX));
        all.push((name, trace));
    }
    if args.requests > 0 {
        for kind in &args.kinds {
            let spec = TraceSpec {
                block_tokens: args.block_tokens,
                ..TraceSpec::new(*kind, args.seed, args.requests)
            };
            all.push((kind.name().to_owned(), TraceGenerator::new(spec).collect()));
        }
    }
    if all.is_empty() && args.rows.is_empty() {
        anyhow::bail!("nothing to serve: give a trace, or --requests for generated ones");
    }
    Ok(all)
}

/// One fleet with a load above its capacity.
#[derive(Serialize, Deserialize)]
struct OverloadRow {
    #[serde(flatten)]
    terms: RunSettings,
    traffic: String,
    /// Requests of all copies.
    requests: usize,
    instances: u32,
    #[serde(flatten)]
    goodput: Goodput,
}

/// Runs all routers with a load above the fleet's capacity, each with the requests it rejects.
fn run_overloads(args: &RoutersArgs, terms: &RunSettings) -> anyhow::Result<Vec<OverloadRow>> {
    let profile = HardwareProfile::by_name(&args.profile).unwrap_or_default();
    let limits = match args.times_alone {
        Some((ttft, tbt)) => LatencyLimits::Alone { ttft, tbt },
        None => LatencyLimits::Equal { ttft_ms: args.ttft_ms, tbt_ms: args.tbt_ms },
    };
    let draws = LoadDraw::all(args.draws, args.seed);
    let mut all = Vec::new();
    if args.overloads.is_empty() {
        return Ok(all);
    }
    for (traffic, trace) in workloads(args)? {
        for instances in &args.instances {
            let workload = Workload::new(&trace, u64::from(instances.div_ceil(INSTANCES_PER_COPY)));
            let setup = FleetSetup::new(*instances, profile, workload.block_tokens);
            let batch = BatchLimits { chunk_tokens: args.chunk_tokens, ..setup.batch };
            let setup = FleetSetup { batch, fetch_scope: FetchScope::Pool, ..setup };
            let capacity_per_s = capacity(&workload, &setup);
            for load in &args.overloads {
                eprintln!(
                    "{traffic}: {instances} instances at {:.0} % of {capacity_per_s:.1} requests/s",
                    load * 100.0
                );
                let Some(goodput) = goodput(&workload, &setup, *load, capacity_per_s, limits, &draws) else {
                    continue;
                };
                let (terms, traffic) = (terms.clone(), traffic.clone());
                let requests = workload.len();
                let row = OverloadRow { terms, traffic, requests, instances: *instances, goodput };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                all.push(row);
            }
        }
    }
    Ok(all)
}
