//! The kernel that copies many slices in one launch: compiled by NVRTC when a device is opened, where there is an NVRTC, and
//! tried on that device before it is used.
//!
//! Without it slices are copied one by one, so nothing here keeps a node from its GPU tier: what is missing is said once.
//! Not here: whether the memory may be touched (`cuda`). The source is `kernels.cu`.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, CudaFunction, DriverError, result, sys};
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys::nvrtcResult;
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::device::Hop;

/// Slices in one launch; `Hops` in `kernels.cu` has as many.
pub(super) const HOPS_MAX: usize = 32;

const SOURCE: &str = include_str!("kernels.cu");

/// Threads of a block, and blocks of a slice at most: a slice of 4 MiB is 64 words a thread.
const THREADS: u32 = 256;
const BLOCKS_MAX: u64 = 16;

/// The kernel cannot work here ([`NoKernel::is_for_good`]): no later device of this process is given one.
static IS_BROKEN: AtomicBool = AtomicBool::new(false);

/// One slice as the kernel knows it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawHop {
    from: u64,
    to: u64,
    len: u64,
}

#[repr(C)]
#[derive(Debug)]
struct RawHops {
    hop: [RawHop; HOPS_MAX],
}

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
enum NoKernel {
    #[error("there is no libnvrtc")]
    Absent,
    #[error("it cannot work, as was found out earlier in this process")]
    Broken,
    #[error("it does not compile: {0:?}")]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("it copies other bytes than it is told to")]
    Wrong,
}

impl NoKernel {
    /// Whether it is the kernel that is at fault: the next device would have none either, and one whose context it broke
    /// would be broken each time it is opened. A device that is lost, busy or out of memory says nothing of the kernel.
    fn is_for_good(&self) -> bool {
        match self {
            NoKernel::Wrong => true,
            NoKernel::Compile(cause) => {
                let (CompileError::CreationError(NvrtcError(code))
                | CompileError::CompileError { nvrtc: NvrtcError(code), .. }
                | CompileError::GetLogError(NvrtcError(code))
                | CompileError::GetPtxError(NvrtcError(code))
                | CompileError::DestroyError(NvrtcError(code))) = cause;
                *code != nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY
            }
            NoKernel::Driver(DriverError(code)) => is_of_the_kernel(*code),
            NoKernel::Absent | NoKernel::Broken => false,
        }
    }
}

/// Whether the driver means the code that it was given or what that did, and not the device.
fn is_of_the_kernel(code: sys::CUresult) -> bool {
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
            // It did what it must not when it was tried, alone in its context.
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
pub(super) struct Kernels {
    copy_slices: CudaFunction,
}

/// PTX for devices of this compute capability and later ones.
fn compile(capability: (i32, i32)) -> Result<Ptx, NoKernel> {
    // SAFETY: loads NVRTC's library, whose initialisers are trusted as the library is. Without it the next call would panic.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(NoKernel::Absent);
    }
    let (major, minor) = capability;
    let options = vec![format!("--gpu-architecture=compute_{major}{minor}"), "--std=c++17".to_owned()];
    let name = Some("kernels.cu".to_owned());
    Ok(compile_ptx_with_opts(SOURCE, CompileOptions { options, name, ..CompileOptions::default() })?)
}

impl Kernels {
    /// On this device; nothing, and why in the log, where it cannot be had.
    pub(super) fn open(context: &Arc<CudaContext>) -> Option<Kernels> {
        let opened = if IS_BROKEN.load(Ordering::Relaxed) {
            Err(NoKernel::Broken)
        } else {
            Kernels::try_open(context)
        };
        if let Err(cause) = &opened {
            if cause.is_for_good() {
                IS_BROKEN.store(true, Ordering::Relaxed);
            }
            tracing::info!(%cause, "the GPU has no kernel for slices; they are copied one by one");
        }
        opened.ok()
    }

    fn try_open(context: &Arc<CudaContext>) -> Result<Kernels, NoKernel> {
        let module = context.load_module(compile(context.compute_capability()?)?)?;
        let kernels = Kernels { copy_slices: module.load_function("copy_slices")? };
        kernels.try_out(context)?;
        Ok(kernels)
    }

    /// Copies some slices in memory of its own, lying alike and not, and looks at what came of it.
    fn try_out(&self, context: &Arc<CudaContext>) -> Result<(), NoKernel> {
        const HALF: usize = 32 << 10;
        context.bind_to_thread()?;
        let stream = context.new_stream()?;
        // SAFETY: written before it is read, and freed once, below.
        let memory = unsafe { result::malloc_sync(2 * HALF)? };
        let before: Vec<u8> = (0..2 * HALF).map(|at| (at * 7 + at / 256) as u8).collect();
        let mut wanted = before.clone();
        let hops: Vec<Hop> = (0..HOPS_MAX)
            .map(|number| {
                let (from, to) = (number * 1000 + number % 5, HALF + number * 1017);
                let len = if number % 4 == 0 { number } else { 1000 };
                wanted.copy_within(from..from + len, to);
                Hop { from: memory + from as u64, to: memory + to as u64, len }
            })
            .collect();
        let mut after = vec![0; 2 * HALF];
        // SAFETY: all slices are within `memory`, and nobody else knows of it. What the host lends to the copies outlives
        // them, since they are waited for.
        let ran = unsafe {
            // In the same stream: one that is not may end after the kernel began.
            let begun = result::memcpy_htod_async(memory, &before, stream.cu_stream())
                .and_then(|()| self.launch(stream.cu_stream(), &hops));
            let ended = stream.synchronize();
            begun.and(ended).and_then(|()| result::memcpy_dtoh_sync(&mut after, memory))
        };
        // SAFETY: from `malloc_sync`, and the stream came to an end, or the context is broken and this is refused.
        let freed = unsafe { result::free_sync(memory) };
        ran.and(freed)?;
        if after == wanted { Ok(()) } else { Err(NoKernel::Wrong) }
    }

    /// Asks for a copy of up to [`HOPS_MAX`] slices; more are left out.
    ///
    /// # Safety
    /// The context is bound to this thread, and both ends of each slice are device memory of it that may be touched until
    /// the stream has come so far.
    pub(super) unsafe fn launch(&self, stream: sys::CUstream, hops: &[Hop]) -> Result<(), DriverError> {
        debug_assert!(hops.len() <= HOPS_MAX, "{} slices in one launch", hops.len());
        let mut raw = RawHops { hop: [RawHop::default(); HOPS_MAX] };
        for (raw, hop) in raw.hop.iter_mut().zip(hops) {
            *raw = RawHop { from: hop.from, to: hop.to, len: hop.len as u64 };
        }
        let longest = hops.iter().map(|hop| hop.len as u64).max().unwrap_or(0);
        let blocks = longest.div_ceil(u64::from(THREADS) * 16).clamp(1, BLOCKS_MAX) as u32;
        let rows = hops.len().clamp(1, HOPS_MAX) as u32;
        let mut parameters = [std::ptr::from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes one `Hops`, which is laid out as `RawHops`; the driver copies it before it returns. What
        // the slices are is the caller's promise.
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
    fn the_kernel_and_this_file_agree_on_what_a_launch_takes() {
        assert!(SOURCE.contains(&format!("Hop hop[{HOPS_MAX}];")));
        assert_eq!(size_of::<RawHops>(), HOPS_MAX * 24);
        // The most that a launch could take before CUDA 12.1.
        assert!(size_of::<RawHops>() <= 4096);
    }

    #[test]
    fn only_what_is_wrong_with_the_kernel_keeps_later_devices_from_having_it() {
        use sys::CUresult as Code;
        let driver = |code| NoKernel::from(DriverError(code)).is_for_good();
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
        let compiled = |code| NoKernel::from(CompileError::CreationError(NvrtcError(code))).is_for_good();
        assert!(compiled(nvrtcResult::NVRTC_ERROR_COMPILATION));
        assert!(!compiled(nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY));
        // Another NVRTC may come, and what is known already is not found out again.
        assert!(NoKernel::Wrong.is_for_good());
        assert!(!NoKernel::Absent.is_for_good() && !NoKernel::Broken.is_for_good());
    }

    #[test]
    fn nvrtc_compiles_the_kernel_where_there_is_one() {
        for capability in [(8, 0), (9, 0)] {
            match compile(capability) {
                Ok(ptx) => {
                    let text = String::from_utf8(ptx.as_bytes().unwrap().to_vec()).unwrap();
                    let (major, minor) = capability;
                    assert!(text.contains(&format!(".target sm_{major}{minor}")), "{text}");
                    assert!(text.contains(".visible .entry copy_slices("), "{text}");
                    // Words of 16 bytes are moved as such.
                    assert!(text.contains("ld.global.v4.u32") || text.contains("ld.v4.u32"), "{text}");
                    println!("compiled for sm_{major}{minor}: {} bytes of PTX", text.len());
                }
                Err(NoKernel::Absent) => println!("SKIPPED for sm_{capability:?}: there is no libnvrtc here"),
                Err(cause) => panic!("{cause}"),
            }
        }
    }
}
