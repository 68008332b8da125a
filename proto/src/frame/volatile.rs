//! Frames in memory that another process may write during the read. Every decision is taken on a
//! private copy.
//!
//! A check in place would not hold for the bytes a moment later. So each byte is loaded once into
//! private memory and checked there: the start of the header, the whole header, then each slice
//! with the checksum of its copy.
//!
//! The caller provides the memory and the proof that it may be read, which
//! [`kvfleet_cpu::SharedBytes::new`] requires.

use std::cmp::Ordering;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};

use super::header::{self, BytesNeeded, Header, START_BYTES, header_len, parse_header};
use super::{FrameError, KeyForm, verify_ids};
use kvfleet_cpu::{CopyBatch, copy_batch};

/// Bytes that may change until they are copied.
pub trait VolatileBytes: Send + Sync {
    /// Number of bytes. It never changes.
    fn len_bytes(&self) -> usize;

    /// Fills `to` with the bytes from `at` on, each loaded once.
    ///
    /// # Panics
    /// When the range exceeds the bytes.
    fn copy(&self, at: usize, to: &mut [u8]);

    /// Like [`Self::copy`], as one copy of the batch. Returns the CRC32C of `to` after the copy.
    ///
    /// # Panics
    /// When the range exceeds the bytes.
    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32;
}

/// The simplest case: bytes that never change.
impl VolatileBytes for Bytes {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        to.copy_from_slice(&self[at..at + to.len()]);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32 {
        copies.crc32c(to, &self[at..at + to.len()])
    }
}

/// Copies a frame to `to`, which must be as long. After success `to` holds block `hash` of
/// `identity`, with keys in `key_form`, whatever happens to `from` meanwhile. After an error the
/// content of `to` is unspecified.
///
/// `key_form` comes from the manifest with the digest `identity`. It decides the bytes, and the
/// store is the last place that knows it.
///
/// # Errors
/// As [`super::Frame::parse`] and [`super::Frame::verify`] of the copy; also when the key form
/// differs, or `to` has another length than `from`.
pub fn copy_and_verify(
    from: &dyn VolatileBytes,
    identity: IdentityDigest,
    key_form: KeyForm,
    hash: BlockHash,
    to: &mut [u8],
) -> Result<(), FrameError> {
    copy_and_verify_with(from, to, |header| {
        verify_ids(&[header.identity], &[header.hash], identity, hash)?;
        check_key_form(header, key_form)
    })
}

/// Checks that the keys are in the requested form.
pub(super) fn check_key_form(header: &Header, wanted: KeyForm) -> Result<(), FrameError> {
    let got = header.key_form;
    if got == wanted { Ok(()) } else { Err(FrameError::KeyFormMismatch { got, wanted }) }
}

/// Like [`copy_and_verify`], with the caller's check of the header.
pub(super) fn copy_and_verify_with(
    from: &dyn VolatileBytes,
    to: &mut [u8],
    verify: impl FnOnce(&Header) -> Result<(), FrameError>,
) -> Result<(), FrameError> {
    let got = from.len_bytes();
    // Bytes outside every slice would keep their old value in `to`.
    check_length(to.len(), got)?;
    let mut copied = START_BYTES.min(got);
    from.copy(0, &mut to[..copied]);
    if let BytesNeeded::Header(needed) = parse_header(&to[..copied])? {
        let rest = copied..needed.min(got);
        copied = rest.end;
        from.copy(rest.start, &mut to[rest]);
    }
    let (start, mut payload) = to.split_at_mut(copied);
    let header = Header::read(start)?;
    verify(&header)?;
    check_length(got, header_len(header.slices) + header::table_payload_len(start, header.slices)?)?;
    copy_batch(payload.len(), |copies| {
        for (layer, entry) in header::entries(start).enumerate() {
            let range = entry.range();
            let (slice, rest) = payload.split_at_mut(range.len());
            if from.copy_crc32c(range.start, slice, copies) != entry.crc {
                return Err(FrameError::SliceChecksum { layer });
            }
            payload = rest;
        }
        Ok(())
    })
}

pub(super) fn check_length(got: usize, needed: usize) -> Result<(), FrameError> {
    match got.cmp(&needed) {
        Ordering::Less => Err(FrameError::Truncated { got, needed }),
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(FrameError::Trailing { needed, extra: got - needed }),
    }
}
