//! `kvfleet demo`: a short generated trace on three routers, three nodes and three instances, with
//! a node killed halfway.

use clap::Parser;
use kvfleet_sim::generate::TrafficKind;

use crate::args::{Args, Command, DemoArgs};
use crate::process::Stop;
use crate::replay;
use crate::report;
use crate::trace::write_generated;

/// Pace of the demo: about 120 requests per second, slow enough to show the cost of the kill, and
/// over in about ten seconds.
const SPEED: &str = "240x";

/// Runs the demo. Returns whether every request ended with correct bytes.
pub async fn run(args: &DemoArgs, stop: &Stop) -> anyhow::Result<bool> {
    let directory = tempfile::Builder::new().prefix("kvfleet-demo-").tempdir()?;
    let trace = directory.path().join("consumer.jsonl");
    let (seed, requests, path) = (args.seed, args.requests, trace.clone());
    let generated =
        tokio::task::spawn_blocking(move || write_generated(TrafficKind::Consumer, seed, requests, &path));
    tokio::select! {
        generated = generated => generated??,
        _ = stop.requested() => anyhow::bail!("stopped before the replay began"),
    }
    println!(
        "a consumer trace of {} requests; three routers, three nodes, three instances; node 2 is killed halfway",
        args.requests
    );
    let seed = args.seed.to_string();
    let mut words = vec!["kvfleet", "replay", "--kill", "node:2@50%", "--speed", SPEED, "--seed", &seed];
    if args.quiet {
        words.push("--quiet");
    }
    let words = words.iter().map(std::ffi::OsStr::new);
    let paths = [trace.as_os_str(), std::ffi::OsStr::new("--report"), args.report.as_os_str()];
    // The demo parses a normal replay command line, so that both behave the same.
    let Command::Replay(replay) = Args::try_parse_from(words.chain(paths))?.command else {
        anyhow::bail!("the demo's own command line is not a replay");
    };
    let outcome = replay::run_replay(&replay, stop).await?;
    print!("{}", report::table(&outcome.report, args.verbose));
    let files = outcome.files()?;
    let names: Vec<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    println!("\nin {}: {}", args.report.display(), names.join(", "));
    if !args.verbose {
        println!("--verbose adds which transport path each instance uses to each node, and why");
    }
    Ok(outcome.is_good())
}
