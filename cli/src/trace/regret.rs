//! `kvfleet trace regret`: what better knowledge would be worth to the production scheduler, as JSON lines or as a table.
//!
//! Not here: the fleet and the search (`kvfleet_sim::fleet`, `kvfleet_sim::routers`).

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_sim::fleet::{Setup, Workload};
use kvfleet_sim::routers::{Knowledge, Regret, capacity, regret};

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
    for load in &args.loads {
        let regret = regret(&workload, &setup, (*load, capacity_per_s), args.window as usize, args.seed);
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
    let [delay, prediction, greed] =
        [regret.lost.delay, regret.lost.prediction, regret.lost.greed].map(|share| share * 100.0);
    let greed = if greed > 0.0 { format!("{greed:.1} % at least") } else { "none was found".to_owned() };
    println!("lost of the mean: staleness {delay:.1} %, prediction {prediction:.1} %, greed: {greed}\n");
}
