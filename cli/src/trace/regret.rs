//! `kvfleet trace regret`: what better knowledge would be worth to the production scheduler, as JSON lines or as a table.
//!
//! Not here: the fleet and the search (`kvfleet_sim::fleet`, `kvfleet_sim::routers`).

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{Setup, Workload};
use kvfleet_sim::routers::{Draw, Knowledge, Regret, Shares, capacity, regret};

use super::read_trace;
use crate::args::RegretArgs;

/// Instances for each copy of a trace, as in `kvfleet trace routers`.
const INSTANCES_PER_COPY: u32 = 4;

/// Runs every load and says what came out.
pub(super) fn run(args: &RegretArgs) -> anyhow::Result<()> {
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
    let setup = Setup::new(args.instances, profile, workload.block_tokens);
    let capacity_per_s = capacity(&workload, &setup, args.seed);
    let draws = Draw::all(args.draws, args.seed);
    for load in &args.loads {
        let load = (*load, capacity_per_s);
        let Some(regret) = regret(&workload, &setup, load, args.window as usize, &draws) else { continue };
        if args.json {
            println!("{}", serde_json::to_string(&regret)?);
        } else {
            show(&regret, args, capacity_per_s);
        }
    }
    Ok(())
}

fn show(regret: &Regret, args: &RegretArgs, capacity_per_s: f64) {
    let (share, instances) = (regret.load * 100.0, args.instances);
    println!(
        "{instances} instances at {share:.0} % of {capacity_per_s:.2} requests/s, {} requests",
        regret.requests
    );
    println!("| known | mean TTFT | P50 | P90 | P99 | prompt tokens not computed |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for one in &regret.knowing {
        let known = match one.knowledge {
            Knowledge::AsItComes => "what has come".to_owned(),
            Knowledge::Fresh => "loads and blocks as they are".to_owned(),
            Knowledge::TrueTimes => "and true times".to_owned(),
            Knowledge::ToCome => format!("and the next {} requests, best found", regret.window),
        };
        let (ttft, saved) = (one.ttft, one.saved * 100.0);
        println!(
            "| {known} | {:.0} ms | {:.0} ms | {:.0} ms | {:.0} ms | {saved:.1} % |",
            ttft.mean_ms, ttft.p50_ms, ttft.p90_ms, ttft.p99_ms,
        );
    }
    let of = |share: fn(&Shares) -> f64| {
        let [median, least, greatest] = regret.spread(share).map(|share| share * 100.0);
        match regret.drawn.len() {
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
