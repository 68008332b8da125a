//! Control calls that a person's command makes: status, lookup, writes, and one call to an instance.
//!
//! Every call names the router it goes to, because what is asked is often about one router. Routing
//! with failover is not here (`kvfleet-client`).

use std::time::Duration;

use kvfleet_proto::channel::{connect_lazily, endpoint};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_client::InstanceClient;
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls::Identity;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// How long a connection may take. Routers are near; a longer wait means a dead one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long one status or lookup may take: a replica answers from memory, or waits at most a second
/// for what it has not applied yet.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a run on an instance may take before it counts as failed. Far above any fetch deadline.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// Largest answer taken, in bytes: a lookup of the longest prefix stays far below.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// A router by its address.
#[derive(Clone, Debug)]
pub struct RouterCalls {
    /// Where it is.
    pub address: String,
    client: RouterClient<Channel>,
}

/// Opens a channel that connects when first used and again after every break.
pub fn channel(address: &str, identity: &Identity) -> anyhow::Result<Channel> {
    let wrong = |cause: &dyn std::fmt::Display| anyhow::anyhow!("{address:?} is not HOST:PORT: {cause}");
    let endpoint = endpoint(address).map_err(|cause| wrong(&cause))?;
    Ok(connect_lazily(&endpoint.connect_timeout(CONNECT_TIMEOUT), identity))
}

impl RouterCalls {
    /// A handle to the router at `address`.
    pub fn new(address: &str, identity: &Identity) -> anyhow::Result<Self> {
        let client =
            RouterClient::new(channel(address, identity)?).max_decoding_message_size(REPLY_BYTES_MAX);
        Ok(Self { address: address.to_owned(), client })
    }

    /// Handles to all of `addresses`.
    pub fn all(addresses: &[String], identity: &Identity) -> anyhow::Result<Vec<Self>> {
        addresses.iter().map(|address| Self::new(address, identity)).collect()
    }

    /// Term, leader, nodes, instances, index size.
    pub async fn status(&self) -> Result<pb::StatusReply, Status> {
        self.client.clone().status(limited(pb::StatusRequest {})).await.map(tonic::Response::into_inner)
    }

    /// Why a request ran where it did, if this router decided it of late.
    pub async fn why(&self, request: u64) -> Result<pb::WhyReply, Status> {
        let request = limited(pb::WhyRequest { request });
        self.client.clone().why(request).await.map(tonic::Response::into_inner)
    }

    /// Who holds which part of a prefix.
    pub async fn lookup(&self, request: pb::LookupRequest) -> Result<pb::LookupReply, Status> {
        self.client.clone().lookup(limited(request)).await.map(tonic::Response::into_inner)
    }

    /// A write that changes nothing: answered only after it was committed by this router as leader.
    pub async fn commit_nothing(&self) -> Result<pb::AdminReply, Status> {
        /// A group nobody uses, so that lifting its time to live changes nothing.
        const UNUSED_GROUP: u32 = u32::MAX;
        let request = pb::SetTtlRequest { group: UNUSED_GROUP, ttl_ms: 0, lift: true };
        self.set_ttl(request).await
    }

    /// Keeps blocks until unpinned.
    pub async fn pin(&self, request: pb::PinRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().pin(limited(request)).await.map(tonic::Response::into_inner)
    }

    /// Ends a pin.
    pub async fn unpin(&self, request: pb::UnpinRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().unpin(limited(request)).await.map(tonic::Response::into_inner)
    }

    /// Sets or lifts a tenant's quota.
    pub async fn set_quota(&self, request: pb::SetQuotaRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().set_quota(limited(request)).await.map(tonic::Response::into_inner)
    }

    /// Sets or lifts a group's time to live.
    pub async fn set_ttl(&self, request: pb::SetTtlRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().set_ttl(limited(request)).await.map(tonic::Response::into_inner)
    }

    /// Goes on to the next generation of weights.
    pub async fn set_generation(&self, generation: u32) -> Result<pb::AdminReply, Status> {
        let request = limited(pb::SetGenerationRequest { generation });
        self.client.clone().set_generation(request).await.map(tonic::Response::into_inner)
    }
}

/// Runs one request on the instance behind `channel`.
pub async fn run_on_instance(channel: Channel, request: pb::RunRequest) -> Result<pb::RunReply, Status> {
    let mut request = Request::new(request);
    request.set_timeout(RUN_TIMEOUT);
    let mut client = InstanceClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
    client.run(request).await.map(tonic::Response::into_inner)
}

/// Waits until routers have taken in all that the node behind `channel` announced; whether they have in that time.
pub async fn settle(channel: Channel, timeout: Duration) -> Result<bool, Status> {
    let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let mut request = Request::new(pb::SettleRequest { timeout_ms });
    request.set_timeout(timeout.saturating_add(CALL_TIMEOUT));
    Ok(NodeControlClient::new(channel).settle(request).await?.into_inner().settled)
}

/// What the instance behind `channel` says of itself.
pub async fn instance_status(channel: Channel) -> Result<pb::InstanceStatusReply, Status> {
    let request = limited(pb::InstanceStatusRequest {});
    InstanceClient::new(channel).instance_status(request).await.map(tonic::Response::into_inner)
}

/// What a failed call says to a person, with what to do about it.
pub fn explain(address: &str, status: &Status) -> String {
    match status.code() {
        Code::Unavailable => format!(
            "router {address} cannot be reached ({}); is it running, and are --tls-dir's certificates the cluster's?",
            root_cause(status)
        ),
        // A connection that did not come in time is unknown to tonic.
        Code::DeadlineExceeded | Code::Cancelled | Code::Unknown => {
            format!(
                "router {address} did not answer within {CALL_TIMEOUT:?}; try again, or name another one in --cluster"
            )
        }
        _ => format!("router {address}: {}", status.message()),
    }
}

/// The last error of the chain: "transport error" alone helps nobody.
fn root_cause(status: &Status) -> String {
    let mut source = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}

fn limited<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}
