//! What a directory holds at start: good slots, damaged ones (skipped, counted), files that cannot be
//! trusted (renamed to `*.quarantined`, never read again).
//!
//! A slot that the medium cannot read costs that slot: it is counted and not used again before the next
//! start. Only a file whose first page is unusable is set aside.
//!
//! Payloads are not read here; they are verified when they are served.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Need, parse_header};

use super::engine::SsdFaults;
use super::format::{FRAME_AT, PAGE_BYTES, SlotHeader, check_superblock};
use super::space::{Mark, SlotId, Space, open, slot_bytes_of};

/// What follows the name of a file that was set aside.
const QUARANTINED: &str = ".quarantined";

/// A block found at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundBlock {
    /// Where it lies.
    pub slot: SlotId,
    /// What its slot says.
    pub header: SlotHeader,
}

/// What a scan saw.
#[derive(Debug, Default)]
pub struct ScanReport {
    /// Blocks, oldest first.
    pub blocks: Vec<FoundBlock>,
    /// Slots skipped: header or frame header damaged, frame longer than any of this node, or unreadable.
    pub damaged_slots: u64,
    /// Files set aside, by their new names.
    pub quarantined: Vec<PathBuf>,
}

/// Reads all slot files of `dir` into `space`.
///
/// # Errors
/// When the directory cannot be read or a file in it cannot be opened or renamed.
pub(crate) fn scan(
    dir: &Path,
    identity: IdentityDigest,
    direct: bool,
    space: &mut Space,
    faults: &SsdFaults,
) -> io::Result<ScanReport> {
    let mut report = ScanReport::default();
    for path in slot_files(dir)? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.contains(QUARANTINED) {
            report.quarantined.push(path);
            continue;
        }
        let Some(slot_bytes) = slot_bytes_of(name) else { continue };
        match check_file(&path, slot_bytes, identity, faults)? {
            Ok(()) => scan_file(&path, slot_bytes, identity, direct, space, faults, &mut report)?,
            Err(reason) => report.quarantined.push(quarantine(&path, &reason)?),
        }
    }
    report.blocks.sort_unstable_by_key(|found| found.header.sequence);
    keep_newest(space, &mut report.blocks);
    Ok(report)
}

fn slot_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir)?.map(|item| item.map(|item| item.path())).collect::<io::Result<_>>()?;
    paths.sort();
    Ok(paths)
}

fn check_file(
    path: &Path,
    slot_bytes: usize,
    identity: IdentityDigest,
    faults: &SsdFaults,
) -> io::Result<Result<(), String>> {
    let file = File::open(path)?;
    let mut page = vec![0u8; PAGE_BYTES];
    match faults.scan_head().and_then(|()| file.read_exact_at(&mut page, 0)) {
        Ok(()) => {}
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
            return Ok(Err("it is cut off".to_owned()));
        }
        Err(cause) => return Ok(Err(format!("its first page cannot be read: {cause}"))),
    }
    let slot = u32::try_from(slot_bytes).unwrap_or(u32::MAX);
    Ok(check_superblock(&page, slot, identity).map_err(str::to_owned))
}

fn quarantine(path: &Path, reason: &str) -> io::Result<PathBuf> {
    let target = free_name(path)?;
    std::fs::rename(path, &target)?;
    tracing::error!(file = %target.display(), reason, "SSD file set aside, its blocks are not served: keep it for a look, or delete it");
    Ok(target)
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

fn scan_file(
    path: &Path,
    slot_bytes: usize,
    identity: IdentityDigest,
    direct: bool,
    space: &mut Space,
    faults: &SsdFaults,
    report: &mut ScanReport,
) -> io::Result<()> {
    let file = File::open(path)?;
    let body = file.metadata()?.len().saturating_sub(PAGE_BYTES as u64);
    let slots = u32::try_from(body / slot_bytes as u64).unwrap_or(u32::MAX);
    let mut marks = vec![Mark::Free; slots as usize];
    let (index, frame_bytes_max) = (space.files.len(), space.frame_bytes_max);
    for number in 0..slots {
        let at = PAGE_BYTES as u64 + u64::from(number) * slot_bytes as u64;
        let damage = match faults.scan(number).and_then(|()| read_slot(&file, at, slot_bytes, identity)) {
            Ok(Ok(Some(header))) if header.traits.bytes as usize <= frame_bytes_max => {
                marks[number as usize] = Mark::Block;
                report.blocks.push(FoundBlock { slot: SlotId { file: index, number }, header });
                continue;
            }
            Ok(Ok(None)) => continue,
            Ok(Ok(Some(_))) => "its frame is longer than any of this node".to_owned(),
            Ok(Err(reason)) => reason.to_owned(),
            Err(cause) => {
                // Writing to it might fail too, or worse, seem to work.
                marks[number as usize] = Mark::Lost;
                cause.to_string()
            }
        };
        report.damaged_slots += 1;
        tracing::warn!(file = %path.display(), slot = number, reason = damage, "damaged slot skipped, its block is computed again when asked for");
    }
    space.adopt(slot_bytes, open(path, direct)?, &marks);
    Ok(())
}

/// Header of the slot at `at`, if it and the frame's header are in order.
fn read_slot(
    file: &File,
    at: u64,
    slot_bytes: usize,
    identity: IdentityDigest,
) -> io::Result<Result<Option<SlotHeader>, &'static str>> {
    let mut start = vec![0u8; PAGE_BYTES.min(slot_bytes)];
    file.read_exact_at(&mut start, at)?;
    let header = match SlotHeader::read(&start) {
        Ok(Some(header)) => header,
        other => return Ok(other),
    };
    if let Ok(Need::Header(bytes)) = parse_header(&start[FRAME_AT..])
        && FRAME_AT + bytes <= slot_bytes
    {
        start.resize(FRAME_AT + bytes, 0);
        file.read_exact_at(&mut start, at)?;
    }
    Ok(check_frame_start(&start[FRAME_AT..], &header, identity, slot_bytes).map(|()| Some(header)))
}

fn check_frame_start(
    start: &[u8],
    header: &SlotHeader,
    identity: IdentityDigest,
    slot_bytes: usize,
) -> Result<(), &'static str> {
    match parse_header(start) {
        Ok(Need::Frame(bytes)) if bytes == header.traits.bytes as usize && FRAME_AT + bytes <= slot_bytes => {
        }
        Ok(_) => return Err("frame length is not the one in the slot header"),
        Err(_) => return Err("frame header is damaged"),
    }
    // Identity and hash stand at fixed places of a frame header that was just checked.
    if start.get(16..32) != Some(&identity.0[..]) || start.get(32..48) != Some(&header.hash.0[..]) {
        return Err("frame is of another block than its slot header");
    }
    Ok(())
}

/// Of several slots with one hash the last written stays; the others are free.
fn keep_newest(space: &mut Space, blocks: &mut Vec<FoundBlock>) {
    let newest: HashMap<BlockHash, SlotId> =
        blocks.iter().map(|found| (found.header.hash, found.slot)).collect();
    blocks.retain(|found| {
        let keep = newest.get(&found.header.hash) == Some(&found.slot);
        if !keep {
            space.give_back(found.slot);
        }
        keep
    });
}
