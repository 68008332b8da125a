//! Control calls of a node over gRPC with mutual TLS: status, audits, windows, copies, and waiting
//! for announcements. The access table admits callers before the calls come here.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, RouterId, Seq};
use kv_core::tier::{WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN};
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb::node_control_server::NodeControl;
use kvfleet_proto::pb::{
    AuditReply, AuditRequest, CopyBlocksReply, CopyBlocksRequest, FlushReply, FlushRequest, Manifest,
    NodeStatusReply, NodeStatusRequest, SetWindowReply, SetWindowRequest, WaitingRequest,
};
use kvfleet_proto::{convert, pb};
use kvfleet_transport::AnnouncePosition;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::announce::outboxes::ShardPositions;
use crate::copies::{COPY_BLOCKS_MAX, Copier, CopyRequest};
use crate::store::{self, StoreHandle, StoreRequest};

/// Longest wait of `Settle`, whatever the request says.
pub const SETTLE_MAX: Duration = Duration::from_secs(60);

/// Maximum blocks of one audit, named or sampled: some hundred microseconds of the task that owns
/// the book.
pub const AUDIT_BLOCKS_MAX: usize = 1024;

/// The control service.
#[derive(Clone, Debug)]
pub(crate) struct ControlService {
    pub(crate) store: StoreHandle,
    /// Manifest of the stored blocks.
    pub(crate) manifest: Manifest,
    pub(crate) copier: Arc<Copier>,
}

#[tonic::async_trait]
impl NodeControl for ControlService {
    async fn node_status(&self, _: Request<NodeStatusRequest>) -> Result<Response<NodeStatusReply>, Status> {
        let status = self.store.try_request(|reply| StoreRequest::Status { reply }).await;
        let manifest = Some(self.manifest.clone());
        status
            .map(|status| Response::new(NodeStatusReply { manifest, ..status }))
            .map_err(|_| Status::resource_exhausted("the node is busy: ask again"))
    }

    async fn audit(&self, request: Request<AuditRequest>) -> Result<Response<AuditReply>, Status> {
        let AuditRequest { shard, blocks, sample, seed } = request.into_inner();
        let invalid = |what: String| Status::invalid_argument(what);
        let blocks =
            convert::hashes_from_bytes("blocks", &blocks).map_err(|error| invalid(error.to_string()))?;
        let sample = usize::try_from(sample).unwrap_or(usize::MAX);
        if blocks.len().max(sample) > AUDIT_BLOCKS_MAX {
            let most = blocks.len().max(sample);
            return Err(invalid(format!(
                "an audit of {most} blocks, the limit is {AUDIT_BLOCKS_MAX}: ask for less"
            )));
        }
        let shard = u16::try_from(shard).map_err(|error| invalid(error.to_string()))?;
        let answer =
            self.store.try_request(|reply| StoreRequest::Audit { shard, blocks, sample, seed, reply }).await;
        let answer = answer.map_err(|_| Status::resource_exhausted("the node is busy: ask again"))?;
        let none =
            || Status::failed_precondition(format!("this node does not announce to a shard {shard} yet"));
        answer.map(Response::new).ok_or_else(none)
    }

    async fn set_window(
        &self,
        request: Request<SetWindowRequest>,
    ) -> Result<Response<SetWindowReply>, Status> {
        let caller = Caller::from_extensions(request.extensions())?;
        caller.require_router(RouterId(request.get_ref().router))?;
        let SetWindowRequest { waiting: requests, router } = request.into_inner();
        let waiting = waiting(&requests).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let taken = self.store.set_window(router, waiting).await;
        let taken = taken.map_err(|_| Status::resource_exhausted("the node is busy: ask again"))?;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(Response::new(SetWindowReply {
            requests: count(taken.requests),
            blocks: count(taken.blocks),
            dram_blocks: count(taken.dram_blocks),
            ssd_blocks: count(taken.ssd_blocks),
            ends_after_ms: u64::try_from(WINDOW_SPAN.as_millis()).unwrap_or(u64::MAX),
        }))
    }

    async fn copy_blocks(
        &self,
        request: Request<CopyBlocksRequest>,
    ) -> Result<Response<CopyBlocksReply>, Status> {
        let order = copy_order(&request.into_inner())?;
        let copied = self.copier.copy(&order).await;
        let seen = |at: AnnouncePosition| pb::AnnouncePosition {
            node: at.node.0,
            epoch: at.epoch.0,
            seq: at.seq.0,
            shard: at.shard.into(),
        };
        Ok(Response::new(CopyBlocksReply {
            end: copied.end as u32,
            stored_blocks: copied.stored_blocks,
            present_blocks: copied.present_blocks,
            stored_bytes: copied.stored_bytes,
            visible_at: copied.visible_at.map(seen),
        }))
    }

    async fn flush(&self, request: Request<FlushRequest>) -> Result<Response<FlushReply>, Status> {
        let wait = Duration::from_millis(request.into_inner().timeout_ms).min(SETTLE_MAX);
        let stopping = |_| Status::unavailable("the node is stopping");
        let until = Instant::now() + wait;
        let mut settled = false;
        while !settled {
            let mut filled = self.store.shared.filled.subscribe();
            let target =
                self.store.request(|reply| StoreRequest::Positions { reply }).await.map_err(stopping)?;
            let Some(goal) = target else {
                // Before the first join, wait for the join.
                if tokio::time::timeout_at(until, filled.changed()).await.is_err() {
                    break;
                }
                continue;
            };
            let mut acked = self.store.shared.acked.subscribe();
            let told = acked.wait_for(|now| is_acknowledged(now, &goal).is_some());
            let Ok(Ok(now)) = tokio::time::timeout_at(until, told).await else { break };
            // A later epoch announces everything again under new numbers: ask for the new target.
            settled = is_acknowledged(&now, &goal) == Some(true);
        }
        let acked = self.store.shared.acked.borrow();
        let acknowledged_seq = acked.seqs.iter().map(|seq| seq.0).sum();
        Ok(Response::new(FlushReply { epoch: acked.epoch.0, acknowledged_seq, flushed: settled }))
    }
}

fn copy_order(request: &CopyBlocksRequest) -> Result<CopyRequest, Status> {
    let invalid = |error: convert::ConvertError| Status::invalid_argument(error.to_string());
    let run = request.run.as_ref().ok_or_else(|| invalid(convert::ConvertError::Absent { field: "run" }))?;
    let run = convert::run_from_pb(run).map_err(invalid)?;
    let blocks = run.hashes.len();
    if blocks > COPY_BLOCKS_MAX {
        return Err(Status::invalid_argument(format!(
            "a copy of {blocks} blocks, the limit is {COPY_BLOCKS_MAX}: ask for less"
        )));
    }
    Ok(CopyRequest {
        run,
        source_address: request.source_address.clone(),
        source_epoch: Epoch(request.source_epoch),
        identity: convert::identity_field("identity", &request.identity).map_err(invalid)?,
        bytes_max: request.bytes_max,
        within: Duration::from_millis(request.within_ms),
    })
}

/// The blocks of each queued request, within the window's limits.
fn waiting(requests: &[WaitingRequest]) -> Result<Vec<store::WaitingRequest>, convert::ConvertError> {
    let mut room = WINDOW_BLOCKS_MAX;
    let mut waiting = Vec::new();
    for request in requests.iter().take(WINDOW_REQUESTS_MAX) {
        let blocks = convert::hashes_from_bytes("waiting.blocks", &request.blocks)?;
        room = room.saturating_sub(blocks.len());
        let starts_after = Duration::from_millis(request.starts_after_ms);
        waiting.push(store::WaitingRequest { starts_after, blocks });
        if room == 0 {
            break;
        }
    }
    Ok(waiting)
}

/// Whether `goal` was acknowledged. `Some(false)` if its epoch is over, `None` while unknown.
fn is_acknowledged(now: &ShardPositions, goal: &ShardPositions) -> Option<bool> {
    // An empty goal counts as acknowledged, even before the first acknowledgement.
    let behind = |(place, goal): (usize, &Seq)| now.seqs.get(place).copied().unwrap_or_default() < *goal;
    match now.epoch.cmp(&goal.epoch) {
        Ordering::Less => goal.seqs.iter().all(|seq| *seq == Seq(0)).then_some(true),
        Ordering::Equal => (!goal.seqs.iter().enumerate().any(behind)).then_some(true),
        Ordering::Greater => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::Epoch;

    #[test]
    fn later_epoch_does_not_acknowledge_an_earlier_one() {
        let at = |epoch, seqs: &[u64]| ShardPositions {
            epoch: Epoch(epoch),
            seqs: seqs.iter().copied().map(Seq).collect(),
        };
        assert_eq!(is_acknowledged(&at(1, &[4]), &at(1, &[5])), None);
        assert_eq!(is_acknowledged(&at(1, &[5]), &at(1, &[5])), Some(true));
        assert_eq!(is_acknowledged(&at(2, &[0]), &at(1, &[5])), Some(false));
        assert_eq!(is_acknowledged(&at(2, &[9]), &at(1, &[5])), Some(false));
        assert_eq!(is_acknowledged(&at(1, &[9]), &at(2, &[1])), None);
        assert_eq!(is_acknowledged(&at(1, &[9]), &at(2, &[0])), Some(true), "an empty goal is acknowledged");
    }

    #[test]
    fn every_shard_must_have_acknowledged() {
        let at =
            |seqs: &[u64]| ShardPositions { epoch: Epoch(1), seqs: seqs.iter().copied().map(Seq).collect() };
        assert_eq!(is_acknowledged(&at(&[4, 7]), &at(&[5, 7])), None);
        assert_eq!(is_acknowledged(&at(&[]), &at(&[0, 1])), None);
        assert_eq!(is_acknowledged(&at(&[9, 7]), &at(&[5, 7])), Some(true));
    }
}
