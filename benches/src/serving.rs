//! A node that serves its host and the network: a process of its own, as in life.
//!
//! Not here: what is timed (`host.rs`, `network/node.rs`).

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use kv_core::id::{BlockHash, Category, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_transport::{Asker, BlockService, SaveOffer, SaveRequest};
use tokio::runtime::Builder;

use crate::get::certificates;

/// DRAM of the node.
const DRAM_BYTES: u64 = 1 << 30;

/// Layers of its model.
pub(crate) const LAYERS: u32 = 16;

/// Slices of a frame: two a layer.
const SLICES: u32 = 2 * LAYERS;

/// A size of block, and which of them are held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) payload_bytes: u32,
    /// Blocks that are held from the start: more than any cache holds.
    pub(crate) blocks: u32,
}

pub(crate) const SIZES: [Size; 3] = [
    Size { payload_bytes: 64 << 10, blocks: 1024 },
    Size { payload_bytes: 1 << 20, blocks: 96 },
    Size { payload_bytes: 4 << 20, blocks: 32 },
];

impl Size {
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
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&low.rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93).to_le_bytes());
        hash[8..].copy_from_slice(&low.to_le_bytes());
        BlockHash(hash)
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
        // What is saved takes the place of what was used: what that costs is asked here, not whether it is worth it.
        policy: "lru".to_owned(),
        shm: ShmSection { dir: Some(sockets(dir)), ..ShmSection::default() },
        ..NodeConfig::default()
    };
    config.identity.layers = LAYERS;
    config
}

/// Of its model.
pub(crate) fn identity() -> IdentityDigest {
    config(Path::new("")).identity.manifest().digest()
}

/// Where its sockets for processes of its host are.
pub(crate) fn sockets(dir: &Path) -> PathBuf {
    dir.join("sockets")
}

/// Who asks under a lease.
pub(crate) fn asker(lease: u64) -> Asker {
    Asker {
        request: RequestId(lease),
        lease: LeaseId(lease),
        tenant: TenantId(0),
        identity: identity(),
        category: Category::default(),
        traceparent: String::new(),
        class: None,
    }
}

/// Serves until its input ends.
pub(crate) fn serve(dir: &Path) -> anyhow::Result<()> {
    let mut config = config(dir);
    config.tls = certificates(dir)?;
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
pub(crate) async fn save(blocks: &dyn BlockService, size: Size, number: u32) -> anyhow::Result<()> {
    let (frame, asker) = (size.frame(number)?, asker(u64::MAX));
    let frame_bytes = frame.bytes.len() as u64;
    let hashes = vec![size.hash(number)];
    let lease = asker.lease;
    let (offer, session) =
        blocks.save(SaveRequest { asker, parent: None, first_offset_blocks: 0, hashes, frame_bytes }).await;
    ensure!(matches!(offer, SaveOffer::Wanted(_)), "the node answers {offer:?}");
    let mut session = session.context("the node takes nothing")?;
    session.put(frame).await;
    let done = session.finish().await;
    ensure!(done.stored_blocks == 1, "the node kept nothing: {done:?}");
    blocks.release(lease).await;
    Ok(())
}

/// The process, from outside.
pub(crate) struct Serving {
    child: Child,
    /// Where it serves the network.
    pub(crate) address: String,
}

impl Serving {
    /// Starts it on this directory; it has all its blocks then.
    pub(crate) fn start(dir: &Path) -> anyhow::Result<Serving> {
        let mut child = Command::new(std::env::current_exe()?);
        let child = child.arg("--serve-host").arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child.spawn()?;
        let address = address(child.stdout.take().context("its output")?)?;
        Ok(Serving { child, address })
    }

    /// CPU time that it took so far, in hundredths of a second.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // User and system time are the twelfth and the thirteenth field behind the name, which may have anything in it.
        let (_, fields) = stat.rsplit_once(')').context("what /proc says has no name")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let (Some(user), Some(system)) = (fields.get(11), fields.get(12)) else { bail!("/proc says {stat}") };
        let ticks = user.parse::<u64>()? + system.parse::<u64>()?;
        Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
    }

    /// Lets it end.
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
    ensure!(!address.is_empty(), "the node ended early; what it said is above");
    Ok(address.to_owned())
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Nobody is left behind when a bench fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
