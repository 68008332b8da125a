//! Reads and writes the primitives of log records and snapshots: varints of seven bits a byte,
//! texts with their length, hashes.
//!
//! Every value has exactly one encoding; the reader refuses any other. A length field alone
//! reserves no memory: memory grows with the bytes present. Not here: what the values mean.

use crate::id::{BlockHash, HASH_BYTES, IdentityDigest, Tier};

/// Why bytes cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The input is longer than any valid encoding.
    #[error("{got} bytes, at most {limit} are valid")]
    TooLong {
        /// Bytes given.
        got: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// Another release wrote the bytes.
    #[error("format {got} is unknown, this release reads {known}: use the release that wrote it")]
    Format {
        /// Number found.
        got: u32,
        /// Number this release writes and reads.
        known: u32,
    },
    /// The bytes end too early.
    #[error("ends at byte {at}, but {wanted} more bytes must follow")]
    Truncated {
        /// Length of the input in bytes.
        at: usize,
        /// Missing bytes, at least.
        wanted: u64,
    },
    /// Bytes follow the end.
    #[error("ends at byte {at}, but {left} more bytes follow")]
    Trailing {
        /// Position of the expected end.
        at: usize,
        /// Bytes after it.
        left: usize,
    },
    /// A field has an invalid value.
    #[error("{what} at byte {at} is {got}, which is not valid")]
    Invalid {
        /// Name of the field.
        what: &'static str,
        /// Where it starts.
        at: usize,
        /// The value.
        got: u64,
    },
}

/// Appends a varint, seven bits a byte, lowest bits first.
pub(super) fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Appends a text, its length first.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_varint(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// Appends zero for `None`, else one and the number.
pub(super) fn put_option(out: &mut Vec<u8>, number: Option<u64>) {
    out.push(u8::from(number.is_some()));
    if let Some(number) = number {
        put_varint(out, number);
    }
}

/// Reads from the front of a byte slice and tracks the position.
#[derive(Clone, Debug)]
pub(super) struct ByteReader<'a> {
    remaining: &'a [u8],
    at: usize,
}

impl<'a> ByteReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { remaining: bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes not read yet.
    pub(super) fn remaining(&self) -> usize {
        self.remaining.len()
    }

    pub(super) fn take(&mut self, wanted: usize) -> Result<&'a [u8], CodecError> {
        let Some((taken, rest)) = self.remaining.split_at_checked(wanted) else {
            let missing = (wanted - self.remaining.len()) as u64;
            return Err(CodecError::Truncated { at: self.at + self.remaining.len(), wanted: missing });
        };
        self.remaining = rest;
        self.at += wanted;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    pub(super) fn byte(&mut self) -> Result<u8, CodecError> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn hash(&mut self) -> Result<BlockHash, CodecError> {
        self.array().map(BlockHash)
    }

    pub(super) fn identity(&mut self) -> Result<IdentityDigest, CodecError> {
        self.array().map(IdentityDigest)
    }

    pub(super) fn hashes(&mut self, count: usize) -> Result<Vec<BlockHash>, CodecError> {
        let wanted = count.saturating_mul(HASH_BYTES);
        Ok(self.take(wanted)?.chunks_exact(HASH_BYTES).filter_map(BlockHash::from_slice).collect())
    }

    /// Reads a varint and refuses all but its shortest form.
    pub(super) fn varint(&mut self, what: &'static str) -> Result<u64, CodecError> {
        let at = self.at;
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            let fits = part << shift >> shift == part;
            number |= part << shift;
            if byte & 0x80 == 0 {
                let shortest = byte != 0 || shift == 0;
                return if fits && shortest { Ok(number) } else { Err(invalid(what, at, number)) };
            }
        }
        Err(invalid(what, at, number))
    }

    pub(super) fn varint_u32(&mut self, what: &'static str) -> Result<u32, CodecError> {
        let at = self.at;
        let number = self.varint(what)?;
        u32::try_from(number).map_err(|_| invalid(what, at, number))
    }

    /// Reads a count of items that take at least `bytes_each` of the remaining bytes each.
    pub(super) fn count(&mut self, what: &'static str, bytes_each: usize) -> Result<usize, CodecError> {
        let count = self.varint(what)?;
        let wanted = count.saturating_mul(bytes_each as u64);
        let left = self.remaining() as u64;
        if wanted > left {
            return Err(CodecError::Truncated { at: self.at + self.remaining(), wanted: wanted - left });
        }
        // Each item takes at least one byte, so a count within the remaining bytes fits `usize`.
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool, CodecError> {
        let at = self.at;
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(invalid(what, at, other.into())),
        }
    }

    pub(super) fn option(&mut self, what: &'static str) -> Result<Option<u64>, CodecError> {
        if self.flag(what)? { self.varint(what).map(Some) } else { Ok(None) }
    }

    pub(super) fn option_u32(&mut self, what: &'static str) -> Result<Option<u32>, CodecError> {
        if self.flag(what)? { self.varint_u32(what).map(Some) } else { Ok(None) }
    }

    pub(super) fn text(&mut self, what: &'static str) -> Result<String, CodecError> {
        let length = self.count(what, 1)?;
        let at = self.at;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => {
                let bad = error.valid_up_to();
                Err(invalid(what, at + bad, bytes[bad].into()))
            }
        }
    }

    /// Refuses trailing bytes.
    pub(super) fn finish(self) -> Result<(), CodecError> {
        if self.remaining.is_empty() {
            return Ok(());
        }
        Err(CodecError::Trailing { at: self.at, left: self.remaining.len() })
    }
}

/// The tier with this number.
pub(super) fn tier(number: u8, at: usize) -> Result<Tier, CodecError> {
    Tier::from_u8(number).ok_or(invalid("tier", at, number.into()))
}

pub(super) fn invalid(what: &'static str, at: usize, got: u64) -> CodecError {
    CodecError::Invalid { what, at, got }
}
