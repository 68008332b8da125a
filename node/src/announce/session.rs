//! Common parts of all streams to routers: connecting, the reasons for an end, and logging of
//! failures.
//!
//! Not here: the messages (`link`, `shard`) and the choice of the router (`router_selector`).

use std::time::Duration;

use kvfleet_net::tls::Role;
use kvfleet_net::{channel, tls};
use kvfleet_proto::pb::router_client::RouterClient;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Servers that a node tells about its blocks: any router.
const ROUTER: Role = Role::Router(None);

/// Timeout of a router's answer to a connection or a join.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval of keepalive pings. They detect a router that went silent without closing (partition,
/// stopped process); TCP alone would take a quarter of an hour.
const KEEPALIVE: Duration = Duration::from_millis(300);

/// Timeout of a ping: longer than the pauses of a busy machine, short against the cost of an
/// unrouted node.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Messages buffered for a stream.
pub(super) const STREAM_BUFFER: usize = 16;

/// Metadata key with the leader's address.
const LEADER_KEY: &str = "kvfleet-leader";

/// Why a stream ended.
#[derive(Debug)]
pub(super) enum StreamEnd {
    Lost(String),
    Leader(String),
    Fenced,
    /// Every router would refuse this node.
    Refused(String),
    /// The node joined again meanwhile.
    Rejoined,
}

/// Failures already logged, so that each is logged once.
#[derive(Debug, Default)]
pub(super) struct LoggedTrouble {
    lost: bool,
    refused: Option<String>,
}

impl LoggedTrouble {
    /// No router accepts the stream.
    pub(super) fn lost(&mut self, group: u16, address: &str, cause: &str) {
        if std::mem::replace(&mut self.lost, true) {
            tracing::debug!(group, address, cause, "router lost");
        } else {
            tracing::warn!(group, address, cause, "no router takes announcements; serving goes on");
        }
    }

    /// The routers refuse this node. Logged once per cause, even across retries.
    pub(super) fn refused(&mut self, address: &str, cause: String) {
        if self.refused.as_ref() != Some(&cause) {
            tracing::error!(address, cause, "the routers refuse this node; it receives no requests");
            self.refused = Some(cause);
        }
    }

    /// A router accepted the stream.
    pub(super) fn found(&mut self) {
        self.lost = false;
    }
}

/// Connects to a router.
pub(super) async fn connect(
    address: &str,
    identity: &tls::Identity,
) -> Result<RouterClient<Channel>, String> {
    let endpoint = endpoint(address)?;
    let connecting = channel::connect_to(&endpoint, identity, ROUTER);
    let channel = timeout(CALL_TIMEOUT, connecting).await.map_err(|late| late.to_string())?;
    channel.map(RouterClient::new).map_err(|cause| error_chain(&cause))
}

/// A connection to a router that is opened on first use, and reopened after a failure.
pub(crate) fn connect_lazily(
    address: &str,
    identity: &tls::Identity,
) -> Result<RouterClient<Channel>, String> {
    Ok(RouterClient::new(channel::connect_lazily(&endpoint(address)?, identity, ROUTER)))
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    Ok(channel::endpoint(address)
        .map_err(|cause| cause.to_string())?
        .connect_timeout(CALL_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true))
}

/// The stream's end from a refused call.
pub(super) fn stream_end(status: &Status) -> StreamEnd {
    match status.metadata().get(LEADER_KEY).and_then(|value| value.to_str().ok()) {
        Some(leader) if !leader.is_empty() => StreamEnd::Leader(leader.to_owned()),
        // Another identity, or the number of another node.
        _ if matches!(status.code(), Code::PermissionDenied | Code::AlreadyExists) => {
            StreamEnd::Refused(status.message().to_owned())
        }
        _ => StreamEnd::Lost(format!("{}: {}", status.code(), status.message())),
    }
}

/// An error with its causes on one line.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
