//! What all objects come to: endpoints that are put and removed, engines that are followed, and numbers that two of them have.
//!
//! A list replaces what was known only once it is complete, so that a watch that begins again takes nobody away meanwhile. Not here: the
//! watch (`mod.rs`).

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::InstanceId;
use kvfleet_router::EngineConfig;

use super::read::{Found, Stands};
use crate::config::ENDPOINTS_MAX;
use crate::endpoints::events::Events;
use crate::endpoints::{Endpoint, Endpoints, Origin};

/// Objects, and what was made of them.
pub(super) struct Roster {
    endpoints: Endpoints,
    events: Events,
    known: BTreeMap<String, Vec<Found>>,
    /// A list that is not complete yet.
    begun: BTreeMap<String, Vec<Found>>,
    /// What was put, and whether it reports itself.
    put: BTreeMap<InstanceId, (Endpoint, bool)>,
    /// What was wrong last; each thing is said once.
    said: BTreeSet<String>,
}

/// What is wanted.
#[derive(Default)]
struct Wanted {
    endpoints: BTreeMap<InstanceId, (Endpoint, bool)>,
    events: BTreeMap<u32, EngineConfig>,
    problems: BTreeSet<String>,
}

impl Roster {
    pub(super) fn new(endpoints: Endpoints, events: Events) -> Roster {
        let (known, begun) = (BTreeMap::new(), BTreeMap::new());
        Roster { endpoints, events, known, begun, put: BTreeMap::new(), said: BTreeSet::new() }
    }

    /// A list begins.
    pub(super) fn begin(&mut self) {
        self.begun.clear();
    }

    /// An object of it.
    pub(super) fn begun_with(&mut self, key: String, found: Vec<Found>) {
        if self.begun.len() < ENDPOINTS_MAX {
            self.begun.insert(key, found);
        }
    }

    /// It is complete.
    pub(super) fn done(&mut self) {
        self.known = std::mem::take(&mut self.begun);
    }

    /// An object is as it is now.
    pub(super) fn apply(&mut self, key: String, found: Vec<Found>) {
        if self.known.len() < ENDPOINTS_MAX || self.known.contains_key(&key) {
            self.known.insert(key, found);
        }
    }

    /// An object is gone.
    pub(super) fn delete(&mut self, key: &str) {
        self.known.remove(key);
    }

    /// Puts and removes what differs; how many engines something is wrong with.
    pub(super) fn settle(&mut self) -> usize {
        let Wanted { endpoints, events, mut problems } = self.wanted();
        // First: an engine that is asked for its load may say where its events are, too.
        problems.extend(self.events.settle(events));
        for instance in self.put.keys().filter(|instance| !endpoints.contains_key(instance)) {
            self.endpoints.remove(*instance);
            tracing::info!(instance = instance.0, "an engine is gone from Kubernetes, or not ready");
        }
        for (instance, (endpoint, reports_itself)) in &endpoints {
            if self.put.get(instance) != Some(&(endpoint.clone(), *reports_itself)) {
                let Endpoint { authority, draining, .. } = endpoint;
                tracing::info!(
                    instance = instance.0,
                    authority,
                    draining,
                    "an engine is known from Kubernetes"
                );
                self.endpoints.put_that_reports(endpoint.clone(), *reports_itself);
            }
        }
        self.put = endpoints;
        for problem in problems.difference(&self.said) {
            tracing::warn!(problem, "an engine in Kubernetes is left out");
        }
        self.said = problems;
        self.said.len()
    }

    #[cfg(test)]
    pub(super) fn problems(&self) -> Vec<String> {
        self.said.iter().cloned().collect()
    }

    fn wanted(&self) -> Wanted {
        // The same on every router, whatever came first.
        let mut found: Vec<_> = self.known.values().flatten().collect();
        found.sort_by_key(|found| (found.made_s, &found.identifier));
        let (mut wanted, mut seen) = (Wanted::default(), BTreeSet::new());
        let mut by_number: BTreeMap<u32, &Found> = BTreeMap::new();
        // One Pod may be in two EndpointSlices, one for each kind of address.
        for one in found.into_iter().filter(|found| seen.insert(&found.identifier)) {
            let engine = match &one.engine {
                Ok(engine) => engine,
                Err(problem) => {
                    wanted.problems.insert(problem.clone());
                    continue;
                }
            };
            let instance = InstanceId(engine.instance);
            if let Some(other) = by_number.get(&engine.instance) {
                wanted.problems.insert(format!(
                    "{} and {} both come to instance {}: give each its own by an annotation, kvfleet.io/instance; the older one has it until then",
                    other.name, one.name, engine.instance
                ));
                continue;
            }
            if let Some(other) =
                self.endpoints.get(instance).filter(|other| other.origin != Origin::Discovered)
            {
                let (name, origin) = (&one.name, other.origin.name());
                wanted.problems.insert(format!(
                    "{name} comes to instance {}, which {} is ({origin}): give it another number, or take that one away",
                    engine.instance, other.authority
                ));
                continue;
            }
            by_number.insert(engine.instance, one);
            if let Some(events) = &engine.events {
                wanted.events.insert(engine.instance, events.clone());
            }
            if engine.stands != Stands::NotReady {
                let endpoint = Endpoint {
                    instance,
                    authority: engine.authority.clone(),
                    fetches: engine.fetches,
                    role: engine.role,
                    place: engine.place.clone(),
                    draining: engine.stands == Stands::Ends,
                    origin: Origin::Discovered,
                };
                wanted.endpoints.insert(instance, (endpoint, engine.reports_itself));
            }
        }
        wanted
    }
}
