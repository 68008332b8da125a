//! `kvfleet crosscheck`: runs the same requests on a cluster of real processes and on a simulated
//! fleet with the same configuration, and reports the differences.
//!
//! `real` drives the cluster, `mirror` builds and runs the simulated fleet, `compare` compares both
//! and `show` prints the result. `kvfleet_sim::fleet` is the simulator.

mod compare;
mod mirror;
mod real;
mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::prepare::{TraceSource, Workload, load_workload};
use super::run::shape;
use crate::args::{CrosscheckArgs, TraceFormat};
use crate::cluster::{ClusterShape, LAYERS, LocalCluster};
use crate::process::Stop;
use crate::trace::write_generated;
use compare::RunComparison;
use real::RealRun;

/// Minimum fetch timeout in milliseconds, so that the speed of this machine does not affect
/// decisions.
const FETCH_FLOOR_MS: u64 = 10_000;

/// Report interval of instances in lockstep, where each request waits for a report of every
/// instance.
const LOCKSTEP_REPORT_MS: u64 = 10;

/// Performs all runs; returns whether the two fleets agree in each.
pub async fn run_crosscheck(args: &CrosscheckArgs, stop: &Stop) -> anyhow::Result<bool> {
    validate(args)?;
    let mut all = Vec::new();
    for nth in 0..args.runs {
        let seed = args.seed.saturating_add(nth.into());
        let compared = run_once(args, seed, stop.token()).await?;
        if args.json {
            println!("{}", serde_json::to_string(&compared)?);
        } else {
            print!("{}", show::run_text(&compared));
        }
        all.push(compared);
    }
    if !args.json {
        print!("{}", show::verdict_text(&all));
    }
    Ok(is_within_limits(&all))
}

/// Whether token shares differ by at most `POINTS_MAX` and each run is sound.
fn is_within_limits(all: &[RunComparison]) -> bool {
    all.iter().all(RunComparison::is_sound) && compare::mean_points(all) <= compare::POINTS_MAX
}

/// Rejects arguments that do not fit together.
fn validate(args: &CrosscheckArgs) -> anyhow::Result<()> {
    let takes_time = args.shape.time_scale > 0.0;
    if args.lockstep && takes_time {
        anyhow::bail!("--lockstep runs without time: leave out --time-scale");
    }
    if !args.lockstep && !takes_time {
        anyhow::bail!(
            "compute takes no time, so that no request queues: give --time-scale 0.01, say, or --lockstep"
        );
    }
    Ok(())
}

async fn run_once(
    args: &CrosscheckArgs,
    seed: u64,
    stop: &CancellationToken,
) -> anyhow::Result<RunComparison> {
    let (workload, traffic) = read_workload(args, seed).await?;
    let shape = with_mirror_settings(shape(&args.shape, FETCH_FLOOR_MS, &workload)?, args.lockstep);
    let cluster = tokio::select! {
        cluster = LocalCluster::start(shape) => cluster?,
        () = stop.cancelled() => anyhow::bail!("stopped before the cluster served"),
    };
    let served = serve(args, &cluster, &workload, seed, stop).await;
    cluster.stop().await;
    let (setup, recorded, per_s) = served?;
    let block_tokens = workload.block_tokens;
    let sides =
        tokio::task::spawn_blocking(move || mirror::simulate_both(&workload, &setup, recorded)).await?;
    Ok(RunComparison::new(args, traffic, seed, block_tokens, per_s, &sides))
}

/// Settings that both sides share and that differ from the defaults of a cluster.
fn with_mirror_settings(mut shape: ClusterShape, lockstep: bool) -> ClusterShape {
    // These come first, so that flags override them and are rejected if the simulator does not
    // support them. In the simulator all instances exist from the start; here the first is older
    // than the others and would be preferred for a while. All processes run on one host: once an
    // instance used the shared memory path, routers would assume it for every node, and no node
    // would be nearer than another.
    let off = ["router.windows=false", "router.slow_start_ms=0", "instance.report_links=false"];
    let mut settings: Vec<String> = off.map(str::to_owned).into();
    if lockstep {
        settings.push(format!("instance.report_ms={LOCKSTEP_REPORT_MS}"));
    }
    settings.append(&mut shape.overrides);
    ClusterShape { overrides: settings, ..shape }
}

/// Serves the workload on the cluster. Returns the setup of the simulated fleet, the record of the
/// run, and the requests per second.
async fn serve(
    args: &CrosscheckArgs,
    cluster: &LocalCluster,
    workload: &Workload,
    seed: u64,
    stop: &CancellationToken,
) -> anyhow::Result<(kvfleet_sim::fleet::FleetSetup, RealRun, Option<f64>)> {
    let setup = mirror::setup(cluster)?;
    let driver = real::ClusterDriver::new(cluster, workload, seed)?;
    if args.lockstep {
        return Ok((setup.with_fresh_state(), driver.lockstep(stop).await?, None));
    }
    let (of, sized) = (workload.clone(), setup.clone());
    let capacity = tokio::task::spawn_blocking(move || mirror::capacity(&of, &sized)).await?;
    let per_s = args.load * capacity;
    let report_every = Duration::from_nanos(setup.report_every_ns);
    Ok((setup, driver.timed(per_s, report_every, stop).await?, Some(per_s)))
}

/// The requests of one run and a name for them.
async fn read_workload(args: &CrosscheckArgs, seed: u64) -> anyhow::Result<(Workload, String)> {
    let args = args.clone();
    let read = tokio::task::spawn_blocking(move || {
        let limit = Some(args.requests as usize);
        match &args.trace {
            Some(path) => {
                let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
                let workload = load_trace(&args, path, args.format, limit)?;
                Ok((workload, name.unwrap_or_else(|| "trace".to_owned())))
            }
            None => {
                let directory = tempfile::Builder::new().prefix("kvfleet-crosscheck-").tempdir()?;
                let path: PathBuf = directory.path().join("trace.jsonl");
                write_generated(args.kind, seed, args.requests as usize, &path)?;
                Ok((load_trace(&args, &path, TraceFormat::Mooncake, limit)?, args.kind.name().to_owned()))
            }
        }
    });
    read.await?
}

fn load_trace(
    args: &CrosscheckArgs,
    path: &Path,
    format: TraceFormat,
    limit: Option<usize>,
) -> anyhow::Result<Workload> {
    let block_tokens = args.block_tokens;
    load_workload(&TraceSource {
        path,
        format,
        lenient: false,
        limit,
        block_tokens,
        tenant: 0,
        layers: LAYERS,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::args::{Args, Command};

    fn args(words: &[&str]) -> CrosscheckArgs {
        match Args::try_parse_from([&["kvfleet", "crosscheck"], words].concat()).unwrap().command {
            Command::Crosscheck(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn lockstep_excludes_time_scale() {
        let refused = |words: &[&str]| validate(&args(words)).unwrap_err().to_string();
        says("a crosscheck in lockstep with time", &refused(&["--lockstep", "--time-scale", "0.1"]), &[]);
        says("a crosscheck in time without any", &refused(&[]), &[]);
        validate(&args(&["--lockstep"])).unwrap();
        validate(&args(&["--time-scale", "0.1"])).unwrap();
        assert!(Args::try_parse_from(["kvfleet", "crosscheck", "--lockstep", "--load", "0.5"]).is_err());
    }

    #[test]
    fn flags_override_mirror_settings() {
        let shape = ClusterShape {
            overrides: vec!["instance.report_ms=50".into()],
            ..ClusterShape::small("".into())
        };
        let set = with_mirror_settings(shape, true).overrides;
        assert_eq!(set.last().unwrap(), "instance.report_ms=50");
        assert_eq!(set.len(), 5);
    }
}
