//! Reading and writing the few shapes that log records and snapshots are made of: numbers of seven
//! bits a byte, texts with their length, hashes.
//!
//! Every value has exactly one encoding; the reader refuses any other. Nothing is reserved on the word
//! of a length field: memory grows with the bytes that are there. Not here: what the shapes mean.

use crate::id::{BlockHash, IdentityDigest, Tier};

/// Why bytes are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// More bytes than any valid encoding has.
    #[error("{got} bytes, at most {limit} are valid")]
    TooLong {
        /// Bytes given.
        got: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// Written by another release.
    #[error("format {got} is not known here, only {known}: use the release that wrote it")]
    Format {
        /// Number found.
        got: u32,
        /// Number this release writes and reads.
        known: u32,
    },
    /// The bytes end too early.
    #[error("ends at byte {at}, but {wanted} more bytes must follow")]
    Truncated {
        /// Where the end is.
        at: usize,
        /// Bytes missing at least.
        wanted: u64,
    },
    /// Bytes are left over.
    #[error("ends at byte {at}, but {left} more bytes follow")]
    Trailing {
        /// Where the end should be.
        at: usize,
        /// Bytes left.
        left: usize,
    },
    /// A field has a value that it cannot have.
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

/// Appends a number, seven bits a byte, lowest first.
pub(super) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Appends a text with its length before it.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    put_number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// Appends zero for nothing, else one and the number.
pub(super) fn put_option(out: &mut Vec<u8>, number: Option<u64>) {
    out.push(u8::from(number.is_some()));
    if let Some(number) = number {
        put_number(out, number);
    }
}

/// Reads from the front of some bytes and remembers how far it came.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes not read yet.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn take(&mut self, wanted: usize) -> Result<&'a [u8], CodecError> {
        let Some((taken, rest)) = self.rest.split_at_checked(wanted) else {
            let missing = (wanted - self.rest.len()) as u64;
            return Err(CodecError::Truncated { at: self.at + self.rest.len(), wanted: missing });
        };
        self.rest = rest;
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
        let wanted = count.saturating_mul(16);
        Ok(self.take(wanted)?.chunks_exact(16).filter_map(BlockHash::from_slice).collect())
    }

    /// A number in its shortest form.
    pub(super) fn number(&mut self, what: &'static str) -> Result<u64, CodecError> {
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

    pub(super) fn number_u32(&mut self, what: &'static str) -> Result<u32, CodecError> {
        let at = self.at;
        let number = self.number(what)?;
        u32::try_from(number).map_err(|_| invalid(what, at, number))
    }

    /// A count of things of which each takes at least `bytes_each` of the bytes left.
    pub(super) fn count(&mut self, what: &'static str, bytes_each: usize) -> Result<usize, CodecError> {
        let count = self.number(what)?;
        let wanted = count.saturating_mul(bytes_each as u64);
        let left = self.left() as u64;
        if wanted > left {
            return Err(CodecError::Truncated { at: self.at + self.left(), wanted: wanted - left });
        }
        // Each takes a byte at least, so a count that fits the bytes left fits the machine.
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
        if self.flag(what)? { self.number(what).map(Some) } else { Ok(None) }
    }

    pub(super) fn option_u32(&mut self, what: &'static str) -> Result<Option<u32>, CodecError> {
        if self.flag(what)? { self.number_u32(what).map(Some) } else { Ok(None) }
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

    /// Refuses bytes that are left over.
    pub(super) fn finish(self) -> Result<(), CodecError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(CodecError::Trailing { at: self.at, left: self.rest.len() })
    }
}

/// A tier by its number.
pub(super) fn tier(number: u8, at: usize) -> Result<Tier, CodecError> {
    Tier::from_u8(number).ok_or(invalid("tier", at, number.into()))
}

pub(super) fn invalid(what: &'static str, at: usize, got: u64) -> CodecError {
    CodecError::Invalid { what, at, got }
}
