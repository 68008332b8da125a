//! The router's control calls: checks what comes in, asks view and consensus, words what goes out.
//!
//! One file per situation: `route`, `stream`, `lookup` and `residency` and `evacuate` (any replica), `announce` (a node's stream, leader only),
//! `admin` and `members` (leader only), `status`. Not here: decisions (`kv_core`) and the Raft calls
//! (`crate::raft::service`).

mod admin;
mod announce;
mod check;
pub(crate) mod decode;
mod evacuate;
mod fresh;
mod lookup;
mod members;
pub(crate) mod moved;
mod residency;
pub(crate) mod route;
mod status;
mod stream;
pub(crate) mod why;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::Timestamp;
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_server::RouterServer;
use kvfleet_proto::tls::callers::{Caller, MembersUnless};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use self::route::Besides;
use crate::clock::{Clock, UnixClock};
use crate::copies::Copies;
use crate::copies::hot::Uses;
use crate::fits::FleetFits;
use crate::groups::{Group, Groups};
use crate::ingest::Ingest;
use crate::liveness::Silence;
use crate::manifests::Manifests;
use crate::metrics::Metrics;
use crate::raft::Cluster;
use crate::raft::handle::{LeaderAt, ProposeError};
use crate::raft::network::Peers;
use crate::shares::FreshShares;
use crate::truth::Truth;
use crate::view::fleet::FleetView;
use crate::view::recall::Recall;
use crate::view::residency::Residency;
use crate::windows::Waits;
use kv_core::schedule::{GuessedPrefixes, SentPrefixes};

/// Metadata key that carries the leader's address in a "not the leader" answer.
pub(crate) const LEADER_KEY: &str = "kvfleet-leader";

/// Largest control message taken: an announce batch of the largest size, with its envelope.
const CONTROL_MESSAGE_BYTES_MAX: usize = 8 << 20;

/// Everything a call may need.
pub(crate) struct Shared {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) peers: Peers,
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) silence: Arc<Mutex<Silence>>,
    /// Of each shard, the first of which is number 1.
    pub(crate) ingests: Vec<Ingest>,
    pub(crate) truth: Arc<Truth>,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Clock,
    pub(crate) unix: UnixClock,
    /// From when on a lack of instances is one of the cluster, and not of a router that has just come back to it.
    pub(crate) reported_by: Timestamp,
    /// Until when the first token of a request must be out that says nothing of it; 0 for no limit.
    pub(crate) ttft_max_ms: u64,
    /// How far apart the tokens of such a one may come; 0 for no limit.
    pub(crate) tbt_max_us: u64,
    /// What was decided lately.
    pub(crate) recall: Mutex<Recall>,
    /// Of instances and nodes, as they say, for what is told of identities that differ.
    pub(crate) manifests: Arc<Manifests>,
    /// Prefixes that instances compute and told nothing of yet.
    pub(crate) sent: Mutex<SentPrefixes>,
    /// What instances were sent that they will never tell of.
    pub(crate) guessed: Mutex<GuessedPrefixes>,
    /// Requests that wait at instances, where nodes are told of them.
    pub(crate) waits: Option<Arc<Mutex<Waits>>>,
    /// Copies between nodes, and nodes that drain.
    pub(crate) copies: Arc<Copies>,
    /// What decisions read from afar, where that is copied.
    pub(crate) hot: Option<Uses>,
    /// What tenants read afresh.
    pub(crate) fresh_shares: Mutex<FreshShares>,
    /// What every node must respect, newest version.
    pub(crate) directives: watch::Receiver<Arc<pb::Directives>>,
    /// What nodes saw, and what they are told of it.
    pub(crate) fits: FleetFits,
    /// Most blocks one announcement may hold.
    pub(crate) announce_blocks_max: usize,
    /// Ends what callers keep open and may open elsewhere: before `stop`, and at the latest with it.
    pub(crate) draining: CancellationToken,
    pub(crate) stop: CancellationToken,
}

impl Shared {
    /// How fresh a read of a group's replica is that has applied this entry.
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

    /// The group that knows nodes, pins and quotas.
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

/// Passes on the leader of the group only.
fn leader_only(group: &Group) -> Result<(), Status> {
    let consensus = &group.consensus;
    if consensus.is_leader() { Ok(()) } else { Err(not_leader(consensus.leader())) }
}

/// Whole milliseconds, saturating.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// The answer of a router that does not lead, with the address of the one that does.
fn not_leader(leader: Option<LeaderAt>) -> Status {
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

/// The answer to a command that was not applied.
fn not_proposed(error: ProposeError) -> Status {
    match error {
        ProposeError::NotLeader(leader) => not_leader(leader),
        unknown @ (ProposeError::Unknown(_) | ProposeError::Members(_)) => {
            Status::aborted(unknown.to_string())
        }
        stopped @ ProposeError::Stopped(_) => Status::unavailable(stopped.to_string()),
    }
}

/// Calls that are for tenants too, and see to it themselves who makes them. All others are for members, those too that are added
/// later.
const FOR_TENANTS: &[&str] =
    &["/kvfleet.v1.Router/Route", "/kvfleet.v1.Router/RouteStream", "/kvfleet.v1.Router/Lookup"];

/// The service tonic calls: a line for each call that makes it.
#[derive(Clone)]
pub(crate) struct RouterService {
    shared: Arc<Shared>,
}

impl RouterService {
    pub(crate) fn new(shared: Arc<Shared>) -> RouterService {
        tokio::spawn(fresh::settle(Arc::clone(&shared)));
        RouterService { shared }
    }

    /// What is served: messages bounded, and calls kept to who may make them.
    pub(crate) fn served(self) -> MembersUnless<RouterServer<RouterService>> {
        let server = RouterServer::new(self)
            .max_decoding_message_size(CONTROL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(CONTROL_MESSAGE_BYTES_MAX);
        MembersUnless::new(server, FOR_TENANTS)
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl pb::router_server::Router for RouterService {
    type AnnounceStream = ReceiverStream<Result<pb::AnnounceReply, Status>>;
    type RouteStreamStream = stream::Answers<Streaming<pb::RouteRequest>, stream::Towards>;

    async fn route(&self, request: Request<pb::RouteRequest>) -> Answer<pb::RouteReply> {
        let started = Instant::now();
        let answer = match Caller::of(request.extensions()) {
            Ok(caller) => route::route(&self.shared, &caller, request.into_inner(), Besides::default()).await,
            Err(status) => Err(status),
        };
        self.shared.metrics.routed(route::outcome(&answer), started.elapsed());
        answer.map(Response::new)
    }

    async fn route_stream(
        &self,
        request: Request<Streaming<pb::RouteRequest>>,
    ) -> Answer<Self::RouteStreamStream> {
        let caller = Caller::of(request.extensions())?;
        Ok(Response::new(stream::open(&self.shared, caller, request.into_inner())))
    }

    async fn lookup(&self, request: Request<pb::LookupRequest>) -> Answer<pb::LookupReply> {
        let caller = Caller::of(request.extensions())?;
        self.shared.metrics.looked_up();
        lookup::lookup(&self.shared, &caller, request.into_inner()).await.map(Response::new)
    }

    async fn report(&self, request: Request<pb::ReportRequest>) -> Answer<pb::ReportReply> {
        route::report(&self.shared, request.into_inner()).map(Response::new)
    }

    async fn report_residency(&self, request: Request<pb::ResidencyRequest>) -> Answer<pb::ResidencyReply> {
        residency::report(&self.shared, request.get_ref()).map(Response::new)
    }

    async fn may_decode(&self, request: Request<pb::MayDecodeRequest>) -> Answer<pb::MayDecodeReply> {
        Ok(Response::new(decode::may(&self.shared, *request.get_ref())))
    }

    async fn why(&self, request: Request<pb::WhyRequest>) -> Answer<pb::WhyReply> {
        Ok(Response::new(why::why(&self.shared, request.get_ref()).await))
    }

    async fn status(&self, _: Request<pb::StatusRequest>) -> Answer<pb::StatusReply> {
        status::status(&self.shared).await.map(Response::new)
    }

    async fn join(&self, request: Request<pb::JoinRequest>) -> Answer<pb::JoinReply> {
        admin::join(&self.shared, &request.into_inner()).await.map(Response::new)
    }

    async fn announce(
        &self,
        request: Request<Streaming<pb::AnnounceRequest>>,
    ) -> Answer<Self::AnnounceStream> {
        announce::open(Arc::clone(&self.shared), request.into_inner()).await.map(Response::new)
    }

    async fn pin(&self, request: Request<pb::PinRequest>) -> Answer<pb::AdminReply> {
        admin::pin(&self.shared, request.into_inner()).await.map(Response::new)
    }

    async fn unpin(&self, request: Request<pb::UnpinRequest>) -> Answer<pb::AdminReply> {
        admin::unpin(&self.shared, request.into_inner()).await.map(Response::new)
    }

    async fn set_quota(&self, request: Request<pb::SetQuotaRequest>) -> Answer<pb::AdminReply> {
        admin::set_quota(&self.shared, &request.into_inner()).await.map(Response::new)
    }

    async fn set_ttl(&self, request: Request<pb::SetTtlRequest>) -> Answer<pb::AdminReply> {
        admin::set_ttl(&self.shared, &request.into_inner()).await.map(Response::new)
    }

    async fn set_generation(&self, request: Request<pb::SetGenerationRequest>) -> Answer<pb::AdminReply> {
        admin::set_generation(&self.shared, *request.get_ref()).await.map(Response::new)
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Answer<pb::AdminReply> {
        admin::leave(&self.shared, &request.into_inner()).await.map(Response::new)
    }

    async fn evacuate(&self, request: Request<pb::EvacuateRequest>) -> Answer<pb::EvacuateReply> {
        evacuate::evacuate(&self.shared, request.get_ref()).await.map(Response::new)
    }

    async fn change_member(
        &self,
        request: Request<pb::ChangeMemberRequest>,
    ) -> Answer<pb::ChangeMemberReply> {
        members::change(&self.shared, &request.into_inner()).await.map(Response::new)
    }

    async fn transfer_lead(
        &self,
        request: Request<pb::TransferLeadRequest>,
    ) -> Answer<pb::TransferLeadReply> {
        members::transfer(&self.shared, &request.into_inner()).await.map(Response::new)
    }
}
