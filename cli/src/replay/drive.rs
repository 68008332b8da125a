//! Runs a replay: starts requests in order and no earlier than they arrive, injects faults when
//! due, collects measurements, and stops early on request, keeping the measurements so far.
//!
//! `serve.rs` serves a single request; `faults.rs` carries out a fault.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::faults::Faults;
use super::measure::ReplayMeasurements;
use super::order::Order;
use super::prepare::PreparedRequest;
use super::progress::Progress;
use super::save_positions::SavePositions;
use super::serve::{EndedRequest, RequestDriver, RequestResult};
use crate::args::Speed;
use crate::cluster::{LocalCluster, cpu_time_of};

/// How long running requests may continue after Ctrl-C.
const INTERRUPT_GRACE: Duration = Duration::from_secs(2);

/// Distinct error and miss texts that are counted separately; all others are counted as `other`.
const TEXTS_MAX: usize = 64;

/// How fast to start requests.
#[derive(Clone, Debug)]
pub(super) struct ReplayPace {
    /// Requests that run concurrently.
    pub(super) concurrency: usize,
    /// Speed of arrivals.
    pub(super) speed: Speed,
}

impl ReplayPace {
    /// Arrival of a request since the start of the replay; `None` if requests do not wait for their
    /// arrival. At very low speeds the latest arrival a trace can hold overflows `Duration` and is
    /// capped.
    fn arrival(&self, request: &PreparedRequest) -> Option<Duration> {
        let Speed::Times(times) = self.speed else { return None };
        let arrival = Duration::from_micros(request.arrival_us).as_secs_f64() / times;
        Some(Duration::try_from_secs_f64(arrival).unwrap_or(Duration::MAX))
    }
}

/// A replay in progress.
pub(super) struct ReplayDrive {
    pub(super) requests: Arc<Vec<PreparedRequest>>,
    pub(super) server: Arc<RequestDriver>,
    pub(super) pace: ReplayPace,
    pub(super) faults: Faults,
    pub(super) progress: Progress,
    pub(super) stop: CancellationToken,
}

struct DriveState {
    started_at: Instant,
    started: usize,
    order: Order,
    visible: SavePositions,
    tasks: JoinSet<EndedRequest>,
    /// The request each task serves, for tasks that panic.
    request_of: HashMap<Id, usize>,
    measurements: ReplayMeasurements,
}

impl ReplayDrive {
    /// Runs until the trace ends, a stop is requested or a router refuses the replay. `cluster` is
    /// the target of faults, if this command started it.
    pub(super) async fn run(mut self, mut cluster: Option<&mut LocalCluster>) -> ReplayMeasurements {
        let mut state = DriveState {
            started_at: Instant::now(),
            started: 0,
            order: Order::new(self.requests.len(), self.pace.concurrency),
            visible: SavePositions::default(),
            tasks: JoinSet::new(),
            request_of: HashMap::new(),
            measurements: ReplayMeasurements::default(),
        };
        let cpu_before = (cpu_time_of(std::process::id()), cluster.as_deref().map(LocalCluster::cpu_time));
        while !state.order.is_done() && !self.is_over(&state) {
            if self.is_fault_due(&state) {
                self.inject_due_faults(&mut state, cluster.as_deref_mut()).await;
            }
            let checked_until = self.start_ready_requests(&mut state);
            self.wait_for_event(&mut state, checked_until).await;
        }
        self.drain(&mut state).await;
        let cpu_now = (cpu_time_of(std::process::id()), cluster.as_deref().map(LocalCluster::cpu_time));
        state.measurements.driver_cpu =
            cpu_now.0.unwrap_or_default().saturating_sub(cpu_before.0.unwrap_or_default());
        state.measurements.cluster_cpu =
            cpu_now.1.zip(cpu_before.1).map(|(now, before)| now.saturating_sub(before));
        if state.order.is_done() {
            self.inject_due_faults(&mut state, cluster).await;
        }
        let marks = self.faults.finish(&self.server.watch, &self.stop).await;
        state.measurements.faults = marks.done;
        state.measurements.faults_not_done = marks.not_done;
        state.measurements.faults_not_measured = marks.not_measured;
        state.measurements.interrupted = self.stop.is_cancelled();
        self.progress.finish();
        state.measurements
    }

    fn is_over(&self, state: &DriveState) -> bool {
        self.stop.is_cancelled() || state.measurements.refused.is_some()
    }

    /// Whether a fault is due before the next request. A fault at 100 % waits until all requests
    /// have ended, so that it affects neither requests nor the replay time.
    fn is_fault_due(&self, state: &DriveState) -> bool {
        state.started < self.requests.len() && self.faults.is_due(state.started)
    }

    async fn inject_due_faults(&mut self, state: &mut DriveState, cluster: Option<&mut LocalCluster>) {
        tokio::select! {
            () = self.faults.inject_due(state.started, state.started_at, &mut state.visible, cluster) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Starts requests until the next one must wait for another to end, for its arrival or for a
    /// fault. Returns the time since the start of the replay up to which arrivals were checked.
    fn start_ready_requests(&self, state: &mut DriveState) -> Duration {
        let requests = &self.requests;
        let checked_until = state.started_at.elapsed();
        while !self.is_over(state) && !self.is_fault_due(state) {
            let next = state.order.start_next(
                |request| &requests[request].hashes,
                |request| {
                    self.pace.arrival(&requests[request]).is_none_or(|arrival| arrival <= checked_until)
                },
            );
            let Some(next) = next else { break };
            state.started += 1;
            let after = state.visible.needed(&requests[next].hashes);
            let (server, requests, begun) =
                (Arc::clone(&self.server), Arc::clone(requests), state.started_at);
            let task = state.tasks.spawn(async move {
                let served = server.serve(next, &requests[next], after).await;
                EndedRequest { request: next, at: begun.elapsed(), served }
            });
            state.request_of.insert(task.id(), next);
        }
        checked_until
    }

    /// Arrival of the next request that had not arrived by `checked_until`. If it has arrived since
    /// then, the wait ends at once: with no request running, no other event would wake the replay.
    /// A request that had arrived by `checked_until` waits for another to end, so the result is
    /// `None`.
    fn next_arrival(&self, state: &DriveState, checked_until: Duration) -> Option<tokio::time::Instant> {
        let next = state.order.next_to_arrive()?;
        let arrival = self.pace.arrival(&self.requests[next])?;
        let moment = state.started_at.checked_add(arrival)?;
        (arrival > checked_until).then(|| moment.into())
    }

    async fn wait_for_event(&self, state: &mut DriveState, checked_until: Duration) {
        if self.is_fault_due(state) {
            return;
        }
        let until = self.next_arrival(state, checked_until);
        let next_moment = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(ended) = state.tasks.join_next_with_id() => self.record_end(state, ended),
            () = next_moment => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// After a stop, waits briefly for running requests to end and then drops them.
    async fn drain(&self, state: &mut DriveState) {
        let deadline = tokio::time::Instant::now() + INTERRUPT_GRACE;
        while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, state.tasks.join_next_with_id()).await {
            self.record_end(state, ended);
        }
        state.tasks.shutdown().await;
    }

    fn record_end(&self, state: &mut DriveState, ended: Result<(Id, EndedRequest), JoinError>) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        if let Some(request) = state.request_of.remove(&id) {
            state.order.end(request);
        }
        let Ok((_, ended)) = ended else {
            count_text(&mut state.measurements.errors, "a request's task was lost".to_owned(), 1);
            state.measurements.failed += 1;
            return;
        };
        state.measurements.wall = state.measurements.wall.max(ended.at);
        let RequestResult { sample, saved_at, hit_blocks, errors, misses, refused, profile, .. } =
            ended.served;
        errors.into_iter().for_each(|error| count_text(&mut state.measurements.errors, error, 1));
        misses.into_iter().for_each(|miss| count_text(&mut state.measurements.misses, miss, 1));
        if let Some(refused) = refused {
            state.measurements.refused.get_or_insert(refused);
        }
        let Some(mut sample) = sample else {
            state.measurements.failed += 1;
            return;
        };
        sample.at = ended.at;
        state.visible.record(&self.requests[ended.request].hashes[hit_blocks..], &saved_at);
        self.progress.ended(&sample);
        if state.measurements.profiles.len() < TEXTS_MAX {
            state.measurements.profiles.insert(profile);
        }
        state.measurements.samples.push(sample);
    }
}

/// Counts by text, with a bound on distinct texts because they come from other processes.
fn count_text(counts: &mut std::collections::BTreeMap<String, u64>, text: String, by: u64) {
    let known = counts.len() < TEXTS_MAX || counts.contains_key(&text);
    *counts.entry(if known { text } else { "other".to_owned() }).or_default() += by;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::{IdentityDigest, TenantId};
    use kvfleet_client::{Client, ClientConfig};
    use kvfleet_net::tls::{Role, TlsFiles};

    use super::super::watch::FailureWatch;
    use super::*;
    use kvfleet_net::certificates::Authority;

    /// A replay of `requests` requests with a router address that refuses connections.
    fn drive(requests: usize) -> ReplayDrive {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::open(dir.path()).unwrap().issue(&Role::Admin).unwrap();
        let identity = TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load().unwrap();
        let server = RequestDriver {
            client: Client::new(ClientConfig::new(vec!["127.0.0.1:9".into()], identity.clone())).unwrap(),
            identity,
            digest: IdentityDigest([1; 16]),
            tenant: TenantId(0),
            block_tokens: 512,
            watch: Arc::new(FailureWatch::default()),
            time_scale: 1.0,
            instances: parking_lot::Mutex::default(),
        };
        let request = PreparedRequest {
            arrival_us: 0,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        ReplayDrive {
            requests: Arc::new(vec![request; requests]),
            faults: Faults::plan(&[], &[], requests, &server.watch),
            server: Arc::new(server),
            pace: ReplayPace { concurrency: 4, speed: Speed::Max },
            progress: Progress::new(requests, true),
            stop: CancellationToken::new(),
        }
    }

    fn state(drive: &ReplayDrive) -> DriveState {
        DriveState {
            started_at: Instant::now(),
            started: 0,
            order: Order::new(drive.requests.len(), drive.pace.concurrency),
            visible: SavePositions::default(),
            tasks: JoinSet::new(),
            request_of: HashMap::new(),
            measurements: ReplayMeasurements::default(),
        }
    }

    #[tokio::test]
    async fn lost_task_counts_as_a_failed_request() {
        let drive = drive(1);
        let mut state = state(&drive);
        let request = state.order.start_next(|_| &[], |_| true).unwrap();
        let task = state.tasks.spawn(async { panic!("lost") });
        state.request_of.insert(task.id(), request);
        drive.wait_for_event(&mut state, Duration::ZERO).await;
        assert!(state.order.is_done(), "or the replay waits for ever");
        assert_eq!(state.measurements.failed, 1);
    }

    #[tokio::test]
    async fn refusal_stops_further_starts() {
        let drive = drive(3);
        let mut state = state(&drive);
        let request = state.order.start_next(|_| &[], |_| true).unwrap();
        let served = RequestResult { refused: Some("why".into()), ..RequestResult::default() };
        let task = state.tasks.spawn(async move { EndedRequest { request, at: Duration::ZERO, served } });
        state.request_of.insert(task.id(), request);
        drive.wait_for_event(&mut state, Duration::ZERO).await;
        drive.start_ready_requests(&mut state);
        assert_eq!((state.started, state.measurements.refused.as_deref()), (0, Some("why")));
    }

    #[tokio::test]
    async fn starts_a_request_that_arrived_between_checks() {
        let mut drive = drive(1);
        let arrival = Duration::from_millis(1);
        drive.pace.speed = Speed::Times(1.0);
        drive.requests = Arc::new(vec![PreparedRequest { arrival_us: 1000, ..drive.requests[0].clone() }]);
        let mut state = state(&drive);
        // The request arrived after arrivals were checked and before the wait, and no other request
        // is running.
        state.started_at = Instant::now() - 2 * arrival;
        drive.wait_for_event(&mut state, Duration::ZERO).await;
        let checked_until = drive.start_ready_requests(&mut state);
        assert_eq!((state.started, checked_until > arrival), (1, true));
    }

    #[test]
    fn extreme_arrivals_do_not_overflow() {
        let request = |arrival_us| PreparedRequest {
            arrival_us,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        let pace = |times| ReplayPace { concurrency: 1, speed: Speed::Times(times) };
        assert_eq!(pace(2.0).arrival(&request(3_000_000)), Some(Duration::from_millis(1500)));
        assert_eq!(pace(1e-300).arrival(&request(u64::MAX)), Some(Duration::MAX));
        assert_eq!(ReplayPace { concurrency: 1, speed: Speed::Max }.arrival(&request(5)), None);
    }
}
