//! `cargo xtask bench`: builds the benches with the release profile and runs one, or runs all and
//! writes the documents of [`DOCUMENTS`] from their JSON lines. With `--peers` it builds and runs
//! the package with competing systems instead.
//!
//! Not here: the benches themselves (`benches/`).

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;

use crate::plot::{self, ChartDot};
use crate::reference::wrap;
use crate::shipped::{self, ProfileMode};

/// Cargo profile of a release.
pub(crate) const PROFILE: &str = "dist";

/// Benches that run the `kvfleet` program itself.
const PROGRAM_BENCHES: [&str; 2] = ["overload", "prediction"];

/// The bench that needs a GPU and the feature for it. Excluded from the document, which covers
/// machines without GPUs.
const GPU_BENCH: &str = "gpu";

/// Options of `cargo xtask bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// Name of a bench. Without a name, lists all except `gpu`. With --peers: index (the default),
    /// growth, tier, consensus (needs etcd: add `-- --install`), or all of these with the snapshot
    /// bench.
    #[arg(conflicts_with = "all")]
    name: Option<String>,
    /// Compare with other indexes and caches and with etcd (`benches/peers/`, built on first use,
    /// some minutes).
    #[arg(long, conflicts_with_all = ["all", "quick"])]
    peers: bool,
    /// Print one JSON object a line instead of a table.
    #[arg(long, conflicts_with = "all")]
    json: bool,
    /// Run every bench and write the documents docs/measurements/benchmarks-*.md.
    #[arg(long, conflicts_with = "quick")]
    all: bool,
    /// Replace the section of this bench in its document.
    #[arg(long, requires = "name", conflicts_with_all = ["peers", "json", "quick"])]
    write: bool,
    /// Runs of both sides per row, at least five.
    #[arg(long)]
    runs: Option<usize>,
    /// Do a tenth of the work to check that the bench runs; the figures are meaningless. Built
    /// without profile-guided optimisation.
    #[arg(long)]
    quick: bool,
    /// Build without profile-guided optimisation: in half the time, but slower than a release.
    #[arg(long, conflicts_with_all = ["all", "write", "peers"])]
    unprofiled: bool,
    /// Record a new profile even if one exists, so that changed code is optimised too. Implied by
    /// --all.
    #[arg(long, conflicts_with_all = ["unprofiled", "quick", "peers"])]
    anew: bool,
    /// After `--`: options of the peers package, such as `--entries-k 1000 --holders 1`.
    #[arg(last = true, requires = "peers")]
    options: Vec<String>,
}

/// Runs the requested benches.
///
/// # Errors
/// If a bench does not build, fails, or prints an invalid row.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    let mut options: Vec<String> = args.runs.iter().map(|runs| format!("--runs={runs}")).collect();
    if args.all {
        return write_all(&options);
    }
    // Rejects nearly all unknown names before half an hour of building.
    if let Some(name) = args.name.as_deref().filter(|name| !args.peers && !is_bench(name)) {
        bail!("unknown bench {name:?}: `cargo xtask bench` lists the benches");
    }
    let profiled = if args.anew { ProfileMode::Rebuild } else { ProfileMode::Reuse };
    if let Some(name) = args.name.as_deref().filter(|_| args.write) {
        shipped::build(&["benches"], "", profiled)?;
        return write_one(name, &options);
    }
    options.extend(args.json.then(|| "--json".to_owned()));
    options.extend(args.quick.then(|| "--quick".to_owned()));
    if !args.peers {
        let is_timed = args.name.as_ref().is_some_and(|name| name != GPU_BENCH) && !args.quick;
        let options = [args.name.into_iter().collect(), options].concat();
        return run_inherited(&mut benches_command(
            &options,
            if is_timed && !args.unprofiled { profiled } else { ProfileMode::Disabled },
        )?);
    }
    match args.name.as_deref() {
        Some("all") => {
            // The bench with an external program comes first, so that a missing one is reported at
            // once.
            for name in ["consensus", "index", "growth", "tier"] {
                run_peers(Some(name), &[&options[..], &args.options].concat())?;
            }
            run_inherited(&mut benches_command(
                &[vec!["snapshot".to_owned()], options].concat(),
                ProfileMode::Reuse,
            )?)
        }
        name => run_peers(name, &[options, args.options].concat()),
    }
}

/// Whether a bench has this name: each has a file with its name.
fn is_bench(name: &str) -> bool {
    let module = root().join("benches/src").join(name);
    module.with_extension("rs").is_file() || module.join("mod.rs").is_file()
}

/// Runs one bench of the peers package.
fn run_peers(name: Option<&str>, options: &[String]) -> anyhow::Result<()> {
    let mut options: Vec<String> =
        name.into_iter().map(str::to_owned).chain(options.iter().cloned()).collect();
    if name == Some("consensus") {
        options.extend(build_routers()?);
    }
    run_inherited(&mut peers_command(&options))
}

/// Runs a command with inherited output.
fn run_inherited(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot start the bench")?;
    if !status.success() {
        bail!("the bench ended with {status}; see its output above");
    }
    Ok(())
}

/// Command for the benches with these arguments, built as for a release, together with the program
/// if the bench runs it.
fn benches_command(options: &[String], by: ProfileMode) -> anyhow::Result<Command> {
    let name = options.first().map_or("", |name| name);
    let features = if name == GPU_BENCH { "benches/gpu" } else { "" };
    let programs = if PROGRAM_BENCHES.contains(&name) { &["benches", "kvfleet"][..] } else { &["benches"] };
    shipped::build(programs, features, by)?;
    let mut command = Command::new(shipped::program("benches"));
    command.current_dir(root()).args(options);
    Ok(command)
}

/// Command for the peers package, without profile-guided optimisation. It is outside the workspace
/// with its own lock file, but shares the target folder.
fn peers_command(options: &[String]) -> Command {
    let mut command = cargo();
    command.args(["run", "--profile", PROFILE]);
    command.env("CARGO_TARGET_DIR", target());
    command.args(["--locked", "--manifest-path", "benches/peers/Cargo.toml", "--bin", "peers", "--"]);
    command.args(options);
    command
}

/// Builds our routers and the load generator without profile-guided optimisation, like the systems
/// they are compared with. Returns the options that name them.
fn build_routers() -> anyhow::Result<[String; 2]> {
    build_release(&["kvfleet", "chaos-ingest"])?;
    let option = |name, program: &str| format!("--{name}={}", shipped::program(program).display());
    Ok([option("router", "kvfleet"), option("ingest", "chaos-ingest")])
}

/// Builds our programs with the release profile, without profile-guided optimisation: microseconds
/// do not matter for them.
fn build_release(programs: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["build", "--profile", PROFILE, "--quiet"]);
    for program in programs {
        // Naming an unneeded package would add its features to the shared build.
        let package = if *program == "kvfleet" { "kvfleet" } else { "chaos-tests" };
        command.args(["--package", package, "--bin", program]);
    }
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("{} was not built: cargo ended with {status}", programs.join(" and "));
    }
    Ok(())
}

/// Cargo's target folder.
pub(crate) fn target() -> PathBuf {
    // Cargo runs in the root, so a relative path is relative to it.
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Cargo, in the root of the repository.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Top folder of the repository.
pub(crate) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// Standard output of a run; standard error is inherited.
fn capture(options: &[String]) -> anyhow::Result<String> {
    let mut command = benches_command(options, ProfileMode::Reuse)?;
    let output = command.stderr(Stdio::inherit()).output().context("cannot start the bench")?;
    if !output.status.success() {
        bail!("`benches {}` ended with {}; see its output above", options.join(" "), output.status);
    }
    String::from_utf8(output.stdout).context("a bench printed bytes that are not UTF-8")
}

/// Installs external tools that the benches need.
fn install_tools() -> anyhow::Result<()> {
    // A failure only omits the rows against fio; the script and the bench report it.
    Command::new(root().join("scripts/setup")).arg("bench").status().context("cannot run scripts/setup")?;
    Ok(())
}

fn write_all(options: &[String]) -> anyhow::Result<()> {
    install_tools()?;
    shipped::build(&["benches"], "", ProfileMode::Rebuild)?;
    let listed = list_benches()?;
    // Fails before hours of measuring if a bench has no document.
    listed.iter().try_for_each(|(name, _)| BenchDocument::of(name).map(drop))?;
    let sections: Vec<Section> = listed
        .into_iter()
        .map(|(name, about)| run_bench(name, about, options))
        .collect::<anyhow::Result<_>>()?;
    for document in &DOCUMENTS {
        let own: Vec<&Section> =
            sections.iter().filter(|section| document.benches.contains(&&section.name[..])).collect();
        let texts: Vec<String> = own.iter().map(|section| section.text()).collect();
        write_document(document, &texts, &own)?;
    }
    Ok(())
}

/// Runs one bench and replaces its section; other sections stay.
fn write_one(name: &str, options: &[String]) -> anyhow::Result<()> {
    let listed = list_benches()?;
    let Some((_, about)) = listed.iter().find(|(listed, _)| listed == name) else {
        bail!("unknown bench {name:?}: `cargo xtask bench` lists the benches");
    };
    let document = BenchDocument::of(name)?;
    if name == "ssd" {
        install_tools()?;
    }
    let section = run_bench(name.to_owned(), about.clone(), options)?;
    let path = root().join(FOLDER).join(document.file);
    let before = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    write_document(document, &replace_section(&before, &section, document.benches), &[&section])
}

/// The sections of a document with this one inserted or replaced, in the order of `names`.
fn replace_section(before: &str, section: &Section, names: &[&str]) -> Vec<String> {
    let kept = before.split("\n## ").skip(1).filter_map(|text| {
        let name = text.lines().next()?;
        // Drops sections of benches that no longer exist.
        (name != section.name && names.contains(&name))
            .then(|| (name, format!("\n## {}\n", text.trim_end_matches('\n'))))
    });
    let mut all: Vec<(&str, String)> = kept.chain([(&section.name[..], section.text())]).collect();
    all.sort_by_key(|(name, _)| names.iter().position(|listed| listed == name));
    all.into_iter().map(|(_, text)| text).collect()
}

/// All benches: name and description.
fn list_benches() -> anyhow::Result<Vec<(String, String)>> {
    let pair = |line: &str| {
        let (name, about) = line.split_once('\t').context("the list of benches has a line without a tab")?;
        Ok((name.to_owned(), about.to_owned()))
    };
    capture(&[])?.lines().map(pair).collect()
}

/// Runs a bench.
fn run_bench(name: String, about: String, options: &[String]) -> anyhow::Result<Section> {
    eprintln!("running {name}");
    let own = [name.clone(), "--json".to_owned()];
    let rows = parse_rows(&capture(&[&own[..], options].concat())?)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    Ok(Section {
        name,
        about,
        rows,
        measured: measurement_note(&date(now.as_secs() / 86_400), &Machine::read()),
    })
}

/// Writes a document, and the chart if its bench was measured now.
fn write_document(document: &BenchDocument, texts: &[String], measured: &[&Section]) -> anyhow::Result<()> {
    let write = |file: &str, text: &str| {
        let path = root().join(FOLDER).join(file);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(document.file, &(document.intro() + &texts.concat()))?;
    for section in measured.iter().filter(|section| section.name == CHARTED) {
        write(&chart_file(&section.name), &chart(section))?;
    }
    eprintln!("wrote {FOLDER}/{}", document.file);
    Ok(())
}

/// Folder of the documents and the chart.
const FOLDER: &str = "docs/measurements";

/// A document with the benches of one theme, in its order of sections.
struct BenchDocument {
    file: &'static str,
    theme: &'static str,
    benches: &'static [&'static str],
}

/// All documents. Each fits the limit that `tidy/documents.rs` sets.
const DOCUMENTS: [BenchDocument; 4] = [
    BenchDocument {
        file: "benchmarks-router.md",
        theme: "router and gateway",
        benches: &[
            "index",
            "snapshot",
            "choose",
            "decide",
            "events",
            "overload",
            "proxy",
            "failover",
            "prediction",
            "routing",
        ],
    },
    BenchDocument {
        file: "benchmarks-node.md",
        theme: "hashes, frames and storage nodes",
        benches: &["hash", "frame", "get", "ssd", "start", "evict", "tiers", "window"],
    },
    BenchDocument {
        file: "benchmarks-engine.md",
        theme: "loading and saving beside compute",
        benches: &["overlap", "prefill", "layers", "tuning"],
    },
    BenchDocument {
        file: "benchmarks-network.md",
        theme: "paths of block bytes",
        benches: &["transport", "host", "network"],
    },
];

impl BenchDocument {
    /// The document of a bench.
    fn of(bench: &str) -> anyhow::Result<&'static BenchDocument> {
        DOCUMENTS
            .iter()
            .find(|document| document.benches.contains(&bench))
            .with_context(|| format!("bench {bench:?} has no document: add it to one in xtask/src/bench.rs"))
    }

    /// Title, and how to read the rows.
    fn intro(&self) -> String {
        format!("# Benchmarks: {}\n\n{INTRO}", self.theme)
    }
}

/// The bench with a chart.
const CHARTED: &str = "overlap";

fn chart_file(name: &str) -> String {
    format!("benchmarks-{name}.svg")
}

fn chart(section: &Section) -> String {
    let dot = |row: &BenchRow| ChartDot {
        label: format!(
            "{}, over {}",
            row.row,
            row.peer.split_once(": ").map_or(&row.peer[..], |(_, peer)| peer)
        ),
        ratio: row.ratio,
        min: row.min,
        max: row.max,
        limit: limit(&row.peer),
    };
    let dots: Vec<ChartDot> = section.rows.iter().map(dot).collect();
    let title = "Overlapped load, compute and save, relative to their peers";
    plot::chart_svg(
        title,
        "time relative to the peer: median, minimum and maximum run; limits are marked",
        &dots,
    )
}

/// The limit that a peer such as `limit 1.1: …` sets for a ratio.
fn limit(peer: &str) -> Option<f64> {
    peer.strip_prefix("limit ")?.split_once(':')?.0.parse().ok()
}

/// One JSON line of a bench, with exactly these keys.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct BenchRow {
    bench: String,
    row: String,
    unit: String,
    ours: f64,
    peer: String,
    theirs: f64,
    ratio: f64,
    better: String,
    runs: u32,
    min: f64,
    max: f64,
}

struct Section {
    name: String,
    about: String,
    rows: Vec<BenchRow>,
    /// Date and machine of the measurement.
    measured: String,
}

impl Section {
    fn text(&self) -> String {
        let mut text = format!(
            "\n## {}\n\n{}\n\n{}\n\n",
            self.name,
            wrap(&format!("{}.", capitalised(&self.about))),
            self.measured
        );
        if self.name == CHARTED {
            let _ = write!(text, "![The rows below]({})\n\n", chart_file(CHARTED));
        }
        text.push_str("| row | unit | ours | theirs | peer | ratio | better | runs |\n");
        text.push_str("| --- | --- | ---: | ---: | --- | ---: | --- | ---: |\n");
        self.rows.iter().for_each(|row| text.push_str(&table_row(row)));
        text
    }
}

fn parse_rows(text: &str) -> anyhow::Result<Vec<BenchRow>> {
    let row = |line: &str| serde_json::from_str(line).with_context(|| format!("not a bench row: {line}"));
    let rows: Vec<BenchRow> = text.lines().map(row).collect::<anyhow::Result<_>>()?;
    if rows.is_empty() {
        bail!("a bench printed no row");
    }
    Ok(rows)
}

/// The machine of a measurement.
struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
}

impl Machine {
    fn read() -> Self {
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let memory_kib: f64 = proc_field(&file("/proc/meminfo"), "MemTotal")
            .and_then(|value| value.trim_end_matches("kB").trim().parse().ok())
            .unwrap_or(0.0);
        Self {
            cpu: proc_field(&file("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown CPU".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_kib / 1_048_576.0,
            // The part after the hyphen names the distribution's build, which does not affect
            // speed.
            kernel: file("/proc/sys/kernel/osrelease")
                .trim()
                .split('-')
                .next()
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

/// The value of the first `name : value` line.
fn proc_field(text: &str, name: &str) -> Option<String> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

/// `YYYY-MM-DD` of a day counted from 1970-01-01 (days to civil, with years that start in March).
fn date(days: u64) -> String {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

const INTRO: &str = "\
Written by `cargo xtask bench --all`, or one section by `cargo xtask bench NAME --write`; do not
edit. Both sides of a row run in the same process in alternating order. *ours* and *theirs* are
medians; the ratio (ours over theirs) is the median over runs, with the minimum and maximum run in
brackets. On a shared machine only the ratios are meaningful. Sections that say so were built with
a profile that some of these benches recorded (`docs/adr/0071-profile-guided-release.md`).

Not here: other indexes and caches, and etcd. `cargo xtask bench --peers` builds them, runs ours
beside them and compares each row with its target.\n";

fn measurement_note(date: &str, machine: &Machine) -> String {
    let Machine { cpu, cores, memory_gib, kernel } = machine;
    format!(
        "{date}, {cpu}, {cores} cores, {memory_gib:.1} GiB of memory, Linux {kernel}; built by a profile."
    )
}

fn table_row(row: &BenchRow) -> String {
    let BenchRow { row, unit, ours, peer, theirs, ratio, better, runs, min, max, .. } = row;
    let [ours, theirs, ratio, min, max] = [ours, theirs, ratio, min, max].map(|value| figure(*value));
    format!("| {row} | {unit} | {ours} | {theirs} | {peer} | {ratio} ({min}–{max}) | {better} | {runs} |\n")
}

/// About three significant digits, without an exponent.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = concat!(
        r#"{"bench":"index","row":"lookup","unit":"µs CPU","ours":4.5,"peer":"naive","theirs":9.0,"#,
        r#""ratio":0.5,"better":"lower","runs":7,"min":0.4,"max":0.6}"#,
    );

    #[test]
    fn dates_are_civil() {
        for (days, text) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), text);
        }
    }

    #[test]
    fn every_row_must_have_exactly_the_agreed_keys() {
        assert_eq!(parse_rows(LINE).map(|rows| rows.len()).map_err(|e| e.to_string()), Ok(1));
        for wrong in ["", "no json", &LINE.replace("\"runs\":7,", ""), &LINE.replace("{", "{\"extra\":1,")] {
            assert!(parse_rows(wrong).is_err(), "{wrong}");
        }
    }

    fn section(name: &str) -> anyhow::Result<Section> {
        let machine = Machine { cpu: "CPU X".into(), cores: 2, memory_gib: 23.5, kernel: "6.1".into() };
        let measured = measurement_note("2026-01-02", &machine);
        Ok(Section { name: name.into(), about: "one replica".into(), rows: parse_rows(LINE)?, measured })
    }

    #[test]
    fn a_section_states_machine_date_and_rows() -> anyhow::Result<()> {
        let expected = "
## index

One replica.

2026-01-02, CPU X, 2 cores, 23.5 GiB of memory, Linux 6.1; built by a profile.

| row | unit | ours | theirs | peer | ratio | better | runs |
| --- | --- | ---: | ---: | --- | ---: | --- | ---: |
| lookup | µs CPU | 4.50 | 9.00 | naive | 0.50 (0.40–0.60) | lower | 7 |
";
        assert_eq!(section("index")?.text(), expected);
        Ok(())
    }

    #[test]
    fn each_bench_has_a_file_of_its_name() -> anyhow::Result<()> {
        let main = std::fs::read_to_string(root().join("benches/src/main.rs"))?;
        let names: Vec<_> =
            main.split("Bench { name: \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(names.contains(&"proxy") && names.contains(&GPU_BENCH), "{names:?}");
        let without: Vec<_> = names.iter().filter(|name| !is_bench(name)).collect();
        assert!(without.is_empty(), "{without:?}");
        assert!(!is_bench("no-such-bench"));
        Ok(())
    }

    #[test]
    fn each_bench_has_a_section_in_one_document() -> anyhow::Result<()> {
        let main = std::fs::read_to_string(root().join("benches/src/main.rs"))?;
        let names = main.split("Bench { name: \"").skip(1).filter_map(|rest| rest.split('"').next());
        for name in names.filter(|name| *name != GPU_BENCH) {
            let text = std::fs::read_to_string(root().join(FOLDER).join(BenchDocument::of(name)?.file))?;
            assert!(text.contains(&format!("\n## {name}\n")), "{name}");
        }
        let mut all: Vec<_> = DOCUMENTS.iter().flat_map(|document| document.benches).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
        assert!(BenchDocument::of("no-such-bench").is_err());
        Ok(())
    }

    #[test]
    fn one_section_is_replaced_in_order() -> anyhow::Result<()> {
        let names = ["index", "hash", "get"];
        let of = |name: &str, say: &str| format!("\n## {name}\n\n{say}\n");
        let before = format!("{}{}{}", DOCUMENTS[0].intro(), of("index", "An old one."), of("get", "Stays."));
        let put = |name: &str| anyhow::Ok(replace_section(&before, &section(name)?, &names));
        let (index, hash) = (section("index")?.text(), section("hash")?.text());
        assert_eq!(put("index")?, [index, of("get", "Stays.")]);
        assert_eq!(put("hash")?, [of("index", "An old one."), hash, of("get", "Stays.")]);
        Ok(())
    }

    #[test]
    fn limits_of_peers_are_parsed() {
        assert_eq!(limit("limit 1.02: recomputing all"), Some(1.02));
        assert_eq!(["no buffer", "limit: a bare copy"].map(limit), [None, None]);
    }

    #[test]
    fn fields_of_proc_files_are_found() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n";
        assert_eq!(proc_field(text, "model name").as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(proc_field("MemTotal:       100 kB\n", "MemTotal").as_deref(), Some("100 kB"));
        assert_eq!(proc_field(text, "name"), None);
    }
}
