//! Looks after one engine: asks for its load and whether it is well, tells the router, and what is wrong.
//!
//! An engine that is gone is told to have left at once; one that answers nonsense, or nothing, after some times. Not here: which engines there
//! are (`mod.rs`), and what an answer means (`reading.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use kvfleet_router::Desk;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ask::{AskError, Asker};
use super::info;
use super::metrics::OneMetrics;
use super::models::{self, ModelsError};
use super::reading::{Life, Make, Reading, ReadingError, read};
use crate::endpoints::address::resolve;
use crate::endpoints::config::LoadConfig;
use crate::endpoints::models::Models;
use crate::endpoints::{Endpoint, Endpoints};

/// Longest between two questions to an engine that does not answer.
const AGAIN_MAX: Duration = Duration::from_secs(2);

/// Shortest between two rounds of questions, however many requests fail there: an engine that fails all of them has more to do than to answer these.
const DOUBT_MIN: Duration = Duration::from_millis(100);

/// What every engine is looked after with.
#[derive(Clone)]
pub(super) struct Means {
    pub(super) config: LoadConfig,
    /// Whether engines begin what waits by priority.
    pub(super) keeps_order: bool,
    pub(super) endpoints: Endpoints,
    pub(super) desk: Desk,
    /// Number of the last report, of all instances together.
    pub(super) reports: Arc<AtomicU64>,
}

/// One engine.
pub(super) struct Care {
    pub(super) means: Means,
    pub(super) instance: InstanceId,
    pub(super) authority: String,
    pub(super) reports_itself: bool,
    pub(super) life: Life,
    pub(super) metrics: OneMetrics,
    asker: Asker,
    failures: Failures,
    /// What it had said of times between tokens when it was asked last.
    paces: Option<[f64; 2]>,
    /// As which process it was asked where its events are.
    asked_as: Option<u64>,
    /// When it is asked next which models it serves, and what was wrong when it was asked last.
    models_at: Instant,
    models_problem: Option<String>,
    /// Whether its events are followed because it said where they are.
    is_followed: bool,
    /// Whether the router was told that it left.
    has_left: bool,
    /// What was wrong last; each thing is said once.
    said: Option<String>,
}

/// How often in a row what failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Failures {
    load: u32,
    health: u32,
    is_refused: bool,
}

impl Failures {
    fn are_any(&self) -> bool {
        self.is_refused || self.load > 0 || self.health > 0
    }

    fn are_too_many(&self, most: u32) -> bool {
        self.is_refused || self.load >= most || self.health >= most
    }
}

/// Why a load is not known.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("the load of {authority} is not believed: {error}")]
    Reading { authority: String, error: ReadingError },
}

impl LoadError {
    fn name(&self) -> &'static str {
        match self {
            LoadError::Ask(error) => error.name(),
            LoadError::Reading { error: ReadingError::Nonsense { .. }, .. } => "nonsense",
            LoadError::Reading { .. } => "malformed",
        }
    }
}

/// Why it is not known which models it serves.
#[derive(Debug, thiserror::Error)]
enum ModelsAskError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(transparent)]
    Models(#[from] ModelsError),
}

impl ModelsAskError {
    fn name(&self) -> &'static str {
        match self {
            ModelsAskError::Ask(error) => error.name(),
            ModelsAskError::Models(error) => error.name(),
        }
    }
}

impl Care {
    pub(super) fn new(
        means: Means,
        (instance, authority, reports_itself): (InstanceId, String, bool),
        life: Life,
        metrics: OneMetrics,
    ) -> Care {
        let asker = Asker::new(&authority, means.config.timeout());
        Care {
            means,
            instance,
            authority,
            reports_itself,
            life,
            metrics,
            asker,
            failures: Failures::default(),
            paces: None,
            asked_as: None,
            models_at: Instant::now(),
            models_problem: None,
            is_followed: false,
            has_left: false,
            said: None,
        }
    }

    /// Runs until stopped, and answers as which process the engine was known.
    pub(super) async fn run(mut self, stop: CancellationToken) -> Life {
        let rounds = async {
            let (mut health_at, mut resolve_at) = (Instant::now(), Instant::now());
            loop {
                let began = Instant::now();
                let config = &self.means.config;
                let [asks_health, resolves] = [&mut health_at, &mut resolve_at].map(|at| *at <= began);
                // One that did not answer is asked with the next round: it may be that a connection ended, and it may be that all is over.
                let asks_health = asks_health || self.failures.health > 0;
                if asks_health {
                    health_at = began + config.health_every();
                }
                if resolves {
                    resolve_at = began + config.resolve_every();
                }
                let every = config.every();
                self.round(asks_health, resolves).await;
                let failed = self.failures.load.max(self.failures.health).min(8);
                let again = (every * 2_u32.pow(failed)).min(AGAIN_MAX.max(every));
                if tokio::time::timeout_at(began + again, self.doubted()).await.is_ok() {
                    tokio::time::sleep_until(began + DOUBT_MIN).await;
                    health_at = Instant::now();
                }
            }
        };
        let _ = stop.run_until_cancelled(rounds).await; // stopped, as asked
        self.leave();
        self.unfollow();
        self.life
    }

    /// A request failed there.
    async fn doubted(&self) {
        match self.means.endpoints.doubts(self.instance) {
            Some(doubts) => doubts.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Asks everything that is due, all at once, and concludes.
    async fn round(&mut self, asks_health: bool, resolves: bool) {
        let health = async { if asks_health { Some(self.ask_health().await) } else { None } };
        let load = async { if self.reports_itself { None } else { Some(self.ask_load().await) } };
        let addresses = async { if resolves { Some(self.resolve().await) } else { None } };
        let models = async { if self.asks_models() { Some(self.ask_models().await) } else { None } };
        let (health, load, addresses, models) = tokio::join!(health, load, addresses, models);
        let mut problem = None;
        match addresses {
            Some(Ok(found)) => self.note(|standing| standing.addresses = found),
            Some(Err(error)) => problem = Some(error),
            None => {}
        }
        if let Some(health) = health {
            self.failures.health = if health.is_err() { self.failures.health + 1 } else { 0 };
            if load.is_none() {
                self.failures.is_refused = matches!(health, Err(AskError::Refused { .. }));
            }
            problem = health.err().map(|error| error.to_string()).or(problem);
        }
        let reading = load.and_then(|load| self.heard(load, &mut problem));
        if let Some(models) = models {
            self.heard_models(models);
        }
        problem = problem.or_else(|| self.models_problem.clone());
        if let Some(reading) = &reading
            && reading.make == Make::Sglang
            && self.means.config.finds_events
            && asks_health
            && self.asked_as != Some(self.life.started_us())
        {
            let found = self.find_events().await;
            problem = problem.or(found.err());
        }
        self.conclude(reading, problem);
    }

    /// Whether it is time to ask which models it serves.
    fn asks_models(&self) -> bool {
        self.means.config.models_every().is_some() && self.models_at <= Instant::now()
    }

    async fn ask_models(&self) -> Result<Models, ModelsAskError> {
        let body = self.asker.get("/v1/models").await?;
        Ok(models::read(&body, &self.authority)?)
    }

    /// Takes which models it serves. An answer that cannot be leaves what is known.
    fn heard_models(&mut self, answer: Result<Models, ModelsAskError>) {
        self.metrics.asked_for_models(answer.as_ref().map_or_else(ModelsAskError::name, |_| "ok"));
        // Whoever is away is asked as soon as it is back: it may be another.
        let is_away = matches!(&answer, Err(ModelsAskError::Ask(error)) if error.is_no_answer());
        if let Some(every) = self.means.config.models_every().filter(|_| !is_away) {
            self.models_at = Instant::now() + every;
        }
        self.models_problem = match answer {
            Ok(models) => {
                self.metrics.models.set(i64::try_from(models.by_name.len()).unwrap_or(i64::MAX));
                let models = Arc::new(models);
                self.note(|standing| standing.models = Some(models));
                None
            }
            // It serves what it serves, and does not say.
            // Of what has keys for its callers, a key is asked for here and not at /metrics.
            Err(ModelsAskError::Ask(AskError::Status { status: 401 | 403 | 404 | 405, .. })) => None,
            // That is said of its load or its health.
            Err(ModelsAskError::Ask(_)) if is_away => self.models_problem.take(),
            Err(error) => Some(error.to_string()),
        };
    }

    /// Asks an engine where its events are, once for each of its processes, and follows them, unless somebody else said where they are.
    async fn find_events(&mut self) -> Result<(), String> {
        if !self.is_followed && self.means.desk.follows(self.instance.0) {
            return Ok(());
        }
        let body = match self.asker.get("/server_info").await {
            Err(AskError::Status { status: 404, .. }) => self.asker.get("/get_server_info").await,
            other => other,
        };
        // An engine that knows no such question is asked no more; whatever else went wrong may go better next time.
        let asked_as = Some(self.life.started_us());
        if matches!(body, Err(AskError::Status { status: 404, .. })) {
            self.asked_as = asked_as;
        }
        let found = info::events(&body.map_err(|error| error.to_string())?, self.instance, &self.authority);
        self.unfollow();
        let Some(engine) = found.map_err(|error| error.to_string())? else {
            self.asked_as = asked_as;
            return Ok(());
        };
        let events = engine.events.clone();
        let followed = self.means.desk.follow(engine);
        followed.map_err(|error| format!("the events of {} are not heard: {error}", self.authority))?;
        (self.is_followed, self.asked_as) = (true, asked_as);
        tracing::info!(
            instance = self.instance.0,
            authority = self.authority,
            events,
            "the events of an engine are followed"
        );
        Ok(())
    }

    fn unfollow(&mut self) {
        if std::mem::take(&mut self.is_followed) {
            self.means.desk.unfollow(self.instance.0);
        }
    }

    async fn ask_health(&self) -> Result<(), AskError> {
        match self.asker.get("/health").await {
            // It answers, and knows no such question.
            Ok(_) | Err(AskError::Status { status: 404 | 405, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn ask_load(&self) -> Result<Reading, LoadError> {
        let body = self.asker.get("/metrics").await?;
        let authority = || self.authority.clone();
        read(&body, self.means.config.prompt_tokens)
            .map_err(|error| LoadError::Reading { authority: authority(), error })
    }

    async fn resolve(&self) -> Result<Vec<std::net::SocketAddr>, String> {
        let found = tokio::time::timeout(self.means.config.timeout(), resolve(&self.authority)).await;
        found.unwrap_or_else(|_| Err(format!("nobody tells the address of {} in time", self.authority)))
    }

    /// Counts an answer for the load, and takes what it says.
    fn heard(&mut self, load: Result<Reading, LoadError>, problem: &mut Option<String>) -> Option<Reading> {
        self.metrics.asked(load.as_ref().map_or_else(LoadError::name, |_| "ok"));
        self.failures.is_refused = matches!(load, Err(LoadError::Ask(AskError::Refused { .. })));
        match load {
            Ok(reading) => {
                self.failures.load = 0;
                if self.life.hear(&reading, now_us()) {
                    self.metrics.restarts.inc();
                    self.models_at = Instant::now();
                    tracing::info!(
                        instance = self.instance.0,
                        authority = self.authority,
                        "an engine started anew"
                    );
                }
                self.metrics.heard(reading.heard);
                self.note(|standing| standing.load = Some((reading.heard, std::time::Instant::now())));
                Some(reading)
            }
            Err(error) => {
                self.failures.load += 1;
                *problem = Some(error.to_string());
                None
            }
        }
    }

    /// Tells the router, and who lists endpoints.
    fn conclude(&mut self, reading: Option<Reading>, mut problem: Option<String>) {
        let is_unwell = self.failures.are_too_many(self.means.config.failures_max);
        let known = self.means.endpoints.get(self.instance);
        let Some(endpoint) = known.filter(|endpoint| endpoint.authority == self.authority) else {
            return; // whoever removed it stops this soon
        };
        if is_unwell || endpoint.draining {
            self.leave();
        } else if let Some(reading) = reading
            && let Err(error) = self.report(&reading, &endpoint)
        {
            problem = problem.or(Some(error));
        }
        self.metrics.up.set((!is_unwell).into());
        // Not everything is asked each time: what failed last time it was is still wrong.
        if self.failures.are_any() {
            problem = problem.or_else(|| self.said.clone());
        }
        if problem != self.said {
            let (instance, authority) = (self.instance.0, &self.authority);
            match &problem {
                Some(problem) => {
                    tracing::warn!(instance, authority, problem, "an engine is not as it should be");
                }
                None => tracing::info!(instance, authority, "an engine is well again"),
            }
            self.said.clone_from(&problem);
        }
        self.note(|standing| (standing.is_unwell, standing.problem) = (is_unwell, problem));
    }

    fn report(&mut self, reading: &Reading, endpoint: &Endpoint) -> Result<(), String> {
        self.has_left = false;
        let (heard, tbt_us) = (reading.heard, reading.tbt_us(self.paces));
        self.paces = reading.paces;
        let report = pb::ReportRequest {
            queue_tokens: heard.queue_tokens,
            running: heard.running,
            waiting: heard.waiting,
            fetches_nothing: !endpoint.fetches,
            role: endpoint.role as u32,
            place: endpoint.place.clone(),
            kv_tokens_max: heard.kv_tokens_max,
            kv_tokens: heard.kv_tokens(),
            tbt_us,
            keeps_order: self.means.keeps_order,
            ..self.blank()
        };
        self.means.desk.report(report).map_err(|status| status.message().to_owned())
    }

    /// Tells the router, once, that it is not there. One that reports itself does that itself.
    fn leave(&mut self) {
        if !self.reports_itself && !std::mem::replace(&mut self.has_left, true) {
            let report = pb::ReportRequest { leaving: true, ..self.blank() };
            let _ = self.means.desk.report(report); // silence says the same, later
        }
    }

    fn blank(&self) -> pb::ReportRequest {
        pb::ReportRequest {
            instance: self.instance.0,
            address: self.authority.clone(),
            sequence: self.means.reports.fetch_add(1, Ordering::Relaxed) + 1,
            started_us: self.life.started_us(),
            ..pb::ReportRequest::default()
        }
    }

    fn note(&self, note: impl FnOnce(&mut crate::endpoints::Standing)) {
        self.means.endpoints.note(self.instance, &self.authority, note);
    }
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}
