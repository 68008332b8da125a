//! The arena's memory: one unnamed file, mapped and populated once at start.
//!
//! A file instead of anonymous memory, so that local processes can map it and read in place. Its
//! size is sealed against truncation by them, writing is sealed except by this mapping, and further
//! seals are forbidden. Huge pages are used if the machine has reserved some. Not here: the layout
//! (`super`).

use std::ptr::NonNull;

/// Default huge page size, in bytes.
#[cfg(not(miri))]
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Maximum memory in small pages that devices may register, in bytes.
const SMALL_PAGES_REGISTERED_MAX: usize = 16 << 30;

/// Shared memory, zeroed, unmapped when dropped.
#[derive(Debug)]
pub(super) struct ArenaMemory {
    base: NonNull<u8>,
    len: usize,
    is_huge: bool,
    /// No mapping except ours can write, even for holders of the file.
    #[cfg(not(miri))]
    is_sealed: bool,
    #[cfg(not(miri))]
    file: std::os::fd::OwnedFd,
}

// SAFETY: the mapping is plain memory without thread affinity; the slots govern which thread may
// access which range.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above.
unsafe impl Sync for ArenaMemory {}

impl ArenaMemory {
    /// Maps at least `len` bytes.
    ///
    /// # Errors
    /// The machine has too little memory, or another system error.
    #[cfg(not(miri))]
    pub(super) fn new(len: usize) -> std::io::Result<ArenaMemory> {
        match ArenaMemory::huge(len) {
            Ok(memory) => {
                tracing::info!(bytes = memory.len, "the arena lies in huge pages");
                return Ok(memory);
            }
            Err(cause) => tracing::debug!(%cause, "the arena finds no huge pages set aside"),
        }
        if let Some(available) = available_bytes()
            && (len as u64) > available
        {
            return Err(std::io::Error::other(format!("the machine has {available} bytes available")));
        }
        let file = rustix::fs::memfd_create(NAME, flags())?;
        rustix::fs::ftruncate(&file, len as u64)?;
        let mut memory = ArenaMemory::map(file, len)?;
        if memory.is_advised() {
            tracing::info!(bytes = len, "the arena lies in huge pages as far as the system finds some");
        } else {
            tracing::info!(
                bytes = len,
                "the arena lies in small pages; for huge ones set vm.nr_hugepages, or write advise to {SHMEM_HUGE}"
            );
        }
        memory.populate()?;
        memory.seal()?;
        Ok(memory)
    }

    /// Maps reserved huge pages, if there are enough.
    #[cfg(not(miri))]
    fn huge(len: usize) -> std::io::Result<ArenaMemory> {
        use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
        let len = len.checked_next_multiple_of(HUGE_PAGE_BYTES).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let file = memfd_create(NAME, flags() | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        ftruncate(&file, len as u64)?;
        // Allocates the pages now: a missing page later would kill the process.
        fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
        let mut memory = ArenaMemory::map(file, len)?;
        memory.is_huge = true;
        memory.populate()?;
        memory.seal()?;
        Ok(memory)
    }

    #[cfg(not(miri))]
    fn map(file: std::os::fd::OwnedFd, len: usize) -> std::io::Result<ArenaMemory> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice has no aliases, and only we
        // hold the file until it is sealed.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(ArenaMemory { base, len, is_huge: false, is_sealed: false, file })
    }

    /// Requests huge pages. Returns whether the system grants them to shared memory.
    #[cfg(not(miri))]
    fn is_advised(&self) -> bool {
        use rustix::mm::{Advice, madvise};
        // SAFETY: the range is the mapping; the advice changes no contents.
        let asked = unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
        let chosen = std::fs::read_to_string(SHMEM_HUGE).unwrap_or_default();
        asked.is_ok()
            && ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|on| chosen.contains(on))
    }

    /// A page found missing under load would kill the process during a save.
    #[cfg(not(miri))]
    fn populate(&self) -> std::io::Result<()> {
        use rustix::mm::{Advice, madvise};
        // SAFETY: the range is the mapping; populating it changes no bytes that are read.
        match unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                tracing::debug!(
                    "this kernel cannot populate the arena at start; pages come as they are used"
                );
                Ok(())
            }
            Err(cause) => Err(cause.into()),
        }
    }

    #[cfg(not(miri))]
    fn seal(&mut self) -> std::io::Result<()> {
        use rustix::fs::{SealFlags, fcntl_add_seals};
        fcntl_add_seals(&self.file, SealFlags::GROW | SealFlags::SHRINK)?;
        // Kernels before 5.1 do not support it.
        match fcntl_add_seals(&self.file, SealFlags::FUTURE_WRITE) {
            Ok(()) => self.is_sealed = true,
            Err(cause) => {
                tracing::debug!(%cause, "the arena cannot be sealed against writers, so it is not shared \
                    with other processes");
            }
        }
        // Last: a process that reopens the file could seal it against us.
        Ok(fcntl_add_seals(&self.file, SealFlags::SEAL)?)
    }

    /// A read-only handle for mapping the memory.
    ///
    /// # Errors
    /// A system error, or a kernel that cannot keep a reader from reopening the file for writing.
    #[cfg(not(miri))]
    pub(super) fn reader(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        use std::os::fd::AsRawFd;
        if !self.is_sealed {
            return Err(std::io::Error::other(
                "this kernel cannot seal memory against writers; Linux 5.1 and later can",
            ));
        }
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(std::fs::File::open(path)?.into())
    }

    #[cfg(miri)]
    pub(super) fn reader(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[cfg(miri)]
    pub(super) fn new(len: usize) -> std::io::Result<ArenaMemory> {
        let memory = Box::leak(vec![0u8; len].into_boxed_slice());
        Ok(ArenaMemory { base: NonNull::from(memory).cast(), len, is_huge: false })
    }

    /// Address and length, if a device may register all of it: each page takes 16 bytes of kernel
    /// memory per device, and time at start.
    pub(super) fn registrable(&self) -> Option<(*mut u8, usize)> {
        (self.is_huge || self.len <= SMALL_PAGES_REGISTERED_MAX).then_some((self.base.as_ptr(), self.len))
    }

    /// Address and length.
    #[cfg(feature = "rdma")]
    pub(super) fn range(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len)
    }

    /// Offset of an address; `None` if it is outside.
    pub(super) fn offset_of(&self, address: *const u8) -> Option<usize> {
        address.addr().checked_sub(self.base.as_ptr().addr()).filter(|offset| *offset < self.len)
    }

    /// Address of an offset.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: callers pass the offset of a slot in use, which lies inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// Name shown by the system for the mapping.
#[cfg(not(miri))]
const NAME: &str = "kvfleet-arena";

/// System setting for huge pages in shared memory.
#[cfg(not(miri))]
const SHMEM_HUGE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

#[cfg(not(miri))]
fn flags() -> rustix::fs::MemfdFlags {
    rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING
}

/// Memory available without swapping, as the kernel estimates it; `None` if unknown.
#[cfg(not(miri))]
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

impl Drop for ArenaMemory {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        // SAFETY: base and len are those of the mapping, and no slot is left, because each holds
        // the `Arc`.
        if let Err(cause) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "the arena could not be unmapped");
        }
        #[cfg(miri)]
        // SAFETY: made by `Box::leak` of a boxed slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len)) });
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kvfleet_errors_doc::says;
    use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::fd::{AsFd, AsRawFd};

    /// Whole pages of either size.
    const LEN: usize = HUGE_PAGE_BYTES;

    #[test]
    fn reader_sees_writes_and_cannot_write() {
        let memory = ArenaMemory::new(LEN).unwrap();
        let reader = memory.reader().unwrap();
        // SAFETY: a fresh mapping of the whole file, which cannot shrink.
        let seen = unsafe { mmap(std::ptr::null_mut(), LEN, ProtFlags::READ, MapFlags::SHARED, &reader, 0) }
            .unwrap();
        // SAFETY: inside our mapping, without another writer.
        unsafe { memory.at(4097).write(7) };
        // SAFETY: inside the reader's mapping, which lives until it is unmapped below.
        assert_eq!(unsafe { seen.cast::<u8>().add(4097).read_volatile() }, 7);
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        let again = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", reader.as_raw_fd()))
            .unwrap();
        for file in [reader.as_fd(), again.as_fd()] {
            // SAFETY: as above; it is refused.
            assert!(unsafe { mmap(std::ptr::null_mut(), LEN, writable, MapFlags::SHARED, file, 0) }.is_err());
            assert!(ftruncate(file, 0).is_err());
            // Not even a seal that is set already: sealing is forbidden.
            assert_eq!(fcntl_add_seals(file, SealFlags::GROW), Err(rustix::io::Errno::PERM));
        }
        let all = SealFlags::GROW | SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        assert_eq!(fcntl_get_seals(&reader), Ok(all));
        assert!(rustix::io::pwrite(&again, &[1], 0).is_err());
        assert!(fallocate(&again, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).is_err());
        // SAFETY: the reader's mapping, without remaining references.
        unsafe { munmap(seen, LEN) }.unwrap();
    }

    #[test]
    fn unsealed_memory_is_not_shared() {
        let mut memory = ArenaMemory::new(LEN).unwrap();
        memory.is_sealed = false;
        says("memory that a kernel cannot seal against writers", &memory.reader().unwrap_err(), &[]);
    }

    #[test]
    fn more_memory_than_available_is_refused() {
        let cause = ArenaMemory::new(1 << 44).unwrap_err().to_string();
        assert!(cause.contains("bytes available"), "{cause}");
    }
}
