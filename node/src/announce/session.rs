//! What all streams to routers have in common: how one is connected, why it ends, what is said of trouble.
//!
//! Not here: what is said on a stream (`link`, `shard`) and which router is tried next (`seek`).

use std::time::Duration;

use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// How long a router may take to accept a connection or a join.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// A ping on the connection, to notice a router that went silent without closing it (a partition, a
/// stopped process): nothing else would before TCP gives up, after a quarter of an hour.
const KEEPALIVE: Duration = Duration::from_millis(300);

/// How long a router may take to answer a ping: more than a busy machine's pauses, and short against the
/// time that an unrouted node costs.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Messages handed to a stream and not yet taken by the connection.
pub(super) const STREAM_AHEAD: usize = 16;

/// The metadata key under which a router names the leader.
const LEADER_KEY: &str = "kvfleet-leader";

/// Why a stream ended.
#[derive(Debug)]
pub(super) enum Ended {
    Lost(String),
    Leader(String),
    Fenced,
    /// Not for this node, whoever is asked.
    Refused(String),
    /// The node joined anew meanwhile.
    Rejoined,
}

/// What was said of trouble, so that each is said once.
#[derive(Debug, Default)]
pub(super) struct Said {
    lost: bool,
    refused: Option<String>,
}

impl Said {
    /// No router takes the stream.
    pub(super) fn lost(&mut self, group: u16, address: &str, cause: &str) {
        if std::mem::replace(&mut self.lost, true) {
            tracing::debug!(group, address, cause, "router lost");
        } else {
            tracing::warn!(group, address, cause, "no router takes announcements; serving goes on");
        }
    }

    /// Said once, however often it is tried again and whatever else went wrong before.
    pub(super) fn refused(&mut self, address: &str, cause: String) {
        if self.refused.as_ref() != Some(&cause) {
            tracing::error!(address, cause, "the routers refuse this node: nothing is routed to it");
            self.refused = Some(cause);
        }
    }

    /// A router was found.
    pub(super) fn found(&mut self) {
        self.lost = false;
    }
}

/// Connects to a router.
pub(super) async fn connect(
    address: &str,
    identity: &tls::Identity,
) -> Result<RouterClient<Channel>, String> {
    let endpoint = endpoint(address, identity)?;
    let channel = timeout(CALL_TIMEOUT, endpoint.connect()).await.map_err(|late| late.to_string())?;
    channel.map(RouterClient::new).map_err(|cause| chain(&cause))
}

/// A connection to a router that is made when it is first used, and again where it broke.
pub(crate) fn connect_lazily(
    address: &str,
    identity: &tls::Identity,
) -> Result<RouterClient<Channel>, String> {
    Ok(RouterClient::new(endpoint(address, identity)?.connect_lazy()))
}

fn endpoint(address: &str, identity: &tls::Identity) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .and_then(|endpoint| endpoint.tls_config(identity.client_tls()))
        .map_err(|cause| cause.to_string())?;
    Ok(endpoint
        .connect_timeout(CALL_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true))
}

/// What a refused call means.
pub(super) fn ended(status: &Status) -> Ended {
    match status.metadata().get(LEADER_KEY).and_then(|value| value.to_str().ok()) {
        Some(leader) if !leader.is_empty() => Ended::Leader(leader.to_owned()),
        // Of another identity, or with the number of another node.
        _ if matches!(status.code(), Code::PermissionDenied | Code::AlreadyExists) => {
            Ended::Refused(status.message().to_owned())
        }
        _ => Ended::Lost(format!("{}: {}", status.code(), status.message())),
    }
}

/// An error with its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
