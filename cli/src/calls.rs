//! Control calls of commands: status, lookup and writes at routers, and calls to an instance.
//!
//! Every call names its router, because questions are often about one router. Not here: routing
//! with failover (`kvfleet-client`).

use std::time::Duration;

use kvfleet_net::channel::{connect_lazily, endpoint};
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_client::InstanceClient;
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::pb::router_client::RouterClient;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Longest time to connect. Routers are near, so a longer wait means a dead router.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time of a status or lookup call. A replica answers from memory, or waits at most a
/// second to catch up.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Longest time of a run on an instance, far above any fetch deadline.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// Largest answer, in bytes; even a lookup of the longest prefix is far smaller.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// Client of one router.
#[derive(Clone, Debug)]
pub struct RouterCalls {
    /// Address of the router.
    pub address: String,
    client: RouterClient<Channel>,
}

/// Opens a channel to a server of this role, which connects on first use and again after every break.
pub fn channel(address: &str, identity: &Identity, server: Role) -> anyhow::Result<Channel> {
    let wrong = |cause: &dyn std::fmt::Display| anyhow::anyhow!("{address:?} is not HOST:PORT: {cause}");
    let endpoint = endpoint(address).map_err(|cause| wrong(&cause))?;
    Ok(connect_lazily(&endpoint.connect_timeout(CONNECT_TIMEOUT), identity, server))
}

impl RouterCalls {
    /// Client of the router at `address`.
    pub fn new(address: &str, identity: &Identity) -> anyhow::Result<Self> {
        let channel = channel(address, identity, Role::Router(None))?;
        let client = RouterClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
        Ok(Self { address: address.to_owned(), client })
    }

    /// Clients of all `addresses`.
    pub fn all(addresses: &[String], identity: &Identity) -> anyhow::Result<Vec<Self>> {
        addresses.iter().map(|address| Self::new(address, identity)).collect()
    }

    /// Term, leader, nodes, instances and index size.
    pub async fn status(&self) -> Result<pb::StatusReply, Status> {
        self.client.clone().status(with_timeout(pb::StatusRequest {})).await.map(tonic::Response::into_inner)
    }

    /// Explanation of a request's decision, if this router made it recently.
    pub async fn why(&self, request: u64) -> Result<pb::WhyReply, Status> {
        let request = with_timeout(pb::WhyRequest { request });
        self.client.clone().why(request).await.map(tonic::Response::into_inner)
    }

    /// Holders of each part of a prefix.
    pub async fn lookup(&self, request: pb::LookupRequest) -> Result<pb::LookupReply, Status> {
        self.client.clone().lookup(with_timeout(request)).await.map(tonic::Response::into_inner)
    }

    /// A write without effect: answered only after this router committed it as leader.
    pub async fn commit_nothing(&self) -> Result<pb::AdminReply, Status> {
        /// A group that does not exist, so that removing its time to live changes nothing.
        const UNUSED_GROUP: u32 = u32::MAX;
        let request = pb::SetTtlRequest { group: UNUSED_GROUP, ttl_ms: 0, clear: true };
        self.set_ttl(request).await
    }

    /// Keeps blocks until unpinned.
    pub async fn pin(&self, request: pb::PinRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().pin(with_timeout(request)).await.map(tonic::Response::into_inner)
    }

    /// Ends a pin.
    pub async fn unpin(&self, request: pb::UnpinRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().unpin(with_timeout(request)).await.map(tonic::Response::into_inner)
    }

    /// Sets or removes a tenant's quota.
    pub async fn set_quota(&self, request: pb::SetQuotaRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().set_quota(with_timeout(request)).await.map(tonic::Response::into_inner)
    }

    /// Sets or removes a group's time to live.
    pub async fn set_ttl(&self, request: pb::SetTtlRequest) -> Result<pb::AdminReply, Status> {
        self.client.clone().set_ttl(with_timeout(request)).await.map(tonic::Response::into_inner)
    }

    /// Switches to the next generation of weights.
    pub async fn set_generation(&self, generation: u32) -> Result<pb::AdminReply, Status> {
        let request = with_timeout(pb::SetGenerationRequest { generation });
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

/// Waits until the routers applied all announcements of the node behind `channel`. Returns whether
/// they did in time.
pub async fn settle(channel: Channel, timeout: Duration) -> Result<bool, Status> {
    let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let mut request = Request::new(pb::FlushRequest { timeout_ms });
    request.set_timeout(timeout.saturating_add(CALL_TIMEOUT));
    Ok(NodeControlClient::new(channel).flush(request).await?.into_inner().flushed)
}

/// Status of the instance behind `channel`.
pub async fn instance_status(channel: Channel) -> Result<pb::InstanceStatusReply, Status> {
    let request = with_timeout(pb::InstanceStatusRequest {});
    InstanceClient::new(channel).instance_status(request).await.map(tonic::Response::into_inner)
}

/// Text of a failed call, with advice.
pub fn explain(address: &str, status: &Status) -> String {
    match status.code() {
        Code::Unavailable => format!(
            "router {address} cannot be reached ({}); is it running, and are --tls-dir's certificates the cluster's?",
            root_cause(status)
        ),
        // tonic reports a connect timeout as unknown.
        Code::DeadlineExceeded | Code::Cancelled | Code::Unknown => {
            format!(
                "router {address} did not answer within {CALL_TIMEOUT:?}; try again, or name another one in --cluster"
            )
        }
        _ => format!("router {address}: {}", status.message()),
    }
}

/// The last error of the chain, since "transport error" alone does not help.
fn root_cause(status: &Status) -> String {
    let mut source = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}

fn with_timeout<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}
