//! Raft calls from the other routers: validates the caller, decodes, passes to the group's
//! openraft, encodes.
//!
//! Not here: any Raft rule. A message from another cluster, with another number of shards, or
//! undecodable, is refused. A snapshot is checked, restored and written chunk by chunk on arrival,
//! under limits, before openraft sees it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};
use kv_core::id::RouterId;
use kv_core::index::check_snapshot_format;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_server;
use openraft::raft::{AppendEntriesResponse, TransferLeaderRequest, VoteRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::append_stream::{self, malformed};
use super::handle::Consensus;
use super::intake::{Intake, IntakeError, ReceivedSnapshot};
use super::network::{Envelope, SnapshotHead};
use super::repair::ReplicaRepair;
use super::state_machine::SnapshotData;
use super::withheld_votes::WithheldVotes;
use super::{ClusterIdentity, Raft, Snapshot, SnapshotMeta, TypeConfig, terms};
use crate::anti_entropy::digests::{DigestMark, compare_marks};
use crate::groups::{Group, Groups};

/// Largest snapshot accepted from a peer: above any supported index, below a router's memory, so
/// that a faulty peer cannot end the process.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;

/// Snapshots received at once, over all groups. Each holds a restored index beside the current one,
/// so this bounds the memory of a router that lags in many groups; the others wait.
const RECEIVING_MAX: usize = 2;

/// Received parts that wait to be restored; at the limit the sender waits too.
const PARTS_WAITING_MAX: usize = 4;

/// Longest pause between two parts: a vanished sender must not keep its slot.
pub(super) const PART_TIMEOUT: Duration = Duration::from_secs(10);

/// Receiving side of Raft, for all groups of this router.
pub(crate) struct RaftService {
    cluster: Arc<ClusterIdentity>,
    groups: Groups,
    repairs: Vec<Arc<ReplicaRepair>>,
    withheld: Arc<WithheldVotes>,
    receiving: Arc<Semaphore>,
    stop: CancellationToken,
}

impl RaftService {
    /// `repairs` are ordered by group. Streams of calls end with `stop`.
    pub(crate) fn new(
        cluster: Arc<ClusterIdentity>,
        groups: Groups,
        repairs: Vec<Arc<ReplicaRepair>>,
        withheld: Arc<WithheldVotes>,
        stop: CancellationToken,
    ) -> RaftService {
        let receiving = Arc::new(Semaphore::new(RECEIVING_MAX));
        RaftService { cluster, groups, repairs, withheld, receiving, stop }
    }

    fn group(&self, cluster: &str, shards: u32, group: u32) -> Result<&Consensus, Status> {
        self.group_of(cluster, shards, group).map(|group| &group.consensus)
    }

    fn group_of(&self, cluster: &str, shards: u32, group: u32) -> Result<&Arc<Group>, Status> {
        self.same_cluster(cluster, shards)?;
        self.groups.get(group).ok_or_else(|| Status::invalid_argument(format!("there is no group {group}")))
    }

    fn same_cluster(&self, cluster: &str, shards: u32) -> Result<(), Status> {
        let ClusterIdentity { name, shards: ours } = &*self.cluster;
        if cluster == name && shards == u32::from(*ours) {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "this router is of cluster {name:?} with {ours} shards, the caller of {cluster:?} with {shards}: give both \
             the same `cluster` and `shards`, and an empty data_dir to the one that joins"
        )))
    }

    fn message<T: DeserializeOwned>(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<(&Consensus, T), Status> {
        let frame = request.into_inner();
        let group = self.group(&frame.cluster, frame.shards, frame.group)?;
        let message = rmp_serde::from_slice(&frame.payload).map_err(|error| malformed(&error))?;
        Ok((group, message))
    }

    fn answer<T: Serialize, E: std::fmt::Display>(
        &self,
        group: &Consensus,
        result: Result<T, E>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let value = result.map_err(|error| Status::internal(format!("raft: {error}")))?;
        let payload = rmp_serde::to_vec_named(&value)
            .map_err(|error| Status::internal(format!("raft answer does not encode: {error}")))?;
        let envelope = Envelope { cluster: Arc::clone(&self.cluster), group: group.group() };
        Ok(Response::new(envelope.frame(payload)))
    }

    /// Fails if this router lost entries of the group, so that a vote could contradict them.
    fn check_vote_allowed(&self, group: &Consensus) -> Result<(), Status> {
        if self.withheld.is_withheld(group.group()) {
            return Err(Status::unavailable("this router lost entries of the group and gives no vote in it"));
        }
        Ok(())
    }

    /// Fails if this router may not vote for the candidate.
    fn check_candidate(
        &self,
        caller: &Caller,
        group: &Consensus,
        request: &VoteRequest<TypeConfig>,
    ) -> Result<(), Status> {
        self.check_vote_allowed(group)?;
        terms::check_vote(caller, group.term(), &request.vote)
    }

    /// The repair of a group's replica.
    fn repair(&self, group: &Consensus) -> Result<&Arc<ReplicaRepair>, Status> {
        let known = self.repairs.get(usize::from(group.group()));
        known.ok_or_else(|| Status::invalid_argument("there is no such group"))
    }
}

/// The head of a snapshot, if it is acceptable.
pub(super) fn check_head(part: &pb::SnapshotPart) -> Result<SnapshotHead, Status> {
    let (stored, computed) = (part.crc32c, crc32c::crc32c(&part.head));
    if stored != computed {
        return Err(Status::data_loss(format!(
            "the head of a snapshot has checksum {stored:08x}, its bytes give {computed:08x}: it must be sent again"
        )));
    }
    let head: SnapshotHead = rmp_serde::from_slice(&part.head)
        .map_err(|error| Status::invalid_argument(format!("snapshot head does not decode: {error}")))?;
    check_snapshot_format(head.format).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let bytes = head.bytes;
    if bytes > SNAPSHOT_BYTES_MAX {
        return Err(Status::invalid_argument(format!(
            "snapshot of {bytes} bytes, the limit is {SNAPSHOT_BYTES_MAX}"
        )));
    }
    Ok(head)
}

/// Receives all further parts, with a total of `bytes`. Ends at the first wrong chunk.
pub(super) async fn receive(
    intake: &Intake,
    meta: SnapshotMeta,
    bytes: u64,
    stream: &mut (impl Stream<Item = Result<pb::SnapshotPart, Status>> + Unpin),
    part_max: Duration,
) -> Result<ReceivedSnapshot, Status> {
    let (parts, waiting) = mpsc::channel(PARTS_WAITING_MAX);
    let intake = intake.clone();
    let taking = tokio::task::spawn_blocking(move || receive_blocking(&intake, meta, waiting));
    let fed = feed(stream, parts, bytes, part_max).await;
    let taken =
        taking.await.map_err(|error| Status::internal(format!("receiving a snapshot ended: {error}")))?;
    match (fed, taken) {
        // An error in the bytes is more specific than their early end.
        (_, Err(error)) if !matches!(&error, IntakeError::Cut { .. }) => Err(refusal(&error)),
        (Err(status), _) => Err(status),
        (Ok(()), taken) => taken.map_err(|error| refusal(&error)),
    }
}

fn receive_blocking(
    intake: &Intake,
    meta: SnapshotMeta,
    mut waiting: mpsc::Receiver<Vec<u8>>,
) -> Result<ReceivedSnapshot, IntakeError> {
    let mut incoming = intake.begin(meta)?;
    while let Some(bytes) = waiting.blocking_recv() {
        incoming.push(&bytes)?;
    }
    incoming.finish()
}

/// Forwards the data of all parts until the stream ends or the receiver is gone.
async fn feed(
    stream: &mut (impl Stream<Item = Result<pb::SnapshotPart, Status>> + Unpin),
    parts: mpsc::Sender<Vec<u8>>,
    bytes: u64,
    part_max: Duration,
) -> Result<(), Status> {
    let mut got = 0;
    loop {
        let part = tokio::select! {
            () = parts.closed() => return Ok(()),
            part = tokio::time::timeout(part_max, stream.next()) => part,
        };
        let part =
            part.map_err(|_| Status::deadline_exceeded(format!("no part of a snapshot for {part_max:?}")))?;
        let Some(part) = part.transpose()? else { break };
        got += part.data.len() as u64;
        if got > bytes {
            return Err(Status::invalid_argument(format!(
                "snapshot is longer than the {bytes} bytes it named"
            )));
        }
        if parts.send(part.data).await.is_err() {
            return Ok(());
        }
    }
    if got != bytes {
        return Err(Status::invalid_argument(format!("snapshot ended after {got} of {bytes} bytes")));
    }
    Ok(())
}

fn refusal(error: &IntakeError) -> Status {
    tracing::error!(%error, "a snapshot was refused");
    match error {
        IntakeError::Damaged { .. } | IntakeError::Cut { .. } => Status::data_loss(error.to_string()),
        IntakeError::Disk { .. } => Status::internal(error.to_string()),
    }
}

#[tonic::async_trait]
impl raft_server::Raft for RaftService {
    async fn handshake(
        &self,
        _: Request<pb::HandshakeRequest>,
    ) -> Result<Response<pb::HandshakeReply>, Status> {
        let ClusterIdentity { name, shards } = &*self.cluster;
        let router = self.groups.control().consensus.id();
        Ok(Response::new(pb::HandshakeReply { cluster: name.clone(), shards: (*shards).into(), router }))
    }

    async fn read_index(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<Response<pb::ReadIndexReply>, Status> {
        let frame = request.into_inner();
        let group = self.group(&frame.cluster, frame.shards, frame.group)?;
        match group.local_read_index().await {
            Some(index) => Ok(Response::new(pb::ReadIndexReply { index })),
            None => Err(Status::unavailable("this router does not lead the group")),
        }
    }

    async fn compare(
        &self,
        request: Request<pb::CompareRequest>,
    ) -> Result<Response<pb::CompareReply>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let request = request.into_inner();
        let group = self.group_of(&request.cluster, request.shards, request.group)?;
        let leader = group.consensus.leader();
        let leader = leader.ok_or_else(|| Status::unavailable("this router knows no leader of the group"))?;
        caller.require_router(RouterId(leader.router))?;
        let theirs = request.marks.iter().map(|mark| {
            let digest = mark.digest.as_slice().try_into();
            let digest = digest.map_err(|_| Status::invalid_argument("a digest has 16 bytes"))?;
            Ok(DigestMark { index: mark.index, digest })
        });
        let theirs = theirs.collect::<Result<Vec<_>, Status>>()?;
        let Some((ours, differs)) = compare_marks(&group.published.marks(), &theirs) else {
            return Ok(Response::new(pb::CompareReply::default()));
        };
        let (entry, known) = (ours.index, group.has_diverged());
        // A difference counts only after the leader has compared all replicas.
        if !differs || request.verdict() != pb::Verdict::None {
            group.record_comparison(entry, differs);
        }
        if differs && !known && group.has_diverged() {
            let group = group.number();
            tracing::error!(group, entry, "this replica differs from the leader's: it stops answering");
        }
        if differs && request.verdict() == pb::Verdict::Wrong {
            self.repair(&group.consensus)?.start(group, &self.receiving);
        }
        let digest = ours.digest.to_vec();
        Ok(Response::new(pb::CompareReply { compared_index: entry, differs, digest, known }))
    }

    type StateStream = BoxStream<'static, Result<pb::SnapshotPart, Status>>;

    async fn state(&self, request: Request<pb::RaftFrame>) -> Result<Response<Self::StateStream>, Status> {
        let frame = request.into_inner();
        let group = self.group_of(&frame.cluster, frame.shards, frame.group)?;
        if !group.consensus.holds_leader_lease() || group.has_diverged() {
            return Err(Status::unavailable(
                "this router does not lead the group, or differs from the others",
            ));
        }
        let state = self.repair(&group.consensus)?.stream_state(group).await?;
        Ok(Response::new(state.boxed()))
    }

    async fn append(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let frame = request.into_inner();
        let group = self.group(&frame.cluster, frame.shards, frame.group)?;
        let call = terms::decode_append(&caller, group.term(), frame)?;
        let result = group.raft().append_entries(call).await;
        // Any answer except "higher vote" means that the caller is this router's leader.
        if matches!(&result, Ok(reply) if !matches!(reply, AppendEntriesResponse::HigherVote(_))) {
            group.record_leader_contact();
        }
        self.answer(group, result)
    }

    type AppendStreamStream = BoxStream<'static, Result<pb::RaftFrame, Status>>;

    async fn append_stream(
        &self,
        request: Request<Streaming<pb::RaftFrame>>,
    ) -> Result<Response<Self::AppendStreamStream>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let mut frames = request.into_inner();
        let first = tokio::select! {
            first = frames.message() => first?,
            () = self.stop.cancelled() => return Err(Status::unavailable("this router is stopping")),
        };
        let first = first.ok_or_else(|| Status::invalid_argument("a stream without calls"))?;
        let group = Arc::clone(self.group_of(&first.cluster, first.shards, first.group)?);
        let first = terms::decode_append(&caller, group.consensus.term(), first)?;
        Ok(Response::new(append_stream::serve(group, caller, first, frames, self.stop.clone())))
    }

    async fn vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let (group, message) = self.message(request)?;
        self.check_candidate(&caller, group, &message)?;
        self.answer(group, group.raft().vote(message).await)
    }

    async fn pre_vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let (group, message) = self.message(request)?;
        self.check_candidate(&caller, group, &message)?;
        self.answer(group, group.raft().pre_vote(message).await)
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let (group, message): (_, TransferLeaderRequest<TypeConfig>) = self.message(request)?;
        self.check_vote_allowed(group)?;
        terms::check_vote(&caller, group.term(), message.from_leader())?;
        self.answer(group, group.raft().handle_transfer_leader(message).await)
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotPart>>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        let mut stream = request.into_inner();
        let first = stream
            .message()
            .await?
            .ok_or_else(|| Status::invalid_argument("a snapshot stream without parts"))?;
        let group = self.group(&first.cluster, first.shards, first.group)?;
        let head = check_head(&first)?;
        terms::check_vote(&caller, group.term(), &head.vote)?;
        terms::check_log_ids(&head.vote, head.meta.last_log_id)?;
        let slot = self.receiving.acquire().await;
        let _slot = slot.map_err(|_| Status::unavailable("this router is stopping"))?;
        let received = receive(
            &self.repair(group)?.machine().intake(),
            head.meta.clone(),
            head.bytes,
            &mut stream,
            PART_TIMEOUT,
        )
        .await?;
        let snapshot = Snapshot { meta: head.meta, snapshot: SnapshotData::Received(Box::new(received)) };
        let raft: &Raft = group.raft();
        self.answer(group, raft.install_full_snapshot(head.vote, snapshot).await)
    }
}
