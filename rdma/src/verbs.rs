//! Calls into libibverbs, which is loaded at run time: its absence is an error value and does not
//! prevent the start.
//!
//! All calls into C are in this file. The library is thread-safe. Handles are dropped in the order
//! that C requires: queue pairs and memory before their domain, everything before its device. Not
//! here: layouts (`abi.rs`), the choice of the device (`choose.rs`), the purpose of a transfer.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::abi;
use super::choose::GidCandidate;
use super::gpu::{AddressRange, DmaBufExport};
use super::memory::RdmaMemory;
use super::rail::{
    Access, Completion, Direction, MemoryRegion, ProtectionDomain, QueuePair, QueuePairAddress, Rail,
    RailPort, Role, Transfer,
};
use super::{RdmaError, RdmaTuning};

/// The library's file: its first major version, with layouts that never change.
const LIBRARY_NAME: &CStr = c"libibverbs.so.1";

/// Completions requested in one poll.
const POLL_BATCH: usize = 64;

/// Function pointers of the library.
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
    /// Exported since release 35.
    is_fork_initialized: Option<abi::IsForkInitialized>,
    fork_init: Option<abi::ForkInit>,
}

/// Looks up a function of the loaded library.
///
/// # Safety
/// `F` is the type of the C function of that name.
unsafe fn symbol<F: Copy>(library: NonNull<c_void>, name: &CStr) -> Result<F, RdmaError> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    // SAFETY: a live handle and a zero-terminated name.
    let found = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    if found.is_null() {
        let cause = format!("it has no {}", name.to_string_lossy());
        return Err(RdmaError::Library { cause });
    }
    // SAFETY: both have the same size, as checked above; the caller guarantees the type.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

impl Library {
    /// Loads the library for good: drivers that it loads in turn cannot be unloaded safely.
    fn load(name: &CStr) -> Result<Library, RdmaError> {
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: a zero-terminated name; the library's initialisers are trusted like the library
        // itself.
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

    /// Protects queue rings and doorbells from child processes if the kernel does not. A child that
    /// shares their pages would move the parent's pages, and the card would keep using the old
    /// ones. Call this before anything is opened.
    fn init_fork_support(&self) {
        // SAFETY: calls without arguments, which only change the library's later behaviour.
        let status = self.is_fork_initialized.map(|asked| unsafe { asked() });
        if status == Some(abi::FORK_UNNEEDED) {
            return;
        }
        if let Some(init) = self.fork_init
            // SAFETY: as above.
            && let Err(cause) = check_errno(unsafe { init() })
        {
            tracing::warn!(%cause, "with this kernel, a process that uses RDMA must not start child processes");
        }
    }

    /// Opens the device of this name.
    fn open(&self, name: &str) -> io::Result<NonNull<abi::Context>> {
        self.init_fork_support();
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

/// Text of the loader's last failure.
fn load_error() -> String {
    // SAFETY: returns a string of this thread, or null; it is copied at once.
    unsafe {
        let said = libc::dlerror();
        if said.is_null() {
            "unknown".to_owned()
        } else {
            CStr::from_ptr(said).to_string_lossy().into_owned()
        }
    }
}

/// Converts a return code of the library.
fn check_errno(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Older drivers set `errno` instead.
        -1 => Err(io::Error::last_os_error()),
        // Some drivers return the negated error number.
        code => Err(io::Error::from_raw_os_error(code.saturating_abs())),
    }
}

/// An open device.
struct VerbsDevice {
    library: Library,
    context: NonNull<abi::Context>,
}

// SAFETY: libibverbs allows every call from every thread.
unsafe impl Send for VerbsDevice {}
// SAFETY: as above.
unsafe impl Sync for VerbsDevice {}

impl Drop for VerbsDevice {
    fn drop(&mut self) {
        // SAFETY: opened once, and all objects of the device are gone, because each holds its
        // `Arc`.
        if let Err(cause) = check_errno(unsafe { (self.library.close_device)(self.context.as_ptr()) }) {
            tracing::debug!(%cause, "cannot close an RDMA device");
        }
    }
}

/// One port of an RDMA device, with one completion queue.
pub(super) struct VerbsRail {
    cq: Arc<CompletionQueue>,
    port: RailPort,
    settings: PortSettings,
}

/// Port settings that each queue pair needs.
#[derive(Clone)]
struct PortSettings {
    port: u8,
    gid_index: u8,
    mtu: u8,
    tuning: RdmaTuning,
}

struct CompletionQueue {
    device: Arc<VerbsDevice>,
    cq: NonNull<abi::Cq>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: created once; queue pairs hold its `Arc`.
        if let Err(cause) = check_errno(unsafe { (self.device.library.destroy_cq)(self.cq.as_ptr()) }) {
            tracing::debug!(%cause, "cannot destroy a completion queue");
        }
    }
}

impl VerbsRail {
    /// Loads the library and opens the port.
    pub(super) fn open(candidate: &GidCandidate, tuning: &RdmaTuning) -> Result<VerbsRail, RdmaError> {
        let failed = |what: &'static str| {
            let device = candidate.device.clone();
            move |cause: io::Error| RdmaError::Device { device, what, cause }
        };
        let library = Library::load(LIBRARY_NAME)?;
        let context = library.open(&candidate.device).map_err(failed("opened"))?;
        let device = Arc::new(VerbsDevice { library, context });
        let mut attributes = abi::PortAttr::default();
        // SAFETY: an open device, and a buffer at least as large as the call writes.
        let asked =
            unsafe { (device.library.query_port)(context.as_ptr(), candidate.port, &raw mut attributes) };
        check_errno(asked).map_err(failed("queried for its port"))?;
        let depth = c_int::try_from(tuning.in_flight_max.saturating_mul(2).max(16)).unwrap_or(c_int::MAX);
        let (none, channel) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: an open device; no channel, because the queue is only polled.
        let cq = unsafe { (device.library.create_cq)(context.as_ptr(), depth, none, channel, 0) };
        let cq = NonNull::new(cq).ok_or_else(io::Error::last_os_error);
        let cq = Arc::new(CompletionQueue { device, cq: cq.map_err(failed("given a completion queue"))? });
        let mtu = u8::try_from(attributes.active_mtu).unwrap_or(1).clamp(1, 5);
        let (device_name, reads) = (candidate.device.clone(), tuning.reads_at_once);
        let port =
            RailPort { device: device_name, gid: candidate.gid, lid: attributes.lid, mtu, max_reads: reads };
        let link = PortSettings {
            port: candidate.port,
            gid_index: candidate.gid_index,
            mtu,
            tuning: tuning.clone(),
        };
        Ok(VerbsRail { cq, port, settings: link })
    }
}

impl Rail for VerbsRail {
    fn port(&self) -> &RailPort {
        &self.port
    }

    fn create_domain(&self) -> io::Result<Arc<dyn ProtectionDomain>> {
        let device = &self.cq.device;
        // SAFETY: an open device.
        let pd = unsafe { (device.library.alloc_pd)(device.context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(io::Error::last_os_error)?;
        let pd = Arc::new(VerbsPd { device: Arc::clone(device), pd });
        Ok(Arc::new(VerbsDomain { pd, cq: Arc::clone(&self.cq), settings: self.settings.clone() }))
    }

    fn poll(&self, ended: &mut Vec<Completion>) -> io::Result<()> {
        let mut found = [abi::Wc::NONE; POLL_BATCH];
        let cq = self.cq.cq.as_ptr();
        // SAFETY: a live completion queue; its context has its driver's functions; the buffer has
        // the stated length.
        let count = unsafe {
            let poll = (*(*cq).context).ops.poll_cq.ok_or(io::ErrorKind::Unsupported)?;
            poll(cq, POLL_BATCH as c_int, found.as_mut_ptr())
        };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue is broken"))?;
        ended.extend(found.iter().take(count).map(|wc| Completion { id: wc.wr_id, status: wc.status }));
        Ok(())
    }
}

struct VerbsPd {
    device: Arc<VerbsDevice>,
    pd: NonNull<abi::Pd>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for VerbsPd {}
// SAFETY: as above.
unsafe impl Sync for VerbsPd {}

impl Drop for VerbsPd {
    fn drop(&mut self) {
        // SAFETY: allocated once; objects in the domain hold its `Arc`.
        if let Err(cause) = check_errno(unsafe { (self.device.library.dealloc_pd)(self.pd.as_ptr()) }) {
            tracing::debug!(%cause, "cannot free a protection domain");
        }
    }
}

struct VerbsDomain {
    pd: Arc<VerbsPd>,
    cq: Arc<CompletionQueue>,
    settings: PortSettings,
}

/// Verbs flags for a peer's access. The card writes the results of this end's reads, so `Local`
/// includes local writes.
fn access_flags(access: Access) -> c_int {
    match access {
        Access::Local => abi::ACCESS_LOCAL_WRITE,
        Access::Read => abi::ACCESS_REMOTE_READ,
        Access::ReadWrite => abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE,
    }
}

impl ProtectionDomain for VerbsDomain {
    fn register(&self, memory: &Arc<RdmaMemory>, access: Access) -> io::Result<Box<dyn MemoryRegion>> {
        let base = memory.address() as *mut c_void;
        let len = usize::try_from(memory.len_bytes()).map_err(io::Error::other)?;
        let library = &self.pd.device.library;
        // SAFETY: a live domain, and memory that is kept until it is deregistered. Buffers keep the
        // card's writes apart from other accesses.
        let mr = unsafe { (library.reg_mr)(self.pd.pd.as_ptr(), base, len, access_flags(access)) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        Ok(Box::new(VerbsMr { pd: Arc::clone(&self.pd), mr, memory: Some(Arc::clone(memory) as KeepAlive) }))
    }

    fn register_dmabuf(
        &self,
        range: &AddressRange,
        exported: &DmaBufExport,
    ) -> io::Result<Box<dyn MemoryRegion>> {
        let register = self.pd.device.library.reg_dmabuf_mr.ok_or(io::ErrorKind::Unsupported)?;
        let len = usize::try_from(range.len).map_err(io::Error::other)?;
        let (file, access) = (exported.file.as_raw_fd(), access_flags(Access::ReadWrite));
        // SAFETY: a live domain and an open file; the kernel checks that the range lies in it.
        let mr = unsafe { register(self.pd.pd.as_ptr(), exported.offset, len, range.address, file, access) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        let memory = Some(Arc::clone(&range.allocation) as KeepAlive);
        Ok(Box::new(VerbsMr { pd: Arc::clone(&self.pd), mr, memory }))
    }

    fn create_queue_pair(&self, access: Access) -> io::Result<Box<dyn QueuePair>> {
        let tuning = &self.settings.tuning;
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
            settings: self.settings.clone(),
            qp: Mutex::new(Some(qp)),
        };
        let mut begin = abi::QpAttr {
            qp_state: abi::QPS_INIT,
            port_num: self.settings.port,
            qp_access_flags: access_flags(access) as u32,
            ..abi::QpAttr::default()
        };
        let mask = abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS;
        queue.modify(&mut begin, mask)?;
        Ok(Box::new(queue))
    }
}

/// Keeps memory alive while it is registered.
type KeepAlive = Arc<dyn Any + Send + Sync>;

struct VerbsMr {
    pd: Arc<VerbsPd>,
    mr: NonNull<abi::Mr>,
    memory: Option<KeepAlive>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for VerbsMr {}
// SAFETY: as above.
unsafe impl Sync for VerbsMr {}

impl MemoryRegion for VerbsMr {
    fn local_key(&self) -> u32 {
        // SAFETY: a live registration; its keys never change.
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
        if let Err(cause) = check_errno(unsafe { (self.pd.device.library.dereg_mr)(self.mr.as_ptr()) }) {
            tracing::error!(%cause, "cannot deregister memory of an RDMA device; the memory is leaked");
            std::mem::forget(self.memory.take());
        }
    }
}

struct VerbsQueue {
    pd: Arc<VerbsPd>,
    _cq: Arc<CompletionQueue>,
    settings: PortSettings,
    /// `None` once destroyed; the lock excludes calls on a destroyed queue pair.
    qp: Mutex<Option<NonNull<abi::Qp>>>,
}

// SAFETY: as for `Opened`.
unsafe impl Send for VerbsQueue {}
// SAFETY: as above.
unsafe impl Sync for VerbsQueue {}

impl VerbsQueue {
    /// Runs `work` with the queue pair, or fails if it was destroyed.
    fn with_qp<T>(&self, work: impl FnOnce(*mut abi::Qp) -> T) -> io::Result<T> {
        let qp = self.qp.lock().unwrap_or_else(PoisonError::into_inner);
        let qp = qp.ok_or(io::ErrorKind::NotConnected)?;
        Ok(work(qp.as_ptr()))
    }

    fn modify(&self, to: &mut abi::QpAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: a live queue pair.
        check_errno(self.with_qp(|qp| unsafe { (self.pd.device.library.modify_qp)(qp, to, mask) })?)
    }
}

impl QueuePair for VerbsQueue {
    fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        self.with_qp(|qp| unsafe { (*qp).qp_num }).unwrap_or(0)
    }

    fn connect(&self, role: Role, packet: u32, peer: &QueuePairAddress) -> io::Result<()> {
        let PortSettings { port: number, gid_index, mtu, tuning } = &self.settings;
        let reads = tuning.reads_at_once.min(peer.max_reads);
        let (high, low) = peer.gid.0.split_at(8);
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight of sixteen bytes"));
        let mut answer = abi::QpAttr {
            qp_state: abi::QPS_RTR,
            path_mtu: u32::from(peer.mtu.clamp(1, 5).min(*mtu)),
            dest_qp_num: peer.qp_number,
            rq_psn: peer.first_psn,
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
        if role == Role::Responder {
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
        // SAFETY: a live queue pair; its context has its driver's functions. The request is copied
        // before the call returns. The card checks the memory that it names against the key, and
        // the caller of `post` keeps that memory.
        let posted = self.with_qp(|qp| unsafe {
            let post = (*(*qp).context).ops.post_send?;
            Some(post(qp, &raw mut wanted, refused.as_mut_ptr()))
        });
        check_errno(posted?.ok_or(io::ErrorKind::Unsupported)?)
    }

    fn destroy(&self) -> io::Result<()> {
        let taken = self.qp.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(qp) = taken else { return Ok(()) };
        // SAFETY: created once, and taken out above, so that it is never used again.
        check_errno(unsafe { (self.pd.device.library.destroy_qp)(qp.as_ptr()) })
    }
}

impl Drop for VerbsQueue {
    fn drop(&mut self) {
        if let Err(cause) = self.destroy() {
            tracing::error!(%cause, "a queue pair could not be destroyed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported() {
        let error = Library::load(c"libibverbs.so.none").err().expect("this library must not exist");
        assert!(error.to_string().contains("libibverbs.so.none: cannot open shared object file"), "{error}");
        let error = Library::load(c"libc.so.6").err().expect("libc has no verbs");
        assert!(error.to_string().contains("it has no ibv_get_device_list"), "{error}");
    }

    #[test]
    fn the_library_exports_every_call() {
        match Library::load(LIBRARY_NAME) {
            Ok(_) => {}
            Err(error) if error.to_string().contains("cannot open shared object") => {
                println!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
