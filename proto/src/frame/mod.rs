//! The block frame: a block's bytes together with the header that makes them verifiable.
//!
//! Layout, little endian. Header: magic `KVF1` · version u16 · header bytes u16 · key form u8 ·
//! three zero bytes · slice count u32 · identity 16 · hash 19 · a zero byte. Then for each slice: bytes
//! u32, CRC32C u32. Then the CRC32C of all that, and the slices, layer-major. The wire and the SSD hold
//! the same bytes.
//!
//! Reading has two steps: [`Frame::parse`] checks the header alone, [`Frame::verify`] reads every
//! byte. A forwarder needs the first, a consumer the second. The client handles a bad frame as a
//! miss.

use std::fmt;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, IdentityDigest};
use kv_core::prefix;

mod head;
mod header;
mod slices_first;
mod streaming_verifier;
mod volatile;

pub use kvfleet_cpu::{CopyBatch, copy_batch, copy_crc32c, crc32c};

pub use head::FrameHead;
pub use header::{BytesNeeded, parse_header};
pub use slices_first::{SliceLayout, SlicesFirstFrame};
pub use streaming_verifier::StreamingVerifier;
pub use volatile::{VolatileBytes, copy_and_verify};

use header::{Header, SLICE_ENTRY_BYTES, header_len};

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"KVF1";

/// Version of the layout above. Readers reject every other version.
pub const VERSION: u16 = 2;

/// Bytes of a header without its slice table.
pub const HEADER_FIXED_BYTES: usize = 56;

/// Most slices of one frame. The deepest public models have about 130 layers; a hybrid model may
/// keep several groups per layer. The header's 16-bit length field would allow 8,185.
pub const SLICES_MAX: usize = 4096;

/// Most payload bytes of one frame: 512 tokens at 128 KiB a token (8 billion parameters, grouped
/// queries, 16 bit). Also the most that one hostile header can make a reader allocate.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// Encoded size of the largest frame in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_FIXED_BYTES + SLICES_MAX * SLICE_ENTRY_BYTES + PAYLOAD_BYTES_MAX;

/// Whether keys were stored before or after RoPE, with the numbers of the wire (see
/// `kv_core::prefix`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyForm {
    /// Before RoPE: valid at any position. Wire number 0.
    Raw,
    /// After RoPE: valid at its own position only. Wire number 1.
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

/// Why bytes are not a frame, or not the requested frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than the header states, or than a header needs.
    #[error("frame is cut off: {got} bytes of {needed}")]
    Truncated {
        /// Bytes present.
        got: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// More bytes than the header states.
    #[error("frame of {needed} bytes is followed by {extra} more")]
    Trailing {
        /// Bytes needed.
        needed: usize,
        /// Bytes after the frame.
        extra: usize,
    },
    /// Not a frame.
    #[error("not a block frame, it does not begin with KVF1: check what sent it")]
    Magic,
    /// A layout version unknown to this reader.
    #[error("frame version {0} is not known here, expected {VERSION}: run the same release on both ends")]
    Version(u16),
    /// The header is inconsistent.
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
        /// Index of the slice.
        layer: usize,
    },
    /// The frame has another identity.
    #[error("frame is of identity {got}, wanted {wanted}")]
    IdentityMismatch {
        /// Identity of the frame.
        got: IdentityDigest,
        /// Identity requested.
        wanted: IdentityDigest,
    },
    /// The frame holds another block.
    #[error("frame is of block {got}, wanted {wanted}")]
    BlockMismatch {
        /// Hash of the frame.
        got: BlockHash,
        /// Hash requested.
        wanted: BlockHash,
    },
    /// The identity matches, but the header states another key form than the manifest of this
    /// identity.
    #[error(
        "frame has {got} keys, the model manifest of its identity says {wanted}: save with the manifest's key form"
    )]
    KeyFormMismatch {
        /// Key form of the frame.
        got: KeyForm,
        /// Key form of the manifest.
        wanted: KeyForm,
    },
}

/// A parsed frame: header checked, payload not yet verified. Cloning shares the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The whole encoded frame.
    pub bytes: Bytes,
    /// Identity that the bytes claim.
    pub identity: IdentityDigest,
    /// Hash that the bytes claim.
    pub hash: BlockHash,
}

/// Encoded size in bytes of a frame with these slices.
#[must_use]
pub fn encoded_len(slice_bytes: &[u32]) -> usize {
    let payload: usize = slice_bytes.iter().map(|bytes| *bytes as usize).sum();
    header_len(slice_bytes.len()) + payload
}

/// Makes a frame of a contiguous payload, its slices one after another.
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
    let sums: Vec<u32> = copy_batch(to.len(), |copies| {
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

/// A frame built in place: fill [`FrameBuilder::payload_mut`], then call [`FrameBuilder::seal`].
#[derive(Debug)]
pub struct FrameBuilder {
    bytes: BytesMut,
    header: Header,
    slice_bytes: Vec<u32>,
}

impl FrameBuilder {
    /// Memory for a frame with these slices; the payload is zeroed.
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

    /// Writes the header and the checksums.
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

    /// Writes the header with one checksum per slice.
    fn seal_with(mut self, sums: &[u32]) -> Frame {
        self.header.write(&self.slice_bytes, sums, &mut self.bytes);
        Frame { bytes: self.bytes.freeze(), identity: self.header.identity, hash: self.header.hash }
    }
}

impl Frame {
    /// Parses a frame of exactly these `bytes`: checks the header and its checksum, not the
    /// payload.
    ///
    /// # Errors
    /// Names the first inconsistency; never panics, whatever the bytes.
    pub fn parse(bytes: Bytes) -> Result<Frame, FrameError> {
        let header = Header::read(&bytes)?;
        let needed = header_len(header.slices) + header::table_payload_len(&bytes, header.slices)?;
        match bytes.len() {
            got if got < needed => Err(FrameError::Truncated { got, needed }),
            got if got > needed => Err(FrameError::Trailing { needed, extra: got - needed }),
            _ => Ok(Frame { bytes, identity: header.identity, hash: header.hash }),
        }
    }

    /// Checks every byte: this is block `hash` of `identity`, unchanged since it was sealed. The
    /// key form is not checked, because a reader knows no manifest; the store checks it on save
    /// ([`copy_and_verify`]).
    ///
    /// # Errors
    /// Names the first difference.
    pub fn verify(&self, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
        self.verify_ids_in_bytes(identity, hash)?;
        self.verify_bytes()
    }

    /// Like [`Self::verify`], while the frame is copied to `to`, so that memory is read once. After
    /// an error the content of `to` is unspecified.
    ///
    /// # Errors
    /// As [`Self::verify`]; also when `to` has another length than the frame.
    pub fn verify_into(
        &self,
        identity: IdentityDigest,
        hash: BlockHash,
        to: &mut [u8],
    ) -> Result<(), FrameError> {
        volatile::copy_and_verify_with(&self.bytes, to, |header| self.verify_header(header, identity, hash))
    }

    fn verify_ids_in_bytes(&self, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
        self.verify_header(&Header::read(&self.bytes)?, identity, hash)
    }

    /// Checks the ids in `header`, which the checksum covers. The public fields may have been set
    /// by any caller.
    fn verify_header(
        &self,
        header: &Header,
        identity: IdentityDigest,
        hash: BlockHash,
    ) -> Result<(), FrameError> {
        verify_ids(&[self.identity, header.identity], &[self.hash, header.hash], identity, hash)
    }

    /// Checks every byte without a requested block (a rescan of stored frames).
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

    /// One layer slice, sharing the frame's memory; `None` if there is no such layer.
    #[must_use]
    pub fn slice(&self, layer: usize) -> Option<Bytes> {
        let range = header::entries(&self.bytes).nth(layer)?.range();
        (range.end <= self.bytes.len()).then(|| self.bytes.slice(range))
    }

    /// Number of slices.
    #[must_use]
    pub fn slice_count(&self) -> usize {
        header::entries(&self.bytes).count()
    }

    /// Everything after the header, sharing the frame's memory.
    #[must_use]
    pub fn payload(&self) -> Bytes {
        self.bytes.slice(header_len(self.slice_count()).min(self.bytes.len())..)
    }

    /// Key form of the keys, as the header states it.
    #[must_use]
    pub fn key_form(&self) -> KeyForm {
        Header::read(&self.bytes).map(|header| header.key_form).unwrap_or_default()
    }
}

/// Checks that all given ids equal the requested ones.
fn verify_ids(
    identities: &[IdentityDigest],
    hashes: &[BlockHash],
    identity: IdentityDigest,
    hash: BlockHash,
) -> Result<(), FrameError> {
    if let Some(&got) = identities.iter().find(|got| **got != identity) {
        return Err(FrameError::IdentityMismatch { got, wanted: identity });
    }
    if let Some(&got) = hashes.iter().find(|got| **got != hash) {
        return Err(FrameError::BlockMismatch { got, wanted: hash });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
