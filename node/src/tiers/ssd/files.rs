//! The files of a directory: the segment file, found or created, a lock, and quarantined files
//! (renamed to `*.quarantined`, never read again, never removed).
//!
//! Not here: the content of segments (`recover`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kv_core::id::IdentityDigest;

use super::engine::SsdFaults;
use super::format::{PAGE_BYTES, SEGMENTS_AT, check_file_head};

/// Name of the segment file.
pub(super) const FILE_NAME: &str = "segments.kvs";

/// Suffix of a quarantined file.
const QUARANTINED: &str = ".quarantined";

/// A directory at start.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Segment size of the existing file, in pages; `None` without one.
    pub(super) segment_pages: Option<u32>,
    /// Quarantined files, by their new names.
    pub(super) quarantined: Vec<PathBuf>,
    /// Held as long as the tier: two processes on one directory would overwrite each other's data.
    _lock: File,
}

impl Directory {
    /// Creates the directory if absent, locks it and checks its files.
    pub(super) fn open(path: &Path, identity: IdentityDigest, faults: &SsdFaults) -> io::Result<Directory> {
        std::fs::create_dir_all(path)?;
        let lock = lock(path)?;
        let mut found =
            Directory { path: path.to_owned(), segment_pages: None, quarantined: Vec::new(), _lock: lock };
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(path)?.map(|item| item.map(|item| item.path())).collect::<io::Result<_>>()?;
        paths.sort();
        for file in paths {
            let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.contains(QUARANTINED) {
                found.quarantined.push(file);
            } else if name == FILE_NAME {
                match check_file(&file, identity, faults)? {
                    Ok(0) => {}
                    Ok(segment_bytes) => found.segment_pages = Some(segment_bytes / PAGE_BYTES as u32),
                    Err(reason) => found.quarantine(&reason)?,
                }
            } else if name.starts_with("blocks-") && name.ends_with(".kvs") {
                found
                    .quarantine_file(&file, "an earlier release wrote it, with slots in place of segments")?;
            }
        }
        Ok(found)
    }

    pub(super) fn file(&self) -> PathBuf {
        self.path.join(FILE_NAME)
    }

    /// Quarantines the segment file; a new one replaces it.
    pub(super) fn quarantine(&mut self, reason: &str) -> io::Result<()> {
        self.segment_pages = None;
        self.quarantine_file(&self.file(), reason)
    }

    fn quarantine_file(&mut self, file: &Path, reason: &str) -> io::Result<()> {
        let target = quarantine_name(file)?;
        std::fs::rename(file, &target)?;
        tracing::error!(file = %target.display(), reason, "SSD file quarantined, its blocks are not served: \
            keep it for analysis, or delete it");
        self.quarantined.push(target);
        Ok(())
    }

    /// Creates the file if there is none; its head is written with its first segment.
    pub(super) fn create(&self) -> io::Result<()> {
        File::options().write(true).create(true).truncate(false).open(self.file())?;
        File::open(&self.path)?.sync_all()
    }
}

/// Segment size of the file in bytes; 0 for a file without data.
fn check_file(path: &Path, identity: IdentityDigest, faults: &SsdFaults) -> io::Result<Result<u32, String>> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Ok(0));
    }
    if is_blank(&file).unwrap_or(false) {
        return Ok(Ok(0));
    }
    let mut page = vec![0u8; PAGE_BYTES];
    match faults.scan_head().and_then(|()| file.read_exact_at(&mut page, 0)) {
        Ok(()) => {}
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
            return Ok(Err("it is cut off".to_owned()));
        }
        Err(cause) => return Ok(Err(format!("its first page cannot be read: {cause}"))),
    }
    Ok(check_file_head(&page, identity).map_err(str::to_owned))
}

/// Whether a file was created and never written before a crash: zeros at its head and at the head
/// of its first segment, which is always used first.
fn is_blank(file: &File) -> io::Result<bool> {
    let is_zero = |at: u64| {
        let mut page = [0u8; PAGE_BYTES];
        match file.read_exact_at(&mut page, at) {
            Ok(()) => Ok(page.iter().all(|byte| *byte == 0)),
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(true),
            Err(cause) => Err(cause),
        }
    };
    Ok(file.metadata()?.len() >= PAGE_BYTES as u64 && is_zero(0)? && is_zero(SEGMENTS_AT)?)
}

/// An unused name beside `path`: earlier quarantined files may be needed for analysis.
fn quarantine_name(path: &Path) -> io::Result<PathBuf> {
    let mut number = 0u64;
    loop {
        let mut target = path.as_os_str().to_owned();
        target.push(QUARANTINED);
        if number > 0 {
            target.push(format!(".{number}"));
        }
        let target = PathBuf::from(target);
        if !target.try_exists()? {
            return Ok(target);
        }
        number += 1;
    }
}

fn lock(dir: &Path) -> io::Result<File> {
    let file = File::create(dir.join(".lock"))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process uses it"))
        }
        Err(cause) => Err(cause.into()),
    }
}
