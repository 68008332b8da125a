//! A node's own control calls: its state, and waiting until its announcements are acknowledged.
//!
//! Not here: blocks (`fetch.rs`, `save.rs`).

use std::time::Duration;

use kvfleet_proto::pb;
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::retry::channel;
use crate::{Client, ClientError};

/// Time for a status call.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// What a settle call may take beyond the time the node itself waits.
const SETTLE_MARGIN: Duration = Duration::from_secs(2);

/// Why a node's control call has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ControlError {
    /// The address is not one.
    #[error(transparent)]
    Address(#[from] ClientError),
    /// The node did not answer, or refused.
    #[error("node at {address}: {}", status.message())]
    Call {
        /// Where.
        address: String,
        /// What it said.
        status: Status,
    },
}

impl Client {
    /// Tiers, leases, tenants and epoch of the node whose control calls are served at `address`.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn node_status(&self, address: &str) -> Result<pb::NodeStatusReply, ControlError> {
        let request = within(pb::NodeStatusRequest {}, STATUS_TIMEOUT);
        let reply = self.node(address)?.node_status(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| failed(address, status))
    }

    /// Waits until everything the node announced so far is acknowledged, at most `timeout`.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn settle(&self, address: &str, timeout: Duration) -> Result<pb::SettleReply, ControlError> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let request = within(pb::SettleRequest { timeout_ms }, timeout.saturating_add(SETTLE_MARGIN));
        let reply = self.node(address)?.settle(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| failed(address, status))
    }

    fn node(&self, address: &str) -> Result<NodeControlClient<Channel>, ClientError> {
        Ok(NodeControlClient::new(channel(address, &self.identity)?))
    }
}

fn within<M>(message: M, timeout: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

fn failed(address: &str, status: Status) -> ControlError {
    ControlError::Call { address: address.to_owned(), status }
}
