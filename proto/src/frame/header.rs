//! The frame header: writing, parsing, and the number of bytes that a stream reader still needs.
//!
//! Not here: the payload and its checksums (the parent module).

use std::ops::Range;

use kv_core::id::{BlockHash, HASH_BYTES, IdentityDigest};

use super::{FrameError, HEADER_FIXED_BYTES, KeyForm, MAGIC, PAYLOAD_BYTES_MAX, SLICES_MAX, VERSION};

/// Bytes of one entry of the slice table.
pub(super) const SLICE_ENTRY_BYTES: usize = 8;

/// Bytes from magic to slice count, which give the header's length.
pub(super) const START_BYTES: usize = 16;

/// Where the hash begins.
const HASH_AT: usize = 32;

/// Where the slice table begins: after the hash and a zero byte.
const TABLE_AT: usize = 52;

/// Bytes that a stream reader needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytesNeeded {
    /// At least this many bytes from the frame's start, to learn its length.
    Header(usize),
    /// The whole frame has this many bytes.
    Frame(usize),
}

/// Length of the frame that begins with these bytes. Checks every byte that is there, so that a
/// foreign stream is rejected before memory is allocated.
///
/// # Errors
/// When the bytes do not begin a frame within the limits.
pub fn parse_header(start: &[u8]) -> Result<BytesNeeded, FrameError> {
    if start.len() < START_BYTES {
        return check_magic(start).map(|()| BytesNeeded::Header(START_BYTES));
    }
    let (_, slices) = read_start(start)?;
    if start.len() < header_len(slices) {
        return Ok(BytesNeeded::Header(header_len(slices)));
    }
    Header::read(start)?;
    Ok(BytesNeeded::Frame(header_len(slices) + table_payload_len(start, slices)?))
}

/// All header fields except the slice table.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) identity: IdentityDigest,
    pub(super) hash: BlockHash,
    pub(super) key_form: KeyForm,
    pub(super) slices: usize,
}

impl Header {
    /// Reads and checks the header at the start of `bytes`; ignores the bytes after it.
    pub(super) fn read(bytes: &[u8]) -> Result<Header, FrameError> {
        if bytes.len() < START_BYTES {
            check_magic(bytes)?;
            return Err(FrameError::Truncated { got: bytes.len(), needed: HEADER_FIXED_BYTES });
        }
        let (key_form, slices) = read_start(bytes)?;
        let length = header_len(slices);
        let header = bytes.get(..length).ok_or(FrameError::Truncated { got: bytes.len(), needed: length })?;
        let (covered, crc) = header.split_at(length - 4);
        if crc32c::crc32c(covered) != u32_at(crc, 0) {
            return Err(FrameError::HeaderChecksum);
        }
        if header[HASH_AT + HASH_BYTES..TABLE_AT] != [0] {
            return Err(FrameError::Header("reserved bytes are not zero"));
        }
        Ok(Header {
            identity: IdentityDigest(array_at(header, 16)),
            hash: BlockHash(array_at(header, HASH_AT)),
            key_form,
            slices,
        })
    }

    /// Writes the header at the start of `frame`, for slices of these lengths and checksums.
    pub(super) fn write(&self, slice_bytes: &[u32], sums: &[u32], frame: &mut [u8]) {
        let length = header_len(slice_bytes.len());
        let header = &mut frame[..length];
        header[..4].copy_from_slice(&MAGIC);
        header[4..6].copy_from_slice(&VERSION.to_le_bytes());
        let length_field = u16::try_from(length).expect("SLICES_MAX keeps the header below 64 KiB");
        header[6..8].copy_from_slice(&length_field.to_le_bytes());
        header[8] = number(self.key_form);
        let count = u32::try_from(self.slices).expect("SLICES_MAX is far below 2^32");
        header[12..16].copy_from_slice(&count.to_le_bytes());
        header[16..32].copy_from_slice(&self.identity.0);
        header[HASH_AT..HASH_AT + HASH_BYTES].copy_from_slice(&self.hash.0);
        let (entries, _) = header[TABLE_AT..length - 4].as_chunks_mut::<SLICE_ENTRY_BYTES>();
        for (entry, (bytes, sum)) in entries.iter_mut().zip(slice_bytes.iter().zip(sums)) {
            entry[..4].copy_from_slice(&bytes.to_le_bytes());
            entry[4..].copy_from_slice(&sum.to_le_bytes());
        }
        let crc = crc32c::crc32c(&header[..length - 4]);
        header[length - 4..].copy_from_slice(&crc.to_le_bytes());
    }
}

/// One entry of the slice table, with the position of its slice in the frame.
pub(super) struct Entry {
    start: usize,
    bytes: usize,
    pub(super) crc: u32,
}

impl Entry {
    pub(super) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }
}

/// The slice table of a frame; empty if the bytes hold no whole header.
pub(super) fn entries(bytes: &[u8]) -> impl Iterator<Item = Entry> + '_ {
    let slices = slice_count_of(bytes).unwrap_or(0);
    let table = bytes.get(TABLE_AT..header_len(slices) - 4).unwrap_or(&[]);
    let (entries, _) = table.as_chunks::<SLICE_ENTRY_BYTES>();
    entries.iter().scan(header_len(slices), |start, entry| {
        let bytes = u32_at(entry, 0) as usize;
        let found = Entry { start: *start, bytes, crc: u32_at(entry, 4) };
        *start += bytes;
        Some(found)
    })
}

/// Length in bytes and checksum of a slice. The header must have been read and must have an entry
/// for it.
pub(super) fn entry_at(header: &[u8], layer: usize) -> (usize, u32) {
    let at = TABLE_AT + layer * SLICE_ENTRY_BYTES;
    (u32_at(header, at) as usize, u32_at(header, at + 4))
}

/// Payload bytes according to the table of a header that was read.
pub(super) fn table_payload_len(bytes: &[u8], slices: usize) -> Result<usize, FrameError> {
    let table = &bytes[TABLE_AT..header_len(slices) - 4];
    let (entries, _) = table.as_chunks::<SLICE_ENTRY_BYTES>();
    payload_len(entries.iter().map(|entry| u32_at(entry, 0)))
}

/// Sum of the slices, at most [`PAYLOAD_BYTES_MAX`].
pub(super) fn payload_len(slice_bytes: impl Iterator<Item = u32>) -> Result<usize, FrameError> {
    let sum: u64 = slice_bytes.map(u64::from).sum();
    usize::try_from(sum).ok().filter(|sum| *sum <= PAYLOAD_BYTES_MAX).ok_or(FrameError::TooLarge(sum))
}

/// The slice count, from 1 to [`SLICES_MAX`].
pub(super) fn slice_count(slices: usize) -> Result<usize, FrameError> {
    if (1..=SLICES_MAX).contains(&slices) { Ok(slices) } else { Err(FrameError::SliceCount(slices)) }
}

/// Header bytes of a frame with this many slices.
pub(super) fn header_len(slices: usize) -> usize {
    HEADER_FIXED_BYTES + slices * SLICE_ENTRY_BYTES
}

fn check_magic(start: &[u8]) -> Result<(), FrameError> {
    let there = start.len().min(MAGIC.len());
    if start[..there] == MAGIC[..there] { Ok(()) } else { Err(FrameError::Magic) }
}

fn slice_count_of(bytes: &[u8]) -> Option<usize> {
    (bytes.len() >= START_BYTES).then(|| read_start(bytes).ok().map(|(_, slices)| slices))?
}

/// Reads the first 16 bytes: key form and slice count.
fn read_start(start: &[u8]) -> Result<(KeyForm, usize), FrameError> {
    check_magic(start)?;
    let version = u16::from_le_bytes([start[4], start[5]]);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    if start[9..12] != [0; 3] {
        return Err(FrameError::Header("reserved bytes are not zero"));
    }
    let key_form = match start[8] {
        0 => KeyForm::Raw,
        1 => KeyForm::Rotated,
        _ => return Err(FrameError::Header("unknown key form")),
    };
    let slices = slice_count(u32_at(start, 12) as usize)?;
    if usize::from(u16::from_le_bytes([start[6], start[7]])) != header_len(slices) {
        return Err(FrameError::Header("length does not fit the slice count"));
    }
    Ok((key_form, slices))
}

fn number(form: KeyForm) -> u8 {
    match form {
        KeyForm::Raw => 0,
        KeyForm::Rotated => 1,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
