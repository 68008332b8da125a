//! Parses Pods and EndpointSlices into engines.
//!
//! Pure. Not here: combining the engines of all objects (`discovered.rs`).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::api::discovery::v1::{Endpoint as SliceEndpoint, EndpointSlice};
use kube::ResourceExt;
use kv_core::schedule::{Domain, InstanceRole};
use kvfleet_router::{DialectConfig, EngineConfig};

use super::instance_number;
use crate::endpoints::config::KubernetesConfig;

/// Annotations: whether an engine links the kvfleet client, and whether it reports its load itself.
const FETCHES: &str = "kvfleet.io/fetches";
const REPORTS_ITSELF: &str = "kvfleet.io/reports-itself";

/// Annotations for role (`both`, `prefill` or `decode`) and topology; llm-d uses a label for the
/// role.
const ROLE: &str = "kvfleet.io/role";
const PLACE: &str = "kvfleet.io/place";
const ROLE_LABEL: &str = "llm-d.ai/role";

/// Annotations for KV events: ports, dialect, ranks and topic.
const EVENTS_PORT: &str = "kvfleet.io/events-port";
const REPLAY_PORT: &str = "kvfleet.io/replay-port";
const DIALECT: &str = "kvfleet.io/dialect";
const RANKS: &str = "kvfleet.io/ranks";
/// Whether each rank has its own port for requests: rank r at port + r.
const RANK_PORTS: &str = "kvfleet.io/rank-ports";
const TOPIC: &str = "kvfleet.io/topic";

/// Most engines of one object.
const ENGINES_PER_OBJECT_MAX: usize = 1_024;

/// Readiness of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineReadiness {
    /// Takes requests.
    Ready,
    /// Takes no requests now.
    NotReady,
    /// Finishes its requests before it terminates.
    Terminating,
}

/// One engine of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiscoveredEngine {
    /// Stable identifier that tells duplicates.
    pub(super) identifier: String,
    /// Name for the operator.
    pub(super) name: String,
    /// Creation time in seconds since 1970. If two engines claim a number, the older one keeps it.
    pub(super) created_s: i64,
    /// The engine, or the problem with its object.
    pub(super) engine: Result<EngineSpec, String>,
}

/// A valid engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EngineSpec {
    pub(super) instance: u32,
    pub(super) authority: String,
    pub(super) readiness: EngineReadiness,
    pub(super) fetches: bool,
    pub(super) role: InstanceRole,
    pub(super) place: String,
    pub(super) reports_itself: bool,
    /// Event settings; `None` if the object has none.
    pub(super) events: Option<EngineConfig>,
}

/// Parses a Pod and its ranks. A Pod without an address yields none.
pub(super) fn read_pod(object: &Pod, config: &KubernetesConfig) -> Vec<DiscoveredEngine> {
    let (spec, status) = (object.spec.clone().unwrap_or_default(), object.status.clone().unwrap_or_default());
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let Some(ip) = status.pod_ip.as_deref().filter(|ip| !ip.is_empty()) else { return Vec::new() };
    let name = format!("Pod {}/{}", object.namespace().unwrap_or_default(), object.name_any());
    let made_s = object.creation_timestamp().map_or(i64::MAX, |made| made.0.as_second());
    let identifier = object.uid().unwrap_or_else(|| name.clone());
    let engine = pod_engine(object, config, &name, &spec, &status, ip);
    let others = match &engine {
        Ok(engine) => other_ranks(engine, object.annotations(), &name),
        Err(_) => Vec::new(),
    };
    let others = (1..).zip(others).map(|(rank, engine)| DiscoveredEngine {
        identifier: format!("{identifier}/{rank}"),
        name: format!("rank {rank} of {name}"),
        created_s: made_s,
        engine,
    });
    let others: Vec<DiscoveredEngine> = others.collect();
    std::iter::once(DiscoveredEngine { identifier, name, created_s: made_s, engine }).chain(others).collect()
}

/// Ranks after the first that have their own ports. The first rank's entry covers the events of
/// all.
fn other_ranks(
    first: &EngineSpec,
    notes: &BTreeMap<String, String>,
    name: &str,
) -> Vec<Result<EngineSpec, String>> {
    let have_ports = match parse_bool(name, notes, RANK_PORTS) {
        Ok(said) => said.unwrap_or_default(),
        Err(problem) => return vec![Err(problem)],
    };
    let ranks = ranks_of(notes, name).unwrap_or(1);
    if !have_ports {
        return Vec::new();
    }
    let of = |rank: u16| {
        let address: Option<SocketAddr> = first.authority.parse().ok();
        let at = address.and_then(|at| Some(SocketAddr::new(at.ip(), at.port().checked_add(rank)?)));
        let instance = first.instance.checked_add(rank.into());
        let (at, instance) = at.zip(instance).ok_or_else(|| {
            format!(
                "rank {rank} of {name} would exceed the largest port or instance number: lower those of the \
                 first rank"
            )
        })?;
        Ok(EngineSpec { instance, authority: at.to_string(), events: None, ..first.clone() })
    };
    (1..ranks).take(ENGINES_PER_OBJECT_MAX).map(of).collect()
}

fn pod_engine(
    object: &Pod,
    config: &KubernetesConfig,
    name: &str,
    spec: &PodSpec,
    status: &PodStatus,
    ip: &str,
) -> Result<EngineSpec, String> {
    let address: IpAddr = ip.parse().map_err(|_| format!("{name} has the invalid address {ip:?}"))?;
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let mut named = ports.filter(|port| port.name.as_deref() == Some(&config.port_name));
    let port = named.next().and_then(|port| u16::try_from(port.container_port).ok()).filter(|port| *port > 0);
    let port = port.ok_or_else(|| {
        format!(
            "{name} has no port named {:?}: name it so, or set gateway.kubernetes.port_name",
            config.port_name
        )
    })?;
    let notes = object.annotations();
    let instance = pod_instance(object, config, name)?;
    let stands = if object.metadata.deletion_timestamp.is_some() {
        EngineReadiness::Terminating
    } else if is_ready(status) {
        EngineReadiness::Ready
    } else {
        EngineReadiness::NotReady
    };
    Ok(EngineSpec {
        instance,
        authority: SocketAddr::new(address, port).to_string(),
        readiness: stands,
        fetches: parse_bool(name, notes, FETCHES)?.unwrap_or(config.fetches),
        role: pod_role(object, name)?,
        place: pod_place(name, notes)?,
        reports_itself: parse_bool(name, notes, REPORTS_ITSELF)?.unwrap_or(false),
        events: pod_events(name, notes, instance, address)?,
    })
}

fn is_ready(status: &PodStatus) -> bool {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn pod_instance(object: &Pod, config: &KubernetesConfig, name: &str) -> Result<u32, String> {
    if let Some(value) = object.annotations().get(&config.instance_annotation) {
        return instance_number::from_annotation(name, &config.instance_annotation, value);
    }
    let is_of_set = object.owner_references().iter().any(|owner| owner.kind == "StatefulSet");
    let ranks = ranks_of(object.annotations(), name)?;
    let counted = if is_of_set {
        instance_number::from_ordinal(&object.name_any(), config.instance_base, ranks)
    } else {
        None
    };
    counted.unwrap_or_else(|| {
        Ok(instance_number::from_identifier(&object.uid().unwrap_or_else(|| name.to_owned())))
    })
}

fn ranks_of(notes: &BTreeMap<String, String>, name: &str) -> Result<u16, String> {
    let Some(text) = notes.get(RANKS) else { return Ok(1) };
    match text.parse() {
        Ok(ranks @ 1_u16..) => Ok(ranks),
        _ => Err(annotation_error(name, RANKS, text, "a number of ranks from 1")),
    }
}

/// llm-d has other values for this label, which are ignored.
fn pod_role(object: &Pod, name: &str) -> Result<InstanceRole, String> {
    if let Some(said) = object.annotations().get(ROLE) {
        return InstanceRole::by_name(said)
            .ok_or_else(|| annotation_error(name, ROLE, said, "\"both\", \"prefill\" or \"decode\""));
    }
    let label = object.labels().get(ROLE_LABEL).and_then(|said| InstanceRole::by_name(said));
    Ok(label.unwrap_or_default())
}

fn pod_place(name: &str, notes: &BTreeMap<String, String>) -> Result<String, String> {
    let place = notes.get(PLACE).cloned().unwrap_or_default();
    let expected = "names with one slash between two, such as \"zone/rack/host\", four at most,";
    Domain::parse(&place).map_err(|_| annotation_error(name, PLACE, &place, expected))?;
    Ok(place)
}

fn parse_bool(name: &str, notes: &BTreeMap<String, String>, key: &str) -> Result<Option<bool>, String> {
    match notes.get(key).map(String::as_str) {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => Err(annotation_error(name, key, other, "\"true\" or \"false\"")),
    }
}

fn annotation_error(name: &str, key: &str, value: &str, expected: &str) -> String {
    let shown: String = value.chars().take(40).collect();
    format!("{name} has the annotation {key}: {shown:?}, but {expected} was expected")
}

/// Event settings from annotations.
fn pod_events(
    name: &str,
    notes: &BTreeMap<String, String>,
    instance: u32,
    address: IpAddr,
) -> Result<Option<EngineConfig>, String> {
    let port = |key: &str| match notes.get(key) {
        None => Ok(None),
        Some(text) => match text.parse::<u16>() {
            Ok(port @ 1..) => Ok(Some(format!("tcp://{}", SocketAddr::new(address, port)))),
            _ => Err(annotation_error(name, key, text, "a port from 1 to 65535")),
        },
    };
    let (events, replay) = (port(EVENTS_PORT)?, port(REPLAY_PORT)?);
    let dialect = match notes.get(DIALECT).map(String::as_str) {
        None | Some("vllm") => DialectConfig::Vllm,
        Some("sglang") => DialectConfig::Sglang,
        Some(other) => return Err(annotation_error(name, DIALECT, other, "\"vllm\" or \"sglang\"")),
    };
    let ranks = ranks_of(notes, name)?;
    let Some(events) = events else { return Ok(None) };
    let topic = notes.get(TOPIC).cloned().unwrap_or_default();
    let replay = replay.unwrap_or_default();
    Ok(Some(EngineConfig { instance, ranks, dialect, events, replay, topic, ..EngineConfig::default() }))
}

/// Parses an EndpointSlice into one engine per endpoint. Its port names are those of the Service.
pub(super) fn read_slice(slice: &EndpointSlice, config: &KubernetesConfig) -> Vec<DiscoveredEngine> {
    let ports = slice.ports.as_deref().unwrap_or_default();
    let named = ports.iter().find(|port| port.name.as_deref().unwrap_or_default() == config.port_name);
    let port =
        named.and_then(|port| port.port).and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
    let whose = format!("{}/{}", slice.namespace().unwrap_or_default(), slice.name_any());
    let made_s = slice.creation_timestamp().map_or(i64::MAX, |made| made.0.as_second());
    let of_one = |endpoint: &SliceEndpoint| {
        let ip = endpoint.addresses.first()?;
        let target = endpoint.target_ref.as_ref();
        let target_name = target.and_then(|target| target.name.as_deref());
        let name = target_name
            .map_or_else(|| format!("{ip} of EndpointSlice {whose}"), |name| format!("Pod {name}"));
        let identifier = target.and_then(|target| target.uid.clone()).unwrap_or_else(|| ip.clone());
        let engine = slice_engine(endpoint, config, &name, &identifier, ip, port);
        Some(DiscoveredEngine { identifier, name, created_s: made_s, engine })
    };
    slice.endpoints.iter().take(ENGINES_PER_OBJECT_MAX).filter_map(of_one).collect()
}

fn slice_engine(
    endpoint: &SliceEndpoint,
    config: &KubernetesConfig,
    name: &str,
    identifier: &str,
    ip: &str,
    port: Option<u16>,
) -> Result<EngineSpec, String> {
    let address: IpAddr = ip.parse().map_err(|_| format!("{name} has the invalid address {ip:?}"))?;
    let port = port.ok_or_else(|| {
        format!(
            "{name} has no port named {:?} in its Service: name it so, or set gateway.kubernetes.port_name",
            config.port_name
        )
    })?;
    // Only Pods of a StatefulSet have a host name here.
    let counted = endpoint
        .hostname
        .as_deref()
        .and_then(|host| instance_number::from_ordinal(host, config.instance_base, 1));
    let instance = counted.unwrap_or_else(|| Ok(instance_number::from_identifier(identifier)))?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let stands = match (conditions.terminating, conditions.ready) {
        (Some(true), _) => EngineReadiness::Terminating,
        (_, Some(false)) => EngineReadiness::NotReady,
        _ => EngineReadiness::Ready,
    };
    Ok(EngineSpec {
        instance,
        authority: SocketAddr::new(address, port).to_string(),
        readiness: stands,
        fetches: config.fetches,
        role: InstanceRole::Both,
        place: String::new(),
        reports_itself: false,
        events: None,
    })
}
