//! Engines that Kubernetes knows: a watch that is begun again whenever it ends, and what it says as endpoints.
//!
//! What Kubernetes is called with is a library's (`kube`), and so are the watch, its bookmarks and what to do when the server has forgotten where
//! it was. Without a server what is known stays as it is: engines are asked themselves whether they are there. Not here: what an object says (`read.rs`),
//! which number an engine has (`number.rs`), and what all of them come to (`roster.rs`).

use std::fmt::Debug;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config, Resource, ResourceExt};
use kvfleet_router::Desk;
use prometheus::{IntCounter, IntGauge, Opts, Registry};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::config::{DiscoveredKind, KubernetesConfig};
use super::{Endpoints, events::Events};
use read::Found;
use roster::Roster;

mod number;
mod read;
mod roster;
#[cfg(test)]
mod tests;

/// Why Kubernetes is not asked.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is none.
    #[error(
        "doors.kubernetes.enabled is set, and no cluster is found ({problem}): run this in a Pod with a service account, set KUBECONFIG, set \
         doors.kubernetes.server to what `kubectl proxy` prints, or set doors.kubernetes.enabled to false"
    )]
    NoCluster {
        /// What was tried.
        problem: String,
    },
    /// There is one, and nobody can call it.
    #[error("the Kubernetes API server cannot be called: {0}")]
    Client(String),
}

/// What is counted of Kubernetes.
#[derive(Clone, Debug)]
pub(crate) struct DiscoveryMetrics {
    up: IntGauge,
    failures: IntCounter,
    problems: IntGauge,
}

impl DiscoveryMetrics {
    /// Registers all of them.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<DiscoveryMetrics> {
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let failures = IntCounter::with_opts(Opts::new(
            "kvfleet_doors_discovery_failures_total",
            "Times that Kubernetes could not be watched, or said something that cannot be read",
        ))?;
        registry.register(Box::new(failures.clone()))?;
        Ok(DiscoveryMetrics {
            up: gauge("kvfleet_doors_discovery_up", "1 while Kubernetes tells which engines there are")?,
            failures,
            problems: gauge(
                "kvfleet_doors_discovery_left_out",
                "Engines in Kubernetes that are left out, because something is wrong with how they are named",
            )?,
        })
    }
}

/// Begins to watch.
///
/// # Errors
/// [`KubernetesError`]: no cluster is known. One that does not answer is asked again and again.
pub(crate) async fn open(
    config: &KubernetesConfig,
    endpoints: &Endpoints,
    desk: &Desk,
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
    let roster = Roster::new(endpoints.clone(), Events::new(desk.clone()));
    let watching = Watching {
        config: config.clone(),
        namespace,
        roster,
        metrics,
        said: None,
        failing: Failing::default(),
        changes: endpoints.changes(),
    };
    let stop = stop.clone();
    match config.kind {
        DiscoveredKind::Single => {
            let labels = watcher::Config::default().labels(&config.selector);
            tokio::spawn(watching.run(client, labels, "pods", read::single, stop));
        }
        DiscoveredKind::EndpointSlices => {
            let labels = format!("kubernetes.io/service-name={}", config.service);
            let labels = watcher::Config::default().labels(&labels);
            tokio::spawn(watching.run(client, labels, "endpointslices", read::slice, stop));
        }
    }
    Ok(())
}

/// Longest between two attempts.
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// Between two attempts at first; each that fails doubles it.
const AGAIN_MIN: Duration = Duration::from_millis(200);

/// How long to wait behind something that failed. An event that cannot be read is one too, so it must not become long.
#[derive(Default)]
struct Again {
    failed: u32,
}

impl Iterator for Again {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = AGAIN_MIN * 2_u32.pow(self.failed);
        self.failed = (self.failed + 1).min(8);
        Some(wait.min(AGAIN_MAX))
    }
}

impl Backoff for Again {
    fn reset(&mut self) {
        self.failed = 0;
    }
}

/// Failures that go on for so long are no passing ones.
const PERSISTS: Duration = Duration::from_secs(30);

/// Longest between two failures of the same trouble: a call that nobody answers takes half of it.
const QUIET: Duration = Duration::from_secs(75);

/// Between two looks at engines that were left out, and at how long nothing failed.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Since when the watch fails, and whether it ever told anything. A watch that ends is begun again by the library, and goes on without a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Failing {
    /// The first failure and the last, of the trouble that there is.
    since: Option<(Instant, Instant)>,
    has_listed: bool,
}

impl Failing {
    /// It failed; whether it does for so long that nothing is known any more.
    fn failed(&mut self, now: Instant) -> bool {
        let (first, last) = self.since.unwrap_or((now, now));
        let first = if now.duration_since(last) > QUIET { now } else { first };
        self.since = Some((first, now));
        !self.has_listed || now.duration_since(first) >= PERSISTS
    }

    /// It told something.
    fn told(&mut self) {
        *self = Failing { since: None, has_listed: true };
    }

    /// Whether it goes on again, because nothing failed for a while.
    fn is_over(&mut self, now: Instant) -> bool {
        let is_over = self.has_listed && self.since.is_some_and(|(_, last)| now.duration_since(last) > QUIET);
        if is_over {
            self.since = None;
        }
        is_over
    }
}

/// How following a watch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follows {
    /// Nothing more is to be followed.
    ToTheEnd,
    /// All that there is must be listed again.
    FromTheList,
}

/// Whether a server forgot where the watch was and said so by the status of its answer. The library lists again where it is an event that says so,
/// and asks from there for ever where it is the status.
fn is_forgotten(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

struct Watching {
    config: KubernetesConfig,
    namespace: String,
    roster: Roster,
    metrics: DiscoveryMetrics,
    /// What was wrong last; each thing is said once.
    said: Option<String>,
    failing: Failing,
    /// Told when endpoints change, whoever changed them: one that was left out for a number may have it then.
    changes: watch::Receiver<u64>,
}

impl Watching {
    async fn run<K>(
        mut self,
        client: Client,
        labels: watcher::Config,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<Found>,
        stop: CancellationToken,
    ) where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let api: Api<K> = match self.namespace.as_str() {
            "*" => Api::all(client),
            namespace => Api::namespaced(client, namespace),
        };
        let mut again = Again::default();
        loop {
            let (begun, is_over) = (Instant::now(), stop.clone());
            let events = watcher::watcher(api.clone(), labels.clone()).backoff(Again::default());
            if self.follow(events, kind, read, is_over).await == Follows::ToTheEnd {
                return;
            }
            if begun.elapsed() > QUIET {
                again.reset();
            }
            let wait = again.next().unwrap_or(AGAIN_MAX);
            if stop.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
        }
    }

    async fn follow<K: ResourceExt>(
        &mut self,
        events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<Found>,
        stop: CancellationToken,
    ) -> Follows {
        let mut events = std::pin::pin!(events);
        let mut looks = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Follows::ToTheEnd,
                event = events.next() => match event {
                    Some(Ok(event)) => self.take(event, kind, read),
                    Some(Err(error)) => {
                        self.failed(&error, kind);
                        if is_forgotten(&error) {
                            return Follows::FromTheList;
                        }
                    }
                    None => return Follows::ToTheEnd,
                },
                Ok(()) = self.changes.changed() => self.again(),
                _ = looks.tick() => {
                    self.again();
                    if self.failing.is_over(Instant::now()) {
                        self.tells(kind);
                    }
                }
            }
        }
    }

    /// Looks again at engines that were left out.
    fn again(&mut self) {
        if self.metrics.problems.get() > 0 {
            self.settle();
        }
    }

    fn settle(&mut self) {
        let problems = self.roster.settle();
        self.metrics.problems.set(i64::try_from(problems).unwrap_or(i64::MAX));
    }

    /// Kubernetes tells what there is.
    fn tells(&mut self, kind: &'static str) {
        if self.said.take().is_some() || self.metrics.up.get() == 0 {
            tracing::info!(kind, namespace = self.namespace, "Kubernetes tells which engines there are");
        }
        self.metrics.up.set(1);
    }

    fn take<K: ResourceExt>(
        &mut self,
        event: Event<K>,
        kind: &'static str,
        read: fn(&K, &KubernetesConfig) -> Vec<Found>,
    ) {
        let key = |object: &K| format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        let is_begun = matches!(event, Event::Init | Event::InitApply(_));
        match event {
            Event::Init => self.roster.begin(),
            Event::InitApply(object) => self.roster.begun_with(key(&object), read(&object, &self.config)),
            Event::InitDone => self.roster.done(),
            Event::Apply(object) => self.roster.apply(key(&object), read(&object, &self.config)),
            Event::Delete(object) => self.roster.delete(&key(&object)),
        }
        if !is_begun {
            self.failing.told();
            self.settle();
            self.tells(kind);
        }
    }

    fn failed(&mut self, error: &watcher::Error, kind: &'static str) {
        self.metrics.failures.inc();
        // A watch ends now and then, and is begun again from where it was.
        if self.failing.failed(Instant::now()) {
            self.metrics.up.set(0);
        }
        let text = words(error, kind, &self.namespace);
        if self.said.as_ref() != Some(&text) {
            tracing::warn!(error = text, "Kubernetes does not tell which engines there are; asking again");
            self.said = Some(text);
        }
    }
}

/// What is wrong, and what to do.
fn words(error: &watcher::Error, kind: &str, namespace: &str) -> String {
    let status = match error {
        watcher::Error::WatchError(status) => Some(status),
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        _ => None,
    };
    let Some(status) = status else { return whole(error) };
    let said = &status.message;
    match status.code {
        401 => format!(
            "the API server does not know who asks ({said}): is the token of the service account mounted?"
        ),
        403 => format!(
            "the API server forbids it ({said}): bind a Role with the verbs get, list and watch on {kind} in namespace {namespace} to the router's \
             service account"
        ),
        404 => format!(
            "the API server has no {kind} in namespace {namespace} ({said}): is doors.kubernetes.namespace right?"
        ),
        410 => {
            format!("the API server has forgotten where the watch was ({said}); all {kind} are listed again")
        }
        code => format!("the API server answers {code} ({said})"),
    }
}

/// An error with what it came from.
fn whole(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let mut words: Vec<String> = Vec::new();
    for cause in causes {
        let text = cause.to_string();
        // Some errors say their cause too.
        if !words.iter().any(|said| said.ends_with(&text)) {
            words.push(text);
        }
    }
    words.join(": ")
}
