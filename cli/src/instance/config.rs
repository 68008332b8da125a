//! Keys of an instance's configuration.

use std::net::IpAddr;
use std::path::PathBuf;

use kv_core::schedule::{Domain, HardwareProfile, PROFILES, Role};
use kvfleet_client::{NoTransport, RdmaSettings, Transport};
use kvfleet_doors::ModelConfig;
use kvfleet_proto::frame::{KeyForm, PAYLOAD_BYTES_MAX};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::tls::TlsFiles;
use kvfleet_transport::shm::ShmConfig;
use serde::{Deserialize, Serialize};

/// Everything an instance can be told. Unknown keys are errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstanceConfig {
    /// Number of this instance, unique in the cluster.
    pub instance: u32,
    /// `host:port` of its gRPC service; port 0 for any free one.
    pub listen: String,
    /// `host:port` of every router.
    pub routers: Vec<String>,
    /// Number of its own node; −1 when it has none.
    pub node: i64,
    /// Host name, to recognise a node on the same host.
    pub host: String,
    /// Certificates.
    pub tls: TlsPaths,
    /// Name of the hardware profile under which compute is accounted.
    pub profile: String,
    /// Identity of the KV it makes: 32 hexadecimal digits, the same as the nodes'.
    pub identity: String,
    /// Generation of the weights that it has loaded, as `kvfleet weights` shows the one in force: under another one nodes give
    /// it nothing and keep nothing of it.
    pub generation: u32,
    /// Whether that identity's keys are stored before rotation, as the nodes' `identity.raw_keys` says: they keep no others.
    pub raw_keys: bool,
    /// Payload of one block in bytes, all layers together.
    pub block_bytes: u64,
    /// Layers a block is split into; slices differ by at most one byte.
    pub layers: u32,
    /// Least time a fetch is given where compute takes none, in milliseconds: the modelled time to recompute says nothing then about
    /// the time to fetch.
    pub fetch_floor_ms: u64,
    /// Share of the modelled compute time that it really takes: 1 is real time. One request's prefill runs at a time then, beside
    /// its load, and what does not come in time is computed. With 0 compute takes no time, and fetches end before it is accounted.
    pub time_scale: f64,
    /// Bytes that may be loaded for requests whose turn has not come, of all of them together. Of use where compute takes time.
    pub read_buffer_bytes: u64,
    /// Bytes of one request of which something is asked for and not there, at most, where compute takes time.
    pub in_flight_bytes: u64,
    /// What it does of a request: both, prefill or decode.
    pub role: String,
    /// Where it stands, the largest first, as in `zone-a/rack-7/host-3`; empty for nowhere in particular.
    pub place: String,
    /// Time between load reports, in milliseconds.
    pub report_ms: u64,
    /// Tokens whose KV it is taken to have room for in GPU memory, as its reports say; 0 for not told.
    pub kv_tokens_max: u64,
    /// Whether it asks a router, once a prompt is computed, if the request may begin to decode, and answers 429 where it may not.
    pub asks_to_decode: bool,
    /// Whether the reports tell how fast it read from nodes, too.
    pub report_links: bool,
    /// Paths that block bytes take: quic, tcp, shm (nodes of this host), rdma (nodes that offer it), or
    /// auto for the best there is.
    pub transport: String,
    /// Shared memory with nodes of this host.
    pub shm: ShmSection,
    /// RDMA with nodes that offer it.
    pub rdma: RdmaSection,
    /// Requests as OpenAI's clients send them.
    pub openai: OpenAiSection,
}

/// Where requests are taken as OpenAI's clients send them, and whose hashes their prompts have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenAiSection {
    /// `host:port`, plain HTTP; empty for nowhere.
    pub listen: String,
    /// Models with their tokenizers, as the routers' `doors.models`; without one every name is taken, and text is told apart by its text.
    pub models: Vec<ModelConfig>,
    /// The manifest whose digest `identity` is, as the routers' `engines.identity`: they are told of it, so that they can say in which field it differs from the nodes'.
    pub manifest: IdentitySection,
    /// File with the secret of prompts, as the routers' `engines.secret_file`.
    pub secret_file: PathBuf,
}

/// By which network cards nodes are reached with RDMA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RdmaSection {
    /// The device's name, such as `mlx5_0`; the best there is when nothing is said.
    pub device: Option<String>,
    /// Further devices: each port of all of them is a rail; `all` for every device there is.
    pub devices: Vec<String>,
    /// A device by its PCI address, such as `0000:17:00.0`: the GPU that the blocks are for. The nearest of equal devices is
    /// taken first.
    pub near: Option<String>,
    /// The address of the device's port; for an IPv4 address, that of its network interface.
    pub address: Option<IpAddr>,
    /// Memory that blocks are read into and written from, in bytes.
    pub memory_bytes: u64,
    /// Class of the packets, by which networks without loss know them.
    pub traffic_class: u8,
}

impl Default for RdmaSection {
    fn default() -> Self {
        let RdmaSettings { device, devices, near, address, memory_bytes, traffic_class } =
            RdmaSettings::default();
        Self { device, devices, near, address, memory_bytes: memory_bytes as u64, traffic_class }
    }
}

/// Where nodes of this host are met.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShmSection {
    /// Directory of their sockets, as they have it; none for no shared memory.
    pub dir: Option<PathBuf>,
    /// Users whose nodes are believed, beside this process's own and root.
    pub server_uids: Vec<u32>,
}

/// Files of this process's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsPaths {
    /// The cluster's authority.
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
            role: Role::Both.name().to_owned(),
            place: String::new(),
            report_ms: 200,
            kv_tokens_max: 0,
            asks_to_decode: false,
            report_links: true,
            transport: Transport::default().to_string(),
            shm: ShmSection::default(),
            rdma: RdmaSection::default(),
            openai: OpenAiSection::default(),
        }
    }
}

impl InstanceConfig {
    /// Largest block an instance makes: what a frame holds.
    pub const BLOCK_BYTES_MAX: u64 = PAYLOAD_BYTES_MAX as u64;

    /// Least share of the modelled compute time that is not none: below it a layer takes less than a clock can tell, and whether one
    /// waits for it would be chance.
    pub const TIME_SCALE_MIN: f64 = 0.001;

    /// Largest share of it: a prompt would take hours.
    pub const TIME_SCALE_MAX: f64 = 1000.0;

    /// Checks what types cannot say.
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
        let times = Self::TIME_SCALE_MIN..=Self::TIME_SCALE_MAX;
        if self.time_scale != 0.0 && !times.contains(&self.time_scale) {
            return Err(format!(
                "time_scale is {}: give 0 for compute that takes no time, or {} to {} times the modelled time",
                self.time_scale,
                Self::TIME_SCALE_MIN,
                Self::TIME_SCALE_MAX
            ));
        }
        if self.in_flight_bytes < self.block_bytes {
            return Err(format!(
                "in_flight_bytes is {}: give at least block_bytes ({}), the room of one block",
                self.in_flight_bytes, self.block_bytes
            ));
        }
        if self.role().is_none() {
            let known = Role::ALL.map(Role::name);
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
        let theirs = manifest.manifest().digest().to_string();
        if !listen.is_empty() && theirs != self.identity {
            return Err(format!(
                "openai.manifest has the digest {theirs}, and identity is {}: prompts would be hashed as no block is; write the manifest of the nodes",
                self.identity
            ));
        }
        self.transport().map(|_| ())
    }

    /// What it does of a request, if `role` is known.
    #[must_use]
    pub fn role(&self) -> Option<Role> {
        Role::by_name(&self.role)
    }

    /// Form of the keys of the blocks it makes.
    pub fn key_form(&self) -> KeyForm {
        if self.raw_keys { KeyForm::Raw } else { KeyForm::Rotated }
    }

    /// The paths named in the configuration.
    pub fn transport(&self) -> Result<Transport, String> {
        self.transport.parse().map_err(|error: NoTransport| format!("transport: {error}"))
    }

    /// How nodes of this host are reached, if they are.
    #[must_use]
    pub fn shm(&self) -> Option<ShmConfig> {
        let server_uids = self.shm.server_uids.clone();
        self.shm.dir.clone().map(|dir| ShmConfig { server_uids, ..ShmConfig::new(dir) })
    }

    /// By which card nodes are reached with RDMA, if they are.
    #[must_use]
    pub fn rdma(&self) -> RdmaSettings {
        let RdmaSection { device, devices, near, address, memory_bytes, traffic_class } = self.rdma.clone();
        let memory_bytes = usize::try_from(memory_bytes).unwrap_or(usize::MAX);
        RdmaSettings { device, devices, near, address, memory_bytes, traffic_class }
    }

    /// The profile named in the configuration, or the default one.
    #[must_use]
    pub fn hardware(&self) -> HardwareProfile {
        HardwareProfile::by_name(&self.profile).unwrap_or_default()
    }

    /// Its own node, if it has one.
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
    fn the_default_needs_only_routers() {
        says("an instance without routers", &InstanceConfig::default().validate().unwrap_err(), &[]);
        valid().validate().unwrap();
    }

    #[test]
    fn wrong_values_say_what_was_expected() {
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
    }
}
