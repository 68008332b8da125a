//! Control calls of a node over gRPC with mutual TLS: status, and waiting for announcements to arrive.

use std::time::Duration;

use kv_core::id::{Epoch, Seq};
use kvfleet_proto::pb::node_control_server::NodeControl;
use kvfleet_proto::pb::{NodeStatusReply, NodeStatusRequest, SettleReply, SettleRequest};
use tonic::{Request, Response, Status};

use crate::store::{Ask, StoreHandle};

/// Longest time `Settle` waits, whatever is asked.
pub const SETTLE_MAX: Duration = Duration::from_secs(60);

/// The control service.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) store: StoreHandle,
}

#[tonic::async_trait]
impl NodeControl for Control {
    async fn node_status(&self, _: Request<NodeStatusRequest>) -> Result<Response<NodeStatusReply>, Status> {
        let status = self.store.try_ask(|reply| Ask::Status { reply }).await;
        status.map(Response::new).map_err(|_| Status::resource_exhausted("the node is busy: ask again"))
    }

    async fn settle(&self, request: Request<SettleRequest>) -> Result<Response<SettleReply>, Status> {
        let wait = Duration::from_millis(request.into_inner().timeout_ms).min(SETTLE_MAX);
        let stopping = |_| Status::unavailable("the node is stopping");
        let target = self.store.ask(|reply| Ask::Position { reply }).await.map_err(stopping)?;
        let goal = target.map(|at| (at.epoch, at.seq));
        let joined = self.store.shared.epoch() > Epoch(0);
        let mut acked = self.store.shared.acked.subscribe();
        let arrived = |now: &(Epoch, Seq)| goal.is_none_or(|goal| *now >= goal);
        let settled =
            joined && tokio::time::timeout(wait, acked.wait_for(arrived)).await.is_ok_and(|r| r.is_ok());
        let (epoch, seq) = *self.store.shared.acked.borrow();
        Ok(Response::new(SettleReply { epoch: epoch.0, acknowledged_seq: seq.0, settled }))
    }
}
