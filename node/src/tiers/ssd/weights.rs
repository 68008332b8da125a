//! Which weights the records of a node are of: a small file in each directory, written anew whenever the node is told of others.
//!
//! Records say the number of their generation, and a number may come to stand for other weights: where routers lost their state they count anew. So a
//! start brings back what was written since the node was told of a change, and nothing else. Not here: the records (`format.rs`).

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use kv_core::id::Generation;

/// The file.
pub(super) const FILE_NAME: &str = "weights.kvs";

/// What it is called until it is whole.
const NEW: &str = "weights.kvs.new";

const MAGIC: &[u8; 8] = b"KVFWGHT1";

/// Magic, generation, sequence, CRC32C of all of these; little endian.
const BYTES: usize = 24;

/// What a node was told last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Noted {
    /// The generation in force.
    pub(super) generation: Generation,
    /// Records up to this sequence number were written before.
    pub(super) after: u64,
}

impl Noted {
    fn bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.after.to_le_bytes());
        let sum = crc32c::crc32c(&bytes[..20]);
        bytes[20..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn of(bytes: &[u8]) -> Option<Noted> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let generation = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
        let after = u64::from_le_bytes(bytes[12..20].try_into().ok()?);
        let noted = Noted { generation: Generation(generation), after };
        (noted.bytes() == *bytes).then_some(noted)
    }
}

/// What is noted in a directory; nothing in one whose node was never told of a change.
///
/// # Errors
/// When it cannot be read, or is not what was written.
pub(super) fn read(directory: &Path) -> io::Result<Option<Noted>> {
    match std::fs::read(directory.join(FILE_NAME)) {
        Ok(bytes) => Noted::of(&bytes).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// Notes it, so that it is there after a crash, or what was there before is.
pub(super) fn write(directory: &Path, noted: Noted) -> io::Result<()> {
    let new = directory.join(NEW);
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
    fn what_is_noted_is_found_and_anything_else_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let noted = Noted { generation: Generation(5), after: 1 << 40 };
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
        // A crash before it was whole changes nothing.
        write(dir.path(), noted).unwrap();
        std::fs::write(dir.path().join(NEW), &whole[..7]).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(noted));
    }
}
