//! Engines that take requests, by instance: where they are, who said so, and whether they are to be sent anything.
//!
//! Who says so: the configuration (`fixed.rs`), a call (`calls/`), Kubernetes (`kubernetes/`). How busy they are, and whether they are there at
//! all, is asked of each (`load/`). Not here: what they have in GPU memory, and the choice among them (the router).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kv_core::id::InstanceId;
use kv_core::schedule::Role;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

pub(crate) mod address;
pub(crate) mod calls;
pub(crate) mod config;
#[cfg(feature = "kubernetes")]
pub(crate) mod events;
pub(crate) mod fixed;
#[cfg(feature = "kubernetes")]
pub(crate) mod kubernetes;
pub(crate) mod load;
pub(crate) mod models;
mod open;

use models::Models;
pub use open::OpenError;
pub(crate) use open::{Opened, open};

/// Who named an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Origin {
    /// The configuration.
    Configured,
    /// A call.
    Called,
    /// Kubernetes.
    Discovered,
}

impl Origin {
    /// All of them.
    pub(crate) const ALL: [Origin; 3] = [Origin::Configured, Origin::Called, Origin::Discovered];

    /// As lists and metrics show it.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Origin::Configured => "configured",
            Origin::Called => "called",
            Origin::Discovered => "discovered",
        }
    }
}

/// One engine that takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// The instance that it is.
    pub(crate) instance: InstanceId,
    /// `host:port`, without a scheme: what Envoy is told, and what is dialed.
    pub(crate) authority: String,
    /// Whether its engine links our client, and so can fetch from nodes.
    pub(crate) fetches: bool,
    /// What it does of a request.
    pub(crate) role: Role,
    /// Where it stands, `zone/rack/host`; empty: nobody said.
    pub(crate) place: String,
    /// Whether it is to be sent nothing more, while it ends what it has.
    pub(crate) draining: bool,
    /// Who named it.
    pub(crate) origin: Origin,
}

/// What was heard of an endpoint lately.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Standing {
    /// Addresses that its host has, as it was resolved last; empty before that.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Whether it is known to be gone or to fail; nobody is to be sent there.
    pub(crate) is_unwell: bool,
    /// What is wrong with it.
    pub(crate) problem: Option<String>,
    /// What it said last of its load, and when; none where it reports itself, or said nothing yet.
    pub(crate) load: Option<(Heard, Instant)>,
    /// Which models it serves, as it said last; none where it said nothing yet.
    pub(crate) models: Option<Arc<Models>>,
}

/// What an engine says of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Heard {
    /// Requests that are computed.
    pub(crate) running: u32,
    /// Requests that wait.
    pub(crate) waiting: u32,
    /// Prompt tokens of those that wait: as many requests as wait, each as long as its prompts are on average. A guess.
    pub(crate) queue_tokens: u64,
    /// Part of its KV memory that is taken, where it says so: 0 to 1.
    pub(crate) usage: Option<f64>,
    /// Tokens whose KV that memory can hold; 0 where it does not say.
    pub(crate) kv_tokens_max: u64,
}

impl Heard {
    /// Tokens whose KV it holds for what runs, as far as that is known.
    pub(crate) fn kv_tokens(&self) -> u64 {
        (self.kv_tokens_max as f64 * self.usage.unwrap_or_default()).round() as u64
    }
}

/// One that is known, as far as a choice needs it.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) endpoint: Arc<Endpoint>,
    /// Whether nothing speaks against sending it a request.
    pub(crate) is_open: bool,
    /// Which models it serves; none where it did not say.
    pub(crate) models: Option<Arc<Models>>,
}

#[derive(Debug)]
struct Entry {
    endpoint: Arc<Endpoint>,
    /// Whether it tells routers its load by itself.
    reports_itself: bool,
    standing: Standing,
    /// Told when a request failed there.
    doubts: Arc<Notify>,
}

/// All of them. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Endpoints {
    all: Arc<RwLock<BTreeMap<InstanceId, Entry>>>,
    /// Counts what was put and removed.
    changes: watch::Sender<u64>,
}

impl Endpoints {
    /// The endpoint that an instance is.
    #[must_use]
    pub(crate) fn get(&self, instance: InstanceId) -> Option<Arc<Endpoint>> {
        self.all.read().get(&instance).map(|entry| Arc::clone(&entry.endpoint))
    }

    /// The one at this address, as it was named or as it was resolved.
    #[must_use]
    pub(crate) fn at(&self, authority: &str) -> Option<Arc<Endpoint>> {
        let all = self.all.read();
        let named = all.values().find(|entry| entry.endpoint.authority == authority);
        let resolved = || {
            let address = authority.parse().ok()?;
            all.values().find(|entry| entry.standing.addresses.contains(&address))
        };
        named.or_else(resolved).map(|entry| Arc::clone(&entry.endpoint))
    }

    /// All, by ascending instance.
    #[must_use]
    pub(crate) fn list(&self) -> Vec<Arc<Endpoint>> {
        self.all.read().values().map(|entry| Arc::clone(&entry.endpoint)).collect()
    }

    /// How many are known.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.all.read().len()
    }

    /// Adds one, or replaces what was known of its instance.
    #[cfg(test)]
    pub(crate) fn put(&self, endpoint: Endpoint) {
        let reports_itself = self.reports_itself(endpoint.instance);
        self.put_that_reports(endpoint, reports_itself);
    }

    /// Likewise, of one that tells routers its load by itself, or does not.
    pub(crate) fn put_that_reports(&self, endpoint: Endpoint, reports_itself: bool) {
        let Ok(()) = self.put_where(endpoint, reports_itself, |_, _| Ok::<_, std::convert::Infallible>(()));
    }

    /// Forgets one.
    pub(crate) fn remove(&self, instance: InstanceId) -> Option<Arc<Endpoint>> {
        let removed = self.all.write().remove(&instance);
        self.changes.send_modify(|changes| *changes += 1);
        removed.map(|entry| entry.endpoint)
    }

    /// Changes one that is known, in one go: one that was removed meanwhile stays so, and what others changed meanwhile is kept. What it is then.
    pub(crate) fn update(
        &self,
        instance: InstanceId,
        change: impl FnOnce(&mut Endpoint),
    ) -> Option<Arc<Endpoint>> {
        let mut all = self.all.write();
        let entry = all.get_mut(&instance)?;
        let mut endpoint = Endpoint::clone(&entry.endpoint);
        change(&mut endpoint);
        if endpoint.authority != entry.endpoint.authority {
            entry.standing = Standing::default();
        }
        entry.endpoint = Arc::new(endpoint);
        let endpoint = Arc::clone(&entry.endpoint);
        drop(all);
        self.changes.send_modify(|changes| *changes += 1);
        Some(endpoint)
    }

    /// Adds one, or replaces it, if what is known of its instance may be replaced, in one go.
    pub(crate) fn put_where<E>(
        &self,
        endpoint: Endpoint,
        reports_itself: bool,
        may: impl FnOnce(Option<&Endpoint>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut all = self.all.write();
        may(all.get(&endpoint.instance).map(|entry| &*entry.endpoint), all.len())?;
        let (standing, doubts) = match all.remove(&endpoint.instance) {
            Some(entry) if entry.endpoint.authority == endpoint.authority => (entry.standing, entry.doubts),
            _ => Default::default(),
        };
        let instance = endpoint.instance;
        all.insert(instance, Entry { endpoint: Arc::new(endpoint), reports_itself, standing, doubts });
        drop(all);
        self.changes.send_modify(|changes| *changes += 1);
        Ok(())
    }

    /// Sends one nothing more; whether it is known.
    pub(crate) fn drain(&self, instance: InstanceId) -> bool {
        self.update(instance, |endpoint| endpoint.draining = true).is_some()
    }

    /// Where an instance can be dialed by number, as it was resolved last. What was given stays as it is in [`Endpoint::authority`].
    #[must_use]
    pub(crate) fn addresses(&self, instance: InstanceId) -> Vec<SocketAddr> {
        self.all.read().get(&instance).map(|entry| entry.standing.addresses.clone()).unwrap_or_default()
    }

    /// Whether nothing speaks against sending it a request. The router knows how busy it is.
    #[must_use]
    pub(crate) fn is_open(&self, instance: InstanceId) -> bool {
        self.all
            .read()
            .get(&instance)
            .is_some_and(|entry| !entry.endpoint.draining && !entry.standing.is_unwell)
    }

    /// All, by ascending instance, each with whether nothing speaks against sending it a request, and which models it serves.
    pub(crate) fn known(&self) -> Vec<Known> {
        let known = |entry: &Entry| Known {
            endpoint: Arc::clone(&entry.endpoint),
            is_open: !entry.endpoint.draining && !entry.standing.is_unwell,
            models: entry.standing.models.clone(),
        };
        self.all.read().values().map(known).collect()
    }

    /// Whether an engine serves a model of this name by its own list, which need not have it as it is: an SGLang's adapters are behind its model, and a request
    /// without a name is served by each.
    pub(crate) fn lists(&self, model: &str) -> bool {
        let lists =
            |entry: &Entry| entry.standing.models.as_ref().is_some_and(|models| models.may_serve(model));
        self.all.read().values().any(lists)
    }

    /// All names that engines list, each with the longest context that one has for it, where all say.
    pub(crate) fn models(&self) -> BTreeMap<String, Option<u32>> {
        let mut all: BTreeMap<String, Option<u32>> = BTreeMap::new();
        for models in self.all.read().values().filter_map(|entry| entry.standing.models.as_ref()) {
            for name in models.by_name.keys() {
                let context = models.context_tokens(name);
                all.entry(name.clone())
                    .and_modify(|known| *known = known.zip(context).map(|(one, other)| one.max(other)))
                    .or_insert(context);
            }
        }
        all
    }

    /// A request failed there: whoever looks after it asks at once how it is, and not when it is time to.
    pub(crate) fn doubt(&self, instance: InstanceId) {
        if let Some(doubts) = self.doubts(instance) {
            doubts.notify_one();
        }
    }

    /// Who is told of that.
    fn doubts(&self, instance: InstanceId) -> Option<Arc<Notify>> {
        self.all.read().get(&instance).map(|entry| Arc::clone(&entry.doubts))
    }

    /// What was heard of it lately.
    #[must_use]
    pub(crate) fn standing(&self, instance: InstanceId) -> Option<Standing> {
        self.all.read().get(&instance).map(|entry| entry.standing.clone())
    }

    /// Told whenever something is put or removed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn reports_itself(&self, instance: InstanceId) -> bool {
        self.all.read().get(&instance).is_some_and(|entry| entry.reports_itself)
    }

    /// Notes something of an instance that is still at this address.
    fn note(&self, instance: InstanceId, authority: &str, note: impl FnOnce(&mut Standing)) {
        let mut all = self.all.write();
        if let Some(entry) = all.get_mut(&instance).filter(|entry| entry.endpoint.authority == authority) {
            note(&mut entry.standing);
        }
    }
}

#[cfg(test)]
mod tests;
