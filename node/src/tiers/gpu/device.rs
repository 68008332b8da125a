//! What a GPU must do for the tier: memory of its own, page-locked memory of the host, and copies that end later.
//!
//! A copy is asked for with the host memory it needs and gives it back when it ends, so nobody can touch
//! what the device still reads or writes. Each direction has a stream: copies of one stream end in the order in which they
//! were asked for, copies of different streams in any. Not here: what is where (`super`).

/// Why a device did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// It has not so much memory, or the host has none to lock.
    #[error(
        "no {bytes} bytes of {what} memory: {cause}; give the GPU tier less, or stop what else uses the device"
    )]
    NoMemory {
        /// How much.
        bytes: usize,
        /// `device` or `page-locked`.
        what: &'static str,
        /// What the driver said.
        cause: String,
    },
    /// There is no such device, or no driver for it.
    #[error(
        "no such GPU, or no driver for it: give the number of one that nvidia-smi lists, or set gpu_bytes = 0"
    )]
    Absent,
    /// One copy failed; others may go on.
    #[error("a copy failed: {0}")]
    Copy(String),
    /// Nothing works any more, and what was in its memory is gone.
    #[error("the GPU is lost: {0}")]
    Lost(String),
}

/// A part of a copy between host and device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address in device memory.
    pub device: u64,
    /// Where in the host's buffer.
    pub host: std::ops::Range<usize>,
}

/// A part of a copy from device memory to device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Where it is.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Length in bytes.
    pub len: usize,
}

/// A copy that a device is asked for. `S` is its page-locked memory.
#[derive(Debug)]
pub enum Copy<S> {
    /// From the host to the device.
    In(S, Piece),
    /// From the device to the host.
    Out(S, Piece),
    /// Gathers slices that lie apart in device memory, or scatters them.
    Within(Vec<Hop>),
}

/// A copy that ended.
#[derive(Debug)]
pub struct Ended<S> {
    /// The number it was asked for with.
    pub number: u64,
    /// The host memory it had; none after [`DeviceError::Lost`], when the device may still write there.
    pub staging: Option<S>,
    /// How it went. After an error the destination holds anything.
    pub result: Result<(), DeviceError>,
}

/// The device of a build without any: there is none.
#[derive(Debug)]
pub enum NoDevice {}

impl Device for NoDevice {
    type Staging = Vec<u8>;

    fn name(&self) -> String {
        match *self {}
    }

    fn allocate(&mut self, _: usize) -> Result<u64, DeviceError> {
        match *self {}
    }

    fn staging(&mut self, _: usize) -> Result<Vec<u8>, DeviceError> {
        match *self {}
    }

    fn begin(&mut self, _: u64, _: Copy<Vec<u8>>) {
        match *self {}
    }

    fn ended(&mut self) -> Vec<Ended<Vec<u8>>> {
        match *self {}
    }
}

/// A GPU, or what stands for one.
pub trait Device: std::fmt::Debug {
    /// Page-locked memory of the host.
    type Staging: AsRef<[u8]> + AsMut<[u8]> + std::fmt::Debug;

    /// What it is called, for logs.
    fn name(&self) -> String;

    /// Takes device memory, for as long as the device is open; its address.
    ///
    /// # Errors
    /// When there is not so much.
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError>;

    /// Takes page-locked memory.
    ///
    /// # Errors
    /// When there is not so much.
    fn staging(&mut self, bytes: usize) -> Result<Self::Staging, DeviceError>;

    /// Slices of one [`Copy::Within`] that are worth being asked for together.
    fn hops_max(&self) -> usize {
        1
    }

    /// Begins a copy. It ends once, also when it could not begin; [`Self::ended`] says how.
    fn begin(&mut self, number: u64, copy: Copy<Self::Staging>);

    /// Copies that ended since the last call. Does not wait.
    fn ended(&mut self) -> Vec<Ended<Self::Staging>>;
}
