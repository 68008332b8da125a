//! What lies on the SSD, byte by byte: the head of the file, the head of a segment, records, the footer.
//!
//! All numbers are little endian, and each part has its own CRC32C. Payload checksums are the frame's own.
//! The whole picture is in `docs/adr/0022-ssd-segments.md`. Not here: reading and writing.

use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, Category, Generation, IdentityDigest, RequestKind, TenantId};

/// Unit of direct I/O in bytes; everything begins at a multiple of it.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Last bytes of a record: what its block is, behind the frame so that the frame begins on a page.
pub(crate) const TRAILER_BYTES: usize = 128;

/// A line of a footer's table in bytes, and the size of the line that ends it.
pub(crate) const ENTRY_BYTES: usize = 64;

/// Where the first segment begins: behind the head of the file.
pub(crate) const SEGMENTS_AT: u64 = 64 << 10;

const FILE_MAGIC: [u8; 8] = *b"KVFSEG\0\x01";
const FILE_VERSION: u32 = 1;
const HEAD_MAGIC: [u8; 4] = *b"KVSH";
const RECORD_MAGIC: [u8; 4] = *b"KVSR";
const FOOTER_MAGIC: [u8; 4] = *b"KVSF";
const TRAILER_CRC_AT: usize = 80;
const HEAD_CRC_AT: usize = 32;
const FOOTER_CRC_AT: usize = 24;

/// Pages of the record of a frame of `frame_bytes`.
pub(crate) fn record_pages(frame_bytes: usize) -> u32 {
    u32::try_from((frame_bytes + TRAILER_BYTES).div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// Room that a frame of `frame_bytes` takes, in bytes.
#[must_use]
pub fn record_bytes(frame_bytes: usize) -> usize {
    (frame_bytes + TRAILER_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Pages of a footer with so many records.
pub(crate) fn footer_pages(records: u32) -> u32 {
    let bytes = (u64::from(records) + 1) * ENTRY_BYTES as u64;
    u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).unwrap_or(u32::MAX)
}

/// First page of a file.
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

/// Checks the head of a file and gives its segment size; the error is the reason for setting it aside.
pub(crate) fn check_file_head(page: &[u8], identity: IdentityDigest) -> Result<u32, &'static str> {
    if page.len() < 36 || page[..8] != FILE_MAGIC {
        return Err("it does not begin with a kvfleet superblock");
    }
    if u32_at(page, 32) != crc32c::crc32c(&page[..32]) {
        return Err("its superblock does not match its checksum");
    }
    if u32_at(page, 8) != FILE_VERSION {
        return Err(
            "another version of this format wrote it: rename it back to serve it by a release of that version",
        );
    }
    let segment_bytes = u32_at(page, 12);
    if segment_bytes < 4 * PAGE_BYTES as u32 || !(segment_bytes as usize).is_multiple_of(PAGE_BYTES) {
        return Err("its segments are no whole pages");
    }
    if page[16..32] != identity.0 {
        return Err(
            "it holds blocks of another identity: rename it back to serve it under its own model manifest",
        );
    }
    Ok(segment_bytes)
}

/// One use of a segment. The nonce is drawn anew each time, so that nothing of an earlier use, and no
/// payload that somebody wrote to look like a record, passes for one of this use.
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
            return Err("segment head is of another segment");
        }
        Ok(Some(SegmentHead { segment, nonce: u64_at(head, 8) }))
    }
}

/// What a record says about its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The block.
    pub hash: BlockHash,
    /// Hash before it.
    pub parent: Option<BlockHash>,
    /// Who saved it.
    pub tenant: TenantId,
    /// Category and offset; `bytes` is the encoded frame's length.
    pub traits: BlockTraits,
    /// The weights it was computed with; its frame has the identity of these.
    pub generation: Generation,
    /// Order of writing; of two records with one hash the later counts.
    pub sequence: u64,
}

/// Where a record lies, written into it so that a misdirected write is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) head: SegmentHead,
    /// Page in the segment.
    pub(crate) page: u32,
}

impl RecordHeader {
    /// Writes the trailer of the record at `place`.
    pub(crate) fn write(&self, place: Place, out: &mut [u8]) {
        out[..TRAILER_BYTES].fill(0);
        out[..4].copy_from_slice(&RECORD_MAGIC);
        out[4] = self.traits.category.kind as u8;
        out[5] = self.traits.category.turn;
        out[6] = u8::from(self.parent.is_some());
        out[8..12].copy_from_slice(&self.tenant.0.to_le_bytes());
        out[12..16].copy_from_slice(&self.traits.offset_blocks.to_le_bytes());
        out[16..20].copy_from_slice(&self.traits.bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.generation.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..48].copy_from_slice(&self.hash.0);
        out[48..64].copy_from_slice(&self.parent.unwrap_or_default().0);
        out[64..72].copy_from_slice(&place.head.nonce.to_le_bytes());
        out[72..76].copy_from_slice(&place.head.segment.to_le_bytes());
        out[76..80].copy_from_slice(&place.page.to_le_bytes());
        let crc = crc32c::crc32c(&out[..TRAILER_CRC_AT]);
        out[TRAILER_CRC_AT..TRAILER_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads the trailer of the record at `place`.
    pub(crate) fn read(trailer: &[u8], place: Place) -> Result<RecordHeader, &'static str> {
        let Some(head) = trailer.get(..TRAILER_BYTES) else { return Err("record is cut off") };
        if head[..4] != RECORD_MAGIC
            || u32_at(head, TRAILER_CRC_AT) != crc32c::crc32c(&head[..TRAILER_CRC_AT])
        {
            return Err("record trailer does not match its checksum");
        }
        let found = (u64_at(head, 64), u32_at(head, 72), u32_at(head, 76));
        if found != (place.head.nonce, place.head.segment, place.page) {
            return Err("record is of another time or place");
        }
        let numbers = [u32_at(head, 8), u32_at(head, 12), u32_at(head, 16), u32_at(head, 20)];
        Ok(header_of(head, 4, 32, 48, numbers, u64_at(head, 24)))
    }
}

/// Two layouts of the same fields; `numbers` are tenant, offset, length and generation.
fn header_of(
    bytes: &[u8],
    kind_at: usize,
    hash_at: usize,
    parent_at: usize,
    [tenant, offset_blocks, frame_bytes, generation]: [u32; 4],
    sequence: u64,
) -> RecordHeader {
    let category = Category { kind: RequestKind::from_u8(bytes[kind_at]), turn: bytes[kind_at + 1] };
    let hash = BlockHash(array_at(bytes, hash_at));
    let fingerprint = hash.fingerprint();
    let traits = BlockTraits { category, offset_blocks, bytes: frame_bytes, is_partial: false, fingerprint };
    let parent = (bytes[kind_at + 2] == 1).then(|| BlockHash(array_at(bytes, parent_at)));
    let (tenant, generation) = (TenantId(tenant), Generation(generation));
    RecordHeader { hash, parent, tenant, traits, generation, sequence }
}

/// A line of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) header: RecordHeader,
    /// Page in the segment.
    pub(crate) page: u32,
}

/// The pages of a footer, which are the last ones of their segment.
pub(crate) fn footer(head: SegmentHead, entries: &[Entry]) -> Vec<u8> {
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    let mut bytes = vec![0u8; footer_pages(count) as usize * PAGE_BYTES];
    let (lines, _) = bytes.as_chunks_mut::<ENTRY_BYTES>();
    for (line, entry) in lines.iter_mut().zip(entries) {
        let header = entry.header;
        line[..16].copy_from_slice(&header.hash.0);
        line[16..32].copy_from_slice(&header.parent.unwrap_or_default().0);
        line[32..40].copy_from_slice(&header.sequence.to_le_bytes());
        line[40..44].copy_from_slice(&header.tenant.0.to_le_bytes());
        line[44..48].copy_from_slice(&header.traits.offset_blocks.to_le_bytes());
        line[48..52].copy_from_slice(&header.traits.bytes.to_le_bytes());
        line[52..56].copy_from_slice(&entry.page.to_le_bytes());
        line[56] = header.traits.category.kind as u8;
        line[57] = header.traits.category.turn;
        line[58] = u8::from(header.parent.is_some());
        line[60..64].copy_from_slice(&header.generation.0.to_le_bytes());
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

/// The last line of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FooterEnd {
    pub(crate) head: SegmentHead,
    pub(crate) records: u32,
    table_crc: u32,
}

impl FooterEnd {
    /// Reads it from the last page of a segment; nothing when there is none of this segment.
    pub(crate) fn read(page: &[u8], segment: u32, segment_pages: u32) -> Option<FooterEnd> {
        let end = page.get(page.len().checked_sub(ENTRY_BYTES)?..)?;
        let whole = end[..4] == FOOTER_MAGIC
            && u32_at(end, FOOTER_CRC_AT) == crc32c::crc32c(&end[..FOOTER_CRC_AT])
            && u32_at(end, 4) == segment;
        let head = SegmentHead { segment, nonce: u64_at(end, 8) };
        let found = FooterEnd { head, records: u32_at(end, 16), table_crc: u32_at(end, 20) };
        (whole && found.records < segment_pages && footer_pages(found.records) < segment_pages)
            .then_some(found)
    }

    /// The lines of the footer whose pages these are.
    pub(crate) fn entries(self, pages: &[u8]) -> Option<Vec<Entry>> {
        let table = pages.get(..self.records as usize * ENTRY_BYTES)?;
        if crc32c::crc32c(table) != self.table_crc {
            return None;
        }
        let (lines, _) = table.as_chunks::<ENTRY_BYTES>();
        let entry = |line: &[u8; ENTRY_BYTES]| {
            let sequence = u64_at(line, 32);
            let numbers = [u32_at(line, 40), u32_at(line, 44), u32_at(line, 48), u32_at(line, 60)];
            let header = header_of(line, 56, 0, 16, numbers, sequence);
            Entry { header, page: u32_at(line, 52) }
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
    const PLACE: Place = Place { head: HEAD, page: 17 };

    fn header() -> RecordHeader {
        RecordHeader {
            hash: BlockHash([3; 16]),
            parent: Some(BlockHash([2; 16])),
            tenant: TenantId(9),
            traits: BlockTraits {
                category: Category { kind: RequestKind::Agent, turn: 4 },
                offset_blocks: 17,
                bytes: 1234,
                is_partial: false,
                fingerprint: BlockHash([3; 16]).fingerprint(),
            },
            generation: Generation(0x0102_0304),
            sequence: 88,
        }
    }

    #[test]
    fn a_trailer_reads_back_at_its_place_only() {
        let mut bytes = [0xffu8; TRAILER_BYTES];
        for header in [header(), RecordHeader { parent: None, ..header() }] {
            header.write(PLACE, &mut bytes);
            assert_eq!(RecordHeader::read(&bytes, PLACE), Ok(header));
        }
        let other = SegmentHead { nonce: 1, ..HEAD };
        for place in [Place { page: 18, ..PLACE }, Place { head: other, ..PLACE }] {
            assert!(RecordHeader::read(&bytes, place).unwrap_err().contains("another"));
        }
        assert!(RecordHeader::read(&bytes[..50], PLACE).is_err());
    }

    #[test]
    fn every_flipped_bit_of_a_trailer_or_a_head_is_noticed() {
        let mut bytes = [0u8; TRAILER_BYTES];
        header().write(PLACE, &mut bytes);
        for bit in 0..(TRAILER_CRC_AT + 4) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(RecordHeader::read(&bytes, PLACE).is_err(), "bit {bit}");
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
    fn a_footer_reads_back_and_every_flipped_bit_is_noticed() {
        let entry =
            |page: u32| Entry { header: RecordHeader { sequence: u64::from(page), ..header() }, page };
        let entries: Vec<Entry> = (1..=70).map(entry).collect();
        let mut bytes = footer(HEAD, &entries);
        assert_eq!(bytes.len(), 2 * PAGE_BYTES);
        let read = |bytes: &[u8]| {
            let end = FooterEnd::read(&bytes[PAGE_BYTES..], 3, 1024)?;
            (end.head == HEAD).then_some(end)?.entries(bytes)
        };
        assert_eq!(read(&bytes).unwrap(), entries);
        let covered = (0..70 * ENTRY_BYTES).chain(2 * PAGE_BYTES - ENTRY_BYTES..2 * PAGE_BYTES - 36);
        for byte in covered {
            bytes[byte] ^= 1;
            assert_eq!(read(&bytes), None, "byte {byte}");
            bytes[byte] ^= 1;
        }
        assert!(footer(HEAD, &[]).len() == PAGE_BYTES);
    }

    #[test]
    fn the_head_of_a_file_says_why_it_is_refused() {
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
        assert_eq!((footer_pages(0), footer_pages(63), footer_pages(64)), (1, 1, 2));
    }
}
