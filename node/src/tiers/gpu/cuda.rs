//! A CUDA GPU as the tier's device. The driver is loaded when the process runs, and its absence is an answer.
//!
//! Each direction has a stream; an event behind each copy says that it ended. An error that comes up later, and not where
//! a copy was asked for, ends a CUDA context: everything after it is [`DeviceError::Lost`]. Nothing of such a context can
//! be freed alone, and nobody else may have memory that the device may still touch; so all of it is left to the context,
//! and goes with it once nothing here refers to it any more. Layer slices are scattered by a kernel, many at a time,
//! where it can be compiled (`kernels`), and else by the copy engine, one copy each.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::device::{Copy, Device, DeviceError, Ended};
use super::kernels::{HOPS_MAX, Kernels};

/// Page-locked memory of the host.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<CudaContext>,
    base: NonNull<u8>,
    len: usize,
    /// The context frees it when it ends.
    is_left: bool,
}

impl Pinned {
    /// Leaves memory that the device may still touch to its context. What refers to the context here goes, or it would never
    /// end: it has all of the device's memory too.
    fn leave(mut self) {
        self.is_left = true;
    }
}

// SAFETY: plain memory, owned by this value alone; a context can be used from any thread.
unsafe impl Send for Pinned {}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` bytes that were initialised, owned by self; a device has self while it copies there.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for Pinned {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        // SAFETY: from `malloc_host` of this context, and no copy uses it: those that do are left to the context.
        let freed = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::free_host(self.base.as_ptr().cast()) });
        if let Err(cause) = freed {
            // Of a broken context, and goes with it.
            tracing::debug!(%cause, "page-locked memory was not given back by itself");
        }
    }
}

/// A copy that was begun.
#[derive(Debug)]
struct Running {
    number: u64,
    /// Comes after it in its stream.
    event: CudaEvent,
    staging: Option<Pinned>,
}

/// One direction.
#[derive(Debug)]
struct Stream {
    stream: Arc<CudaStream>,
    running: VecDeque<Running>,
}

/// One GPU.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    streams: [Stream; 3],
    kernels: Option<Kernels>,
    /// What was allocated: where, and how long.
    memory: Vec<(sys::CUdeviceptr, usize)>,
    /// What others allocated and lend.
    registered: Vec<(sys::CUdeviceptr, usize)>,
    /// Copies that could not begin.
    refused: Vec<Ended<Pinned>>,
    lost: Option<DeviceError>,
}

/// The error that broke a context in this process, 0 for none: CUDA reports it for each context that is asked for from then on, also where the one that broke is over and was
/// reset.
static BROKEN: AtomicU32 = AtomicU32::new(0);

/// Why a copy could not begin.
enum Refusal {
    /// Nothing of it began.
    Whole(DriverError),
    /// The device may be at it.
    Part(DriverError),
}

impl CudaDevice {
    /// The GPU with this number; none where there is no driver or no such GPU.
    ///
    /// # Errors
    /// When there is one and it cannot be used.
    pub fn open(ordinal: usize) -> Result<Option<CudaDevice>, DeviceError> {
        // SAFETY: loads the driver's library, whose initialisers are trusted as the library is. Without it the
        // first call of anything else would panic.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let count = match CudaContext::device_count() {
            Ok(count) => usize::try_from(count).unwrap_or(0),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
            Err(cause) => return Err(no_context(&cause)),
        };
        if ordinal >= count {
            return Ok(None);
        }
        let context = CudaContext::new(ordinal).map_err(|cause| no_context(&cause))?;
        let stream = || {
            let stream = context.new_stream().map_err(|cause| no_context(&cause))?;
            Ok::<Stream, DeviceError>(Stream { stream, running: VecDeque::new() })
        };
        let streams = [stream()?, stream()?, stream()?];
        let kernels = Kernels::open(&context);
        let (memory, registered, refused) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Some(CudaDevice { context, streams, kernels, memory, registered, refused, lost: None }))
    }

    /// The same without its kernel: slices are copied one by one, as where there is no libnvrtc.
    #[must_use]
    pub fn without_kernels(mut self) -> CudaDevice {
        self.kernels = None;
        self
    }

    /// Lets copies read and write device memory that this device did not allocate.
    ///
    /// # Safety
    /// The range is device memory that this context can reach, until the device is dropped. Nobody relies on what is in
    /// it while a copy is asked to write there.
    pub unsafe fn register(&mut self, address: u64, bytes: usize) {
        self.registered.push((address, bytes));
    }

    /// Whether a copy touches only memory that is this device's or was lent to it. Callers give plain numbers, and
    /// a driver refuses only those that are nobody's at all.
    fn is_ours(&self, copy: &Copy<Pinned>) -> bool {
        let known = |address, len| holds(&self.memory, address, len) || holds(&self.registered, address, len);
        match copy {
            Copy::In(_, piece) | Copy::Out(_, piece) => known(piece.device, piece.host.len()),
            Copy::Within(hops) => {
                hops.iter().all(|hop| hop.len == 0 || known(hop.from, hop.len) && known(hop.to, hop.len))
            }
        }
    }

    /// Asks the driver for a copy and an event behind it; the caller saw that [`Self::is_ours`].
    fn try_begin(&self, stream: usize, copy: &mut Copy<Pinned>) -> Result<CudaEvent, Refusal> {
        let stream = &self.streams[stream].stream;
        self.context.bind_to_thread().map_err(Refusal::Whole)?;
        let event = self.context.new_event(None).map_err(Refusal::Whole)?;
        let mut is_begun = false;
        let mut one = |asked: Result<(), DriverError>| {
            asked.map_err(if is_begun { Refusal::Part } else { Refusal::Whole })?;
            is_begun = true;
            Ok::<(), Refusal>(())
        };
        let raw = stream.cu_stream();
        match copy {
            Copy::In(staging, piece) => {
                let from = &staging.as_ref()[piece.host.clone()];
                // SAFETY: the host's memory is page-locked, and stays where it is and untouched until the copy ended: the
                // caller moves it into `running`, or leaves it to the context. The device's memory is one of the known
                // ranges, by `is_ours`.
                one(unsafe { result::memcpy_htod_async(piece.device, from, raw) })?;
            }
            Copy::Out(staging, piece) => {
                let to = &mut staging.as_mut()[piece.host.clone()];
                // SAFETY: as above.
                one(unsafe { result::memcpy_dtoh_async(to, piece.device, raw) })?;
            }
            Copy::Within(hops) if self.kernels.is_some() => {
                for (kernels, hops) in self
                    .kernels
                    .iter()
                    .flat_map(|kernels| hops.chunks(HOPS_MAX).map(move |hops| (kernels, hops)))
                {
                    // SAFETY: the context is bound, and both ends of each slice are in known ranges, by `is_ours`.
                    one(unsafe { kernels.launch(raw, hops) })?;
                }
            }
            Copy::Within(hops) => {
                for hop in hops.iter().filter(|hop| hop.len > 0) {
                    // SAFETY: no memory of the host; both ends are in known ranges, by `is_ours`.
                    one(unsafe { result::memcpy_dtod_async(hop.to, hop.from, hop.len, raw) })?;
                }
            }
        }
        event.record(stream).map_err(Refusal::Part)?;
        Ok(event)
    }

    /// Everything that runs ends here, without the memory that the device may still touch.
    fn lose(&mut self, cause: DeviceError) -> Vec<Ended<Pinned>> {
        let running = self.streams.iter_mut().flat_map(|stream| stream.running.drain(..));
        let ended = running.map(|running| {
            running.staging.into_iter().for_each(Pinned::leave);
            Ended { number: running.number, staging: None, result: Err(cause.clone()) }
        });
        let ended = ended.collect();
        self.lost = Some(cause);
        ended
    }
}

/// Whether a range lies in one of these.
fn holds(ranges: &[(sys::CUdeviceptr, usize)], address: u64, len: usize) -> bool {
    ranges.iter().any(|(start, bytes)| {
        let offset = address.checked_sub(*start);
        let end = offset.and_then(|offset| offset.checked_add(len as u64));
        end.is_some_and(|end| end <= *bytes as u64)
    })
}

/// Of a device that was asked for.
fn no_context(cause: &DriverError) -> DeviceError {
    let what = match BROKEN.load(Ordering::Relaxed) == cause.0 as u32 {
        true => "; CUDA gives a process that broke its context no other, so it does not come back by itself",
        false => "",
    };
    DeviceError::Lost(format!("{cause}{what}"))
}

fn lost(cause: &DriverError) -> DeviceError {
    if !is_of_the_call(cause.0) {
        BROKEN.store(cause.0 as u32, Ordering::Relaxed);
    }
    DeviceError::Lost(cause.to_string())
}

/// Whether an error of a call that began nothing leaves the device as it was. The driver reports errors of earlier copies
/// there too, and those end the context; only what it says of the call itself does not.
fn is_of_the_call(code: sys::CUresult) -> bool {
    use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
    matches!(code, CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_OUT_OF_MEMORY)
}

/// Of memory that was asked for. Another error than that there is none is one of the context.
fn no_memory(cause: &DriverError, bytes: usize, what: &'static str) -> DeviceError {
    if is_of_the_call(cause.0) {
        DeviceError::NoMemory { bytes, what, cause: cause.to_string() }
    } else {
        lost(cause)
    }
}

fn refused(cause: &DriverError) -> DeviceError {
    if is_of_the_call(cause.0) { DeviceError::Copy(cause.to_string()) } else { lost(cause) }
}

impl Device for CudaDevice {
    type Staging = Pinned;

    fn name(&self) -> String {
        self.context.name().unwrap_or_else(|cause| cause.to_string())
    }

    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        let taken = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the memory is written before it is read, and freed once, in `drop`.
            unsafe { result::malloc_sync(bytes) }
        });
        let address = taken.map_err(|cause| no_memory(&cause, bytes, "device"))?;
        self.memory.push((address, bytes));
        Ok(address)
    }

    fn staging(&mut self, bytes: usize) -> Result<Pinned, DeviceError> {
        // SAFETY: owned by the `Pinned` below, which frees it once.
        let taken = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) });
        let what = "page-locked";
        let base = NonNull::new(taken.map_err(|cause| no_memory(&cause, bytes, what))?.cast::<u8>());
        let cause = "no address".to_owned();
        let base = base.ok_or(DeviceError::NoMemory { bytes, what, cause })?;
        // SAFETY: `bytes` bytes that nobody else has.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { context: Arc::clone(&self.context), base, len: bytes, is_left: false })
    }

    fn hops_max(&self) -> usize {
        if self.kernels.is_some() { HOPS_MAX } else { 1 }
    }

    fn begin(&mut self, number: u64, mut copy: Copy<Pinned>) {
        let stream = match copy {
            Copy::In(..) => 0,
            Copy::Out(..) => 1,
            Copy::Within(_) => 2,
        };
        let begun = match &self.lost {
            Some(lost) => Err(lost.clone()),
            None if !self.is_ours(&copy) => {
                Err(DeviceError::Copy("an address that was neither allocated nor registered".to_owned()))
            }
            None => match self.try_begin(stream, &mut copy) {
                Ok(event) => Ok(event),
                Err(Refusal::Whole(cause)) => Err(refused(&cause)),
                Err(Refusal::Part(cause)) => Err(lost(&cause)),
            },
        };
        let staging = match copy {
            Copy::In(staging, _) | Copy::Out(staging, _) => Some(staging),
            Copy::Within(_) => None,
        };
        match begun {
            Ok(event) => self.streams[stream].running.push_back(Running { number, event, staging }),
            Err(cause @ DeviceError::Lost(_)) if self.lost.is_none() => {
                staging.into_iter().for_each(Pinned::leave);
                let ended = self.lose(cause.clone());
                self.refused.extend(ended);
                self.refused.push(Ended { number, staging: None, result: Err(cause) });
            }
            Err(cause) => self.refused.push(Ended { number, staging, result: Err(cause) }),
        }
    }

    fn ended(&mut self) -> Vec<Ended<Pinned>> {
        let mut all = std::mem::take(&mut self.refused);
        if self.lost.is_some() {
            return all;
        }
        // Events are asked of the thread's context, and the caller may be another thread than before.
        let mut broken = self.context.bind_to_thread().err().map(|cause| lost(&cause));
        let streams = if broken.is_none() { &mut self.streams[..] } else { &mut [] };
        for stream in streams {
            while let Some(first) = stream.running.front() {
                match first.event.try_is_complete() {
                    Ok(false) => break,
                    Ok(true) => {
                        let Some(Running { number, staging, .. }) = stream.running.pop_front() else { break };
                        all.push(Ended { number, staging, result: Ok(()) });
                    }
                    Err(cause) => {
                        broken = Some(lost(&cause));
                        break;
                    }
                }
            }
        }
        all.extend(broken.map(|cause| self.lose(cause)).into_iter().flatten());
        all
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if self.lost.is_none() {
            let ends = self.streams.iter().try_for_each(|stream| stream.stream.synchronize());
            if let Err(cause) = ends {
                drop(self.lose(lost(&cause)));
            }
        }
        if let Some(cause) = &self.lost {
            tracing::warn!(
                %cause,
                "the memory of a GPU that was lost comes back with the end of its CUDA context; if nvidia-smi shows it as in use after that, start the node again"
            );
            return;
        }
        for (address, _) in self.memory.drain(..) {
            // SAFETY: from `malloc_sync`, and no copy is under way any more.
            if let Err(cause) = unsafe { result::free_sync(address) } {
                tracing::warn!(%cause, "device memory was not given back");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::super::device::{Hop, Piece};
    use super::*;

    /// The same program, for a test that needs a process of its own.
    const ALONE: &str = "KVFLEET_TEST_ALONE";

    /// Nothing is ever there.
    const NOWHERE: u64 = 0x1000;

    fn wait(device: &mut CudaDevice, number: u64) -> Ended<Pinned> {
        let start = Instant::now();
        loop {
            if let Some(ended) = device.ended().into_iter().find(|ended| ended.number == number) {
                return ended;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "copy {number} never ends");
            std::thread::yield_now();
        }
    }

    /// Bytes go to the device and come back.
    fn works(device: &mut CudaDevice) {
        let memory = device.allocate(1 << 20).unwrap();
        let mut staging = device.staging(4096).unwrap();
        staging.as_mut().iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = (at * 7) as u8);
        let piece = || Piece { device: memory + 512, host: 0..4096 };
        device.begin(1, Copy::In(staging, piece()));
        let mut staging = wait(device, 1).staging.unwrap();
        let sent = staging.as_ref().to_vec();
        staging.as_mut().fill(0);
        device.begin(2, Copy::Out(staging, piece()));
        let ended = wait(device, 2);
        assert_eq!((ended.result, ended.staging.unwrap().as_ref()), (Ok(()), &sent[..]));
    }

    #[test]
    fn a_context_that_broke_goes_with_all_its_memory_where_there_is_a_gpu() {
        // A process has one context, so others must not have theirs here.
        if std::env::var_os(ALONE).is_none() {
            let name =
                "tiers::gpu::cuda::tests::a_context_that_broke_goes_with_all_its_memory_where_there_is_a_gpu";
            let alone = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(ALONE, "1")
                .output()
                .unwrap();
            let said = [alone.stdout, alone.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
            let said = said.concat();
            println!("{said}");
            // With another name none would run.
            assert!(alone.status.success() && said.contains("1 passed"));
            return;
        }
        let Some(mut device) = CudaDevice::open(0).unwrap() else {
            return println!("SKIPPED: there is no driver or no GPU here");
        };
        if device.kernels.is_none() {
            return println!("SKIPPED: without a kernel the driver refuses what would break a context");
        }
        works(&mut device);
        let memory = device.allocate(1 << 30).unwrap();
        // SAFETY: not held: nothing is there, and what comes of that is the test.
        unsafe { device.register(NOWHERE, 4096) };
        let staging = device.staging(4096).unwrap();
        device.begin(3, Copy::Within(vec![Hop { from: memory, to: NOWHERE, len: 64 }]));
        device.begin(4, Copy::In(staging, Piece { device: memory, host: 0..4096 }));
        let ended = wait(&mut device, 3);
        assert!(matches!(ended.result, Err(DeviceError::Lost(_))), "{ended:?}");
        assert!(matches!(device.staging(4096), Err(DeviceError::Lost(_))));
        device.begin(5, Copy::Within(vec![Hop { from: memory, to: memory + 64, len: 64 }]));
        let ended = wait(&mut device, 5);
        assert!(matches!(ended.result, Err(DeviceError::Lost(_))), "{ended:?}");
        drop(device);
        // All of its memory goes with the context, and that is over: nothing here refers to it any more.
        let (mut number, mut flags, mut is_active) = (0, 0, -1);
        // SAFETY: plain numbers, written before they are read.
        let asked = unsafe {
            sys::cuDeviceGet(&mut number, 0)
                .result()
                .and_then(|()| sys::cuDevicePrimaryCtxGetState(number, &mut flags, &mut is_active).result())
        };
        assert_eq!((asked, is_active), (Ok(()), 0));
        // CUDA gives no other one to this process.
        let again = CudaDevice::open(0).map(drop).unwrap_err().to_string();
        assert!(again.ends_with("so it does not come back by itself"), "{again}");
        println!("{again}");
    }

    #[test]
    fn a_range_is_known_only_where_all_of_it_is() {
        let ranges = [(1000, 100), (5000, 50)];
        for (address, len) in [(1000, 100), (1099, 1), (5010, 40), (1000, 0)] {
            assert!(holds(&ranges, address, len), "{address} {len}");
        }
        for (address, len) in
            [(999, 1), (1000, 101), (1099, 2), (1100, 1), (3000, 1), (5050, 1), (u64::MAX, 2)]
        {
            assert!(!holds(&ranges, address, len), "{address} {len}");
        }
        assert!(!holds(&ranges, 1050, usize::MAX));
    }

    #[test]
    fn only_what_the_driver_says_of_a_copy_itself_leaves_the_device_usable() {
        use sys::CUresult as Code;
        for code in [Code::CUDA_ERROR_INVALID_VALUE, Code::CUDA_ERROR_OUT_OF_MEMORY] {
            assert!(is_of_the_call(code), "{code:?}");
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
            assert!(!is_of_the_call(code), "{code:?}");
        }
    }
}
