//! The router's control calls: validate the request, query view and consensus, build the reply.
//!
//! One file per task: `route`, `stream`, `lookup`, `residency` and `drain` (any replica),
//! `announce` (a node's stream, leader only), `admin` and `members` (leader only), `status`.
//! `history`, `limits`, `lifecycle` and `node_intake` are the parts of their shared state. Not
//! here: decisions (`kv_core`) and the Raft calls (`crate::raft::service`).

mod admin;
mod announce;
mod check;
pub(crate) mod decode;
mod drain;
pub(crate) mod feedback;
mod fresh;
pub(crate) mod history;
pub(crate) mod lifecycle;
pub(crate) mod limits;
mod lookup;
mod members;
pub(crate) mod moved_requests;
pub(crate) mod node_intake;
mod prompt_tokens;
mod residency;
pub(crate) mod route;
mod status;
mod stream;
mod why;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{InstanceId, NodeId};
use kvfleet_net::tls::access::AccessService;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_server::RouterServer;
use parking_lot::RwLock;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use self::history::RequestHistory;
use self::lifecycle::Lifecycle;
use self::limits::CallLimits;
use self::node_intake::NodeIntake;
use self::route::RouteHints;
use crate::clock::{Clock, UnixClock};
use crate::copies::CopyDispatcher;
use crate::engines::tenants::Tenants;
use crate::groups::{Group, Groups};
use crate::manifests::Manifests;
use crate::metrics::Metrics;
use crate::raft::ClusterIdentity;
use crate::raft::handle::{LeaderAddress, ProposeError};
use crate::raft::network::Peers;
use crate::view::fleet::FleetView;
use crate::view::residency::Residency;

/// Metadata key of the leader's address in a "not the leader" answer.
pub(crate) const LEADER_KEY: &str = "kvfleet-leader";

/// Largest control message: an announce batch of the largest size, with its envelope.
const CONTROL_MESSAGE_BYTES_MAX: usize = 8 << 20;

/// State shared by all calls.
pub(crate) struct ServerState {
    pub(crate) cluster: Arc<ClusterIdentity>,
    pub(crate) peers: Peers,
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Clock,
    pub(crate) unix: UnixClock,
    /// Manifests of instances and nodes, to explain identity mismatches.
    pub(crate) manifests: Arc<Manifests>,
    /// Keys for calls that carry tokens; `None` without a secret or the choice of public hashes.
    pub(crate) tenants: Option<Arc<Tenants>>,
    /// Copies between nodes, and draining nodes.
    pub(crate) copies: Arc<CopyDispatcher>,
    pub(crate) nodes: NodeIntake,
    pub(crate) history: RequestHistory,
    pub(crate) limits: CallLimits,
    pub(crate) lifecycle: Lifecycle,
}

impl ServerState {
    /// Freshness of a read from a group's replica that has applied this entry.
    fn freshness(group: &Group, applied_index: u64) -> pb::Freshness {
        let consensus = &group.consensus;
        pb::Freshness {
            applied_index,
            age_ms: consensus.contact_age().map_or(u64::MAX, millis),
            leader: consensus.is_leader(),
            router: consensus.id(),
            group: group.number().into(),
        }
    }

    /// The group that holds nodes, pins and quotas.
    fn control(&self) -> &Group {
        self.groups.control()
    }

    /// The group with this number.
    fn group(&self, number: u32) -> Result<&Arc<Group>, Status> {
        let last = self.groups.shard_count();
        let known = self.groups.get(number);
        known.ok_or_else(|| check::invalid(format!("there is no group {number}, only 0 (control) to {last}")))
    }
}

/// Fails unless this router leads the group.
fn leader_only(group: &Group) -> Result<(), Status> {
    let consensus = &group.consensus;
    if consensus.is_leader() { Ok(()) } else { Err(not_leader(consensus.leader())) }
}

/// Whole milliseconds, saturating.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Error of a router that does not lead, with the leader's address.
fn not_leader(leader: Option<LeaderAddress>) -> Status {
    let Some(leader) = leader else {
        return Status::unavailable("no leader is known to this router; try again in a moment");
    };
    let text = format!("router {} at {} leads; ask there", leader.router, leader.address);
    let mut status = Status::failed_precondition(text);
    if let Ok(address) = leader.address.parse() {
        status.metadata_mut().insert(LEADER_KEY, address);
    }
    status
}

/// Error of a command that was not applied.
fn not_proposed(error: ProposeError) -> Status {
    match error {
        ProposeError::NotLeader(leader) => not_leader(leader),
        full @ ProposeError::NoRoom(_) => Status::resource_exhausted(full.to_string()),
        unknown @ (ProposeError::Unknown(_) | ProposeError::Members(_)) => {
            Status::aborted(unknown.to_string())
        }
        stopped @ ProposeError::Stopped(_) => Status::unavailable(stopped.to_string()),
    }
}

/// The tonic service; each method delegates to its module.
#[derive(Clone)]
pub(crate) struct RouterService {
    state: Arc<ServerState>,
}

impl RouterService {
    pub(crate) fn new(state: Arc<ServerState>) -> RouterService {
        tokio::spawn(fresh::catch_up_all(Arc::clone(&state)));
        RouterService { state }
    }

    /// The service with limits on messages and time, and access control.
    pub(crate) fn into_service(self) -> AccessService<RouterServer<RouterService>> {
        let server = RouterServer::new(self)
            .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
        AccessService::new(server)
    }
}

type RpcResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl pb::router_server::Router for RouterService {
    type AnnounceStream = ReceiverStream<Result<pb::AnnounceReply, Status>>;
    type RouteStreamStream = stream::RouteAnswers<Streaming<pb::RouteRequest>, stream::CallerRouter>;

    async fn route(&self, request: Request<pb::RouteRequest>) -> RpcResult<pb::RouteReply> {
        let started = Instant::now();
        let answer = match Caller::from_extensions(request.extensions()) {
            Ok(caller) => {
                route::route(&self.state, &caller, request.into_inner(), RouteHints::default()).await
            }
            Err(status) => Err(status),
        };
        self.state.metrics.record_route(route::outcome(&answer), started.elapsed());
        answer.map(Response::new)
    }

    async fn route_stream(
        &self,
        request: Request<Streaming<pb::RouteRequest>>,
    ) -> RpcResult<Self::RouteStreamStream> {
        let caller = Caller::from_extensions(request.extensions())?;
        Ok(Response::new(stream::open(&self.state, caller, request.into_inner())))
    }

    async fn lookup(&self, request: Request<pb::LookupRequest>) -> RpcResult<pb::LookupReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        self.state.metrics.record_lookup();
        lookup::lookup(&self.state, &caller, request.into_inner()).await.map(Response::new)
    }

    async fn report(&self, request: Request<pb::ReportRequest>) -> RpcResult<pb::ReportReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_instance(InstanceId(request.get_ref().instance))?;
        route::report(&self.state, request.into_inner()).map(Response::new)
    }

    async fn report_residency(
        &self,
        request: Request<pb::ResidencyRequest>,
    ) -> RpcResult<pb::ResidencyReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_instance(InstanceId(request.get_ref().instance))?;
        residency::report(&self.state, request.get_ref()).map(Response::new)
    }

    async fn admit_decode(
        &self,
        request: Request<pb::AdmitDecodeRequest>,
    ) -> RpcResult<pb::AdmitDecodeReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_instance(InstanceId(request.get_ref().instance))?;
        Ok(Response::new(decode::admit(&self.state, *request.get_ref())))
    }

    async fn why(&self, request: Request<pb::WhyRequest>) -> RpcResult<pb::WhyReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        why::why(&self.state, &caller, request.get_ref()).await.map(Response::new)
    }

    async fn status(&self, request: Request<pb::StatusRequest>) -> RpcResult<pb::StatusReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        status::status(&self.state, &caller).await.map(Response::new)
    }

    async fn join(&self, request: Request<pb::JoinRequest>) -> RpcResult<pb::JoinReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_node(NodeId(request.get_ref().node))?;
        admin::join(&self.state, &request.into_inner()).await.map(Response::new)
    }

    async fn announce(
        &self,
        request: Request<Streaming<pb::AnnounceRequest>>,
    ) -> RpcResult<Self::AnnounceStream> {
        let caller = Caller::from_extensions(request.extensions())?;
        announce::open(Arc::clone(&self.state), &caller, request.into_inner()).await.map(Response::new)
    }

    async fn pin(&self, request: Request<pb::PinRequest>) -> RpcResult<pb::AdminReply> {
        admin::pin(&self.state, request.into_inner()).await.map(Response::new)
    }

    async fn unpin(&self, request: Request<pb::UnpinRequest>) -> RpcResult<pb::AdminReply> {
        admin::unpin(&self.state, request.into_inner()).await.map(Response::new)
    }

    async fn set_quota(&self, request: Request<pb::SetQuotaRequest>) -> RpcResult<pb::AdminReply> {
        admin::set_quota(&self.state, &request.into_inner()).await.map(Response::new)
    }

    async fn set_ttl(&self, request: Request<pb::SetTtlRequest>) -> RpcResult<pb::AdminReply> {
        admin::set_ttl(&self.state, &request.into_inner()).await.map(Response::new)
    }

    async fn set_generation(&self, request: Request<pb::SetGenerationRequest>) -> RpcResult<pb::AdminReply> {
        admin::set_generation(&self.state, *request.get_ref()).await.map(Response::new)
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> RpcResult<pb::AdminReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_node(NodeId(request.get_ref().node))?;
        admin::leave(&self.state, &request.into_inner()).await.map(Response::new)
    }

    async fn drain(&self, request: Request<pb::DrainRequest>) -> RpcResult<pb::DrainReply> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_node(NodeId(request.get_ref().node))?;
        drain::drain(&self.state, request.get_ref()).await.map(Response::new)
    }

    async fn change_member(
        &self,
        request: Request<pb::ChangeMemberRequest>,
    ) -> RpcResult<pb::ChangeMemberReply> {
        members::change(&self.state, &request.into_inner()).await.map(Response::new)
    }

    async fn transfer_lead(
        &self,
        request: Request<pb::TransferLeadRequest>,
    ) -> RpcResult<pb::TransferLeadReply> {
        members::transfer(&self.state, &request.into_inner()).await.map(Response::new)
    }
}
