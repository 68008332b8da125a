//! Keys of an instance's configuration.

use std::net::IpAddr;
use std::path::PathBuf;

use kv_core::schedule::{Domain, HardwareProfile, InstanceRole, PROFILES};
use kvfleet_client::{NetworkNameError, NetworkPreference, RdmaSettings, Transport, TransportNameError};
use kvfleet_gateway::ModelConfig;
use kvfleet_net::tls::TlsFiles;
use kvfleet_proto::frame::{KeyForm, PAYLOAD_BYTES_MAX};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_transport::shm::ShmConfig;
use serde::{Deserialize, Serialize};

/// Configuration of an instance. Unknown keys are errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstanceConfig {
    /// Number of this instance, unique in the cluster.
    pub instance: u32,
    /// `host:port` of its gRPC service; port 0 for a free one.
    pub listen: String,
    /// `host:port` of every router.
    pub routers: Vec<String>,
    /// Number of its local node; −1 if it has none.
    pub node: i64,
    /// Host name, to recognise a node on the same host.
    pub host: String,
    /// Certificates.
    pub tls: TlsPaths,
    /// Name of the hardware profile that models compute.
    pub profile: String,
    /// Identity of its KV: 32 hexadecimal digits, the same as the nodes'.
    pub identity: String,
    /// Generation of the loaded weights, as `kvfleet weights` shows the current one. Nodes of
    /// another generation refuse its fetches and saves.
    pub generation: u32,
    /// Whether keys are stored before rotation, as in the nodes' `identity.raw_keys`; nodes refuse
    /// the other form.
    pub raw_keys: bool,
    /// Payload of one block in bytes, all layers together.
    pub block_bytes: u64,
    /// Layers a block is split into; slices differ by at most one byte.
    pub layers: u32,
    /// Least time for a fetch if compute is not timed, in milliseconds. The modelled time to
    /// recompute does not bound the fetch then.
    pub fetch_floor_ms: u64,
    /// Real compute time as a share of the modelled time; 1 is real time. Requests then prefill one
    /// at a time, overlapping with their loads, and late blocks are computed. With 0, compute takes
    /// no time, and fetches end before compute is accounted.
    pub time_scale: f64,
    /// Bytes that may be loaded for all queued requests before their prefill, if compute is timed.
    pub read_buffer_bytes: u64,
    /// Most bytes of one request's fetches in flight, if compute is timed.
    pub in_flight_bytes: u64,
    /// Role of the instance: both, prefill or decode.
    pub role: String,
    /// Topology, largest domain first, as in `zone-a/rack-7/host-3`; empty if unknown.
    pub place: String,
    /// Time between load reports, in milliseconds.
    pub report_ms: u64,
    /// Reported capacity of GPU memory in tokens; 0 to report none.
    pub kv_tokens_max: u64,
    /// Whether it asks a router after the prefill if the request may decode, and answers 429 if
    /// not.
    pub checks_decode_admission: bool,
    /// Whether its reports include link speeds to nodes.
    pub report_links: bool,
    /// Transport of block bytes: quic, tcp, shm (nodes of this host), rdma (nodes that offer it),
    /// or auto for the first available one of shm, rdma and the network.
    pub transport: String,
    /// The network path that the transport auto prefers: tcp or quic. The other one is used while
    /// it cannot be reached.
    pub network: String,
    /// Shared memory with nodes of this host.
    pub shm: ShmSection,
    /// RDMA with nodes that offer it.
    pub rdma: RdmaSection,
    /// OpenAI-compatible API.
    pub openai: OpenAiSection,
}

/// OpenAI-compatible API, and the identity of prompt hashes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenAiSection {
    /// Listening address, `host:port`, plain HTTP; empty to disable it.
    pub listen: String,
    /// Models with their tokenizers, as in the routers' `gateway.models`. If empty, every name is
    /// accepted, and text prompts are compared by their text.
    pub models: Vec<ModelConfig>,
    /// Manifest with the digest `identity`, as in the routers' `engines.identity`. Routers get it
    /// to report the differing field if it does not match the nodes'.
    pub manifest: IdentitySection,
    /// File with the hashing secret, as in the routers' `engines.secret_file`.
    pub secret_file: PathBuf,
    /// As the routers' `engines.public_hashes`.
    pub public_hashes: bool,
}

/// RDMA devices for connections to nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RdmaSection {
    /// Name of the device, such as `mlx5_0`; the best one if absent.
    pub device: Option<String>,
    /// Further devices; each port of all devices is a rail. `all` uses every device.
    pub devices: Vec<String>,
    /// PCI address of a device, such as `0000:17:00.0`: the GPU of the blocks. Among equal RDMA
    /// devices the nearest to it is preferred.
    pub near: Option<String>,
    /// Address of the device's port; for IPv4, the address of its network interface.
    pub address: Option<IpAddr>,
    /// Registered memory for block transfers, in bytes.
    pub memory_bytes: u64,
    /// Traffic class of the packets, which lossless networks use.
    pub traffic_class: u8,
}

impl Default for RdmaSection {
    fn default() -> Self {
        let RdmaSettings { device, devices, near, address, memory_bytes, traffic_class } =
            RdmaSettings::default();
        Self { device, devices, near, address, memory_bytes: memory_bytes as u64, traffic_class }
    }
}

/// Shared memory with nodes of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShmSection {
    /// Directory of the nodes' sockets; absent to disable shared memory.
    pub dir: Option<PathBuf>,
    /// Further user ids of trusted nodes, besides this process's own and root.
    pub server_uids: Vec<u32>,
}

/// Files of this process's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsPaths {
    /// Certificate of the cluster's authority.
    pub ca: PathBuf,
    /// Certificate.
    pub cert: PathBuf,
    /// Key.
    pub key: PathBuf,
}

impl From<&TlsPaths> for TlsFiles {
    fn from(paths: &TlsPaths) -> Self {
        TlsFiles { ca: paths.ca.clone(), cert: paths.cert.clone(), key: paths.key.clone() }
    }
}

impl Default for InstanceConfig {
    fn default() -> Self {
        Self {
            instance: 1,
            listen: "127.0.0.1:0".to_owned(),
            routers: vec![],
            node: -1,
            host: "localhost".to_owned(),
            tls: TlsPaths::default(),
            profile: HardwareProfile::default().name.to_owned(),
            identity: String::new(),
            generation: 0,
            raw_keys: false,
            block_bytes: 16 * 1024,
            layers: 4,
            fetch_floor_ms: 50,
            time_scale: 0.0,
            read_buffer_bytes: 64 << 20,
            in_flight_bytes: 64 << 20,
            role: InstanceRole::Both.name().to_owned(),
            place: String::new(),
            report_ms: 200,
            kv_tokens_max: 0,
            checks_decode_admission: false,
            report_links: true,
            transport: Transport::default().to_string(),
            network: NetworkPreference::default().to_string(),
            shm: ShmSection::default(),
            rdma: RdmaSection::default(),
            openai: OpenAiSection::default(),
        }
    }
}

impl InstanceConfig {
    /// Largest block, bounded by the frame format.
    pub const BLOCK_BYTES_MAX: u64 = PAYLOAD_BYTES_MAX as u64;

    /// Least nonzero time scale: below it, a layer takes less time than the clock resolves, and
    /// waiting for it would be random.
    pub const TIME_SCALE_MIN: f64 = 0.001;

    /// Largest time scale; a prompt would take hours.
    pub const TIME_SCALE_MAX: f64 = 1000.0;

    /// Validates values beyond their types.
    pub fn validate(&self) -> Result<(), String> {
        if self.routers.is_empty() {
            return Err("routers is empty: list the address of every router".to_owned());
        }
        if HardwareProfile::by_name(&self.profile).is_none() {
            let known: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
            return Err(format!("profile {:?} is unknown; choose one of {}", self.profile, known.join(", ")));
        }
        if self.layers == 0 || u64::from(self.layers) > self.block_bytes {
            return Err(format!(
                "layers is {}: expected 1 to block_bytes ({})",
                self.layers, self.block_bytes
            ));
        }
        if self.block_bytes > Self::BLOCK_BYTES_MAX {
            return Err(format!(
                "block_bytes is {}, the limit is {}: give the nodes' block_bytes",
                self.block_bytes,
                Self::BLOCK_BYTES_MAX
            ));
        }
        let time_scales = Self::TIME_SCALE_MIN..=Self::TIME_SCALE_MAX;
        if self.time_scale != 0.0 && !time_scales.contains(&self.time_scale) {
            return Err(format!(
                "time_scale is {}: give 0 for compute that takes no time, or {} to {} times the modelled time",
                self.time_scale,
                Self::TIME_SCALE_MIN,
                Self::TIME_SCALE_MAX
            ));
        }
        if self.in_flight_bytes < self.block_bytes {
            return Err(format!(
                "in_flight_bytes is {}: give at least block_bytes ({}), the size of one block",
                self.in_flight_bytes, self.block_bytes
            ));
        }
        if self.role().is_none() {
            let known = InstanceRole::ALL.map(InstanceRole::name);
            return Err(format!("role {:?} is unknown; choose one of {}", self.role, known.join(", ")));
        }
        if let Err(error) = Domain::parse(&self.place) {
            return Err(format!("place {:?}: {error}", self.place));
        }
        if self.report_ms == 0 {
            return Err("report_ms is 0: expected at least 1".to_owned());
        }
        if self.rdma.memory_bytes < RdmaSettings::MEMORY_BYTES_MIN as u64 {
            return Err(format!(
                "rdma.memory_bytes is {}: expected at least {}",
                self.rdma.memory_bytes,
                RdmaSettings::MEMORY_BYTES_MIN
            ));
        }
        let OpenAiSection { listen, manifest, .. } = &self.openai;
        let manifest_digest = manifest.manifest().digest().to_string();
        if !listen.is_empty() && manifest_digest != self.identity {
            return Err(format!(
                "openai.manifest has the digest {manifest_digest}, but identity is {}: prompt hashes would \
                 match no block; write the manifest of the nodes",
                self.identity
            ));
        }
        self.transport()?;
        self.network().map(|_| ())
    }

    /// Role of the instance; `None` if `role` is unknown.
    #[must_use]
    pub fn role(&self) -> Option<InstanceRole> {
        InstanceRole::by_name(&self.role)
    }

    /// Key form of its blocks.
    pub fn key_form(&self) -> KeyForm {
        if self.raw_keys { KeyForm::Raw } else { KeyForm::Rotated }
    }

    /// The configured transport.
    pub fn transport(&self) -> Result<Transport, String> {
        self.transport.parse().map_err(|error: TransportNameError| format!("transport: {error}"))
    }

    /// The configured preference on the network.
    pub fn network(&self) -> Result<NetworkPreference, String> {
        self.network.parse().map_err(|error: NetworkNameError| format!("network: {error}"))
    }

    /// Shared memory settings, if enabled.
    #[must_use]
    pub fn shm(&self) -> Option<ShmConfig> {
        let server_uids = self.shm.server_uids.clone();
        self.shm.dir.clone().map(|dir| ShmConfig { server_uids, ..ShmConfig::new(dir) })
    }

    /// RDMA settings.
    #[must_use]
    pub fn rdma(&self) -> RdmaSettings {
        let RdmaSection { device, devices, near, address, memory_bytes, traffic_class } = self.rdma.clone();
        let memory_bytes = usize::try_from(memory_bytes).unwrap_or(usize::MAX);
        RdmaSettings { device, devices, near, address, memory_bytes, traffic_class }
    }

    /// The configured profile, or the default one.
    #[must_use]
    pub fn hardware(&self) -> HardwareProfile {
        HardwareProfile::by_name(&self.profile).unwrap_or_default()
    }

    /// Its local node, if it has one.
    #[must_use]
    pub fn own_node(&self) -> Option<u32> {
        u32::try_from(self.node).ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    fn valid() -> InstanceConfig {
        InstanceConfig { routers: vec!["127.0.0.1:1".into()], ..InstanceConfig::default() }
    }

    #[test]
    fn default_requires_routers_only() {
        says("an instance without routers", &InstanceConfig::default().validate().unwrap_err(), &[]);
        valid().validate().unwrap();
    }

    #[test]
    fn invalid_values_name_the_expected_ones() {
        let wrong = |change: fn(&mut InstanceConfig)| {
            let mut config = valid();
            change(&mut config);
            config.validate().unwrap_err()
        };
        says("an instance: unknown profile", &wrong(|config| config.profile = "b200".into()), &[]);
        says("an instance: no layers", &wrong(|config| config.layers = 0), &[]);
        says("an instance: more layers than bytes", &wrong(|config| config.layers = 1 << 20), &[]);
        says("an instance: block_bytes", &wrong(|config| config.block_bytes = 1 << 40), &[]);
        says("an instance: time_scale", &wrong(|config| config.time_scale = f64::NAN), &[]);
        for wrong_times in
            [f64::NEG_INFINITY, -1.0, -f64::MIN_POSITIVE, f64::MIN_POSITIVE, 1e-9, 1000.1, f64::INFINITY]
        {
            let refused = InstanceConfig { time_scale: wrong_times, ..valid() }.validate().unwrap_err();
            assert!(refused.contains("give 0 for compute"), "{wrong_times}: {refused}");
        }
        for times in [0.0, -0.0, InstanceConfig::TIME_SCALE_MIN, 1.0, InstanceConfig::TIME_SCALE_MAX] {
            InstanceConfig { time_scale: times, ..valid() }.validate().unwrap();
        }
        says("an instance: in_flight_bytes", &wrong(|config| config.in_flight_bytes = 0), &[]);
        let least = InstanceConfig { in_flight_bytes: valid().block_bytes, ..valid() };
        least.validate().unwrap();
        says("an instance: role", &wrong(|config| config.role = "prefil".into()), &[]);
        says("an instance: place", &wrong(|config| config.place = "a/b/c/d/e".into()), &[]);
        says("an instance: report_ms", &wrong(|config| config.report_ms = 0), &[]);
        says("an instance: rdma.memory_bytes", &wrong(|config| config.rdma.memory_bytes = 5), &[]);
        let hashes = |config: &mut InstanceConfig| config.openai.listen = "127.0.0.1:0".into();
        let digest = IdentitySection::default().manifest().digest().to_string();
        says("an instance: the manifest of its prompts", &wrong(hashes), &[&digest]);
        says("an instance: transport", &wrong(|config| config.transport = "udp".into()), &[]);
        says("an instance: network", &wrong(|config| config.network = "udp".into()), &[]);
    }
}
