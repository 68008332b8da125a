//! A node and a client on one host: blocks read in place, copied out, and saved.
//!
//! Not here: other systems' stores (`benches/peers`), and networks (`network.rs`).

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{BenchRow, Better, outcome, sorted};
use kv_core::id::{Epoch, LeaseId};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::shm::{ShmConfig, ShmDialer};
use kvfleet_transport::{Dialer, FetchAnswer, FetchRequest, Path, Progress, SaveAnswer, SaveRequest};
use tokio::runtime::{Builder, Runtime};

use crate::Effort;
use crate::node_process::{NodeProcess, SIZES, SizeClass, asker, identity, socket_dir};

pub(crate) const ABOUT: &str = "one client on a node's host, the node in a separate process: a block is \
    fetched and located in the node's memory (no copy, no check), the same block copied out with every \
    slice's CRC32C checked, by clients that map that memory and by clients that get copies in a tray \
    instead, and a block saved; operations in sequence, and after pauses that let both ends fall asleep";

/// Limit of a fetch in place, in microseconds.
const GET_MAX_US: f64 = 10.0;

/// A pause after which neither end spins any more.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let serving = NodeProcess::start(dir.path())?;
    let client = HostClient::dial(dir.path(), &serving, true)?;
    let mut rows = Vec::new();
    for size in SIZES {
        rows.extend(client.in_place(effort, size)?);
        for copies in CopyMode::of(size) {
            rows.extend(client.copied(effort, size, copies)?);
        }
    }
    let guest = HostClient::dial(dir.path(), &serving, false)?;
    for size in SIZES {
        for copies in CopyMode::of(size).into_iter().filter(|copies| !copies.reuses_target) {
            rows.extend(guest.copied(effort, size, copies)?);
        }
    }
    drop(guest);
    // Saved blocks replace those read above.
    for size in SIZES {
        rows.extend(client.saved(effort, size)?);
    }
    drop(client);
    serving.stop()?;
    Ok(rows)
}

/// How blocks are copied out.
#[derive(Clone, Copy)]
struct CopyMode {
    /// Blocks per fetch.
    blocks_per_fetch: u32,
    /// Whether each block overwrites the previous one in a cached buffer. Otherwise each has a
    /// separate place, as in an engine.
    reuses_target: bool,
}

impl CopyMode {
    fn of(size: SizeClass) -> Vec<CopyMode> {
        let alone = CopyMode { blocks_per_fetch: 1, reuses_target: false };
        let mut all = vec![alone, CopyMode { reuses_target: true, ..alone }];
        // A prefix: many blocks in one fetch.
        let together = (4 << 20) / size.payload_bytes;
        if together > 1 {
            all.insert(1, CopyMode { blocks_per_fetch: together, ..alone });
        }
        all
    }

    fn name(self, size: SizeClass) -> String {
        let times =
            if self.blocks_per_fetch > 1 { format!("{} x ", self.blocks_per_fetch) } else { String::new() };
        let place = if self.reuses_target { ", to one place" } else { "" };
        format!("GET {times}{} copied out, checked{place}", size.name())
    }
}

struct HostClient {
    runtime: Runtime,
    path: Arc<dyn Path>,
    /// Whether the client maps the node's memory; otherwise it gets copies in a tray.
    maps: bool,
}

impl HostClient {
    fn dial(dir: &std::path::Path, serving: &NodeProcess, maps: bool) -> anyhow::Result<HostClient> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let dialer = ShmDialer::new(ShmConfig { maps_arena: maps, ..ShmConfig::new(socket_dir(dir)) });
        let path = runtime.block_on(dialer.dial(serving.address.clone()))?;
        Ok(HostClient { runtime, path, maps })
    }

    /// Blocks from number `first` on, as they lie in the node's memory.
    async fn get(&self, size: SizeClass, first: u32, count: u32) -> anyhow::Result<Vec<Frame>> {
        let hashes = (first..first + count).map(|number| size.hash(number)).collect();
        let (deadline, epoch) = (Duration::from_secs(5), Epoch::default());
        let (asker, progress) = (asker(1), Progress::default());
        let request =
            FetchRequest { context: asker, epoch, first_offset_blocks: 0, hashes, deadline, progress };
        let mut came = Vec::with_capacity(count as usize);
        let answer = self.path.fetch(request, &mut |frame| came.push(frame)).await?;
        ensure!(matches!(answer, FetchAnswer::Hit { .. }), "the node answers {answer:?}");
        ensure!(came.len() == count as usize, "a block is missing");
        Ok(came)
    }

    /// Microseconds of each of `count` operations, in ascending order.
    fn sorted_times_us<T>(
        &self,
        count: u32,
        pause: Duration,
        mut operation: impl AsyncFnMut(u32) -> anyhow::Result<T>,
    ) -> anyhow::Result<Vec<f64>> {
        self.runtime.block_on(async {
            let mut took = Vec::with_capacity(count as usize);
            for number in 0..count {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                let since = Instant::now();
                let outcome = operation(number).await?;
                took.push(since.elapsed().as_secs_f64() * 1e6);
                // The release of a block is not timed.
                drop(outcome);
            }
            self.path.release(LeaseId(1)).await?;
            Ok(sorted(took.into_iter()))
        })
    }

    fn in_place(&self, effort: &Effort, size: SizeClass) -> anyhow::Result<Vec<BenchRow>> {
        let mut rows = Vec::new();
        let kinds = [("", Duration::ZERO, 20_000), (" after a pause", PAUSE, 500)];
        for (kind, pause, count) in kinds {
            let name = format!("GET {} in place{kind}", size.name());
            if !effort.is_selected(&name) {
                continue;
            }
            let (mut half, mut tail) = (Vec::new(), Vec::new());
            for run in 0..=effort.runs {
                let count = effort.scaled(count) as u32;
                let took = self.sorted_times_us(count, pause, async |number| {
                    let frames = self.get(size, number % size.blocks, 1).await?;
                    black_box(frames[0].bytes.as_ptr());
                    Ok(frames)
                })?;
                if run > 0 {
                    half.push((percentile(&took, 50), GET_MAX_US));
                    tail.push((percentile(&took, 99), GET_MAX_US));
                }
            }
            let peer = if pause.is_zero() { "limit: 10 µs" } else { "10 µs, for comparison" };
            let row = |what: &str, peer, pairs: &[(f64, f64)]| {
                BenchRow::new("host", &format!("{name}, {what}"), "µs", peer, Better::Lower, outcome(pairs))
            };
            rows.push(row("p50", peer, &half));
            rows.push(row("p99", "10 µs, for comparison", &tail));
        }
        Ok(rows)
    }

    /// Blocks copied out of the node's memory, beside bare copies of as many bytes.
    fn copied(&self, effort: &Effort, size: SizeClass, copies: CopyMode) -> anyhow::Result<Vec<BenchRow>> {
        let name =
            format!("{}{}", copies.name(size), if self.maps { "" } else { ", by a client that cannot map" });
        if !effort.is_selected(&name) {
            return Ok(Vec::new());
        }
        let len = size.frame(0)?.bytes.len();
        let places = if copies.reuses_target { 1 } else { size.blocks as usize };
        let (mut to, from) = (vec![1u8; len * places], vec![2u8; len * size.blocks as usize]);
        let (fetches, mut pairs, mut half) = (size.blocks / copies.blocks_per_fetch, Vec::new(), Vec::new());
        for run in 0..=effort.runs {
            let bytes = len as u64 * u64::from(copies.blocks_per_fetch);
            let count = (effort.scaled(2 << 30) / bytes).max(10) as u32;
            let ours = self.sorted_times_us(count, Duration::ZERO, async |number| {
                let first = number % fetches * copies.blocks_per_fetch;
                for (frame, number) in
                    self.get(size, first, copies.blocks_per_fetch).await?.into_iter().zip(first..)
                {
                    let place = number as usize % places * len;
                    frame.verify_into(identity(), size.hash(number), &mut to[place..place + len])?;
                }
                black_box(&mut to);
                Ok(())
            })?;
            let bare = self.sorted_times_us(count, Duration::ZERO, async |number| {
                let first = number % fetches * copies.blocks_per_fetch;
                for number in (first..first + copies.blocks_per_fetch).map(|number| number as usize) {
                    let (place, at) = (number % places * len, number * len);
                    to[place..place + len].copy_from_slice(black_box(&from[at..at + len]));
                }
                black_box(&mut to);
                Ok(())
            })?;
            if run > 0 {
                let rate = |took: &[f64]| bytes as f64 * took.len() as f64 / took.iter().sum::<f64>() / 1e3;
                pairs.push((rate(&ours), rate(&bare)));
                half.push((percentile(&ours, 50), percentile(&bare, 50)));
            }
        }
        let is_judged = self.maps && !copies.reuses_target;
        let peer = if is_judged { "limit 0.85: a bare copy" } else { "a bare copy, for comparison" };
        let mut rows = vec![BenchRow::new("host", &name, "GB/s", peer, Better::Higher, outcome(&pairs))];
        if copies.blocks_per_fetch == 1 && !copies.reuses_target {
            let (name, peer) = (format!("{name}, p50"), "a bare copy, for comparison");
            rows.push(BenchRow::new("host", &name, "µs", peer, Better::Lower, outcome(&half)));
        }
        Ok(rows)
    }

    fn saved(&self, effort: &Effort, size: SizeClass) -> anyhow::Result<Option<BenchRow>> {
        let name = format!("PUT {}", size.name());
        if !effort.is_selected(&name) {
            return Ok(None);
        }
        let count = (effort.scaled(512 << 20) / u64::from(size.payload_bytes)).max(10) as u32;
        let frames = (0..64).map(|number| size.frame(number)).collect::<anyhow::Result<Vec<Frame>>>()?;
        let mut to = vec![1u8; frames[0].bytes.len()];
        let mut pairs = Vec::new();
        for run in 0..=effort.runs {
            let first = 1_000_000 * (run as u32 + 1);
            // Sealed under the block's hash before the clock starts.
            let sealed = (0..count.min(256)).map(|number| size.frame(first + number));
            let sealed = sealed.collect::<anyhow::Result<Vec<Frame>>>()?;
            let took = self.sorted_times_us(sealed.len() as u32, Duration::ZERO, async |number| {
                self.put(size, first + number, &sealed[number as usize]).await
            })?;
            let bare = self.sorted_times_us(sealed.len() as u32, Duration::ZERO, async |number| {
                to.copy_from_slice(black_box(&sealed[number as usize].bytes));
                black_box(&mut to);
                Ok(())
            })?;
            if run > 0 {
                let rate =
                    |took: &[f64]| to.len() as f64 * took.len() as f64 / took.iter().sum::<f64>() / 1e3;
                pairs.push((rate(&took), rate(&bare)));
            }
        }
        let peer = "a bare copy, for comparison";
        Ok(Some(BenchRow::new("host", &name, "GB/s", peer, Better::Higher, outcome(&pairs))))
    }

    async fn put(&self, size: SizeClass, number: u32, frame: &Frame) -> anyhow::Result<()> {
        let (asker, hashes) = (asker(1), vec![size.hash(number)]);
        let frame_bytes = frame.bytes.len() as u64;
        let request =
            SaveRequest { context: asker, parent: None, first_offset_blocks: 0, hashes, frame_bytes };
        let answer = self.path.save(request, &|_| frame.clone()).await?;
        ensure!(
            matches!(answer, SaveAnswer::Done(ref done) if done.stored_blocks == 1),
            "the node answers {answer:?}"
        );
        Ok(())
    }
}

/// A percentile of ascending figures.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get(sorted.len() * percent / 100).copied().unwrap_or(f64::NAN)
}
