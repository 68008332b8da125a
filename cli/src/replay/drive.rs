//! Drives a replay: starts requests in a fair order, carries out faults at their moments, gathers what
//! was measured, and stops early when asked to, with what has ended so far.
//!
//! Not here: serving one request (`serve.rs`) and what a fault does (`faults.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
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

/// A replay under way.
pub(super) struct Drive<'a> {
    pub(super) requests: &'a Arc<Vec<Prepared>>,
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
    measured: Measured,
}

impl Drive<'_> {
    /// Runs to the end of the trace or to the stop. `cluster` is the one to break, if it is ours.
    pub(super) async fn run(mut self, mut cluster: Option<&mut Cluster>) -> Measured {
        let mut state = State {
            started_at: Instant::now(),
            started: 0,
            order: Order::new(self.requests.len(), self.pace.concurrency),
            visible: Visible::default(),
            under_way: JoinSet::new(),
            measured: Measured::default(),
        };
        let cpu_before = (cpu_time_of(std::process::id()), cluster.as_deref().map(Cluster::cpu_time));
        while !state.order.is_done() && !self.stop.is_cancelled() {
            self.faults
                .due(state.started, state.started_at, &mut state.visible, cluster.as_deref_mut())
                .await;
            self.start_all_that_may(&mut state);
            self.wait_for_one(&mut state).await;
        }
        self.drain(&mut state).await;
        self.faults.due(state.started, state.started_at, &mut state.visible, cluster.as_deref_mut()).await;
        state.measured.wall = state.started_at.elapsed();
        let cpu_now = (cpu_time_of(std::process::id()), cluster.as_deref().map(Cluster::cpu_time));
        state.measured.driver_cpu =
            cpu_now.0.unwrap_or_default().saturating_sub(cpu_before.0.unwrap_or_default());
        state.measured.cluster_cpu =
            cpu_now.1.zip(cpu_before.1).map(|(now, before)| now.saturating_sub(before));
        state.measured.interrupted = self.stop.is_cancelled();
        let (faults, not_done) = self.faults.finish(&self.server.watch).await;
        state.measured.faults = faults;
        not_done.into_iter().for_each(|fault| count(&mut state.measured.errors, format!("fault {fault}"), 1));
        self.progress.finish();
        state.measured
    }

    /// Starts requests until the next one has to wait for an end, a moment or a fault.
    fn start_all_that_may(&self, state: &mut State) {
        let requests = self.requests;
        while !self.faults.is_due(state.started) && self.is_time_for_next(state) {
            let Some(next) = state.order.start_next(|request| &requests[request].hashes) else { return };
            state.started += 1;
            let after = state.visible.needed(&requests[next].hashes);
            let (server, requests, begun) =
                (Arc::clone(&self.server), Arc::clone(requests), state.started_at);
            state.under_way.spawn(async move {
                let served = server.serve(next, &requests[next], after).await;
                Ended { request: next, at: begun.elapsed(), served }
            });
        }
    }

    /// When the next request arrives, for a paced replay.
    fn next_arrival(&self, state: &State) -> Option<Duration> {
        let Speed::Times(times) = self.pace.speed else { return None };
        let next = self.requests.get(state.started)?;
        Some(Duration::from_micros(next.arrival_us).div_f64(times))
    }

    fn is_time_for_next(&self, state: &State) -> bool {
        self.next_arrival(state).is_none_or(|arrival| state.started_at.elapsed() >= arrival)
    }

    async fn wait_for_one(&self, state: &mut State) {
        let arrival = self.next_arrival(state).filter(|_| !self.is_time_for_next(state));
        let until = arrival.map(|arrival| tokio::time::Instant::from_std(state.started_at + arrival));
        let next_moment = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(ended) = state.under_way.join_next() => self.take(state, ended),
            () = next_moment => {}
            () = self.stop.cancelled() => {}
            else => {}
        }
    }

    /// After a stop, requests under way may end for a moment and then are dropped.
    async fn drain(&self, state: &mut State) {
        let deadline = tokio::time::Instant::now() + INTERRUPT_GRACE;
        while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, state.under_way.join_next()).await {
            self.take(state, ended);
        }
        state.under_way.shutdown().await;
    }

    fn take(&self, state: &mut State, ended: Result<Ended, tokio::task::JoinError>) {
        let Ok(ended) = ended else {
            count(&mut state.measured.errors, "a request's task was lost".to_owned(), 1);
            state.measured.failed += 1;
            return;
        };
        state.order.end(ended.request);
        let Served { sample, saved_at, hit_blocks, errors, misses } = ended.served;
        errors.into_iter().for_each(|error| count(&mut state.measured.errors, error, 1));
        misses.into_iter().for_each(|miss| count(&mut state.measured.misses, miss, 1));
        let Some(mut sample) = sample else {
            state.measured.failed += 1;
            return;
        };
        sample.at = ended.at;
        state.visible.saved(&self.requests[ended.request].hashes[hit_blocks..], &saved_at);
        self.progress.ended(&sample);
        state.measured.samples.push(sample);
    }
}

/// Counts by text, bounded: what comes from other processes must not grow our memory.
fn count(counts: &mut std::collections::BTreeMap<String, u64>, text: String, by: u64) {
    let known = counts.len() < TEXTS_MAX || counts.contains_key(&text);
    *counts.entry(if known { text } else { "other".to_owned() }).or_default() += by;
}
