//! Binary format of the log: a file head, then frames, each written twice.
//!
//! A frame holds the data of one sync: records, in two equal copies on separate pages, and after
//! them the bytes of large commands that the records name (out of line). Checksums include the
//! log's salt and the file number, so neither old contents of a reused file nor client data can
//! pass as a frame. Not here: the meaning of records (`state.rs`), and which frames must exist
//! (`recovery.rs`).

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use serde::{Deserialize, Serialize};

use super::LogOwner;
use crate::raft::ClusterIdentity;

/// Version of files, frames and records; others are refused. 3 was a tree in one file, 4 had pins
/// without an end.
pub(crate) const FORMAT: u32 = 5;

/// Unit of disk writes and damage: copies lie on separate pages, and an acknowledged page is never
/// rewritten.
pub(super) const PAGE: usize = 4096;

/// Offset of the first frame, after two copies of the head.
pub(super) const FRAMES_START: u64 = 2 * PAGE as u64;

const FILE_MAGIC: [u8; 8] = *b"kvraftlg";
const FRAME_MAGIC: [u8; 4] = *b"kvfr";

/// Bytes of a frame's head: magic, checksum, number, start, file_bytes, out_of_line_bytes,
/// records_bytes.
const FRAME_HEAD: usize = 4 + 4 + 8 + 8 + 8 + 8 + 4;

/// Rounded up to whole pages.
pub(super) fn pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// The head of a file, on its first and second page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileHead {
    pub(super) router: u64,
    pub(super) cluster: String,
    pub(super) shards: u16,
    /// Random number drawn when the log was created.
    pub(super) salt: u64,
    /// Number of the file, also its name.
    pub(super) file: u64,
    /// Number of its first frame.
    pub(super) first_frame: u64,
    /// Least size of the file in bytes.
    pub(super) file_bytes: u64,
}

/// Why the first two pages hold no valid head.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeadError {
    Damaged,
    OtherFormat(u32),
}

impl FileHead {
    /// Head of the first file of a new log.
    pub(super) fn new(owner: &LogOwner) -> FileHead {
        let LogOwner { router, cluster: ClusterIdentity { name, shards } } = owner.clone();
        // The system draws a hasher's keys once per process, and each hasher differs.
        let salt = RandomState::new().build_hasher().finish();
        FileHead { router, cluster: name, shards, salt, file: 1, first_frame: 1, file_bytes: 0 }
    }

    pub(super) fn owner(&self) -> LogOwner {
        let cluster = ClusterIdentity { name: self.cluster.clone(), shards: self.shards };
        LogOwner { router: self.router, cluster }
    }

    /// Checksum prefix of frames in this file.
    pub(super) fn seed(&self) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.salt.to_le_bytes()), &self.file.to_le_bytes())
    }

    /// Both pages.
    pub(super) fn encode(&self) -> std::io::Result<Vec<u8>> {
        let payload = rmp_serde::to_vec(self).map_err(std::io::Error::other)?;
        let mut page = FILE_MAGIC.to_vec();
        page.extend_from_slice(&FORMAT.to_le_bytes());
        page.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        page.extend_from_slice(&payload);
        let checksum = crc32c::crc32c(&page);
        page.extend_from_slice(&checksum.to_le_bytes());
        if page.len() > PAGE {
            return Err(std::io::Error::other("the cluster name does not fit into a page"));
        }
        page.resize(PAGE, 0);
        page.extend_from_within(..);
        Ok(page)
    }

    /// Decodes a head from a valid copy.
    pub(super) fn decode(bytes: &[u8]) -> Result<FileHead, HeadError> {
        let copies =
            [0, PAGE].map(|at| bytes.get(at..at + PAGE).map_or(Err(HeadError::Damaged), decode_page));
        let [first, second] = copies;
        match (first, second) {
            (Ok(head), _) | (_, Ok(head)) => Ok(head),
            (Err(HeadError::OtherFormat(found)), _) | (_, Err(HeadError::OtherFormat(found))) => {
                Err(HeadError::OtherFormat(found))
            }
            _ => Err(HeadError::Damaged),
        }
    }
}

fn decode_page(page: &[u8]) -> Result<FileHead, HeadError> {
    let mut rest = page;
    let mut take = |bytes: usize| rest.split_off(..bytes).ok_or(HeadError::Damaged);
    if take(FILE_MAGIC.len())? != FILE_MAGIC {
        return Err(HeadError::Damaged);
    }
    let format = u32_of(take(4)?);
    let payload_bytes = u32_of(take(4)?) as usize;
    let payload = take(payload_bytes)?;
    let checksum = u32_of(take(4)?);
    if checksum != crc32c::crc32c(&page[..FILE_MAGIC.len() + 8 + payload_bytes]) {
        return Err(HeadError::Damaged);
    }
    if format != FORMAT {
        return Err(HeadError::OtherFormat(format));
    }
    rmp_serde::from_slice(payload).map_err(|_| HeadError::Damaged)
}

fn u32_of(bytes: &[u8]) -> u32 {
    bytes.try_into().map_or(0, u32::from_le_bytes)
}

fn u64_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

/// Head of a frame, before its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHead {
    /// Number, one more than the previous frame's.
    pub(super) number: u64,
    /// Offset of its first copy.
    pub(super) start: u64,
    /// Durable file size before this frame was written: a shorter file was truncated.
    pub(super) file_bytes: u64,
    /// Bytes of out-of-line commands after the copies.
    pub(super) out_of_line_bytes: u64,
}

/// Both copies of a frame, to be written at its start.
pub(super) fn encode(seed: u32, head: FrameHead, records: &[u8]) -> std::io::Result<Vec<u8>> {
    let records_bytes = u32::try_from(records.len()).map_err(std::io::Error::other)?;
    let mut copy = Vec::with_capacity(copies_bytes(records.len()));
    copy.extend_from_slice(&FRAME_MAGIC);
    copy.extend_from_slice(&[0; 4]);
    for value in [head.number, head.start, head.file_bytes, head.out_of_line_bytes] {
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

/// Bytes of both copies of a frame with this many bytes of records.
pub(super) fn copies_bytes(records_bytes: usize) -> usize {
    2 * pages(FRAME_HEAD + records_bytes)
}

/// A frame that was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    pub(super) head: FrameHead,
    /// Offset of the copy that was read.
    pub(super) at: u64,
    pub(super) records: &'a [u8],
}

impl Frame<'_> {
    /// Offset of the out-of-line commands.
    pub(super) fn out_of_line_start(&self) -> u64 {
        self.head.start + copies_bytes(self.records.len()) as u64
    }

    /// Offset of the next frame; `None` on overflow.
    pub(super) fn end(&self) -> Option<u64> {
        let end = self.out_of_line_start().checked_add(self.head.out_of_line_bytes)?;
        end.checked_next_multiple_of(PAGE as u64)
    }
}

/// The valid copy of a frame at offset `at`, if there is one.
pub(super) fn copy_at(seed: u32, bytes: &[u8], at: u64) -> Option<Frame<'_>> {
    let copy = bytes.get(usize::try_from(at).ok()?..)?;
    let (head, rest) = copy.split_at_checked(FRAME_HEAD)?;
    if head[..4] != FRAME_MAGIC {
        return None;
    }
    let records = rest.get(..u32_of(&head[40..44]) as usize)?;
    // A copy at another offset was not written by this log. Checked first, since old commands could
    // contain many lookalikes.
    let (start, copy_bytes) = (u64_of(&head[16..24]), pages(FRAME_HEAD + records.len()) as u64);
    if at != start && start.checked_add(copy_bytes) != Some(at) {
        return None;
    }
    let checksum = crc32c::crc32c_append(crc32c::crc32c_append(seed, &head[8..]), records);
    if checksum != u32_of(&head[4..8]) {
        return None;
    }
    let number = |at: usize| u64_of(&head[at..at + 8]);
    let head = FrameHead {
        number: number(8),
        start: number(16),
        file_bytes: number(24),
        out_of_line_bytes: number(32),
    };
    Some(Frame { head, at, records })
}

/// The first valid copy on a page from offset `from` on, of a frame with at least this number.
pub(super) fn next_copy(seed: u32, bytes: &[u8], from: u64, number: u64) -> Option<Frame<'_>> {
    let starts = (from..bytes.len() as u64).step_by(PAGE);
    starts.filter_map(|at| copy_at(seed, bytes, at)).find(|frame| frame.head.number >= number)
}
