//! The calls that routers answer: route, lookup, status, report.
//!
//! Not here: choosing a router (`retry.rs`), the shared stream of route calls (`stream.rs`), and
//! use of a decision (`fetch.rs`, `save.rs`).

use std::time::Duration;

use kv_core::id::{BlockHash, Category, IdentityDigest, InstanceId, RequestId, TenantId};
use kvfleet_net::trace_context::current_traceparent;
use kvfleet_proto::convert::{category_to_pb, hashes_to_bytes};
use kvfleet_proto::pb;
use tonic::{Request, Status};

use crate::{Client, RouterError};

/// Timeout of one load report; the next one follows anyway.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Longest delay of a first token by the decode admission check.
const ADMIT_DECODE_TIMEOUT: Duration = Duration::from_millis(100);

/// A request to place.
#[derive(Clone, Debug)]
pub struct RouteCall {
    /// The request.
    pub request: RequestId,
    /// The tenant.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// Its blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt; the last block may be partly filled.
    pub input_tokens: u32,
    /// Maximum tokens of the answer; 0 if unknown.
    pub output_tokens: u32,
    /// Limit of the mean time between output tokens after the first, in microseconds. A request
    /// that cannot meet it is rejected. 0 uses the router's setting.
    pub tbt_max_us: u64,
    /// Identity of the KV.
    pub identity: IdentityDigest,
    /// Saves that the answer must take into account.
    pub after: Vec<pb::AnnouncePosition>,
    /// Whether to answer from committed state, at the cost of a round trip to the leader.
    pub fresh: bool,
}

/// A router's answer to a route call.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // one is made per call, and decisions are the usual ones
pub enum RouteAnswer {
    /// An instance, with the sources of its KV.
    Decided(pb::Decision),
    /// No instance can accept it now.
    Rejected {
        /// The reason.
        reason: String,
        /// Time after which to retry.
        retry_after: Duration,
    },
}

/// Whether a request may begin to decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeAdmission {
    /// It may.
    Admitted,
    /// The time between its tokens would exceed the limit.
    Rejected {
        /// The reason.
        reason: String,
        /// Time after which to retry.
        retry_after: Duration,
    },
}

/// Error of a route call.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RouteError {
    /// See [`RouterError`].
    #[error(transparent)]
    Router(#[from] RouterError),
    /// A router answered with an empty reply.
    #[error("a router returned neither a decision nor a rejection: run the same release on both ends")]
    Empty,
}

fn route_request(call: RouteCall) -> pb::RouteRequest {
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
        tbt_max_us: call.tbt_max_us,
        fresh: call.fresh,
        traceparent: current_traceparent(),
        ..pb::RouteRequest::default()
    }
}

impl Client {
    /// Asks where a request should run. Concurrent calls share a stream to the router, unless
    /// [`ClientConfig::route_streams`](crate::ClientConfig) is off.
    ///
    /// # Errors
    /// If no router answers, or one refuses the call as invalid.
    pub async fn route(&self, call: RouteCall) -> Result<RouteAnswer, RouteError> {
        self.ask_route(route_request(call)).await
    }

    /// Asks for the sources of a request's KV at an instance where the request already runs. It is
    /// for engines behind a gateway, which receive no decision.
    ///
    /// The router never rejects such a request and counts it on that instance. `sent_by_router`
    /// tells that a router of this cluster chose the instance under this request number, which the
    /// gateway passes in a header; the router then has the request's decision log. Requires the
    /// certificate of an instance or a frontend.
    ///
    /// # Errors
    /// If no router answers, or one refuses the call as invalid.
    pub async fn plan(
        &self,
        call: RouteCall,
        instance: InstanceId,
        sent_by_router: bool,
    ) -> Result<RouteAnswer, RouteError> {
        let among = Some(pb::CandidateSet { instances: vec![instance.0] });
        let prior_instance = sent_by_router;
        self.ask_route(pb::RouteRequest {
            candidates: among,
            pinned_instance: true,
            prior_instance,
            ..route_request(call)
        })
        .await
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

    /// Asks whether a request with a computed prompt may begin to decode at its instance, given the
    /// current decode load. If rejected, end the request like one that was shed, with the reason
    /// and the retry time. If no router answers in time, it is admitted.
    pub async fn admit_decode(
        &self,
        request: RequestId,
        instance: InstanceId,
        tbt_max_us: u64,
    ) -> DecodeAdmission {
        let message = pb::AdmitDecodeRequest { request: request.0, instance: instance.0, tbt_max_us };
        let asked = self.routers.call(&message, |mut router: RouterRpc, message| async move {
            router.admit_decode(message).await
        });
        match tokio::time::timeout(ADMIT_DECODE_TIMEOUT, asked).await {
            Ok(Ok(pb::AdmitDecodeReply { admitted: false, reason, retry_after_ms, .. })) => {
                DecodeAdmission::Rejected { reason, retry_after: Duration::from_millis(retry_after_ms) }
            }
            _ => DecodeAdmission::Admitted,
        }
    }

    /// Asks which nodes hold each part of a prefix; `fresh` requests an answer from committed
    /// state.
    ///
    /// # Errors
    /// If no router answers, or one refuses the call as invalid.
    pub async fn lookup(
        &self,
        hashes: &[BlockHash],
        after: Vec<pb::AnnouncePosition>,
        fresh: bool,
    ) -> Result<pb::LookupReply, RouterError> {
        let message = pb::LookupRequest { hashes: hashes_to_bytes(hashes), after, fresh };
        self.routers
            .call(&message, |mut router: RouterRpc, message| async move { router.lookup(message).await })
            .await
    }

    /// Asks the router that answered last for its view of the cluster. Administrators get all of it,
    /// and other processes only the leaders.
    ///
    /// # Errors
    /// If no router answers.
    pub async fn status(&self) -> Result<pb::StatusReply, RouterError> {
        let message = pb::StatusRequest {};
        self.routers
            .call(&message, |mut router: RouterRpc, message| async move { router.status(message).await })
            .await
    }

    /// Sends the load of an instance to every router at once. Load is ephemeral state: failures are
    /// returned for the log, one per router, and not retried.
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

type RouterRpc = pb::router_client::RouterClient<tonic::transport::Channel>;
