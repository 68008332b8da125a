//! Prober of one engine: asks for load, health, models and addresses, and reports to the router.
//!
//! A refused connection makes the engine unavailable at once; other failures do so after several in
//! a row. Not here: the set of engines (`mod.rs`), and the meaning of metrics (`sample.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use kvfleet_router::RouterHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::http_probe::{ProbeClient, ProbeError};
use super::metrics::InstanceMetrics;
use super::models::{self, ModelListError};
use super::sample::{LoadParseError, LoadSample, MetricsDialect, ProcessIdentity, parse};
use super::server_info;
use crate::endpoints::address::resolve;
use crate::endpoints::config::LoadConfig;
use crate::endpoints::models::ServedModels;
use crate::endpoints::{Endpoint, EndpointRegistry};
use crate::upstream::EngineAccess;

/// Longest interval between probes of a failing engine.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Shortest interval between probe rounds that failed requests trigger. An engine that fails every
/// request should not be flooded with probes.
const TRIGGERED_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// State that all probers share.
#[derive(Clone)]
pub(super) struct ProbeContext {
    pub(super) config: LoadConfig,
    pub(super) access: EngineAccess,
    /// Whether engines order waiting requests by priority.
    pub(super) orders_by_priority: bool,
    pub(super) endpoints: EndpointRegistry,
    pub(super) router: RouterHandle,
    /// Sequence number of the last report, shared by all instances.
    pub(super) last_sequence: Arc<AtomicU64>,
}

/// Prober of one engine.
pub(super) struct EndpointProber {
    pub(super) context: ProbeContext,
    pub(super) instance: InstanceId,
    pub(super) authority: String,
    pub(super) reports_itself: bool,
    pub(super) process: ProcessIdentity,
    pub(super) metrics: InstanceMetrics,
    client: ProbeClient,
    failures: FailureCounts,
    /// Token latency sum and count of the previous sample.
    last_token_latency: Option<[f64; 2]>,
    /// Start time of the engine process that was already asked for its events.
    info_from_start_us: Option<u64>,
    /// Time of the next model list request, and the problem of the last one.
    next_models_at: Instant,
    models_problem: Option<String>,
    /// Whether its events are followed because of its own answer.
    is_followed: bool,
    /// Whether the router was told that the engine left.
    has_reported_leaving: bool,
    /// Last reported problem; a change is logged once.
    last_problem: Option<String>,
}

/// Failures in a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct FailureCounts {
    load: u32,
    health: u32,
    is_refused: bool,
}

impl FailureCounts {
    fn any(&self) -> bool {
        self.is_refused || self.load > 0 || self.health > 0
    }

    fn exceed(&self, most: u32) -> bool {
        self.is_refused || self.load >= most || self.health >= most
    }
}

/// Why the load is unknown.
#[derive(Debug, thiserror::Error)]
enum LoadProbeError {
    #[error(transparent)]
    Ask(#[from] ProbeError),
    #[error("the load of {authority} was rejected: {error}")]
    Reading { authority: String, error: LoadParseError },
}

impl LoadProbeError {
    fn label(&self) -> &'static str {
        match self {
            LoadProbeError::Ask(error) => error.label(),
            LoadProbeError::Reading { error: LoadParseError::Implausible { .. }, .. } => "nonsense",
            LoadProbeError::Reading { .. } => "malformed",
        }
    }
}

/// Why the models are unknown.
#[derive(Debug, thiserror::Error)]
enum ModelsProbeError {
    #[error(transparent)]
    Ask(#[from] ProbeError),
    #[error(transparent)]
    Models(#[from] ModelListError),
}

impl ModelsProbeError {
    fn label(&self) -> &'static str {
        match self {
            ModelsProbeError::Ask(error) => error.label(),
            ModelsProbeError::Models(error) => error.label(),
        }
    }
}

impl EndpointProber {
    pub(super) fn new(
        context: ProbeContext,
        endpoint: &Endpoint,
        reports_itself: bool,
        process: ProcessIdentity,
        metrics: InstanceMetrics,
    ) -> EndpointProber {
        let client = ProbeClient::new(endpoint, context.access.clone(), context.config.timeout());
        let (instance, authority) = (endpoint.instance, endpoint.authority.clone());
        EndpointProber {
            context,
            instance,
            authority,
            reports_itself,
            process,
            metrics,
            client,
            failures: FailureCounts::default(),
            last_token_latency: None,
            info_from_start_us: None,
            next_models_at: Instant::now(),
            models_problem: None,
            is_followed: false,
            has_reported_leaving: false,
            last_problem: None,
        }
    }

    /// Probes until stopped, and returns the engine's process identity.
    pub(super) async fn run(mut self, stop: CancellationToken) -> ProcessIdentity {
        let rounds = async {
            let (mut health_at, mut resolve_at) = (Instant::now(), Instant::now());
            loop {
                let began = Instant::now();
                let config = &self.context.config;
                let [asks_health, resolves] = [&mut health_at, &mut resolve_at].map(|at| *at <= began);
                // Retry a failed health check in the next round: a single connection may have
                // ended, or the whole engine.
                let asks_health = asks_health || self.failures.health > 0;
                if asks_health {
                    health_at = began + config.health_interval();
                }
                if resolves {
                    resolve_at = began + config.resolve_interval();
                }
                let every = config.load_interval();
                self.probe_round(asks_health, resolves).await;
                let failed = self.failures.load.max(self.failures.health).min(8);
                let interval = (every * 2_u32.pow(failed)).min(RETRY_INTERVAL_MAX.max(every));
                if tokio::time::timeout_at(began + interval, self.probe_requested()).await.is_ok() {
                    tokio::time::sleep_until(began + TRIGGERED_INTERVAL_MIN).await;
                    health_at = Instant::now();
                }
            }
        };
        let _ = stop.run_until_cancelled(rounds).await; // stopped as requested
        self.report_leaving();
        self.unfollow();
        self.process
    }

    /// Completes when a failed request asks for a probe.
    async fn probe_requested(&self) {
        match self.context.endpoints.probe_trigger(self.instance) {
            Some(doubts) => doubts.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Sends all due probes at once, and evaluates the answers.
    async fn probe_round(&mut self, asks_health: bool, resolves: bool) {
        let health = async { if asks_health { Some(self.probe_health().await) } else { None } };
        let load = async { if self.reports_itself { None } else { Some(self.probe_load().await) } };
        let addresses = async { if resolves { Some(self.resolve().await) } else { None } };
        let models = async { if self.models_due() { Some(self.probe_models().await) } else { None } };
        let (health, load, addresses, models) = tokio::join!(health, load, addresses, models);
        let mut problem = None;
        match addresses {
            Some(Ok(found)) => self.update_status(|standing| standing.addresses = found),
            Some(Err(error)) => problem = Some(error),
            None => {}
        }
        if let Some(health) = health {
            self.failures.health = if health.is_err() { self.failures.health + 1 } else { 0 };
            if load.is_none() {
                self.failures.is_refused = matches!(health, Err(ProbeError::Refused { .. }));
            }
            problem = health.err().map(|error| error.to_string()).or(problem);
        }
        let sample = load.and_then(|load| self.accept_load(load, &mut problem));
        if let Some(models) = models {
            self.accept_models(models);
        }
        problem = problem.or_else(|| self.models_problem.clone());
        if let Some(reading) = &sample
            && reading.dialect == MetricsDialect::Sglang
            && self.context.config.finds_events
            && asks_health
            && self.info_from_start_us != Some(self.process.started_us())
        {
            let found = self.find_events().await;
            problem = problem.or(found.err());
        }
        self.finish_round(sample, problem);
    }

    /// Whether a model list request is due.
    fn models_due(&self) -> bool {
        self.context.config.models_interval().is_some() && self.next_models_at <= Instant::now()
    }

    async fn probe_models(&self) -> Result<ServedModels, ModelsProbeError> {
        let body = self.client.get("/v1/models").await?;
        Ok(models::parse(&body, &self.authority)?)
    }

    /// Applies a model list. An invalid answer keeps the previous list.
    fn accept_models(&mut self, answer: Result<ServedModels, ModelsProbeError>) {
        self.metrics.count_model_probe(answer.as_ref().map_or_else(ModelsProbeError::label, |_| "ok"));
        // Ask an unreachable engine again as soon as it is back, since it may then be another one.
        let is_away = matches!(&answer, Err(ModelsProbeError::Ask(error)) if error.is_unreachable());
        if let Some(every) = self.context.config.models_interval().filter(|_| !is_away) {
            self.next_models_at = Instant::now() + every;
        }
        self.models_problem = match answer {
            Ok(models) => {
                self.metrics.models.set(i64::try_from(models.by_name.len()).unwrap_or(i64::MAX));
                let models = Arc::new(models);
                self.update_status(|standing| standing.models = Some(models));
                None
            }
            // The engine does not provide a list. Engines with API keys require one for this path,
            // but not for /metrics.
            Err(ModelsProbeError::Ask(ProbeError::Status { status: 401 | 403 | 404 | 405, .. })) => None,
            // The problem is already reported for its load or health.
            Err(ModelsProbeError::Ask(_)) if is_away => self.models_problem.take(),
            Err(error) => Some(error.to_string()),
        };
    }

    /// Asks an engine once per process for the address of its events, and follows them, unless
    /// another source configured them.
    async fn find_events(&mut self) -> Result<(), String> {
        if !self.is_followed && self.context.router.follows(self.instance.0) {
            return Ok(());
        }
        let body = match self.client.get("/server_info").await {
            Err(ProbeError::Status { status: 404, .. }) => self.client.get("/get_server_info").await,
            other => other,
        };
        // Do not ask again if the engine does not support the request; retry after any other
        // failure.
        let asked_as = Some(self.process.started_us());
        if matches!(body, Err(ProbeError::Status { status: 404, .. })) {
            self.info_from_start_us = asked_as;
        }
        let found = server_info::parse_events(
            &body.map_err(|error| error.to_string())?,
            self.instance,
            &self.authority,
        );
        self.unfollow();
        let Some(engine) = found.map_err(|error| error.to_string())? else {
            self.info_from_start_us = asked_as;
            return Ok(());
        };
        let events = engine.events.clone();
        let followed = self.context.router.follow(engine);
        followed.map_err(|error| format!("the events of {} cannot be followed: {error}", self.authority))?;
        (self.is_followed, self.info_from_start_us) = (true, asked_as);
        tracing::info!(
            instance = self.instance.0,
            authority = self.authority,
            events,
            "following the events of an engine"
        );
        Ok(())
    }

    fn unfollow(&mut self) {
        if std::mem::take(&mut self.is_followed) {
            self.context.router.unfollow(self.instance.0);
        }
    }

    async fn probe_health(&self) -> Result<(), ProbeError> {
        match self.client.get("/health").await {
            // The engine answers but has no health endpoint.
            Ok(_) | Err(ProbeError::Status { status: 404 | 405, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn probe_load(&self) -> Result<LoadSample, LoadProbeError> {
        let body = self.client.get("/metrics").await?;
        let authority = || self.authority.clone();
        parse(&body, self.context.config.prompt_tokens)
            .map_err(|error| LoadProbeError::Reading { authority: authority(), error })
    }

    async fn resolve(&self) -> Result<Vec<std::net::SocketAddr>, String> {
        let found = tokio::time::timeout(self.context.config.timeout(), resolve(&self.authority)).await;
        found.unwrap_or_else(|_| Err(format!("looking up the address of {} timed out", self.authority)))
    }

    /// Counts a load probe, and applies its sample.
    fn accept_load(
        &mut self,
        load: Result<LoadSample, LoadProbeError>,
        problem: &mut Option<String>,
    ) -> Option<LoadSample> {
        self.metrics.count_probe(load.as_ref().map_or_else(LoadProbeError::label, |_| "ok"));
        self.failures.is_refused = matches!(load, Err(LoadProbeError::Ask(ProbeError::Refused { .. })));
        match load {
            Ok(reading) => {
                self.failures.load = 0;
                if self.process.observe(&reading, now_us()) {
                    self.metrics.restarts.inc();
                    self.next_models_at = Instant::now();
                    tracing::info!(
                        instance = self.instance.0,
                        authority = self.authority,
                        "an engine restarted"
                    );
                }
                self.metrics.set_load(reading.load);
                self.update_status(|standing| {
                    standing.load = Some((reading.load, std::time::Instant::now()));
                });
                Some(reading)
            }
            Err(error) => {
                self.failures.load += 1;
                *problem = Some(error.to_string());
                None
            }
        }
    }

    /// Updates the status of the endpoint and reports to the router.
    fn finish_round(&mut self, reading: Option<LoadSample>, mut problem: Option<String>) {
        let is_unhealthy = self.failures.exceed(self.context.config.failures_max);
        let registered = self.context.endpoints.get(self.instance);
        let Some(endpoint) = registered.filter(|endpoint| endpoint.authority == self.authority) else {
            return; // a removed endpoint's prober is stopped soon
        };
        if is_unhealthy || endpoint.is_draining {
            self.report_leaving();
        } else if let Some(reading) = reading
            && let Err(error) = self.report(&reading, &endpoint)
        {
            problem = problem.or(Some(error));
        }
        self.metrics.up.set((!is_unhealthy).into());
        // Not every probe runs in each round: after a failure, its last problem persists.
        if self.failures.any() {
            problem = problem.or_else(|| self.last_problem.clone());
        }
        if problem != self.last_problem {
            let (instance, authority) = (self.instance.0, &self.authority);
            match &problem {
                Some(problem) => {
                    tracing::warn!(instance, authority, problem, "an engine has a problem");
                }
                None => tracing::info!(instance, authority, "an engine has recovered"),
            }
            self.last_problem.clone_from(&problem);
        }
        self.update_status(|standing| (standing.is_unhealthy, standing.problem) = (is_unhealthy, problem));
    }

    fn report(&mut self, reading: &LoadSample, endpoint: &Endpoint) -> Result<(), String> {
        self.has_reported_leaving = false;
        let (load, tbt_us) = (reading.load, reading.tbt_us(self.last_token_latency));
        self.last_token_latency = reading.token_latency;
        let report = pb::ReportRequest {
            queue_tokens: load.queue_tokens,
            running: load.running,
            waiting: load.waiting,
            cannot_fetch: !endpoint.fetches,
            role: endpoint.role as u32,
            topology: endpoint.place.clone(),
            kv_tokens_max: load.kv_tokens_max,
            kv_tokens: load.kv_tokens(),
            tbt_us,
            orders_by_deadline: self.context.orders_by_priority,
            ..self.base_report()
        };
        self.context.router.report(report).map_err(|status| status.message().to_owned())
    }

    /// Tells the router once that the engine left. An engine that reports itself does this itself.
    fn report_leaving(&mut self) {
        if !self.reports_itself && !std::mem::replace(&mut self.has_reported_leaving, true) {
            let report = pb::ReportRequest { leaving: true, ..self.base_report() };
            let _ = self.context.router.report(report); // without reports, the router reaches the same conclusion later
        }
    }

    fn base_report(&self) -> pb::ReportRequest {
        pb::ReportRequest {
            instance: self.instance.0,
            address: self.authority.clone(),
            sequence: self.context.last_sequence.fetch_add(1, Ordering::Relaxed) + 1,
            started_us: self.process.started_us(),
            ..pb::ReportRequest::default()
        }
    }

    fn update_status(&self, note: impl FnOnce(&mut crate::endpoints::EndpointStatus)) {
        self.context.endpoints.update_status(self.instance, &self.authority, note);
    }
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}
