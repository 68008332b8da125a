//! Periodic reports of an instance to every router: its load, and the measured speed of its reads
//! from nodes.
//!
//! Each router has a task of its own, so a dead router does not delay the others and no request
//! waits for a report. Load is ephemeral state: the next report replaces a lost one. Link
//! measurements are resent for a while, so they count twice if only the answer was lost; memory
//! stays bounded. Not here: measuring fetches (`links.rs`).

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::id::{InstanceId, NodeId};
use kv_core::prefix::IdentityManifest;
use kv_core::schedule::InstanceRole;
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

/// Minimum timeout of a report; longer if the interval is longer.
const REPORT_TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// Minimum interval between reports.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// Link measurements that a router has not accepted for this long are dropped. An estimate treats
/// them as current, and older ones would carry too much weight.
const LINK_RESEND_PERIOD: Duration = Duration::from_secs(10);

/// Description of an instance, and its report interval.
#[derive(Clone, Debug)]
pub struct ReporterConfig {
    /// Its number, unique in the cluster.
    pub instance: InstanceId,
    /// Address at which it accepts requests, `host:port`.
    pub address: String,
    /// Its host's name.
    pub host: String,
    /// The node on the same host, reached without a network.
    pub node: Option<NodeId>,
    /// Interval between two reports. Routers exclude an instance that is silent for two seconds.
    pub interval: Duration,
    /// Whether to report this client's link measurements too.
    pub links: bool,
    /// Whether it starts waiting requests in the order of the decisions' priority deadlines.
    pub orders_by_deadline: bool,
    /// Phase of a request that it serves: prefill, decode, or both.
    pub role: InstanceRole,
    /// Topology path, the largest domain first, as in `zone-a/rack-7/host-3`; up to four names.
    /// Routers refuse a report with a malformed one.
    pub place: String,
    /// The full identity of its blocks, if more than the digest is known. A router that refuses the
    /// identity can then name the differing fields.
    pub manifest: Option<IdentityManifest>,
}

/// Current load of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceLoad {
    /// Prompt tokens that wait for prefill.
    pub queue_tokens: u64,
    /// Requests being served.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Capacity of its GPU memory for KV, in tokens; 0 if unknown, also for the fields below.
    pub kv_tokens_max: u64,
    /// Tokens of KV in use by running requests.
    pub kv_tokens: u64,
    /// Recent mean time between two tokens of a request, in microseconds.
    pub tbt_us: u32,
    /// Maximum prompt tokens in one step.
    pub chunk_tokens: u32,
}

/// Reports that continue until stopped. Dropping it stops them too, with a final report if the
/// runtime still runs.
#[derive(Debug)]
pub struct Reporter {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Reporter {
    /// Sends a final report, after which routers send no more requests, and ends. Takes at most one
    /// report's timeout.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true); // an error means that all tasks have ended
        for task in self.tasks.drain(..) {
            // A task that panicked has logged it.
            let _ = task.await;
        }
    }
}

impl Client {
    /// Starts to report the result of `load`, and this client's link measurements, to every router.
    /// Needs a tokio runtime.
    ///
    /// `load` runs on that runtime, which continues while the engine's own threads are stalled. It
    /// must return their current load. If the load can be unknown, use
    /// [`Client::reporter_optional`].
    pub fn reporter(
        &self,
        config: &ReporterConfig,
        load: impl Fn() -> InstanceLoad + Send + Sync + 'static,
    ) -> Reporter {
        self.reporter_optional(config, move || Some(load()))
    }

    /// The same, but reports only while `load` returns a value. During a silence routers exclude
    /// the instance; the first report afterwards restores it.
    pub fn reporter_optional(
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
            orders_by_deadline: config.orders_by_deadline,
            role: config.role as u32,
            topology: config.place.clone(),
            manifest: config.manifest.as_ref().map(convert::manifest_to_pb),
            started_us: u64::try_from(started.as_micros()).unwrap_or(u64::MAX),
            ..pb::ReportRequest::default()
        };
        let load: Arc<LoadFn> = Arc::new(load);
        let (stop, stopped) = watch::channel(false);
        let task = |(address, client): (&str, RouterClient<Channel>)| {
            let one = RouterReporter {
                address: address.to_owned(),
                client,
                fixed: fixed.clone(),
                interval: config.interval.max(INTERVAL_MIN),
                load: Arc::clone(&load),
                // Start from now: older measurements are stale, and an earlier reporter has sent
                // them.
                links: config.links.then(|| LinkReader::from_now(self.links.clone())),
                outcomes: self.outcomes.clone(),
                next_outcome: 0,
                last_accepted: Instant::now(),
                is_reachable: true,
                is_load_known: true,
            };
            tokio::spawn(one.run(stopped.clone()))
        };
        Reporter { tasks: self.routers.each().map(task).collect(), stop }
    }
}

/// Returns the instance's load, if known.
type LoadFn = dyn Fn() -> Option<InstanceLoad> + Send + Sync;

struct RouterReporter {
    address: String,
    client: RouterClient<Channel>,
    fixed: pb::ReportRequest,
    interval: Duration,
    load: Arc<LoadFn>,
    links: Option<LinkReader>,
    outcomes: Outcomes,
    /// Number of the next outcome for this router.
    next_outcome: u64,
    /// Time at which it last accepted a report.
    last_accepted: Instant,
    is_reachable: bool,
    /// Whether the load was known at the last report.
    is_load_known: bool,
}

impl RouterReporter {
    async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let mut due = interval(self.interval);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for sequence in 1.. {
            let leaving = tokio::select! {
                _ = due.tick() => false,
                // An error means that the reporter was dropped.
                _ = stopped.wait_for(|is_stopped| *is_stopped) => true,
            };
            let load = (self.load)();
            self.log_silence(load.is_some() || leaving);
            // The final report is sent even if the load is unknown.
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
        let looked = self.links.as_ref().filter(|_| !leaving).map(LinkReader::peek);
        let (links, told) = looked.map_or((Vec::new(), None), |(links, told)| (links, Some(told)));
        let (outcomes, following_outcome) = self.outcomes.batch_from(self.next_outcome);
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
        let time = self.interval.max(REPORT_TIMEOUT_MIN);
        let mut request = Request::new(report);
        request.set_timeout(time);
        let sent = match timeout(time, self.client.report(request)).await {
            Ok(sent) => sent.map(|_| ()),
            Err(_) => Err(tonic::Status::deadline_exceeded("no answer in time")),
        };
        if sent.is_ok() {
            self.next_outcome = following_outcome;
            self.last_accepted = Instant::now();
        }
        if let (Some(links), Some(told)) = (&mut self.links, told)
            && (sent.is_ok() || self.last_accepted.elapsed() > LINK_RESEND_PERIOD)
        {
            links.acknowledge(told);
        }
        self.log_change(&sent);
    }

    /// Logs one line per change.
    fn log_silence(&mut self, is_known: bool) {
        if self.is_load_known && !is_known {
            tracing::warn!(router = self.address, "the engine's load is unknown: reports are paused");
        } else if is_known && !self.is_load_known {
            tracing::info!(router = self.address, "the engine's load is known again: reports resume");
        }
        self.is_load_known = is_known;
    }

    /// Logs one line per change, not one per report.
    fn log_change(&mut self, sent: &Result<(), tonic::Status>) {
        match sent {
            Err(cause) if self.is_reachable => {
                tracing::warn!(router = self.address, %cause, "router does not accept load reports");
            }
            Ok(()) if !self.is_reachable => {
                tracing::info!(router = self.address, "router accepts load reports again");
            }
            _ => {}
        }
        self.is_reachable = sent.is_ok();
    }
}
