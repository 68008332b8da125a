//! Control calls that a node itself serves: its status, and waiting until its announcements are
//! acknowledged.
//!
//! Not here: blocks (`fetch.rs`, `save.rs`).

use std::time::Duration;

use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::retry::channel;
use crate::{Client, ClientError};

/// Timeout of a status call.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// Time allowed for a settle call beyond the time that the node itself waits.
const SETTLE_MARGIN: Duration = Duration::from_secs(2);

/// Error of a node's control call.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ControlError {
    /// The address is malformed.
    #[error(transparent)]
    Address(#[from] ClientError),
    /// The node did not answer, or refused.
    #[error("node at {address}: {}", status.message())]
    Call {
        /// Address of the node.
        address: String,
        /// Status that the node returned.
        status: Status,
    },
}

impl Client {
    /// Tiers, leases, tenants and epoch of the node that serves control calls at `address`. Needs an
    /// administrator's certificate.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn node_status(&self, address: &str) -> Result<pb::NodeStatusReply, ControlError> {
        let request = with_timeout(pb::NodeStatusRequest {}, STATUS_TIMEOUT);
        let reply = self.node(address)?.node_status(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| call_error(address, status))
    }

    /// Waits until all announcements that the node has made so far are acknowledged, at most
    /// `timeout`. Needs an administrator's certificate.
    ///
    /// # Errors
    /// If the node does not answer.
    pub async fn settle(&self, address: &str, timeout: Duration) -> Result<pb::FlushReply, ControlError> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let request = with_timeout(pb::FlushRequest { timeout_ms }, timeout.saturating_add(SETTLE_MARGIN));
        let reply = self.node(address)?.flush(request).await;
        reply.map(tonic::Response::into_inner).map_err(|status| call_error(address, status))
    }

    fn node(&self, address: &str) -> Result<NodeControlClient<Channel>, ClientError> {
        Ok(NodeControlClient::new(channel(address, &self.identity, Role::Node(None))?))
    }
}

fn with_timeout<M>(message: M, timeout: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

fn call_error(address: &str, status: Status) -> ControlError {
    ControlError::Call { address: address.to_owned(), status }
}
