//! `kvfleet crosscheck`: the same requests on a cluster of real processes and on a fleet in virtual time that is made of the same configuration, and what
//! differs.
//!
//! `real` drives the cluster, `twin` is the other fleet, `compare` holds them against each other, and `show` says what came out. Not here: the fleet in
//! virtual time itself (`kvfleet_sim::fleet`).

mod compare;
mod real;
mod show;
mod twin;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::prepare::{Reading, Workload, prepare};
use super::run::shape;
use crate::args::{CrosscheckArgs, TraceFormat};
use crate::cluster::{Cluster, LAYERS, Shape};
use crate::process::Stop;
use crate::trace::write_generated;
use compare::Compared;
use real::Recorded;

/// Least time a fetch is given, in milliseconds: the machine's own pace decides nothing here.
const FETCH_FLOOR_MS: u64 = 10_000;

/// Between two reports of an instance in lockstep, where each request waits for one of all instances.
const LOCKSTEP_REPORT_MS: u64 = 10;

/// Runs all that is asked for; answers whether the two fleets are alike in each.
pub async fn run(args: &CrosscheckArgs, stop: &Stop) -> anyhow::Result<bool> {
    check(args)?;
    let mut all = Vec::new();
    for nth in 0..args.runs {
        let seed = args.seed.saturating_add(nth.into());
        let compared = once(args, seed, stop.token()).await?;
        if args.json {
            println!("{}", serde_json::to_string(&compared)?);
        } else {
            print!("{}", show::run(&compared));
        }
        all.push(compared);
    }
    if !args.json {
        print!("{}", show::verdict(&all));
    }
    Ok(is_alike(&all))
}

/// Whether hit rates are within a point of each other, and all else is as it must be.
fn is_alike(all: &[Compared]) -> bool {
    all.iter().all(Compared::is_sound) && compare::points(all) <= compare::POINTS_MAX
}

/// What makes no sense together.
fn check(args: &CrosscheckArgs) -> anyhow::Result<()> {
    let takes_time = args.shape.time_scale > 0.0;
    if args.lockstep && takes_time {
        anyhow::bail!("--lockstep is without time: leave out --time-scale");
    }
    if !args.lockstep && !takes_time {
        anyhow::bail!(
            "compute takes no time, so that nobody waits: give --time-scale 0.01, say, or --lockstep"
        );
    }
    Ok(())
}

async fn once(args: &CrosscheckArgs, seed: u64, stop: &CancellationToken) -> anyhow::Result<Compared> {
    let (workload, traffic) = read(args, seed).await?;
    let shape = with_settings(shape(&args.shape, FETCH_FLOOR_MS, &workload)?, args.lockstep);
    let cluster = tokio::select! {
        cluster = Cluster::start(shape) => cluster?,
        () = stop.cancelled() => anyhow::bail!("stopped before the cluster served"),
    };
    let served = serve(args, &cluster, &workload, (seed, stop)).await;
    cluster.stop().await;
    let (setup, recorded, per_s) = served?;
    let block_tokens = workload.block_tokens;
    let twins = tokio::task::spawn_blocking(move || twin::serve(&workload, &setup, recorded)).await?;
    Ok(Compared::new(args, (traffic, seed, block_tokens, per_s), &twins))
}

/// What is to be the same on both sides though it is not what a cluster usually has.
fn with_settings(mut shape: Shape, lockstep: bool) -> Shape {
    // First, so that what was asked for by flags goes before, and is refused where it cannot be had in virtual time.
    // In virtual time all instances are there from the start; here one is ten seconds old before the others, and would be preferred for a moment.
    // And all processes here are on one host, whose memory routers would know for the way from any node as soon as an instance took it: no node would be
    // nearer than another.
    let off = ["router.windows=false", "router.slow_start_ms=0", "instance.report_links=false"];
    let mut settings: Vec<String> = off.map(str::to_owned).into();
    if lockstep {
        settings.push(format!("instance.report_ms={LOCKSTEP_REPORT_MS}"));
    }
    settings.append(&mut shape.overrides);
    Shape { overrides: settings, ..shape }
}

/// Serves the workload on the cluster. Answers with the fleet in virtual time as it is to be, what happened, and requests a second.
async fn serve(
    args: &CrosscheckArgs,
    cluster: &Cluster,
    workload: &Workload,
    (seed, stop): (u64, &CancellationToken),
) -> anyhow::Result<(kvfleet_sim::fleet::Setup, Recorded, Option<f64>)> {
    let setup = twin::setup(cluster)?;
    let driver = real::Driver::new(cluster, workload, seed)?;
    if args.lockstep {
        return Ok((setup.fresh(), driver.lockstep(stop).await?, None));
    }
    let (of, sized) = (workload.clone(), setup.clone());
    let capacity = tokio::task::spawn_blocking(move || twin::capacity(&of, &sized, seed)).await?;
    let per_s = args.load * capacity;
    let report_every = Duration::from_nanos(setup.report_every_ns);
    Ok((setup, driver.timed((per_s, report_every), stop).await?, Some(per_s)))
}

/// The requests of one run, and what to call them.
async fn read(args: &CrosscheckArgs, seed: u64) -> anyhow::Result<(Workload, String)> {
    let args = args.clone();
    let read = tokio::task::spawn_blocking(move || {
        let limit = Some(args.requests as usize);
        match &args.trace {
            Some(path) => {
                let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
                let workload = prepared(&args, path, (args.format, limit))?;
                Ok((workload, name.unwrap_or_else(|| "trace".to_owned())))
            }
            None => {
                let directory = tempfile::Builder::new().prefix("kvfleet-crosscheck-").tempdir()?;
                let path: PathBuf = directory.path().join("trace.jsonl");
                write_generated(args.kind, seed, args.requests as usize, &path)?;
                Ok((prepared(&args, &path, (TraceFormat::Mooncake, limit))?, args.kind.name().to_owned()))
            }
        }
    });
    read.await?
}

fn prepared(
    args: &CrosscheckArgs,
    path: &Path,
    (format, limit): (TraceFormat, Option<usize>),
) -> anyhow::Result<Workload> {
    let block_tokens = args.block_tokens;
    prepare(&Reading { path, format, lenient: false, limit, block_tokens, tenant: 0, layers: LAYERS })
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
    fn steps_have_no_time_and_times_no_steps() {
        let refused = |words: &[&str]| check(&args(words)).unwrap_err().to_string();
        says("a crosscheck in lockstep with time", &refused(&["--lockstep", "--time-scale", "0.1"]), &[]);
        says("a crosscheck in time without any", &refused(&[]), &[]);
        check(&args(&["--lockstep"])).unwrap();
        check(&args(&["--time-scale", "0.1"])).unwrap();
        assert!(Args::try_parse_from(["kvfleet", "crosscheck", "--lockstep", "--load", "0.5"]).is_err());
    }

    #[test]
    fn what_is_asked_for_by_flags_goes_before() {
        let shape = Shape { overrides: vec!["instance.report_ms=50".into()], ..Shape::small("".into()) };
        let set = with_settings(shape, true).overrides;
        assert_eq!(set.last().unwrap(), "instance.report_ms=50");
        assert_eq!(set.len(), 5);
    }
}
