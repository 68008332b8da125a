//! `cargo xtask policies` and `cargo xtask routers`: replay every eviction policy and every router
//! on every trace, into `docs/measurements/policies.md` and `docs/measurements/routers.md`.
//!
//! Not here: the replays (`kvfleet-lab policies` and `routers`, which this runs) and decision times
//! (`cargo xtask bench`).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, bail};
use clap::Args;

use crate::bench::{cargo, root};
use crate::shipped::{self, ProfileMode};

/// The recorded trace; without it only generated traffic is replayed.
const TRACE: &str = "mooncake_conversation_trace.jsonl";

/// Options of `cargo xtask policies`.
#[derive(Args, Debug)]
pub(crate) struct PoliciesArgs {
    /// Also write the document with plots into this directory.
    #[arg(long, value_name = "DIR")]
    full: Option<PathBuf>,
    /// After `--`: options of `kvfleet-lab policies`, such as `--json`.
    #[arg(last = true)]
    options: Vec<String>,
}

/// Options of `cargo xtask routers`.
#[derive(Args, Debug)]
pub(crate) struct RoutersArgs {
    /// Parts to run; by default all, which takes some hours of one processor. Rows of the other
    /// parts come from lab/rows; the document is written once all parts have rows.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = PARTS.map(|part| part.name))]
    parts: Vec<String>,
    /// Parts to run in parallel; by default the number of processors.
    #[arg(long)]
    jobs: Option<usize>,
    /// Run no part: only write the document from the rows in lab/rows.
    #[arg(long, conflicts_with = "parts")]
    rows_only: bool,
    /// Also write the document with all routers of each fleet and plots into this directory.
    #[arg(long, value_name = "DIR")]
    full: Option<PathBuf>,
}

/// One call of `kvfleet-lab routers`.
struct ReplayPart {
    name: &'static str,
    /// Whether it needs the recorded trace; skipped without it.
    is_recorded: bool,
    options: &'static [&'static str],
}

const fn recorded(name: &'static str, options: &'static [&'static str]) -> ReplayPart {
    ReplayPart { name, is_recorded: true, options }
}

const fn generated(name: &'static str, options: &'static [&'static str]) -> ReplayPart {
    ReplayPart { name, is_recorded: false, options }
}

/// In the order of the document. A trace is served in one copy per four instances, so larger fleets
/// get fewer requests of each to limit the run time. Above capacity, traffic lasts for some
/// minutes: queues would not fill within a few answers.
const PARTS: [ReplayPart; 12] = [
    recorded("conversation-4", &["--instances", "4", "--loads", LOADS_BELOW, "--draws", "3"]),
    recorded("conversation-16", &["--instances", "16", "--limit", "4000", "--loads", LOADS_BELOW]),
    recorded("conversation-64", &["--instances", "64", "--limit", "4000", "--loads", LOADS_BELOW]),
    generated(
        "generated-4",
        &["--instances", "4", "--requests", "4000", "--loads", LOADS_BELOW, "--draws", "3"],
    ),
    generated("generated-16", &["--instances", "16", "--requests", "4000", "--loads", LOADS_BELOW]),
    generated("generated-64", &["--instances", "64", "--requests", "1000", "--loads", LOADS_BELOW]),
    recorded(
        "beyond-4",
        &[
            "--instances",
            "4",
            "--limit",
            "2000",
            "--overloads",
            LOADS_ABOVE,
            "--times-alone",
            "10,5",
            "--draws",
            "3",
        ],
    ),
    recorded(
        "beyond-16",
        &["--instances", "16", "--limit", "1000", "--overloads", LOADS_ABOVE, "--times-alone", "10,5"],
    ),
    generated(
        "beyond-chat-4",
        &[
            "--instances",
            "4",
            "--kinds",
            "consumer,business",
            "--requests",
            "10000",
            "--overloads",
            LOADS_ABOVE,
            "--times-alone",
            "10,5",
            "--draws",
            "3",
        ],
    ),
    generated(
        "beyond-agent-4",
        &[
            "--instances",
            "4",
            "--kinds",
            "agent",
            "--requests",
            "3000",
            "--overloads",
            LOADS_ABOVE,
            "--times-alone",
            "10,5",
            "--draws",
            "5",
        ],
    ),
    recorded(
        "beyond-short-4",
        &["--instances", "4", "--limit", "2000", "--overloads", LOADS_ABOVE, "--ttft-ms", "5000"],
    ),
    recorded("beyond-long-4", &["--instances", "4", "--overloads", LOADS_ABOVE]),
];

/// Folder of each part's rows, so that parts can be rerun alone.
const ROWS: &str = "lab/rows";

/// Program of the comparisons.
const LAB: &str = "kvfleet-lab";

/// Documents with the results.
const POLICIES_DOCUMENT: &str = "docs/measurements/policies.md";
const ROUTERS_DOCUMENT: &str = "docs/measurements/routers.md";

/// Loads below the capacity of a fleet. At the lowest, requests hardly wait: nearly all time is
/// computing.
const LOADS_BELOW: &str = "0.05,0.5,0.8,0.95";

/// Loads above the capacity.
const LOADS_ABOVE: &str = "1.1,1.3,1.5";

/// Replays all policies and writes their document.
///
/// # Errors
/// If the command does not build or fails.
pub(crate) fn policies(args: &PoliciesArgs) -> anyhow::Result<()> {
    let trace = trace_path()?;
    let mut command = cargo();
    // The test profile, which is probably built already; the figures do not depend on it.
    command.args(["run", "--quiet", "--profile", "chaos", "--package", LAB, "--bin", LAB, "--"]);
    command.args(["policies", "--summary", POLICIES_DOCUMENT]).args(trace);
    command.args(full_options(args.full.as_deref())?);
    let status = command.args(&args.options).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the replays ended with {status}; see their output above");
    }
    Ok(())
}

/// Options that write the whole document into this directory. The program runs in the root of the
/// repository.
fn full_options(folder: Option<&Path>) -> anyhow::Result<Vec<PathBuf>> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    Ok(vec![PathBuf::from("--out"), std::path::absolute(folder)?])
}

/// Runs router parts, and writes the document once every part has rows.
///
/// # Errors
/// If the command does not build, or a part fails.
pub(crate) fn routers(args: &RoutersArgs) -> anyhow::Result<()> {
    // Simulates virtual time, so build speed does not affect the result.
    shipped::build(&[LAB], "", ProfileMode::Disabled)?;
    let program = shipped::program(LAB);
    let folder = std::path::absolute(root().join(ROWS))?;
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    if !args.rows_only {
        run_parts(args, &program, &folder)?;
    }
    write_routers(args, &program, &folder)
}

/// Runs the parts that the arguments name.
fn run_parts(args: &RoutersArgs, program: &Path, folder: &Path) -> anyhow::Result<()> {
    let trace = trace_path()?;
    let is_wanted =
        |part: &&ReplayPart| args.parts.is_empty() || args.parts.iter().any(|name| name == part.name);
    let is_there = |part: &&ReplayPart| trace.is_some() || !part.is_recorded;
    if let Some(part) =
        PARTS.iter().find(|part| args.parts.contains(&part.name.to_owned()) && !is_there(part))
    {
        bail!("{} serves the recorded trace, which is absent", part.name);
    }
    let parts: Vec<&ReplayPart> = PARTS.iter().filter(is_wanted).filter(is_there).collect();
    let left = Mutex::new(parts.iter());
    let next = || left.lock().ok()?.next();
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
    let work = || {
        while let Some(part) = next() {
            run_part(part, program, trace.as_deref(), folder)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        let mut ends = workers.into_iter().map(|worker| worker.join());
        ends.try_for_each(|end| end.unwrap_or_else(|_| bail!("a part panicked; see its output above")))
    })
}

/// Writes the document from the rows of all parts.
fn write_routers(args: &RoutersArgs, program: &Path, folder: &Path) -> anyhow::Result<()> {
    // A document of some parts would discard the results of the others.
    let missing: Vec<_> = PARTS.iter().filter(|part| !rows_file(folder, part).exists()).collect();
    if !missing.is_empty() {
        let names: Vec<_> = missing.iter().map(|part| part.name).collect();
        eprintln!(
            "{ROUTERS_DOCUMENT} is unchanged, because rows of {} are missing: run `cargo xtask routers --parts {}`",
            names.join(", "),
            names.join(",")
        );
        return Ok(());
    }
    let mut command = Command::new(program);
    command.args(["routers", "--summary", ROUTERS_DOCUMENT]).args(full_options(args.full.as_deref())?);
    command.current_dir(root());
    for part in &PARTS {
        command.arg("--rows").arg(rows_file(folder, part));
    }
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("the document was not written: {status}; see the output above");
    }
    Ok(())
}

/// File with the rows of a part.
fn rows_file(folder: &Path, part: &ReplayPart) -> PathBuf {
    folder.join(format!("{}.jsonl", part.name))
}

fn run_part(part: &ReplayPart, program: &Path, trace: Option<&Path>, folder: &Path) -> anyhow::Result<()> {
    let path = rows_file(folder, part);
    // Rows get their final name only when complete. Concurrent calls write separate files.
    let begun = path.with_extension(format!("{}.begun", std::process::id()));
    let file = File::create(&begun).with_context(|| format!("cannot write {}", begun.display()))?;
    let mut command = Command::new(program);
    command.args(["routers", "--json"]).args(trace.filter(|_| part.is_recorded)).args(part.options);
    let status = command.stdin(Stdio::null()).stdout(file).status();
    let status = status.with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("{} ended with {status}; see its output above", part.name);
    }
    std::fs::rename(&begun, &path).with_context(|| format!("cannot rename {}", begun.display()))
}

/// Path of the recorded trace, if it exists.
fn trace_path() -> anyhow::Result<Option<PathBuf>> {
    let folder =
        std::env::var_os("KVFLEET_TRACES").map_or_else(|| root().join("../shared/traces"), PathBuf::from);
    let trace = std::path::absolute(folder.join(TRACE))?;
    if !trace.exists() {
        eprintln!("SKIPPED: {} is absent; put the trace there or set KVFLEET_TRACES", trace.display());
        return Ok(None);
    }
    Ok(Some(trace))
}
