//! Saves beside compute: a sequence of jobs saves its new KV to a node layer by layer
//! (`Client::save_layers`), against waiting for a save of whole frames after each job. Further rows
//! measure the time from a job's last layer until its blocks are stored. Layers are shared in
//! place, like KV that a GPU copied to host memory, or copied by the job's thread.
//!
//! The node, the client and their path are the production ones, in one process. Compute sleeps, as
//! accelerator work does not use this processor, or it keeps one processor busy. Not here: slower
//! networks, and full nodes.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use benches::{BenchRow, Better, side_by_side};
use bytes::Bytes;
use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet_client::{
    BackgroundSave, Client, ClientConfig, LayerSaveCall, RequestContext, SAVE_DEADLINE, SaveAnswer, SaveCall,
};
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::{Frame, KeyForm, encoded_len, seal};
use kvfleet_transport::Dialer;
use kvfleet_transport::shm::{ShmConfig, ShmDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use tokio::runtime::{Builder, Runtime};

use super::{EmulatedEngine, LAYERS, milliseconds, row};
use crate::Effort;
use crate::get::certificates;

/// Jobs in a sequence.
const JOBS: u64 = 4;
/// Blocks per job, and bytes per slice.
const BLOCKS: usize = 32;
const SLICE_BYTES: u32 = 16 << 10;
/// DRAM of the node: more than all jobs of a run.
const DRAM_BYTES: u64 = 1 << 30;
/// Saves that are timed to estimate one save.
const PROBES: usize = 7;

/// How a job hands over a layer of its slices.
#[derive(Clone, Copy)]
enum LayerPut {
    Shared,
    Copied,
}

/// Device that computes a layer.
#[derive(Clone, Copy)]
enum ComputeDevice {
    Accelerator,
    Processor(EmulatedEngine),
}

impl ComputeDevice {
    fn compute(self, layer: Duration) {
        match self {
            ComputeDevice::Accelerator => std::thread::sleep(layer),
            ComputeDevice::Processor(engine) => engine.compute(layer.as_nanos() as u64),
        }
    }
}

/// How a job computes and saves.
#[derive(Clone, Copy)]
struct SaveJob {
    layer: Duration,
    layer_put: LayerPut,
    device: ComputeDevice,
}

/// A node, and a client with one transport to it.
struct Saver {
    runtime: Runtime,
    client: Client,
    address: String,
    identity: IdentityDigest,
    payload: Bytes,
    /// Jobs so far: each has different blocks and its own lease.
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
            tls: certificates(dir.path(), &Role::Node(None))?,
            ..NodeConfig::default()
        };
        config.identity.layers = LAYERS;
        let identity = config.identity.manifest().digest();
        let files = certificates(dir.path(), &Role::Instance(None))?;
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

    /// The blocks of the next job, and its request parameters.
    fn next_blocks(&self) -> (RequestContext, Vec<BlockHash>) {
        let job = self.jobs.replace(self.jobs.get() + 1) + 1;
        let hash = |block: usize| {
            let low = ((job << 16) | block as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            BlockHash::from_words(job, low)
        };
        let asker = RequestContext {
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

    /// A save of whole frames, which are built on demand.
    fn frame_save_call(&self, asker: RequestContext, hashes: Vec<BlockHash>) -> SaveCall {
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
    fn save_frames(&self) -> anyhow::Result<()> {
        let (asker, hashes) = self.next_blocks();
        let call = self.frame_save_call(asker, hashes);
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

    /// Runs one job and saves its layers while others are computed.
    fn run_job(&self, job: SaveJob) -> anyhow::Result<Vec<BlockHash>> {
        let _inside = self.runtime.enter();
        let (asker, hashes) = self.next_blocks();
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
            job.device.compute(job.layer);
            match job.layer_put {
                LayerPut::Shared => save.put_shared(vec![slice; BLOCKS])?,
                LayerPut::Copied => save.put(&[&slice[..]; BLOCKS])?,
            }
        }
        save.finish()?;
        Ok(hashes)
    }

    /// Waits until no save is in progress.
    fn wait_until_saved(&self) {
        self.runtime.block_on(self.client.wait_for_saves());
    }

    /// Asserts that the node has these blocks, so that the measurement covered a real save.
    fn assert_saved(&self, hashes: Vec<BlockHash>) -> anyhow::Result<()> {
        let (asker, _) = self.next_blocks();
        let call = self.frame_save_call(asker, hashes);
        let answer = self.runtime.block_on(self.client.save(&call))?;
        self.runtime.block_on(self.client.release(&[call.lease()]));
        ensure!(
            matches!(&answer, SaveAnswer::Done(done) if done.present_blocks as usize == BLOCKS),
            "blocks were not saved: {answer:?}"
        );
        Ok(())
    }

    /// Median time to wait for a save.
    fn median_save_time(&self) -> anyhow::Result<Duration> {
        let mut took = Vec::new();
        for _ in 0..PROBES {
            let begun = Instant::now();
            self.save_frames()?;
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
        .expect("the bench's sizes are valid")
}

/// Rows over real paths: saving takes `share` percent of the time if jobs wait for it.
pub(super) fn rows(effort: &Effort, engine: EmulatedEngine, share: u32) -> anyhow::Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for way in ["TLS over TCP", "shared memory"] {
        let name = format!("save of {share} % of the time over {way}, by layers beside compute");
        let busy = format!("save of {share} % of the time over {way}, by layers beside a busy processor");
        let copied = format!("save of {share} % of the time over {way}, by copied layers beside compute");
        let behind =
            format!("save of {share} % of the time over {way}, from the last layer to the stored blocks");
        if ![&name, &busy, &copied, &behind].into_iter().any(|name| effort.is_selected(name)) {
            continue;
        }
        let saver = Saver::start(way)?;
        let layer = saver.median_save_time()? * (100 - share) / share / LAYERS;
        let job = SaveJob { layer, layer_put: LayerPut::Shared, device: ComputeDevice::Accelerator };
        let all_copied = SaveJob { layer_put: LayerPut::Copied, ..job };
        for job in [job, all_copied] {
            saver.assert_saved(saver.run_job(job).inspect(|_| saver.wait_until_saved())?)?;
        }
        rows.extend(pipeline_row(effort, &saver, &name, job)?);
        rows.extend(pipeline_row(
            effort,
            &saver,
            &busy,
            SaveJob { device: ComputeDevice::Processor(engine), ..job },
        )?);
        rows.extend(pipeline_row(effort, &saver, &copied, all_copied)?);
        rows.extend(completion_row(effort, &saver, &behind, job)?);
    }
    Ok(rows)
}

/// A sequence of jobs, to the last stored byte, so that an unfinished save gains no time.
fn pipeline_row(
    effort: &Effort,
    saver: &Saver,
    name: &str,
    job: SaveJob,
) -> anyhow::Result<Option<BenchRow>> {
    if !effort.is_selected(name) {
        return Ok(None);
    }
    let (jobs, failed) = (effort.scaled(JOBS), Cell::new(None));
    let timed = |run: &dyn Fn() -> anyhow::Result<()>| {
        let begun = Instant::now();
        for _ in 0..jobs {
            run().unwrap_or_else(|error| failed.set(Some(error)));
        }
        saver.wait_until_saved();
        milliseconds(begun.elapsed())
    };
    let ours = || timed(&|| saver.run_job(job).map(drop));
    let theirs = || {
        timed(&|| {
            (0..LAYERS).for_each(|_| job.device.compute(job.layer));
            saver.save_frames()
        })
    };
    let outcome = side_by_side(effort.runs, ours, theirs);
    failed.take().map_or(Ok(()), Err)?;
    Ok(Some(row(name, "ms", "limit 0.9: waiting for each save", outcome)))
}

/// From a job's last layer until its blocks are stored, against whole frames sent afterwards.
fn completion_row(
    effort: &Effort,
    saver: &Saver,
    name: &str,
    job: SaveJob,
) -> anyhow::Result<Option<BenchRow>> {
    if !effort.is_selected(name) {
        return Ok(None);
    }
    let failed = Cell::new(None);
    let timed = |run: &dyn Fn() -> anyhow::Result<()>| {
        run().unwrap_or_else(|error| failed.set(Some(error)));
        let begun = Instant::now();
        saver.wait_until_saved();
        milliseconds(begun.elapsed())
    };
    let ours = || timed(&|| saver.run_job(job).map(drop));
    let theirs = || {
        timed(&|| {
            (0..LAYERS).for_each(|_| job.device.compute(job.layer));
            let _inside = saver.runtime.enter();
            let (asker, hashes) = saver.next_blocks();
            let call = saver.frame_save_call(asker, hashes);
            let save = BackgroundSave { call, then_release: Vec::new() };
            Ok(saver.client.save_in_background(save)?)
        })
    };
    let outcome = side_by_side(effort.runs, ours, theirs);
    failed.take().map_or(Ok(()), Err)?;
    Ok(Some(BenchRow::new("overlap", name, "ms", "whole frames at the end", Better::Lower, outcome)))
}
