//! Saving beside computing: a line of jobs whose new KV is saved to a node as its layers are computed
//! (`Client::save_layers`), against waiting for a save of whole frames at each job's end; and how long behind a job's last
//! layer its blocks are there. Layers are shared where they lie, as those are that a card copied to the host's memory, or copied by the
//! job's own thread.
//!
//! The node, the client and the path between them are those of production, in one process. Compute sleeps, as an accelerator's work
//! is not this processor's, or keeps one processor busy, so that a save has only what is left. Not here: slower networks, and nodes
//! that are full.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{Better, Row, side_by_side};
use bytes::Bytes;
use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet_client::{
    Asker, BackgroundSave, Client, ClientConfig, LayerSaveCall, SAVE_DEADLINE, SaveAnswer, SaveCall,
};
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::{Frame, KeyForm, encoded_len, seal};
use kvfleet_proto::tls::TlsFiles;
use kvfleet_transport::Dialer;
use kvfleet_transport::shm::{ShmConfig, ShmDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use tokio::runtime::{Builder, Runtime};

use super::{Engine, LAYERS, milliseconds, row};
use crate::Effort;
use crate::get::certificates;

/// Jobs in a line.
const JOBS: u64 = 4;
/// Blocks of a job, and bytes of a slice.
const BLOCKS: usize = 32;
const SLICE_BYTES: u32 = 16 << 10;
/// DRAM of the node: more than all jobs of a run.
const DRAM_BYTES: u64 = 1 << 30;
/// Saves by which it is known how long one takes.
const PROBES: usize = 7;

/// What a job does with a layer of its slices.
#[derive(Clone, Copy)]
enum Puts {
    Shared,
    Copied,
}

/// Where a layer is computed.
#[derive(Clone, Copy)]
enum Work {
    Accelerator,
    Processor(Engine),
}

impl Work {
    fn compute(self, layer: Duration) {
        match self {
            Work::Accelerator => std::thread::sleep(layer),
            Work::Processor(engine) => engine.compute(layer.as_nanos() as u64),
        }
    }
}

/// How a job computes and saves.
#[derive(Clone, Copy)]
struct Job {
    layer: Duration,
    puts: Puts,
    work: Work,
}

/// A node, and a client that reaches it one way.
struct Saver {
    runtime: Runtime,
    client: Client,
    address: String,
    identity: IdentityDigest,
    payload: Bytes,
    /// Jobs so far: each has other blocks, and a lease of its own.
    jobs: Cell<u64>,
    node: Option<Node>,
    _dir: tempfile::TempDir,
}

impl Saver {
    fn start(way: &str) -> anyhow::Result<Saver> {
        let dir = tempfile::tempdir()?;
        let sockets = dir.path().join("sockets");
        let mut config = NodeConfig {
            dram_bytes: DRAM_BYTES,
            block_bytes: u64::from(SLICE_BYTES * LAYERS),
            data_dir: dir.path().join("data"),
            policy: "lru".to_owned(),
            shm: ShmSection { dir: Some(sockets.clone()), ..ShmSection::default() },
            tls: certificates(dir.path())?,
            ..NodeConfig::default()
        };
        config.identity.layers = LAYERS;
        let identity = config.identity.manifest().digest();
        let files = config.tls.clone();
        let tls = TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?;
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let node = runtime.block_on(Node::start(config, &prometheus::Registry::new()))?;
        let dialer: Arc<dyn Dialer> = match way {
            "shared memory" => Arc::new(ShmDialer::new(ShmConfig::new(sockets))),
            _ => Arc::new(TcpDialer::new(&tls, TcpConfig::default())),
        };
        let (routers, address) = (vec!["127.0.0.1:1".to_owned()], node.data_addr().to_string());
        let client = {
            let _inside = runtime.enter();
            Client::with_dialer(ClientConfig::new(routers, tls), dialer)?
        };
        let payload: Vec<u8> = (0..SLICE_BYTES * LAYERS).map(|at| (at.wrapping_mul(31) >> 5) as u8).collect();
        let (payload, jobs) = (Bytes::from(payload), Cell::new(0));
        Ok(Saver { runtime, client, address, identity, payload, jobs, node: Some(node), _dir: dir })
    }

    /// The blocks of the next job, and who saves them.
    fn next(&self) -> (Asker, Vec<BlockHash>) {
        let job = self.jobs.replace(self.jobs.get() + 1) + 1;
        let hash = |block: usize| {
            let low = ((job << 16) | block as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            BlockHash((u128::from(low) << 64 | u128::from(job)).to_be_bytes())
        };
        let asker = Asker {
            lease: LeaseId(job),
            request: RequestId(job),
            tenant: TenantId(0),
            category: Category::default(),
            identity: self.identity,
            traceparent: String::new(),
            class: None,
        };
        (asker, (0..BLOCKS).map(hash).collect())
    }

    /// A save of whole frames, which are made when they are wanted.
    fn whole(&self, (asker, hashes): (Asker, Vec<BlockHash>)) -> SaveCall {
        let (payload, identity, of) = (self.payload.clone(), self.identity, hashes.clone());
        SaveCall {
            asker,
            address: self.address.clone(),
            epoch: Epoch::default(),
            parent: None,
            first_offset_blocks: 0,
            hashes,
            frame_bytes: encoded_len(&[SLICE_BYTES; LAYERS as usize]) as u64,
            frame: Arc::new(move |position| frame(identity, of[position], &payload)),
            deadline: SAVE_DEADLINE,
        }
    }

    /// Waits for a save of whole frames.
    fn save(&self) -> anyhow::Result<()> {
        let call = self.whole(self.next());
        let answer = self.runtime.block_on(async {
            let answer = self.client.save(&call).await;
            self.client.release(&[call.lease()]).await;
            answer
        })?;
        ensure!(
            matches!(&answer, SaveAnswer::Done(done) if done.stored_blocks as usize == BLOCKS),
            "the node answers {answer:?}"
        );
        Ok(())
    }

    /// One job, whose layers are saved while others are computed.
    fn job(&self, job: Job) -> anyhow::Result<Vec<BlockHash>> {
        let _inside = self.runtime.enter();
        let (asker, hashes) = self.next();
        let mut save = self.client.save_layers(LayerSaveCall {
            asker,
            address: self.address.clone(),
            epoch: Epoch::default(),
            parent: None,
            first_offset_blocks: 0,
            hashes: hashes.clone(),
            key_form: KeyForm::Rotated,
            slice_bytes: vec![SLICE_BYTES; LAYERS as usize],
            then_release: Vec::new(),
            deadline: SAVE_DEADLINE,
        })?;
        for first in (0..self.payload.len()).step_by(SLICE_BYTES as usize) {
            let slice = self.payload.slice(first..first + SLICE_BYTES as usize);
            job.work.compute(job.layer);
            match job.puts {
                Puts::Shared => save.put_shared(vec![slice; BLOCKS])?,
                Puts::Copied => save.put(&[&slice[..]; BLOCKS])?,
            }
        }
        save.finish()?;
        Ok(hashes)
    }

    /// Until nothing of a save is under way.
    fn saved(&self) {
        self.runtime.block_on(self.client.saves_ended());
    }

    /// These blocks are there: what was measured is that they were saved.
    fn check(&self, hashes: Vec<BlockHash>) -> anyhow::Result<()> {
        let (asker, _) = self.next();
        let call = self.whole((asker, hashes));
        let answer = self.runtime.block_on(self.client.save(&call))?;
        self.runtime.block_on(self.client.release(&[call.lease()]));
        ensure!(
            matches!(&answer, SaveAnswer::Done(done) if done.present_blocks as usize == BLOCKS),
            "blocks were not saved: {answer:?}"
        );
        Ok(())
    }

    /// How long it takes to wait for a save.
    fn probe(&self) -> anyhow::Result<Duration> {
        let mut took = Vec::new();
        for _ in 0..PROBES {
            let begun = Instant::now();
            self.save()?;
            took.push(begun.elapsed());
        }
        took.sort_unstable();
        Ok(took[PROBES / 2])
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(node) = self.node.take() {
            self.runtime.block_on(node.shutdown());
        }
    }
}

fn frame(identity: IdentityDigest, hash: BlockHash, payload: &[u8]) -> Frame {
    seal(identity, hash, KeyForm::Rotated, &[SLICE_BYTES; LAYERS as usize], payload)
        .expect("the bench's sizes are within the limits")
}

/// Rows over real paths: jobs of whose time, when they wait for it, saving takes `share` percent.
pub(super) fn rows(effort: &Effort, engine: Engine, share: u32) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for way in ["TLS over TCP", "shared memory"] {
        let name = format!("save of {share} % of the time over {way}, by layers beside compute");
        let busy = format!("save of {share} % of the time over {way}, by layers beside a busy processor");
        let copied = format!("save of {share} % of the time over {way}, by copied layers beside compute");
        let behind = format!("save of {share} % of the time over {way}, from the last layer to its blocks");
        if ![&name, &busy, &copied, &behind].into_iter().any(|name| effort.wants(name)) {
            continue;
        }
        let saver = Saver::start(way)?;
        let layer = saver.probe()? * (100 - share) / share / LAYERS;
        let job = Job { layer, puts: Puts::Shared, work: Work::Accelerator };
        let all_copied = Job { puts: Puts::Copied, ..job };
        for job in [job, all_copied] {
            saver.check(saver.job(job).inspect(|_| saver.saved())?)?;
        }
        rows.extend(beside(effort, &saver, &name, job)?);
        rows.extend(beside(effort, &saver, &busy, Job { work: Work::Processor(engine), ..job })?);
        rows.extend(beside(effort, &saver, &copied, all_copied)?);
        rows.extend(after(effort, &saver, &behind, job)?);
    }
    Ok(rows)
}

/// A line of jobs, to the last byte: nothing is gained by not saving.
fn beside(effort: &Effort, saver: &Saver, name: &str, job: Job) -> anyhow::Result<Option<Row>> {
    if !effort.wants(name) {
        return Ok(None);
    }
    let (jobs, failed) = (effort.scaled(JOBS), Cell::new(None));
    let timed = |run: &dyn Fn() -> anyhow::Result<()>| {
        let begun = Instant::now();
        for _ in 0..jobs {
            run().unwrap_or_else(|error| failed.set(Some(error)));
        }
        saver.saved();
        milliseconds(begun.elapsed())
    };
    let ours = || timed(&|| saver.job(job).map(drop));
    let theirs = || {
        timed(&|| {
            (0..LAYERS).for_each(|_| job.work.compute(job.layer));
            saver.save()
        })
    };
    let outcome = side_by_side(effort.runs, ours, theirs);
    failed.take().map_or(Ok(()), Err)?;
    Ok(Some(row(name, "ms", "limit 0.9: waiting for it at each end", outcome)))
}

/// From the last layer of a job until its blocks are there, against frames that leave behind it.
fn after(effort: &Effort, saver: &Saver, name: &str, job: Job) -> anyhow::Result<Option<Row>> {
    if !effort.wants(name) {
        return Ok(None);
    }
    let failed = Cell::new(None);
    let timed = |run: &dyn Fn() -> anyhow::Result<()>| {
        run().unwrap_or_else(|error| failed.set(Some(error)));
        let begun = Instant::now();
        saver.saved();
        milliseconds(begun.elapsed())
    };
    let ours = || timed(&|| saver.job(job).map(drop));
    let theirs = || {
        timed(&|| {
            (0..LAYERS).for_each(|_| job.work.compute(job.layer));
            let _inside = saver.runtime.enter();
            let save = BackgroundSave { call: saver.whole(saver.next()), then_release: Vec::new() };
            Ok(saver.client.save_in_background(save)?)
        })
    };
    let outcome = side_by_side(effort.runs, ours, theirs);
    failed.take().map_or(Ok(()), Err)?;
    Ok(Some(Row::new("overlap", name, "ms", "whole frames at the end", Better::Lower, outcome)))
}
