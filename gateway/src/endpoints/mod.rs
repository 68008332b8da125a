//! Registry of engine endpoints by instance: address, origin and health.
//!
//! Endpoints come from the configuration (`configured.rs`), the admin API (`admin/`) and Kubernetes
//! (`kubernetes/`). Probers ask each engine for its load and health (`load/`). Not here: KV in GPU
//! memory, and the choice among endpoints (the router).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kv_core::id::InstanceId;
use kv_core::schedule::InstanceRole;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

pub(crate) mod address;
pub(crate) mod admin;
pub(crate) mod config;
pub(crate) mod configured;
#[cfg(feature = "kubernetes")]
pub(crate) mod engine_events;
#[cfg(feature = "kubernetes")]
pub(crate) mod kubernetes;
pub(crate) mod load;
pub(crate) mod models;
mod start;

use models::ServedModels;
pub use start::EndpointsError;
pub(crate) use start::{StartedEndpoints, start};

/// Source of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Origin {
    /// The configuration.
    Configured,
    /// The admin API.
    Admin,
    /// Kubernetes.
    Discovered,
}

impl Origin {
    /// All origins.
    pub(crate) const ALL: [Origin; 3] = [Origin::Configured, Origin::Admin, Origin::Discovered];

    /// Name in lists and metrics.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Origin::Configured => "configured",
            Origin::Admin => "called",
            Origin::Discovered => "discovered",
        }
    }
}

/// One engine that takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Instance of the engine.
    pub(crate) instance: InstanceId,
    /// `host:port`, without a scheme; sent to Envoy and dialed.
    pub(crate) authority: String,
    /// Whether the gateway calls it with TLS.
    pub(crate) is_tls: bool,
    /// Whether its engine links the kvfleet client, so that it can fetch from nodes.
    pub(crate) fetches: bool,
    /// Role of the engine: prefill, decode or both.
    pub(crate) role: InstanceRole,
    /// Topology, `zone/rack/host`; empty if unknown.
    pub(crate) place: String,
    /// Whether it gets no more requests while it finishes the current ones.
    pub(crate) is_draining: bool,
    /// Source of the endpoint.
    pub(crate) origin: Origin,
}

impl Endpoint {
    /// Base URL of its requests.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", if self.is_tls { "https" } else { "http" }, self.authority)
    }
}

/// Latest probe results of an endpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EndpointStatus {
    /// Addresses from the last lookup of its host; empty before the first.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Whether it is gone or failing, so that it gets no requests.
    pub(crate) is_unhealthy: bool,
    /// Current problem, for the operator.
    pub(crate) problem: Option<String>,
    /// Last reported load and its time; `None` if the engine reports to routers itself, or has not
    /// answered yet.
    pub(crate) load: Option<(EngineLoad, Instant)>,
    /// Models from its last answer; `None` if it has not answered yet.
    pub(crate) models: Option<Arc<ServedModels>>,
}

/// Load that an engine reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct EngineLoad {
    /// Running requests.
    pub(crate) running: u32,
    /// Waiting requests.
    pub(crate) waiting: u32,
    /// Estimated prompt tokens of the waiting requests: their number times the engine's mean prompt
    /// length.
    pub(crate) queue_tokens: u64,
    /// Used share of its KV memory, 0 to 1; `None` if not reported.
    pub(crate) usage: Option<f64>,
    /// Capacity of its KV memory in tokens; 0 if not reported.
    pub(crate) kv_tokens_max: u64,
}

impl EngineLoad {
    /// Tokens in its KV memory, from usage and capacity; 0 if unknown.
    pub(crate) fn kv_tokens(&self) -> u64 {
        (self.kv_tokens_max as f64 * self.usage.unwrap_or_default()).round() as u64
    }
}

/// Snapshot of an endpoint for a decision.
#[derive(Clone, Debug)]
pub(crate) struct EndpointView {
    pub(crate) endpoint: Arc<Endpoint>,
    /// Whether it may get requests.
    pub(crate) is_open: bool,
    /// Models that it serves; `None` if unknown.
    pub(crate) models: Option<Arc<ServedModels>>,
}

#[derive(Debug)]
struct EndpointEntry {
    endpoint: Arc<Endpoint>,
    /// Whether it reports its load to routers itself.
    reports_itself: bool,
    status: EndpointStatus,
    /// Triggers a probe after a failed request.
    probe_now: Arc<Notify>,
}

/// The registry. Clones share state.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndpointRegistry {
    all: Arc<RwLock<BTreeMap<InstanceId, EndpointEntry>>>,
    /// Counts additions, changes and removals.
    changes: watch::Sender<u64>,
}

impl EndpointRegistry {
    /// Endpoint of an instance.
    #[must_use]
    pub(crate) fn get(&self, instance: InstanceId) -> Option<Arc<Endpoint>> {
        self.all.read().get(&instance).map(|entry| Arc::clone(&entry.endpoint))
    }

    /// Endpoint with this address, as configured or as resolved.
    #[must_use]
    pub(crate) fn by_address(&self, authority: &str) -> Option<Arc<Endpoint>> {
        let all = self.all.read();
        let named = all.values().find(|entry| entry.endpoint.authority == authority);
        let resolved = || {
            let address = authority.parse().ok()?;
            all.values().find(|entry| entry.status.addresses.contains(&address))
        };
        named.or_else(resolved).map(|entry| Arc::clone(&entry.endpoint))
    }

    /// All endpoints, by ascending instance.
    #[must_use]
    pub(crate) fn list(&self) -> Vec<Arc<Endpoint>> {
        self.all.read().values().map(|entry| Arc::clone(&entry.endpoint)).collect()
    }

    /// Number of endpoints.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.all.read().len()
    }

    /// Adds an endpoint, or replaces the one of its instance.
    #[cfg(test)]
    pub(crate) fn put(&self, endpoint: Endpoint) {
        let reports_itself = self.reports_itself(endpoint.instance);
        self.put_reporting(endpoint, reports_itself);
    }

    /// Adds or replaces an endpoint. `reports_itself`: whether it reports its load to routers
    /// itself.
    pub(crate) fn put_reporting(&self, endpoint: Endpoint, reports_itself: bool) {
        let Ok(()) = self.put_if(endpoint, reports_itself, |_, _| Ok::<_, std::convert::Infallible>(()));
    }

    /// Removes an endpoint.
    pub(crate) fn remove(&self, instance: InstanceId) -> Option<Arc<Endpoint>> {
        let removed = self.all.write().remove(&instance);
        self.changes.send_modify(|changes| *changes += 1);
        removed.map(|entry| entry.endpoint)
    }

    /// Changes an endpoint atomically and returns the result; `None` if it is not registered. A new
    /// address resets its status.
    pub(crate) fn update(
        &self,
        instance: InstanceId,
        change: impl FnOnce(&mut Endpoint),
    ) -> Option<Arc<Endpoint>> {
        let mut all = self.all.write();
        let entry = all.get_mut(&instance)?;
        let mut endpoint = Endpoint::clone(&entry.endpoint);
        change(&mut endpoint);
        if endpoint.url() != entry.endpoint.url() {
            entry.status = EndpointStatus::default();
        }
        entry.endpoint = Arc::new(endpoint);
        let endpoint = Arc::clone(&entry.endpoint);
        drop(all);
        self.changes.send_modify(|changes| *changes += 1);
        Some(endpoint)
    }

    /// Adds or replaces an endpoint atomically, if `may` allows it for the current one and the
    /// number of endpoints.
    pub(crate) fn put_if<E>(
        &self,
        endpoint: Endpoint,
        reports_itself: bool,
        may: impl FnOnce(Option<&Endpoint>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut all = self.all.write();
        may(all.get(&endpoint.instance).map(|entry| &*entry.endpoint), all.len())?;
        let (standing, doubts) = match all.remove(&endpoint.instance) {
            Some(entry) if entry.endpoint.url() == endpoint.url() => (entry.status, entry.probe_now),
            _ => Default::default(),
        };
        let instance = endpoint.instance;
        all.insert(
            instance,
            EndpointEntry {
                endpoint: Arc::new(endpoint),
                reports_itself,
                status: standing,
                probe_now: doubts,
            },
        );
        drop(all);
        self.changes.send_modify(|changes| *changes += 1);
        Ok(())
    }

    /// Stops sending requests to an endpoint. Returns whether it is registered.
    pub(crate) fn drain(&self, instance: InstanceId) -> bool {
        self.update(instance, |endpoint| endpoint.is_draining = true).is_some()
    }

    /// Resolved addresses of an instance. [`Endpoint::authority`] keeps the given name.
    #[must_use]
    pub(crate) fn addresses(&self, instance: InstanceId) -> Vec<SocketAddr> {
        self.all.read().get(&instance).map(|entry| entry.status.addresses.clone()).unwrap_or_default()
    }

    /// Whether an instance may get requests, apart from its load.
    #[must_use]
    pub(crate) fn is_open(&self, instance: InstanceId) -> bool {
        self.all
            .read()
            .get(&instance)
            .is_some_and(|entry| !entry.endpoint.is_draining && !entry.status.is_unhealthy)
    }

    /// Snapshots of all endpoints, by ascending instance.
    pub(crate) fn views(&self) -> Vec<EndpointView> {
        let known = |entry: &EndpointEntry| EndpointView {
            endpoint: Arc::clone(&entry.endpoint),
            is_open: !entry.endpoint.is_draining && !entry.status.is_unhealthy,
            models: entry.status.models.clone(),
        };
        self.all.read().values().map(known).collect()
    }

    /// Whether some engine may serve a model of this name, by the engines' own lists. The name need
    /// not be listed literally: SGLang puts adapters behind the model's name, and any engine serves
    /// a request without a name.
    pub(crate) fn may_serve_model(&self, model: &str) -> bool {
        let lists = |entry: &EndpointEntry| {
            entry.status.models.as_ref().is_some_and(|models| models.may_serve(model))
        };
        self.all.read().values().any(lists)
    }

    /// All listed model names, each with the longest context of any engine; `None` if some engine
    /// does not report it.
    pub(crate) fn models(&self) -> BTreeMap<String, Option<u32>> {
        let mut all: BTreeMap<String, Option<u32>> = BTreeMap::new();
        for models in self.all.read().values().filter_map(|entry| entry.status.models.as_ref()) {
            for name in models.by_name.keys() {
                let context = models.context_tokens(name);
                all.entry(name.clone())
                    .and_modify(|known| *known = known.zip(context).map(|(one, other)| one.max(other)))
                    .or_insert(context);
            }
        }
        all
    }

    /// Requests an immediate probe after a failed request.
    pub(crate) fn request_probe(&self, instance: InstanceId) {
        if let Some(doubts) = self.probe_trigger(instance) {
            doubts.notify_one();
        }
    }

    /// Trigger of an instance's prober.
    fn probe_trigger(&self, instance: InstanceId) -> Option<Arc<Notify>> {
        self.all.read().get(&instance).map(|entry| Arc::clone(&entry.probe_now))
    }

    /// Latest probe results of an instance.
    #[must_use]
    pub(crate) fn status(&self, instance: InstanceId) -> Option<EndpointStatus> {
        self.all.read().get(&instance).map(|entry| entry.status.clone())
    }

    /// Notifies of additions, changes and removals.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn reports_itself(&self, instance: InstanceId) -> bool {
        self.all.read().get(&instance).is_some_and(|entry| entry.reports_itself)
    }

    /// Updates the status of an instance, if it is still at this address.
    fn update_status(&self, instance: InstanceId, authority: &str, note: impl FnOnce(&mut EndpointStatus)) {
        let mut all = self.all.write();
        if let Some(entry) = all.get_mut(&instance).filter(|entry| entry.endpoint.authority == authority) {
            note(&mut entry.status);
        }
    }
}

#[cfg(test)]
mod tests;
