//! The block frame: a block's bytes with what is needed to trust them.
//!
//! Layout (little endian): magic `KVF1` · version u16 · header bytes u16 · key form u8 · three zero bytes ·
//! slice count u32 · identity 16 · hash 16 · per slice (bytes u32, CRC32C u32) · CRC32C of the header ·
//! then the slices, layer-major, one after another. The same bytes travel on the wire and lie on SSD.
//!
//! Reading has two steps on purpose: [`Frame::parse`] looks at the header alone, [`Frame::verify`] reads
//! every byte. The first is for whoever passes a frame on, the second for whoever uses it.
//! Not here: what to do about a bad frame (a miss, in `client/`), and where frames come from.

use std::fmt;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, IdentityDigest};
use kv_core::prefix;

mod arriving;
mod copy;
mod head;
mod head_last;
mod header;
mod unsettled;

pub use arriving::Arriving;
pub use copy::{Copies, copies, copy_crc32c, copy_from, crc32c};
pub use head::FrameHead;
pub use head_last::{HeadLast, SliceLayout};
pub use header::{Need, parse_header};
pub use unsettled::{Unsettled, settle};

use header::{Header, SLICE_ENTRY_BYTES, header_len};

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"KVF1";

/// Version of the layout above. A reader refuses every other one.
pub const VERSION: u16 = 1;

/// Bytes of a header without its slice table.
pub const HEADER_FIXED_BYTES: usize = 52;

/// Slices of one frame. The deepest public models have about 130 layers; a hybrid one may keep several
/// groups per layer. The header's length field (16 bits) would allow 8,185.
pub const SLICES_MAX: usize = 4096;

/// Payload of one frame in bytes: 512 tokens at 128 KiB a token (8 billion parameters, grouped queries,
/// 16 bit). Also what one hostile header can make a reader allocate.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// Encoded size of the largest frame in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_FIXED_BYTES + SLICES_MAX * SLICE_ENTRY_BYTES + PAYLOAD_BYTES_MAX;

/// Whether keys were stored before or after rotation (the wire's own numbers; see `kv_core::prefix`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyForm {
    /// Before RoPE: valid at any position. Number 0.
    Raw,
    /// After RoPE: valid only at its own position. Number 1.
    #[default]
    Rotated,
}

impl From<prefix::KeyForm> for KeyForm {
    fn from(form: prefix::KeyForm) -> KeyForm {
        match form {
            prefix::KeyForm::Raw => KeyForm::Raw,
            prefix::KeyForm::Rotated => KeyForm::Rotated,
        }
    }
}

impl fmt::Display for KeyForm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            KeyForm::Raw => "raw",
            KeyForm::Rotated => "rotated",
        })
    }
}

/// Why bytes are not a frame, or not the frame that was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than the header says (or than a header has).
    #[error("frame is cut off: {got} bytes of {needed}")]
    Cut {
        /// Bytes there are.
        got: usize,
        /// Bytes there should be.
        needed: usize,
    },
    /// More bytes than the header says.
    #[error("frame of {needed} bytes is followed by {extra} more")]
    Trailing {
        /// Bytes there should be.
        needed: usize,
        /// Bytes after them.
        extra: usize,
    },
    /// Not a frame.
    #[error("not a block frame, it does not begin with KVF1: check what sent it")]
    Magic,
    /// A layout this reader does not know.
    #[error("frame version {0} is not known here, expected {VERSION}: run the same release on both ends")]
    Version(u16),
    /// The header contradicts itself.
    #[error("frame header is inconsistent: {0}")]
    Header(&'static str),
    /// More slices than [`SLICES_MAX`], or none.
    #[error("frame has {0} slices, expected 1 to {SLICES_MAX}")]
    SliceCount(usize),
    /// More payload than [`PAYLOAD_BYTES_MAX`].
    #[error("frame payload has {0} bytes, the limit is {PAYLOAD_BYTES_MAX}: make blocks smaller")]
    TooLarge(u64),
    /// The header's checksum is wrong.
    #[error("frame header does not match its checksum")]
    HeaderChecksum,
    /// A slice's checksum is wrong.
    #[error("slice {layer} does not match its checksum")]
    SliceChecksum {
        /// Which.
        layer: usize,
    },
    /// The frame is of another identity.
    #[error("frame is of identity {got}, wanted {wanted}")]
    OtherIdentity {
        /// What it is.
        got: IdentityDigest,
        /// What was wanted.
        wanted: IdentityDigest,
    },
    /// The frame is of another block.
    #[error("frame is of block {got}, wanted {wanted}")]
    OtherBlock {
        /// What it is.
        got: BlockHash,
        /// What was wanted.
        wanted: BlockHash,
    },
    /// The frame is of the identity that was wanted, and says that its keys are in a form that is not this identity's.
    #[error(
        "frame has {got} keys, the model manifest of its identity says {wanted}: save with the manifest's key form"
    )]
    OtherKeyForm {
        /// What it is.
        got: KeyForm,
        /// What the manifest says.
        wanted: KeyForm,
    },
}

/// A parsed frame: header checked, payload not yet verified. Cloning shares the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The whole encoded frame.
    pub bytes: Bytes,
    /// Identity the bytes claim.
    pub identity: IdentityDigest,
    /// Hash the bytes claim.
    pub hash: BlockHash,
}

/// Encoded size in bytes of a frame with these slices.
#[must_use]
pub fn encoded_len(slice_bytes: &[u32]) -> usize {
    let payload: usize = slice_bytes.iter().map(|bytes| *bytes as usize).sum();
    header_len(slice_bytes.len()) + payload
}

/// Makes a frame of a payload that lies there as one piece, slices one after another.
///
/// # Errors
/// When a limit is exceeded, or the payload's length is not the sum of the slices.
pub fn seal(
    identity: IdentityDigest,
    hash: BlockHash,
    key_form: KeyForm,
    slice_bytes: &[u32],
    payload: &[u8],
) -> Result<Frame, FrameError> {
    let mut builder = FrameBuilder::new(identity, hash, key_form, slice_bytes)?;
    let (mut to, mut from) = (builder.payload_mut(), payload);
    if to.len() != from.len() {
        return Err(FrameError::Header("payload is not the sum of its slices"));
    }
    let sums: Vec<u32> = copies(to.len(), |copies| {
        let sums = slice_bytes.iter().map(|bytes| {
            let (slice, rest) = std::mem::take(&mut to).split_at_mut(*bytes as usize);
            let (source, left) = from.split_at(*bytes as usize);
            (to, from) = (rest, left);
            copies.crc32c(slice, source)
        });
        sums.collect()
    });
    Ok(builder.seal_with(&sums))
}

/// A frame being made in place: fill [`FrameBuilder::payload_mut`], then [`FrameBuilder::seal`].
#[derive(Debug)]
pub struct FrameBuilder {
    bytes: BytesMut,
    header: Header,
    slice_bytes: Vec<u32>,
}

impl FrameBuilder {
    /// Room for a frame with these slices, payload zeroed.
    ///
    /// # Errors
    /// When there are no slices, or a limit is exceeded.
    pub fn new(
        identity: IdentityDigest,
        hash: BlockHash,
        key_form: KeyForm,
        slice_bytes: &[u32],
    ) -> Result<FrameBuilder, FrameError> {
        let header = Header { identity, hash, key_form, slices: header::slice_count(slice_bytes.len())? };
        header::payload_len(slice_bytes.iter().copied())?;
        let bytes = BytesMut::zeroed(encoded_len(slice_bytes));
        Ok(FrameBuilder { bytes, header, slice_bytes: slice_bytes.to_vec() })
    }

    /// The payload, slices one after another.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[header_len(self.slice_bytes.len())..]
    }

    /// Writes header and checksums.
    #[must_use]
    pub fn seal(self) -> Frame {
        let mut payload = &self.bytes[header_len(self.slice_bytes.len())..];
        let sums = self.slice_bytes.iter().map(|bytes| {
            let (slice, rest) = payload.split_at(*bytes as usize);
            payload = rest;
            crc32c(slice)
        });
        let sums: Vec<u32> = sums.collect();
        self.seal_with(&sums)
    }

    /// Writes the header with the checksums of the slices, of which there is one each.
    fn seal_with(mut self, sums: &[u32]) -> Frame {
        self.header.write(&self.slice_bytes, sums, &mut self.bytes);
        Frame { bytes: self.bytes.freeze(), identity: self.header.identity, hash: self.header.hash }
    }
}

impl Frame {
    /// Reads a frame that is exactly `bytes`: checks the header and its checksum, not the payload.
    ///
    /// # Errors
    /// Names what is wrong; never panics, whatever the bytes.
    pub fn parse(bytes: Bytes) -> Result<Frame, FrameError> {
        let header = Header::read(&bytes)?;
        let needed = header_len(header.slices) + header::table_payload_len(&bytes, header.slices)?;
        match bytes.len() {
            got if got < needed => Err(FrameError::Cut { got, needed }),
            got if got > needed => Err(FrameError::Trailing { needed, extra: got - needed }),
            _ => Ok(Frame { bytes, identity: header.identity, hash: header.hash }),
        }
    }

    /// Reads every byte: this is block `hash` of `identity`, and no bit of it changed since sealing. Its key form is that of
    /// the identity's manifest because whoever stores it sees to that ([`settle`]); a reader knows no manifest.
    ///
    /// # Errors
    /// Names the first thing that differs.
    pub fn verify(&self, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
        self.verify_claims(identity, hash)?;
        self.verify_bytes()
    }

    /// The same while the whole frame is copied to `to`, so that its bytes come from memory once. After an error
    /// what is there is of no use.
    ///
    /// # Errors
    /// As [`Self::verify`]; and when `to` has another length than the frame.
    pub fn verify_into(
        &self,
        identity: IdentityDigest,
        hash: BlockHash,
        to: &mut [u8],
    ) -> Result<(), FrameError> {
        unsettled::settle_as(&self.bytes, to, |header| self.verify_header(header, identity, hash))
    }

    fn verify_claims(&self, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
        self.verify_header(&Header::read(&self.bytes)?, identity, hash)
    }

    /// What the bytes say counts, in `header`, not the fields beside them, which anyone may have set.
    fn verify_header(
        &self,
        header: &Header,
        identity: IdentityDigest,
        hash: BlockHash,
    ) -> Result<(), FrameError> {
        verify_ids(&[self.identity, header.identity], &[self.hash, header.hash], identity, hash)
    }

    /// Reads every byte, for whoever does not ask for a certain block (a rescan of stored frames).
    ///
    /// # Errors
    /// Names the first slice that differs from its checksum.
    pub fn verify_bytes(&self) -> Result<(), FrameError> {
        for (layer, entry) in header::entries(&self.bytes).enumerate() {
            let slice = self.bytes.get(entry.range()).ok_or(FrameError::SliceChecksum { layer })?;
            if crc32c(slice) != entry.crc {
                return Err(FrameError::SliceChecksum { layer });
            }
        }
        Ok(())
    }

    /// One layer slice, sharing the frame's memory; nothing when there is no such layer.
    #[must_use]
    pub fn slice(&self, layer: usize) -> Option<Bytes> {
        let range = header::entries(&self.bytes).nth(layer)?.range();
        (range.end <= self.bytes.len()).then(|| self.bytes.slice(range))
    }

    /// How many slices there are.
    #[must_use]
    pub fn slice_count(&self) -> usize {
        header::entries(&self.bytes).count()
    }

    /// Everything after the header, sharing the frame's memory.
    #[must_use]
    pub fn payload(&self) -> Bytes {
        self.bytes.slice(header_len(self.slice_count()).min(self.bytes.len())..)
    }

    /// In which form the keys are stored, by the frame's own word.
    #[must_use]
    pub fn key_form(&self) -> KeyForm {
        Header::read(&self.bytes).map(|header| header.key_form).unwrap_or_default()
    }
}

/// All that a frame says of itself is what was wanted.
fn verify_ids(
    identities: &[IdentityDigest],
    hashes: &[BlockHash],
    identity: IdentityDigest,
    hash: BlockHash,
) -> Result<(), FrameError> {
    if let Some(&got) = identities.iter().find(|got| **got != identity) {
        return Err(FrameError::OtherIdentity { got, wanted: identity });
    }
    if let Some(&got) = hashes.iter().find(|got| **got != hash) {
        return Err(FrameError::OtherBlock { got, wanted: hash });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
