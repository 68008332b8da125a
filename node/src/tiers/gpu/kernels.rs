//! The kernel that copies many slices in one launch. NVRTC, if present, compiles it when a device
//! is opened, and it is tested on that device before use.
//!
//! Without it slices are copied one by one, so the GPU tier works anyway; the reason is logged
//! once. Not here: whether memory may be accessed (`cuda`). The source is `kernels.cu`.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaFunction, DriverError, result, sys};
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys::nvrtcResult;
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::device::SliceCopy;

/// Slices in one launch; `Hops` in `kernels.cu` has the same number.
pub(super) const SLICES_PER_LAUNCH: usize = 32;

const SOURCE: &str = include_str!("kernels.cu");

/// Threads per block, and maximum blocks per slice: 64 words per thread for a slice of 4 MiB.
const THREADS: u32 = 256;
const BLOCKS_MAX: u64 = 16;

/// Whether the kernel failed permanently ([`KernelError::is_permanent`]); then later devices of
/// this process do not try it.
static IS_BROKEN: AtomicBool = AtomicBool::new(false);

/// One slice in the kernel's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawSliceCopy {
    from: u64,
    to: u64,
    len: u64,
}

#[repr(C)]
#[derive(Debug)]
struct RawSliceCopies {
    hop: [RawSliceCopy; SLICES_PER_LAUNCH],
}

/// Reason why the kernel is unavailable.
#[derive(Debug, thiserror::Error)]
enum KernelError {
    #[error("libnvrtc is missing")]
    Absent,
    #[error("it failed earlier in this process")]
    Broken,
    #[error("it does not compile: {0:?}")]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("its self-test copied wrong bytes")]
    WrongResult,
}

impl KernelError {
    /// Whether the kernel itself is at fault: the next device would fail too, and a kernel that
    /// breaks its context would do so at each opening. A lost, busy or exhausted device is no fault
    /// of the kernel.
    fn is_permanent(&self) -> bool {
        match self {
            KernelError::WrongResult => true,
            KernelError::Compile(cause) => {
                let (CompileError::CreationError(NvrtcError(code))
                | CompileError::CompileError { nvrtc: NvrtcError(code), .. }
                | CompileError::GetLogError(NvrtcError(code))
                | CompileError::GetPtxError(NvrtcError(code))
                | CompileError::DestroyError(NvrtcError(code))) = cause;
                *code != nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY
            }
            KernelError::Driver(DriverError(code)) => is_kernel_error(*code),
            KernelError::Absent | KernelError::Broken => false,
        }
    }
}

/// Whether a driver error is about the kernel's code or its execution, not about the device.
fn is_kernel_error(code: sys::CUresult) -> bool {
    use sys::CUresult as Code;
    matches!(
        code,
        // It does not load.
        Code::CUDA_ERROR_INVALID_IMAGE
            | Code::CUDA_ERROR_INVALID_SOURCE
            | Code::CUDA_ERROR_INVALID_PTX
            | Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | Code::CUDA_ERROR_NO_BINARY_FOR_GPU
            | Code::CUDA_ERROR_JIT_COMPILER_NOT_FOUND
            | Code::CUDA_ERROR_JIT_COMPILATION_DISABLED
            | Code::CUDA_ERROR_NOT_FOUND
            // It misbehaved in the self-test, alone in its context.
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// The kernel, loaded on one device.
#[derive(Clone, Debug)]
pub(super) struct SliceKernel {
    copy_slices: CudaFunction,
}

/// PTX for devices of this compute capability or later.
fn compile(major: i32, minor: i32) -> Result<Ptx, KernelError> {
    // SAFETY: loads NVRTC's library and runs its initialisers, which are trusted like the library
    // itself. Without it the next call would panic.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(KernelError::Absent);
    }
    let options = vec![format!("--gpu-architecture=compute_{major}{minor}"), "--std=c++17".to_owned()];
    let name = Some("kernels.cu".to_owned());
    Ok(compile_ptx_with_opts(SOURCE, CompileOptions { options, name, ..CompileOptions::default() })?)
}

impl SliceKernel {
    /// The kernel on this device; `None`, with the reason in the log, if it is unavailable.
    pub(super) fn open(context: &Arc<CudaContext>) -> Option<SliceKernel> {
        let opened = if IS_BROKEN.load(Ordering::Relaxed) {
            Err(KernelError::Broken)
        } else {
            SliceKernel::try_open(context)
        };
        if let Err(cause) = &opened {
            if cause.is_permanent() {
                IS_BROKEN.store(true, Ordering::Relaxed);
            }
            tracing::info!(%cause, "the GPU has no slice kernel; slices are copied one by one");
        }
        opened.ok()
    }

    fn try_open(context: &Arc<CudaContext>) -> Result<SliceKernel, KernelError> {
        let (major, minor) = context.compute_capability()?;
        let module = context.load_module(compile(major, minor)?)?;
        let kernels = SliceKernel { copy_slices: module.load_function("copy_slices")? };
        kernels.self_test(context)?;
        Ok(kernels)
    }

    /// Copies some slices in memory of its own, with equal and different alignment, and compares
    /// the result.
    fn self_test(&self, context: &Arc<CudaContext>) -> Result<(), KernelError> {
        const HALF: usize = 32 << 10;
        context.bind_to_thread()?;
        let stream = context.new_stream()?;
        // SAFETY: written before it is read, and freed once, below.
        let memory = unsafe { result::malloc_sync(2 * HALF)? };
        let before: Vec<u8> = (0..2 * HALF).map(|at| (at * 7 + at / 256) as u8).collect();
        let mut wanted = before.clone();
        let hops: Vec<SliceCopy> = (0..SLICES_PER_LAUNCH)
            .map(|number| {
                let (from, to) = (number * 1000 + number % 5, HALF + number * 1017);
                let len = if number % 4 == 0 { number } else { 1000 };
                wanted.copy_within(from..from + len, to);
                SliceCopy { from: memory + from as u64, to: memory + to as u64, len }
            })
            .collect();
        let mut after = vec![0; 2 * HALF];
        // SAFETY: all slices are within `memory`, which has no other user. The host memory outlives
        // the copies, since they are awaited.
        let ran = unsafe {
            // In the same stream: a copy in another one could end after the kernel started.
            let begun = result::memcpy_htod_async(memory, &before, stream.cu_stream())
                .and_then(|()| self.launch(stream.cu_stream(), &hops));
            let ended = stream.synchronize();
            begun.and(ended).and_then(|()| result::memcpy_dtoh_sync(&mut after, memory))
        };
        // SAFETY: from `malloc_sync`. The stream was synchronised, or the context is broken and the
        // call is refused.
        let freed = unsafe { result::free_sync(memory) };
        ran.and(freed)?;
        if after == wanted { Ok(()) } else { Err(KernelError::WrongResult) }
    }

    /// Starts a copy of up to [`SLICES_PER_LAUNCH`] slices; further ones are ignored.
    ///
    /// # Safety
    /// The context is bound to this thread. Both ends of each slice are device memory of it that
    /// may be accessed until the stream has passed this launch.
    pub(super) unsafe fn launch(&self, stream: sys::CUstream, hops: &[SliceCopy]) -> Result<(), DriverError> {
        debug_assert!(hops.len() <= SLICES_PER_LAUNCH, "{} slices in one launch", hops.len());
        let mut raw = RawSliceCopies { hop: [RawSliceCopy::default(); SLICES_PER_LAUNCH] };
        for (raw, hop) in raw.hop.iter_mut().zip(hops) {
            *raw = RawSliceCopy { from: hop.from, to: hop.to, len: hop.len as u64 };
        }
        let longest = hops.iter().map(|hop| hop.len as u64).max().unwrap_or(0);
        let blocks = longest.div_ceil(u64::from(THREADS) * 16).clamp(1, BLOCKS_MAX) as u32;
        let rows = hops.len().clamp(1, SLICES_PER_LAUNCH) as u32;
        let mut parameters = [std::ptr::from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes one `Hops`, with the layout of `RawSliceCopies`; the driver
        // copies it before it returns. The caller guarantees the slices.
        unsafe {
            result::launch_kernel(
                self.copy_slices.cu_function(),
                (blocks, rows, 1),
                (THREADS, 1, 1),
                0,
                stream,
                &mut parameters,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kernel_parameters_match_the_rust_struct() {
        assert!(SOURCE.contains(&format!("Hop hop[{SLICES_PER_LAUNCH}];")));
        assert_eq!(size_of::<RawSliceCopies>(), SLICES_PER_LAUNCH * 24);
        // The parameter limit of a launch before CUDA 12.1.
        assert!(size_of::<RawSliceCopies>() <= 4096);
    }

    #[test]
    fn only_kernel_errors_disable_it_for_later_devices() {
        use sys::CUresult as Code;
        let driver = |code| KernelError::from(DriverError(code)).is_permanent();
        for code in
            [Code::CUDA_ERROR_INVALID_PTX, Code::CUDA_ERROR_NOT_FOUND, Code::CUDA_ERROR_ILLEGAL_ADDRESS]
        {
            assert!(driver(code), "{code:?}");
        }
        let passing = [
            Code::CUDA_ERROR_OUT_OF_MEMORY,
            Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            Code::CUDA_ERROR_LAUNCH_TIMEOUT,
            Code::CUDA_ERROR_DEVICE_UNAVAILABLE,
            Code::CUDA_ERROR_ECC_UNCORRECTABLE,
            Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            Code::CUDA_ERROR_UNKNOWN,
        ];
        for code in passing {
            assert!(!driver(code), "{code:?}");
        }
        let compiled = |code| KernelError::from(CompileError::CreationError(NvrtcError(code))).is_permanent();
        assert!(compiled(nvrtcResult::NVRTC_ERROR_COMPILATION));
        assert!(!compiled(nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY));
        // Another NVRTC may be installed later; a known failure needs no further test.
        assert!(KernelError::WrongResult.is_permanent());
        assert!(!KernelError::Absent.is_permanent() && !KernelError::Broken.is_permanent());
    }

    #[test]
    fn nvrtc_compiles_the_kernel_if_available() {
        for (major, minor) in [(8, 0), (9, 0)] {
            match compile(major, minor) {
                Ok(ptx) => {
                    let text = String::from_utf8(ptx.as_bytes().unwrap().to_vec()).unwrap();
                    assert!(text.contains(&format!(".target sm_{major}{minor}")), "{text}");
                    assert!(text.contains(".visible .entry copy_slices("), "{text}");
                    // Words of 16 bytes are moved by vector instructions.
                    assert!(text.contains("ld.global.v4.u32") || text.contains("ld.v4.u32"), "{text}");
                    println!("compiled for sm_{major}{minor}: {} bytes of PTX", text.len());
                }
                Err(KernelError::Absent) => println!("SKIPPED for sm_{major}{minor}: libnvrtc is missing"),
                Err(cause) => panic!("{cause}"),
            }
        }
    }
}
