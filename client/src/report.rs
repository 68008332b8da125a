//! Reports of an instance to every router, again and again: what it is doing, and how fast it read from nodes.
//!
//! One task for each router, so that a dead one does not delay the others, and nothing of it on the way of a request. Load is
//! soft: a report that does not arrive is followed by the next one. What it said of links is said again with that, for a
//! while, so one of which only the answer was lost counts twice; nothing is kept for it but sums that are bounded. Not here: what
//! fetches came to (`links.rs`).

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::id::{InstanceId, NodeId};
use kv_core::prefix::IdentityManifest;
use kv_core::schedule::Role;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::{convert, pb};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tonic::Request;
use tonic::transport::Channel;

use crate::Client;
use crate::links::LinkReader;
use crate::outcomes::Outcomes;

/// Least time a router has to take a report; longer when reports are rarer than that.
const REPORT_TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// Reports are no more frequent than that, whatever is asked for.
const EVERY_MIN: Duration = Duration::from_millis(1);

/// What a router did not hear of links for longer is left out: an estimate takes what it hears as of now, and of what is so old
/// no half would be left.
const SAID_AGAIN_FOR: Duration = Duration::from_secs(10);

/// What an instance is, and how often it says so.
#[derive(Clone, Debug)]
pub struct ReporterConfig {
    /// Its number, unique in the cluster.
    pub instance: InstanceId,
    /// Where it takes requests, `host:port`.
    pub address: String,
    /// Its host's name.
    pub host: String,
    /// Its own node, with no network between.
    pub node: Option<NodeId>,
    /// Time between two reports. Routers leave out who was silent for two seconds.
    pub every: Duration,
    /// Whether what the client's fetches came to is told too.
    pub links: bool,
    /// Whether it begins what waits in the order of the turns that decisions have.
    pub keeps_order: bool,
    /// What it does of a request.
    pub role: Role,
    /// Where it stands, the largest first, as in `zone-a/rack-7/host-3`; up to four names. Routers refuse reports with another.
    pub place: String,
    /// What decides the bytes of the blocks that it makes, where more of it is known than its digest: where another identity is refused, it is told then in which fields.
    pub manifest: Option<IdentityManifest>,
}

/// What an instance is doing right now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceLoad {
    /// Prompt tokens that wait for prefill.
    pub queue_tokens: u64,
    /// Requests being served.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Tokens whose KV its GPU memory can hold; 0 when unknown, as with all that follows.
    pub kv_tokens_max: u64,
    /// Of these, those held for requests that run.
    pub kv_tokens: u64,
    /// Mean time of late between two tokens of a request, in microseconds.
    pub tbt_us: u32,
    /// Tokens of prompts in one step, at most.
    pub chunk_tokens: u32,
}

/// Reports that go on until they are stopped. Dropping it stops them too, with a goodbye while the runtime lives.
#[derive(Debug)]
pub struct Reporter {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Reporter {
    /// Says goodbye to the routers, which send no more requests then, and ends: within a report's time.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true); // an error says that all have ended
        for task in self.tasks.drain(..) {
            // One that panicked has said so.
            let _ = task.await;
        }
    }
}

impl Client {
    /// Begins to report to every router what `load` says, and what this client's fetches came to. Needs a tokio runtime.
    ///
    /// `load` is asked on that runtime, which goes on while the engine's own threads stand still: what it says must be what they
    /// are doing now. Where that is not known, [`Client::reporter_while`] is silent.
    pub fn reporter(
        &self,
        config: &ReporterConfig,
        load: impl Fn() -> InstanceLoad + Send + Sync + 'static,
    ) -> Reporter {
        self.reporter_while(config, move || Some(load()))
    }

    /// The same while `load` says something. Nothing is reported otherwise, so that routers leave the instance out as they do one
    /// that fell silent, and take it back with the first report that follows.
    pub fn reporter_while(
        &self,
        config: &ReporterConfig,
        load: impl Fn() -> Option<InstanceLoad> + Send + Sync + 'static,
    ) -> Reporter {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let fixed = pb::ReportRequest {
            instance: config.instance.0,
            address: config.address.clone(),
            host: config.host.clone(),
            node: config.node.unwrap_or_default().0,
            has_node: config.node.is_some(),
            keeps_order: config.keeps_order,
            role: config.role as u32,
            place: config.place.clone(),
            manifest: config.manifest.as_ref().map(convert::manifest_to_pb),
            started_us: u64::try_from(started.as_micros()).unwrap_or(u64::MAX),
            ..pb::ReportRequest::default()
        };
        let load: Arc<Load> = Arc::new(load);
        let (stop, stopped) = watch::channel(false);
        let task = |(address, client): (&str, RouterClient<Channel>)| {
            let one = OneRouter {
                address: address.to_owned(),
                client,
                fixed: fixed.clone(),
                every: config.every.max(EVERY_MIN),
                load: Arc::clone(&load),
                // What was long before says nothing of links now, and was told by a reporter before this one.
                links: config.links.then(|| LinkReader::from_now(self.links.clone())),
                outcomes: self.outcomes.clone(),
                told_outcomes: 0,
                heard: Instant::now(),
                is_reachable: true,
                is_known: true,
            };
            tokio::spawn(one.run(stopped.clone()))
        };
        Reporter { tasks: self.routers.each().map(task).collect(), stop }
    }
}

/// What the instance is doing, while that is known.
type Load = dyn Fn() -> Option<InstanceLoad> + Send + Sync;

struct OneRouter {
    address: String,
    client: RouterClient<Channel>,
    fixed: pb::ReportRequest,
    every: Duration,
    load: Arc<Load>,
    links: Option<LinkReader>,
    outcomes: Outcomes,
    /// Outcomes that this router has heard of.
    told_outcomes: u64,
    /// When it took a report last.
    heard: Instant,
    is_reachable: bool,
    /// Whether the instance said what it does when it was asked last.
    is_known: bool,
}

impl OneRouter {
    async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let mut due = interval(self.every);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for sequence in 1.. {
            let leaving = tokio::select! {
                _ = due.tick() => false,
                // An error says that the reporter was dropped.
                _ = stopped.wait_for(|is_stopped| *is_stopped) => true,
            };
            let load = (self.load)();
            self.log_silence(load.is_some() || leaving);
            // A goodbye is said whatever is known.
            if let Some(load) = load.or(leaving.then(InstanceLoad::default)) {
                self.send(sequence, load, leaving).await;
            }
            if leaving {
                return;
            }
        }
    }

    async fn send(&mut self, sequence: u64, load: InstanceLoad, leaving: bool) {
        let InstanceLoad { queue_tokens, running, waiting, kv_tokens_max, kv_tokens, tbt_us, chunk_tokens } =
            load;
        let looked = self.links.as_ref().filter(|_| !leaving).map(LinkReader::look);
        let (links, told) = looked.map_or((Vec::new(), None), |(links, told)| (links, Some(told)));
        let (outcomes, told_to) = self.outcomes.from(self.told_outcomes);
        let report = pb::ReportRequest {
            outcomes,
            queue_tokens,
            running,
            waiting,
            kv_tokens_max,
            kv_tokens,
            tbt_us,
            chunk_tokens,
            sequence,
            leaving,
            links,
            ..self.fixed.clone()
        };
        let time = self.every.max(REPORT_TIMEOUT_MIN);
        let mut request = Request::new(report);
        request.set_timeout(time);
        let sent = match timeout(time, self.client.report(request)).await {
            Ok(sent) => sent.map(|_| ()),
            Err(_) => Err(tonic::Status::deadline_exceeded("no answer in time")),
        };
        if sent.is_ok() {
            self.told_outcomes = told_to;
            self.heard = Instant::now();
        }
        if let (Some(links), Some(told)) = (&mut self.links, told)
            && (sent.is_ok() || self.heard.elapsed() > SAID_AGAIN_FOR)
        {
            links.told(told);
        }
        self.log_change(&sent);
    }

    /// One line per change.
    fn log_silence(&mut self, is_known: bool) {
        if self.is_known && !is_known {
            tracing::warn!(router = self.address, "the engine says nothing of its load: nothing is reported");
        } else if is_known && !self.is_known {
            tracing::info!(router = self.address, "the engine says its load again");
        }
        self.is_known = is_known;
    }

    /// One line per change, not one per report.
    fn log_change(&mut self, sent: &Result<(), tonic::Status>) {
        match sent {
            Err(cause) if self.is_reachable => {
                tracing::warn!(router = self.address, %cause, "router takes no load reports");
            }
            Ok(()) if !self.is_reachable => {
                tracing::info!(router = self.address, "router takes load reports again");
            }
            _ => {}
        }
        self.is_reachable = sent.is_ok();
    }
}
