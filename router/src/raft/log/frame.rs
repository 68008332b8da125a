//! How bytes of the log look: the head of a file, and frames behind it, each written twice.
//!
//! A frame is what one sync made durable: records, in two equal copies on pages of their own, and behind them the
//! bytes of large commands that the records name. Checksums are over the log's own salt and the number of the file,
//! so that neither what a file held before it was used again nor bytes that a client made up are taken for a frame.
//! Not here: what records say (`state.rs`), which frames there must be (`recovery.rs`).

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use serde::{Deserialize, Serialize};

use super::Owner;
use crate::raft::Cluster;

/// Version of files, frames and records; another one is refused. 3 was a tree in one file, 4 had pins without an end.
pub(crate) const FORMAT: u32 = 5;

/// What is written at once by a disk, and damaged at once: copies lie on pages of their own, and no page that was
/// acknowledged is ever written again.
pub(super) const PAGE: usize = 4096;

/// Where frames begin, behind two copies of the head.
pub(super) const FRAMES_START: u64 = 2 * PAGE as u64;

const FILE_MAGIC: [u8; 8] = *b"kvraftlg";
const FRAME_MAGIC: [u8; 4] = *b"kvfr";

/// Bytes of a frame's head: magic, checksum, number, start, file_bytes, beside_bytes, records_bytes.
const FRAME_HEAD: usize = 4 + 4 + 8 + 8 + 8 + 8 + 4;

/// Rounded up to whole pages.
pub(super) fn pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// First page of a file, and its second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileHead {
    pub(super) router: u64,
    pub(super) cluster: String,
    pub(super) shards: u16,
    /// Drawn when the log was made.
    pub(super) salt: u64,
    /// Of the file, its name too.
    pub(super) file: u64,
    /// Number of its first frame.
    pub(super) first_frame: u64,
    /// Bytes it has at least.
    pub(super) file_bytes: u64,
}

/// Why the first two pages are no head.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoHead {
    Damaged,
    OtherFormat(u32),
}

impl FileHead {
    /// Head of the first file of a new log.
    pub(super) fn new(owner: &Owner) -> FileHead {
        let Owner { router, cluster: Cluster { name, shards } } = owner.clone();
        // The keys of a hasher are drawn by the system, once a process, and differ from one to the next.
        let salt = RandomState::new().build_hasher().finish();
        FileHead { router, cluster: name, shards, salt, file: 1, first_frame: 1, file_bytes: 0 }
    }

    pub(super) fn owner(&self) -> Owner {
        let cluster = Cluster { name: self.cluster.clone(), shards: self.shards };
        Owner { router: self.router, cluster }
    }

    /// What checksums of frames in this file begin with.
    pub(super) fn seed(&self) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.salt.to_le_bytes()), &self.file.to_le_bytes())
    }

    /// Two pages.
    pub(super) fn encode(&self) -> std::io::Result<Vec<u8>> {
        let payload = rmp_serde::to_vec(self).map_err(std::io::Error::other)?;
        let mut page = FILE_MAGIC.to_vec();
        page.extend_from_slice(&FORMAT.to_le_bytes());
        page.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        page.extend_from_slice(&payload);
        let checksum = crc32c::crc32c(&page);
        page.extend_from_slice(&checksum.to_le_bytes());
        if page.len() > PAGE {
            return Err(std::io::Error::other("the name of the cluster does not fit into a page"));
        }
        page.resize(PAGE, 0);
        page.extend_from_within(..);
        Ok(page)
    }

    /// The head of a file with these bytes, from the copy that is sound.
    pub(super) fn decode(bytes: &[u8]) -> Result<FileHead, NoHead> {
        let copies = [0, PAGE].map(|at| bytes.get(at..at + PAGE).map_or(Err(NoHead::Damaged), decode_page));
        let [first, second] = copies;
        match (first, second) {
            (Ok(head), _) | (_, Ok(head)) => Ok(head),
            (Err(NoHead::OtherFormat(found)), _) | (_, Err(NoHead::OtherFormat(found))) => {
                Err(NoHead::OtherFormat(found))
            }
            _ => Err(NoHead::Damaged),
        }
    }
}

fn decode_page(page: &[u8]) -> Result<FileHead, NoHead> {
    let mut rest = page;
    let mut take = |bytes: usize| rest.split_off(..bytes).ok_or(NoHead::Damaged);
    if take(FILE_MAGIC.len())? != FILE_MAGIC {
        return Err(NoHead::Damaged);
    }
    let format = u32_of(take(4)?);
    let payload_bytes = u32_of(take(4)?) as usize;
    let payload = take(payload_bytes)?;
    let checksum = u32_of(take(4)?);
    if checksum != crc32c::crc32c(&page[..FILE_MAGIC.len() + 8 + payload_bytes]) {
        return Err(NoHead::Damaged);
    }
    if format != FORMAT {
        return Err(NoHead::OtherFormat(format));
    }
    rmp_serde::from_slice(payload).map_err(|_| NoHead::Damaged)
}

fn u32_of(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_le_bytes)
}

fn u64_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// What stands before the records of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHead {
    /// One more than that of the frame before.
    pub(super) number: u64,
    /// Where its first copy begins.
    pub(super) start: u64,
    /// Bytes that the file had, durably, before this frame was written: one that is shorter was cut.
    pub(super) file_bytes: u64,
    /// Bytes of commands behind the copies.
    pub(super) beside_bytes: u64,
}

/// Both copies of a frame, to be written at its start.
pub(super) fn encode(seed: u32, head: FrameHead, records: &[u8]) -> std::io::Result<Vec<u8>> {
    let records_bytes = u32::try_from(records.len()).map_err(std::io::Error::other)?;
    let mut copy = Vec::with_capacity(copies_bytes(records.len()));
    copy.extend_from_slice(&FRAME_MAGIC);
    copy.extend_from_slice(&[0; 4]);
    for value in [head.number, head.start, head.file_bytes, head.beside_bytes] {
        copy.extend_from_slice(&value.to_le_bytes());
    }
    copy.extend_from_slice(&records_bytes.to_le_bytes());
    copy.extend_from_slice(records);
    let checksum = crc32c::crc32c_append(seed, &copy[8..]);
    copy[4..8].copy_from_slice(&checksum.to_le_bytes());
    copy.resize(pages(copy.len()), 0);
    copy.extend_from_within(..);
    Ok(copy)
}

/// Bytes of both copies of a frame with so many bytes of records.
pub(super) fn copies_bytes(records_bytes: usize) -> usize {
    2 * pages(FRAME_HEAD + records_bytes)
}

/// A frame that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    pub(super) head: FrameHead,
    /// Where the copy is that was read.
    pub(super) at: u64,
    pub(super) records: &'a [u8],
}

impl Frame<'_> {
    /// Where the commands beside its records begin.
    pub(super) fn beside_start(&self) -> u64 {
        self.head.start + copies_bytes(self.records.len()) as u64
    }

    /// Where the next frame begins; `None` when no file is that long.
    pub(super) fn end(&self) -> Option<u64> {
        let end = self.beside_start().checked_add(self.head.beside_bytes)?;
        end.checked_next_multiple_of(PAGE as u64)
    }
}

/// The copy of a frame that begins at byte `at` of a file, if a sound one does.
pub(super) fn copy_at(seed: u32, bytes: &[u8], at: u64) -> Option<Frame<'_>> {
    let copy = bytes.get(usize::try_from(at).ok()?..)?;
    let (head, rest) = copy.split_at_checked(FRAME_HEAD)?;
    if head[..4] != FRAME_MAGIC {
        return None;
    }
    let records = rest.get(..u32_of(&head[40..44]) as usize)?;
    // A copy that lies elsewhere was not written by us. Looked at first: old commands could hold many that look like one.
    let (start, copy_bytes) = (u64_of(&head[16..24]), pages(FRAME_HEAD + records.len()) as u64);
    if at != start && start.checked_add(copy_bytes) != Some(at) {
        return None;
    }
    let checksum = crc32c::crc32c_append(crc32c::crc32c_append(seed, &head[8..]), records);
    if checksum != u32_of(&head[4..8]) {
        return None;
    }
    let number = |at: usize| u64_of(&head[at..at + 8]);
    let head =
        FrameHead { number: number(8), start: number(16), file_bytes: number(24), beside_bytes: number(32) };
    Some(Frame { head, at, records })
}

/// The first sound copy at a page from byte `from` on, of a frame with this number or a higher one.
pub(super) fn next_copy(seed: u32, bytes: &[u8], from: u64, number: u64) -> Option<Frame<'_>> {
    let starts = (from..bytes.len() as u64).step_by(PAGE);
    starts.filter_map(|at| copy_at(seed, bytes, at)).find(|frame| frame.head.number >= number)
}
