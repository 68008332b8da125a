//! The files of a directory: the one with segments, found or made, a lock, and what is set aside (renamed to
//! `*.quarantined`, never read again, never removed).
//!
//! Not here: what is in the segments (`recover`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kv_core::id::IdentityDigest;

use super::engine::SsdFaults;
use super::format::{PAGE_BYTES, SEGMENTS_AT, check_file_head};

/// The file with the segments.
pub(super) const FILE_NAME: &str = "segments.kvs";

/// What follows the name of a file that was set aside.
const QUARANTINED: &str = ".quarantined";

/// A directory as it was found.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Segment size of the file that is there, in pages.
    pub(super) segment_pages: Option<u32>,
    /// Files set aside, by their new names.
    pub(super) quarantined: Vec<PathBuf>,
    /// Held as long as the tier: two processes on one directory would overwrite each other.
    _lock: File,
}

impl Directory {
    /// Makes it if absent, locks it and looks at its files.
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
                    Err(reason) => found.set_aside(&reason)?,
                }
            } else if name.starts_with("blocks-") && name.ends_with(".kvs") {
                found.rename(&file, "an earlier release wrote it, with slots in place of segments")?;
            }
        }
        Ok(found)
    }

    pub(super) fn file(&self) -> PathBuf {
        self.path.join(FILE_NAME)
    }

    /// Sets the file with the segments aside; a new one takes its place.
    pub(super) fn set_aside(&mut self, reason: &str) -> io::Result<()> {
        self.segment_pages = None;
        self.rename(&self.file(), reason)
    }

    fn rename(&mut self, file: &Path, reason: &str) -> io::Result<()> {
        let target = free_name(file)?;
        std::fs::rename(file, &target)?;
        tracing::error!(file = %target.display(), reason, "SSD file set aside, its blocks are not served: keep it for a look, or delete it");
        self.quarantined.push(target);
        Ok(())
    }

    /// Makes the file if there is none; its head comes with its first segment.
    pub(super) fn create(&self) -> io::Result<()> {
        File::options().write(true).create(true).truncate(false).open(self.file())?;
        File::open(&self.path)?.sync_all()
    }
}

/// Segment size of the file in bytes; 0 for one that was begun and holds nothing.
fn check_file(path: &Path, identity: IdentityDigest, faults: &SsdFaults) -> io::Result<Result<u32, String>> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Ok(0));
    }
    if is_untouched(&file).unwrap_or(false) {
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

/// Whether a file was begun and nothing was written into it before a crash: zeros where its head belongs, and
/// where that of its first segment does, which is used before any other.
fn is_untouched(file: &File) -> io::Result<bool> {
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

/// A name beside `path` that no file has: what was set aside before may be somebody's evidence.
fn free_name(path: &Path) -> io::Result<PathBuf> {
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
