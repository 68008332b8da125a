//! `kvfleet-lab oracle-gap`: what better knowledge would gain for the production scheduler, as JSON
//! lines or a table.
//!
//! `kvfleet_sim::fleet` and `crate::routers` run the fleet and the search.

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{FleetSetup, Workload};
use kvfleet_sim::routers::capacity;

use super::read_trace;
use crate::args::OracleGapArgs;
use crate::routers::{GapShares, Knowledge, LoadDraw, OracleGap, oracle_gap};

/// Instances per copy of a trace, as in `kvfleet-lab routers`.
const INSTANCES_PER_COPY: u32 = 4;

/// Runs every load and prints the results.
pub(super) fn run(args: &OracleGapArgs) -> anyhow::Result<()> {
    let Some(profile) = HardwareProfile::by_name(&args.profile) else {
        let known: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
        anyhow::bail!("profile {} is unknown: choose one of {}", args.profile, known.join(", "));
    };
    let mut trace = read_trace(&args.file)?;
    trace.truncate(args.limit);
    if trace.is_empty() {
        anyhow::bail!("nothing to serve: {} has no request, or --limit is 0", args.file.display());
    }
    let workload = Workload::new(&trace, u64::from(args.instances.div_ceil(INSTANCES_PER_COPY)));
    let setup = FleetSetup::new(args.instances, profile, workload.block_tokens);
    let capacity_per_s = capacity(&workload, &setup);
    let draws = LoadDraw::all(args.draws, args.seed);
    let window = args.window as usize;
    for load in &args.loads {
        let Some(gap) = oracle_gap(&workload, &setup, *load, capacity_per_s, window, &draws) else {
            continue;
        };
        if args.json {
            println!("{}", serde_json::to_string(&gap)?);
        } else {
            print_table(&gap, args, capacity_per_s);
        }
    }
    Ok(())
}

fn print_table(gap: &OracleGap, args: &OracleGapArgs, capacity_per_s: f64) {
    let (share, instances) = (gap.load * 100.0, args.instances);
    println!(
        "{instances} instances at {share:.0} % of {capacity_per_s:.2} requests/s, {} requests",
        gap.requests
    );
    println!("| known | mean TTFT | P50 | P90 | P99 | prompt tokens not computed |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for point in &gap.knowing {
        let known = match point.knowledge {
            Knowledge::AsItComes => "as delivered".to_owned(),
            Knowledge::Fresh => "current loads and blocks".to_owned(),
            Knowledge::TrueTimes => "and actual times".to_owned(),
            Knowledge::ToCome => format!("and the next {} requests, best found", gap.window),
        };
        let (ttft, saved) = (point.ttft, point.saved * 100.0);
        println!(
            "| {known} | {:.0} ms | {:.0} ms | {:.0} ms | {:.0} ms | {saved:.1} % |",
            ttft.mean_ms, ttft.p50_ms, ttft.p90_ms, ttft.p99_ms,
        );
    }
    let of = |share: fn(&GapShares) -> f64| {
        let [median, least, greatest] = gap.median_and_range(share).map(|share| share * 100.0);
        match gap.drawn.len() {
            0 => format!("{median:.1} %"),
            _ => format!("{median:.1} % ({least:.1} to {greatest:.1})"),
        }
    };
    let [delay, prediction] = [of(|lost| lost.delay), of(|lost| lost.prediction)];
    let greed = of(|lost| lost.greed);
    println!(
        "lost of the mean: staleness {delay}, prediction {prediction}, greed as far as the search found any: {greed}\n"
    );
}
