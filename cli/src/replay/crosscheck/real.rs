//! The real side: sends requests to the processes of a cluster, either in lockstep or each at its
//! time.
//!
//! `super::super::serve` serves one request; `compare.rs` evaluates the record.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::TenantId;
use kvfleet_net::tls;
use kvfleet_proto::pb;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::super::measure::RequestSample;
use super::super::prepare::{PreparedRequest, Workload};
use super::super::serve::{RequestDriver, RequestResult};
use crate::calls::{RouterCalls, channel, settle};
use crate::cluster::LocalCluster;
use crate::process::Role;

/// How long to wait after a request until all routers know its effects.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between two polls of a router.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Polls per report interval.
const POLLS_PER_REPORT: u32 = 4;

/// The record of one request.
#[derive(Debug, Default)]
pub(super) struct RequestRecord {
    /// When it was sent, since the first request.
    pub(super) at: Duration,
    /// The decision that served it; `None` if it was not served.
    pub(super) decision: Option<pb::Decision>,
    /// Its measurements.
    pub(super) sample: RequestSample,
    /// Failed attempts and incomplete sources; each may cause a difference.
    pub(super) problems: Vec<String>,
}

/// The record of a run, requests in order of their number.
#[derive(Debug, Default)]
pub(super) struct RealRun {
    pub(super) requests: Vec<RequestRecord>,
    /// Maximum delay between a request's due time and its sending.
    pub(super) max_delay: Duration,
    /// Arrival of each report by instance, since the first request.
    pub(super) reports: Vec<Vec<Duration>>,
}

/// Sends requests to a cluster.
pub(super) struct ClusterDriver {
    requests: Arc<Vec<PreparedRequest>>,
    server: Arc<RequestDriver>,
    routers: Vec<RouterCalls>,
    nodes: Vec<Channel>,
    instances: usize,
}

impl ClusterDriver {
    pub(super) fn new(
        cluster: &LocalCluster,
        workload: &Workload,
        seed: u64,
    ) -> anyhow::Result<ClusterDriver> {
        let (addresses, identity) = (cluster.router_addresses(), cluster.identity()?);
        let time_scale = cluster.shape().predicted_time_scale();
        let server = RequestDriver::new(
            addresses.clone(),
            identity.clone(),
            seed,
            TenantId(0),
            workload.block_tokens,
            Arc::default(),
            time_scale,
        )?;
        let nodes = cluster.children().filter(|((role, _), _)| *role == Role::Node);
        let nodes = nodes.filter_map(|(_, child)| child.ready()).map(|ready| ready.address("control"));
        Ok(ClusterDriver {
            requests: Arc::clone(&workload.requests),
            server: Arc::new(server),
            routers: RouterCalls::all(&addresses, &identity)?,
            nodes: nodes
                .map(|address| channel(&address, &identity, tls::Role::Node(None)))
                .collect::<Result<_, _>>()?,
            instances: cluster.shape().instances as usize,
        })
    }

    /// Sends requests one after the other: each ends, and routers know its effects, before the next
    /// is sent.
    pub(super) async fn lockstep(&self, stop: &CancellationToken) -> anyhow::Result<RealRun> {
        let begun = Instant::now();
        let mut recorded = RealRun::default();
        for (number, request) in self.requests.iter().enumerate() {
            let at = begun.elapsed();
            let step = async {
                let served = self.server.serve(number, request, vec![]).await;
                self.wait_until_idle(Instant::now()).await.map(|()| served)
            };
            let served = tokio::select! {
                served = step => served?,
                () = stop.cancelled() => anyhow::bail!("stopped at request {number} of {}", self.requests.len()),
            };
            recorded.requests.push(request_record(at, served)?);
        }
        Ok(recorded)
    }

    /// Sends each request when due, `per_s` per second on average; instances report every
    /// `report_every`.
    pub(super) async fn timed(
        &self,
        per_s: f64,
        report_every: Duration,
        stop: &CancellationToken,
    ) -> anyhow::Result<RealRun> {
        let begun = Instant::now();
        let mut reports = BTreeMap::new();
        let sent = tokio::select! {
            sent = self.send_all(per_s, begun, stop) => sent?,
            failure = self.watch_reports(begun, report_every, &mut reports) => return Err(failure),
        };
        Ok(RealRun { reports: reports.into_values().collect(), ..sent })
    }

    async fn send_all(
        &self,
        per_s: f64,
        begun: Instant,
        stop: &CancellationToken,
    ) -> anyhow::Result<RealRun> {
        let mut tasks: JoinSet<(usize, Duration, RequestResult)> = JoinSet::new();
        let mut recorded = RealRun::default();
        for (number, due) in arrivals(&self.requests, per_s).into_iter().enumerate() {
            tokio::select! {
                () = tokio::time::sleep_until((begun + due).into()) => {}
                () = stop.cancelled() => anyhow::bail!("stopped at request {number} of {}", self.requests.len()),
            }
            let at = begun.elapsed();
            recorded.max_delay = recorded.max_delay.max(at.saturating_sub(due));
            let (server, requests) = (Arc::clone(&self.server), Arc::clone(&self.requests));
            tasks.spawn(async move {
                let served = server.serve(number, &requests[number], vec![]).await;
                (number, at, served)
            });
        }
        recorded.requests.resize_with(self.requests.len(), RequestRecord::default);
        loop {
            let ended = tokio::select! {
                ended = tasks.join_next() => ended,
                () = stop.cancelled() => anyhow::bail!("stopped before all requests were answered"),
            };
            let Some(ended) = ended else { return Ok(recorded) };
            let (number, at, served) = ended?;
            recorded.requests[number] = request_record(at, served)?;
        }
    }

    /// Waits until routers have received a report of every instance being idle since `since` and
    /// have applied what nodes announced.
    async fn wait_until_idle(&self, since: Instant) -> anyhow::Result<()> {
        self.flush_announcements().await?;
        for router in &self.routers {
            while !self.is_idle(router, since).await? {
                anyhow::ensure!(
                    since.elapsed() < IDLE_TIMEOUT,
                    "after {IDLE_TIMEOUT:?} {} has not heard that every instance is idle",
                    router.address
                );
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        // Moves to SSD continue after the reply and are announced when done; most have ended by
        // now.
        self.flush_announcements().await
    }

    async fn flush_announcements(&self) -> anyhow::Result<()> {
        for node in &self.nodes {
            let settled = settle(node.clone(), IDLE_TIMEOUT).await;
            let is_settled = settled.map_err(|status| anyhow::anyhow!("a node does not answer: {status}"))?;
            anyhow::ensure!(
                is_settled,
                "after {IDLE_TIMEOUT:?} routers have not applied what a node announced"
            );
        }
        Ok(())
    }

    /// Records when reports reach the first router, which also routes while it answers. Returns
    /// only on failure.
    async fn watch_reports(
        &self,
        begun: Instant,
        every: Duration,
        reports: &mut BTreeMap<u32, Vec<Duration>>,
    ) -> anyhow::Error {
        let Some(router) = self.routers.first() else { return anyhow::anyhow!("there is no router") };
        loop {
            let asked_at = begun.elapsed();
            let status = match router.status().await {
                Ok(status) => status,
                Err(status) => return anyhow::anyhow!("{} does not answer: {status}", router.address),
            };
            // A call is assumed to take equally long in both directions.
            let at = asked_at + begun.elapsed().saturating_sub(asked_at) / 2;
            for instance in &status.instances {
                let all = reports.entry(instance.instance).or_default();
                let age = Duration::from_millis(instance.report_age_ms);
                record_report(all, at, age, every);
            }
            tokio::time::sleep(every / POLLS_PER_REPORT).await;
        }
    }

    async fn is_idle(&self, router: &RouterCalls, since: Instant) -> anyhow::Result<bool> {
        let elapsed_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let status = router.status().await;
        let status =
            status.map_err(|status| anyhow::anyhow!("{} does not answer: {status}", router.address))?;
        let is_idle = |instance: &&pb::InstanceStatus| {
            // Ages are in whole milliseconds.
            instance.report_age_ms + 1 < elapsed_ms && instance.queue_tokens == 0 && instance.running == 0
        };
        Ok(status.instances.iter().filter(is_idle).count() == self.instances)
    }
}

/// Records a report that had the given age at time `at`, unless it is the last recorded one: ages
/// are exact to a few milliseconds, and reports are at least half an interval apart.
fn record_report(all: &mut Vec<Duration>, at: Duration, age: Duration, every: Duration) {
    let Some(received_at) = at.checked_sub(age) else { return };
    if all.last().is_none_or(|last| received_at.saturating_sub(*last) > every / 2) {
        all.push(received_at);
    }
}

/// When each request is due at `per_s` requests per second on average: the arrivals of the trace,
/// scaled.
fn arrivals(requests: &[PreparedRequest], per_s: f64) -> Vec<Duration> {
    let span_us = requests.last().map_or(0, |last| last.arrival_us).max(1);
    let duration_s = requests.len() as f64 / per_s.max(f64::MIN_POSITIVE);
    let due = |request: &PreparedRequest| duration_s * (request.arrival_us as f64 / span_us as f64);
    requests
        .iter()
        .map(|request| Duration::try_from_secs_f64(due(request)).unwrap_or(Duration::MAX))
        .collect()
}

fn request_record(at: Duration, served: RequestResult) -> anyhow::Result<RequestRecord> {
    if let Some(refused) = served.refused {
        anyhow::bail!("{refused}");
    }
    let RequestResult { sample, decision, mut errors, misses, .. } = served;
    errors.extend(misses);
    let (decision, sample) = (decision.filter(|_| sample.is_some()), sample.unwrap_or_default());
    Ok(RequestRecord { at, decision, sample, problems: errors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_each_report_once_from_the_first_request() {
        let ms = Duration::from_millis;
        let mut all = Vec::new();
        for (at, age) in [(20, 30), (70, 80), (120, 10), (170, 62), (220, 109), (340, 31)] {
            record_report(&mut all, ms(at), ms(age), ms(200));
        }
        assert_eq!(all, [110, 309].map(ms));
    }

    #[test]
    fn arrivals_scale_the_trace_to_a_rate() {
        let request = |arrival_us| PreparedRequest {
            arrival_us,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        let requests = [0, 1_000, 4_000, 4_000].map(request);
        let due = arrivals(&requests, 2.0);
        assert_eq!(due, [0, 500, 2_000, 2_000].map(Duration::from_millis));
        assert_eq!(arrivals(&requests[..1], 2.0), [Duration::ZERO], "a single request is due at once");
    }
}
