//! `kvfleet trace routers`: the production scheduler and others on equal fleets in virtual time, as JSON lines and as a document with tables.
//!
//! Not here: the fleet and the routers (`kvfleet_sim::fleet`, `kvfleet_sim::routers`).

use std::fmt::Write;

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{Batch, Setup, Workload};
use kvfleet_sim::generate::{Generator, Kind, Spec};
use kvfleet_sim::routers::{
    BASELINES, Comparison, Good, Goodput, Limits, Plane, Point, capacity, compare, goodput,
};
use kvfleet_sim::trace::Request;
use serde::Serialize;

use super::read_trace;
use crate::args::RoutersArgs;

/// Name of the document.
const DOCUMENT: &str = "ROUTERS.md";

/// Instances for each copy of a trace: a recorded trace of an hour is what a few of them get through.
const INSTANCES_PER_COPY: u32 = 4;

/// One fleet under one traffic at one load.
#[derive(Serialize)]
struct Row {
    traffic: String,
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
    let mut rows = Vec::new();
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
                let compared = compare(&workload, &setup, (load, capacity_per_s), args.seed);
                let row =
                    Row { traffic: name.clone(), instances: *instances, plane, capacity_per_s, compared };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                rows.push(row);
            }
        }
    }
    let text = document(&rows, args) + &in_time_text(&overloads(args)?);
    match &args.out {
        Some(folder) => {
            let path = folder.join(DOCUMENT);
            std::fs::create_dir_all(folder).map_err(|cause| {
                anyhow::anyhow!("cannot make {}: {cause}; choose another --out", folder.display())
            })?;
            std::fs::write(&path, text)
                .map_err(|cause| anyhow::anyhow!("cannot write {}: {cause}", path.display()))?;
            eprintln!("wrote {}", path.display());
        }
        None if !args.json => print!("{text}"),
        None => {}
    }
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
        for kind in Kind::ALL {
            let spec = Spec { block_tokens: args.block_tokens, ..Spec::new(kind, args.seed, args.requests) };
            all.push((kind.name().to_owned(), Generator::new(spec).collect()));
        }
    }
    if all.is_empty() {
        anyhow::bail!("nothing to serve: give a trace, or --requests for generated ones");
    }
    Ok(all)
}

/// One fleet with more offered than it gets through.
#[derive(Serialize)]
struct Overload {
    traffic: String,
    instances: u32,
    #[serde(flatten)]
    goodput: Goodput,
}

/// Runs all routers where more is offered than the fleet gets through, each with what it turns away.
fn overloads(args: &RoutersArgs) -> anyhow::Result<Vec<Overload>> {
    let profile = HardwareProfile::by_name(&args.profile).unwrap_or_default();
    let limits = Limits { ttft_ms: args.ttft_ms, tbt_ms: args.tbt_ms };
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
                let goodput = goodput(&workload, &setup, (*load, capacity_per_s), limits, args.seed);
                let row = Overload { traffic: traffic.clone(), instances: *instances, goodput };
                if args.json {
                    println!("{}", serde_json::to_string(&row)?);
                }
                all.push(row);
            }
        }
    }
    Ok(all)
}

fn in_time_text(all: &[Overload]) -> String {
    let mut text = String::new();
    for Overload { traffic, instances, goodput } in all {
        let Limits { ttft_ms, tbt_ms } = goodput.limits;
        let _ = writeln!(
            text,
            "\n## {traffic}, {instances} instances, {:.0} % load: requests in time\n\nIn time: the first token within {ttft_ms} ms, the others {tbt_ms} ms apart on average. The others turn away what is predicted above a share of the limit, the best of six for this load. {:.3} of the best of them.\n",
            goodput.load * 100.0,
            goodput.ratio(),
        );
        text += "| router | turns away above | in time | turned away | mean TTFT | P99 | longest tenth in time |\n";
        text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for good in std::iter::once(&goodput.production).chain(&goodput.baselines) {
            let Good { router, threshold, in_time, rejected, ttft, long_in_time } = good;
            let share = threshold.map_or_else(|| "-".to_owned(), |share| format!("{share}"));
            let _ = writeln!(
                text,
                "| {router} | {share} | {:.2} % | {:.2} % | {:.0} ms | {:.0} ms | {:.1} % |",
                in_time * 100.0,
                rejected * 100.0,
                ttft.mean_ms,
                ttft.p99_ms,
                long_in_time * 100.0,
            );
        }
    }
    text
}

const HEAD: &str = "# Routers

Written by `cargo xtask routers`; do not edit. The production scheduler and ten others, each after its published description
(`sim/src/routers/`), on equal fleets in virtual time (`sim/src/fleet/`): continuous batching with chunked prefill, GPU memory with a prefix
cache, nodes with production tiers and policies, lanes with queues, word of all of it as late as it comes. Nothing below is measured on a GPU.

The others fetch from their *own* node, as engines with a tier in their host's memory do (Mooncake's moves the longest prefix where it is worth it), or
from a *pool* of all nodes, as the production scheduler does, so that routers differ by where they send and nothing else. In either case how much an
instance fetches is planned by the production planner. Instances begin what waits in the order of the production scheduler's turns, the shorter prompts
sooner (`core/src/schedule/turn.rs`); under the others, which have no such order, and in the lines *in order of coming*, in that. Load is a share of what the
fleet with a pool keeps up with when the least loaded instance takes each request.
";

fn document(rows: &[Row], args: &RoutersArgs) -> String {
    let mut text = HEAD.to_owned();
    let _ = writeln!(
        text,
        "\nProfile `{}`, seed {}, baselines: {}.\n",
        args.profile,
        args.seed,
        BASELINES.join(", ")
    );
    text += "## Against the best of the others at each point\n\nTTFT of the production scheduler over the least of the ten, for the mean and for P90.\n\n";
    text += "| traffic | instances | others fetch from | load | mean | best other | ratio | next best | ratio | P90 | ratio of P90 | mean in order of coming | P99 | least P99 of others | prompt tokens not computed | the most of others |\n";
    text += "| --- | ---: | --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for row in rows {
        let Comparison { load, production, in_order_of_coming, baselines } = &row.compared;
        let (mean, p90) = row.compared.ratios();
        let best = baselines.first();
        let (name, best_mean) = best.map_or(("none", 0.0), |best| (best.router.as_str(), best.ttft.mean_ms));
        let own_mean = production.ttft.mean_ms;
        let second = baselines.get(1).map_or_else(String::new, |second| {
            format!("{} {:.0} ms | {:.2}", second.router, second.ttft.mean_ms, own_mean / second.ttft.mean_ms)
        });
        let least_p99 = baselines.iter().map(|point| point.ttft.p99_ms).fold(f64::INFINITY, f64::min);
        let most = baselines.iter().map(|point| point.saved).fold(0.0, f64::max);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.0} % | {:.0} ms | {name} {best_mean:.0} ms | {mean:.2} | {second} | {:.0} ms | {p90:.2} | {:.0} ms | {:.0} ms | {least_p99:.0} ms | {:.1} % | {:.1} % |",
            row.traffic,
            row.instances,
            plane(row.plane),
            load * 100.0,
            production.ttft.mean_ms,
            production.ttft.p90_ms,
            in_order_of_coming.ttft.mean_ms,
            production.ttft.p99_ms,
            production.saved * 100.0,
            most * 100.0,
        );
    }
    for row in rows {
        let Row { traffic, instances, plane: from, compared, .. } = row;
        let (share, from) = (compared.load * 100.0, plane(*from));
        let title = format!("{traffic}, {instances} instances, {share:.0} % load, others fetch from {from}");
        let _ = writeln!(
            text,
            "\n## {title}\n\n{:.2} requests/s are all that the fleet gets through.\n",
            row.capacity_per_s
        );
        text += "| router | mean | P50 | P90 | P99 | TBT | saved | fetched blocks | error of prediction | bias |\n";
        text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        let Comparison { production, in_order_of_coming, baselines, .. } = &row.compared;
        for point in [production, in_order_of_coming].into_iter().chain(baselines) {
            line(&mut text, point);
        }
    }
    text
}

fn plane(plane: Plane) -> &'static str {
    match plane {
        Plane::Own => "own",
        Plane::Pool => "pool",
    }
}

fn line(text: &mut String, point: &Point) {
    let Point { router, ttft, tbt_ms, saved, fetched_blocks, prediction: (error, bias), .. } = point;
    let _ = writeln!(
        text,
        "| {router} | {:.0} ms | {:.0} ms | {:.0} ms | {:.0} ms | {tbt_ms:.1} ms | {:.1} % | {fetched_blocks} | {:.0} % | {:+.0} % |",
        ttft.mean_ms,
        ttft.p50_ms,
        ttft.p90_ms,
        ttft.p99_ms,
        saved * 100.0,
        error * 100.0,
        bias * 100.0,
    );
}
