//! `cargo xtask bench`: builds the benches as the program is shipped, runs one and shows what it says, or runs all and
//! writes `docs/BENCHMARKS.md` from their JSON lines. With `--peers`, it builds and runs the package with the
//! peers of others instead.
//!
//! Not here: what is measured and how (`benches/`).

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use serde::Deserialize;

use crate::plot::{self, Dot};
use crate::shipped::{self, By};

/// Profile of what is shipped.
pub(crate) const PROFILE: &str = "dist";

/// Benches that run the program itself.
const OF_THE_PROGRAM: [&str; 2] = ["overload", "prediction"];

/// Needs a GPU and what the benches have for one: no part of the document, which is of machines without.
const OF_A_GPU: &str = "gpu";

/// What to run.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// Name of a bench; without one, their names and what they compare are listed, but for `gpu`, which needs one. With --peers: index
    /// (when nothing is named), growth, tier, consensus (needs etcd: add `-- --install`), or all of these and the
    /// bench of snapshots.
    #[arg(conflicts_with = "all")]
    name: Option<String>,
    /// Compare with indexes and caches of others and with etcd (`benches/peers/`, built on first use, some minutes).
    #[arg(long, conflicts_with_all = ["all", "quick"])]
    peers: bool,
    /// One JSON object a line instead of a table.
    #[arg(long, conflicts_with = "all")]
    json: bool,
    /// Run every bench and write docs/BENCHMARKS.md.
    #[arg(long, conflicts_with = "quick")]
    all: bool,
    /// Put what this bench says into docs/BENCHMARKS.md, in place of what it said there before.
    #[arg(long, requires = "name", conflicts_with_all = ["peers", "json", "quick"])]
    write: bool,
    /// Runs of both sides per row, at least five.
    #[arg(long)]
    runs: Option<usize>,
    /// A tenth of the work: to see that it works, not what it gives. Built without a profile.
    #[arg(long)]
    quick: bool,
    /// Built without a profile of its own work: in half the time, and slower than what is shipped.
    #[arg(long, conflicts_with_all = ["all", "write", "peers"])]
    unprofiled: bool,
    /// Make the profile anew, though there is one: code that changed since goes without. With --all it always is.
    #[arg(long, conflicts_with_all = ["unprofiled", "quick", "peers"])]
    anew: bool,
    /// After `--`: options of the package with the peers, such as `--entries-k 1000 --holders 1`.
    #[arg(last = true, requires = "peers")]
    options: Vec<String>,
}

/// Runs what was asked for.
///
/// # Errors
/// When a bench does not build, fails, or says something that is no row.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    let mut options: Vec<String> = args.runs.iter().map(|runs| format!("--runs={runs}")).collect();
    if args.all {
        return write_all(&options);
    }
    // Before half an hour of building: nearly all names that are none.
    if let Some(name) = args.name.as_deref().filter(|name| !args.peers && !is_bench(name)) {
        bail!("no bench is called {name:?}: `cargo xtask bench` lists them");
    }
    let profiled = if args.anew { By::Anew } else { By::Kept };
    if let Some(name) = args.name.as_deref().filter(|_| args.write) {
        shipped::build(&["benches"], "", profiled)?;
        return write_one(name, &options);
    }
    options.extend(args.json.then(|| "--json".to_owned()));
    options.extend(args.quick.then(|| "--quick".to_owned()));
    if !args.peers {
        let is_timed = args.name.as_ref().is_some_and(|name| name != OF_A_GPU) && !args.quick;
        let options = [args.name.into_iter().collect(), options].concat();
        return show(&mut benches(
            &options,
            if is_timed && !args.unprofiled { profiled } else { By::Nothing },
        )?);
    }
    match args.name.as_deref() {
        Some("all") => {
            // What needs a program that may be missing comes first: whoever has to install it hears so at once.
            for name in ["consensus", "index", "growth", "tier"] {
                with_peers(Some(name), &[&options[..], &args.options].concat())?;
            }
            show(&mut benches(&[vec!["snapshot".to_owned()], options].concat(), By::Kept)?)
        }
        name => with_peers(name, &[options, args.options].concat()),
    }
}

/// Whether a bench may be called so: each has a file of its name.
fn is_bench(name: &str) -> bool {
    root().join("benches/src").join(name).with_extension("rs").is_file()
}

/// Runs one bench of the package with the peers.
fn with_peers(name: Option<&str>, options: &[String]) -> anyhow::Result<()> {
    let mut options: Vec<String> =
        name.into_iter().map(str::to_owned).chain(options.iter().cloned()).collect();
    if name == Some("consensus") {
        options.extend(build_routers()?);
    }
    show(&mut peers(&options))
}

/// Runs a command whose output is for whoever asked.
fn show(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cannot start the bench")?;
    if !status.success() {
        bail!("the bench ended with {status}; what it said is above");
    }
    Ok(())
}

/// The benches with these arguments, built as the program is shipped if need be, and beside them the program where they run it.
fn benches(options: &[String], by: By) -> anyhow::Result<Command> {
    let name = options.first().map_or("", |name| name);
    let features = if name == OF_A_GPU { "benches/gpu" } else { "" };
    let programs = if OF_THE_PROGRAM.contains(&name) { &["benches", "kvfleet"][..] } else { &["benches"] };
    shipped::build(programs, features, by)?;
    let mut command = Command::new(shipped::program("benches"));
    command.current_dir(root()).args(options);
    Ok(command)
}

/// The package with the peers, without a profile. It is no member of the workspace and has a lock file of its own,
/// but shares the folder for what is built.
fn peers(options: &[String]) -> Command {
    let mut command = cargo();
    command.args(["run", "--profile", PROFILE]);
    command.env("CARGO_TARGET_DIR", target());
    command.args(["--locked", "--manifest-path", "benches/peers/Cargo.toml", "--bin", "peers", "--"]);
    command.args(options);
    command
}

/// Builds our routers and the load on them without a profile, as what they are compared with has none; the options that name them.
fn build_routers() -> anyhow::Result<[String; 2]> {
    build_release(&["kvfleet", "chaos-ingest"])?;
    let option = |name, program: &str| format!("--{name}={}", shipped::program(program).display());
    Ok([option("router", "kvfleet"), option("ingest", "chaos-ingest")])
}

/// Builds programs of ours as the program is shipped, but without a profile: what they say is no matter of microseconds.
fn build_release(programs: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["build", "--profile", PROFILE, "--quiet"]);
    for program in programs {
        // A package that is named and not wanted would only add features to what all are built with.
        let package = if *program == "kvfleet" { "kvfleet" } else { "chaos-tests" };
        command.args(["--package", package, "--bin", program]);
    }
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("{} was not built: cargo ended with {status}", programs.join(" and "));
    }
    Ok(())
}

/// The folder for what is built.
pub(crate) fn target() -> PathBuf {
    // Where one is given in part, it is from there that cargo runs.
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

/// What a run printed, while its complaints go where ours go.
fn output(options: &[String]) -> anyhow::Result<String> {
    let mut command = benches(options, By::Kept)?;
    let output = command.stderr(Stdio::inherit()).output().context("cannot start the bench")?;
    if !output.status.success() {
        bail!("`benches {}` ended with {}; what it said is above", options.join(" "), output.status);
    }
    String::from_utf8(output.stdout).context("a bench printed bytes that are no text")
}

/// What benches need that is no part of them.
fn prepare() -> anyhow::Result<()> {
    // Without it the rows against fio are left out, which the bench says; the script says why.
    Command::new(root().join("scripts/setup")).arg("bench").status().context("cannot run scripts/setup")?;
    Ok(())
}

fn write_all(options: &[String]) -> anyhow::Result<()> {
    prepare()?;
    shipped::build(&["benches"], "", By::Anew)?;
    let sections: Vec<Section> =
        listed()?.into_iter().map(|bench| section(bench, options)).collect::<anyhow::Result<_>>()?;
    let texts: Vec<String> = sections.iter().map(Section::text).collect();
    write(INTRO, &texts, &sections)
}

/// Runs one bench; the others keep in the document what they said before.
fn write_one(name: &str, options: &[String]) -> anyhow::Result<()> {
    let listed = listed()?;
    let Some(bench) = listed.iter().find(|(listed, _)| listed == name) else {
        bail!("no bench is called {name:?}: `cargo xtask bench` lists them");
    };
    if name == "ssd" {
        prepare()?;
    }
    let section = section(bench.clone(), options)?;
    let path = root().join("docs").join(DOCUMENT);
    let before = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let names: Vec<&str> = listed.iter().map(|(name, _)| &name[..]).collect();
    write(INTRO, &replaced(&before, &section, &names), &[section])
}

/// The sections of a document with one in its place among `names`, whether or not it was there before.
fn replaced(before: &str, section: &Section, names: &[&str]) -> Vec<String> {
    let kept = before.split("\n## ").skip(1).filter_map(|text| {
        let name = text.lines().next()?;
        // One that is no bench any more goes.
        (name != section.name && names.contains(&name))
            .then(|| (name, format!("\n## {}\n", text.trim_end_matches('\n'))))
    });
    let mut all: Vec<(&str, String)> = kept.chain([(&section.name[..], section.text())]).collect();
    all.sort_by_key(|(name, _)| names.iter().position(|listed| listed == name));
    all.into_iter().map(|(_, text)| text).collect()
}

/// All benches: name and what it compares.
fn listed() -> anyhow::Result<Vec<(String, String)>> {
    let pair = |line: &str| {
        let (name, about) = line.split_once('\t').context("the list of benches has a line without a tab")?;
        Ok((name.to_owned(), about.to_owned()))
    };
    output(&[])?.lines().map(pair).collect()
}

/// Runs a bench.
fn section((name, about): (String, String), options: &[String]) -> anyhow::Result<Section> {
    eprintln!("running {name}");
    let own = [name.clone(), "--json".to_owned()];
    let rows = rows(&output(&[&own[..], options].concat())?)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    Ok(Section { name, about, rows, measured: measured(&date(now.as_secs() / 86_400), &Machine::read()) })
}

/// Writes the document, and the picture if what it is drawn from was measured now.
fn write(intro: &str, texts: &[String], measured: &[Section]) -> anyhow::Result<()> {
    let write = |file: &str, text: &str| {
        let path = root().join("docs").join(file);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(DOCUMENT, &(intro.to_owned() + &texts.concat()))?;
    for section in measured.iter().filter(|section| section.name == DRAWN) {
        write(&picture_of(&section.name), &picture(section))?;
    }
    eprintln!("wrote docs/{DOCUMENT}");
    Ok(())
}

const DOCUMENT: &str = "BENCHMARKS.md";

/// The bench whose ratios are drawn too.
const DRAWN: &str = "overlap";

fn picture_of(name: &str) -> String {
    format!("benchmarks-{name}.svg")
}

fn picture(section: &Section) -> String {
    let dot = |row: &Row| Dot {
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
    let dots: Vec<Dot> = section.rows.iter().map(dot).collect();
    let title = "Load, compute and save side by side, over what they are measured against";
    plot::dots(title, "time over the peer's: median, least and greatest run; limits are marked", &dots)
}

/// What a peer such as `limit 1.1: …` says a ratio must not pass.
fn limit(peer: &str) -> Option<f64> {
    peer.strip_prefix("limit ")?.split_once(':')?.0.parse().ok()
}

/// One JSON line of a bench: exactly these keys.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Row {
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
    rows: Vec<Row>,
    /// When, and on what.
    measured: String,
}

impl Section {
    fn text(&self) -> String {
        let mut text =
            format!("\n## {}\n\n{}.\n\n{}\n\n", self.name, capitalised(&self.about), self.measured);
        if self.name == DRAWN {
            let _ = write!(text, "![The rows below]({})\n\n", picture_of(DRAWN));
        }
        text.push_str("| row | unit | ours | theirs | peer | ratio | better | runs |\n");
        text.push_str("| --- | --- | ---: | ---: | --- | ---: | --- | ---: |\n");
        self.rows.iter().for_each(|row| text.push_str(&line(row)));
        text
    }
}

fn rows(text: &str) -> anyhow::Result<Vec<Row>> {
    let row = |line: &str| serde_json::from_str(line).with_context(|| format!("not a bench row: {line}"));
    let rows: Vec<Row> = text.lines().map(row).collect::<anyhow::Result<_>>()?;
    if rows.is_empty() {
        bail!("a bench printed no row");
    }
    Ok(rows)
}

/// What the figures were measured on.
struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: f64,
    kernel: String,
}

impl Machine {
    fn read() -> Self {
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let memory_kib: f64 = field(&file("/proc/meminfo"), "MemTotal")
            .and_then(|value| value.trim_end_matches("kB").trim().parse().ok())
            .unwrap_or(0.0);
        Self {
            cpu: field(&file("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown CPU".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_kib / 1_048_576.0,
            // Behind the hyphen stands whose build it is, which says nothing of speed.
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
fn field(text: &str, name: &str) -> Option<String> {
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
# Benchmarks

Written by `cargo xtask bench --all`, or one section by `cargo xtask bench NAME --write`; do not edit. Both sides of a row run in the same process in alternating
order. *ours* and *theirs* are medians; the ratio (ours over theirs) is the median over runs, with the least
and the greatest run in brackets. On a shared machine only the ratios mean something. Where a section says so, all of it is built by a profile that some of these
benches gave before (`docs/adr/0071-the-program-that-is-shipped.md`).

Not here: the indexes and caches of others and etcd. `cargo xtask bench --peers` builds them, runs ours beside them and
judges each row by what it has to reach.
";

fn measured(date: &str, machine: &Machine) -> String {
    let Machine { cpu, cores, memory_gib, kernel } = machine;
    format!(
        "{date}, {cpu}, {cores} cores, {memory_gib:.1} GiB of memory, Linux {kernel}; built by a profile."
    )
}

fn line(row: &Row) -> String {
    let Row { row, unit, ours, peer, theirs, ratio, better, runs, min, max, .. } = row;
    let [ours, theirs, ratio, min, max] = [ours, theirs, ratio, min, max].map(|value| figure(*value));
    format!("| {row} | {unit} | {ours} | {theirs} | {peer} | {ratio} ({min}–{max}) | {better} | {runs} |\n")
}

/// Three significant digits or so, without an exponent.
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

    const LINE: &str = r#"{"bench":"index","row":"lookup","unit":"µs CPU","ours":4.5,"peer":"naive","theirs":9.0,"ratio":0.5,"better":"lower","runs":7,"min":0.4,"max":0.6}"#;

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
        assert_eq!(rows(LINE).map(|rows| rows.len()).map_err(|e| e.to_string()), Ok(1));
        for wrong in ["", "no json", &LINE.replace("\"runs\":7,", ""), &LINE.replace("{", "{\"extra\":1,")] {
            assert!(rows(wrong).is_err(), "{wrong}");
        }
    }

    fn section(name: &str) -> anyhow::Result<Section> {
        let machine = Machine { cpu: "CPU X".into(), cores: 2, memory_gib: 23.5, kernel: "6.1".into() };
        let measured = measured("2026-01-02", &machine);
        Ok(Section { name: name.into(), about: "one replica".into(), rows: rows(LINE)?, measured })
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
        assert!(names.contains(&"proxy") && names.contains(&OF_A_GPU), "{names:?}");
        let without: Vec<_> = names.iter().filter(|name| !is_bench(name)).collect();
        assert!(without.is_empty(), "{without:?}");
        assert!(!is_bench("no-such-bench"));
        Ok(())
    }

    #[test]
    fn one_section_is_put_in_its_place_and_the_others_stay_as_they_were() -> anyhow::Result<()> {
        let names = ["index", "hash", "get"];
        let of = |name: &str, say: &str| format!("\n## {name}\n\n{say}\n");
        let before = format!("{INTRO}{}{}", of("index", "An old one."), of("get", "Stays."));
        let put = |name: &str| anyhow::Ok(replaced(&before, &section(name)?, &names));
        let (index, hash) = (section("index")?.text(), section("hash")?.text());
        assert_eq!(put("index")?, [index, of("get", "Stays.")]);
        assert_eq!(put("hash")?, [of("index", "An old one."), hash, of("get", "Stays.")]);
        Ok(())
    }

    #[test]
    fn a_peer_that_is_a_limit_says_which() {
        assert_eq!(limit("limit 1.02: recomputing all"), Some(1.02));
        assert_eq!(["no buffer", "limit: a bare copy"].map(limit), [None, None]);
    }

    #[test]
    fn fields_of_proc_files_are_found() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n";
        assert_eq!(field(text, "model name").as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(field("MemTotal:       100 kB\n", "MemTotal").as_deref(), Some("100 kB"));
        assert_eq!(field(text, "name"), None);
    }
}
