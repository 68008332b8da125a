//! Raft calls from the other routers: decodes, hands to openraft, encodes. Nothing else.
//!
//! Not here: any Raft rule. A frame of another shard or one that does not decode is refused; a snapshot
//! is gathered under a limit before openraft sees it.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_server;
use openraft::raft::AppendEntriesResponse;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::{Request, Response, Status, Streaming};

use super::handle::Contact;
use super::network::SnapshotHead;
use super::{Raft, SHARD, Snapshot};

/// Largest snapshot taken from a peer: above any index the product is sized for, below the memory of a
/// router, so that a peer gone mad cannot end the process.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;

/// The receiving side of Raft.
pub(crate) struct RaftService {
    raft: Raft,
    contact: Arc<Contact>,
}

impl RaftService {
    pub(crate) fn new(raft: Raft, contact: Arc<Contact>) -> RaftService {
        RaftService { raft, contact }
    }
}

fn message<T: DeserializeOwned>(request: Request<pb::RaftFrame>) -> Result<T, Status> {
    let frame = request.into_inner();
    own_shard(frame.shard)?;
    rmp_serde::from_slice(&frame.payload)
        .map_err(|error| Status::invalid_argument(format!("raft frame does not decode: {error}")))
}

fn own_shard(shard: u32) -> Result<(), Status> {
    if shard == SHARD {
        return Ok(());
    }
    Err(Status::invalid_argument(format!("shard {shard} is not served here, only shard {SHARD}")))
}

fn answer<T: Serialize, E: std::fmt::Display>(
    result: Result<T, E>,
) -> Result<Response<pb::RaftFrame>, Status> {
    let value = result.map_err(|error| Status::internal(format!("raft: {error}")))?;
    let payload = rmp_serde::to_vec_named(&value)
        .map_err(|error| Status::internal(format!("raft answer does not encode: {error}")))?;
    Ok(Response::new(pb::RaftFrame { shard: SHARD, payload }))
}

async fn gather(mut stream: Streaming<pb::SnapshotPart>) -> Result<(SnapshotHead, Bytes), Status> {
    let first =
        stream.message().await?.ok_or_else(|| Status::invalid_argument("a snapshot stream without parts"))?;
    own_shard(first.shard)?;
    let head: SnapshotHead = rmp_serde::from_slice(&first.head)
        .map_err(|error| Status::invalid_argument(format!("snapshot head does not decode: {error}")))?;
    if head.bytes > SNAPSHOT_BYTES_MAX {
        let got = head.bytes;
        return Err(Status::invalid_argument(format!(
            "snapshot of {got} bytes, the limit is {SNAPSHOT_BYTES_MAX}"
        )));
    }
    let mut data = BytesMut::from(&first.data[..]);
    while let Some(part) = stream.message().await? {
        data.extend_from_slice(&part.data);
        if data.len() as u64 > head.bytes {
            return Err(Status::invalid_argument(format!(
                "snapshot is longer than the {} bytes it named",
                head.bytes
            )));
        }
    }
    if data.len() as u64 != head.bytes {
        let got = data.len();
        return Err(Status::invalid_argument(format!("snapshot ended after {got} of {} bytes", head.bytes)));
    }
    Ok((head, data.freeze()))
}

#[tonic::async_trait]
impl raft_server::Raft for RaftService {
    async fn append(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        let result = self.raft.append_entries(message(request)?).await;
        // Any answer but "your term is over" means that the caller is this router's leader.
        if matches!(&result, Ok(reply) if !matches!(reply, AppendEntriesResponse::HigherVote(_))) {
            self.contact.heard();
        }
        answer(result)
    }

    async fn vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        answer(self.raft.vote(message(request)?).await)
    }

    async fn pre_vote(&self, request: Request<pb::RaftFrame>) -> Result<Response<pb::RaftFrame>, Status> {
        answer(self.raft.pre_vote(message(request)?).await)
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::RaftFrame>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        answer(self.raft.handle_transfer_leader(message(request)?).await)
    }

    async fn snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotPart>>,
    ) -> Result<Response<pb::RaftFrame>, Status> {
        let (head, data) = gather(request.into_inner()).await?;
        let snapshot = Snapshot { meta: head.meta, snapshot: data };
        answer(self.raft.install_full_snapshot(head.vote, snapshot).await)
    }
}
