//! The format on SSD: file head, segment head, records, footer.
//!
//! All numbers are little-endian, and each part has its own CRC32C. Payload checksums are the
//! frame's own. `docs/adr/0022-ssd-segments.md` shows the whole layout. Not here: reading and
//! writing.

use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, Category, Generation, IdentityDigest, RequestKind, TenantId};

/// Unit of direct I/O in bytes; every part begins at a multiple of it.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Length of a record's trailer in bytes. It describes the block, and follows the frame so that the
/// frame begins on a page.
pub(crate) const TRAILER_BYTES: usize = 128;

/// Length of a footer entry in bytes, and of the footer's trailer.
pub(crate) const ENTRY_BYTES: usize = 72;

/// Offset of the first segment, behind the head of the file.
pub(crate) const SEGMENTS_AT: u64 = 64 << 10;

const FILE_MAGIC: [u8; 8] = *b"KVFSEG\0\x01";
/// 2: block hashes of nineteen bytes.
const FILE_VERSION: u32 = 2;
const HEAD_MAGIC: [u8; 4] = *b"KVSH";
const RECORD_MAGIC: [u8; 4] = *b"KVSR";
const FOOTER_MAGIC: [u8; 4] = *b"KVSF";
const TRAILER_CRC_AT: usize = 88;
const HEAD_CRC_AT: usize = 32;
const FOOTER_CRC_AT: usize = 24;

/// Pages of the record for a frame of `frame_bytes`.
pub(crate) fn record_pages(frame_bytes: usize) -> u32 {
    u32::try_from((frame_bytes + TRAILER_BYTES).div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// Space for a frame of `frame_bytes`, in bytes.
#[must_use]
pub fn record_bytes(frame_bytes: usize) -> usize {
    (frame_bytes + TRAILER_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Pages of a footer with `records` records.
pub(crate) fn footer_pages(records: u32) -> u32 {
    let bytes = (u64::from(records) + 1) * ENTRY_BYTES as u64;
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).unwrap_or(u32::MAX)
}

/// The first page of a file.
pub(crate) fn file_head(segment_bytes: u32, identity: IdentityDigest) -> [u8; PAGE_BYTES] {
    let mut page = [0u8; PAGE_BYTES];
    page[..8].copy_from_slice(&FILE_MAGIC);
    page[8..12].copy_from_slice(&FILE_VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&segment_bytes.to_le_bytes());
    page[16..32].copy_from_slice(&identity.0);
    let crc = crc32c::crc32c(&page[..32]);
    page[32..36].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Checks the head of a file and returns its segment size; the error is the reason to quarantine
/// it.
pub(crate) fn check_file_head(page: &[u8], identity: IdentityDigest) -> Result<u32, &'static str> {
    if page.len() < 36 || page[..8] != FILE_MAGIC {
        return Err("it does not begin with a kvfleet superblock");
    }
    if u32_at(page, 32) != crc32c::crc32c(&page[..32]) {
        return Err("its superblock does not match its checksum");
    }
    if u32_at(page, 8) != FILE_VERSION {
        return Err(
            "another version of this format wrote it: rename it back to serve it with a release of that version",
        );
    }
    let segment_bytes = u32_at(page, 12);
    if segment_bytes < 4 * PAGE_BYTES as u32 || !(segment_bytes as usize).is_multiple_of(PAGE_BYTES) {
        return Err("its segments are not whole pages");
    }
    if page[16..32] != identity.0 {
        return Err(
            "it holds blocks of another identity: rename it back to serve it under its own model manifest",
        );
    }
    Ok(segment_bytes)
}

/// One use of a segment. Each use has a new random nonce, so that data of an earlier use, or a
/// payload forged to look like a record, is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHead {
    pub(crate) segment: u32,
    pub(crate) nonce: u64,
}

impl SegmentHead {
    pub(crate) fn page(self) -> [u8; PAGE_BYTES] {
        let mut page = [0u8; PAGE_BYTES];
        page[..4].copy_from_slice(&HEAD_MAGIC);
        page[4..8].copy_from_slice(&self.segment.to_le_bytes());
        page[8..16].copy_from_slice(&self.nonce.to_le_bytes());
        let crc = crc32c::crc32c(&page[..HEAD_CRC_AT]);
        page[HEAD_CRC_AT..HEAD_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads a segment's first page. `Ok(None)` is a segment never used.
    pub(crate) fn read(page: &[u8], segment: u32) -> Result<Option<SegmentHead>, &'static str> {
        let Some(head) = page.get(..HEAD_CRC_AT + 4) else { return Err("segment is cut off") };
        if head.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if head[..4] != HEAD_MAGIC || u32_at(head, HEAD_CRC_AT) != crc32c::crc32c(&head[..HEAD_CRC_AT]) {
            return Err("segment head does not match its checksum");
        }
        if u32_at(head, 4) != segment {
            return Err("segment head belongs to another segment");
        }
        Ok(Some(SegmentHead { segment, nonce: u64_at(head, 8) }))
    }
}

/// Metadata of a record's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Hash of the block.
    pub hash: BlockHash,
    /// Hash of the preceding block.
    pub parent: Option<BlockHash>,
    /// Tenant that saved it.
    pub tenant: TenantId,
    /// Category and offset; `bytes` is the encoded frame's length.
    pub traits: BlockTraits,
    /// Generation of the weights that computed it; its frame has the matching identity.
    pub generation: Generation,
    /// Write order; of two records with one hash the later one is valid.
    pub sequence: u64,
}

/// Position of a record, stored in it to detect a misdirected write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordPosition {
    pub(crate) head: SegmentHead,
    /// Page in the segment.
    pub(crate) page: u32,
}

impl RecordHeader {
    /// Writes the trailer of the record at `position`.
    pub(crate) fn write(&self, place: RecordPosition, out: &mut [u8]) {
        out[..TRAILER_BYTES].fill(0);
        out[..4].copy_from_slice(&RECORD_MAGIC);
        out[4] = self.traits.category.kind as u8;
        out[5] = self.traits.category.conversation_turn;
        out[6] = u8::from(self.parent.is_some());
        out[8..12].copy_from_slice(&self.tenant.0.to_le_bytes());
        out[12..16].copy_from_slice(&self.traits.offset_blocks.to_le_bytes());
        out[16..20].copy_from_slice(&self.traits.bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.generation.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..51].copy_from_slice(&self.hash.0);
        out[51..70].copy_from_slice(&self.parent.unwrap_or_default().0);
        out[72..80].copy_from_slice(&place.head.nonce.to_le_bytes());
        out[80..84].copy_from_slice(&place.head.segment.to_le_bytes());
        out[84..88].copy_from_slice(&place.page.to_le_bytes());
        let crc = crc32c::crc32c(&out[..TRAILER_CRC_AT]);
        out[TRAILER_CRC_AT..TRAILER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads the trailer of the record at `position`.
    pub(crate) fn read(trailer: &[u8], place: RecordPosition) -> Result<RecordHeader, &'static str> {
        let Some(head) = trailer.get(..TRAILER_BYTES) else { return Err("record is cut off") };
        if head[..4] != RECORD_MAGIC
            || u32_at(head, TRAILER_CRC_AT) != crc32c::crc32c(&head[..TRAILER_CRC_AT])
        {
            return Err("record trailer does not match its checksum");
        }
        let found = (u64_at(head, 72), u32_at(head, 80), u32_at(head, 84));
        if found != (place.head.nonce, place.head.segment, place.page) {
            return Err("record belongs to another use or position");
        }
        let numbers = [u32_at(head, 8), u32_at(head, 12), u32_at(head, 16), u32_at(head, 20)];
        Ok(decode_header(head, 4, 32, 51, numbers, u64_at(head, 24)))
    }
}

/// Decodes the fields from either layout; `numbers` are tenant, offset, length and generation.
fn decode_header(
    bytes: &[u8],
    kind_at: usize,
    hash_at: usize,
    parent_at: usize,
    [tenant, offset_blocks, frame_bytes, generation]: [u32; 4],
    sequence: u64,
) -> RecordHeader {
    let category =
        Category { kind: RequestKind::from_u8(bytes[kind_at]), conversation_turn: bytes[kind_at + 1] };
    let hash = BlockHash(array_at(bytes, hash_at));
    let fingerprint = hash.fingerprint();
    let traits = BlockTraits { category, offset_blocks, bytes: frame_bytes, is_partial: false, fingerprint };
    let parent = (bytes[kind_at + 2] == 1).then(|| BlockHash(array_at(bytes, parent_at)));
    let (tenant, generation) = (TenantId(tenant), Generation(generation));
    RecordHeader { hash, parent, tenant, traits, generation, sequence }
}

/// An entry of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FooterEntry {
    pub(crate) header: RecordHeader,
    /// Page in the segment.
    pub(crate) page: u32,
}

/// The pages of a footer, which are the last ones of their segment.
pub(crate) fn footer(head: SegmentHead, entries: &[FooterEntry]) -> Vec<u8> {
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    let mut bytes = vec![0u8; footer_pages(count) as usize * PAGE_BYTES];
    let (lines, _) = bytes.as_chunks_mut::<ENTRY_BYTES>();
    for (line, entry) in lines.iter_mut().zip(entries) {
        let header = entry.header;
        line[..19].copy_from_slice(&header.hash.0);
        line[19..38].copy_from_slice(&header.parent.unwrap_or_default().0);
        line[38] = header.traits.category.kind as u8;
        line[39] = header.traits.category.conversation_turn;
        line[40] = u8::from(header.parent.is_some());
        line[44..48].copy_from_slice(&header.tenant.0.to_le_bytes());
        line[48..56].copy_from_slice(&header.sequence.to_le_bytes());
        line[56..60].copy_from_slice(&header.traits.offset_blocks.to_le_bytes());
        line[60..64].copy_from_slice(&header.traits.bytes.to_le_bytes());
        line[64..68].copy_from_slice(&entry.page.to_le_bytes());
        line[68..72].copy_from_slice(&header.generation.0.to_le_bytes());
    }
    let table = crc32c::crc32c(&bytes[..entries.len() * ENTRY_BYTES]);
    let at = bytes.len() - ENTRY_BYTES;
    let end = &mut bytes[at..];
    end[..4].copy_from_slice(&FOOTER_MAGIC);
    end[4..8].copy_from_slice(&head.segment.to_le_bytes());
    end[8..16].copy_from_slice(&head.nonce.to_le_bytes());
    end[16..20].copy_from_slice(&count.to_le_bytes());
    end[20..24].copy_from_slice(&table.to_le_bytes());
    let crc = crc32c::crc32c(&end[..FOOTER_CRC_AT]);
    end[FOOTER_CRC_AT..FOOTER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// The trailer of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FooterTrailer {
    pub(crate) head: SegmentHead,
    pub(crate) records: u32,
    table_crc: u32,
}

impl FooterTrailer {
    /// Reads it from the last page of a segment; `None` if that is not a footer of this segment.
    pub(crate) fn read(page: &[u8], segment: u32, segment_pages: u32) -> Option<FooterTrailer> {
        let end = page.get(page.len().checked_sub(ENTRY_BYTES)?..)?;
        let whole = end[..4] == FOOTER_MAGIC
            && u32_at(end, FOOTER_CRC_AT) == crc32c::crc32c(&end[..FOOTER_CRC_AT])
            && u32_at(end, 4) == segment;
        let head = SegmentHead { segment, nonce: u64_at(end, 8) };
        let found = FooterTrailer { head, records: u32_at(end, 16), table_crc: u32_at(end, 20) };
        (whole && found.records < segment_pages && footer_pages(found.records) < segment_pages)
            .then_some(found)
    }

    /// The entries in the footer's pages; `None` if their checksum differs.
    pub(crate) fn entries(self, pages: &[u8]) -> Option<Vec<FooterEntry>> {
        let table = pages.get(..self.records as usize * ENTRY_BYTES)?;
        if crc32c::crc32c(table) != self.table_crc {
            return None;
        }
        let (lines, _) = table.as_chunks::<ENTRY_BYTES>();
        let entry = |line: &[u8; ENTRY_BYTES]| {
            let sequence = u64_at(line, 48);
            let numbers = [u32_at(line, 44), u32_at(line, 56), u32_at(line, 60), u32_at(line, 68)];
            let header = decode_header(line, 38, 0, 19, numbers, sequence);
            FooterEntry { header, page: u32_at(line, 64) }
        };
        Some(lines.iter().map(entry).collect())
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0u8; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const HEAD: SegmentHead = SegmentHead { segment: 3, nonce: 0x1234_5678_9abc_def0 };
    const POSITION: RecordPosition = RecordPosition { head: HEAD, page: 17 };

    fn header() -> RecordHeader {
        RecordHeader {
            hash: BlockHash([3; _]),
            parent: Some(BlockHash([2; _])),
            tenant: TenantId(9),
            traits: BlockTraits {
                category: Category { kind: RequestKind::Agent, conversation_turn: 4 },
                offset_blocks: 17,
                bytes: 1234,
                is_partial: false,
                fingerprint: BlockHash([3; _]).fingerprint(),
            },
            generation: Generation(0x0102_0304),
            sequence: 88,
        }
    }

    #[test]
    fn trailer_is_valid_only_at_its_position() {
        let mut bytes = [0xffu8; TRAILER_BYTES];
        for header in [header(), RecordHeader { parent: None, ..header() }] {
            header.write(POSITION, &mut bytes);
            assert_eq!(RecordHeader::read(&bytes, POSITION), Ok(header));
        }
        let other = SegmentHead { nonce: 1, ..HEAD };
        for place in [RecordPosition { page: 18, ..POSITION }, RecordPosition { head: other, ..POSITION }] {
            assert!(RecordHeader::read(&bytes, place).unwrap_err().contains("another"));
        }
        assert!(RecordHeader::read(&bytes[..50], POSITION).is_err());
    }

    #[test]
    fn bit_flips_in_trailer_and_head_are_detected() {
        let mut bytes = [0u8; TRAILER_BYTES];
        header().write(POSITION, &mut bytes);
        for bit in 0..(TRAILER_CRC_AT + 4) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(RecordHeader::read(&bytes, POSITION).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let mut page = HEAD.page();
        for bit in 0..(HEAD_CRC_AT + 4) * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHead::read(&page, 3).is_err(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(SegmentHead::read(&page, 3), Ok(Some(HEAD)));
        assert_eq!(SegmentHead::read(&[0; PAGE_BYTES], 3), Ok(None));
        assert!(SegmentHead::read(&page, 4).is_err(), "a misdirected write");
    }

    #[test]
    fn footer_round_trips_and_bit_flips_are_detected() {
        let entry =
            |page: u32| FooterEntry { header: RecordHeader { sequence: u64::from(page), ..header() }, page };
        let entries: Vec<FooterEntry> = (1..=70).map(entry).collect();
        let mut bytes = footer(HEAD, &entries);
        assert_eq!(bytes.len(), 2 * PAGE_BYTES);
        let read = |bytes: &[u8]| {
            let end = FooterTrailer::read(&bytes[PAGE_BYTES..], 3, 1024)?;
            (end.head == HEAD).then_some(end)?.entries(bytes)
        };
        assert_eq!(read(&bytes).unwrap(), entries);
        let trailer_at = 2 * PAGE_BYTES - ENTRY_BYTES;
        let covered = (0..70 * ENTRY_BYTES).chain(trailer_at..trailer_at + FOOTER_CRC_AT + 4);
        for byte in covered {
            bytes[byte] ^= 1;
            assert_eq!(read(&bytes), None, "byte {byte}");
            bytes[byte] ^= 1;
        }
        assert!(footer(HEAD, &[]).len() == PAGE_BYTES);
    }

    #[test]
    fn rejected_file_head_names_the_reason() {
        let identity = IdentityDigest([5; 16]);
        let page = file_head(65536, identity);
        assert_eq!(check_file_head(&page, identity), Ok(65536));
        assert!(check_file_head(&page, IdentityDigest([6; 16])).unwrap_err().contains("identity"));
        assert!(check_file_head(&page[..20], identity).is_err());
        let mut torn = page;
        torn[13] ^= 1;
        assert!(check_file_head(&torn, identity).unwrap_err().contains("checksum"));
        assert!(check_file_head(&file_head(100, identity), identity).unwrap_err().contains("pages"));
    }

    #[test]
    fn records_hold_frame_and_trailer_in_whole_pages() {
        assert_eq!(record_bytes(1), 4096);
        assert_eq!(record_bytes(4096 - TRAILER_BYTES), 4096);
        assert_eq!(record_bytes(4096 - TRAILER_BYTES + 1), 8192);
        assert_eq!(record_pages(8192 - TRAILER_BYTES), 2);
        assert_eq!((footer_pages(0), footer_pages(55), footer_pages(56)), (1, 1, 2));
    }
}
