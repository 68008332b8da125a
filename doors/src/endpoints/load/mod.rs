//! Asks every engine for its load and whether it is well, and tells the router of those that do not report themselves.
//!
//! A task for each engine (`care.rs`), as many as there are endpoints. Every router asks for itself, because each has its own doors and chooses
//! by what it heard. Not here: the choice, and engines that link our client and report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kv_core::id::InstanceId;
use kvfleet_router::Desk;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Endpoints;
use super::config::LoadConfig;
use care::{Care, Means};
use metrics::EndpointMetrics;
use reading::Life;

pub(crate) mod ask;
mod care;
mod info;
pub(crate) mod metrics;
mod models;
pub(crate) mod reading;
mod text;

/// Instances that are gone, of which is remembered as which process they were known.
const GONE_MAX: usize = 4_096;

/// Keeps a task for each endpoint that is known.
pub(crate) struct Keeper {
    means: Means,
    metrics: EndpointMetrics,
    tasks: BTreeMap<InstanceId, Kept>,
    gone: BTreeMap<InstanceId, Life>,
}

/// The task of one endpoint, and what it is for.
struct Kept {
    key: (String, bool),
    stop: CancellationToken,
    task: JoinHandle<Life>,
}

impl Keeper {
    pub(crate) fn new(
        config: &LoadConfig,
        endpoints: &Endpoints,
        desk: Desk,
        metrics: EndpointMetrics,
    ) -> Keeper {
        let (config, endpoints) = (config.clone(), endpoints.clone());
        let means =
            Means { config, keeps_order: false, endpoints, desk, reports: Arc::new(AtomicU64::new(0)) };
        Keeper { means, metrics, tasks: BTreeMap::new(), gone: BTreeMap::new() }
    }

    /// The same of engines that begin what waits by priority, or not.
    pub(crate) fn of_engines_that_keep_order(mut self, keeps_order: bool) -> Keeper {
        self.means.keeps_order = keeps_order;
        self
    }

    /// Runs until stopped.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut changes = self.means.endpoints.changes();
        loop {
            changes.mark_unchanged();
            self.settle().await;
            match stop.run_until_cancelled(changes.changed()).await {
                Some(Ok(())) => {}
                Some(Err(_)) | None => break,
            }
        }
        for (_, kept) in std::mem::take(&mut self.tasks) {
            kept.stop.cancel();
            let _ = kept.task.await; // it ends by itself
        }
    }

    /// Ends the tasks of endpoints that are gone, and begins those of new ones.
    async fn settle(&mut self) {
        let endpoints = self.means.endpoints.clone();
        let key = |instance| {
            let endpoint = endpoints.get(instance)?;
            Some((endpoint.authority.clone(), endpoints.reports_itself(instance)))
        };
        let over: Vec<_> = self
            .tasks
            .iter()
            .filter(|(instance, kept)| key(**instance).as_ref() != Some(&kept.key))
            .map(|(instance, _)| *instance)
            .collect();
        for instance in over {
            self.end(instance).await;
        }
        for endpoint in endpoints.list() {
            let instance = endpoint.instance;
            if let Some(key) = key(instance).filter(|_| !self.tasks.contains_key(&instance)) {
                self.begin(instance, key);
            }
        }
        self.metrics.known(&endpoints);
    }

    fn begin(&mut self, instance: InstanceId, key: (String, bool)) {
        let life = self.gone.remove(&instance).map_or_else(Life::default, Life::next);
        let (authority, reports_itself) = key.clone();
        let what = (instance, authority, reports_itself);
        let care = Care::new(self.means.clone(), what, life, self.metrics.of(instance));
        let stop = CancellationToken::new();
        let task = tokio::spawn(care.run(stop.clone()));
        self.tasks.insert(instance, Kept { key, stop, task });
    }

    /// Ends a task, and waits for it: its last report must not come after the first of the next.
    async fn end(&mut self, instance: InstanceId) {
        let Some(kept) = self.tasks.remove(&instance) else { return };
        kept.stop.cancel();
        if let Ok(life) = kept.task.await {
            if self.gone.len() >= GONE_MAX {
                self.gone.pop_first();
            }
            self.gone.insert(instance, life);
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.tasks.values().for_each(|kept| kept.stop.cancel());
    }
}

#[cfg(test)]
mod tests;
