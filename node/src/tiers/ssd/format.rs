//! What lies on the SSD: a superblock per file and a header per slot, each with its own CRC32C.
//!
//! All numbers are little endian. Payload checksums are the frame's own. Not here: reading and writing.

use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, Category, IdentityDigest, RequestKind, TenantId};

/// Unit of direct I/O in bytes; slots and the superblock are whole pages.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Where the frame starts in its slot, in bytes: our header before it.
pub(crate) const FRAME_AT: usize = 128;

const SUPER_MAGIC: [u8; 8] = *b"KVFSSD\0\x01";
const SUPER_VERSION: u32 = 1;
const SLOT_MAGIC: [u8; 4] = *b"KVS1";
const SLOT_CRC_AT: usize = 64;

/// Slot size for a frame of `frame_bytes`.
#[must_use]
pub fn slot_bytes(frame_bytes: usize) -> usize {
    (frame_bytes + FRAME_AT).next_multiple_of(PAGE_BYTES)
}

/// First page of a file.
pub(crate) fn superblock(slot_bytes: u32, identity: IdentityDigest) -> [u8; PAGE_BYTES] {
    let mut page = [0u8; PAGE_BYTES];
    page[..8].copy_from_slice(&SUPER_MAGIC);
    page[8..12].copy_from_slice(&SUPER_VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&slot_bytes.to_le_bytes());
    page[16..32].copy_from_slice(&identity.0);
    let crc = crc32c::crc32c(&page[..32]);
    page[32..36].copy_from_slice(&crc.to_le_bytes());
    page
}

/// Checks a superblock; the error is the reason for quarantine.
pub(crate) fn check_superblock(
    page: &[u8],
    slot_bytes: u32,
    identity: IdentityDigest,
) -> Result<(), &'static str> {
    if page.len() < 36 || page[..8] != SUPER_MAGIC {
        return Err("it does not begin with a kvfleet superblock");
    }
    if u32_at(page, 32) != crc32c::crc32c(&page[..32]) {
        return Err("its superblock does not match its checksum");
    }
    if u32_at(page, 8) != SUPER_VERSION {
        return Err("it was written by another version");
    }
    if u32_at(page, 12) != slot_bytes {
        return Err("its slot size is not the one in its name");
    }
    if page[16..32] != identity.0 {
        return Err(
            "it holds blocks of another identity: rename it back to serve it under its own model manifest",
        );
    }
    Ok(())
}

/// What a slot says about its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHeader {
    /// The block.
    pub hash: BlockHash,
    /// Hash before it.
    pub parent: Option<BlockHash>,
    /// Who saved it.
    pub tenant: TenantId,
    /// Category and offset; `bytes` is the encoded frame's length.
    pub traits: BlockTraits,
    /// Order of writing; of two slots with one hash the later counts.
    pub sequence: u64,
}

impl SlotHeader {
    pub(crate) fn write(&self, out: &mut [u8]) {
        out[..FRAME_AT].fill(0);
        out[..4].copy_from_slice(&SLOT_MAGIC);
        out[4] = self.traits.category.kind as u8;
        out[5] = self.traits.category.turn;
        out[6] = u8::from(self.parent.is_some());
        out[8..12].copy_from_slice(&self.tenant.0.to_le_bytes());
        out[12..16].copy_from_slice(&self.traits.offset_blocks.to_le_bytes());
        out[16..20].copy_from_slice(&self.traits.bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..48].copy_from_slice(&self.hash.0);
        out[48..64].copy_from_slice(&self.parent.unwrap_or_default().0);
        let crc = crc32c::crc32c(&out[..SLOT_CRC_AT]);
        out[SLOT_CRC_AT..SLOT_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads a slot's header. `Ok(None)` is a slot never written.
    pub(crate) fn read(slot: &[u8]) -> Result<Option<SlotHeader>, &'static str> {
        let Some(head) = slot.get(..FRAME_AT) else { return Err("slot is cut off") };
        if head.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if head[..4] != SLOT_MAGIC || u32_at(head, SLOT_CRC_AT) != crc32c::crc32c(&head[..SLOT_CRC_AT]) {
            return Err("slot header does not match its checksum");
        }
        let category = Category { kind: RequestKind::from_u8(head[4]), turn: head[5] };
        let hash = BlockHash(array_at(head, 32));
        let traits = BlockTraits {
            category,
            offset_blocks: u32_at(head, 12),
            bytes: u32_at(head, 16),
            is_partial: false,
            fingerprint: hash.fingerprint(),
        };
        Ok(Some(SlotHeader {
            hash,
            parent: (head[6] == 1).then(|| BlockHash(array_at(head, 48))),
            tenant: TenantId(u32_at(head, 8)),
            traits,
            sequence: u64::from_le_bytes(array_at(head, 24)),
        }))
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn header() -> SlotHeader {
        SlotHeader {
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
            sequence: 88,
        }
    }

    #[test]
    fn a_slot_header_reads_back() {
        let mut slot = [0xffu8; 256];
        header().write(&mut slot);
        assert_eq!(SlotHeader::read(&slot).unwrap(), Some(header()));
        let root = SlotHeader { parent: None, ..header() };
        root.write(&mut slot);
        assert_eq!(SlotHeader::read(&slot).unwrap(), Some(root));
    }

    #[test]
    fn every_flipped_bit_before_the_checksum_is_noticed() {
        let mut slot = [0u8; FRAME_AT];
        header().write(&mut slot);
        for bit in 0..(SLOT_CRC_AT + 4) * 8 {
            slot[bit / 8] ^= 1 << (bit % 8);
            assert!(SlotHeader::read(&slot).is_err(), "bit {bit}");
            slot[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn an_unwritten_slot_is_not_damage() {
        assert_eq!(SlotHeader::read(&[0u8; PAGE_BYTES]), Ok(None));
        assert!(SlotHeader::read(&[0u8; 10]).is_err());
    }

    #[test]
    fn a_superblock_says_why_it_is_refused() {
        let identity = IdentityDigest([5; 16]);
        let page = superblock(8192, identity);
        assert_eq!(check_superblock(&page, 8192, identity), Ok(()));
        assert!(check_superblock(&page, 4096, identity).unwrap_err().contains("slot size"));
        assert!(check_superblock(&page, 8192, IdentityDigest([6; 16])).unwrap_err().contains("identity"));
        assert!(check_superblock(&page[..20], 8192, identity).is_err());
        let mut torn = page;
        torn[13] ^= 1;
        assert!(check_superblock(&torn, 8192, identity).unwrap_err().contains("checksum"));
    }

    #[test]
    fn slots_hold_header_and_frame_in_whole_pages() {
        assert_eq!(slot_bytes(1), 4096);
        assert_eq!(slot_bytes(4096 - FRAME_AT), 4096);
        assert_eq!(slot_bytes(4096 - FRAME_AT + 1), 8192);
    }
}
