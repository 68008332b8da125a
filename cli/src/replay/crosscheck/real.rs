//! The real side: requests to the processes of a cluster, one after the other with everything known in between, or each at its time.
//!
//! Not here: serving one request (`super::super::serve`) and what is made of it (`compare.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::TenantId;
use kvfleet_proto::pb;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::super::measure::Sample;
use super::super::prepare::{Prepared, Workload};
use super::super::serve::{Served, Server};
use crate::calls::{RouterCalls, channel, settle};
use crate::cluster::Cluster;
use crate::process::Role;

/// How long everything may take to be known everywhere behind a request.
const QUIET_TIMEOUT: Duration = Duration::from_secs(30);

/// Between two looks at what routers have heard.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Looks at reports between two of one instance.
const LOOKS_A_REPORT: u32 = 4;

/// One request as it went.
#[derive(Debug, Default)]
pub(super) struct Went {
    /// When it was sent, since the first.
    pub(super) at: Duration,
    /// By which decision it was served; nothing where it was not.
    pub(super) decision: Option<pb::Decision>,
    /// What was measured.
    pub(super) sample: Sample,
    /// Attempts that failed, and sources that fell short: each is a reason to differ.
    pub(super) troubles: Vec<String>,
}

/// All of them, by number.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) went: Vec<Went>,
    /// By how much requests were sent later than they were to be, at most.
    pub(super) late: Duration,
    /// When reports of each instance came, by number, since the first request.
    pub(super) reports: Vec<Vec<Duration>>,
}

/// Sends requests.
pub(super) struct Driver {
    requests: Arc<Vec<Prepared>>,
    server: Arc<Server>,
    routers: Vec<RouterCalls>,
    nodes: Vec<Channel>,
    instances: usize,
}

impl Driver {
    pub(super) fn new(cluster: &Cluster, workload: &Workload, seed: u64) -> anyhow::Result<Driver> {
        let (addresses, identity) = (cluster.router_addresses(), cluster.identity()?);
        let of = (seed, TenantId(0), workload.block_tokens);
        let time_scale = cluster.shape().predicted_time_scale();
        let server = Server::new((addresses.clone(), identity.clone()), of, Arc::default(), time_scale)?;
        let nodes = cluster.children().filter(|((role, _), _)| *role == Role::Node);
        let nodes = nodes.filter_map(|(_, child)| child.ready()).map(|ready| ready.address("control"));
        Ok(Driver {
            requests: Arc::clone(&workload.requests),
            server: Arc::new(server),
            routers: RouterCalls::all(&addresses, &identity)?,
            nodes: nodes.map(|address| channel(&address, &identity)).collect::<Result<_, _>>()?,
            instances: cluster.shape().instances as usize,
        })
    }

    /// One after the other: each is finished, and routers know all of it, before the next is sent.
    pub(super) async fn lockstep(&self, stop: &CancellationToken) -> anyhow::Result<Recorded> {
        let begun = Instant::now();
        let mut recorded = Recorded::default();
        for (number, request) in self.requests.iter().enumerate() {
            let at = begun.elapsed();
            let step = async {
                let served = self.server.serve(number, request, vec![]).await;
                self.until_known(Instant::now()).await.map(|()| served)
            };
            let served = tokio::select! {
                served = step => served?,
                () = stop.cancelled() => anyhow::bail!("stopped at request {number} of {}", self.requests.len()),
            };
            recorded.went.push(went(at, served)?);
        }
        Ok(recorded)
    }

    /// Each at its time, with so many a second on average; instances report every so often.
    pub(super) async fn timed(
        &self,
        (per_s, report_every): (f64, Duration),
        stop: &CancellationToken,
    ) -> anyhow::Result<Recorded> {
        let begun = Instant::now();
        let mut reports = BTreeMap::new();
        let sent = tokio::select! {
            sent = self.send_all((per_s, begun), stop) => sent?,
            broken = self.watch_reports((begun, report_every), &mut reports) => return Err(broken),
        };
        Ok(Recorded { reports: reports.into_values().collect(), ..sent })
    }

    async fn send_all(
        &self,
        (per_s, begun): (f64, Instant),
        stop: &CancellationToken,
    ) -> anyhow::Result<Recorded> {
        let mut under_way: JoinSet<(usize, Duration, Served)> = JoinSet::new();
        let mut recorded = Recorded::default();
        for (number, due) in arrivals(&self.requests, per_s).into_iter().enumerate() {
            tokio::select! {
                () = tokio::time::sleep_until((begun + due).into()) => {}
                () = stop.cancelled() => anyhow::bail!("stopped at request {number} of {}", self.requests.len()),
            }
            let at = begun.elapsed();
            recorded.late = recorded.late.max(at.saturating_sub(due));
            let (server, requests) = (Arc::clone(&self.server), Arc::clone(&self.requests));
            under_way.spawn(async move {
                let served = server.serve(number, &requests[number], vec![]).await;
                (number, at, served)
            });
        }
        recorded.went.resize_with(self.requests.len(), Went::default);
        loop {
            let ended = tokio::select! {
                ended = under_way.join_next() => ended,
                () = stop.cancelled() => anyhow::bail!("stopped before all requests were answered"),
            };
            let Some(ended) = ended else { return Ok(recorded) };
            let (number, at, served) = ended?;
            recorded.went[number] = went(at, served)?;
        }
    }

    /// Returns when routers have heard from every instance since then that it does nothing, and have taken in what nodes announced.
    async fn until_known(&self, since: Instant) -> anyhow::Result<()> {
        self.until_settled().await?;
        for router in &self.routers {
            while !self.is_idle(router, since).await? {
                anyhow::ensure!(
                    since.elapsed() < QUIET_TIMEOUT,
                    "after {QUIET_TIMEOUT:?} {} has not heard from every instance that it does nothing",
                    router.address
                );
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        // Moves to SSD go on behind the answer, and are announced when they are done: most are by now.
        self.until_settled().await
    }

    async fn until_settled(&self) -> anyhow::Result<()> {
        for node in &self.nodes {
            let settled = settle(node.clone(), QUIET_TIMEOUT).await;
            let is_settled = settled.map_err(|status| anyhow::anyhow!("a node does not answer: {status}"))?;
            anyhow::ensure!(
                is_settled,
                "after {QUIET_TIMEOUT:?} routers have not taken in what a node announced"
            );
        }
        Ok(())
    }

    /// Notes when reports come to the first router, which is asked for routes as long as it answers. Ends only where that is over.
    async fn watch_reports(
        &self,
        (begun, every): (Instant, Duration),
        reports: &mut BTreeMap<u32, Vec<Duration>>,
    ) -> anyhow::Error {
        let Some(router) = self.routers.first() else { return anyhow::anyhow!("there is no router") };
        loop {
            let asked = begun.elapsed();
            let status = match router.status().await {
                Ok(status) => status,
                Err(status) => return anyhow::anyhow!("{} does not answer: {status}", router.address),
            };
            // A call takes as long there as back.
            let at = asked + begun.elapsed().saturating_sub(asked) / 2;
            for instance in &status.instances {
                let all = reports.entry(instance.instance).or_default();
                let age = Duration::from_millis(instance.report_age_ms);
                note_report(all, (at, age), every);
            }
            tokio::time::sleep(every / LOOKS_A_REPORT).await;
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

/// Notes a report that was so old when it was looked at, if it is another one than the last: ages are known to some milliseconds, and reports come no closer.
fn note_report(all: &mut Vec<Duration>, (at, age): (Duration, Duration), every: Duration) {
    let Some(came) = at.checked_sub(age) else { return };
    if all.last().is_none_or(|last| came.saturating_sub(*last) > every / 2) {
        all.push(came);
    }
}

/// When each request is due for so many a second on average: the trace's own times, drawn out or pushed together.
fn arrivals(requests: &[Prepared], per_s: f64) -> Vec<Duration> {
    let span_us = requests.last().map_or(0, |last| last.arrival_us).max(1);
    let wanted_s = requests.len() as f64 / per_s.max(f64::MIN_POSITIVE);
    let due = |request: &Prepared| wanted_s * (request.arrival_us as f64 / span_us as f64);
    requests
        .iter()
        .map(|request| Duration::try_from_secs_f64(due(request)).unwrap_or(Duration::MAX))
        .collect()
}

fn went(at: Duration, served: Served) -> anyhow::Result<Went> {
    if let Some(refused) = served.refused {
        anyhow::bail!("{refused}");
    }
    let Served { sample, decision, mut errors, misses, .. } = served;
    errors.extend(misses);
    let (decision, sample) = (decision.filter(|_| sample.is_some()), sample.unwrap_or_default());
    Ok(Went { at, decision, sample, troubles: errors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_report_is_noted_once_and_those_before_the_first_request_are_not() {
        let ms = Duration::from_millis;
        let mut all = Vec::new();
        for (at, age) in [(20, 30), (70, 80), (120, 10), (170, 62), (220, 109), (340, 31)] {
            note_report(&mut all, (ms(at), ms(age)), ms(200));
        }
        assert_eq!(all, [110, 309].map(ms));
    }

    #[test]
    fn requests_come_in_the_traces_own_rhythm_and_so_many_a_second() {
        let request = |arrival_us| Prepared {
            arrival_us,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        let requests = [0, 1_000, 4_000, 4_000].map(request);
        let due = arrivals(&requests, 2.0);
        assert_eq!(due, [0, 500, 2_000, 2_000].map(Duration::from_millis));
        assert_eq!(arrivals(&requests[..1], 2.0), [Duration::ZERO], "one alone comes at once");
    }
}
