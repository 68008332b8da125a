//! The replicated index beside etcd: three members on loopback, data on disk, small puts.
//!
//! kvfleet handles announcements of 16 blocks from many simulated nodes, and pins from one client
//! (`routers.rs`). Not here: the index of one replica (`index.rs`).

mod etcd;
mod load;
mod routers;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{Better, median, outcome, sorted};
use serde::Serialize;

use crate::judge::{Printer, RowLabel, Target};
use etcd::Etcd;
use load::{PutStats, run_puts};
pub(crate) use routers::Programs;
use routers::RouterFigures;

/// Clients for the throughput rows: enough that a member always has puts to batch, 16 per
/// connection.
const CLIENTS: usize = 256;
/// Warm-up time before measuring.
const WARM_UP: Duration = Duration::from_secs(1);

/// Parameters of the clusters.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) rounds: usize,
    /// Duration of one measurement.
    pub(crate) span: Duration,
    /// Directory for the members' data; on disk.
    pub(crate) data: PathBuf,
    /// Whether a missing etcd may be installed.
    pub(crate) install: bool,
    /// Programs of the kvfleet side; without them only etcd is measured.
    pub(crate) programs: Option<Programs>,
}

/// Three members that replicate each put before they answer.
pub(crate) trait Cluster {
    /// Name and version, for the rows.
    fn name(&self) -> &str;

    /// One of several concurrent clients.
    fn client(&self, number: usize) -> impl Client;
}

/// A client that puts 256 bytes, one put at a time.
pub(crate) trait Client: Send + 'static {
    /// Puts under a distinct key and returns when a majority has the value on disk.
    fn put(&mut self, number: u64) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// Measurements of one cluster, one entry per round.
#[derive(Debug, Default)]
struct EtcdRounds {
    name: String,
    many_clients: Vec<PutStats>,
    one_client: Vec<PutStats>,
}

impl EtcdRounds {
    async fn run(cluster: &impl Cluster, setup: &Setup) -> anyhow::Result<Self> {
        let mut rounds = Self { name: cluster.name().to_owned(), ..Self::default() };
        run_puts(cluster, CLIENTS, WARM_UP).await?;
        for _ in 0..setup.rounds {
            rounds.many_clients.push(run_puts(cluster, CLIENTS, setup.span).await?);
            rounds.one_client.push(run_puts(cluster, 1, setup.span).await?);
        }
        Ok(rounds)
    }
}

/// A row with one side only: the keys of a full row that one side can fill.
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
    /// Minimum and maximum of the figure, not of the ratio.
    theirs_min: f64,
    theirs_max: f64,
}

pub(crate) fn run(setup: &Setup, printer: Printer) -> anyhow::Result<()> {
    ensure_on_disk(&setup.data)?;
    let etcd = etcd::program(setup.install)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let theirs = runtime.block_on(async {
        let cluster = Etcd::start(&etcd, &setup.data).await?;
        EtcdRounds::run(&cluster, setup).await
    })?;
    let ours = setup.programs.as_ref().map(|programs| routers::rounds(programs, setup)).transpose()?;
    printer.header();
    match ours {
        Some(ours) => judge(&ours, &theirs, printer),
        None => print_etcd(&theirs, printer),
    }
}

/// Prints both sides with their targets.
fn judge(ours: &[RouterFigures], theirs: &EtcdRounds, printer: Printer) -> anyhow::Result<()> {
    let row = |row,
               (unit, better),
               peer,
               pairs: &dyn Fn(&RouterFigures, &PutStats, &PutStats) -> [f64; 2],
               reach| {
        let rounds = ours.iter().zip(&theirs.many_clients).zip(&theirs.one_client);
        let pairs: Vec<(f64, f64)> =
            rounds.map(|((ours, many), one)| pairs(ours, many, one).into()).collect();
        let label = RowLabel { bench: "consensus", row, unit, peer, better };
        printer.row(&label.judge(outcome(&pairs), reach))
    };
    let etcd = theirs.name.as_str();
    let (rate, time) = (("1/s", Better::Higher), ("µs wall", Better::Lower));
    row(
        "announced blocks, events of 16; 256 clients put 256 bytes",
        rate,
        etcd,
        &|ours, many, _| [ours.blocks_per_second, many.per_s],
        Target::RatioAtLeast(300.0),
    )?;
    row(
        "the same blocks, those stored alone, at least a million",
        rate,
        etcd,
        &|ours, many, _| [ours.stored_per_second, many.per_s],
        Target::OursAtLeast(1e6),
    )?;
    row(
        "the same blocks; one index on one core, not replicated",
        rate,
        "kv-core",
        &|ours, _, _| [ours.blocks_per_second, ours.unreplicated_blocks_per_second],
        Target::RatioAtLeast(0.2),
    )?;
    row(
        "announced to visible at half that rate, p99; put p99",
        time,
        etcd,
        &|ours, many, _| [ours.half_visible_p99_us, many.p99_us],
        Target::OursAtMost(50_000.0),
    )?;
    row(
        "announced to visible at that rate, p99; put p99",
        time,
        etcd,
        &|ours, many, _| [ours.visible_p99_us, many.p99_us],
        Target::Unjudged,
    )?;
    row(
        "one small proposal, 1 client, p50; put p50",
        time,
        etcd,
        &|ours, _, one| [ours.pin_p50_us, one.p50_us],
        Target::RatioAtMost(0.2),
    )?;
    row(
        "one small proposal, 1 client, p99; put p99",
        time,
        etcd,
        &|ours, _, one| [ours.pin_p99_us, one.p99_us],
        Target::Unjudged,
    )
}

/// Prints etcd alone.
fn print_etcd(theirs: &EtcdRounds, printer: Printer) -> anyhow::Result<()> {
    let row = |row, unit, better, figures: Vec<f64>| {
        print(RowLabel { bench: "consensus", row, unit, peer: &theirs.name, better }, figures, printer)
    };
    let many = |figure: fn(&PutStats) -> f64| theirs.many_clients.iter().map(figure).collect();
    let one = |figure: fn(&PutStats) -> f64| theirs.one_client.iter().map(figure).collect();
    row("puts of 256 bytes, 256 clients", "puts/s", Better::Higher, many(|one| one.per_s))?;
    row("one put of 256 bytes, 1 client, p50", "µs wall", Better::Lower, one(|one| one.p50_us))?;
    row("one put of 256 bytes, 1 client, p99", "µs wall", Better::Lower, one(|one| one.p99_us))
}

fn print(label: RowLabel<'_>, figures: Vec<f64>, printer: Printer) -> anyhow::Result<()> {
    let figures = sorted(figures.into_iter());
    let [least, greatest] = [figures.first(), figures.last()].map(|end| end.copied().unwrap_or(f64::NAN));
    let theirs = median(&figures);
    let RowLabel { bench, row, unit, peer, better } = label;
    printer.text(&format!("{row:<60} {unit:<15} {:>8} {theirs:>8.0}  {least:.0}-{greatest:.0} {peer}", "-"));
    printer.json_line(&OneSided {
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

/// Refuses a data directory in memory, because every sync would be free there.
fn ensure_on_disk(folder: &Path) -> anyhow::Result<()> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let explain = || format!("cannot inspect {}", folder.display());
    let kind = rustix::fs::statfs(folder).with_context(explain)?.f_type;
    ensure!(
        kind as i64 != TMPFS_MAGIC,
        "{} is in memory: pass a directory on disk with --data",
        folder.display()
    );
    Ok(())
}
