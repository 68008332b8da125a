//! A node that serves its host and the network in a separate process, as in production.
//!
//! Not here: the measurements (`host.rs`, `network/node.rs`).

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use kv_core::id::{BlockHash, Category, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet_net::tls::Role;
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_transport::{BlockService, RequestContext, SaveOffer, SaveRequest};
use tokio::runtime::Builder;

use crate::get::certificates;

/// DRAM of the node.
const DRAM_BYTES: u64 = 1 << 30;

/// Layers of its model.
pub(crate) const LAYERS: u32 = 16;

/// Slices of a frame: two per layer.
const SLICES: u32 = 2 * LAYERS;

/// A block size, and the blocks of it that the node holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeClass {
    pub(crate) payload_bytes: u32,
    /// Blocks held from the start: more than any cache holds.
    pub(crate) blocks: u32,
}

pub(crate) const SIZES: [SizeClass; 3] = [
    SizeClass { payload_bytes: 64 << 10, blocks: 1024 },
    SizeClass { payload_bytes: 1 << 20, blocks: 96 },
    SizeClass { payload_bytes: 4 << 20, blocks: 32 },
];

impl SizeClass {
    pub(crate) fn name(self) -> String {
        match self.payload_bytes >> 20 {
            0 => format!("{} KiB", self.payload_bytes >> 10),
            mib => format!("{mib} MiB"),
        }
    }

    /// The hash of one of its blocks.
    pub(crate) fn hash(self, number: u32) -> BlockHash {
        let low = ((u64::from(self.payload_bytes) << 32) | (u64::from(number) + 1))
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        BlockHash::from_words(low.rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93), low)
    }

    /// One of its blocks.
    pub(crate) fn frame(self, number: u32) -> anyhow::Result<Frame> {
        let payload: Vec<u8> =
            (0..self.payload_bytes).map(|at| (at.wrapping_mul(number + 31) >> 5) as u8).collect();
        let slices = vec![self.payload_bytes / SLICES; SLICES as usize];
        Ok(seal(identity(), self.hash(number), KeyForm::Rotated, &slices, &payload)?)
    }
}

fn config(dir: &Path) -> NodeConfig {
    let [small, middle, large] = SIZES.map(|size| u64::from(size.payload_bytes));
    let mut config = NodeConfig {
        dram_bytes: DRAM_BYTES,
        block_bytes: large,
        component_bytes: vec![small, middle],
        data_dir: dir.join("data"),
        // LRU: saved blocks replace used ones. This bench measures the cost of that, not its value.
        policy: "lru".to_owned(),
        shm: ShmSection { dir: Some(socket_dir(dir)), ..ShmSection::default() },
        ..NodeConfig::default()
    };
    config.identity.layers = LAYERS;
    config
}

/// The identity of the node's model.
pub(crate) fn identity() -> IdentityDigest {
    config(Path::new("")).identity.manifest().digest()
}

/// The directory of its sockets for processes of its host.
pub(crate) fn socket_dir(dir: &Path) -> PathBuf {
    dir.join("sockets")
}

/// Request parameters under a lease.
pub(crate) fn asker(lease: u64) -> RequestContext {
    RequestContext {
        request: RequestId(lease),
        lease: LeaseId(lease),
        tenant: TenantId(0),
        identity: identity(),
        category: Category::default(),
        traceparent: String::new(),
        class: None,
    }
}

/// Serves until its input closes.
pub(crate) fn serve(dir: &Path) -> anyhow::Result<()> {
    let mut config = config(dir);
    config.tls = certificates(dir, &Role::Node(None))?;
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let node = runtime.block_on(Node::start(config, &prometheus::Registry::new()))?;
    for size in SIZES {
        for number in 0..size.blocks {
            runtime.block_on(save(&*node.blocks(), size, number))?;
        }
    }
    println!("{}", node.data_addr());
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    runtime.block_on(node.shutdown());
    Ok(())
}

/// Saves one of its blocks.
pub(crate) async fn save(blocks: &dyn BlockService, size: SizeClass, number: u32) -> anyhow::Result<()> {
    let (frame, asker) = (size.frame(number)?, asker(u64::MAX));
    let frame_bytes = frame.bytes.len() as u64;
    let hashes = vec![size.hash(number)];
    let lease = asker.lease;
    let (offer, session) = blocks
        .save(SaveRequest { context: asker, parent: None, first_offset_blocks: 0, hashes, frame_bytes })
        .await;
    ensure!(matches!(offer, SaveOffer::Wanted(_)), "the node answers {offer:?}");
    let mut session = session.context("the node accepts no block")?;
    session.put(frame).await;
    let done = session.finish().await;
    ensure!(done.stored_blocks == 1, "the node stored no block: {done:?}");
    blocks.release(lease).await;
    Ok(())
}

/// The process, from outside.
pub(crate) struct NodeProcess {
    child: Child,
    /// Network address.
    pub(crate) address: String,
}

impl NodeProcess {
    /// Starts the process on this directory and waits until it has all its blocks.
    pub(crate) fn start(dir: &Path) -> anyhow::Result<NodeProcess> {
        let mut child = Command::new(std::env::current_exe()?);
        let child = child.arg("--serve-host").arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child.spawn()?;
        let address = address(child.stdout.take().context("the process has no standard output")?)?;
        Ok(NodeProcess { child, address })
    }

    /// Its CPU time so far, in steps of a hundredth of a second.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // User and system time are the twelfth and thirteenth fields after the name, which may
        // contain any character.
        let (_, fields) = stat.rsplit_once(')').context("/proc/…/stat has no process name")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let (Some(user), Some(system)) = (fields.get(11), fields.get(12)) else {
            bail!("cannot parse /proc/…/stat: {stat}")
        };
        let ticks = user.parse::<u64>()? + system.parse::<u64>()?;
        Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
    }

    /// Closes its input and waits for its exit.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        ensure!(self.child.wait()?.success(), "the node failed");
        Ok(())
    }
}

fn address(output: ChildStdout) -> anyhow::Result<String> {
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let address = line.trim_end();
    ensure!(!address.is_empty(), "the node exited early; see its output above");
    Ok(address.to_owned())
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        // Leaves no process behind if a bench fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
