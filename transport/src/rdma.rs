//! The path of RDMA: a client's card reads blocks from the node's memory and writes into it, and no processor of the node
//! touches them on the way out.
//!
//! What is said goes over a connection of TLS over TCP that was upgraded: it proves who the caller is, exchanges the
//! numbers of queue pairs, and names the places that may be read or written. When it ends, its queue pairs end, and with
//! them every right to touch memory (`docs/adr/0038-rdma.md`). The node's end is `rdma/offer.rs`, `lending.rs` and
//! `taking.rs`; the client's `dialer.rs`, `path.rs`, `lane.rs`, `link.rs`, `fetch.rs` and `save.rs`. Below both: transfers
//! (`flights.rs`), memory and places (`memory.rs`), the card as traits (`rail.rs`) and as libibverbs (`verbs.rs`).
//! A process has one rail for each device and port that it opens; which of them go together is in `pairs.rs`, what becomes of one
//! that fails in `lane.rs` (`docs/adr/0046-several-rails.md`). Memory of GPUs is prepared in `gpu.rs`, which nothing uses yet.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

mod abi;
mod choose;
mod dialer;
#[cfg(test)]
mod fake;
mod fetch;
mod flights;
pub mod gpu;
mod lane;
mod layers;
mod lending;
mod link;
mod memory;
mod offer;
mod pairs;
mod parts;
mod path;
pub mod probe;
mod rail;
mod reads;
mod save;
mod shares;
mod taking;
mod topology;
mod verbs;
mod words;

pub use choose::RdmaChoice;
pub use dialer::RdmaDialer;
pub use memory::{Memory, Place, Pool};
pub(crate) use offer::Attached;
pub use offer::RdmaOffer;
pub use topology::RdmaNear;
pub(crate) use words::Nonsense;

use flights::Flights;
use rail::{Access, Domain, Rail, RegisterMr};

use crate::pick::BreakerRules;

/// Transfers under way at once over all queue pairs of a device.
pub const IN_FLIGHT_MAX: u32 = 1024;

/// Transfers under way at once on one queue pair.
pub const QUEUE_IN_FLIGHT_MAX: u32 = 64;

/// What networks differ in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaTuning {
    /// See [`IN_FLIGHT_MAX`].
    pub in_flight_max: u32,
    /// See [`QUEUE_IN_FLIGHT_MAX`].
    pub queue_in_flight_max: u32,
    /// Reads that a queue pair has under way at once; both ends must allow so many. Most cards do 16.
    pub reads_at_once: u8,
    /// Time to wait for a packet's answer, as verbs number it: 4.096 µs times two to this power.
    pub ack_timeout: u8,
    /// How often a packet is sent again before its queue pair fails, at most 7.
    pub retries: u8,
    /// Class of the packets, by which networks without loss know them.
    pub traffic_class: u8,
}

impl Default for RdmaTuning {
    fn default() -> RdmaTuning {
        RdmaTuning {
            in_flight_max: IN_FLIGHT_MAX,
            queue_in_flight_max: QUEUE_IN_FLIGHT_MAX,
            reads_at_once: 16,
            // 67 ms; with all retries a dead peer is noticed after half a second. The control connection says it too.
            ack_timeout: 14,
            retries: 7,
            traffic_class: 0,
        }
    }
}

/// Settings of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Which devices.
    pub choice: RdmaChoice,
    /// What networks differ in.
    pub tuning: RdmaTuning,
    /// Registered memory of a dialer in bytes, on all of its rails together: half of it for frames that callers keep, half for what is under way.
    pub local_bytes: usize,
    /// Registered memory of each connection at the node, in bytes: what may not be read in place goes through it, and
    /// all saves do.
    pub tray_bytes: usize,
    /// Connections that a node offers RDMA at once; above, they are served without.
    pub links_max: usize,
    /// Operations that one path has under way at once over RDMA; over several rails at least two on each. Further ones wait.
    pub links_per_peer: usize,
    /// A fetch of so many bytes is read over all rails at once.
    pub large_bytes: usize,
    /// For how long a rail is not used with a peer to which its transfers failed.
    pub cool_down: BreakerRules,
}

/// A transfer that failed was sent again many times by the card: once is enough.
const COOL_DOWN: BreakerRules = BreakerRules {
    failures_max: 1,
    open_min: Duration::from_secs(1),
    open_max: Duration::from_secs(60),
    // More than a trial takes, so that there is one at a time.
    trial_max: Duration::from_secs(10),
};

impl Default for RdmaConfig {
    fn default() -> RdmaConfig {
        RdmaConfig {
            choice: RdmaChoice::default(),
            tuning: RdmaTuning::default(),
            local_bytes: 256 << 20,
            tray_bytes: 16 << 20,
            links_max: 64,
            links_per_peer: 4,
            // What a rail of 400 Gbit/s brings in twice the time of asking for it.
            large_bytes: 16 << 20,
            cool_down: COOL_DOWN,
        }
    }
}

/// What a device's transfers came to, those that this end began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaNumbers {
    /// Bytes read from peers.
    pub read_bytes: u64,
    /// Bytes written to peers.
    pub written_bytes: u64,
    /// Transfers that failed.
    pub failed: u64,
}

/// Why there is no RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The library is not there, or is too old.
    #[error(
        "RDMA is not used: libibverbs.so.1 cannot be loaded: {cause}; install rdma-core (Debian: libibverbs1)"
    )]
    Library {
        /// What the loader said.
        cause: String,
    },
    /// No device that is wanted.
    #[error(
        "RDMA is not used: no such device; there is: {there}; bring one up, or give the device and address of one in the \
         configuration's rdma section"
    )]
    NoDevice {
        /// What there is.
        there: String,
    },
    /// A device refuses to be used.
    #[error("RDMA device {device} cannot be {what}: {cause}{}", hint(cause))]
    Device {
        /// Which.
        device: String,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// A setting that cannot work.
    #[error("RDMA setting {name} is {got}: {remedy}")]
    Setting {
        /// Which.
        name: &'static str,
        /// What was given.
        got: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// Memory cannot be registered.
    #[error("RDMA device {device} cannot register {bytes} bytes: {cause}{}", hint(cause))]
    Register {
        /// Which.
        device: String,
        /// How many.
        bytes: u64,
        /// What the system said.
        cause: io::Error,
    },
}

/// What to do when the system refuses.
fn hint(cause: &io::Error) -> &'static str {
    match cause.raw_os_error() {
        // Pinned pages count against the limit of locked memory, and the kernel says no more than that there is none. Queues are
        // of such memory too.
        Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN) => {
            "; such memory is locked: raise the limit (ulimit -l, LimitMEMLOCK=infinity) or give the process \
             the capability IPC_LOCK"
        }
        Some(libc::EACCES) => {
            "; let this user open the files under /dev/infiniband, and a container have them"
        }
        _ => "",
    }
}

impl RdmaError {
    fn register(device: &str, bytes: u64, cause: io::Error) -> RdmaError {
        RdmaError::Register { device: device.to_owned(), bytes, cause }
    }
}

impl RdmaTuning {
    /// Refuses what no card takes, or with which every transfer would wait for ever.
    fn check(&self) -> Result<(), RdmaError> {
        let at_least_one = "give at least 1";
        let number = |name, got: u64, is_right: bool, remedy| {
            if is_right { Ok(()) } else { Err(RdmaError::Setting { name, got, remedy }) }
        };
        number("in_flight_max", self.in_flight_max.into(), self.in_flight_max > 0, at_least_one)?;
        let queue = self.queue_in_flight_max;
        number("queue_in_flight_max", queue.into(), queue > 0, at_least_one)?;
        number("reads_at_once", self.reads_at_once.into(), self.reads_at_once > 0, at_least_one)?;
        let is_timeout = (1..=31).contains(&self.ack_timeout);
        number("ack_timeout", self.ack_timeout.into(), is_timeout, "give 1 to 31; 14 is 67 ms")?;
        number("retries", self.retries.into(), self.retries <= 7, "give at most 7")
    }
}

/// Those of several rails that can be used.
///
/// # Errors
/// That of the first, when none can.
fn those_that_work<T>(each: impl Iterator<Item = Result<T, RdmaError>>) -> Result<Vec<T>, RdmaError> {
    let (mut good, mut first) = (Vec::new(), None);
    for one in each {
        match one {
            Ok(one) => good.push(one),
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    match first {
        Some(error) if good.is_empty() => Err(error),
        Some(error) => {
            tracing::warn!("{error}; the other rails are used");
            Ok(good)
        }
        None => Ok(good),
    }
}

/// Numbers of first packets, which nobody else should guess.
fn packets() -> [u32; 2] {
    let mut bytes = [0; 8];
    // Without randomness there is no TLS either, so that nobody would be told these numbers.
    let _ = kvfleet_proto::tls::provider().secure_random.fill(&mut bytes);
    let (first, second) = bytes.split_at(4);
    [first, second].map(|word| u32::from_le_bytes(word.try_into().expect("four of eight bytes")))
}

/// An open port of an RDMA device.
pub struct Rdma {
    flights: Arc<Flights>,
    config: RdmaConfig,
}

impl std::fmt::Debug for Rdma {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rdma({:?})", self.flights.rail().port())
    }
}

impl Rdma {
    /// Loads the library and opens the device that is wanted, the best of them if several are. Blocks for some milliseconds.
    ///
    /// # Errors
    /// When there is none, or it cannot be used.
    pub fn open(config: &RdmaConfig) -> Result<Arc<Rdma>, RdmaError> {
        let candidate = &Rdma::look(config)?[0];
        Rdma::over(Arc::new(verbs::VerbsRail::open(candidate, &config.tuning)?), config)
    }

    /// The same of every rail that is wanted, the best first. Devices that cannot be used are left out, which the log says.
    ///
    /// # Errors
    /// When there is none, or none can be used.
    pub fn open_all(config: &RdmaConfig) -> Result<Vec<Arc<Rdma>>, RdmaError> {
        let open = |candidate: &choose::Candidate| {
            Rdma::over(Arc::new(verbs::VerbsRail::open(candidate, &config.tuning)?), config)
        };
        those_that_work(Rdma::look(config)?.iter().map(open))
    }

    /// What would be opened, by what the kernel lists.
    fn look(config: &RdmaConfig) -> Result<Vec<choose::Candidate>, RdmaError> {
        config.tuning.check()?;
        let found = choose::look(Path::new(choose::SYS), &config.choice.near);
        let chosen = choose::choose(&found, &config.choice)?;
        let missing = choose::missing(&chosen, &config.choice);
        if !missing.is_empty() {
            tracing::warn!(
                devices = missing.join(", "),
                "RDMA goes without these: no port of theirs is there, active, and of the address that is set, if one is"
            );
        }
        Ok(chosen)
    }

    /// What was transferred so far.
    #[must_use]
    pub fn numbers(&self) -> RdmaNumbers {
        self.flights.numbers()
    }

    fn over(rail: Arc<dyn Rail>, config: &RdmaConfig) -> Result<Arc<Rdma>, RdmaError> {
        let device = rail.port().device.clone();
        let failed = |cause| RdmaError::Device { device, what: "polled", cause };
        let flights = Arc::new(Flights::start(rail, &config.tuning).map_err(failed)?);
        Ok(Arc::new(Rdma { flights, config: config.clone() }))
    }

    fn device(&self) -> &str {
        &self.flights.rail().port().device
    }

    fn domain(&self) -> Result<Arc<dyn Domain>, RdmaError> {
        let failed =
            |cause| RdmaError::Device { device: self.device().to_owned(), what: "given a domain", cause };
        self.flights.rail().domain().map_err(failed)
    }

    fn register(
        &self,
        domain: &dyn Domain,
        memory: &Arc<Memory>,
        access: Access,
    ) -> Result<Box<dyn RegisterMr>, RdmaError> {
        let failed = |cause| RdmaError::register(self.device(), memory.len_bytes(), cause);
        domain.register(memory, access).map_err(failed)
    }

    /// Memory of our own, registered.
    fn allocate(
        &self,
        domain: &dyn Domain,
        bytes: usize,
        access: Access,
    ) -> Result<(Arc<Memory>, Box<dyn RegisterMr>), RdmaError> {
        let failed = |cause| RdmaError::register(self.device(), bytes as u64, cause);
        let memory = Arc::new(Memory::zeroed(bytes).map_err(failed)?);
        let registered = self.register(domain, &memory, access)?;
        Ok((memory, registered))
    }
}

#[cfg(test)]
mod tests;
