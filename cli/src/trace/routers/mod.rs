//! `kvfleet trace routers`: the production scheduler and others on equal fleets in virtual time, as JSON lines and as a document with tables and plots.
//!
//! Not here: the fleet and the routers (`kvfleet_sim::fleet`, `kvfleet_sim::routers`).

mod document;
mod plot;

use std::path::Path;

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{Batch, Setup, Workload};
use kvfleet_sim::generate::{Generator, Spec};
use kvfleet_sim::routers::{Comparison, Draw, Goodput, Limits, Plane, capacity, compare, goodput};
use kvfleet_sim::trace::Request;
use serde::{Deserialize, Serialize};

use super::read_trace;
use crate::args::RoutersArgs;

/// Name of the document, and of the folder with its plots.
const DOCUMENT: &str = "ROUTERS.md";
const PLOTS: &str = "routers";

/// Instances for each copy of a trace: a recorded trace of an hour is what a few of them get through.
const INSTANCES_PER_COPY: u32 = 4;

/// Under what all rows of a document were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Terms {
    profile: String,
    seed: u64,
}

/// One line of what was printed.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Compared(Row),
    Beyond(Overload),
}

/// One fleet under one traffic at one load.
#[derive(Serialize, Deserialize)]
struct Row {
    #[serde(flatten)]
    terms: Terms,
    traffic: String,
    /// Of all copies.
    requests: usize,
    instances: u32,
    /// From where instances fetch under the others.
    plane: Plane,
    capacity_per_s: f64,
    #[serde(flatten)]
    compared: Comparison,
}

/// Runs everything that was asked for and says what came out.
pub(super) fn run(args: &RoutersArgs) -> anyhow::Result<()> {
    let Some(profile) = HardwareProfile::by_name(&args.profile) else {
        let known: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
        anyhow::bail!("profile {} is unknown: choose one of {}", args.profile, known.join(", "));
    };
    let terms = Terms { profile: args.profile.clone(), seed: args.seed };
    let (mut rows, mut beyond) = earlier(args, &terms)?;
    let draws = Draw::all(args.draws, args.seed);
    for (name, trace) in traffic(args)? {
        for instances in &args.instances {
            let workload = Workload::new(&trace, u64::from(instances.div_ceil(INSTANCES_PER_COPY)));
            let setup = Setup::new(*instances, profile, workload.block_tokens);
            let capacity_per_s = capacity(&workload, &setup, args.seed);
            let planes = [Plane::Own, Plane::Pool].into_iter();
            for (plane, load) in planes.flat_map(|plane| args.loads.iter().map(move |load| (plane, *load))) {
                let share = load * 100.0;
                eprintln!(
                    "{name}: {instances} instances at {share:.0} % of {capacity_per_s:.1} requests/s, {plane:?}"
                );
                let setup = Setup { plane, ..setup.clone() };
                let compared = compare(&workload, &setup, (load, capacity_per_s), &draws);
                let (terms, traffic, instances) = (terms.clone(), name.clone(), *instances);
                let requests = workload.len();
                let row = Row { terms, traffic, requests, instances, plane, capacity_per_s, compared };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                rows.push(row);
            }
        }
    }
    beyond.extend(overloads(args, &terms)?);
    match &args.out {
        Some(folder) => write(folder, &rows, &beyond, &terms)?,
        None if !args.json => print!("{}", document::render(&rows, &beyond, &terms)),
        None => {}
    }
    Ok(())
}

/// What earlier runs printed, which takes long and comes out the same.
fn earlier(args: &RoutersArgs, terms: &Terms) -> anyhow::Result<(Vec<Row>, Vec<Overload>)> {
    let (mut rows, mut beyond) = (Vec::new(), Vec::new());
    for path in &args.rows {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            anyhow::anyhow!(
                "cannot read {}: {cause}; give what `kvfleet trace routers --json` printed",
                path.display()
            )
        })?;
        for (number, line) in (1..).zip(text.lines()) {
            let at = || format!("{} line {number}", path.display());
            let line: Line = serde_json::from_str(line).map_err(|_| {
                anyhow::anyhow!("{}: no row of `kvfleet trace routers --json`; leave the line out", at())
            })?;
            let theirs = match &line {
                Line::Compared(row) => &row.terms,
                Line::Beyond(row) => &row.terms,
            };
            anyhow::ensure!(
                theirs == terms,
                "{}: measured with --profile {} --seed {}; give the same, or leave the file out",
                at(),
                theirs.profile,
                theirs.seed
            );
            match line {
                Line::Compared(row) => rows.push(row),
                Line::Beyond(row) => beyond.push(row),
            }
        }
    }
    Ok((rows, beyond))
}

/// The document with its plots, in this folder.
fn write(folder: &Path, rows: &[Row], beyond: &[Overload], terms: &Terms) -> anyhow::Result<()> {
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

fn traffic(args: &RoutersArgs) -> anyhow::Result<Vec<(String, Vec<Request>)>> {
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
            let spec = Spec { block_tokens: args.block_tokens, ..Spec::new(*kind, args.seed, args.requests) };
            all.push((kind.name().to_owned(), Generator::new(spec).collect()));
        }
    }
    if all.is_empty() && args.rows.is_empty() {
        anyhow::bail!("nothing to serve: give a trace, or --requests for generated ones");
    }
    Ok(all)
}

/// One fleet with more offered than it gets through.
#[derive(Serialize, Deserialize)]
struct Overload {
    #[serde(flatten)]
    terms: Terms,
    traffic: String,
    /// Of all copies.
    requests: usize,
    instances: u32,
    #[serde(flatten)]
    goodput: Goodput,
}

/// Runs all routers where more is offered than the fleet gets through, each with what it turns away.
fn overloads(args: &RoutersArgs, terms: &Terms) -> anyhow::Result<Vec<Overload>> {
    let profile = HardwareProfile::by_name(&args.profile).unwrap_or_default();
    let limits = match args.times_alone {
        Some((ttft, tbt)) => Limits::Alone { ttft, tbt },
        None => Limits::Equal { ttft_ms: args.ttft_ms, tbt_ms: args.tbt_ms },
    };
    let draws = Draw::all(args.draws, args.seed);
    let mut all = Vec::new();
    if args.overloads.is_empty() {
        return Ok(all);
    }
    for (traffic, trace) in traffic(args)? {
        for instances in &args.instances {
            let workload = Workload::new(&trace, u64::from(instances.div_ceil(INSTANCES_PER_COPY)));
            let setup = Setup::new(*instances, profile, workload.block_tokens);
            let batch = Batch { chunk_tokens: args.chunk_tokens, ..setup.batch };
            let setup = Setup { batch, plane: Plane::Pool, ..setup };
            let capacity_per_s = capacity(&workload, &setup, args.seed);
            for load in &args.overloads {
                eprintln!(
                    "{traffic}: {instances} instances at {:.0} % of {capacity_per_s:.1} requests/s",
                    load * 100.0
                );
                let Some(goodput) = goodput(&workload, &setup, (*load, capacity_per_s), limits, &draws)
                else {
                    continue;
                };
                let (terms, traffic) = (terms.clone(), traffic.clone());
                let requests = workload.len();
                let row = Overload { terms, traffic, requests, instances: *instances, goodput };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                all.push(row);
            }
        }
    }
    Ok(all)
}
