//! Raft calls from the other routers: checks who speaks, decodes, hands to the group's openraft, encodes.
//!
//! Not here: any Raft rule. A message of another cluster, of another number of shards, or one that does not
//! decode is refused; a snapshot is gathered under limits, each part against its checksum, before openraft
//! sees it.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_server;
use openraft::raft::AppendEntriesResponse;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::{Request, Response, Status, Streaming};

use super::handle::Consensus;
use super::network::{Envelope, SnapshotHead};
use super::{Cluster, Raft, Snapshot};
use crate::groups::{Group, Groups};
use crate::truth::digests::{Mark, compare_marks};

/// Bytes of snapshots taken from peers at once, of all groups: above any index the product is sized for,
/// below the memory of a router, so that neither a peer gone mad nor many groups that lag at once can end
/// the process.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;

/// Bytes that one permit of that budget stands for.
const PERMIT_BYTES: u64 = 1 << 20;

/// The receiving side of Raft, for all groups of this router.
pub(crate) struct RaftService {
    cluster: Arc<Cluster>,
    groups: Groups,
    snapshot_room: Semaphore,
}

impl RaftService {
    pub(crate) fn new(cluster: Arc<Cluster>, groups: Groups) -> RaftService {
        let permits = usize::try_from(SNAPSHOT_BYTES_MAX / PERMIT_BYTES).unwrap_or(usize::MAX);
        RaftService { cluster, groups, snapshot_room: Semaphore::new(permits) }
    }

    fn group(&self, cluster: &str, shards: u32, group: u32) -> Result<&Consensus, Status> {
        self.whole_group(cluster, shards, group).map(|group| &group.consensus)
    }

    fn whole_group(&self, cluster: &str, shards: u32, group: u32) -> Result<&Group, Status> {
        self.same_cluster(cluster, shards)?;
        let known = self.groups.get(group).map(|group| &**group);
        known.ok_or_else(|| Status::invalid_argument(format!("there is no group {group}")))
    }

    fn same_cluster(&self, cluster: &str, shards: u32) -> Result<(), Status> {
        let Cluster { name, shards: ours } = &*self.cluster;
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
        let message = rmp_serde::from_slice(&frame.payload)
            .map_err(|error| Status::invalid_argument(format!("raft frame does not decode: {error}")))?;
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

    /// Room for a snapshot of so many bytes; waits while others take it.
    async fn room(&self, bytes: u64) -> Result<SemaphorePermit<'_>, Status> {
        if bytes > SNAPSHOT_BYTES_MAX {
            return Err(Status::invalid_argument(format!(
                "snapshot of {bytes} bytes, the limit is {SNAPSHOT_BYTES_MAX}"
            )));
        }
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let room = self.snapshot_room.acquire_many(permits).await;
        room.map_err(|_| Status::unavailable("this router stops"))
    }
}

/// The data of all further parts, which must come to so many bytes.
pub(super) async fn gather(
    stream: &mut (impl Stream<Item = Result<pb::SnapshotPart, Status>> + Unpin),
    bytes: u64,
) -> Result<Bytes, Status> {
    let mut data = BytesMut::new();
    while let Some(part) = stream.next().await {
        let part = part?;
        check_part(&part.data, part.crc32c)?;
        data.extend_from_slice(&part.data);
        if data.len() as u64 > bytes {
            return Err(Status::invalid_argument(format!(
                "snapshot is longer than the {bytes} bytes it named"
            )));
        }
    }
    if data.len() as u64 != bytes {
        let got = data.len();
        return Err(Status::invalid_argument(format!("snapshot ended after {got} of {bytes} bytes")));
    }
    Ok(data.freeze())
}

fn check_part(bytes: &[u8], stored: u32) -> Result<(), Status> {
    let computed = crc32c::crc32c(bytes);
    if stored == computed {
        return Ok(());
    }
    Err(Status::data_loss(format!(
        "a part of a snapshot has checksum {stored:08x}, its bytes give {computed:08x}: it must be sent again"
    )))
}

#[tonic::async_trait]
impl raft_server::Raft for RaftService {
    async fn hello(&self, _: Request<pb::HelloRequest>) -> Result<Response<pb::HelloReply>, Status> {
        let Cluster { name, shards } = &*self.cluster;
        let router = self.groups.control().consensus.id();
        Ok(Response::new(pb::HelloReply { cluster: name.clone(), shards: (*shards).into(), router }))
    }

    async fn read_index(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<Response<pb::ReadIndexReply>, Status> {
        let frame = request.into_inner();
        let group = self.group(&frame.cluster, frame.shards, frame.group)?;
        match group.read_index_here().await {
            Some(index) => Ok(Response::new(pb::ReadIndexReply { index })),
            None => Err(Status::unavailable("this router does not lead the group")),
        }
    }

    async fn compare(
        &self,
        request: Request<pb::CompareRequest>,
    ) -> Result<Response<pb::CompareReply>, Status> {
        let request = request.into_inner();
        let group = self.whole_group(&request.cluster, request.shards, request.group)?;
        let theirs = request.marks.iter().map(|mark| {
            let digest = mark.digest.as_slice().try_into();
            let digest = digest.map_err(|_| Status::invalid_argument("a digest has 16 bytes"))?;
            Ok(Mark { index: mark.index, digest })
        });
        let theirs = theirs.collect::<Result<Vec<_>, Status>>()?;
        let Some((compared_index, differs)) = compare_marks(&group.published.marks(), &theirs) else {
            return Ok(Response::new(pb::CompareReply::default()));
        };
        if differs && !group.has_diverged() {
            let group = group.consensus.group();
            tracing::error!(
                group,
                entry = compared_index,
                "this replica differs from the leader's: it answers nothing"
            );
        }
        group.compared(compared_index, differs);
        Ok(Response::new(pb::CompareReply { compared_index, differs }))
    }

    async fn append(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let (group, message) = self.message(request)?;
        let result = group.raft().append_entries(message).await;
        // Any answer but "your term is over" means that the caller is this router's leader.
        if matches!(&result, Ok(reply) if !matches!(reply, AppendEntriesResponse::HigherVote(_))) {
            group.heard();
        }
        self.answer(group, result)
    }

    async fn vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let (group, message) = self.message(request)?;
        self.answer(group, group.raft().vote(message).await)
    }

    async fn pre_vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let (group, message) = self.message(request)?;
        self.answer(group, group.raft().pre_vote(message).await)
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let (group, message) = self.message(request)?;
        self.answer(group, group.raft().handle_transfer_leader(message).await)
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotPart>>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let mut stream = request.into_inner();
        let first = stream
            .message()
            .await?
            .ok_or_else(|| Status::invalid_argument("a snapshot stream without parts"))?;
        let group = self.group(&first.cluster, first.shards, first.group)?;
        check_part(&first.head, first.crc32c)?;
        let head: SnapshotHead = rmp_serde::from_slice(&first.head)
            .map_err(|error| Status::invalid_argument(format!("snapshot head does not decode: {error}")))?;
        let _room = self.room(head.bytes).await?;
        let data = gather(&mut stream, head.bytes).await?;
        let snapshot = Snapshot { meta: head.meta, snapshot: data };
        let raft: &Raft = group.raft();
        self.answer(group, raft.install_full_snapshot(head.vote, snapshot).await)
    }
}
