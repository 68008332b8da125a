//! Configuration of a node: one validated structure. Its reader refuses unknown keys.
//!
//! Not here: reading files and environment (`kvfleet`'s command line).

use std::path::PathBuf;
use std::time::Duration;

use kv_core::evict;
use kv_core::prefix::ManifestError;
use kv_core::tier::{Capacity, TierLimits};
use kvfleet_proto::frame::{HEADER_FIXED_BYTES, PAYLOAD_BYTES_MAX, SLICES_MAX};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_transport::pick::NetworkPreference;
use kvfleet_transport::quic::save_bytes_in_flight;
use serde::{Deserialize, Serialize};

mod rdma;
mod shm;

use crate::arena::CLASSES_MAX;
use crate::tiers::ssd::DEVICES_MAX;

pub use rdma::RdmaSection;
pub use shm::{ShmPeerSection, ShmSection};

/// Maximum of `copies`.
const COPIES_MAX: u32 = 64;

/// Maximum of `drain_ms`, in milliseconds: equal to the limit of a drain request.
const DRAIN_MS_MAX: u64 = 3_600_000;

/// Configuration of a node. Every field has a default except the certificates and the routers; no
/// default would work there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodeConfig {
    /// Number of this node, unique in the cluster.
    pub id: u32,
    /// Address of the block service (QUIC, and TLS over TCP at the same port), `ip:port`; port 0
    /// lets the system choose.
    pub data_listen: String,
    /// Whether blocks are served over TCP too.
    pub data_tcp: bool,
    /// Address of the control service (gRPC), `ip:port`; port 0 lets the system choose.
    pub control_listen: String,
    /// Host name or address announced to other processes; empty uses the listening address.
    pub advertise: String,
    /// Name of the host, to recognise instances on it.
    pub host: String,
    /// The instance that uses this node as its own, if any.
    pub instance: Option<u32>,
    /// gRPC addresses of the routers, `host:port`. Without any, the node serves but announces to no
    /// router.
    pub routers: Vec<String>,
    /// Directory of the SSD tier's file.
    pub data_dir: PathBuf,
    /// Further directories, each on its own device: blocks are spread over all of them evenly.
    pub more_data_dirs: Vec<PathBuf>,
    /// DRAM for blocks in bytes.
    pub dram_bytes: u64,
    /// DRAM for blocks as a number of blocks; overrides `dram_bytes`.
    pub dram_blocks: Option<u64>,
    /// SSD for blocks in bytes; 0 disables the tier.
    pub ssd_bytes: u64,
    /// SSD for blocks as a number of blocks; overrides `ssd_bytes`.
    pub ssd_blocks: Option<u64>,
    /// GPU memory for blocks in bytes; 0 disables the tier. Needs a build with the feature `gpu`. A
    /// node without its GPU serves without it and keeps trying to open it.
    pub gpu_bytes: u64,
    /// GPU number as the driver lists it.
    pub gpu_device: u32,
    /// Bytes that may be written to SSD per day, on all devices together; 0 for no limit. Above it,
    /// blocks evicted from DRAM are dropped.
    pub ssd_write_bytes_per_day: u64,
    /// Minimum reuse probability (0 to less than 1) of a block written to SSD, if the policy can
    /// estimate it (`density` can). At 0 a block is written if it is worth as much as its victim.
    pub ssd_reuse_min: f64,
    /// Rate of the SSD scrubber in bytes per second: it checks stored blocks while the device is
    /// idle; 0 disables it.
    pub scrub_bytes_per_second: u64,
    /// Largest payload of one block in bytes. A block takes a slot of the next size given here or
    /// in `component_bytes`, so give the real size.
    pub block_bytes: u64,
    /// Payload sizes of the other component groups of a hybrid model (a sliding window, recurrent
    /// state), each up to `block_bytes`. Empty for a model with uniform blocks.
    pub component_bytes: Vec<u64>,
    /// Eviction policy, one of [`evict::NAMES`].
    pub policy: String,
    /// Share of a tier above which it evicts.
    pub watermark_high: f64,
    /// Share down to which it evicts.
    pub watermark_low: f64,
    /// Time after which an unreleased lease expires, in milliseconds.
    pub lease_ms: u64,
    /// Maximum block bytes being sent or loaded for readers; above it readers receive `Busy`.
    /// Copies and prefetches use at most 6/16 of it, so below three frames there may be none.
    pub fetch_inflight_bytes: u64,
    /// Maximum bytes of incoming saves over all connections; above it savers receive `Busy`.
    pub save_inflight_bytes: u64,
    /// Maximum concurrent copies from other nodes; 0 disables them.
    pub copies: u32,
    /// The network path that copies prefer: tcp or quic. The other one is used while it cannot be
    /// reached.
    pub network: String,
    /// Longest time that a draining node copies its sole copies to other nodes, in milliseconds; 0
    /// leaves at once. Also limited by the drain request.
    pub drain_ms: u64,
    /// Maximum bytes that a draining node copies to others.
    pub drain_bytes: u64,
    /// Use io_uring for the SSD tier where the kernel permits it.
    pub io_uring: bool,
    /// Identity of the stored blocks: model, weights, layout.
    pub identity: IdentitySection,
    /// Certificates.
    pub tls: TlsSection,
    /// Interval of checks for renewed certificate files, in milliseconds; 0 disables them.
    pub tls_renew_ms: u64,
    /// Quotas until the routers send theirs.
    pub quotas: Vec<QuotaSection>,
    /// Shared memory with processes of this host.
    pub shm: ShmSection,
    /// RDMA: one-sided reads and writes by network cards.
    pub rdma: RdmaSection,
}

/// PEM files of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSection {
    /// Certificate of the cluster authority.
    pub ca: PathBuf,
    /// Certificate of this process.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A tenant's limit on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuotaSection {
    /// The tenant.
    pub tenant: u32,
    /// Its limit in bytes.
    pub bytes: u64,
}

impl Default for NodeConfig {
    fn default() -> Self {
        NodeConfig {
            id: 1,
            data_listen: "127.0.0.1:0".to_owned(),
            data_tcp: true,
            control_listen: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            host: "localhost".to_owned(),
            instance: None,
            routers: Vec::new(),
            data_dir: PathBuf::from("kvfleet-node"),
            more_data_dirs: Vec::new(),
            dram_bytes: 1 << 30,
            dram_blocks: None,
            ssd_bytes: 0,
            ssd_blocks: None,
            gpu_bytes: 0,
            gpu_device: 0,
            ssd_write_bytes_per_day: 0,
            ssd_reuse_min: 0.02,
            scrub_bytes_per_second: 8 << 20,
            block_bytes: 2 << 20,
            component_bytes: Vec::new(),
            policy: evict::DEFAULT.to_owned(),
            watermark_high: 0.95,
            watermark_low: 0.90,
            lease_ms: 10_000,
            fetch_inflight_bytes: 1 << 30,
            save_inflight_bytes: 512 << 20,
            copies: 2,
            network: NetworkPreference::default().to_string(),
            drain_ms: 20_000,
            drain_bytes: 64 << 30,
            io_uring: true,
            identity: IdentitySection::default(),
            tls: TlsSection::default(),
            tls_renew_ms: 10_000,
            quotas: Vec::new(),
            shm: ShmSection::default(),
            rdma: RdmaSection::default(),
        }
    }
}

/// An invalid value. Names the key and a remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A value is out of range.
    #[error("{key} is {got}: {remedy}")]
    Value {
        /// The key.
        key: &'static str,
        /// The given value.
        got: String,
        /// Remedy.
        remedy: String,
    },
    /// The identity manifest is invalid.
    #[error("identity: {0}")]
    Identity(#[from] ManifestError),
}

impl NodeConfig {
    /// Checks all values that can be checked without touching the machine.
    ///
    /// # Errors
    /// The first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.identity.manifest().validate()?;
        if self.block_bytes == 0 || self.block_bytes > PAYLOAD_BYTES_MAX as u64 {
            let remedy = format!("give the payload of one block, 1 to {PAYLOAD_BYTES_MAX} bytes");
            return wrong("block_bytes", &self.block_bytes, remedy);
        }
        self.validate_components()?;
        if evict::by_name(&self.policy, 0).is_none() {
            return wrong("policy", &self.policy, evict::UNKNOWN_NAME_REMEDY.to_owned());
        }
        self.validate_shares()?;
        if self.lease_ms == 0 {
            return wrong("lease_ms", &0, "give at least 1; the default is 10000".to_owned());
        }
        // Lower classes of operations use at most 6/16 of the in-flight bytes.
        let least = 3 * self.frame_bytes_max() as u64;
        if self.fetch_inflight_bytes < least {
            let remedy = format!("a frame of each class must fit, give at least {least}");
            return wrong("fetch_inflight_bytes", &self.fetch_inflight_bytes, remedy);
        }
        let one_save = save_bytes_in_flight(usize::MAX, self.frame_bytes_max() as u64);
        if self.save_inflight_bytes < one_save {
            let remedy = format!("one save in flight must fit, give at least {one_save}");
            return wrong("save_inflight_bytes", &self.save_inflight_bytes, remedy);
        }
        self.validate_copies()?;
        self.validate_gpu()?;
        self.validate_shm()?;
        self.validate_rdma()?;
        self.validate_capacity()
    }

    fn validate_copies(&self) -> Result<(), ConfigError> {
        if self.copies > COPIES_MAX {
            let remedy =
                format!("each copy keeps some megabytes in memory, give at most {COPIES_MAX}, or 0 for none");
            return wrong("copies", &self.copies, remedy);
        }
        self.network_preference()?;
        if self.drain_ms > DRAIN_MS_MAX {
            let remedy = format!("the caller of a drain waits for it, give at most {DRAIN_MS_MAX}, or 0");
            return wrong("drain_ms", &self.drain_ms, remedy);
        }
        Ok(())
    }

    /// The network path that copies prefer.
    pub(crate) fn network_preference(&self) -> Result<NetworkPreference, ConfigError> {
        let remedy = || "choose tcp or quic".to_owned();
        self.network.parse().or_else(|_| wrong("network", &self.network, remedy()))
    }

    fn validate_gpu(&self) -> Result<(), ConfigError> {
        if self.gpu_bytes == 0 {
            return Ok(());
        }
        if !cfg!(feature = "gpu") {
            let remedy = "this program was built without GPUs: build it with --features gpu, or give 0";
            return wrong("gpu_bytes", &self.gpu_bytes, remedy.to_owned());
        }
        self.validate_gpu_bytes()
    }

    fn validate_gpu_bytes(&self) -> Result<(), ConfigError> {
        let least = crate::start::gpu_bytes_min(self) as u64;
        if self.gpu_bytes < least {
            let remedy = format!("one block and the blocks in flight must fit, give at least {least}, or 0");
            return wrong("gpu_bytes", &self.gpu_bytes, remedy);
        }
        if self.dram_capacity().amount() == 0 {
            let remedy = "blocks move to and from a GPU through DRAM: give this node dram_bytes, or 0 here";
            return wrong("gpu_bytes", &self.gpu_bytes, remedy.to_owned());
        }
        Ok(())
    }

    fn validate_components(&self) -> Result<(), ConfigError> {
        let groups_max = CLASSES_MAX - 1;
        if self.component_bytes.len() > groups_max {
            let remedy = format!("give at most {groups_max} sizes besides block_bytes");
            return wrong("component_bytes", &self.component_bytes.len(), remedy);
        }
        let wrong_size = |bytes: &&u64| **bytes == 0 || **bytes > self.block_bytes;
        match self.component_bytes.iter().find(wrong_size) {
            Some(bytes) => {
                let remedy = format!("give payloads of 1 to block_bytes ({}) bytes", self.block_bytes);
                wrong("component_bytes", bytes, remedy)
            }
            None => Ok(()),
        }
    }

    fn validate_shares(&self) -> Result<(), ConfigError> {
        let share = 0.0..=1.0;
        if !share.contains(&self.watermark_high) || self.watermark_high == 0.0 {
            return wrong(
                "watermark_high",
                &self.watermark_high,
                "give a share above 0 and up to 1".to_owned(),
            );
        }
        if !share.contains(&self.watermark_low) || self.watermark_low > self.watermark_high {
            let remedy = format!("give a share from 0 to watermark_high ({})", self.watermark_high);
            return wrong("watermark_low", &self.watermark_low, remedy);
        }
        if !(0.0..1.0).contains(&self.ssd_reuse_min) {
            let remedy = "give a probability from 0 to less than 1; the default is 0.02".to_owned();
            return wrong("ssd_reuse_min", &self.ssd_reuse_min, remedy);
        }
        Ok(())
    }

    fn validate_capacity(&self) -> Result<(), ConfigError> {
        if self.more_data_dirs.len() >= DEVICES_MAX {
            let remedy = format!("give at most {} further directories", DEVICES_MAX - 1);
            return wrong("more_data_dirs", &self.more_data_dirs.len(), remedy);
        }
        if self.dram_capacity().amount() == 0 && self.ssd_capacity().amount() == 0 {
            return wrong("dram_bytes", &0, "give this node some DRAM or SSD to keep blocks in".to_owned());
        }
        if let Capacity::Bytes(bytes @ 1..) = self.dram_capacity()
            && bytes < self.frame_bytes_max() as u64
        {
            let remedy = format!("one block takes up to {} bytes; give more, or 0", self.frame_bytes_max());
            return wrong("dram_bytes", &bytes, remedy);
        }
        Ok(())
    }

    /// Encoded size of the largest frame this node accepts, in bytes: two slices a layer (keys,
    /// values).
    #[must_use]
    pub fn frame_bytes_max(&self) -> usize {
        self.encoded_bytes(self.block_bytes)
    }

    /// Encoded sizes of the layout's frames, in bytes, the largest last.
    #[must_use]
    pub fn frame_bytes(&self) -> Vec<usize> {
        self.component_bytes
            .iter()
            .chain([&self.block_bytes])
            .map(|bytes| self.encoded_bytes(*bytes))
            .collect()
    }

    fn encoded_bytes(&self, payload_bytes: u64) -> usize {
        let slices = (self.identity.layers as usize).saturating_mul(2).clamp(1, SLICES_MAX);
        HEADER_FIXED_BYTES + slices * 8 + usize::try_from(payload_bytes).unwrap_or(usize::MAX / 4)
    }

    /// Size of the DRAM tier.
    #[must_use]
    pub fn dram_capacity(&self) -> Capacity {
        self.dram_blocks.map_or(Capacity::Bytes(self.dram_bytes), Capacity::Blocks)
    }

    /// Size of the SSD tier.
    #[must_use]
    pub fn ssd_capacity(&self) -> Capacity {
        self.ssd_blocks.map_or(Capacity::Bytes(self.ssd_bytes), Capacity::Blocks)
    }

    /// Directories of the SSD tier.
    pub(crate) fn ssd_dirs(&self) -> Vec<PathBuf> {
        std::iter::once(&self.data_dir).chain(&self.more_data_dirs).cloned().collect()
    }

    pub(crate) fn limits(&self, capacity: Capacity) -> TierLimits {
        TierLimits { capacity, watermark_high: self.watermark_high, watermark_low: self.watermark_low }
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
}

fn wrong<T>(key: &'static str, got: &dyn ToString, remedy: String) -> Result<T, ConfigError> {
    Err(ConfigError::Value { key, got: got.to_string(), remedy })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn the_default_is_valid() {
        assert_eq!(NodeConfig::default().validate(), Ok(()));
    }

    #[test]
    fn baseline_policies_are_refused_with_their_place() {
        for name in ["fifo", "arc", "tinylfu", "workload-share"] {
            let config = NodeConfig { policy: name.to_owned(), ..NodeConfig::default() };
            let said = config.validate().unwrap_err().to_string();
            assert!(said.contains("lru, workload, density") && said.contains("kvfleet-lab"), "{said}");
        }
    }

    #[test]
    fn each_invalid_value_names_its_key() {
        let refused = |change: fn(&mut NodeConfig)| {
            let mut config = NodeConfig::default();
            change(&mut config);
            config.validate().unwrap_err()
        };
        says("a node: block_bytes", &refused(|config| config.block_bytes = 0), &[]);
        let many = |config: &mut NodeConfig| config.component_bytes = vec![1; CLASSES_MAX];
        says("a node: component_bytes, too many", &refused(many), &[]);
        let large = |config: &mut NodeConfig| config.component_bytes = vec![16, 4 << 20];
        says("a node: component_bytes", &refused(large), &[]);
        says("a node: policy", &refused(|config| config.policy = "mru".to_owned()), &[]);
        says("a node: watermark_high", &refused(|config| config.watermark_high = 1.5), &[]);
        says("a node: watermark_low", &refused(|config| config.watermark_low = 0.99), &[]);
        says("a node: ssd_reuse_min", &refused(|config| config.ssd_reuse_min = 1.0), &[]);
        says("a node: lease_ms", &refused(|config| config.lease_ms = 0), &[]);
        says("a node: fetch_inflight_bytes", &refused(|config| config.fetch_inflight_bytes = 5), &[]);
        says("a node: save_inflight_bytes", &refused(|config| config.save_inflight_bytes = 5), &[]);
        says("a node: copies", &refused(|config| config.copies = 65), &[]);
        says("a node: network", &refused(|config| config.network = "udp".to_owned()), &[]);
        says("a node: drain_ms", &refused(|config| config.drain_ms = 3_600_001), &[]);
        let many = |config: &mut NodeConfig| config.more_data_dirs = vec![PathBuf::new(); 64];
        says("a node: more_data_dirs", &refused(many), &[]);
        #[cfg(not(feature = "gpu"))]
        says(
            "a node: gpu_bytes, in a build without GPUs",
            &refused(|config| config.gpu_bytes = 1 << 30),
            &[],
        );
        // Errors of a build with GPUs.
        let gpu = |gpu_bytes, dram_bytes| NodeConfig { gpu_bytes, dram_bytes, ..NodeConfig::default() };
        says("a node: gpu_bytes", &gpu(1, 1 << 30).validate_gpu_bytes().unwrap_err(), &[]);
        says("a node: gpu_bytes without DRAM", &gpu(1 << 30, 0).validate_gpu_bytes().unwrap_err(), &[]);
        assert_eq!(gpu(1 << 30, 1 << 30).validate_gpu_bytes(), Ok(()));
        says("a node without DRAM and SSD", &refused(|config| config.dram_bytes = 0), &[]);
        says("a node: DRAM for less than a block", &refused(|config| config.dram_bytes = 100), &[]);
        says("a node: identity.block_tokens", &refused(|config| config.identity.block_tokens = 3), &[]);
        says("a node: identity.layers", &refused(|config| config.identity.layers = 0), &[]);
        says("a node: identity.rank", &refused(|config| config.identity.rank = 8), &[]);
    }
}
