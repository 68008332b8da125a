//! Registers GPU memory with the card by the first method that works.
//!
//! A GPU's driver exports memory as a file (dma-buf), which the card's driver maps. If either
//! cannot do that, an older kernel module may let the card register the GPU's address directly.
//! Otherwise bytes are staged through page-locked host memory. A registration is tested before it
//! counts, because a kernel can accept it and still not transfer. Not here: CUDA, which is behind
//! [`ExportDmaBuf`]; allocation. Not used yet.

use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Owner of the memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOwner {
    /// The host.
    Host,
    /// A GPU.
    Gpu,
}

/// A range of addresses, and a reference that keeps it allocated.
#[derive(Clone)]
pub struct AddressRange {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Dropped only after the range was deregistered.
    pub allocation: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Range({:#x}, {} bytes)", self.address, self.len)
    }
}

/// An allocation exported as a file.
#[derive(Debug)]
pub struct DmaBufExport {
    /// The file, which is closed once the range is registered.
    pub file: OwnedFd,
    /// Offset of the range in the file: the file is the whole allocation, and frameworks hand out
    /// parts of it.
    pub offset: u64,
}

/// Functions of a GPU's driver. Each call makes the GPU's context current, because runtime threads
/// have none.
pub trait ExportDmaBuf {
    /// Owner of the range.
    ///
    /// # Errors
    /// If the range has no owner.
    fn owner(&self, range: &AddressRange) -> io::Result<MemoryOwner>;

    /// Exports the allocation that holds the range.
    ///
    /// # Errors
    /// The driver's error; `Unsupported` if it has no export.
    fn export(&self, range: &AddressRange) -> io::Result<DmaBufExport>;
}

/// Functions of a card's driver that register memory.
pub trait RegisterRange {
    /// Registered memory, until dropped.
    type Registered;

    /// Registers by address: host memory, or GPU memory if a kernel module supports it.
    ///
    /// # Errors
    /// The system's error.
    fn by_address(&self, range: &AddressRange) -> io::Result<Self::Registered>;

    /// Registers by file, from `offset` on.
    ///
    /// # Errors
    /// The system's error.
    fn by_file(
        &self,
        range: &AddressRange,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<Self::Registered>;

    /// Whether the card reads the GPU's data there, tested by the transfer of a pattern to this
    /// card itself.
    fn is_readable(&self, registered: &Self::Registered) -> bool;
}

/// How a range was made reachable for the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationMethod {
    /// It is host memory.
    Host,
    /// As a dma-buf file of the GPU's driver.
    DmaBuf,
    /// By its address, through a kernel module.
    PeerMemory,
}

/// A registered range.
#[derive(Debug)]
pub struct RegisteredRange<R> {
    /// Method of registration.
    pub method: RegistrationMethod,
    /// Deregistered before the allocation is released: fields are dropped in this order.
    pub registered: R,
    _allocation: AddressRange,
}

/// Registers a range by the first method that works; `None` if bytes must be staged through host
/// memory.
///
/// # Errors
/// If the range has no owner, or an error occurs that no other method would avoid, such as memory
/// that cannot be locked.
pub fn register<R: RegisterRange>(
    gpu: &dyn ExportDmaBuf,
    card: &R,
    range: &AddressRange,
) -> io::Result<Option<RegisteredRange<R::Registered>>> {
    let reachable = |way, registered| RegisteredRange { method: way, registered, _allocation: range.clone() };
    if gpu.owner(range)? == MemoryOwner::Host {
        return Ok(Some(reachable(RegistrationMethod::Host, card.by_address(range)?)));
    }
    let by_file = gpu.export(range).and_then(|exported| {
        use std::os::fd::AsFd;
        card.by_file(range, exported.file.as_fd(), exported.offset)
    });
    if let Some(registered) = verified(card, by_file)? {
        return Ok(Some(reachable(RegistrationMethod::DmaBuf, registered)));
    }
    Ok(verified(card, card.by_address(range))?
        .map(|registered| reachable(RegistrationMethod::PeerMemory, registered)))
}

/// The registration if it works; `None` if this method does not.
fn verified<R: RegisterRange>(
    card: &R,
    registered: io::Result<R::Registered>,
) -> io::Result<Option<R::Registered>> {
    match registered {
        Ok(registered) => Ok(Some(registered).filter(|registered| card.is_readable(registered))),
        // Error numbers that mean "not by this method": no such call, wrong kind of memory, or
        // unsuitable address.
        Err(cause) => match cause.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EFAULT | libc::ENODEV) => Ok(None),
            None if cause.kind() == io::ErrorKind::Unsupported => Ok(None),
            _ => Err(cause),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::RefCell;
    use std::os::fd::{AsRawFd, RawFd};
    use std::rc::Rc;

    use super::*;

    /// A driver and a card that record their calls.
    #[derive(Default)]
    struct FakeDrivers {
        log: Rc<RefCell<Vec<String>>>,
        owner: Option<MemoryOwner>,
        export: Option<i32>,
        by_file: Option<i32>,
        by_address: Option<i32>,
        unreadable: Vec<&'static str>,
        file: RefCell<Option<RawFd>>,
    }

    struct FakeRegistration(&'static str, Rc<RefCell<Vec<String>>>);

    impl Drop for FakeRegistration {
        fn drop(&mut self) {
            self.1.borrow_mut().push(format!("deregister {}", self.0));
        }
    }

    impl FakeDrivers {
        fn note(&self, line: String, refuse: Option<i32>) -> io::Result<()> {
            self.log.borrow_mut().push(line);
            refuse.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }

        fn run(&self) -> (io::Result<Option<RegistrationMethod>>, Vec<String>) {
            let range = AddressRange { address: 0x1040, len: 64, allocation: Arc::new(()) };
            let way = register(self, self, &range).map(|done| done.map(|done| done.method));
            (way, self.log.borrow().clone())
        }
    }

    impl ExportDmaBuf for FakeDrivers {
        fn owner(&self, _: &AddressRange) -> io::Result<MemoryOwner> {
            self.owner.ok_or_else(|| io::ErrorKind::InvalidInput.into())
        }

        fn export(&self, range: &AddressRange) -> io::Result<DmaBufExport> {
            self.note(format!("export {:#x}", range.address), self.export)?;
            let file: OwnedFd = std::fs::File::open("/dev/null")?.into();
            *self.file.borrow_mut() = Some(file.as_raw_fd());
            Ok(DmaBufExport { file, offset: 0x40 })
        }
    }

    impl RegisterRange for FakeDrivers {
        type Registered = FakeRegistration;

        fn by_address(&self, range: &AddressRange) -> io::Result<FakeRegistration> {
            self.note(format!("address {:#x}", range.address), self.by_address)?;
            Ok(FakeRegistration("address", Rc::clone(&self.log)))
        }

        fn by_file(
            &self,
            range: &AddressRange,
            file: BorrowedFd<'_>,
            offset: u64,
        ) -> io::Result<FakeRegistration> {
            assert_eq!(Some(file.as_raw_fd()), *self.file.borrow(), "the exported file, still open");
            self.note(format!("file at {offset:#x} as {:#x}", range.address), self.by_file)?;
            Ok(FakeRegistration("file", Rc::clone(&self.log)))
        }

        fn is_readable(&self, registered: &FakeRegistration) -> bool {
            !self.unreadable.contains(&registered.0)
        }
    }

    fn gpu() -> FakeDrivers {
        FakeDrivers { owner: Some(MemoryOwner::Gpu), ..FakeDrivers::default() }
    }

    #[test]
    fn methods_are_tried_in_order() {
        let host = FakeDrivers { owner: Some(MemoryOwner::Host), ..FakeDrivers::default() };
        let (way, log) = host.run();
        assert_eq!(
            (way.unwrap(), &log[..1]),
            (Some(RegistrationMethod::Host), &["address 0x1040".to_owned()][..])
        );

        let (way, log) = gpu().run();
        assert_eq!(way.unwrap(), Some(RegistrationMethod::DmaBuf));
        assert_eq!(log, ["export 0x1040", "file at 0x40 as 0x1040", "deregister file"]);

        let refused = FakeDrivers { by_file: Some(libc::EOPNOTSUPP), ..gpu() };
        let (way, log) = refused.run();
        assert_eq!(way.unwrap(), Some(RegistrationMethod::PeerMemory));
        assert_eq!(log[2..], ["address 0x1040", "deregister address"]);

        let no_export = FakeDrivers { export: Some(libc::EOPNOTSUPP), ..gpu() };
        assert_eq!(no_export.run().0.unwrap(), Some(RegistrationMethod::PeerMemory));

        let staged = FakeDrivers { export: Some(libc::EOPNOTSUPP), by_address: Some(libc::EFAULT), ..gpu() };
        assert_eq!(staged.run().0.unwrap(), None);
    }

    #[test]
    fn a_registration_that_cannot_transfer_is_dropped() {
        let dumb = FakeDrivers { unreadable: vec!["file"], ..gpu() };
        let (way, log) = dumb.run();
        assert_eq!(way.unwrap(), Some(RegistrationMethod::PeerMemory));
        assert_eq!(log[2..4], ["deregister file", "address 0x1040"], "before the next method is tried");
        let both = FakeDrivers { unreadable: vec!["file", "address"], ..gpu() };
        assert_eq!(both.run().0.unwrap(), None);
    }

    #[test]
    fn errors_that_no_other_method_avoids_are_returned() {
        let full = FakeDrivers { by_file: Some(libc::ENOMEM), ..gpu() };
        let (way, log) = full.run();
        assert_eq!((way.unwrap_err().raw_os_error(), log.len()), (Some(libc::ENOMEM), 2));
        assert!(FakeDrivers::default().run().0.is_err(), "memory without an owner");
    }

    #[test]
    fn the_file_is_closed_and_the_allocation_outlives_its_registration() {
        let fakes = gpu();
        let log = Rc::clone(&fakes.log);
        struct Allocation(std::sync::mpsc::Sender<()>);
        impl Drop for Allocation {
            fn drop(&mut self) {
                let _ = self.0.send(()); // the receiver may be gone
            }
        }
        let (freed, is_freed) = std::sync::mpsc::channel();
        let range = AddressRange { address: 0x1040, len: 64, allocation: Arc::new(Allocation(freed)) };
        let reachable = register(&fakes, &fakes, &range).unwrap().unwrap();
        drop(range);
        assert!(is_freed.try_recv().is_err(), "the registration keeps the allocation");
        let open = std::fs::read_link(format!("/proc/self/fd/{}", fakes.file.borrow().unwrap()));
        assert!(open.map_or(true, |path| path != std::path::Path::new("/dev/null")), "the file is closed");
        drop(reachable);
        assert_eq!(log.borrow().last().unwrap(), "deregister file");
        assert!(is_freed.try_recv().is_ok());
    }
}
