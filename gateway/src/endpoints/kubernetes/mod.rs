//! Discovers engines in Kubernetes: watches objects, restarts ended watches, and maintains
//! endpoints.
//!
//! The `kube` library implements the calls, the watch, bookmarks and relisting. While the API
//! server is unreachable, the known engines stay, since probers check them anyway. Not here:
//! parsing objects (`objects.rs`), instance numbers (`instance_number.rs`), and combining objects
//! (`discovered.rs`).

use std::fmt::Debug;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config, Resource, ResourceExt};
use kvfleet_router::RouterHandle;
use prometheus::{IntCounter, IntGauge, Opts, Registry};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::config::{DiscoveredKind, KubernetesConfig};
use super::{EndpointRegistry, engine_events::EngineEvents};
use discovered::DiscoveredEndpoints;
use objects::DiscoveredEngine;

mod discovered;
mod instance_number;
mod objects;
#[cfg(test)]
mod tests;

/// Why discovery did not start.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// No cluster is configured.
    #[error(
        "gateway.kubernetes.enabled is set, but no cluster was found ({problem}): run this in a Pod with a \
         service account, set KUBECONFIG, set gateway.kubernetes.server to the URL that `kubectl proxy` \
         prints, or set gateway.kubernetes.enabled to false"
    )]
    NoCluster {
        /// Errors of all attempts to find a configuration.
        problem: String,
    },
    /// The client cannot be built from the configuration.
    #[error("the Kubernetes API server cannot be called: {0}")]
    Client(String),
}

/// Metrics of discovery.
#[derive(Clone, Debug)]
pub(crate) struct DiscoveryMetrics {
    up: IntGauge,
    failures: IntCounter,
    skipped: IntGauge,
}

impl DiscoveryMetrics {
    /// Registers all metrics.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<DiscoveryMetrics> {
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let failures = IntCounter::with_opts(Opts::new(
            "kvfleet_gateway_discovery_failures_total",
            "Failed watches and unreadable events of Kubernetes.",
        ))?;
        registry.register(Box::new(failures.clone()))?;
        Ok(DiscoveryMetrics {
            up: gauge("kvfleet_gateway_discovery_up", "1 while the Kubernetes watch works, else 0.")?,
            failures,
            skipped: gauge(
                "kvfleet_gateway_discovery_skipped",
                "Engines in Kubernetes that are skipped because their object is invalid or conflicts with another one.",
            )?,
        })
    }
}

/// Starts watching.
///
/// # Errors
/// [`KubernetesError`]: no cluster is configured. An unreachable one is retried forever.
pub(crate) async fn start(
    config: &KubernetesConfig,
    endpoints: &EndpointRegistry,
    router: &RouterHandle,
    metrics: DiscoveryMetrics,
    stop: &CancellationToken,
) -> Result<(), KubernetesError> {
    let cluster = if config.server.is_empty() {
        let found = Config::infer().await;
        found.map_err(|error| KubernetesError::NoCluster { problem: error.to_string() })?
    } else {
        let server = config.server.trim_end_matches('/').parse();
        Config::new(server.map_err(|error| KubernetesError::Client(format!("{}: {error}", config.server)))?)
    };
    let namespace = match config.namespace.as_str() {
        "" => cluster.default_namespace.clone(),
        given => given.to_owned(),
    };
    let client = Client::try_from(cluster).map_err(|error| KubernetesError::Client(error.to_string()))?;
    let discovered = DiscoveredEndpoints::new(endpoints.clone(), EngineEvents::new(router.clone()));
    let watcher = KubernetesWatcher {
        config: config.clone(),
        namespace,
        discovered,
        metrics,
        last_problem: None,
        outage: OutageTracker::default(),
        changes: endpoints.changes(),
    };
    let stop = stop.clone();
    match config.kind {
        DiscoveredKind::Pods => {
            let labels = watcher::Config::default().labels(&config.selector);
            tokio::spawn(watcher.run(client, labels, "pods", objects::read_pod, stop));
        }
        DiscoveredKind::EndpointSlices => {
            let labels = format!("kubernetes.io/service-name={}", config.service);
            let labels = watcher::Config::default().labels(&labels);
            tokio::spawn(watcher.run(client, labels, "endpointslices", objects::read_slice, stop));
        }
    }
    Ok(())
}

/// Longest delay between two attempts.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// First delay between two attempts; each failure doubles it.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);

/// Backoff after failures. An unreadable event also counts as a failure, so the delay must stay
/// short.
#[derive(Default)]
struct RetryBackoff {
    failures: u32,
}

impl Iterator for RetryBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = RETRY_DELAY_MIN * 2_u32.pow(self.failures);
        self.failures = (self.failures + 1).min(8);
        Some(wait.min(RETRY_DELAY_MAX))
    }
}

impl Backoff for RetryBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Failures that last this long are an outage.
const OUTAGE_MIN: Duration = Duration::from_secs(30);

/// Longest time between two failures of the same outage; a single call may time out after half of
/// it.
const QUIET_TIME: Duration = Duration::from_secs(75);

/// Interval of retrying skipped engines, and of checking whether an outage has passed.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Tracks failures of the watch. The library restarts ended watches silently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OutageTracker {
    /// First and last failure of the current outage.
    outage: Option<(Instant, Instant)>,
    has_listed: bool,
}

impl OutageTracker {
    /// Records a failure. Returns whether the outage is long enough that the state is unknown.
    fn record_failure(&mut self, now: Instant) -> bool {
        let (first, last) = self.outage.unwrap_or((now, now));
        let first = if now.duration_since(last) > QUIET_TIME { now } else { first };
        self.outage = Some((first, now));
        !self.has_listed || now.duration_since(first) >= OUTAGE_MIN
    }

    /// Records an event, which ends an outage.
    fn record_success(&mut self) {
        *self = OutageTracker { outage: None, has_listed: true };
    }

    /// Whether an outage has just passed, because no failure occurred for a while.
    fn has_passed(&mut self, now: Instant) -> bool {
        let is_over =
            self.has_listed && self.outage.is_some_and(|(_, last)| now.duration_since(last) > QUIET_TIME);
        if is_over {
            self.outage = None;
        }
        is_over
    }
}

/// How a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchEnd {
    /// It was stopped.
    Stopped,
    /// All objects must be listed again.
    Relist,
}

/// Whether the server answered a watch with status 410. The library relists after such an event
/// inside a watch, but retries forever if the status comes as the answer.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

struct KubernetesWatcher {
    config: KubernetesConfig,
    namespace: String,
    discovered: DiscoveredEndpoints,
    metrics: DiscoveryMetrics,
    /// Last reported problem; a change is logged once.
    last_problem: Option<String>,
    outage: OutageTracker,
    /// Notifies of registry changes, after which a skipped engine's instance number may be free.
    changes: watch::Receiver<u64>,
}

impl KubernetesWatcher {
    async fn run<K>(
        mut self,
        client: Client,
        labels: watcher::Config,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<DiscoveredEngine>,
        stop: CancellationToken,
    ) where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let api: Api<K> = match self.namespace.as_str() {
            "*" => Api::all(client),
            namespace => Api::namespaced(client, namespace),
        };
        let mut backoff = RetryBackoff::default();
        loop {
            let (begun, stopped) = (Instant::now(), stop.clone());
            let events = watcher::watcher(api.clone(), labels.clone()).backoff(RetryBackoff::default());
            if self.follow(events, kind, read, stopped).await == WatchEnd::Stopped {
                return;
            }
            if begun.elapsed() > QUIET_TIME {
                backoff.reset();
            }
            let wait = backoff.next().unwrap_or(RETRY_DELAY_MAX);
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
        }
    }

    async fn follow<K: ResourceExt>(
        &mut self,
        events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<DiscoveredEngine>,
        stop: CancellationToken,
    ) -> WatchEnd {
        let mut events = std::pin::pin!(events);
        let mut checks = tokio::time::interval(CHECK_INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return WatchEnd::Stopped,
                event = events.next() => match event {
                    Some(Ok(event)) => self.handle_event(event, kind, read),
                    Some(Err(error)) => {
                        self.handle_error(&error, kind);
                        if is_expired(&error) {
                            return WatchEnd::Relist;
                        }
                    }
                    None => return WatchEnd::Stopped,
                },
                Ok(()) = self.changes.changed() => self.retry_skipped(),
                _ = checks.tick() => {
                    self.retry_skipped();
                    if self.outage.has_passed(Instant::now()) {
                        self.mark_up(kind);
                    }
                }
            }
        }
    }

    /// Retries engines that were skipped.
    fn retry_skipped(&mut self) {
        if self.metrics.skipped.get() > 0 {
            self.reconcile();
        }
    }

    fn reconcile(&mut self) {
        let problems = self.discovered.reconcile();
        self.metrics.skipped.set(i64::try_from(problems).unwrap_or(i64::MAX));
    }

    /// Marks the watch as working.
    fn mark_up(&mut self, kind: &'static str) {
        if self.last_problem.take().is_some() || self.metrics.up.get() == 0 {
            tracing::info!(kind, namespace = self.namespace, "the Kubernetes watch works");
        }
        self.metrics.up.set(1);
    }

    fn handle_event<K: ResourceExt>(
        &mut self,
        event: Event<K>,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<DiscoveredEngine>,
    ) {
        let key = |object: &K| format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        let is_partial_list = matches!(event, Event::Init | Event::InitApply(_));
        match event {
            Event::Init => self.discovered.start_list(),
            Event::InitApply(object) => {
                self.discovered.add_to_list(key(&object), read(&object, &self.config));
            }
            Event::InitDone => self.discovered.finish_list(),
            Event::Apply(object) => self.discovered.apply(key(&object), read(&object, &self.config)),
            Event::Delete(object) => self.discovered.delete(&key(&object)),
        }
        if !is_partial_list {
            self.outage.record_success();
            self.reconcile();
            self.mark_up(kind);
        }
    }

    fn handle_error(&mut self, error: &watcher::Error, kind: &'static str) {
        self.metrics.failures.inc();
        // Watches end now and then, and resume at the last version.
        if self.outage.record_failure(Instant::now()) {
            self.metrics.up.set(0);
        }
        let text = describe_error(error, kind, &self.namespace);
        if self.last_problem.as_ref() != Some(&text) {
            tracing::warn!(error = text, "the Kubernetes watch failed; retrying");
            self.last_problem = Some(text);
        }
    }
}

/// Text of an error, with advice.
fn describe_error(error: &watcher::Error, kind: &str, namespace: &str) -> String {
    let status = match error {
        watcher::Error::WatchError(status) => Some(status),
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        _ => None,
    };
    let Some(status) = status else { return error_chain(error) };
    let said = &status.message;
    match status.code {
        401 => format!(
            "the API server rejects the credentials ({said}): is the token of the service account mounted?"
        ),
        403 => format!(
            "the API server forbids the request ({said}): bind a Role with the verbs get, list and watch on \
             {kind} in namespace {namespace} to the router's service account"
        ),
        404 => format!(
            "the API server has no {kind} in namespace {namespace} ({said}): is gateway.kubernetes.namespace right?"
        ),
        410 => {
            format!(
                "the API server no longer has this version of the watch ({said}); listing all {kind} again"
            )
        }
        code => format!("the API server answered {code} ({said})"),
    }
}

/// Text of an error with its chain of causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let mut words: Vec<String> = Vec::new();
    for cause in causes {
        let text = cause.to_string();
        // Some errors already include their cause.
        if !words.iter().any(|said| said.ends_with(&text)) {
            words.push(text);
        }
    }
    words.join(": ")
}
