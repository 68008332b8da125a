//! The interface of a GPU for the tier: device memory, page-locked host memory, and asynchronous
//! copies.
//!
//! A copy owns its host memory and returns it at its end, so that memory in use by the device
//! cannot be accessed. Each direction has a stream: copies of one stream end in order, copies of
//! different streams in any order. Not here: which data is where (`super`).

/// Error of a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device or the host has too little memory.
    #[error(
        "cannot allocate {bytes} bytes of {what} memory: {cause}; give the GPU tier less, or stop other \
         users of the device"
    )]
    NoMemory {
        /// Requested bytes.
        bytes: usize,
        /// `device` or `page-locked`.
        what: &'static str,
        /// Message of the driver.
        cause: String,
    },
    /// The GPU or its driver is missing.
    #[error("no such GPU, or no driver for it: choose a number that nvidia-smi lists, or set gpu_bytes = 0")]
    Absent,
    /// One copy failed; others are unaffected.
    #[error("a copy failed: {0}")]
    Copy(String),
    /// The device is unusable, and the content of its memory is lost.
    #[error("the GPU is lost: {0}")]
    Lost(String),
}

/// A copy between host and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Address in device memory.
    pub device: u64,
    /// Range in the host's buffer.
    pub host: std::ops::Range<usize>,
}

/// A copy within device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceCopy {
    /// Source address.
    pub from: u64,
    /// Destination address.
    pub to: u64,
    /// Length in bytes.
    pub len: usize,
}

/// A copy to start. `S` is the device's page-locked memory.
#[derive(Debug)]
pub enum DeviceCopy<S> {
    /// From the host to the device.
    HostToDevice(S, CopyRange),
    /// From the device to the host.
    DeviceToHost(S, CopyRange),
    /// Gathers or scatters slices within device memory.
    DeviceToDevice(Vec<SliceCopy>),
}

/// A completed copy.
#[derive(Debug)]
pub struct CompletedCopy<S> {
    /// The number given at its start.
    pub number: u64,
    /// Its host memory; `None` after [`DeviceError::Lost`], since the device may still write there.
    pub staging: Option<S>,
    /// Its result. After an error the content of the destination is undefined.
    pub result: Result<(), DeviceError>,
}

/// The device type of a build without GPU support; it has no values.
#[derive(Debug)]
pub enum NoDevice {}

impl GpuDevice for NoDevice {
    type Staging = Vec<u8>;

    fn name(&self) -> String {
        match *self {}
    }

    fn allocate(&mut self, _: usize) -> Result<u64, DeviceError> {
        match *self {}
    }

    fn allocate_staging(&mut self, _: usize) -> Result<Vec<u8>, DeviceError> {
        match *self {}
    }

    fn start(&mut self, _: u64, _: DeviceCopy<Vec<u8>>) {
        match *self {}
    }

    fn take_completed(&mut self) -> Vec<CompletedCopy<Vec<u8>>> {
        match *self {}
    }
}

/// A GPU, or a fake one.
pub trait GpuDevice: std::fmt::Debug {
    /// Page-locked memory of the host.
    type Staging: AsRef<[u8]> + AsMut<[u8]> + std::fmt::Debug;

    /// Name of the device, for logs.
    fn name(&self) -> String;

    /// Allocates device memory for the lifetime of the device; returns its address.
    ///
    /// # Errors
    /// If there is too little memory.
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError>;

    /// Allocates page-locked memory.
    ///
    /// # Errors
    /// If there is too little memory.
    fn allocate_staging(&mut self, bytes: usize) -> Result<Self::Staging, DeviceError>;

    /// Number of slices in one [`DeviceCopy::DeviceToDevice`] for best efficiency.
    fn slices_per_copy_max(&self) -> usize {
        1
    }

    /// Starts a copy. It completes exactly once, also if it could not start;
    /// [`Self::take_completed`] returns the result.
    fn start(&mut self, number: u64, copy: DeviceCopy<Self::Staging>);

    /// Copies completed since the last call. Never waits.
    fn take_completed(&mut self) -> Vec<CompletedCopy<Self::Staging>>;
}
