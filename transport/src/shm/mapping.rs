//! Memory that two processes have mapped: a node's arena in a client, and bounce buffers in both
//! ends.
//!
//! All unsafe code of the local path is here. Bytes of an arena are read in place; the grant rules
//! say until when they are not overwritten. Bytes of a bounce buffer may change at any moment,
//! whatever the other end is, and are only ever copied. Not here: those rules (`kv_core::lend`),
//! which ranges are in use, and how descriptors are sent (`seqpacket.rs`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use kvfleet_cpu::SharedBytes;
use kvfleet_proto::frame::{CopyBatch, VolatileBytes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Why memory from another process is not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// It is not a memory file, or its length may change under a reader, which would kill the
    /// process.
    #[error("the memory is not sealed against shrinking, so it is not mapped")]
    Unsealed,
    /// The file is shorter than announced.
    #[error("the memory has {bytes} bytes, but {said} were announced")]
    Short {
        /// Actual length in bytes.
        bytes: u64,
        /// Announced length in bytes.
        said: u64,
    },
    /// The system refused the call.
    #[error("the memory cannot be mapped: {0}")]
    System(#[from] io::Error),
}

/// Memory of a file, mapped into this process until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// The process that mapped it. A child does not have the mapping, and may have other memory at
    /// its address.
    pid: u32,
}

// SAFETY: the mapping is plain memory without thread affinity; grants and ranges decide which bytes
// may be touched.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps another process's memory read-only.
    ///
    /// # Errors
    /// If it is not the announced memory, or the system refuses.
    pub(crate) fn read_only(file: &OwnedFd, len: u64) -> Result<Mapping, MapError> {
        Mapping::map(file, len, ProtFlags::READ)
    }

    /// Maps memory that both ends write.
    ///
    /// # Errors
    /// As [`Self::read_only`].
    pub(crate) fn read_write(file: &OwnedFd, len: u64) -> Result<Mapping, MapError> {
        Mapping::map(file, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(file: &OwnedFd, len: u64, access: ProtFlags) -> Result<Mapping, MapError> {
        // Only memory files have seals, so this also refuses all other files, pipes and devices.
        let seals = fcntl_get_seals(file).map_err(|_| MapError::Unsealed)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MapError::Unsealed);
        }
        let bytes = u64::try_from(fstat(file).map_err(io::Error::from)?.st_size).unwrap_or(0);
        let short = MapError::Short { bytes, said: len };
        let Some(length) = usize::try_from(len).ok().filter(|_| len > 0 && bytes >= len) else {
            return Err(short);
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing. The file
        // has at least this length and cannot shrink, so no access inside the mapping ever faults.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) };
        let base = NonNull::new(base.map_err(io::Error::from)?.cast::<u8>());
        let base = base.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping { base, len: length, pid: std::process::id() };
        // A child of this process does not follow the grant rules, so it does not inherit the
        // memory.
        // SAFETY: the range is the mapping; the advice changes no contents.
        unsafe { madvise(mapping.base.as_ptr().cast(), length, Advice::LinuxDontFork) }
            .map_err(io::Error::from)?;
        Ok(mapping)
    }

    /// Length in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// Makes the pages of a range present, so that their first reader does not wait for each. If
    /// the kernel cannot, they are loaded on access.
    pub(crate) fn populate(&self, at: u64, len: u64) {
        let Some(start) = self.checked_pointer(at, len) else { return };
        // SAFETY: the range is inside the mapping; populating for reading changes no contents.
        if let Err(cause) = unsafe { madvise(start.cast(), len as usize, Advice::LinuxPopulateRead) } {
            tracing::debug!(%cause, "pages of shared memory are loaded on access");
        }
    }

    /// The bytes of a grant, in place; `None` if they are not inside the mapping.
    ///
    /// The caller guarantees the grant: the node does not change these bytes until `owner` is
    /// dropped, or has ended. A node that breaks that rule gives wrong bytes, as it could anyway;
    /// clients map only the memory of nodes that they trust.
    pub(crate) fn granted_bytes<T: Send + Sync + 'static>(
        self: &Arc<Self>,
        at: u64,
        len: u32,
        owner: T,
    ) -> Option<Bytes> {
        let start = NonNull::new(self.checked_pointer(at, u64::from(len))?)?;
        Some(Bytes::from_owner(MappedGrant {
            start,
            len: len as usize,
            _owner: owner,
            _mapping: Arc::clone(self),
        }))
    }

    /// Writes `from` at `at`. When the other end sees the bytes is undefined until it is told.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Option<()> {
        let start = self.checked_pointer(at, from.len() as u64)?;
        // SAFETY: the range is inside the mapping, which is writable (bounce buffers only), and
        // `from` is memory of this process. By the rules of bounce buffers the range belongs to
        // this end alone; an end that breaks them corrupts its own bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start, from.len()) };
        Some(())
    }

    fn checked_pointer(&self, at: u64, len: u64) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        // SAFETY: `at` is at most the mapping's length.
        (end <= self.len as u64).then(|| unsafe { self.base.as_ptr().add(at as usize) })
    }

    /// Offset of `bytes` in this mapping; `None` unless all of them lie in it.
    pub(crate) fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.base.as_ptr() as usize)?;
        (at.checked_add(bytes.len())? <= self.len).then_some(at as u64)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            return;
        }
        // SAFETY: base and length are those of the mapping, and no reference remains: each user
        // holds its `Arc`.
        if let Err(cause) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "cannot unmap shared memory");
        }
    }
}

/// The bytes of a grant.
struct MappedGrant<T> {
    start: NonNull<u8>,
    len: usize,
    // Dropped before the mapping: it returns the grant.
    _owner: T,
    _mapping: Arc<Mapping>,
}

// SAFETY: as for `Mapping`; the other fields can be sent.
unsafe impl<T: Send> Send for MappedGrant<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for MappedGrant<T> {}

impl<T> AsRef<[u8]> for MappedGrant<T> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping, which `_mapping` keeps; `granted_bytes` says why
        // the bytes do not change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

/// A frame in a range of a bounce buffer: the other end may write it at any time.
#[derive(Debug)]
pub(crate) struct ShmBounceFrame {
    memory: Arc<Mapping>,
    at: u64,
    len: usize,
}

impl ShmBounceFrame {
    /// The range of `len` bytes at `at`; `None` if it is not inside.
    pub(crate) fn new(tray: &Arc<Mapping>, at: u64, len: u32) -> Option<ShmBounceFrame> {
        tray.checked_pointer(at, u64::from(len))?;
        Some(ShmBounceFrame { memory: Arc::clone(tray), at, len: len as usize })
    }

    fn bytes_at(&self, at: usize, len: usize) -> SharedBytes<'_> {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {at} of {}",
            self.len
        );
        let start =
            self.memory.checked_pointer(self.at + at as u64, len as u64).expect("the range was checked");
        // SAFETY: these bytes are readable as long as `self.memory` lives; only another process
        // writes them.
        unsafe { SharedBytes::new(start, len) }
    }
}

impl VolatileBytes for ShmBounceFrame {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        self.bytes_at(at, to.len()).copy_to(to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32 {
        copies.crc32c_shared(to, self.bytes_at(at, to.len()))
    }
}

/// A memory file of `len` zero bytes that can neither grow nor shrink.
///
/// # Errors
/// The system's error.
pub(crate) fn memory_file(len: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("kvfleet-tray", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// User and process at the other end of a Unix socket, as the kernel reports them. The process is 0
/// if it is not visible from here (another pid namespace). That rules out rustix's call: its
/// process type has no 0.
///
/// # Errors
/// The system's error.
pub(super) fn peer_credentials(socket: &OwnedFd) -> io::Result<(u32, i32)> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both pointers are to values of the given lengths that live through the call; any
    // bytes are a valid `ucred`.
    let got = unsafe {
        let to = std::ptr::from_mut(&mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    };
    match got {
        0 => Ok((found.uid, found.pid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A read-only handle on the same memory.
///
/// # Errors
/// The system's error.
pub(crate) fn reopen_read_only(file: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    Ok(std::fs::File::open(path)?.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite;
    use kvfleet_proto::frame::{KeyForm, copy_and_verify};

    const LEN: u64 = 1 << 20;

    #[test]
    fn both_ends_see_the_same_bytes() {
        let file = memory_file(LEN).unwrap();
        let (one, two) =
            (Mapping::read_write(&file, LEN).unwrap(), Arc::new(Mapping::read_only(&file, LEN).unwrap()));
        one.write(LEN - 3, b"end").unwrap();
        let lent = two.granted_bytes(LEN - 3, 3, ()).unwrap();
        assert_eq!(&lent[..], b"end");
        assert_eq!(two.offset_of(&lent), Some(LEN - 3));
        assert_eq!(two.offset_of(b"elsewhere"), None);
        drop(two);
        assert_eq!(&lent[..], b"end", "the mapping lives as long as its bytes");
        assert_writes_outside_fail(&one);
    }

    fn assert_writes_outside_fail(mapping: &Mapping) {
        assert!(mapping.write(LEN - 3, b"four").is_none());
        assert!(mapping.write(u64::MAX, b"x").is_none());
    }

    #[test]
    fn memory_that_could_shrink_is_not_mapped() {
        let said = |file: &OwnedFd, len| Mapping::read_only(file, len).unwrap_err().to_string();
        let loose = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, LEN).unwrap();
        assert_eq!(said(&loose, LEN), "the memory is not sealed against shrinking, so it is not mapped");
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(matches!(Mapping::read_only(&file, LEN), Err(MapError::Unsealed)));
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(Mapping::read_only(&socket.into(), LEN), Err(MapError::Unsealed)));
        let short = memory_file(4096).unwrap();
        assert_eq!(said(&short, 4097), "the memory has 4096 bytes, but 4097 were announced");
        assert!(Mapping::read_only(&short, 0).is_err());
    }

    #[test]
    fn a_reader_cannot_write() {
        let file = memory_file(LEN).unwrap();
        let reader = reopen_read_only(&file).unwrap();
        assert!(matches!(Mapping::read_write(&reader, LEN), Err(MapError::System(_))));
        assert!(Mapping::read_only(&reader, LEN).is_ok());
    }

    #[test]
    fn a_frame_in_a_bounce_buffer_is_settled_like_any_other() {
        let tray = Arc::new(Mapping::read_write(&memory_file(LEN).unwrap(), LEN).unwrap());
        let frame = suite::frame(suite::hash(1), 5000);
        let len = u32::try_from(frame.bytes.len()).unwrap();
        tray.write(77, &frame.bytes).unwrap();
        let place = ShmBounceFrame::new(&tray, 77, len).unwrap();
        let mut to = vec![0; frame.bytes.len()];
        copy_and_verify(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).unwrap();
        assert_eq!(to, frame.bytes);
        assert!(copy_and_verify(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(2), &mut to).is_err());
        tray.write(77 + u64::from(len) - 1, &[!frame.bytes[frame.bytes.len() - 1]]).unwrap();
        assert!(copy_and_verify(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).is_err());
        assert!(ShmBounceFrame::new(&tray, LEN - 1, 2).is_none());
    }
}
