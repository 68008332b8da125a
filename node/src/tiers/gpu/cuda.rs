//! A CUDA GPU as the tier's device. The driver is loaded at run time, and its absence is a normal
//! result.
//!
//! Each direction has a stream; an event behind each copy signals its end. An asynchronous error
//! breaks the CUDA context: every later call is [`DeviceError::Lost`]. Memory of a broken context
//! cannot be freed separately, and must not be reused while the device may still access it. So it
//! is leaked to the context, and is freed with it once the last reference here is dropped. Layer
//! slices are scattered by a kernel, many at a time, if it can be compiled (`kernels`), otherwise
//! by the copy engine, one copy each.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::device::{CompletedCopy, DeviceCopy, DeviceError, GpuDevice};
use super::kernels::{SLICES_PER_LAUNCH, SliceKernel};

/// Page-locked host memory.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Arc<CudaContext>,
    base: NonNull<u8>,
    len: usize,
    /// Whether the context frees it when it ends.
    is_leaked: bool,
}

impl PinnedBuffer {
    /// Leaks memory that the device may still access to its context. Dropping the reference to the
    /// context is essential: otherwise the context, with all of the device's memory, would never
    /// end.
    fn leak_to_context(mut self) {
        self.is_leaked = true;
    }
}

// SAFETY: plain memory with a single owner; a context can be used from any thread.
unsafe impl Send for PinnedBuffer {}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned by self; the device owns self while it copies
        // there.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for PinnedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.is_leaked {
            return;
        }
        // SAFETY: from `malloc_host` of this context, and no copy uses it: memory in use by a copy
        // is leaked to the context instead.
        let freed = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::free_host(self.base.as_ptr().cast()) });
        if let Err(cause) = freed {
            // The context is broken and frees the memory when it ends.
            tracing::debug!(%cause, "page-locked memory could not be freed separately");
        }
    }
}

/// A running copy.
#[derive(Debug)]
struct RunningCopy {
    number: u64,
    /// Recorded behind the copy in its stream.
    event: CudaEvent,
    staging: Option<PinnedBuffer>,
}

/// The copies of one direction.
#[derive(Debug)]
struct CopyStream {
    stream: Arc<CudaStream>,
    running: VecDeque<RunningCopy>,
}

/// One GPU.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    streams: [CopyStream; 3],
    kernels: Option<SliceKernel>,
    /// Allocations: address and length in bytes.
    memory: Vec<(sys::CUdeviceptr, usize)>,
    /// Memory of others that they registered.
    registered: Vec<(sys::CUdeviceptr, usize)>,
    /// Copies that failed to start.
    failed: Vec<CompletedCopy<PinnedBuffer>>,
    lost: Option<DeviceError>,
}

/// The error that broke a context in this process, 0 for none. CUDA reports it for each context
/// opened later, even after the broken one was reset.
static BROKEN: AtomicU32 = AtomicU32::new(0);

/// Error of starting a copy.
enum CopyStartError {
    /// The device does not access the memory.
    NotStarted(DriverError),
    /// The device may access the memory.
    MaybeStarted(DriverError),
}

impl CudaDevice {
    /// The GPU with this number; `None` if there is no driver or no such GPU.
    ///
    /// # Errors
    /// If it exists and cannot be used.
    pub fn open(ordinal: usize) -> Result<Option<CudaDevice>, DeviceError> {
        // SAFETY: loads the driver's library and runs its initialisers, which are trusted like the
        // library itself. Without it the first call of any other function would panic.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let count = match CudaContext::device_count() {
            Ok(count) => usize::try_from(count).unwrap_or(0),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
            Err(cause) => return Err(context_error(&cause)),
        };
        if ordinal >= count {
            return Ok(None);
        }
        let context = CudaContext::new(ordinal).map_err(|cause| context_error(&cause))?;
        let stream = || {
            let stream = context.new_stream().map_err(|cause| context_error(&cause))?;
            Ok::<CopyStream, DeviceError>(CopyStream { stream, running: VecDeque::new() })
        };
        let streams = [stream()?, stream()?, stream()?];
        let kernels = SliceKernel::open(&context);
        let (memory, registered, refused) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Some(CudaDevice { context, streams, kernels, memory, registered, failed: refused, lost: None }))
    }

    /// The same without its kernel: slices are copied one by one, as without libnvrtc.
    #[must_use]
    pub fn without_kernels(mut self) -> CudaDevice {
        self.kernels = None;
        self
    }

    /// Lets copies read and write device memory that this device did not allocate.
    ///
    /// # Safety
    /// The range is device memory that this context can reach until the device is dropped. Its
    /// content is not used elsewhere while a copy writes there.
    pub unsafe fn register(&mut self, address: u64, bytes: usize) {
        self.registered.push((address, bytes));
    }

    /// Whether a copy accesses only memory that this device allocated or that was registered.
    /// Callers give plain numbers, and a driver refuses only unmapped ones.
    fn is_known_memory(&self, copy: &DeviceCopy<PinnedBuffer>) -> bool {
        let known = |address, len| {
            contains_range(&self.memory, address, len) || contains_range(&self.registered, address, len)
        };
        match copy {
            DeviceCopy::HostToDevice(_, piece) | DeviceCopy::DeviceToHost(_, piece) => {
                known(piece.device, piece.host.len())
            }
            DeviceCopy::DeviceToDevice(hops) => {
                hops.iter().all(|hop| hop.len == 0 || known(hop.from, hop.len) && known(hop.to, hop.len))
            }
        }
    }

    /// Starts a copy and records an event behind it; the caller has checked
    /// [`Self::is_known_memory`].
    fn try_start(
        &self,
        stream: usize,
        copy: &mut DeviceCopy<PinnedBuffer>,
    ) -> Result<CudaEvent, CopyStartError> {
        let stream = &self.streams[stream].stream;
        self.context.bind_to_thread().map_err(CopyStartError::NotStarted)?;
        let event = self.context.new_event(None).map_err(CopyStartError::NotStarted)?;
        let mut is_begun = false;
        let mut one = |asked: Result<(), DriverError>| {
            asked.map_err(if is_begun {
                CopyStartError::MaybeStarted
            } else {
                CopyStartError::NotStarted
            })?;
            is_begun = true;
            Ok::<(), CopyStartError>(())
        };
        let raw = stream.cu_stream();
        match copy {
            DeviceCopy::HostToDevice(staging, piece) => {
                let from = &staging.as_ref()[piece.host.clone()];
                // SAFETY: the host memory is page-locked, and stays in place and untouched until
                // the copy ends: the caller moves it into `running`, or leaks it to the context.
                // The device memory is a known range, by `is_known_memory`.
                one(unsafe { result::memcpy_htod_async(piece.device, from, raw) })?;
            }
            DeviceCopy::DeviceToHost(staging, piece) => {
                let to = &mut staging.as_mut()[piece.host.clone()];
                // SAFETY: as above.
                one(unsafe { result::memcpy_dtoh_async(to, piece.device, raw) })?;
            }
            DeviceCopy::DeviceToDevice(hops) if self.kernels.is_some() => {
                for (kernels, hops) in self
                    .kernels
                    .iter()
                    .flat_map(|kernels| hops.chunks(SLICES_PER_LAUNCH).map(move |hops| (kernels, hops)))
                {
                    // SAFETY: the context is bound, and both ends of each slice are in known
                    // ranges, by `is_known_memory`.
                    one(unsafe { kernels.launch(raw, hops) })?;
                }
            }
            DeviceCopy::DeviceToDevice(hops) => {
                for hop in hops.iter().filter(|hop| hop.len > 0) {
                    // SAFETY: no host memory is involved; both ends are in known ranges, by
                    // `is_known_memory`.
                    one(unsafe { result::memcpy_dtod_async(hop.to, hop.from, hop.len, raw) })?;
                }
            }
        }
        event.record(stream).map_err(CopyStartError::MaybeStarted)?;
        Ok(event)
    }

    /// Ends all running copies; host memory that the device may still access is leaked.
    fn mark_lost(&mut self, cause: DeviceError) -> Vec<CompletedCopy<PinnedBuffer>> {
        let running = self.streams.iter_mut().flat_map(|stream| stream.running.drain(..));
        let ended = running.map(|running| {
            running.staging.into_iter().for_each(PinnedBuffer::leak_to_context);
            CompletedCopy { number: running.number, staging: None, result: Err(cause.clone()) }
        });
        let ended = ended.collect();
        self.lost = Some(cause);
        ended
    }
}

/// Whether one of the ranges contains this range.
fn contains_range(ranges: &[(sys::CUdeviceptr, usize)], address: u64, len: usize) -> bool {
    ranges.iter().any(|(start, bytes)| {
        let offset = address.checked_sub(*start);
        let end = offset.and_then(|offset| offset.checked_add(len as u64));
        end.is_some_and(|end| end <= *bytes as u64)
    })
}

/// The error of opening a device.
fn context_error(cause: &DriverError) -> DeviceError {
    let what = match BROKEN.load(Ordering::Relaxed) == cause.0 as u32 {
        true => "; CUDA gives no new context to a process that broke one: restart the node",
        false => "",
    };
    DeviceError::Lost(format!("{cause}{what}"))
}

fn device_lost(cause: &DriverError) -> DeviceError {
    if !is_call_error(cause.0) {
        BROKEN.store(cause.0 as u32, Ordering::Relaxed);
    }
    DeviceError::Lost(cause.to_string())
}

/// Whether an error of a call that started no copy leaves the device usable. The driver also
/// reports errors of earlier copies there, which break the context; only errors of the call itself
/// do not.
fn is_call_error(code: sys::CUresult) -> bool {
    use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
    matches!(code, CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_OUT_OF_MEMORY)
}

/// The error of an allocation: out of memory, or a broken context.
fn memory_error(cause: &DriverError, bytes: usize, what: &'static str) -> DeviceError {
    if is_call_error(cause.0) {
        DeviceError::NoMemory { bytes, what, cause: cause.to_string() }
    } else {
        device_lost(cause)
    }
}

fn copy_error(cause: &DriverError) -> DeviceError {
    if is_call_error(cause.0) { DeviceError::Copy(cause.to_string()) } else { device_lost(cause) }
}

impl GpuDevice for CudaDevice {
    type Staging = PinnedBuffer;

    fn name(&self) -> String {
        self.context.name().unwrap_or_else(|cause| cause.to_string())
    }

    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        let taken = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the memory is written before it is read, and freed once, in `drop`.
            unsafe { result::malloc_sync(bytes) }
        });
        let address = taken.map_err(|cause| memory_error(&cause, bytes, "device"))?;
        self.memory.push((address, bytes));
        Ok(address)
    }

    fn allocate_staging(&mut self, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        // SAFETY: owned by the `PinnedBuffer` below, which frees it once.
        let taken = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) });
        let what = "page-locked";
        let base = NonNull::new(taken.map_err(|cause| memory_error(&cause, bytes, what))?.cast::<u8>());
        let cause = "no address".to_owned();
        let base = base.ok_or(DeviceError::NoMemory { bytes, what, cause })?;
        // SAFETY: `bytes` bytes without another owner.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(PinnedBuffer { context: Arc::clone(&self.context), base, len: bytes, is_leaked: false })
    }

    fn slices_per_copy_max(&self) -> usize {
        if self.kernels.is_some() { SLICES_PER_LAUNCH } else { 1 }
    }

    fn start(&mut self, number: u64, mut copy: DeviceCopy<PinnedBuffer>) {
        let stream = match copy {
            DeviceCopy::HostToDevice(..) => 0,
            DeviceCopy::DeviceToHost(..) => 1,
            DeviceCopy::DeviceToDevice(_) => 2,
        };
        let begun = match &self.lost {
            Some(lost) => Err(lost.clone()),
            None if !self.is_known_memory(&copy) => {
                Err(DeviceError::Copy("an address that was neither allocated nor registered".to_owned()))
            }
            None => match self.try_start(stream, &mut copy) {
                Ok(event) => Ok(event),
                Err(CopyStartError::NotStarted(cause)) => Err(copy_error(&cause)),
                Err(CopyStartError::MaybeStarted(cause)) => Err(device_lost(&cause)),
            },
        };
        let staging = match copy {
            DeviceCopy::HostToDevice(staging, _) | DeviceCopy::DeviceToHost(staging, _) => Some(staging),
            DeviceCopy::DeviceToDevice(_) => None,
        };
        match begun {
            Ok(event) => self.streams[stream].running.push_back(RunningCopy { number, event, staging }),
            Err(cause @ DeviceError::Lost(_)) if self.lost.is_none() => {
                staging.into_iter().for_each(PinnedBuffer::leak_to_context);
                let ended = self.mark_lost(cause.clone());
                self.failed.extend(ended);
                self.failed.push(CompletedCopy { number, staging: None, result: Err(cause) });
            }
            Err(cause) => self.failed.push(CompletedCopy { number, staging, result: Err(cause) }),
        }
    }

    fn take_completed(&mut self) -> Vec<CompletedCopy<PinnedBuffer>> {
        let mut all = std::mem::take(&mut self.failed);
        if self.lost.is_some() {
            return all;
        }
        // Event queries use the thread's current context, and the caller may be on another thread
        // than before.
        let mut broken = self.context.bind_to_thread().err().map(|cause| device_lost(&cause));
        let streams = if broken.is_none() { &mut self.streams[..] } else { &mut [] };
        for stream in streams {
            while let Some(first) = stream.running.front() {
                match first.event.try_is_complete() {
                    Ok(false) => break,
                    Ok(true) => {
                        let Some(RunningCopy { number, staging, .. }) = stream.running.pop_front() else {
                            break;
                        };
                        all.push(CompletedCopy { number, staging, result: Ok(()) });
                    }
                    Err(cause) => {
                        broken = Some(device_lost(&cause));
                        break;
                    }
                }
            }
        }
        all.extend(broken.map(|cause| self.mark_lost(cause)).into_iter().flatten());
        all
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if self.lost.is_none() {
            let ends = self.streams.iter().try_for_each(|stream| stream.stream.synchronize());
            if let Err(cause) = ends {
                drop(self.mark_lost(device_lost(&cause)));
            }
        }
        if let Some(cause) = &self.lost {
            tracing::warn!(
                %cause,
                "the memory of a lost GPU is freed with its CUDA context; if nvidia-smi shows it as in use \
                 after that, restart the node"
            );
            return;
        }
        for (address, _) in self.memory.drain(..) {
            // SAFETY: from `malloc_sync`, and no copy is running any more.
            if let Err(cause) = unsafe { result::free_sync(address) } {
                tracing::warn!(%cause, "device memory could not be freed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::super::device::{CopyRange, SliceCopy};
    use super::*;

    /// Environment variable that runs a test in its own process.
    const SEPARATE_PROCESS: &str = "KVFLEET_TEST_ALONE";

    /// An address that is never mapped.
    const UNMAPPED_ADDRESS: u64 = 0x1000;

    fn wait(device: &mut CudaDevice, number: u64) -> CompletedCopy<PinnedBuffer> {
        let start = Instant::now();
        loop {
            if let Some(ended) = device.take_completed().into_iter().find(|ended| ended.number == number) {
                return ended;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "copy {number} never ended");
            std::thread::yield_now();
        }
    }

    /// Checks that bytes survive a round trip to the device.
    fn check_round_trip(device: &mut CudaDevice) {
        let memory = device.allocate(1 << 20).unwrap();
        let mut staging = device.allocate_staging(4096).unwrap();
        staging.as_mut().iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = (at * 7) as u8);
        let piece = || CopyRange { device: memory + 512, host: 0..4096 };
        device.start(1, DeviceCopy::HostToDevice(staging, piece()));
        let mut staging = wait(device, 1).staging.unwrap();
        let sent = staging.as_ref().to_vec();
        staging.as_mut().fill(0);
        device.start(2, DeviceCopy::DeviceToHost(staging, piece()));
        let ended = wait(device, 2);
        assert_eq!((ended.result, ended.staging.unwrap().as_ref()), (Ok(()), &sent[..]));
    }

    #[test]
    fn a_context_that_broke_goes_with_all_its_memory_where_there_is_a_gpu() {
        // A process has one context, so other tests must not use theirs here.
        if std::env::var_os(SEPARATE_PROCESS).is_none() {
            let name =
                "tiers::gpu::cuda::tests::a_context_that_broke_goes_with_all_its_memory_where_there_is_a_gpu";
            let alone = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(SEPARATE_PROCESS, "1")
                .output()
                .unwrap();
            let said = [alone.stdout, alone.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
            let said = said.concat();
            println!("{said}");
            // If the name were wrong, no test would run.
            assert!(alone.status.success() && said.contains("1 passed"));
            return;
        }
        let Some(mut device) = CudaDevice::open(0).unwrap() else {
            return println!("SKIPPED: no driver or no GPU");
        };
        if device.kernels.is_none() {
            return println!("SKIPPED: without the kernel the driver refuses the copy that breaks a context");
        }
        check_round_trip(&mut device);
        let memory = device.allocate(1 << 30).unwrap();
        // SAFETY: not satisfied: the address is unmapped, and the resulting error is the purpose of
        // the test.
        unsafe { device.register(UNMAPPED_ADDRESS, 4096) };
        let staging = device.allocate_staging(4096).unwrap();
        device.start(
            3,
            DeviceCopy::DeviceToDevice(vec![SliceCopy { from: memory, to: UNMAPPED_ADDRESS, len: 64 }]),
        );
        device.start(4, DeviceCopy::HostToDevice(staging, CopyRange { device: memory, host: 0..4096 }));
        let ended = wait(&mut device, 3);
        assert!(matches!(ended.result, Err(DeviceError::Lost(_))), "{ended:?}");
        assert!(matches!(device.allocate_staging(4096), Err(DeviceError::Lost(_))));
        device
            .start(5, DeviceCopy::DeviceToDevice(vec![SliceCopy { from: memory, to: memory + 64, len: 64 }]));
        let ended = wait(&mut device, 5);
        assert!(matches!(ended.result, Err(DeviceError::Lost(_))), "{ended:?}");
        drop(device);
        // The context has ended with all of its memory: no reference to it is left here.
        let (mut number, mut flags, mut is_active) = (0, 0, -1);
        // SAFETY: plain numbers, written before they are read.
        let asked = unsafe {
            sys::cuDeviceGet(&mut number, 0)
                .result()
                .and_then(|()| sys::cuDevicePrimaryCtxGetState(number, &mut flags, &mut is_active).result())
        };
        assert_eq!((asked, is_active), (Ok(()), 0));
        // CUDA gives no new context to this process.
        let again = CudaDevice::open(0).map(drop).unwrap_err().to_string();
        assert!(again.ends_with("restart the node"), "{again}");
        println!("{again}");
    }

    #[test]
    fn range_is_known_only_if_wholly_contained() {
        let ranges = [(1000, 100), (5000, 50)];
        for (address, len) in [(1000, 100), (1099, 1), (5010, 40), (1000, 0)] {
            assert!(contains_range(&ranges, address, len), "{address} {len}");
        }
        for (address, len) in
            [(999, 1), (1000, 101), (1099, 2), (1100, 1), (3000, 1), (5050, 1), (u64::MAX, 2)]
        {
            assert!(!contains_range(&ranges, address, len), "{address} {len}");
        }
        assert!(!contains_range(&ranges, 1050, usize::MAX));
    }

    #[test]
    fn only_call_errors_leave_the_device_usable() {
        use sys::CUresult as Code;
        for code in [Code::CUDA_ERROR_INVALID_VALUE, Code::CUDA_ERROR_OUT_OF_MEMORY] {
            assert!(is_call_error(code), "{code:?}");
        }
        let sticky = [
            Code::CUDA_ERROR_ILLEGAL_ADDRESS,
            Code::CUDA_ERROR_LAUNCH_FAILED,
            Code::CUDA_ERROR_ECC_UNCORRECTABLE,
            Code::CUDA_ERROR_HARDWARE_STACK_ERROR,
            Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            Code::CUDA_ERROR_UNKNOWN,
        ];
        for code in sticky {
            assert!(!is_call_error(code), "{code:?}");
        }
    }
}
