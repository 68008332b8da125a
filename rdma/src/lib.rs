//! Moves block bytes by RDMA: a path of `kvfleet-transport` over verbs. A client's card reads blocks
//! from the node's memory and writes into it. The node's processors do not touch the bytes on the
//! way out.
//!
//! Control messages use a TLS over TCP connection that was upgraded. It proves the caller's
//! identity, exchanges queue pair numbers, and names the memory that may be read or written. When
//! the connection ends, its queue pairs end, and with them every right to touch memory
//! (`docs/adr/0038-rdma-over-tls-connection.md`). The node's end is `server.rs`, `fetch_server.rs` and
//! `save_server.rs`. The client's end is `dialer.rs`, `path.rs`, `rail_pair.rs`, `link.rs`,
//! `fetch.rs` and `save.rs`. Below both: transfers (`transfers.rs`), memory and buffers
//! (`memory.rs`), the card as traits (`rail.rs`) and as libibverbs (`verbs.rs`).
//!
//! A process has one rail for each device and port that it opens. `rail_match.rs` decides which
//! rails go together; `rail_pair.rs` handles a rail that fails (`docs/adr/0046-rdma-failover-and-striped-reads.md`).
//! `gpu.rs` prepares GPU memory and is not used yet. Not here: the TCP path that is upgraded, and
//! which path a client picks (`kvfleet-transport`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

mod abi;
mod answer_parts;
pub mod arena_service;
mod choose;
mod dialer;
#[cfg(test)]
mod fake;
mod fetch;
mod fetch_server;
pub mod gpu;
mod layers;
mod link;
mod link_quota;
mod memory;
mod messages;
mod path;
pub mod probe;
mod rail;
mod rail_match;
mod rail_pair;
mod reads;
mod save;
mod save_server;
mod server;
mod topology;
mod transfers;
mod verbs;

pub use choose::RdmaChoice;
pub use dialer::RdmaDialer;
pub use memory::{PooledBuffer, RdmaBufferPool, RdmaMemory};
pub use server::RdmaServer;
pub use topology::RdmaAffinity;

use kvfleet_transport::pick::BreakerRules;
use rail::{Access, MemoryRegion, ProtectionDomain, Rail};
use transfers::TransferEngine;

/// Maximum transfers in flight over all queue pairs of a device.
pub const IN_FLIGHT_MAX: u32 = 1024;

/// Maximum transfers in flight on one queue pair.
pub const QUEUE_IN_FLIGHT_MAX: u32 = 64;

/// Time without a completion after which a queue pair with transfers in flight counts as failed. A
/// card reports a dead peer by itself within about two seconds, so this ends only what it neither
/// completes nor reports. Soft-RoCE needs two seconds for each of its eight retries.
pub const COMPLETION_TIMEOUT: Duration = Duration::from_secs(30);

/// Settings that depend on the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaTuning {
    /// See [`IN_FLIGHT_MAX`].
    pub in_flight_max: u32,
    /// See [`QUEUE_IN_FLIGHT_MAX`].
    pub queue_in_flight_max: u32,
    /// RDMA reads that a queue pair keeps in flight; both ends must allow this number. Most cards
    /// support 16.
    pub reads_at_once: u8,
    /// Acknowledgement timeout in the verbs encoding: 4.096 µs times two to this power.
    pub ack_timeout: u8,
    /// Retransmissions of a packet before its queue pair fails, at most 7.
    pub retries: u8,
    /// See [`COMPLETION_TIMEOUT`].
    pub completion_timeout: Duration,
    /// Traffic class of the packets; lossless networks recognise RDMA by it.
    pub traffic_class: u8,
}

impl Default for RdmaTuning {
    fn default() -> RdmaTuning {
        RdmaTuning {
            in_flight_max: IN_FLIGHT_MAX,
            queue_in_flight_max: QUEUE_IN_FLIGHT_MAX,
            reads_at_once: 16,
            // 67 ms. With all retries, a dead peer is noticed after half a second. The control
            // connection notices it too.
            ack_timeout: 14,
            retries: 7,
            completion_timeout: COMPLETION_TIMEOUT,
            traffic_class: 0,
        }
    }
}

/// Settings of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Devices to open.
    pub choice: RdmaChoice,
    /// Settings that depend on the network.
    pub tuning: RdmaTuning,
    /// Registered memory of a dialer in bytes, shared by all its rails. Half is for frames that
    /// callers keep, half for transfers in flight.
    pub local_bytes: usize,
    /// Registered memory of each connection at the node, in bytes. All saves go through it, and so
    /// do blocks that the client may not read in place.
    pub bounce_buffer_bytes: usize,
    /// Maximum connections that a node serves over RDMA. Further connections are served without
    /// RDMA.
    pub links_max: usize,
    /// Maximum concurrent RDMA operations of one path; with several rails, at least two on each.
    /// Further operations wait.
    pub links_per_peer: usize,
    /// Minimum bytes of a fetch that is read over all rails at once.
    pub large_bytes: usize,
    /// How long a rail is not used with a peer after transfers to that peer failed.
    pub cool_down: BreakerRules,
}

/// One failure suffices, because the card has already retried a failed transfer many times.
const FAILED_RAIL_RULES: BreakerRules = BreakerRules {
    failures_max: 1,
    open_min: Duration::from_secs(1),
    open_max: Duration::from_secs(60),
    // Longer than a trial takes, so that only one trial runs at a time.
    trial_max: Duration::from_secs(10),
};

impl Default for RdmaConfig {
    fn default() -> RdmaConfig {
        RdmaConfig {
            choice: RdmaChoice::default(),
            tuning: RdmaTuning::default(),
            local_bytes: 256 << 20,
            bounce_buffer_bytes: 16 << 20,
            links_max: 64,
            links_per_peer: 4,
            // Bytes that a rail of 400 Gbit/s reads in twice the time that a request takes.
            large_bytes: 16 << 20,
            cool_down: FAILED_RAIL_RULES,
        }
    }
}

/// Transfer counters of a device, for transfers that this end started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaStats {
    /// Bytes read from peers.
    pub read_bytes: u64,
    /// Bytes written to peers.
    pub written_bytes: u64,
    /// Failed transfers.
    pub failed: u64,
}

/// Why RDMA is not available.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The library is missing or too old.
    #[error(
        "RDMA is not used: libibverbs.so.1 cannot be loaded: {cause}; install rdma-core (Debian: libibverbs1)"
    )]
    Library {
        /// Error text of the loader.
        cause: String,
    },
    /// No device matches the configuration.
    #[error(
        "RDMA is not used: no such device; there is: {there}; bring one up, or give the device and address \
         of one in the configuration's rdma section"
    )]
    NoDevice {
        /// The devices found.
        there: String,
    },
    /// A device refuses a call.
    #[error("RDMA device {device} cannot be {what}: {cause}{}", remedy_hint(cause))]
    Device {
        /// Device name.
        device: String,
        /// The failed action, as a participle ("opened").
        what: &'static str,
        /// Error of the system.
        cause: io::Error,
    },
    /// A setting has a value that cannot work.
    #[error("RDMA setting {name} is {got}: {remedy}")]
    Setting {
        /// Name of the setting.
        name: &'static str,
        /// Configured value.
        got: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// Memory cannot be registered.
    #[error("RDMA device {device} cannot register {bytes} bytes: {cause}{}", remedy_hint(cause))]
    Register {
        /// Device name.
        device: String,
        /// Bytes to register.
        bytes: u64,
        /// Error of the system.
        cause: io::Error,
    },
}

/// Remedy for errors that the operator can fix, or an empty string.
fn remedy_hint(cause: &io::Error) -> &'static str {
    match cause.raw_os_error() {
        // Pinned pages count against the locked-memory limit, and the kernel reports only that
        // there is no memory. Queues use such memory too.
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
    /// Refuses values that no card accepts, or that would let every transfer wait forever.
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

/// Keeps the rails that can be used and logs the first failure.
///
/// # Errors
/// The first failure, if all rails fail.
fn keep_usable<T>(each: impl Iterator<Item = Result<T, RdmaError>>) -> Result<Vec<T>, RdmaError> {
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
            tracing::warn!("{error}; continuing with the other rails");
            Ok(good)
        }
        None => Ok(good),
    }
}

/// Random first packet sequence numbers, so that a third party cannot guess them.
fn random_psns() -> [u32; 2] {
    let mut bytes = [0; 8];
    // TLS fails without randomness too, so these numbers would never be sent.
    let _ = kvfleet_net::tls::provider().secure_random.fill(&mut bytes);
    let (first, second) = bytes.split_at(4);
    [first, second].map(|word| u32::from_le_bytes(word.try_into().expect("four of eight bytes")))
}

/// An open port of an RDMA device.
pub struct Rdma {
    transfers: Arc<TransferEngine>,
    config: RdmaConfig,
}

impl std::fmt::Debug for Rdma {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rdma({:?})", self.transfers.rail().port())
    }
}

impl Rdma {
    /// Loads the library and opens the best device that matches the configuration. Blocks for some
    /// milliseconds.
    ///
    /// # Errors
    /// If no device matches, or it cannot be used.
    pub fn open(config: &RdmaConfig) -> Result<Arc<Rdma>, RdmaError> {
        let candidate = &Rdma::find_candidates(config)?[0];
        Rdma::from_rail(Arc::new(verbs::VerbsRail::open(candidate, &config.tuning)?), config)
    }

    /// Opens every matching rail, the best first. Skips and logs devices that cannot be used.
    ///
    /// # Errors
    /// If no device matches, or none can be used.
    pub fn open_all(config: &RdmaConfig) -> Result<Vec<Arc<Rdma>>, RdmaError> {
        let open = |candidate: &choose::GidCandidate| {
            Rdma::from_rail(Arc::new(verbs::VerbsRail::open(candidate, &config.tuning)?), config)
        };
        keep_usable(Rdma::find_candidates(config)?.iter().map(open))
    }

    /// Devices and ports to open, from what the kernel lists.
    fn find_candidates(config: &RdmaConfig) -> Result<Vec<choose::GidCandidate>, RdmaError> {
        config.tuning.check()?;
        let found = choose::scan_devices(Path::new(choose::SYSFS_ROOT), &config.choice.affinity);
        let chosen = choose::select_candidates(&found, &config.choice)?;
        let missing = choose::unmatched_devices(&chosen, &config.choice);
        if !missing.is_empty() {
            tracing::warn!(
                devices = missing.join(", "),
                "RDMA continues without these devices: none of their ports exists, is active, and has the \
                 configured address"
            );
        }
        Ok(chosen)
    }

    /// Counters since this rail was opened.
    #[must_use]
    pub fn stats(&self) -> RdmaStats {
        self.transfers.stats()
    }

    fn from_rail(rail: Arc<dyn Rail>, config: &RdmaConfig) -> Result<Arc<Rdma>, RdmaError> {
        let device = rail.port().device.clone();
        let failed = |cause| RdmaError::Device { device, what: "polled", cause };
        let flights = Arc::new(TransferEngine::start(rail, &config.tuning).map_err(failed)?);
        Ok(Arc::new(Rdma { transfers: flights, config: config.clone() }))
    }

    fn device(&self) -> &str {
        &self.transfers.rail().port().device
    }

    fn domain(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        let failed =
            |cause| RdmaError::Device { device: self.device().to_owned(), what: "given a domain", cause };
        self.transfers.rail().create_domain().map_err(failed)
    }

    fn register(
        &self,
        domain: &dyn ProtectionDomain,
        memory: &Arc<RdmaMemory>,
        access: Access,
    ) -> Result<Box<dyn MemoryRegion>, RdmaError> {
        let failed = |cause| RdmaError::register(self.device(), memory.len_bytes(), cause);
        domain.register(memory, access).map_err(failed)
    }

    /// Allocates memory and registers it.
    fn allocate_registered(
        &self,
        domain: &dyn ProtectionDomain,
        bytes: usize,
        access: Access,
    ) -> Result<(Arc<RdmaMemory>, Box<dyn MemoryRegion>), RdmaError> {
        let failed = |cause| RdmaError::register(self.device(), bytes as u64, cause);
        let memory = Arc::new(RdmaMemory::zeroed(bytes).map_err(failed)?);
        let registered = self.register(domain, &memory, access)?;
        Ok((memory, registered))
    }
}

#[cfg(test)]
mod tests;
