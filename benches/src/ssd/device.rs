//! The other sides of the bench: threads with direct reads and writes, and fio.
//!
//! Not here: our side (the parent module).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};

/// Alignment of direct I/O.
const PAGE_BYTES: usize = 4096;

/// A file, read and written past the page cache.
pub(super) struct DirectFile {
    file: File,
    bytes: u64,
}

/// Page-aligned memory.
struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    fn new(len: usize) -> AlignedBuffer {
        let memory = vec![0x5a; len + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        AlignedBuffer { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl DirectFile {
    pub(super) fn open(path: &Path, bytes: u64) -> anyhow::Result<DirectFile> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(direct)
            .open(path)?;
        let mut page = AlignedBuffer::new(1 << 20);
        for at in (0..bytes).step_by(1 << 20) {
            file.write_all_at(page.bytes(), at)?;
        }
        file.sync_all()?;
        Ok(DirectFile { file, bytes })
    }

    /// Reads or writes `count` blocks with `in_flight` threads; writes are sequential, reads
    /// random.
    pub(super) fn run(
        &self,
        is_put: bool,
        block_bytes: u32,
        in_flight: usize,
        count: u64,
    ) -> anyhow::Result<()> {
        let blocks = self.bytes / u64::from(block_bytes);
        let next = AtomicU64::new(0);
        let thread = || -> anyhow::Result<()> {
            let mut memory = AlignedBuffer::new(block_bytes as usize);
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return Ok(());
                }
                if is_put {
                    let at = number % blocks * u64::from(block_bytes);
                    self.file.write_all_at(memory.bytes(), at)?;
                } else {
                    // The high bits: modulo a power of two, the low ones would form one stride. The
                    // same in each run.
                    let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32;
                    let at = mixed % blocks * u64::from(block_bytes);
                    self.file.read_exact_at(memory.bytes(), at)?;
                }
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..in_flight).map(|_| scope.spawn(thread)).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("reading and writing do not panic"))
        })
    }
}

/// fio over the same file.
pub(super) struct Fio {
    file: PathBuf,
    bytes: u64,
}

impl Fio {
    pub(super) fn is_installed() -> bool {
        Command::new("fio").arg("--version").output().is_ok_and(|output| output.status.success())
    }

    pub(super) fn new(file: PathBuf, bytes: u64) -> Fio {
        Fio { file, bytes }
    }

    /// Runs fio; returns bytes per second.
    pub(super) fn run(
        &self,
        is_put: bool,
        block_bytes: u32,
        in_flight: usize,
        bytes: u64,
    ) -> anyhow::Result<f64> {
        let (kind, key) = if is_put { ("write", "write") } else { ("randread", "read") };
        let output = Command::new("fio")
            .args(["--name=kvfleet", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
            .arg(format!("--filename={}", self.file.display()))
            .arg(format!("--rw={kind}"))
            .arg(format!("--bs={block_bytes}"))
            .arg(format!("--iodepth={in_flight}"))
            .arg(format!("--size={}", self.bytes))
            .arg(format!("--io_size={bytes}"))
            .output()?;
        ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
        let text: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = text["jobs"][0][key]["bw_bytes"].as_f64();
        rate.context("fio reports no bandwidth")
    }
}
