//! Probes every engine for load and health, and reports the load to the router for engines that do
//! not report themselves.
//!
//! Each endpoint has a task (`prober.rs`). Every router probes by itself, because each has its own
//! gateway and decides by its own data. Not here: the choice, and engines that report through the
//! kvfleet client.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kv_core::id::InstanceId;
use kvfleet_router::RouterHandle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::config::LoadConfig;
use super::{Endpoint, EndpointRegistry};
use crate::upstream::EngineAccess;
use metrics::EndpointMetrics;
use prober::{EndpointProber, ProbeContext};
use sample::ProcessIdentity;

pub(crate) mod http_probe;
pub(crate) mod metrics;
mod models;
mod prober;
mod prometheus_text;
pub(crate) mod sample;
mod server_info;

/// Most removed instances with a remembered process identity.
const REMEMBERED_MAX: usize = 4_096;

/// Runs a prober for each registered endpoint.
pub(crate) struct ProberPool {
    context: ProbeContext,
    metrics: EndpointMetrics,
    tasks: BTreeMap<InstanceId, ProberTask>,
    previous: BTreeMap<InstanceId, ProcessIdentity>,
}

/// What a prober probes. A prober of an endpoint that differs in it is replaced.
#[derive(PartialEq, Eq)]
struct ProbeTarget {
    url: String,
    /// Whether the engine reports its own load to the router.
    reports_itself: bool,
}

/// The prober task of one endpoint.
struct ProberTask {
    target: ProbeTarget,
    stop: CancellationToken,
    task: JoinHandle<ProcessIdentity>,
}

impl ProberPool {
    pub(crate) fn new(
        config: &LoadConfig,
        endpoints: &EndpointRegistry,
        router: RouterHandle,
        access: EngineAccess,
        metrics: EndpointMetrics,
    ) -> ProberPool {
        let (config, endpoints) = (config.clone(), endpoints.clone());
        let context = ProbeContext {
            config,
            access,
            orders_by_priority: false,
            endpoints,
            router,
            last_sequence: Arc::new(AtomicU64::new(0)),
        };
        ProberPool { context, metrics, tasks: BTreeMap::new(), previous: BTreeMap::new() }
    }

    /// Sets whether engines order waiting requests by priority.
    pub(crate) fn with_priority_order(mut self, is_ordered: bool) -> ProberPool {
        self.context.orders_by_priority = is_ordered;
        self
    }

    /// Runs until stopped.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut changes = self.context.endpoints.changes();
        loop {
            changes.mark_unchanged();
            self.reconcile().await;
            match stop.run_until_cancelled(changes.changed()).await {
                Some(Ok(())) => {}
                Some(Err(_)) | None => break,
            }
        }
        for (_, kept) in std::mem::take(&mut self.tasks) {
            kept.stop.cancel();
            let _ = kept.task.await; // the task ends after the cancellation
        }
    }

    /// Stops probers of changed and removed endpoints, and starts those of new ones.
    async fn reconcile(&mut self) {
        let endpoints = self.context.endpoints.clone();
        let target = |instance| {
            let url = endpoints.get(instance)?.url();
            Some(ProbeTarget { url, reports_itself: endpoints.reports_itself(instance) })
        };
        let obsolete: Vec<_> = self
            .tasks
            .iter()
            .filter(|(instance, kept)| target(**instance).as_ref() != Some(&kept.target))
            .map(|(instance, _)| *instance)
            .collect();
        for instance in obsolete {
            self.stop(instance).await;
        }
        for endpoint in endpoints.list() {
            let instance = endpoint.instance;
            if let Some(target) = target(instance).filter(|_| !self.tasks.contains_key(&instance)) {
                self.start(&endpoint, target);
            }
        }
        self.metrics.count_endpoints(&endpoints);
    }

    fn start(&mut self, endpoint: &Endpoint, target: ProbeTarget) {
        let instance = endpoint.instance;
        let process =
            self.previous.remove(&instance).map_or_else(ProcessIdentity::default, ProcessIdentity::successor);
        let prober = EndpointProber::new(
            self.context.clone(),
            endpoint,
            target.reports_itself,
            process,
            self.metrics.instance(instance),
        );
        let stop = CancellationToken::new();
        let task = tokio::spawn(prober.run(stop.clone()));
        self.tasks.insert(instance, ProberTask { target, stop, task });
    }

    /// Stops a prober and waits for its end, so that its last report precedes the first one of its
    /// successor.
    async fn stop(&mut self, instance: InstanceId) {
        let Some(kept) = self.tasks.remove(&instance) else { return };
        kept.stop.cancel();
        if let Ok(life) = kept.task.await {
            if self.previous.len() >= REMEMBERED_MAX {
                self.previous.pop_first();
            }
            self.previous.insert(instance, life);
        }
    }
}

impl Drop for ProberPool {
    fn drop(&mut self) {
        self.tasks.values().for_each(|kept| kept.stop.cancel());
    }
}

#[cfg(test)]
mod tests;
