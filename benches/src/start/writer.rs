//! The process that fills the SSD; separate, because it is killed.
//!
//! Not here: the node that is started afterwards (`node.rs`).

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail, ensure};
use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, Generation, TenantId};
use kvfleet_node::tiers::ssd::{Depth, RecordHeader, SsdCompletion, SsdConfig, SsdRecord, SsdTier};
use kvfleet_proto::frame::{KeyForm, seal};
use tokio::sync::mpsc::unbounded_channel;

use super::node::{BLOCK_BYTES, config, hash};

/// New blocks per start, in addition to missing ones: more than a segment of them.
const FRESH_BLOCKS: u64 = 20_000;

/// The process, from outside.
pub(super) struct WriterProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl WriterProcess {
    /// Starts the process on this directory.
    pub(super) fn start(dir: &Path, blocks: u64) -> anyhow::Result<WriterProcess> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--fill-blocks", &blocks.to_string(), "--fill-dir"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().context("the process has no standard output")?);
        Ok(WriterProcess { child, output })
    }

    /// The number of a block that was written after all missing ones; the process continues to
    /// write.
    pub(super) fn newest(&mut self) -> anyhow::Result<u64> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.trim_end().parse().context("the writer exited early; see its output above")
    }

    /// Kills the process during a write.
    pub(super) fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Closes its input and waits for its exit.
    pub(super) fn stop(mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        ensure!(self.child.wait()?.success(), "the writer failed");
        Ok(())
    }
}

/// Fills a node's tier in this directory and writes until standard input closes. Runs inside the
/// process.
///
/// # Errors
/// If the tier cannot be opened or written.
pub(crate) fn serve(dir: &Path, blocks: u64) -> anyhow::Result<()> {
    let node = config(dir, blocks);
    let (identity, frame_bytes_max) = (node.identity.manifest().digest(), node.frame_bytes_max());
    let tier = SsdConfig {
        dirs: vec![node.data_dir.clone()],
        identity,
        capacity: node.ssd_capacity(),
        frame_bytes_max,
        depth: Depth::for_frames(frame_bytes_max),
        uring: true,
        seed: u64::from(std::process::id()),
        arena: None,
        faults: Arc::default(),
    };
    let (send, mut reports) = unbounded_channel();
    let (mut ssd, report) = SsdTier::open(&tier, &send)?;
    let mut stock: VecDeque<SsdRecord> = report.blocks.iter().map(|found| found.record).collect();
    // Each write takes the next sequence number, so that no block reuses an old number.
    let mut number = report.blocks.last().map_or(0, |found| found.header.sequence);
    let told_at = number + blocks.saturating_sub(stock.len() as u64) + FRESH_BLOCKS;
    let (payload, slice) = (vec![7u8; usize::try_from(BLOCK_BYTES)?], u32::try_from(BLOCK_BYTES / 2)?);
    let is_over = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_over);
    std::thread::spawn(move || {
        // No input comes; an error also ends the process.
        let _ = std::io::stdin().read(&mut [0]);
        theirs.store(true, Ordering::Relaxed);
    });
    let (mut open, in_flight, mut is_told) = (0, Depth::for_frames(frame_bytes_max).demotions, false);
    loop {
        let stops = is_over.load(Ordering::Relaxed);
        if stops && open == 0 {
            return Ok(());
        }
        while !stops && open < in_flight {
            let frame = seal(identity, hash(number + 1), KeyForm::Rotated, &[slice, slice], &payload)?;
            let header = header(hash(number + 1), u32::try_from(frame.bytes.len())?);
            let Some(record) = ssd.write(number + 1, 0, header, &frame.bytes)? else { break };
            (number, open) = (number + 1, open + 1);
            stock.push_back(record);
            if stock.len() as u64 > blocks
                && let Some(oldest) = stock.pop_front()
            {
                ssd.free(oldest);
            }
        }
        let report = reports.blocking_recv().context("the tier stopped")?;
        match ssd.complete(report) {
            Some(SsdCompletion::Written { token, result }) => {
                result?;
                open -= 1;
                if token >= told_at && !is_told {
                    is_told = true;
                    println!("{token}");
                }
            }
            None => {}
            Some(other) => bail!("unexpected: {other:?}"),
        }
    }
}

fn header(hash: BlockHash, bytes: u32) -> RecordHeader {
    let traits = BlockTraits { bytes, fingerprint: hash.fingerprint(), ..BlockTraits::default() };
    let (parent, tenant, generation) = (None, TenantId(0), Generation(0));
    RecordHeader { hash, parent, tenant, traits, generation, sequence: 0 }
}
