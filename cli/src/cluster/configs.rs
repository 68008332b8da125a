//! Configuration files of a local cluster's processes: what a person would write, written for them.
//!
//! Not here: what the keys mean. Flags of the form `role.key=value` are applied last and checked like
//! any other layer.

use std::path::PathBuf;

use kv_core::schedule::Role as InstanceRole;
use kvfleet_client::Transport;
use kvfleet_doors::{AdminConfig, DoorsConfig, EndpointConfig, OpenAiConfig};
use kvfleet_node::NodeConfig;
use kvfleet_node::memory::MemoryBound;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_router::{EnginesConfig, RouterConfig, VoterConfig};
use kvfleet_transport::pick::PathKind;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ChildId, Cluster, Shape, name};
use crate::certificates::{Authority, CertificateFiles};
use crate::config::{ProcessConfig, Settings, load, parse_override, to_toml};
use crate::instance::{InstanceConfig, OpenAiSection, TlsPaths};
use crate::process::{Role, RouterProcessConfig};

/// What a child may take with the configuration that was written for it, in bytes; only nodes have such a bound.
pub(super) fn memory_bytes_max(cluster: &Cluster, id: ChildId) -> anyhow::Result<Option<u64>> {
    if id.0 != Role::Node {
        return Ok(None);
    }
    let settings = load::<NodeConfig>(Some(&path(cluster, id)), &[])?;
    Ok(Some(MemoryBound::of(&settings.service).total()))
}

/// The configuration that was written for a child.
pub(super) fn read<T>(cluster: &Cluster, id: ChildId) -> anyhow::Result<T>
where
    T: Default + Serialize + DeserializeOwned,
{
    Ok(load::<T>(Some(&path(cluster, id)), &[])?.service)
}

fn path(cluster: &Cluster, id: ChildId) -> PathBuf {
    cluster.directory().join("config").join(format!("{}.toml", name(id)))
}

/// Writes the configuration of a child and returns its path.
pub(super) fn write(cluster: &Cluster, id: ChildId) -> anyhow::Result<PathBuf> {
    let certificate = Authority::open(&cluster.certificates())?.issue(&name(id))?;
    let number = u32::try_from(id.1)?;
    let text = match id.0 {
        Role::Router => {
            let service = RouterProcessConfig {
                router: router(cluster, id.1, certificate),
                doors: doors(cluster, id.1)?,
            };
            to_toml(&settings(cluster, service))?
        }
        Role::Node => to_toml(&settings(cluster, node(cluster, number, certificate)))?,
        Role::Instance => to_toml(&settings(cluster, instance(cluster, number, certificate)))?,
    };
    let path = path(cluster, id);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&path, text)?;
    apply_overrides(cluster, id.0, &path)?;
    Ok(path)
}

fn settings<T>(cluster: &Cluster, service: T) -> Settings<T> {
    let process = ProcessConfig {
        otlp: cluster.shape().otlp.clone(),
        log: cluster.shape().log.clone(),
        ..ProcessConfig::default()
    };
    Settings { process, service }
}

fn router(cluster: &Cluster, number: u64, files: CertificateFiles) -> RouterConfig {
    let voters =
        cluster.routers.iter().map(|(id, address)| VoterConfig { id: *id, address: address.clone() });
    RouterConfig {
        id: number,
        listen: cluster.router_address(number).unwrap_or_default().to_owned(),
        voters: voters.collect(),
        // One machine has nothing to spread.
        shards: 1,
        data_dir: cluster.directory().join(name((Role::Router, number))),
        tls: kvfleet_router::TlsConfig { ca: files.ca, cert: files.cert, key: files.key },
        profile: cluster.shape().profile.clone(),
        time_scale: cluster.shape().predicted_time_scale(),
        // Stand-ins model their computing under the profile: what this machine moves is not to be weighed against that.
        price_links: false,
        // Where compute takes no time nobody waits, and no block is kept for who is predicted to.
        windows: cluster.shape().time_scale > 0.0,
        engines: EnginesConfig {
            identity: IdentitySection::from(&cluster.shape().manifest()),
            ..EnginesConfig::default()
        },
        ..RouterConfig::default()
    }
}

/// Port of a router's door, counted from that of the first.
fn door_port(first: u16, number: u64) -> anyhow::Result<u16> {
    let port = if first == 0 { 0 } else { u64::from(first) + number - 1 };
    u16::try_from(port).map_err(|_| {
        anyhow::anyhow!("--openai {first} leaves no room for the door of router {number}: give a lower port")
    })
}

/// Doors of a router, if there are to be any.
fn doors(cluster: &Cluster, number: u64) -> anyhow::Result<DoorsConfig> {
    let Some(shape) = &cluster.shape().openai else { return Ok(DoorsConfig::default()) };
    let port = door_port(shape.port, number)?;
    let endpoint = |(instance, port): (u32, &u16)| EndpointConfig {
        instance,
        url: format!("http://127.0.0.1:{port}"),
        fetches: true,
        reports_itself: true,
        ..EndpointConfig::default()
    };
    // Who waits until engines may be sent requests asks there.
    let admin = AdminConfig { listen: "127.0.0.1:0".to_owned(), ..AdminConfig::default() };
    let openai = OpenAiConfig { listen: format!("127.0.0.1:{port}"), ..OpenAiConfig::default() };
    let endpoints = (1..).zip(&cluster.engine_ports).map(endpoint).collect();
    Ok(DoorsConfig { openai, admin, endpoints, models: shape.models.clone(), ..DoorsConfig::default() })
}

fn node(cluster: &Cluster, number: u32, files: CertificateFiles) -> NodeConfig {
    let shape = cluster.shape();
    let marks = shape.watermarks.unwrap_or_else(|| {
        let product = NodeConfig::default();
        (product.watermark_high, product.watermark_low)
    });
    NodeConfig {
        id: number,
        instance: (number <= shape.instances).then_some(number),
        routers: cluster.router_addresses(),
        data_dir: cluster.directory().join(name((Role::Node, number.into()))),
        dram_blocks: Some(shape.capacity.dram_blocks),
        ssd_blocks: (shape.capacity.ssd_blocks > 0).then_some(shape.capacity.ssd_blocks),
        block_bytes: shape.block_bytes,
        policy: shape.policy.clone(),
        watermark_high: marks.0,
        watermark_low: marks.1,
        identity: IdentitySection::from(&shape.manifest()),
        tls: kvfleet_node::TlsSection { ca: files.ca, cert: files.cert, key: files.key },
        shm: kvfleet_node::ShmSection { dir: sockets(cluster), ..Default::default() },
        rdma: rdma(cluster),
        ..NodeConfig::default()
    }
}

/// Longest name of a socket (`unix(7)`).
const SOCKET_NAME_BYTES_MAX: usize = 107;

/// Where nodes and instances meet, if they are to. In a directory whose sockets would have longer names than systems take they do not, unless
/// they are to meet nowhere else.
fn sockets(cluster: &Cluster) -> Option<PathBuf> {
    let transport = cluster.shape().transport;
    let directory = cluster.directory().join("sockets");
    let longest = directory.join("255.255.255.255_65535.sock").as_os_str().len();
    let fits = longest <= SOCKET_NAME_BYTES_MAX || transport == Transport::Shm;
    (transport.kinds().contains(&PathKind::SharedMemory) && fits).then_some(directory)
}

/// What nodes offer if RDMA is asked for by name; under `auto` shared memory is nearer on one host. Whoever has a
/// certificate of this cluster runs on this host, as this user.
fn rdma(cluster: &Cluster) -> kvfleet_node::RdmaSection {
    let enabled = cluster.shape().transport == Transport::Rdma;
    kvfleet_node::RdmaSection { enabled, in_place: enabled, ..Default::default() }
}

fn instance(cluster: &Cluster, number: u32, files: CertificateFiles) -> InstanceConfig {
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
        shm: crate::instance::ShmSection { dir: sockets(cluster), ..Default::default() },
        openai: openai(cluster, number),
        ..InstanceConfig::default()
    }
}

fn role(shape: &Shape, number: u32) -> InstanceRole {
    match shape.prefill_instances {
        0 => InstanceRole::Both,
        prefill if number <= prefill => InstanceRole::Prefill,
        _ => InstanceRole::Decode,
    }
}

/// Where an instance takes requests from the doors, if there are any; and what it makes, in any case.
fn openai(cluster: &Cluster, number: u32) -> OpenAiSection {
    let shape = cluster.shape();
    let manifest = IdentitySection::from(&shape.manifest());
    match (&shape.openai, cluster.engine_ports.get(number as usize - 1)) {
        (Some(doors), Some(port)) => OpenAiSection {
            listen: format!("127.0.0.1:{port}"),
            models: doors.models.clone(),
            manifest,
            ..OpenAiSection::default()
        },
        _ => OpenAiSection { manifest, ..OpenAiSection::default() },
    }
}

/// Lays the flags for this role over the file and writes it again.
fn apply_overrides(cluster: &Cluster, role: Role, path: &std::path::Path) -> anyhow::Result<()> {
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
    fn doors_beyond_the_last_port_are_refused() {
        assert_eq!((door_port(0, 3).unwrap(), door_port(65_533, 3).unwrap()), (0, 65_535));
        let refused = door_port(65_533, 4).unwrap_err().to_string();
        says("a port of doors too near the last one", &refused, &[]);
    }

    #[test]
    fn a_set_flag_names_its_role() {
        assert_eq!(split_role("node.policy=fifo").unwrap(), (Role::Node, "policy=fifo"));
        assert!(split_role("policy=fifo").unwrap_err().to_string().contains("expected router.KEY=VALUE"));
    }
}
