//! Memory of a GPU for the card: which way it is registered, and in which order ways are tried.
//!
//! A GPU's driver hands out memory as a file (dma-buf), which the card's driver maps. Where one of both cannot, an older kernel
//! module may let the card register the GPU's address itself, and else bytes go by way of page-locked memory of the host.
//! What was registered is tried before it counts: a kernel can register and still not transfer. Not here: CUDA, which is
//! behind [`ExportDmaBuf`]; who allocates. Nothing uses this yet.

use std::any::Any;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Whose memory an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The host's.
    Host,
    /// A GPU's.
    Gpu,
}

/// A range of addresses, with what keeps it allocated.
#[derive(Clone)]
pub struct Range {
    /// The first byte's address.
    pub address: u64,
    /// How many bytes.
    pub len: u64,
    /// Dropped only after the range was deregistered.
    pub allocation: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Range({:#x}, {} bytes)", self.address, self.len)
    }
}

/// An allocation as a file.
#[derive(Debug)]
pub struct Exported {
    /// The file, which is closed once the range is registered.
    pub file: OwnedFd,
    /// Where the range begins in it: the file is the whole allocation, of which frameworks give out parts.
    pub offset: u64,
}

/// What a GPU's driver does. Each call makes the GPU's context current by itself, since threads of a runtime have none.
pub trait ExportDmaBuf {
    /// Whose memory the range is.
    ///
    /// # Errors
    /// When it is nobody's.
    fn owner(&self, range: &Range) -> io::Result<Owner>;

    /// The allocation that holds the range.
    ///
    /// # Errors
    /// What the driver says; `Unsupported` when it exports nothing.
    fn export(&self, range: &Range) -> io::Result<Exported>;
}

/// What a card's driver does with addresses.
pub trait RegisterRange {
    /// Registered memory, until dropped.
    type Registered;

    /// By address: the host's memory, or a GPU's where a kernel module knows of it.
    ///
    /// # Errors
    /// What the system says.
    fn by_address(&self, range: &Range) -> io::Result<Self::Registered>;

    /// By a file, from `offset` in it on.
    ///
    /// # Errors
    /// What the system says.
    fn by_file(&self, range: &Range, file: BorrowedFd<'_>, offset: u64) -> io::Result<Self::Registered>;

    /// Whether the card reads what the GPU wrote there: a transfer of a pattern to this card itself.
    fn is_readable(&self, registered: &Self::Registered) -> bool;
}

/// How a range became reachable for the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is the host's.
    Host,
    /// As a file of the GPU's driver.
    DmaBuf,
    /// By its address, through a kernel module.
    PeerMemory,
}

/// A registered range.
#[derive(Debug)]
pub struct Reachable<R> {
    /// How.
    pub way: Way,
    /// Deregistered before the allocation is let go: fields are dropped in this order.
    pub registered: R,
    _allocation: Range,
}

/// Registers a range by the first way that works; nothing when bytes must be staged through memory of the host.
///
/// # Errors
/// When nobody owns the range, or something fails that no other way would do better: memory that cannot be locked, say.
pub fn register<R: RegisterRange>(
    gpu: &dyn ExportDmaBuf,
    card: &R,
    range: &Range,
) -> io::Result<Option<Reachable<R::Registered>>> {
    let reachable = |way, registered| Reachable { way, registered, _allocation: range.clone() };
    if gpu.owner(range)? == Owner::Host {
        return Ok(Some(reachable(Way::Host, card.by_address(range)?)));
    }
    let by_file = gpu.export(range).and_then(|exported| {
        use std::os::fd::AsFd;
        card.by_file(range, exported.file.as_fd(), exported.offset)
    });
    if let Some(registered) = tried(card, by_file)? {
        return Ok(Some(reachable(Way::DmaBuf, registered)));
    }
    Ok(tried(card, card.by_address(range))?.map(|registered| reachable(Way::PeerMemory, registered)))
}

/// What was registered and works; nothing when this way is closed.
fn tried<R: RegisterRange>(
    card: &R,
    registered: io::Result<R::Registered>,
) -> io::Result<Option<R::Registered>> {
    match registered {
        Ok(registered) => Ok(Some(registered).filter(|registered| card.is_readable(registered))),
        // The kernel's names for "not with this": no such call, not this kind of memory, not this address.
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

    /// A driver and a card that write down what is asked of them.
    #[derive(Default)]
    struct Fakes {
        log: Rc<RefCell<Vec<String>>>,
        owner: Option<Owner>,
        export: Option<i32>,
        by_file: Option<i32>,
        by_address: Option<i32>,
        unreadable: Vec<&'static str>,
        file: RefCell<Option<RawFd>>,
    }

    struct Mr(&'static str, Rc<RefCell<Vec<String>>>);

    impl Drop for Mr {
        fn drop(&mut self) {
            self.1.borrow_mut().push(format!("deregister {}", self.0));
        }
    }

    impl Fakes {
        fn note(&self, line: String, refuse: Option<i32>) -> io::Result<()> {
            self.log.borrow_mut().push(line);
            refuse.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }

        fn run(&self) -> (io::Result<Option<Way>>, Vec<String>) {
            let range = Range { address: 0x1040, len: 64, allocation: Arc::new(()) };
            let way = register(self, self, &range).map(|done| done.map(|done| done.way));
            (way, self.log.borrow().clone())
        }
    }

    impl ExportDmaBuf for Fakes {
        fn owner(&self, _: &Range) -> io::Result<Owner> {
            self.owner.ok_or_else(|| io::ErrorKind::InvalidInput.into())
        }

        fn export(&self, range: &Range) -> io::Result<Exported> {
            self.note(format!("export {:#x}", range.address), self.export)?;
            let file: OwnedFd = std::fs::File::open("/dev/null")?.into();
            *self.file.borrow_mut() = Some(file.as_raw_fd());
            Ok(Exported { file, offset: 0x40 })
        }
    }

    impl RegisterRange for Fakes {
        type Registered = Mr;

        fn by_address(&self, range: &Range) -> io::Result<Mr> {
            self.note(format!("address {:#x}", range.address), self.by_address)?;
            Ok(Mr("address", Rc::clone(&self.log)))
        }

        fn by_file(&self, range: &Range, file: BorrowedFd<'_>, offset: u64) -> io::Result<Mr> {
            assert_eq!(Some(file.as_raw_fd()), *self.file.borrow(), "the file that was exported, still open");
            self.note(format!("file at {offset:#x} as {:#x}", range.address), self.by_file)?;
            Ok(Mr("file", Rc::clone(&self.log)))
        }

        fn is_readable(&self, registered: &Mr) -> bool {
            !self.unreadable.contains(&registered.0)
        }
    }

    fn gpu() -> Fakes {
        Fakes { owner: Some(Owner::Gpu), ..Fakes::default() }
    }

    #[test]
    fn ways_are_tried_in_their_order() {
        let host = Fakes { owner: Some(Owner::Host), ..Fakes::default() };
        let (way, log) = host.run();
        assert_eq!((way.unwrap(), &log[..1]), (Some(Way::Host), &["address 0x1040".to_owned()][..]));

        let (way, log) = gpu().run();
        assert_eq!(way.unwrap(), Some(Way::DmaBuf));
        assert_eq!(log, ["export 0x1040", "file at 0x40 as 0x1040", "deregister file"]);

        let refused = Fakes { by_file: Some(libc::EOPNOTSUPP), ..gpu() };
        let (way, log) = refused.run();
        assert_eq!(way.unwrap(), Some(Way::PeerMemory));
        assert_eq!(log[2..], ["address 0x1040", "deregister address"]);

        let no_export = Fakes { export: Some(libc::EOPNOTSUPP), ..gpu() };
        assert_eq!(no_export.run().0.unwrap(), Some(Way::PeerMemory));

        let staged = Fakes { export: Some(libc::EOPNOTSUPP), by_address: Some(libc::EFAULT), ..gpu() };
        assert_eq!(staged.run().0.unwrap(), None);
    }

    #[test]
    fn what_registers_and_does_not_transfer_is_given_up() {
        let dumb = Fakes { unreadable: vec!["file"], ..gpu() };
        let (way, log) = dumb.run();
        assert_eq!(way.unwrap(), Some(Way::PeerMemory));
        assert_eq!(log[2..4], ["deregister file", "address 0x1040"], "before the next is tried");
        let both = Fakes { unreadable: vec!["file", "address"], ..gpu() };
        assert_eq!(both.run().0.unwrap(), None);
    }

    #[test]
    fn what_no_other_way_would_cure_is_said() {
        let full = Fakes { by_file: Some(libc::ENOMEM), ..gpu() };
        let (way, log) = full.run();
        assert_eq!((way.unwrap_err().raw_os_error(), log.len()), (Some(libc::ENOMEM), 2));
        assert!(Fakes::default().run().0.is_err(), "nobody's memory");
    }

    #[test]
    fn the_file_is_closed_and_the_allocation_outlives_its_registration() {
        let fakes = gpu();
        let log = Rc::clone(&fakes.log);
        struct Allocation(std::sync::mpsc::Sender<()>);
        impl Drop for Allocation {
            fn drop(&mut self) {
                let _ = self.0.send(()); // nobody may listen any more
            }
        }
        let (freed, is_freed) = std::sync::mpsc::channel();
        let range = Range { address: 0x1040, len: 64, allocation: Arc::new(Allocation(freed)) };
        let reachable = register(&fakes, &fakes, &range).unwrap().unwrap();
        drop(range);
        assert!(is_freed.try_recv().is_err(), "the registration keeps it");
        let open = std::fs::read_link(format!("/proc/self/fd/{}", fakes.file.borrow().unwrap()));
        assert!(open.map_or(true, |path| path != std::path::Path::new("/dev/null")), "the file is closed");
        drop(reachable);
        assert_eq!(log.borrow().last().unwrap(), "deregister file");
        assert!(is_freed.try_recv().is_ok());
    }
}
