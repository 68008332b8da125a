//! Calls made within the process, as one of the cluster's own: what the doors beside the control port ask.
//!
//! The same functions answer them as answer gRPC. Not here: the doors themselves (`kvfleet-doors`).

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use kvfleet_proto::tls::Identity;
use kvfleet_proto::tls::callers::Caller;
use tonic::Status;

use crate::config::EngineConfig;
use crate::engines::{FollowError, Following};
use crate::groups::Group;
use crate::server::route::Besides;
use crate::server::{Shared, decode, moved, route, why};
use crate::view::recall::Said;

/// Longest silence of a leader with which a replica still counts as near it: some elections long.
const NEAR_LEADER: Duration = Duration::from_secs(3);

/// Longest one attempt at handing a group over may take, and the pause before the next.
const HAND_OVER_TRY: Duration = Duration::from_secs(1);
const HAND_OVER_PAUSE: Duration = Duration::from_millis(50);

type Answering<'a> = Pin<Box<dyn Future<Output = Result<pb::RouteReply, Status>> + Send + 'a>>;

/// Asks one router from within its process.
#[derive(Clone)]
pub struct Desk {
    shared: Arc<Shared>,
    following: Following,
    identity: Identity,
}

impl Desk {
    pub(crate) fn new(shared: Arc<Shared>, following: Following, identity: Identity) -> Desk {
        Desk { shared, following, identity }
    }

    /// Follows the events of an engine that came while the router runs, until it is asked not to; again the same is no other.
    ///
    /// # Errors
    /// [`FollowError`]: what makes no sense, and numbers that another engine has.
    pub fn follow(&self, engine: EngineConfig) -> Result<(), FollowError> {
        self.following.follow(engine)
    }

    /// Whether the engine whose first rank is this instance is followed.
    #[must_use]
    pub fn follows(&self, instance: u32) -> bool {
        self.following.follows(instance)
    }

    /// Follows an engine no more whose first rank is this instance, and forgets what it has in GPU memory. Whether it was followed; what the
    /// configuration names goes on.
    pub fn unfollow(&self, instance: u32) -> bool {
        self.following.unfollow(instance)
    }

    /// Who this router is to those that call it; what it shows is renewed in place.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity.clone()
    }

    /// Chooses an instance for a request.
    ///
    /// # Errors
    /// What the gRPC call of this name answers: `InvalidArgument` for what makes no sense, `Unavailable` while the router cannot know.
    pub async fn route(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        self.route_with(request, Besides::default()).await
    }

    /// The same with what is known of the request besides.
    ///
    /// # Errors
    /// As above.
    pub async fn route_with(
        &self,
        request: pb::RouteRequest,
        besides: Besides,
    ) -> Result<pb::RouteReply, Status> {
        let started = Instant::now();
        // Behind a pointer, so that whoever awaits it need not be compiled with all that a router is.
        let answering: Answering<'_> =
            Box::pin(route::route(&self.shared, &Caller::Member, request, besides));
        let answer = answering.await;
        self.shared.metrics.routed(route::outcome(&answer), started.elapsed());
        answer
    }

    /// A request that was decided here, asked for in the same words, runs on this instance in place of the one it was sent to, and the second goes on from there if one is
    /// named. What was counted of it goes along, the second instance's word of it counts from then on, and `why` tells who answered. Of a request that is not known, or is
    /// over, it says nothing.
    pub fn moved(&self, request: &pb::RouteRequest, to: (InstanceId, Option<InstanceId>)) {
        moved::moved(&self.shared, request, to);
    }

    /// The first token of a request came from an instance, so long after it was chosen: by this predictions are corrected. Of a request that is not known,
    /// was sent elsewhere, or of which an instance told, it says nothing.
    pub fn first_token(&self, request: u64, instance: InstanceId, after: Duration) {
        why::first_token(&self.shared, request, instance, after);
    }

    /// The answer to a request ended, which came from this instance: how many tokens it had, 0 where nobody knows, and how far apart they came, where that was seen. Of a
    /// request that is not known or was sent elsewhere it says nothing, and what its instance told before counts and not this.
    pub fn ended(&self, request: u64, instance: InstanceId, output_tokens: u32, tbt: Option<Duration>) {
        let tbt_us = tbt.map_or(0, |tbt| u64::try_from(tbt.as_micros()).unwrap_or(u64::MAX));
        why::ended(&self.shared, (request, instance), Said { output_tokens, tbt_us });
        why::over(&self.shared, request);
    }

    /// A request is over before its answer was: its caller left, or its engine failed. It waits no more, and nobody learns from it how much is said.
    pub fn left(&self, request: u64) {
        why::left(&self.shared, request);
    }

    /// Takes the load of an instance that does not report itself.
    ///
    /// # Errors
    /// `InvalidArgument`, and `ResourceExhausted` where too many instances are known.
    pub fn report(&self, request: pb::ReportRequest) -> Result<(), Status> {
        route::report(&self.shared, request).map(drop)
    }

    /// Whether a request that was decided here may be sent to an instance to decode, under the limit that it was decided with.
    #[must_use]
    pub fn may_decode(&self, request: u64, instance: InstanceId) -> pb::MayDecodeReply {
        decode::may_there(&self.shared, request, instance)
    }

    /// Hands over every group that this router leads, as often as it takes, and campaigns for none from here on: whoever asks is
    /// about to end the process. Streams of route calls end behind the answers under way, so that callers open them elsewhere. Answers with the groups that it still leads after that long, none where all went well. A group
    /// that has no other voter stays here, and is none of them.
    pub async fn hand_over(&self, within: Duration) -> Vec<u16> {
        let begun = Instant::now();
        self.shared.draining.cancel();
        let all = self.shared.groups.all();
        all.iter().for_each(|group| group.consensus.stand_aside());
        loop {
            let is_to_go = |group: &&Arc<Group>| group.consensus.is_leader() && group.consensus.has_heir();
            let led: Vec<_> = all.iter().filter(is_to_go).collect();
            let left = within.saturating_sub(begun.elapsed());
            if led.is_empty() || left.is_zero() {
                return led.iter().map(|group| group.number()).collect();
            }
            let going = futures_util::future::join_all(led.iter().map(|group| group.consensus.hand_over()));
            // What did not take over in time is tried again, perhaps with another router.
            let _ = tokio::time::timeout(left.min(HAND_OVER_TRY), going).await;
            tokio::time::sleep(HAND_OVER_PAUSE.min(left)).await;
        }
    }

    /// Whether this router answers from replicas that follow their leaders; if not, what is missing. A process that only lacks a
    /// leader is alive all the same.
    ///
    /// # Errors
    /// A line for a person.
    pub fn ready(&self) -> Result<(), String> {
        // Before the process is told to stop, so that whoever sends requests here has time to hear of it.
        if self.shared.draining.is_cancelled() {
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
                        "group {number} has heard nothing of its leader for {} ms",
                        age.as_millis()
                    ));
                }
                None => return Err(format!("group {number} has not heard of a leader yet")),
            }
            if !group.was_level() {
                return Err(format!(
                    "the replica of group {number} has not caught up with its leader since it started"
                ));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Desk")
    }
}
