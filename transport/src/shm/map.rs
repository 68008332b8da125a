//! Memory that two processes have mapped: a node's arena as a client sees it, and trays as both ends do.
//!
//! All unsafe code of the local path stands here. Bytes of an arena are read in place: the rules of lending say until when
//! nobody writes them. Bytes of a tray may change at any moment, whoever the other end is, and only ever get copied.
//! Not here: those rules (`kv_core::lend`), which places are in use, and how descriptors travel (`seqpacket.rs`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use kvfleet_proto::frame::{Copies, Unsettled, copy_from};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Why memory that another process gave is not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapRefused {
    /// It is no memory file, or its length may change under a reader, which would end the process.
    #[error("the memory is not sealed against shrinking, so it is not mapped")]
    Unsealed,
    /// The file is shorter than was said.
    #[error("the memory has {bytes} bytes, {said} were said")]
    Short {
        /// Bytes it has.
        bytes: u64,
        /// Bytes that were said.
        said: u64,
    },
    /// The system refused.
    #[error("the memory cannot be mapped: {0}")]
    System(#[from] io::Error),
}

/// Memory of a file, mapped into this process until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// The process that mapped it: a child has none of it, and something else may be at its address there.
    pid: u32,
}

// SAFETY: the mapping is plain memory without thread affinity; who may touch which bytes follows from loans and places.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Another process's memory, to be read only.
    ///
    /// # Errors
    /// When it is not what it should be, or the system refuses.
    pub(crate) fn to_read(file: &OwnedFd, len: u64) -> Result<Mapping, MapRefused> {
        Mapping::map(file, len, ProtFlags::READ)
    }

    /// Memory that both ends write.
    ///
    /// # Errors
    /// As [`Self::to_read`].
    pub(crate) fn to_write(file: &OwnedFd, len: u64) -> Result<Mapping, MapRefused> {
        Mapping::map(file, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(file: &OwnedFd, len: u64, access: ProtFlags) -> Result<Mapping, MapRefused> {
        // Only memory files have seals, so that this also refuses all other files, pipes and devices.
        let seals = fcntl_get_seals(file).map_err(|_| MapRefused::Unsealed)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MapRefused::Unsealed);
        }
        let bytes = u64::try_from(fstat(file).map_err(io::Error::from)?.st_size).unwrap_or(0);
        let short = MapRefused::Short { bytes, said: len };
        let Some(length) = usize::try_from(len).ok().filter(|_| len > 0 && bytes >= len) else {
            return Err(short);
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing; the file has so many bytes and
        // cannot become shorter, so that no access inside the mapping ever faults.
        let base = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) };
        let base = NonNull::new(base.map_err(io::Error::from)?.cast::<u8>());
        let base = base.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping { base, len: length, pid: std::process::id() };
        // A child of this process does not keep to the rules of lending, so it does not get the memory.
        // SAFETY: the range is the mapping; the advice changes no contents.
        unsafe { madvise(mapping.base.as_ptr().cast(), length, Advice::LinuxDontFork) }
            .map_err(io::Error::from)?;
        Ok(mapping)
    }

    /// How many bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// Makes the pages of a range present, so that who reads them first does not wait for each. Where the kernel cannot,
    /// they come as they are read.
    pub(crate) fn populate(&self, at: u64, len: u64) {
        let Some(start) = self.checked(at, len) else { return };
        // SAFETY: the range is inside the mapping; populating for reading changes no contents.
        if let Err(cause) = unsafe { madvise(start.cast(), len as usize, Advice::LinuxPopulateRead) } {
            tracing::debug!(%cause, "pages of shared memory come as they are read");
        }
    }

    /// The bytes of a loan, in place. Nothing when they are not inside.
    ///
    /// Whoever calls this answers for the loan: the node leaves these bytes as they are until `owner` is dropped, or has
    /// ended. A node that does not keep to that gives wrong bytes, as it could anyway; clients map only the memory of nodes
    /// that they trust.
    pub(crate) fn lent<T: Send + Sync + 'static>(
        self: &Arc<Self>,
        at: u64,
        len: u32,
        owner: T,
    ) -> Option<Bytes> {
        let start = NonNull::new(self.checked(at, u64::from(len))?)?;
        Some(Bytes::from_owner(Lent { start, len: len as usize, _owner: owner, _mapping: Arc::clone(self) }))
    }

    /// Puts `from` there. What the other end sees of it, and when, is not known before it was told.
    pub(crate) fn write(&self, at: u64, from: &[u8]) -> Option<()> {
        let start = self.checked(at, from.len() as u64)?;
        // SAFETY: the range is inside the mapping, which is writable (trays only), and `from` is memory of this process.
        // The place is this end's alone by the rules of trays; an end that does not keep to them spoils its own bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start, from.len()) };
        Some(())
    }

    fn checked(&self, at: u64, len: u64) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        // SAFETY: `at` is at most the mapping's length.
        (end <= self.len as u64).then(|| unsafe { self.base.as_ptr().add(at as usize) })
    }

    /// Where bytes lie in this mapping; nothing when they lie elsewhere.
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
        // SAFETY: base and length are those of the mapping, and nothing refers to it: whatever does holds its `Arc`.
        if let Err(cause) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "shared memory could not be unmapped");
        }
    }
}

/// Bytes of a loan.
struct Lent<T> {
    start: NonNull<u8>,
    len: usize,
    // Dropped before the mapping: it gives the loan back.
    _owner: T,
    _mapping: Arc<Mapping>,
}

// SAFETY: as for `Mapping`; what else is in it can be sent.
unsafe impl<T: Send> Send for Lent<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lent<T> {}

impl<T> AsRef<[u8]> for Lent<T> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping, which `_mapping` keeps; `lent` says why nobody writes it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

/// A frame in a place of a tray: the other end may write it at any time.
#[derive(Debug)]
pub(crate) struct TrayFrame {
    tray: Arc<Mapping>,
    at: u64,
    len: usize,
}

impl TrayFrame {
    /// The place of `len` bytes at `at`; nothing when it is not inside.
    pub(crate) fn new(tray: &Arc<Mapping>, at: u64, len: u32) -> Option<TrayFrame> {
        tray.checked(at, u64::from(len))?;
        Some(TrayFrame { tray: Arc::clone(tray), at, len: len as usize })
    }

    fn from(&self, at: usize, len: usize) -> *const u8 {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {at} of {}",
            self.len
        );
        self.tray.checked(self.at + at as u64, len as u64).expect("the place is inside")
    }
}

impl Unsettled for TrayFrame {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        // SAFETY: so many bytes may be read there as long as `self.tray` lives; only another process writes them.
        unsafe { copy_from(to, self.from(at, to.len())) };
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &Copies) -> u32 {
        // SAFETY: as in `copy`.
        unsafe { copies.crc32c_from(to, self.from(at, to.len())) }
    }
}

/// A memory file of `len` zero bytes that can neither grow nor shrink.
///
/// # Errors
/// What the system said.
pub(crate) fn memory_file(len: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("kvfleet-tray", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// User and process at the other end of a Unix socket, as the kernel says. The process is 0 when it cannot be seen from here
/// (another pid namespace), which is why this is not rustix's call: its type of a process has no 0.
///
/// # Errors
/// What the system said.
pub(super) fn peer_credentials(socket: &OwnedFd) -> io::Result<(u32, i32)> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both pointers are to values of the lengths that are said, and live through the call; any bytes are a `ucred`.
    let got = unsafe {
        let to = std::ptr::from_mut(&mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    };
    match got {
        0 => Ok((found.uid, found.pid)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A handle on the same memory by which it can only be read.
///
/// # Errors
/// What the system said.
pub(crate) fn read_only(file: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    Ok(std::fs::File::open(path)?.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite;
    use kvfleet_proto::frame::{KeyForm, settle};

    const LEN: u64 = 1 << 20;

    #[test]
    fn both_ends_see_the_same_bytes() {
        let file = memory_file(LEN).unwrap();
        let (one, two) =
            (Mapping::to_write(&file, LEN).unwrap(), Arc::new(Mapping::to_read(&file, LEN).unwrap()));
        one.write(LEN - 3, b"end").unwrap();
        let lent = two.lent(LEN - 3, 3, ()).unwrap();
        assert_eq!(&lent[..], b"end");
        assert_eq!(two.offset_of(&lent), Some(LEN - 3));
        assert_eq!(two.offset_of(b"elsewhere"), None);
        drop(two);
        assert_eq!(&lent[..], b"end", "the mapping lives as long as its bytes");
        two_are_outside(&one);
    }

    fn two_are_outside(mapping: &Mapping) {
        assert!(mapping.write(LEN - 3, b"four").is_none());
        assert!(mapping.write(u64::MAX, b"x").is_none());
    }

    #[test]
    fn memory_that_could_vanish_is_not_mapped() {
        let said = |file: &OwnedFd, len| Mapping::to_read(file, len).unwrap_err().to_string();
        let loose = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, LEN).unwrap();
        assert_eq!(said(&loose, LEN), "the memory is not sealed against shrinking, so it is not mapped");
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(matches!(Mapping::to_read(&file, LEN), Err(MapRefused::Unsealed)));
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(Mapping::to_read(&socket.into(), LEN), Err(MapRefused::Unsealed)));
        let short = memory_file(4096).unwrap();
        assert_eq!(said(&short, 4097), "the memory has 4096 bytes, 4097 were said");
        assert!(Mapping::to_read(&short, 0).is_err());
    }

    #[test]
    fn a_reader_cannot_write() {
        let file = memory_file(LEN).unwrap();
        let reader = read_only(&file).unwrap();
        assert!(matches!(Mapping::to_write(&reader, LEN), Err(MapRefused::System(_))));
        assert!(Mapping::to_read(&reader, LEN).is_ok());
    }

    #[test]
    fn a_frame_in_a_tray_is_settled_like_any_other() {
        let tray = Arc::new(Mapping::to_write(&memory_file(LEN).unwrap(), LEN).unwrap());
        let frame = suite::frame(suite::hash(1), 5000);
        let len = u32::try_from(frame.bytes.len()).unwrap();
        tray.write(77, &frame.bytes).unwrap();
        let place = TrayFrame::new(&tray, 77, len).unwrap();
        let mut to = vec![0; frame.bytes.len()];
        settle(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).unwrap();
        assert_eq!(to, frame.bytes);
        assert!(settle(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(2), &mut to).is_err());
        tray.write(77 + u64::from(len) - 1, &[!frame.bytes[frame.bytes.len() - 1]]).unwrap();
        assert!(settle(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).is_err());
        assert!(TrayFrame::new(&tray, LEN - 1, 2).is_none());
    }
}
