//! The calls of libibverbs, which is loaded when the process runs: its absence is an answer and not a failed start.
//!
//! All calls into C stand here. The library is thread-safe; handles are kept in the order in which C wants them to
//! end: queue pairs and memory before their domain, everything before its device. Not here: layouts (`abi.rs`), which
//! device (`choose.rs`), and what a transfer is for.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::abi;
use super::choose::Candidate;
use super::gpu::{Exported, Range};
use super::memory::Memory;
use super::rail::{
    Access, Completion, Direction, Domain, End, Port, Queue, Rail, RegisterMr, Role, Transfer,
};
use super::{RdmaError, RdmaTuning};

/// The library's file: its first major version, whose layouts never change.
const NAME: &CStr = c"libibverbs.so.1";

/// Ends of transfers that are asked for at once.
const POLL_AT_ONCE: usize = 64;

/// The library's calls, by name.
struct Library {
    get_device_list: abi::GetDeviceList,
    free_device_list: abi::FreeDeviceList,
    get_device_name: abi::GetDeviceName,
    open_device: abi::OpenDevice,
    close_device: abi::CloseDevice,
    query_port: abi::QueryPort,
    alloc_pd: abi::AllocPd,
    dealloc_pd: abi::DeallocPd,
    reg_mr: abi::RegMr,
    reg_dmabuf_mr: Option<abi::RegDmabufMr>,
    dereg_mr: abi::DeregMr,
    create_cq: abi::CreateCq,
    destroy_cq: abi::DestroyCq,
    create_qp: abi::CreateQp,
    modify_qp: abi::ModifyQp,
    destroy_qp: abi::DestroyQp,
    /// Since release 35.
    is_fork_initialized: Option<abi::IsForkInitialized>,
    fork_init: Option<abi::ForkInit>,
}

/// A call of the loaded library.
///
/// # Safety
/// `F` is the type of the C function of that name.
unsafe fn symbol<F: Copy>(library: NonNull<c_void>, name: &CStr) -> Result<F, RdmaError> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    // SAFETY: a live handle and a name that ends with zero.
    let found = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    if found.is_null() {
        let cause = format!("it has no {}", name.to_string_lossy());
        return Err(RdmaError::Library { cause });
    }
    // SAFETY: of one size, as checked above; the caller answers for the type.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

impl Library {
    /// Loads it. It stays loaded: drivers that it loads in turn cannot be unloaded safely.
    fn load(name: &CStr) -> Result<Library, RdmaError> {
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: a name that ends with zero; the library's initialisers are trusted as it is.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        let library = NonNull::new(handle).ok_or_else(|| RdmaError::Library { cause: load_error() })?;
        // SAFETY: each type is that of the function in infiniband/verbs.h.
        unsafe {
            Ok(Library {
                get_device_list: symbol(library, c"ibv_get_device_list")?,
                free_device_list: symbol(library, c"ibv_free_device_list")?,
                get_device_name: symbol(library, c"ibv_get_device_name")?,
                open_device: symbol(library, c"ibv_open_device")?,
                close_device: symbol(library, c"ibv_close_device")?,
                query_port: symbol(library, c"ibv_query_port")?,
                alloc_pd: symbol(library, c"ibv_alloc_pd")?,
                dealloc_pd: symbol(library, c"ibv_dealloc_pd")?,
                reg_mr: symbol(library, c"ibv_reg_mr")?,
                reg_dmabuf_mr: symbol(library, c"ibv_reg_dmabuf_mr").ok(),
                dereg_mr: symbol(library, c"ibv_dereg_mr")?,
                create_cq: symbol(library, c"ibv_create_cq")?,
                destroy_cq: symbol(library, c"ibv_destroy_cq")?,
                create_qp: symbol(library, c"ibv_create_qp")?,
                modify_qp: symbol(library, c"ibv_modify_qp")?,
                destroy_qp: symbol(library, c"ibv_destroy_qp")?,
                is_fork_initialized: symbol(library, c"ibv_is_fork_initialized").ok(),
                fork_init: symbol(library, c"ibv_fork_init").ok(),
            })
        }
    }

    /// Keeps rings and doorbells of queues from children of this process, where the kernel does not: a child that shares their
    /// pages would move the parent's, and the card would look at the old ones. To be called before anything is opened.
    fn survive_forks(&self) {
        // SAFETY: calls without arguments, which change only what the library does from now on.
        let status = self.is_fork_initialized.map(|asked| unsafe { asked() });
        if status == Some(abi::FORK_UNNEEDED) {
            return;
        }
        if let Some(init) = self.fork_init
            // SAFETY: as above.
            && let Err(cause) = checked(unsafe { init() })
        {
            tracing::warn!(%cause, "a process that uses RDMA must not start others with this kernel");
        }
    }

    /// Opens the device of this name.
    fn open(&self, name: &str) -> io::Result<NonNull<abi::Context>> {
        self.survive_forks();
        // SAFETY: the list is freed below, after its last use; an opened device does not need it.
        unsafe {
            let mut count: c_int = 0;
            let list = (self.get_device_list)(&raw mut count);
            if list.is_null() {
                return Err(io::Error::last_os_error());
            }
            let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
            let named = |device: &&*mut abi::Device| {
                let found = (self.get_device_name)(**device);
                !found.is_null() && CStr::from_ptr(found).to_bytes() == name.as_bytes()
            };
            let opened = devices
                .iter()
                .find(named)
                .map(|device| NonNull::new((self.open_device)(*device)).ok_or_else(io::Error::last_os_error));
            (self.free_device_list)(list);
            opened.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
        }
    }
}

/// What the loader says of its last failure.
fn load_error() -> String {
    // SAFETY: gives a string of this thread, or nothing; it is copied at once.
    unsafe {
        let said = libc::dlerror();
        if said.is_null() {
            "unknown".to_owned()
        } else {
            CStr::from_ptr(said).to_string_lossy().into_owned()
        }
    }
}

/// An error number that a call gave back.
fn checked(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Older drivers leave the number where other calls of the system do.
        -1 => Err(io::Error::last_os_error()),
        // Some drivers give the number with a minus before it.
        code => Err(io::Error::from_raw_os_error(code.saturating_abs())),
    }
}

/// An open device.
struct Opened {
    library: Library,
    context: NonNull<abi::Context>,
}

// SAFETY: libibverbs allows every call from every thread.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened once, and everything of it is gone: whatever is of it holds its `Arc`.
        if let Err(cause) = checked(unsafe { (self.library.close_device)(self.context.as_ptr()) }) {
            tracing::debug!(%cause, "an RDMA device was not closed");
        }
    }
}

/// One port of an RDMA device, with one completion queue.
pub(super) struct VerbsRail {
    cq: Arc<CompletionQueue>,
    port: Port,
    link: Link,
}

/// What each queue pair needs to know of its port.
#[derive(Clone)]
struct Link {
    number: u8,
    gid_index: u8,
    mtu: u8,
    tuning: RdmaTuning,
}

struct CompletionQueue {
    device: Arc<Opened>,
    cq: NonNull<abi::Cq>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: created once; queue pairs hold its `Arc`.
        if let Err(cause) = checked(unsafe { (self.device.library.destroy_cq)(self.cq.as_ptr()) }) {
            tracing::debug!(%cause, "a completion queue was not ended");
        }
    }
}

impl VerbsRail {
    /// Loads the library and opens the port.
    pub(super) fn open(candidate: &Candidate, tuning: &RdmaTuning) -> Result<VerbsRail, RdmaError> {
        let failed = |what: &'static str| {
            let device = candidate.device.clone();
            move |cause: io::Error| RdmaError::Device { device, what, cause }
        };
        let library = Library::load(NAME)?;
        let context = library.open(&candidate.device).map_err(failed("opened"))?;
        let device = Arc::new(Opened { library, context });
        let mut attributes = abi::PortAttr::default();
        // SAFETY: an open device, and room for at least as much as the call writes.
        let asked =
            unsafe { (device.library.query_port)(context.as_ptr(), candidate.port, &raw mut attributes) };
        checked(asked).map_err(failed("asked for its port"))?;
        let depth = c_int::try_from(tuning.in_flight_max.saturating_mul(2).max(16)).unwrap_or(c_int::MAX);
        let (none, channel) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: an open device; no channel, so that the queue is asked and never wakes anybody.
        let cq = unsafe { (device.library.create_cq)(context.as_ptr(), depth, none, channel, 0) };
        let cq = NonNull::new(cq).ok_or_else(io::Error::last_os_error);
        let cq = Arc::new(CompletionQueue { device, cq: cq.map_err(failed("given a completion queue"))? });
        let mtu = u8::try_from(attributes.active_mtu).unwrap_or(1).clamp(1, 5);
        let (device_name, reads) = (candidate.device.clone(), tuning.reads_at_once);
        let port = Port { device: device_name, gid: candidate.gid, lid: attributes.lid, mtu, reads };
        let link =
            Link { number: candidate.port, gid_index: candidate.gid_index, mtu, tuning: tuning.clone() };
        Ok(VerbsRail { cq, port, link })
    }
}

impl Rail for VerbsRail {
    fn port(&self) -> &Port {
        &self.port
    }

    fn domain(&self) -> io::Result<Arc<dyn Domain>> {
        let device = &self.cq.device;
        // SAFETY: an open device.
        let pd = unsafe { (device.library.alloc_pd)(device.context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(io::Error::last_os_error)?;
        let pd = Arc::new(Pd { device: Arc::clone(device), pd });
        Ok(Arc::new(VerbsDomain { pd, cq: Arc::clone(&self.cq), link: self.link.clone() }))
    }

    fn poll(&self, ended: &mut Vec<Completion>) -> io::Result<()> {
        let mut found = [abi::Wc::NONE; POLL_AT_ONCE];
        let cq = self.cq.cq.as_ptr();
        // SAFETY: a live completion queue, whose context has its driver's calls; as much room as is said.
        let count = unsafe {
            let poll = (*(*cq).context).ops.poll_cq.ok_or(io::ErrorKind::Unsupported)?;
            poll(cq, POLL_AT_ONCE as c_int, found.as_mut_ptr())
        };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue is broken"))?;
        ended.extend(found.iter().take(count).map(|wc| Completion { id: wc.wr_id, status: wc.status }));
        Ok(())
    }
}

struct Pd {
    device: Arc<Opened>,
    pd: NonNull<abi::Pd>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: allocated once; what is in it holds its `Arc`.
        if let Err(cause) = checked(unsafe { (self.device.library.dealloc_pd)(self.pd.as_ptr()) }) {
            tracing::debug!(%cause, "a protection domain was not ended");
        }
    }
}

struct VerbsDomain {
    pd: Arc<Pd>,
    cq: Arc<CompletionQueue>,
    link: Link,
}

/// What a peer may do, as verbs say it. The card writes what this end reads, so `Local` is for writing.
fn flags(access: Access) -> c_int {
    match access {
        Access::Local => abi::ACCESS_LOCAL_WRITE,
        Access::Read => abi::ACCESS_REMOTE_READ,
        Access::ReadWrite => abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE,
    }
}

impl Domain for VerbsDomain {
    fn register(&self, memory: &Arc<Memory>, access: Access) -> io::Result<Box<dyn RegisterMr>> {
        let base = memory.address() as *mut c_void;
        let len = usize::try_from(memory.len_bytes()).map_err(io::Error::other)?;
        let library = &self.pd.device.library;
        // SAFETY: a live domain, and memory that is kept until it is deregistered. A card that writes there is what
        // places are for.
        let mr = unsafe { (library.reg_mr)(self.pd.pd.as_ptr(), base, len, flags(access)) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        Ok(Box::new(VerbsMr { pd: Arc::clone(&self.pd), mr, memory: Some(Arc::clone(memory) as Kept) }))
    }

    fn register_file(&self, range: &Range, exported: &Exported) -> io::Result<Box<dyn RegisterMr>> {
        let register = self.pd.device.library.reg_dmabuf_mr.ok_or(io::ErrorKind::Unsupported)?;
        let len = usize::try_from(range.len).map_err(io::Error::other)?;
        let (file, access) = (exported.file.as_raw_fd(), flags(Access::ReadWrite));
        // SAFETY: a live domain and an open file; the kernel checks that the range lies in it.
        let mr = unsafe { register(self.pd.pd.as_ptr(), exported.offset, len, range.address, file, access) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        let memory = Some(Arc::clone(&range.allocation) as Kept);
        Ok(Box::new(VerbsMr { pd: Arc::clone(&self.pd), mr, memory }))
    }

    fn queue(&self, access: Access) -> io::Result<Box<dyn Queue>> {
        let tuning = &self.link.tuning;
        let cap = abi::QpCap {
            max_send_wr: tuning.queue_in_flight_max,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let mut wanted = abi::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: self.cq.cq.as_ptr(),
            recv_cq: self.cq.cq.as_ptr(),
            srq: std::ptr::null_mut(),
            cap,
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        let library = &self.pd.device.library;
        // SAFETY: a live domain and a live completion queue, which the queue pair keeps.
        let qp = unsafe { (library.create_qp)(self.pd.pd.as_ptr(), &raw mut wanted) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        let queue = VerbsQueue {
            pd: Arc::clone(&self.pd),
            _cq: Arc::clone(&self.cq),
            link: self.link.clone(),
            qp: Mutex::new(Some(qp)),
        };
        let mut begin = abi::QpAttr {
            qp_state: abi::QPS_INIT,
            port_num: self.link.number,
            qp_access_flags: flags(access) as u32,
            ..abi::QpAttr::default()
        };
        let mask = abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS;
        queue.modify(&mut begin, mask)?;
        Ok(Box::new(queue))
    }
}

/// What is kept as long as it is registered.
type Kept = Arc<dyn Any + Send + Sync>;

struct VerbsMr {
    pd: Arc<Pd>,
    mr: NonNull<abi::Mr>,
    memory: Option<Kept>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for VerbsMr {}
// SAFETY: as above.
unsafe impl Sync for VerbsMr {}

impl RegisterMr for VerbsMr {
    fn local_key(&self) -> u32 {
        // SAFETY: a live registration, whose keys never change.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr.as_ptr()).rkey }
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        // SAFETY: registered once.
        if let Err(cause) = checked(unsafe { (self.pd.device.library.dereg_mr)(self.mr.as_ptr()) }) {
            tracing::error!(%cause, "memory of an RDMA device was not deregistered, and is kept");
            std::mem::forget(self.memory.take());
        }
    }
}

struct VerbsQueue {
    pd: Arc<Pd>,
    _cq: Arc<CompletionQueue>,
    link: Link,
    /// Until it is ended; its lock keeps calls from what ended.
    qp: Mutex<Option<NonNull<abi::Qp>>>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for VerbsQueue {}
// SAFETY: as above.
unsafe impl Sync for VerbsQueue {}

impl VerbsQueue {
    /// Does something with the queue pair as long as there is one.
    fn with<T>(&self, work: impl FnOnce(*mut abi::Qp) -> T) -> io::Result<T> {
        let qp = self.qp.lock().unwrap_or_else(PoisonError::into_inner);
        let qp = qp.ok_or(io::ErrorKind::NotConnected)?;
        Ok(work(qp.as_ptr()))
    }

    fn modify(&self, to: &mut abi::QpAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: a live queue pair.
        checked(self.with(|qp| unsafe { (self.pd.device.library.modify_qp)(qp, to, mask) })?)
    }
}

impl Queue for VerbsQueue {
    fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        self.with(|qp| unsafe { (*qp).qp_num }).unwrap_or(0)
    }

    fn connect(&self, role: Role, packet: u32, peer: &End) -> io::Result<()> {
        let Link { number, gid_index, mtu, tuning } = &self.link;
        let reads = tuning.reads_at_once.min(peer.reads);
        let (high, low) = peer.gid.0.split_at(8);
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight of sixteen bytes"));
        let mut answer = abi::QpAttr {
            qp_state: abi::QPS_RTR,
            path_mtu: u32::from(peer.mtu.clamp(1, 5).min(*mtu)),
            dest_qp_num: peer.queue,
            rq_psn: peer.packet,
            max_dest_rd_atomic: reads,
            min_rnr_timer: 12,
            ah_attr: abi::AhAttr {
                dgid: [word(high), word(low)],
                sgid_index: *gid_index,
                hop_limit: 64,
                traffic_class: tuning.traffic_class,
                dlid: peer.lid,
                is_global: 1,
                port_num: *number,
                ..abi::AhAttr::default()
            },
            ..abi::QpAttr::default()
        };
        let mask = abi::QP_STATE
            | abi::QP_AV
            | abi::QP_PATH_MTU
            | abi::QP_DEST_QPN
            | abi::QP_RQ_PSN
            | abi::QP_MAX_DEST_RD_ATOMIC
            | abi::QP_MIN_RNR_TIMER;
        self.modify(&mut answer, mask)?;
        if role == Role::Answers {
            return Ok(());
        }
        let mut ask = abi::QpAttr {
            qp_state: abi::QPS_RTS,
            sq_psn: packet,
            timeout: tuning.ack_timeout,
            retry_cnt: tuning.retries,
            rnr_retry: 7,
            max_rd_atomic: reads,
            ..abi::QpAttr::default()
        };
        let mask = abi::QP_STATE
            | abi::QP_SQ_PSN
            | abi::QP_TIMEOUT
            | abi::QP_RETRY_CNT
            | abi::QP_RNR_RETRY
            | abi::QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut ask, mask)
    }

    fn post(&self, transfer: &Transfer) -> io::Result<()> {
        let mut piece =
            abi::Sge { addr: transfer.local_address, length: transfer.len, lkey: transfer.local_key };
        let mut wanted = abi::SendWr {
            wr_id: transfer.id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
            opcode: match transfer.direction {
                Direction::Read => abi::WR_RDMA_READ,
                Direction::Write => abi::WR_RDMA_WRITE,
            },
            send_flags: abi::SEND_SIGNALED,
            imm_data: 0,
            remote_addr: transfer.remote_address,
            rkey: transfer.remote_key,
            _rest: [0; 9],
        };
        let mut refused = MaybeUninit::uninit();
        // SAFETY: a live queue pair, whose context has its driver's calls. The request is copied before the call is
        // over; the memory it names is checked by the card against the key, and kept by whoever posts.
        let posted = self.with(|qp| unsafe {
            let post = (*(*qp).context).ops.post_send?;
            Some(post(qp, &raw mut wanted, refused.as_mut_ptr()))
        });
        checked(posted?.ok_or(io::ErrorKind::Unsupported)?)
    }

    fn end(&self) -> io::Result<()> {
        let taken = self.qp.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(qp) = taken else { return Ok(()) };
        // SAFETY: created once, and taken out above, so that nothing uses it again.
        checked(unsafe { (self.pd.device.library.destroy_qp)(qp.as_ptr()) })
    }
}

impl Drop for VerbsQueue {
    fn drop(&mut self) {
        if let Err(cause) = self.end() {
            tracing::error!(%cause, "a queue pair was not ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_answer() {
        let error = Library::load(c"libibverbs.so.none").err().expect("nobody has this");
        assert!(error.to_string().contains("libibverbs.so.none: cannot open shared object file"), "{error}");
        let error = Library::load(c"libc.so.6").err().expect("it has no verbs");
        assert!(error.to_string().contains("it has no ibv_get_device_list"), "{error}");
    }

    #[test]
    fn the_library_has_every_call() {
        match Library::load(NAME) {
            Ok(_) => {}
            Err(error) if error.to_string().contains("cannot open shared object") => {
                println!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
