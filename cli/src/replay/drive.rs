//! Drives a replay: starts requests in a fair order and not before they arrive, carries out faults at
//! their moments, gathers what was measured, and stops early when asked to, with what has ended so far.
//!
//! Not here: serving one request (`serve.rs`) and what a fault does (`faults.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::faults::Faults;
use super::measure::Measured;
use super::order::Order;
use super::prepare::Prepared;
use super::progress::Progress;
use super::serve::{Ended, Served, Server};
use super::visible::Visible;
use crate::args::Speed;
use crate::cluster::{Cluster, cpu_time_of};

/// How long requests under way get to end after Ctrl-C.
const INTERRUPT_GRACE: Duration = Duration::from_secs(2);

/// Kinds of errors and reasons of misses are counted by text; further ones share one line.
const TEXTS_MAX: usize = 64;

/// How to drive.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Requests at a time.
    pub(super) concurrency: usize,
    /// How fast they are started.
    pub(super) speed: Speed,
}

impl Pace {
    /// When a request arrives, since the start of the replay; nothing when it need not be waited for. At
    /// the slowest pace the latest moment a trace can name is longer than any clock counts.
    fn arrival(&self, request: &Prepared) -> Option<Duration> {
        let Speed::Times(times) = self.speed else { return None };
        let arrival = Duration::from_micros(request.arrival_us).as_secs_f64() / times;
        Some(Duration::try_from_secs_f64(arrival).unwrap_or(Duration::MAX))
    }
}

/// A replay under way.
pub(super) struct Drive {
    pub(super) requests: Arc<Vec<Prepared>>,
    pub(super) server: Arc<Server>,
    pub(super) pace: Pace,
    pub(super) faults: Faults,
    pub(super) progress: Progress,
    pub(super) stop: CancellationToken,
}

struct State {
    started_at: Instant,
    started: usize,
    order: Order,
    visible: Visible,
    under_way: JoinSet<Ended>,
    /// Which request a task serves, should it be lost.
    request_of: HashMap<Id, usize>,
    measured: Measured,
}

impl Drive {
    /// Runs to the end of the trace, to the stop, or until a router refuses. `cluster` is the one to break,
    /// if it is ours.
    pub(super) async fn run(mut self, mut cluster: Option<&mut Cluster>) -> Measured {
        let mut state = State {
            started_at: Instant::now(),
            started: 0,
            order: Order::new(self.requests.len(), self.pace.concurrency),
            visible: Visible::default(),
            under_way: JoinSet::new(),
            request_of: HashMap::new(),
            measured: Measured::default(),
        };
        let cpu_before = (cpu_time_of(std::process::id()), cluster.as_deref().map(Cluster::cpu_time));
        while !state.order.is_done() && !self.is_over(&state) {
            if self.is_fault_next(&state) {
                self.break_what_is_due(&mut state, cluster.as_deref_mut()).await;
            }
            let looked = self.start_all_that_may(&mut state);
            self.wait_for_one(&mut state, looked).await;
        }
        self.drain(&mut state).await;
        let cpu_now = (cpu_time_of(std::process::id()), cluster.as_deref().map(Cluster::cpu_time));
        state.measured.driver_cpu =
            cpu_now.0.unwrap_or_default().saturating_sub(cpu_before.0.unwrap_or_default());
        state.measured.cluster_cpu =
            cpu_now.1.zip(cpu_before.1).map(|(now, before)| now.saturating_sub(before));
        if state.order.is_done() {
            self.break_what_is_due(&mut state, cluster).await;
        }
        let marks = self.faults.finish(&self.server.watch, &self.stop).await;
        state.measured.faults = marks.done;
        state.measured.faults_not_done = marks.not_done;
        state.measured.faults_not_measured = marks.not_measured;
        state.measured.interrupted = self.stop.is_cancelled();
        self.progress.finish();
        state.measured
    }

    fn is_over(&self, state: &State) -> bool {
        self.stop.is_cancelled() || state.measured.refused.is_some()
    }

    /// Whether a fault comes before the next request. One at 100 % comes before none: it waits for the last
    /// end, so that it costs no request and no time of the replay.
    fn is_fault_next(&self, state: &State) -> bool {
        state.started < self.requests.len() && self.faults.is_due(state.started)
    }

    async fn break_what_is_due(&mut self, state: &mut State, cluster: Option<&mut Cluster>) {
        tokio::select! {
            () = self.faults.due(state.started, state.started_at, &mut state.visible, cluster) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Starts requests until the next one has to wait for an end, its arrival or a fault. Answers the moment, since the
    /// start of the replay, up to which arrivals were seen.
    fn start_all_that_may(&self, state: &mut State) -> Duration {
        let requests = &self.requests;
        let looked = state.started_at.elapsed();
        while !self.is_over(state) && !self.is_fault_next(state) {
            let next = state.order.start_next(
                |request| &requests[request].hashes,
                |request| self.pace.arrival(&requests[request]).is_none_or(|arrival| arrival <= looked),
            );
            let Some(next) = next else { break };
            state.started += 1;
            let after = state.visible.needed(&requests[next].hashes);
            let (server, requests, begun) =
                (Arc::clone(&self.server), Arc::clone(requests), state.started_at);
            let task = state.under_way.spawn(async move {
                let served = server.serve(next, &requests[next], after).await;
                Ended { request: next, at: begun.elapsed(), served }
            });
            state.request_of.insert(task.id(), next);
        }
        looked
    }

    /// When the next request arrives that had not when arrivals were `looked` at. One that arrived just since then is
    /// waited for as well, in vain for no time: nobody else would wake the replay if no request is under way. One that
    /// was seen waits for an end.
    fn next_arrival(&self, state: &State, looked: Duration) -> Option<tokio::time::Instant> {
        let next = state.order.next_to_arrive()?;
        let arrival = self.pace.arrival(&self.requests[next])?;
        let moment = state.started_at.checked_add(arrival)?;
        (arrival > looked).then(|| moment.into())
    }

    async fn wait_for_one(&self, state: &mut State, looked: Duration) {
        if self.is_fault_next(state) {
            return;
        }
        let until = self.next_arrival(state, looked);
        let next_moment = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(ended) = state.under_way.join_next_with_id() => self.take(state, ended),
            () = next_moment => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// After a stop, requests under way may end for a moment and then are dropped.
    async fn drain(&self, state: &mut State) {
        let deadline = tokio::time::Instant::now() + INTERRUPT_GRACE;
        while let Ok(Some(ended)) =
            tokio::time::timeout_at(deadline, state.under_way.join_next_with_id()).await
        {
            self.take(state, ended);
        }
        state.under_way.shutdown().await;
    }

    fn take(&self, state: &mut State, ended: Result<(Id, Ended), JoinError>) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        if let Some(request) = state.request_of.remove(&id) {
            state.order.end(request);
        }
        let Ok((_, ended)) = ended else {
            count(&mut state.measured.errors, "a request's task was lost".to_owned(), 1);
            state.measured.failed += 1;
            return;
        };
        state.measured.wall = state.measured.wall.max(ended.at);
        let Served { sample, saved_at, hit_blocks, errors, misses, refused, profile, .. } = ended.served;
        errors.into_iter().for_each(|error| count(&mut state.measured.errors, error, 1));
        misses.into_iter().for_each(|miss| count(&mut state.measured.misses, miss, 1));
        if let Some(refused) = refused {
            state.measured.refused.get_or_insert(refused);
        }
        let Some(mut sample) = sample else {
            state.measured.failed += 1;
            return;
        };
        sample.at = ended.at;
        state.visible.saved(&self.requests[ended.request].hashes[hit_blocks..], &saved_at);
        self.progress.ended(&sample);
        if state.measured.profiles.len() < TEXTS_MAX {
            state.measured.profiles.insert(profile);
        }
        state.measured.samples.push(sample);
    }
}

/// Counts by text, bounded: what comes from other processes must not grow our memory.
fn count(counts: &mut std::collections::BTreeMap<String, u64>, text: String, by: u64) {
    let known = counts.len() < TEXTS_MAX || counts.contains_key(&text);
    *counts.entry(if known { text } else { "other".to_owned() }).or_default() += by;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::{IdentityDigest, TenantId};
    use kvfleet_client::{Client, ClientConfig};
    use kvfleet_proto::tls::TlsFiles;

    use super::super::watch::Watch;
    use super::*;
    use crate::certificates::Authority;

    /// A replay of so many requests on routers that nobody asks.
    fn drive(requests: usize) -> Drive {
        let dir = tempfile::tempdir().unwrap();
        let files = Authority::open(dir.path()).unwrap().issue("admin").unwrap();
        let identity = TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load().unwrap();
        let server = Server {
            client: Client::new(ClientConfig::new(vec!["127.0.0.1:9".into()], identity.clone())).unwrap(),
            identity,
            digest: IdentityDigest([1; 16]),
            tenant: TenantId(0),
            block_tokens: 512,
            watch: Arc::new(Watch::default()),
            time_scale: 1.0,
            instances: parking_lot::Mutex::default(),
        };
        let request = Prepared {
            arrival_us: 0,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        Drive {
            requests: Arc::new(vec![request; requests]),
            faults: Faults::plan(&[], &[], requests, &server.watch),
            server: Arc::new(server),
            pace: Pace { concurrency: 4, speed: Speed::Max },
            progress: Progress::new(requests, true),
            stop: CancellationToken::new(),
        }
    }

    fn state(drive: &Drive) -> State {
        State {
            started_at: Instant::now(),
            started: 0,
            order: Order::new(drive.requests.len(), drive.pace.concurrency),
            visible: Visible::default(),
            under_way: JoinSet::new(),
            request_of: HashMap::new(),
            measured: Measured::default(),
        }
    }

    #[tokio::test]
    async fn a_request_whose_task_is_lost_has_ended_and_failed() {
        let drive = drive(1);
        let mut state = state(&drive);
        let request = state.order.start_next(|_| &[], |_| true).unwrap();
        let task = state.under_way.spawn(async { panic!("lost") });
        state.request_of.insert(task.id(), request);
        drive.wait_for_one(&mut state, Duration::ZERO).await;
        assert!(state.order.is_done(), "or the replay waits for ever");
        assert_eq!(state.measured.failed, 1);
    }

    #[tokio::test]
    async fn a_refusal_starts_nothing_more() {
        let drive = drive(3);
        let mut state = state(&drive);
        let request = state.order.start_next(|_| &[], |_| true).unwrap();
        let served = Served { refused: Some("why".into()), ..Served::default() };
        let task = state.under_way.spawn(async move { Ended { request, at: Duration::ZERO, served } });
        state.request_of.insert(task.id(), request);
        drive.wait_for_one(&mut state, Duration::ZERO).await;
        drive.start_all_that_may(&mut state);
        assert_eq!((state.started, state.measured.refused.as_deref()), (0, Some("why")));
    }

    #[tokio::test]
    async fn a_request_that_arrives_while_nobody_looks_is_not_waited_for_in_vain() {
        let mut drive = drive(1);
        let arrival = Duration::from_millis(1);
        drive.pace.speed = Speed::Times(1.0);
        drive.requests = Arc::new(vec![Prepared { arrival_us: 1000, ..drive.requests[0].clone() }]);
        let mut state = state(&drive);
        // Arrivals were looked at before it came, and it came before it is waited for: nothing else is under way.
        state.started_at = Instant::now() - 2 * arrival;
        drive.wait_for_one(&mut state, Duration::ZERO).await;
        let looked = drive.start_all_that_may(&mut state);
        assert_eq!((state.started, looked > arrival), (1, true));
    }

    #[test]
    fn no_arrival_and_no_pace_is_too_much_for_the_clock() {
        let request = |arrival_us| Prepared {
            arrival_us,
            hashes: vec![],
            input_tokens: 1,
            output_tokens: 1,
            category: kv_core::id::Category::default(),
        };
        let pace = |times| Pace { concurrency: 1, speed: Speed::Times(times) };
        assert_eq!(pace(2.0).arrival(&request(3_000_000)), Some(Duration::from_millis(1500)));
        assert_eq!(pace(1e-300).arrival(&request(u64::MAX)), Some(Duration::MAX));
        assert_eq!(Pace { concurrency: 1, speed: Speed::Max }.arrival(&request(5)), None);
    }
}
