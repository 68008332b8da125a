//! The calls that routers answer: route, lookup, status, report.
//!
//! Not here: which router (`retry.rs`), how route calls travel (`stream.rs`), and what is done with a decision (`fetch.rs`, `save.rs`).

use std::time::Duration;

use kv_core::id::{BlockHash, Category, IdentityDigest, InstanceId, RequestId, TenantId};
use kvfleet_proto::convert::{category_to_pb, hashes_to_bytes};
use kvfleet_proto::pb;
use kvfleet_proto::trace_context::current_traceparent;
use tonic::{Request, Status};

use crate::{Client, RouterError};

/// Time for one load report: the next one follows anyway.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Longest that a first token waits for whether it may be said.
const MAY_DECODE_TIMEOUT: Duration = Duration::from_millis(100);

/// Where should this request run?
#[derive(Clone, Debug)]
pub struct RouteCall {
    /// The request.
    pub request: RequestId,
    /// Whose.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// Its blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt; the last block may be partly filled.
    pub input_tokens: u32,
    /// Tokens of the answer, at most; 0 when unknown.
    pub output_tokens: u32,
    /// How far apart these may come, the mean of those behind the first, in microseconds; where that cannot be, the call is rejected. 0: as the router is set.
    pub tbt_max_us: u64,
    /// Identity of the KV.
    pub identity: IdentityDigest,
    /// Saves whose effect the answer must have seen.
    pub after: Vec<pb::Seen>,
    /// Answer from what is committed now, at the price of a round trip to the leader.
    pub fresh: bool,
}

/// What a router says to a route call.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // one of them is made for each call, and decisions are the usual ones
pub enum RouteAnswer {
    /// An instance, with the sources of its KV.
    Decided(pb::Decision),
    /// No instance can take it now.
    Rejected {
        /// Why.
        reason: String,
        /// When asking again makes sense.
        retry_after: Duration,
    },
}

/// Whether a request may begin to decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MayDecode {
    /// It may.
    Begins,
    /// Its tokens would come too far apart.
    Ends {
        /// Why.
        reason: String,
        /// When asking again makes sense.
        retry_after: Duration,
    },
}

/// Why a route call has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RouteError {
    /// See [`RouterError`].
    #[error(transparent)]
    Router(#[from] RouterError),
    /// A router answered without saying anything.
    #[error("a router gave neither a decision nor a rejection: run the same release on both ends")]
    Empty,
}

fn message(call: RouteCall) -> pb::RouteRequest {
    pb::RouteRequest {
        request: call.request.0,
        tenant: call.tenant.0,
        category: Some(category_to_pb(call.category)),
        hashes: hashes_to_bytes(&call.hashes),
        block_tokens: call.block_tokens,
        input_tokens: call.input_tokens,
        output_tokens: call.output_tokens,
        identity: call.identity.0.to_vec(),
        after: call.after,
        among: None,
        without: Vec::new(),
        ttft_max_ms: 0,
        tbt_max_us: call.tbt_max_us,
        priority: 0,
        runs_there: false,
        sent_there: false,
        fresh: call.fresh,
        traceparent: current_traceparent(),
        call: 0,
        text: false,
    }
}

impl Client {
    /// Asks where a request should run. All that ask at the same time share a stream to the router, unless
    /// [`ClientConfig::route_streams`](crate::ClientConfig) is off.
    ///
    /// # Errors
    /// When no router answers, or one refuses the call as wrong.
    pub async fn route(&self, call: RouteCall) -> Result<RouteAnswer, RouteError> {
        self.ask_route(message(call)).await
    }

    /// Asks how the KV of a request gets to an instance where it runs already: for engines that are sent requests by a door, which
    /// tells them nothing of that. It is not turned away, and counts where it was sent. `sent_by_router` where a router of this cluster
    /// chose the instance under the request's number, which a door gives engines in a header: it has the request's story then. For
    /// certificates of the cluster's own.
    ///
    /// # Errors
    /// When no router answers, or one refuses the call as wrong.
    pub async fn plan(
        &self,
        call: RouteCall,
        (instance, sent_by_router): (InstanceId, bool),
    ) -> Result<RouteAnswer, RouteError> {
        let among = Some(pb::Among { instances: vec![instance.0] });
        let sent_there = sent_by_router;
        self.ask_route(pb::RouteRequest { among, runs_there: true, sent_there, ..message(call) }).await
    }

    async fn ask_route(&self, message: pb::RouteRequest) -> Result<RouteAnswer, RouteError> {
        let reply = self.routers.route(&message).await?;
        match reply.answer.ok_or(RouteError::Empty)? {
            pb::route_reply::Answer::Decision(decision) => Ok(RouteAnswer::Decided(decision)),
            pb::route_reply::Answer::Rejected(rejected) => Ok(RouteAnswer::Rejected {
                reason: rejected.reason,
                retry_after: Duration::from_millis(rejected.retry_after_ms),
            }),
        }
    }

    /// Asks whether a request whose prompt is computed may begin to decode at its instance, by what decodes there now. One that may not is to be ended as
    /// one that was turned away, with the reason and the time to come again. Where no router answers in time, it may.
    pub async fn may_decode(&self, request: RequestId, instance: InstanceId, tbt_max_us: u64) -> MayDecode {
        let message = pb::MayDecodeRequest { request: request.0, instance: instance.0, tbt_max_us };
        let asked = self
            .routers
            .call(&message, |mut router: RouterOf, message| async move { router.may_decode(message).await });
        match tokio::time::timeout(MAY_DECODE_TIMEOUT, asked).await {
            Ok(Ok(pb::MayDecodeReply { may: false, reason, retry_after_ms, .. })) => {
                MayDecode::Ends { reason, retry_after: Duration::from_millis(retry_after_ms) }
            }
            _ => MayDecode::Begins,
        }
    }

    /// Asks who holds which part of a prefix; a fresh answer is from what is committed now.
    ///
    /// # Errors
    /// When no router answers, or one refuses the call as wrong.
    pub async fn lookup(
        &self,
        hashes: &[BlockHash],
        after: Vec<pb::Seen>,
        fresh: bool,
    ) -> Result<pb::LookupReply, RouterError> {
        let message = pb::LookupRequest { hashes: hashes_to_bytes(hashes), after, fresh };
        self.routers
            .call(&message, |mut router: RouterOf, message| async move { router.lookup(message).await })
            .await
    }

    /// Asks the router that answered last for its view of the cluster.
    ///
    /// # Errors
    /// When no router answers.
    pub async fn status(&self) -> Result<pb::StatusReply, RouterError> {
        let message = pb::StatusRequest {};
        self.routers
            .call(&message, |mut router: RouterOf, message| async move { router.status(message).await })
            .await
    }

    /// Tells every router the load of an instance, at once. Load is soft: failures come back for the
    /// log, one per router that did not take it, and are not tried again.
    pub async fn report(&self, report: &pb::ReportRequest) -> Vec<(String, Status)> {
        let mut calls = tokio::task::JoinSet::new();
        for (address, mut router) in self.routers.each() {
            let (address, mut request) = (address.to_owned(), Request::new(report.clone()));
            request.set_timeout(REPORT_TIMEOUT);
            calls.spawn(async move { router.report(request).await.err().map(|status| (address, status)) });
        }
        calls.join_all().await.into_iter().flatten().collect()
    }
}

type RouterOf = pb::router_client::RouterClient<tonic::transport::Channel>;
