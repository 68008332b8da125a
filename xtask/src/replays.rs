//! `cargo xtask policies` and `cargo xtask routers`: every eviction policy and every router on every trace, into `docs/POLICIES.md` and `docs/ROUTERS.md`
//! with plots.
//!
//! Not here: the replays (`kvfleet trace policies` and `trace routers`, which this runs) and how fast one of them decides (`cargo xtask bench`).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, bail};
use clap::Args;

use crate::bench::{cargo, root};
use crate::shipped::{self, By};

/// The recorded trace; without it only generated traffic is replayed.
const TRACE: &str = "mooncake_conversation_trace.jsonl";

/// What to replay.
#[derive(Args, Debug)]
pub(crate) struct PoliciesArgs {
    /// Options of `kvfleet trace policies`, such as `--json`; behind `--`.
    #[arg(last = true)]
    options: Vec<String>,
}

/// How to run what makes the document of routers.
#[derive(Args, Debug)]
pub(crate) struct RoutersArgs {
    /// Parts to run; by default all, which takes some hours of one processor. The document has the others as they are in docs/routers/rows, and is written once all are there.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = PARTS.map(|part| part.name))]
    parts: Vec<String>,
    /// Parts at once; by default as many as there are processors.
    #[arg(long)]
    jobs: Option<usize>,
}

/// One call of `kvfleet trace routers`.
struct Part {
    name: &'static str,
    /// Whether it serves the recorded trace, and is left out without it.
    is_recorded: bool,
    options: &'static [&'static str],
}

const fn recorded(name: &'static str, options: &'static [&'static str]) -> Part {
    Part { name, is_recorded: true, options }
}

const fn generated(name: &'static str, options: &'static [&'static str]) -> Part {
    Part { name, is_recorded: false, options }
}

/// In the order of the document. A trace is served in one copy for every four instances, so larger fleets get fewer requests of each where that would take hours. Where more is
/// offered than a fleet gets through, traffic goes on for some minutes: in the time of a few answers nothing fills up.
const PARTS: [Part; 12] = [
    recorded("conversation-4", &["--instances", "4", "--loads", BELOW, "--draws", "3"]),
    recorded("conversation-16", &["--instances", "16", "--limit", "4000", "--loads", BELOW]),
    recorded("conversation-64", &["--instances", "64", "--limit", "4000", "--loads", BELOW]),
    generated("generated-4", &["--instances", "4", "--requests", "4000", "--loads", BELOW, "--draws", "3"]),
    generated("generated-16", &["--instances", "16", "--requests", "4000", "--loads", BELOW]),
    generated("generated-64", &["--instances", "64", "--requests", "1000", "--loads", BELOW]),
    recorded(
        "beyond-4",
        &[
            "--instances",
            "4",
            "--limit",
            "2000",
            "--overloads",
            ABOVE,
            "--times-alone",
            "10,5",
            "--draws",
            "3",
        ],
    ),
    recorded(
        "beyond-16",
        &["--instances", "16", "--limit", "1000", "--overloads", ABOVE, "--times-alone", "10,5"],
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
            ABOVE,
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
            ABOVE,
            "--times-alone",
            "10,5",
            "--draws",
            "5",
        ],
    ),
    recorded(
        "beyond-short-4",
        &["--instances", "4", "--limit", "2000", "--overloads", ABOVE, "--ttft-ms", "5000"],
    ),
    recorded("beyond-long-4", &["--instances", "4", "--overloads", ABOVE]),
];

/// Where the lines of parts are kept, so that one can be run again without the others.
const ROWS: &str = "docs/routers/rows";

/// Loads below what a fleet gets through. At the least of them hardly anybody waits: nearly all that is left is computing.
const BELOW: &str = "0.05,0.5,0.8,0.95";

/// Loads above it.
const ABOVE: &str = "1.1,1.3,1.5";

/// Replays policies and writes.
///
/// # Errors
/// When the command does not build or fails.
pub(crate) fn policies(args: &PoliciesArgs) -> anyhow::Result<()> {
    let trace = trace()?;
    let mut command = cargo();
    // The profile of the tests: who has run them has it built, and the figures do not depend on it.
    command.args(["run", "--quiet", "--profile", "chaos", "--package", "kvfleet", "--bin", "kvfleet", "--"]);
    command.args(["trace", "policies", "--out", "docs"]).args(trace);
    let status = command.args(&args.options).status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the replays ended with {status}; what they said is above");
    }
    Ok(())
}

/// Runs routers, part by part, and once there are lines of all of them, of now or of before, writes the document.
///
/// # Errors
/// When the command does not build, or a part fails.
pub(crate) fn routers(args: &RoutersArgs) -> anyhow::Result<()> {
    let trace = trace()?;
    // It works in virtual time: how fast it is changes nothing.
    shipped::build(&["kvfleet"], "", By::Nothing)?;
    let program = shipped::program("kvfleet");
    let folder = std::path::absolute(root().join(ROWS))?;
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let is_wanted = |part: &&Part| args.parts.is_empty() || args.parts.iter().any(|name| name == part.name);
    let is_there = |part: &&Part| trace.is_some() || !part.is_recorded;
    if let Some(part) =
        PARTS.iter().find(|part| args.parts.contains(&part.name.to_owned()) && !is_there(part))
    {
        bail!("{} serves the recorded trace, which is absent", part.name);
    }
    let parts: Vec<&Part> = PARTS.iter().filter(is_wanted).filter(is_there).collect();
    let left = Mutex::new(parts.iter());
    let next = || left.lock().ok()?.next();
    let jobs = args.jobs.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
    let work = || {
        while let Some(part) = next() {
            measure(part, (&program, trace.as_deref()), &folder)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        let mut ends = workers.into_iter().map(|worker| worker.join());
        ends.try_for_each(|end| end.unwrap_or_else(|_| bail!("a part broke down; what it said is above")))
    })?;
    // A document of some parts would put away what is known of the others.
    let missing: Vec<_> = PARTS.iter().filter(|part| !lines(&folder, part).exists()).collect();
    if !missing.is_empty() {
        let names: Vec<_> = missing.iter().map(|part| part.name).collect();
        eprintln!(
            "docs/ROUTERS.md is left as it is until there are lines of {} too: run `cargo xtask routers --parts {}`",
            names.join(", "),
            names.join(",")
        );
        return Ok(());
    }
    let mut command = Command::new(&program);
    command.current_dir(root()).args(["trace", "routers", "--out", "docs"]);
    for path in PARTS.iter().map(|part| lines(&folder, part)).filter(|path| path.exists()) {
        command.arg("--rows").arg(path);
    }
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("the document was not written: {status}; what was said is above");
    }
    Ok(())
}

/// Where a part's lines are.
fn lines(folder: &Path, part: &Part) -> PathBuf {
    folder.join(format!("{}.jsonl", part.name))
}

fn measure(part: &Part, (program, trace): (&Path, Option<&Path>), folder: &Path) -> anyhow::Result<()> {
    let path = lines(folder, part);
    // Half of a part is none: it gets its name at its end. Of two calls each writes its own.
    let begun = path.with_extension(format!("{}.begun", std::process::id()));
    let file = File::create(&begun).with_context(|| format!("cannot write {}", begun.display()))?;
    let mut command = Command::new(program);
    command.args(["trace", "routers", "--json"]).args(trace.filter(|_| part.is_recorded)).args(part.options);
    let status = command.stdin(Stdio::null()).stdout(file).status();
    let status = status.with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("{} ended with {status}; what it said is above", part.name);
    }
    std::fs::rename(&begun, &path).with_context(|| format!("cannot rename {}", begun.display()))
}

/// The recorded trace, if it is there.
fn trace() -> anyhow::Result<Option<PathBuf>> {
    let folder =
        std::env::var_os("KVFLEET_TRACES").map_or_else(|| root().join("../shared/traces"), PathBuf::from);
    let trace = std::path::absolute(folder.join(TRACE))?;
    if !trace.exists() {
        eprintln!("SKIPPED: {} is absent; put the trace there or set KVFLEET_TRACES", trace.display());
        return Ok(None);
    }
    Ok(Some(trace))
}
