//! Generates the configuration files of a local cluster's processes.
//!
//! Not here: the meaning of keys. Flags of the form `role.key=value` are applied last, and checked
//! like any other layer.

use std::path::PathBuf;

use kv_core::schedule::InstanceRole;
use kvfleet_client::Transport;
use kvfleet_gateway::{AdminConfig, EndpointConfig, GatewayConfig, OpenAiConfig};
use kvfleet_node::NodeConfig;
use kvfleet_node::memory::MemoryBound;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_router::{EnginesConfig, RouterConfig, VoterConfig};
use kvfleet_transport::pick::PathKind;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ChildId, ClusterShape, LocalCluster, certificate_role, process_name};
use crate::config::{ProcessConfig, Settings, load, parse_override, to_toml};
use crate::process::{Role, RouterProcessConfig};
use kvfleet_engine::mock::{InstanceConfig, OpenAiSection, TlsPaths};
use kvfleet_net::certificates::{Authority, CertificateFiles};

/// Memory bound of a child under its configuration, in bytes; only nodes have one.
pub(super) fn memory_bytes_max(cluster: &LocalCluster, id: ChildId) -> anyhow::Result<Option<u64>> {
    if id.0 != Role::Node {
        return Ok(None);
    }
    let settings = load::<NodeConfig>(Some(&path(cluster, id)), &[])?;
    Ok(Some(MemoryBound::of(&settings.service).total()))
}

/// The configuration of a child.
pub(super) fn read<T>(cluster: &LocalCluster, id: ChildId) -> anyhow::Result<T>
where
    T: Default + Serialize + DeserializeOwned,
{
    Ok(load::<T>(Some(&path(cluster, id)), &[])?.service)
}

fn path(cluster: &LocalCluster, id: ChildId) -> PathBuf {
    cluster.directory().join("config").join(format!("{}.toml", process_name(id)))
}

/// Writes the configuration of a child, and returns its path.
pub(super) fn write(cluster: &LocalCluster, id: ChildId) -> anyhow::Result<PathBuf> {
    let authority = Authority::open(&cluster.certificates())?;
    let certificate = authority.issue(&certificate_role(id)?)?;
    let number = u32::try_from(id.1)?;
    let text = match id.0 {
        Role::Router => {
            let service = RouterProcessConfig {
                router: router(cluster, id.1, certificate, authority.hash_secret()?),
                gateway: gateway(cluster, id.1, authority.admin_secret()?)?,
            };
            to_toml(&settings(cluster, service))?
        }
        Role::Node => to_toml(&settings(cluster, node(cluster, number, certificate)))?,
        Role::Instance => {
            to_toml(&settings(cluster, instance(cluster, number, certificate, authority.hash_secret()?)))?
        }
    };
    let path = path(cluster, id);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&path, text)?;
    apply_overrides(cluster, id.0, &path)?;
    Ok(path)
}

fn settings<T>(cluster: &LocalCluster, service: T) -> Settings<T> {
    let process = ProcessConfig {
        otlp: cluster.shape().otlp.clone(),
        log: cluster.shape().log.clone(),
        ..ProcessConfig::default()
    };
    Settings { process, service }
}

fn router(
    cluster: &LocalCluster,
    number: u64,
    files: CertificateFiles,
    secret_file: PathBuf,
) -> RouterConfig {
    let voters =
        cluster.routers.iter().map(|(id, address)| VoterConfig { id: *id, address: address.clone() });
    RouterConfig {
        id: number,
        listen: cluster.router_address(number).unwrap_or_default().to_owned(),
        voters: voters.collect(),
        // A single machine gains nothing from shards.
        shards: 1,
        data_dir: cluster.directory().join(process_name((Role::Router, number))),
        tls: kvfleet_router::TlsConfig { ca: files.ca, cert: files.cert, key: files.key },
        profile: cluster.shape().profile.clone(),
        time_scale: cluster.shape().predicted_time_scale(),
        // Mock instances model their compute by the profile, so measured link speeds of this
        // machine would not be comparable.
        price_links: false,
        // Without compute time, requests never wait, and no blocks are kept for waiting ones.
        windows: cluster.shape().time_scale > 0.0,
        engines: EnginesConfig {
            identity: IdentitySection::from(&cluster.shape().manifest()),
            secret_file,
            ..EnginesConfig::default()
        },
        ..RouterConfig::default()
    }
}

/// Port of a router's OpenAI-compatible API, counted from the first router's port.
fn openai_port(first: u16, number: u64) -> anyhow::Result<u16> {
    let port = if first == 0 { 0 } else { u64::from(first) + number - 1 };
    u16::try_from(port).map_err(|_| {
        anyhow::anyhow!("--openai {first} leaves no port for router {number}: give a lower port")
    })
}

/// Gateway configuration of a router; the default if the cluster has no gateway.
fn gateway(cluster: &LocalCluster, number: u64, token_file: PathBuf) -> anyhow::Result<GatewayConfig> {
    let Some(shape) = &cluster.shape().openai else { return Ok(GatewayConfig::default()) };
    let port = openai_port(shape.port, number)?;
    let endpoint = |(instance, port): (u32, &u16)| EndpointConfig {
        instance,
        url: format!("http://127.0.0.1:{port}"),
        fetches: true,
        reports_itself: true,
        ..EndpointConfig::default()
    };
    // Used to wait until the gateway sends requests to all engines.
    let admin = AdminConfig { listen: "127.0.0.1:0".to_owned(), token_file };
    let ip = if shape.open { "0.0.0.0" } else { "127.0.0.1" };
    let openai = OpenAiConfig { listen: format!("{ip}:{port}"), open: shape.open, ..OpenAiConfig::default() };
    let endpoints = (1..).zip(&cluster.engine_ports).map(endpoint).collect();
    Ok(GatewayConfig { openai, admin, endpoints, models: shape.models.clone(), ..GatewayConfig::default() })
}

fn node(cluster: &LocalCluster, number: u32, files: CertificateFiles) -> NodeConfig {
    let shape = cluster.shape();
    let marks = shape.watermarks.unwrap_or_else(|| {
        let product = NodeConfig::default();
        (product.watermark_high, product.watermark_low)
    });
    NodeConfig {
        id: number,
        instance: (number <= shape.instances).then_some(number),
        routers: cluster.router_addresses(),
        data_dir: cluster.directory().join(process_name((Role::Node, number.into()))),
        dram_blocks: Some(shape.capacity.dram_blocks),
        ssd_blocks: (shape.capacity.ssd_blocks > 0).then_some(shape.capacity.ssd_blocks),
        block_bytes: shape.block_bytes,
        policy: shape.policy.clone(),
        watermark_high: marks.0,
        watermark_low: marks.1,
        identity: IdentitySection::from(&shape.manifest()),
        tls: kvfleet_node::TlsSection { ca: files.ca, cert: files.cert, key: files.key },
        shm: kvfleet_node::ShmSection { dir: socket_dir(cluster), ..Default::default() },
        rdma: rdma(cluster),
        ..NodeConfig::default()
    }
}

/// Longest path of a socket (`unix(7)`).
const SOCKET_NAME_BYTES_MAX: usize = 107;

/// Directory of the sockets between nodes and instances, if shared memory is used. `None` if the
/// paths would be too long, unless shared memory is the only transport.
fn socket_dir(cluster: &LocalCluster) -> Option<PathBuf> {
    let transport = cluster.shape().transport;
    let directory = cluster.directory().join("sockets");
    let longest = directory.join("255.255.255.255_65535.sock").as_os_str().len();
    let fits = longest <= SOCKET_NAME_BYTES_MAX || transport == Transport::Shm;
    (transport.kinds().contains(&PathKind::SharedMemory) && fits).then_some(directory)
}

/// RDMA settings of nodes, enabled only if requested by name, since `auto` prefers shared memory on
/// one host. In-place access is safe because every certificate holder runs on this host as this
/// user.
fn rdma(cluster: &LocalCluster) -> kvfleet_node::RdmaSection {
    let enabled = cluster.shape().transport == Transport::Rdma;
    kvfleet_node::RdmaSection { enabled, in_place: enabled, ..Default::default() }
}

fn instance(
    cluster: &LocalCluster,
    number: u32,
    files: CertificateFiles,
    secret_file: PathBuf,
) -> InstanceConfig {
    let shape = cluster.shape();
    InstanceConfig {
        instance: number,
        routers: cluster.router_addresses(),
        node: if number <= shape.nodes { i64::from(number) } else { -1 },
        tls: TlsPaths { ca: files.ca, cert: files.cert, key: files.key },
        profile: shape.profile.clone(),
        identity: shape.manifest().digest().to_string(),
        block_bytes: shape.block_bytes,
        layers: shape.layers,
        fetch_floor_ms: shape.fetch_floor_ms,
        role: role(shape, number).name().to_owned(),
        time_scale: shape.time_scale,
        transport: shape.transport.to_string(),
        shm: kvfleet_engine::mock::ShmSection { dir: socket_dir(cluster), ..Default::default() },
        openai: openai(cluster, number, secret_file),
        ..InstanceConfig::default()
    }
}

fn role(shape: &ClusterShape, number: u32) -> InstanceRole {
    match shape.prefill_instances {
        0 => InstanceRole::Both,
        prefill if number <= prefill => InstanceRole::Prefill,
        _ => InstanceRole::Decode,
    }
}

/// OpenAI settings of an instance: its listener if the cluster has a gateway, and its model
/// identity.
fn openai(cluster: &LocalCluster, number: u32, secret_file: PathBuf) -> OpenAiSection {
    let shape = cluster.shape();
    let manifest = IdentitySection::from(&shape.manifest());
    match (&shape.openai, cluster.engine_ports.get(number as usize - 1)) {
        (Some(gateway), Some(port)) => OpenAiSection {
            listen: format!("127.0.0.1:{port}"),
            models: gateway.models.clone(),
            manifest,
            secret_file,
            ..OpenAiSection::default()
        },
        _ => OpenAiSection { manifest, secret_file, ..OpenAiSection::default() },
    }
}

/// Applies the flags for this role to the file and rewrites it.
fn apply_overrides(cluster: &LocalCluster, role: Role, path: &std::path::Path) -> anyhow::Result<()> {
    let mut layers = vec![];
    for text in &cluster.shape().overrides {
        let (of, rest) = split_role(text)?;
        if of == role {
            layers.push(parse_override(rest).map_err(anyhow::Error::msg)?);
        }
    }
    if layers.is_empty() {
        return Ok(());
    }
    let text = match role {
        Role::Router => to_toml(&load::<RouterProcessConfig>(Some(path), &layers)?)?,
        Role::Node => to_toml(&load::<NodeConfig>(Some(path), &layers)?)?,
        Role::Instance => to_toml(&load::<InstanceConfig>(Some(path), &layers)?)?,
    };
    Ok(std::fs::write(path, text)?)
}

fn split_role(text: &str) -> anyhow::Result<(Role, &str)> {
    let roles = [Role::Router, Role::Node, Role::Instance];
    let found =
        roles.into_iter().find_map(|role| Some((role, text.strip_prefix(role.name())?.strip_prefix('.')?)));
    found.ok_or_else(|| {
        anyhow::anyhow!("--set {text}: expected router.KEY=VALUE, node.KEY=VALUE or instance.KEY=VALUE")
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn refuses_ports_beyond_the_last() {
        assert_eq!((openai_port(0, 3).unwrap(), openai_port(65_533, 3).unwrap()), (0, 65_535));
        let refused = openai_port(65_533, 4).unwrap_err().to_string();
        says("a port of gateways too near the last one", &refused, &[]);
    }

    #[test]
    fn overrides_name_their_role() {
        assert_eq!(split_role("node.policy=fifo").unwrap(), (Role::Node, "policy=fifo"));
        assert!(split_role("policy=fifo").unwrap_err().to_string().contains("expected router.KEY=VALUE"));
    }
}
