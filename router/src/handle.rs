//! Calls from inside the router's process, with the rights of a frontend. The gateway uses them.
//!
//! The functions that answer gRPC calls answer these too. Not here: the gateway itself
//! (`kvfleet-gateway`).

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::InstanceId;
use kvfleet_net::tls::callers::Caller;
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use tonic::Status;

use crate::config::EngineConfig;
use crate::engines::{EngineFollowers, FollowError};
use crate::groups::Group;
use crate::server::route::RouteHints;
use crate::server::{ServerState, decode, feedback, moved_requests, route};
use crate::view::decision_log::AnswerStats;

/// Longest silence of a leader at which a replica still counts as up to date: several election
/// timeouts.
const NEAR_LEADER: Duration = Duration::from_secs(3);

/// Timeout of one attempt to hand a group over, and the pause before the next attempt.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(1);
const HAND_OVER_PAUSE: Duration = Duration::from_millis(50);

type RouteFuture<'a> = Pin<Box<dyn Future<Output = Result<pb::RouteReply, Status>> + Send + 'a>>;

/// Handle for calls to one router from inside its process.
#[derive(Clone)]
pub struct RouterHandle {
    shared: Arc<ServerState>,
    following: EngineFollowers,
    identity: Identity,
}

impl RouterHandle {
    pub(crate) fn new(
        shared: Arc<ServerState>,
        following: EngineFollowers,
        identity: Identity,
    ) -> RouterHandle {
        RouterHandle { shared, following, identity }
    }

    /// Starts following the KV events of an engine that was discovered at run time, until
    /// [`RouterHandle::unfollow`]. A repeated call with the same engine has no effect.
    ///
    /// # Errors
    /// [`FollowError`] if the configuration is invalid or another engine has the instance numbers.
    pub fn follow(&self, engine: EngineConfig) -> Result<(), FollowError> {
        self.following.follow(engine)
    }

    /// Returns whether the engine with this first instance is followed.
    #[must_use]
    pub fn follows(&self, instance: u32) -> bool {
        self.following.follows(instance)
    }

    /// Stops following the engine with this first instance and forgets its resident blocks. Returns
    /// whether it was followed. Engines of the configuration stay followed.
    pub fn unfollow(&self, instance: u32) -> bool {
        self.following.unfollow(instance)
    }

    /// The router's certificate identity; renewal replaces the certificate in place.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity.clone()
    }

    /// Chooses an instance for a request.
    ///
    /// # Errors
    /// As the gRPC call: `InvalidArgument` for an invalid request, `Unavailable` while the router
    /// cannot answer.
    pub async fn route(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        self.route_with(request, RouteHints::default()).await
    }

    /// As [`RouterHandle::route`], with additional hints about the request.
    ///
    /// # Errors
    /// As [`RouterHandle::route`].
    pub async fn route_with(
        &self,
        request: pb::RouteRequest,
        hints: RouteHints,
    ) -> Result<pb::RouteReply, Status> {
        let started = Instant::now();
        // Boxed, so that callers need not compile the router's whole future type.
        let caller = Caller::new(Role::Frontend);
        let answering: RouteFuture<'_> = Box::pin(route::route(&self.shared, &caller, request, hints));
        let answer = answering.await;
        self.shared.metrics.record_route(route::outcome(&answer), started.elapsed());
        answer
    }

    /// Records that a routed request runs on `instance` instead of its chosen one, and continues on
    /// `decode_instance` if one is given. The request must equal the routed one. Load accounted to
    /// the request moves along, reports of the new instance count from then on, and `kvfleet why`
    /// names it. Has no effect for an unknown or finished request.
    pub fn record_move(
        &self,
        request: &pb::RouteRequest,
        instance: InstanceId,
        decode_instance: Option<InstanceId>,
    ) {
        moved_requests::record_move(&self.shared, request, instance, decode_instance);
    }

    /// Records the time from the decision to the first token, which corrects TTFT predictions. Has
    /// no effect for an unknown request, for another instance, or if the instance reported itself.
    pub fn record_first_token(&self, request: u64, instance: InstanceId, after: Duration) {
        feedback::record_first_token(&self.shared, request, instance, after);
    }

    /// Records the end of an answer: its number of tokens (0 if unknown) and the mean time between
    /// tokens, if measured. Has no effect for an unknown request or another instance. An earlier
    /// report of the instance takes precedence.
    pub fn record_end(&self, request: u64, instance: InstanceId, output_tokens: u32, tbt: Option<Duration>) {
        let tbt_us = tbt.map_or(0, |tbt| u64::try_from(tbt.as_micros()).unwrap_or(u64::MAX));
        feedback::record_end(&self.shared, request, instance, AnswerStats { output_tokens, tbt_us });
        feedback::stop_waiting(&self.shared, request);
    }

    /// Records that a request ended without a complete answer: the client disconnected or the
    /// engine failed. It leaves the queue, and its output length is not learned from.
    pub fn record_abort(&self, request: u64) {
        feedback::record_abort(&self.shared, request);
    }

    /// Takes the load of an instance that does not report itself.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid report; `ResourceExhausted` if too many instances are
    /// known.
    pub fn report(&self, request: pb::ReportRequest) -> Result<(), Status> {
        route::report(&self.shared, request).map(drop)
    }

    /// Returns whether a routed request may decode on an instance within the TBT limit of its
    /// decision.
    #[must_use]
    pub fn admit_decode(&self, request: u64, instance: InstanceId) -> pb::AdmitDecodeReply {
        decode::admit_on(&self.shared, request, instance)
    }

    /// Hands over every group that this router leads, with retries, and campaigns for none from
    /// here on. The caller is about to stop the process.
    ///
    /// Streams of route calls end after their outstanding answers, so that callers reopen them
    /// elsewhere. Returns the groups still led after `within`; empty on success. A group without
    /// another voter stays here and is not returned.
    pub async fn hand_over_leadership(&self, within: Duration) -> Vec<u16> {
        let begun = Instant::now();
        self.shared.lifecycle.start_drain();
        let all = self.shared.groups.all();
        all.iter().for_each(|group| group.consensus.stop_campaigning());
        loop {
            let is_to_go =
                |group: &&Arc<Group>| group.consensus.is_leader() && group.consensus.has_other_voter();
            let led: Vec<_> = all.iter().filter(is_to_go).collect();
            let left = within.saturating_sub(begun.elapsed());
            if led.is_empty() || left.is_zero() {
                return led.iter().map(|group| group.number()).collect();
            }
            let going = futures_util::future::join_all(led.iter().map(|group| group.consensus.hand_over()));
            // A group that was not taken over in time is retried, perhaps with another router.
            let _ = tokio::time::timeout(left.min(HAND_OVER_TIMEOUT), going).await;
            tokio::time::sleep(HAND_OVER_PAUSE.min(left)).await;
        }
    }

    /// Checks that this router's replicas follow their leaders. A process that only lacks a leader
    /// is alive but not ready.
    ///
    /// # Errors
    /// One line that names the missing part.
    pub fn ready(&self) -> Result<(), String> {
        // Reported before the process stops, so that load balancers can react.
        if self.shared.lifecycle.is_draining() {
            return Err("this router is draining: it was asked to let go of its work".to_owned());
        }
        for group in self.shared.groups.all() {
            let (number, consensus) = (group.number(), &group.consensus);
            if group.has_diverged() {
                return Err(format!(
                    "the replica of group {number} differs from its leader's and is being repaired"
                ));
            }
            match consensus.contact_age() {
                Some(age) if age <= NEAR_LEADER => {}
                Some(age) => {
                    return Err(format!(
                        "group {number} has had no contact with its leader for {} ms",
                        age.as_millis()
                    ));
                }
                None => return Err(format!("group {number} has had no contact with a leader yet")),
            }
            if !group.has_caught_up() {
                return Err(format!(
                    "the replica of group {number} has not caught up with its leader since it started"
                ));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for RouterHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Desk")
    }
}
