//! Frames in memory that another process may write while they are read: everything is decided from a copy.
//!
//! Whoever checks such a frame where it lies knows nothing of it a moment later. So each byte is loaded once, into
//! memory of our own, and what is looked at is there: first the start of the header, then all of it, then one slice after
//! the other, each with the sum of its copy.
//!
//! Not here: such memory itself, and who says that it may be read ([`Copies::crc32c_from`] and [`super::copy_from`] ask for that).

use std::cmp::Ordering;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};

use super::copy::{Copies, copies};
use super::header::{self, Header, Need, START_BYTES, header_len, parse_header};
use super::{FrameError, KeyForm, verify_ids};

/// Bytes that may change as long as nobody copied them.
pub trait Unsettled: Send + Sync {
    /// How many there are, in bytes. This does not change.
    fn len_bytes(&self) -> usize;

    /// Fills `to` with the bytes from `at` on, each loaded once.
    ///
    /// # Panics
    /// When that is more than there is.
    fn copy(&self, at: usize, to: &mut [u8]);

    /// The same as one of the `copies` that are made together, and gives the CRC32C of what is in `to` then.
    ///
    /// # Panics
    /// When that is more than there is.
    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &Copies) -> u32;
}

/// Bytes that nobody writes any more are the simplest case.
impl Unsettled for Bytes {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        to.copy_from_slice(&self[at..at + to.len()]);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &Copies) -> u32 {
        copies.crc32c(to, &self[at..at + to.len()])
    }
}

/// Copies a frame to `to`, which is as long: what is there then is block `hash` of `identity`, with keys in `key_form`,
/// whatever happens to `from` meanwhile. After an error what is in `to` is of no use.
///
/// `key_form` is that of the manifest whose digest `identity` is: it decides the bytes, and who stores them is the last who
/// knows it.
///
/// # Errors
/// As [`super::Frame::parse`] and [`super::Frame::verify`] of what was copied; when its key form is another one; and when
/// `to` has another length than `from`.
pub fn settle(
    from: &dyn Unsettled,
    identity: IdentityDigest,
    key_form: KeyForm,
    hash: BlockHash,
    to: &mut [u8],
) -> Result<(), FrameError> {
    settle_as(from, to, |header| {
        verify_ids(&[header.identity], &[header.hash], identity, hash)?;
        has_key_form(header, key_form)
    })
}

/// The keys are in the form that was wanted.
pub(super) fn has_key_form(header: &Header, wanted: KeyForm) -> Result<(), FrameError> {
    let got = header.key_form;
    if got == wanted { Ok(()) } else { Err(FrameError::OtherKeyForm { got, wanted }) }
}

/// The same with the caller's judgement of the header.
pub(super) fn settle_as(
    from: &dyn Unsettled,
    to: &mut [u8],
    verify: impl FnOnce(&Header) -> Result<(), FrameError>,
) -> Result<(), FrameError> {
    let got = from.len_bytes();
    // Bytes that no slice covers would stay what they were in `to`.
    has_length(to.len(), got)?;
    let mut there = START_BYTES.min(got);
    from.copy(0, &mut to[..there]);
    if let Need::Header(needed) = parse_header(&to[..there])? {
        let rest = there..needed.min(got);
        there = rest.end;
        from.copy(rest.start, &mut to[rest]);
    }
    let (start, mut payload) = to.split_at_mut(there);
    let header = Header::read(start)?;
    verify(&header)?;
    has_length(got, header_len(header.slices) + header::table_payload_len(start, header.slices)?)?;
    copies(payload.len(), |copies| {
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

pub(super) fn has_length(got: usize, needed: usize) -> Result<(), FrameError> {
    match got.cmp(&needed) {
        Ordering::Less => Err(FrameError::Cut { got, needed }),
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(FrameError::Trailing { needed, extra: got - needed }),
    }
}
