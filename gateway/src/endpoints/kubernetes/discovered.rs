//! Combines the engines of all objects into endpoints and followed events, and resolves conflicts
//! of instance numbers.
//!
//! A new list takes effect only when it is complete, so that restarting a watch removes no engine.
//! Not here: the watch (`mod.rs`).

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::InstanceId;
use kvfleet_router::EngineConfig;

use super::objects::{DiscoveredEngine, EngineReadiness};
use crate::config::ENDPOINTS_MAX;
use crate::endpoints::engine_events::EngineEvents;
use crate::endpoints::{Endpoint, EndpointRegistry, Origin};

/// Objects, and the endpoints derived from them.
pub(super) struct DiscoveredEndpoints {
    endpoints: EndpointRegistry,
    events: EngineEvents,
    objects: BTreeMap<String, Vec<DiscoveredEngine>>,
    /// The incomplete list.
    listing: BTreeMap<String, Vec<DiscoveredEngine>>,
    /// Registered endpoints, each with whether it reports its load itself.
    applied: BTreeMap<InstanceId, (Endpoint, bool)>,
    /// Problems of the last pass; a new one is logged once.
    reported_problems: BTreeSet<String>,
}

/// Desired state.
#[derive(Default)]
struct DesiredEndpoints {
    endpoints: BTreeMap<InstanceId, (Endpoint, bool)>,
    events: BTreeMap<u32, EngineConfig>,
    problems: BTreeSet<String>,
}

impl DiscoveredEndpoints {
    pub(super) fn new(endpoints: EndpointRegistry, events: EngineEvents) -> DiscoveredEndpoints {
        let (objects, listing) = (BTreeMap::new(), BTreeMap::new());
        DiscoveredEndpoints {
            endpoints,
            events,
            objects,
            listing,
            applied: BTreeMap::new(),
            reported_problems: BTreeSet::new(),
        }
    }

    /// A list begins.
    pub(super) fn start_list(&mut self) {
        self.listing.clear();
    }

    /// An object of the list.
    pub(super) fn add_to_list(&mut self, key: String, found: Vec<DiscoveredEngine>) {
        if self.listing.len() < ENDPOINTS_MAX {
            self.listing.insert(key, found);
        }
    }

    /// The list is complete.
    pub(super) fn finish_list(&mut self) {
        self.objects = std::mem::take(&mut self.listing);
    }

    /// An object was added or changed.
    pub(super) fn apply(&mut self, key: String, found: Vec<DiscoveredEngine>) {
        if self.objects.len() < ENDPOINTS_MAX || self.objects.contains_key(&key) {
            self.objects.insert(key, found);
        }
    }

    /// An object was deleted.
    pub(super) fn delete(&mut self, key: &str) {
        self.objects.remove(key);
    }

    /// Applies the difference to the registry. Returns the number of problems.
    pub(super) fn reconcile(&mut self) -> usize {
        let DesiredEndpoints { endpoints, events, mut problems } = self.desired();
        // Events first, because the prober of a new endpoint may find its events too.
        problems.extend(self.events.follow_exactly(events));
        for instance in self.applied.keys().filter(|instance| !endpoints.contains_key(instance)) {
            self.endpoints.remove(*instance);
            tracing::info!(instance = instance.0, "an engine was removed in Kubernetes, or is not ready");
        }
        for (instance, (endpoint, reports_itself)) in &endpoints {
            if self.applied.get(instance) != Some(&(endpoint.clone(), *reports_itself)) {
                let Endpoint { authority, is_draining: draining, .. } = endpoint;
                tracing::info!(
                    instance = instance.0,
                    authority,
                    draining,
                    "an engine was discovered in Kubernetes"
                );
                self.endpoints.put_reporting(endpoint.clone(), *reports_itself);
            }
        }
        self.applied = endpoints;
        for problem in problems.difference(&self.reported_problems) {
            tracing::warn!(problem, "skipping an engine in Kubernetes");
        }
        self.reported_problems = problems;
        self.reported_problems.len()
    }

    #[cfg(test)]
    pub(super) fn problems(&self) -> Vec<String> {
        self.reported_problems.iter().cloned().collect()
    }

    fn desired(&self) -> DesiredEndpoints {
        // A fixed order gives the same result on every router.
        let mut found: Vec<_> = self.objects.values().flatten().collect();
        found.sort_by_key(|found| (found.created_s, &found.identifier));
        let (mut desired, mut seen) = (DesiredEndpoints::default(), BTreeSet::new());
        let mut by_number: BTreeMap<u32, &DiscoveredEngine> = BTreeMap::new();
        // A Pod may appear in two EndpointSlices, one per address family.
        for one in found.into_iter().filter(|found| seen.insert(&found.identifier)) {
            let engine = match &one.engine {
                Ok(engine) => engine,
                Err(problem) => {
                    desired.problems.insert(problem.clone());
                    continue;
                }
            };
            let instance = InstanceId(engine.instance);
            if let Some(other) = by_number.get(&engine.instance) {
                desired.problems.insert(format!(
                    "{} and {} both have instance number {}: give each its own with the annotation \
                     kvfleet.io/instance; until then the older one keeps it",
                    other.name, one.name, engine.instance
                ));
                continue;
            }
            if let Some(other) =
                self.endpoints.get(instance).filter(|other| other.origin != Origin::Discovered)
            {
                let (name, origin) = (&one.name, other.origin.name());
                desired.problems.insert(format!(
                    "{name} has instance number {}, which {} already uses ({origin}): change one of them",
                    engine.instance, other.authority
                ));
                continue;
            }
            by_number.insert(engine.instance, one);
            if let Some(events) = &engine.events {
                desired.events.insert(engine.instance, events.clone());
            }
            if engine.readiness != EngineReadiness::NotReady {
                let endpoint = Endpoint {
                    instance,
                    authority: engine.authority.clone(),
                    is_tls: false,
                    fetches: engine.fetches,
                    role: engine.role,
                    place: engine.place.clone(),
                    is_draining: engine.readiness == EngineReadiness::Terminating,
                    origin: Origin::Discovered,
                };
                desired.endpoints.insert(instance, (endpoint, engine.reports_itself));
            }
        }
        desired
    }
}
