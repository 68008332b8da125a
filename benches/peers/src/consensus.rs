//! The replicated part beside etcd: three members on loopback, data on disk, small puts.
//!
//! Ours takes announcements of 16 blocks from many stand-in nodes, and pins from one client (`ours.rs`). Not here:
//! one replica's index (`index.rs`).

mod etcd;
mod load;
mod ours;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{Better, median, outcome, sorted};
use serde::Serialize;

use crate::judge::{Label, Printer, Reach};
use etcd::Etcd;
use load::{Driven, drive};
use ours::Ours;
pub(crate) use ours::Programs;

/// Clients of the rate: enough that a member always has puts to batch, on connections of 16 each.
const CLIENTS: usize = 256;
/// What runs before the clock starts.
const WARM_UP: Duration = Duration::from_secs(1);

/// How the clusters are run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) rounds: usize,
    /// Time of one figure.
    pub(crate) span: Duration,
    /// Where members keep their data; on disk.
    pub(crate) data: PathBuf,
    /// Whether etcd may be installed when it is missing.
    pub(crate) install: bool,
    /// What runs our side; without them only etcd is measured.
    pub(crate) programs: Option<Programs>,
}

/// Three members that agree on each put before they answer.
pub(crate) trait Cluster {
    /// As rows call it, with its version.
    fn name(&self) -> &str;

    /// A client, one of those that put at the same time.
    fn client(&self, number: usize) -> impl Client;
}

/// Something that puts 256 bytes, one put at a time.
pub(crate) trait Client: Send + 'static {
    /// Puts under a key of its own and returns when a majority has it on disk.
    fn put(&mut self, number: u64) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// The rows of one cluster, round by round.
#[derive(Debug, Default)]
struct Rounds {
    name: String,
    many: Vec<Driven>,
    one: Vec<Driven>,
}

impl Rounds {
    async fn run(cluster: &impl Cluster, setup: &Setup) -> anyhow::Result<Self> {
        let mut rounds = Self { name: cluster.name().to_owned(), ..Self::default() };
        drive(cluster, CLIENTS, WARM_UP).await?;
        for _ in 0..setup.rounds {
            rounds.many.push(drive(cluster, CLIENTS, setup.span).await?);
            rounds.one.push(drive(cluster, 1, setup.span).await?);
        }
        Ok(rounds)
    }
}

/// A row of one side, while the other is missing. The keys of a full row that it can fill.
#[derive(Debug, Serialize)]
struct OneSided<'names> {
    bench: &'names str,
    row: &'names str,
    unit: &'names str,
    ours: Option<f64>,
    peer: &'names str,
    theirs: f64,
    better: Better,
    runs: usize,
    /// Least and greatest figure, not ratio.
    theirs_min: f64,
    theirs_max: f64,
}

pub(crate) fn run(setup: &Setup, printer: Printer) -> anyhow::Result<()> {
    ensure_on_disk(&setup.data)?;
    let etcd = etcd::program(setup.install)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let theirs = runtime.block_on(async {
        let cluster = Etcd::start(&etcd, &setup.data).await?;
        Rounds::run(&cluster, setup).await
    })?;
    let ours = setup.programs.as_ref().map(|programs| ours::rounds(programs, setup)).transpose()?;
    printer.head();
    match ours {
        Some(ours) => judge(&ours, &theirs, printer),
        None => show(&theirs, printer),
    }
}

/// Both sides, by what the rows have to reach.
fn judge(ours: &[Ours], theirs: &Rounds, printer: Printer) -> anyhow::Result<()> {
    let row = |row, (unit, better), peer, pairs: &dyn Fn(&Ours, &Driven, &Driven) -> [f64; 2], reach| {
        let rounds = ours.iter().zip(&theirs.many).zip(&theirs.one);
        let pairs: Vec<(f64, f64)> =
            rounds.map(|((ours, many), one)| pairs(ours, many, one).into()).collect();
        let label = Label { bench: "consensus", row, unit, peer, better };
        printer.row(&label.judged(outcome(&pairs), reach))
    };
    let etcd = theirs.name.as_str();
    let (rate, time) = (("1/s", Better::Higher), ("µs wall", Better::Lower));
    row(
        "announced blocks, events of 16; 256 clients put 256 bytes",
        rate,
        etcd,
        &|ours, many, _| [ours.blocks_per_second, many.per_s],
        Reach::RatioAtLeast(300.0),
    )?;
    row(
        "the same blocks, those stored alone, at least a million",
        rate,
        etcd,
        &|ours, many, _| [ours.stored_per_second, many.per_s],
        Reach::OursAtLeast(1e6),
    )?;
    row(
        "the same blocks; one index on one core, not replicated",
        rate,
        "kv-core",
        &|ours, _, _| [ours.blocks_per_second, ours.unreplicated_blocks_per_second],
        Reach::RatioAtLeast(0.2),
    )?;
    row(
        "announced to visible at half that rate, p99; put p99",
        time,
        etcd,
        &|ours, many, _| [ours.half_visible_p99_us, many.p99_us],
        Reach::OursAtMost(50_000.0),
    )?;
    row(
        "announced to visible at that rate, p99; put p99",
        time,
        etcd,
        &|ours, many, _| [ours.visible_p99_us, many.p99_us],
        Reach::Shown,
    )?;
    row(
        "one small proposal, 1 client, p50; put p50",
        time,
        etcd,
        &|ours, _, one| [ours.pin_p50_us, one.p50_us],
        Reach::RatioAtMost(0.2),
    )?;
    row(
        "one small proposal, 1 client, p99; put p99",
        time,
        etcd,
        &|ours, _, one| [ours.pin_p99_us, one.p99_us],
        Reach::Shown,
    )
}

/// etcd alone.
fn show(theirs: &Rounds, printer: Printer) -> anyhow::Result<()> {
    let row = |row, unit, better, figures: Vec<f64>| {
        print(Label { bench: "consensus", row, unit, peer: &theirs.name, better }, figures, printer)
    };
    let many = |figure: fn(&Driven) -> f64| theirs.many.iter().map(figure).collect();
    let one = |figure: fn(&Driven) -> f64| theirs.one.iter().map(figure).collect();
    row("puts of 256 bytes, 256 clients", "puts/s", Better::Higher, many(|one| one.per_s))?;
    row("one put of 256 bytes, 1 client, p50", "µs wall", Better::Lower, one(|one| one.p50_us))?;
    row("one put of 256 bytes, 1 client, p99", "µs wall", Better::Lower, one(|one| one.p99_us))
}

fn print(label: Label<'_>, figures: Vec<f64>, printer: Printer) -> anyhow::Result<()> {
    let figures = sorted(figures.into_iter());
    let [least, greatest] = [figures.first(), figures.last()].map(|end| end.copied().unwrap_or(f64::NAN));
    let theirs = median(&figures);
    let Label { bench, row, unit, peer, better } = label;
    printer.say(&format!("{row:<60} {unit:<15} {:>8} {theirs:>8.0}  {least:.0}-{greatest:.0} {peer}", "-"));
    printer.line(&OneSided {
        bench,
        row,
        unit,
        ours: None,
        peer,
        theirs,
        better,
        runs: figures.len(),
        theirs_min: least,
        theirs_max: greatest,
    })
}

/// Memory that looks like a disk makes every sync free.
fn ensure_on_disk(folder: &Path) -> anyhow::Result<()> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let explain = || format!("cannot look at {}", folder.display());
    let kind = rustix::fs::statfs(folder).with_context(explain)?.f_type;
    ensure!(
        kind as i64 != TMPFS_MAGIC,
        "{} is in memory: name a folder on a disk with --data",
        folder.display()
    );
    Ok(())
}
