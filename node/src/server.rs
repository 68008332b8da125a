//! Control calls of a node over gRPC with mutual TLS: status, and waiting for announcements to arrive.

use std::cmp::Ordering;
use std::time::Duration;

use kv_core::id::{Epoch, Seq};
use kvfleet_proto::pb::node_control_server::NodeControl;
use kvfleet_proto::pb::{NodeStatusReply, NodeStatusRequest, SettleReply, SettleRequest};
use tokio::time::Instant;
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
        let until = Instant::now() + wait;
        let mut settled = false;
        while !settled {
            let target = self.store.ask(|reply| Ask::Position { reply }).await.map_err(stopping)?;
            let joined = self.store.shared.epoch() > Epoch(0);
            let Some(goal) = target.filter(|_| joined).map(|at| (at.epoch, at.seq)) else {
                settled = joined;
                break;
            };
            let mut acked = self.store.shared.acked.subscribe();
            let told = acked.wait_for(|now| arrived(*now, goal).is_some());
            let Ok(Ok(now)) = tokio::time::timeout_at(until, told).await else { break };
            // In a later epoch everything is announced anew, under new numbers: ask which.
            settled = arrived(*now, goal) == Some(true);
        }
        let (epoch, seq) = *self.store.shared.acked.borrow();
        Ok(Response::new(SettleReply { epoch: epoch.0, acknowledged_seq: seq.0, settled }))
    }
}

/// Whether `goal` was acknowledged; `Some(false)` once its epoch is over, nothing while neither is known.
fn arrived(now: (Epoch, Seq), goal: (Epoch, Seq)) -> Option<bool> {
    match now.0.cmp(&goal.0) {
        Ordering::Less => None,
        Ordering::Equal => (now.1 >= goal.1).then_some(true),
        Ordering::Greater => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_of_a_later_epoch_says_nothing_about_an_earlier_one() {
        let at = |epoch, seq| (Epoch(epoch), Seq(seq));
        assert_eq!(arrived(at(1, 4), at(1, 5)), None);
        assert_eq!(arrived(at(1, 5), at(1, 5)), Some(true));
        assert_eq!(arrived(at(2, 0), at(1, 5)), Some(false));
        assert_eq!(arrived(at(2, 9), at(1, 5)), Some(false));
        assert_eq!(arrived(at(1, 9), at(2, 0)), None);
    }
}
