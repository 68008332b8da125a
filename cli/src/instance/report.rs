//! Sends an instance's load to every router, a few times a second.
//!
//! Load is soft: a report that does not arrive is followed by the next one, so nothing is retried.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls::Identity;
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::transport::Channel;

use super::config::InstanceConfig;
use super::load::Working;
use super::metrics::Metrics;
use crate::calls::channel;

/// Least time a router has to take a report; longer when reports are rarer than that.
const REPORT_TIMEOUT_MIN: Duration = Duration::from_millis(500);

/// What stays the same in every report.
#[derive(Clone, Debug)]
pub(super) struct Reporter {
    fixed: pb::ReportRequest,
    routers: Vec<(String, RouterClient<Channel>)>,
    every: Duration,
}

impl Reporter {
    pub(super) fn new(config: &InstanceConfig, address: &str, identity: &Identity) -> anyhow::Result<Self> {
        let routers = config.routers.iter().map(|router| {
            let client = RouterClient::new(channel(router, identity)?);
            anyhow::Ok((router.clone(), client))
        });
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            fixed: pb::ReportRequest {
                instance: config.instance,
                address: address.to_owned(),
                host: config.host.clone(),
                node: config.own_node().unwrap_or_default(),
                has_node: config.own_node().is_some(),
                started_us: u64::try_from(started.as_micros()).unwrap_or(u64::MAX),
                ..pb::ReportRequest::default()
            },
            routers: routers.collect::<anyhow::Result<_>>()?,
            every: Duration::from_millis(config.report_ms),
        })
    }

    /// One task per router, so that a dead one does not delay the others. Ends with a goodbye.
    pub(super) fn spawn(
        &self,
        working: &Arc<Working>,
        metrics: &Metrics,
        stop: &CancellationToken,
    ) -> Vec<tokio::task::JoinHandle<()>> {
        let task = |(address, client): &(String, RouterClient<Channel>)| {
            let one = OneRouter {
                address: address.clone(),
                client: client.clone(),
                fixed: self.fixed.clone(),
                every: self.every,
                working: Arc::clone(working),
                metrics: metrics.clone(),
            };
            tokio::spawn(one.run(stop.clone()))
        };
        self.routers.iter().map(task).collect()
    }
}

struct OneRouter {
    address: String,
    client: RouterClient<Channel>,
    fixed: pb::ReportRequest,
    every: Duration,
    working: Arc<Working>,
    metrics: Metrics,
}

impl OneRouter {
    async fn run(mut self, stop: CancellationToken) {
        let mut due = tokio::time::interval(self.every);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reachable = true;
        for sequence in 1.. {
            let leaving = tokio::select! {
                _ = due.tick() => false,
                () = stop.cancelled() => true,
            };
            let sent = self.send(sequence, leaving).await;
            self.log_change(&mut reachable, &sent);
            if leaving {
                return;
            }
        }
    }

    async fn send(&mut self, sequence: u64, leaving: bool) -> Result<(), tonic::Status> {
        let now = self.working.snapshot();
        self.metrics.running(now.running);
        let mut request = Request::new(pb::ReportRequest {
            queue_tokens: now.queue_tokens,
            running: now.running,
            sequence,
            leaving,
            ..self.fixed.clone()
        });
        request.set_timeout(self.every.max(REPORT_TIMEOUT_MIN));
        self.client.report(request).await.map(|_| ())
    }

    /// One line per change, not one per report.
    fn log_change(&self, reachable: &mut bool, sent: &Result<(), tonic::Status>) {
        match sent {
            Err(cause) if *reachable => {
                tracing::warn!(router = self.address, %cause, "router takes no load reports");
            }
            Ok(()) if !*reachable => tracing::info!(router = self.address, "router takes load reports again"),
            _ => {}
        }
        *reachable = sent.is_ok();
    }
}
