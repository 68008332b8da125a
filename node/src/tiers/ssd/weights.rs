//! The weights of a node's records: a small file in each directory, rewritten at every change of
//! weights.
//!
//! Records store the number of their generation, but a number may later mean other weights, since
//! routers that lost their state count anew. So a start recovers only blocks written since the last
//! change. Not here: the records (`format.rs`).

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use kv_core::id::Generation;

/// Name of the file.
pub(super) const FILE_NAME: &str = "weights.kvs";

/// Name of the file until it is complete.
const TEMPORARY_NAME: &str = "weights.kvs.new";

const MAGIC: &[u8; 8] = b"KVFWGHT1";

/// Magic, generation, sequence, and the CRC32C of all of these; little-endian.
const BYTES: usize = 24;

/// The last change of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WeightsNote {
    /// The generation in effect.
    pub(super) generation: Generation,
    /// Records up to this sequence number are older than the change.
    pub(super) older_up_to: u64,
}

impl WeightsNote {
    fn bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.older_up_to.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..20]);
        bytes[20..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<WeightsNote> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let generation = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
        let after = u64::from_le_bytes(bytes[12..20].try_into().ok()?);
        let noted = WeightsNote { generation: Generation(generation), older_up_to: after };
        (noted.bytes() == *bytes).then_some(noted)
    }
}

/// The note of a directory; `None` if there was never a change.
///
/// # Errors
/// If it cannot be read or is damaged.
pub(super) fn read(directory: &Path) -> io::Result<Option<WeightsNote>> {
    match std::fs::read(directory.join(FILE_NAME)) {
        Ok(bytes) => WeightsNote::parse(&bytes).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Writes a note atomically: after a crash either the new or the previous one exists.
pub(super) fn write(directory: &Path, noted: WeightsNote) -> io::Result<()> {
    let new = directory.join(TEMPORARY_NAME);
    let mut file = File::create(&new)?;
    file.write_all(&noted.bytes())?;
    file.sync_all()?;
    std::fs::rename(new, directory.join(FILE_NAME))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn note_round_trips_and_corruption_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let noted = WeightsNote { generation: Generation(5), older_up_to: 1 << 40 };
        write(dir.path(), noted).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(noted));
        let whole = std::fs::read(dir.path().join(FILE_NAME)).unwrap();
        for at in 0..whole.len() {
            let mut torn = whole.clone();
            torn[at] ^= 1;
            std::fs::write(dir.path().join(FILE_NAME), &torn).unwrap();
            assert_eq!(read(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidData, "byte {at}");
            std::fs::write(dir.path().join(FILE_NAME), &whole[..at]).unwrap();
            assert_eq!(read(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidData, "cut at {at}");
        }
        // A crash before completion has no effect.
        write(dir.path(), noted).unwrap();
        std::fs::write(dir.path().join(TEMPORARY_NAME), &whole[..7]).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(noted));
    }
}
