//! What a Pod or an EndpointSlice says of engines.
//!
//! Pure. Not here: what many of them come to (`roster.rs`).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::api::discovery::v1::{Endpoint as SliceEndpoint, EndpointSlice};
use kube::ResourceExt;
use kv_core::schedule::{Domain, Role};
use kvfleet_router::{DialectConfig, EngineConfig};

use super::number;
use crate::endpoints::config::KubernetesConfig;

/// Whether Pods of engines link our client; `reports-itself`, whether they tell their load by themselves.
const FETCHES: &str = "kvfleet.io/fetches";
const REPORTS_ITSELF: &str = "kvfleet.io/reports-itself";

/// What an engine does of a request, `both`, `prefill` or `decode`, and where it stands; llm-d says the former in a label.
const ROLE: &str = "kvfleet.io/role";
const PLACE: &str = "kvfleet.io/place";
const ROLE_LABEL: &str = "llm-d.ai/role";

/// Where they publish events, and how.
const EVENTS_PORT: &str = "kvfleet.io/events-port";
const REPLAY_PORT: &str = "kvfleet.io/replay-port";
const DIALECT: &str = "kvfleet.io/dialect";
const RANKS: &str = "kvfleet.io/ranks";
/// Whether each of its ranks takes requests at a port of its own, rank r at the port + r.
const RANK_PORTS: &str = "kvfleet.io/rank-ports";
const TOPIC: &str = "kvfleet.io/topic";

/// Engines of one object that are read.
const OF_ONE_MAX: usize = 1_024;

/// How an engine stands in Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stands {
    /// It takes requests.
    Ready,
    /// Not now.
    NotReady,
    /// It ends what it has.
    Ends,
}

/// One engine, as an object says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// What it is known by, however often it is said.
    pub(super) identifier: String,
    /// What people call it.
    pub(super) name: String,
    /// When it was made, in seconds since 1970: the older one keeps a number that two have.
    pub(super) made_s: i64,
    /// The engine, or what is wrong with how it is named.
    pub(super) engine: Result<Engine, String>,
}

/// An engine that is named as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Engine {
    pub(super) instance: u32,
    pub(super) authority: String,
    pub(super) stands: Stands,
    pub(super) fetches: bool,
    pub(super) role: Role,
    pub(super) place: String,
    pub(super) reports_itself: bool,
    /// Its events, where it says where they are.
    pub(super) events: Option<EngineConfig>,
}

/// Reads a Pod. One without an address is none yet.
pub(super) fn single(object: &Pod, config: &KubernetesConfig) -> Vec<Found> {
    let (spec, status) = (object.spec.clone().unwrap_or_default(), object.status.clone().unwrap_or_default());
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let Some(ip) = status.pod_ip.as_deref().filter(|ip| !ip.is_empty()) else { return Vec::new() };
    let name = format!("Pod {}/{}", object.namespace().unwrap_or_default(), object.name_any());
    let made_s = object.creation_timestamp().map_or(i64::MAX, |made| made.0.as_second());
    let identifier = object.uid().unwrap_or_else(|| name.clone());
    let engine = engine_of(object, config, (&name, &spec, &status, ip));
    let others = match &engine {
        Ok(engine) => others_of(engine, object.annotations(), &name),
        Err(_) => Vec::new(),
    };
    let others = (1..).zip(others).map(|(rank, engine)| Found {
        identifier: format!("{identifier}/{rank}"),
        name: format!("rank {rank} of {name}"),
        made_s,
        engine,
    });
    let others: Vec<Found> = others.collect();
    std::iter::once(Found { identifier, name, made_s, engine }).chain(others).collect()
}

/// Ranks behind the first that take requests themselves. Their events come with the first one's.
fn others_of(first: &Engine, notes: &BTreeMap<String, String>, name: &str) -> Vec<Result<Engine, String>> {
    let have_ports = match yes_or_no(name, notes, RANK_PORTS) {
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
            format!("rank {rank} of {name} would have no port or no instance number: lower the first one's")
        })?;
        Ok(Engine { instance, authority: at.to_string(), events: None, ..first.clone() })
    };
    (1..ranks).take(OF_ONE_MAX).map(of).collect()
}

fn engine_of(
    object: &Pod,
    config: &KubernetesConfig,
    (name, spec, status, ip): (&str, &PodSpec, &PodStatus, &str),
) -> Result<Engine, String> {
    let address: IpAddr = ip.parse().map_err(|_| format!("{name} has the address {ip:?}, which is none"))?;
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let mut named = ports.filter(|port| port.name.as_deref() == Some(&config.port_name));
    let port = named.next().and_then(|port| u16::try_from(port.container_port).ok()).filter(|port| *port > 0);
    let port = port.ok_or_else(|| {
        format!(
            "{name} has no port named {:?}: name it so, or set doors.kubernetes.port_name",
            config.port_name
        )
    })?;
    let notes = object.annotations();
    let instance = instance_of(object, config, name)?;
    let stands = if object.metadata.deletion_timestamp.is_some() {
        Stands::Ends
    } else if is_ready(status) {
        Stands::Ready
    } else {
        Stands::NotReady
    };
    Ok(Engine {
        instance,
        authority: SocketAddr::new(address, port).to_string(),
        stands,
        fetches: yes_or_no(name, notes, FETCHES)?.unwrap_or(config.fetches),
        role: role_of(object, name)?,
        place: place_of(name, notes)?,
        reports_itself: yes_or_no(name, notes, REPORTS_ITSELF)?.unwrap_or(false),
        events: events(name, notes, instance, address)?,
    })
}

fn is_ready(status: &PodStatus) -> bool {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn instance_of(object: &Pod, config: &KubernetesConfig, name: &str) -> Result<u32, String> {
    if let Some(value) = object.annotations().get(&config.instance_annotation) {
        return number::annotated(name, &config.instance_annotation, value);
    }
    let is_of_set = object.owner_references().iter().any(|owner| owner.kind == "StatefulSet");
    let ranks = ranks_of(object.annotations(), name)?;
    let counted =
        if is_of_set { number::ordinal(&object.name_any(), config.instance_base, ranks) } else { None };
    counted.unwrap_or_else(|| Ok(number::hashed(&object.uid().unwrap_or_else(|| name.to_owned()))))
}

fn ranks_of(notes: &BTreeMap<String, String>, name: &str) -> Result<u16, String> {
    let Some(text) = notes.get(RANKS) else { return Ok(1) };
    match text.parse() {
        Ok(ranks @ 1_u16..) => Ok(ranks),
        _ => Err(wrong(name, RANKS, text, "a number of ranks from 1")),
    }
}

/// Labels of llm-d that mean something else to it than these three are left alone.
fn role_of(object: &Pod, name: &str) -> Result<Role, String> {
    if let Some(said) = object.annotations().get(ROLE) {
        return Role::by_name(said)
            .ok_or_else(|| wrong(name, ROLE, said, "\"both\", \"prefill\" or \"decode\""));
    }
    let label = object.labels().get(ROLE_LABEL).and_then(|said| Role::by_name(said));
    Ok(label.unwrap_or_default())
}

fn place_of(name: &str, notes: &BTreeMap<String, String>) -> Result<String, String> {
    let place = notes.get(PLACE).cloned().unwrap_or_default();
    let expected = "names with one slash between two, such as \"zone/rack/host\", four at most,";
    Domain::parse(&place).map_err(|_| wrong(name, PLACE, &place, expected))?;
    Ok(place)
}

fn yes_or_no(name: &str, notes: &BTreeMap<String, String>, key: &str) -> Result<Option<bool>, String> {
    match notes.get(key).map(String::as_str) {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => Err(wrong(name, key, other, "\"true\" or \"false\"")),
    }
}

fn wrong(name: &str, key: &str, value: &str, expected: &str) -> String {
    let shown: String = value.chars().take(40).collect();
    format!("{name} has the annotation {key}: {shown:?}, and {expected} was expected")
}

/// Where its events are, where annotations say so.
fn events(
    name: &str,
    notes: &BTreeMap<String, String>,
    instance: u32,
    address: IpAddr,
) -> Result<Option<EngineConfig>, String> {
    let port = |key: &str| match notes.get(key) {
        None => Ok(None),
        Some(text) => match text.parse::<u16>() {
            Ok(port @ 1..) => Ok(Some(format!("tcp://{}", SocketAddr::new(address, port)))),
            _ => Err(wrong(name, key, text, "a port from 1 to 65535")),
        },
    };
    let (events, replay) = (port(EVENTS_PORT)?, port(REPLAY_PORT)?);
    let dialect = match notes.get(DIALECT).map(String::as_str) {
        None | Some("vllm") => DialectConfig::Vllm,
        Some("sglang") => DialectConfig::Sglang,
        Some(other) => return Err(wrong(name, DIALECT, other, "\"vllm\" or \"sglang\"")),
    };
    let ranks = ranks_of(notes, name)?;
    let Some(events) = events else { return Ok(None) };
    let topic = notes.get(TOPIC).cloned().unwrap_or_default();
    let replay = replay.unwrap_or_default();
    Ok(Some(EngineConfig { instance, ranks, dialect, events, replay, topic, ..EngineConfig::default() }))
}

/// Reads an EndpointSlice: as many engines as it has endpoints. What is the port's name there is the Service's.
pub(super) fn slice(slice: &EndpointSlice, config: &KubernetesConfig) -> Vec<Found> {
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
        let engine = of_endpoint(endpoint, config, (&name, &identifier, ip, port));
        Some(Found { identifier, name, made_s, engine })
    };
    slice.endpoints.iter().take(OF_ONE_MAX).filter_map(of_one).collect()
}

fn of_endpoint(
    endpoint: &SliceEndpoint,
    config: &KubernetesConfig,
    (name, identifier, ip, port): (&str, &str, &str, Option<u16>),
) -> Result<Engine, String> {
    let address: IpAddr = ip.parse().map_err(|_| format!("{name} has the address {ip:?}, which is none"))?;
    let port = port.ok_or_else(|| {
        format!(
            "{name} has no port named {:?} in its Service: name it so, or set doors.kubernetes.port_name",
            config.port_name
        )
    })?;
    // Only Pods of a StatefulSet have one there.
    let counted =
        endpoint.hostname.as_deref().and_then(|host| number::ordinal(host, config.instance_base, 1));
    let instance = counted.unwrap_or_else(|| Ok(number::hashed(identifier)))?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let stands = match (conditions.terminating, conditions.ready) {
        (Some(true), _) => Stands::Ends,
        (_, Some(false)) => Stands::NotReady,
        _ => Stands::Ready,
    };
    Ok(Engine {
        instance,
        authority: SocketAddr::new(address, port).to_string(),
        stands,
        fetches: config.fetches,
        role: Role::Both,
        place: String::new(),
        reports_itself: false,
        events: None,
    })
}
