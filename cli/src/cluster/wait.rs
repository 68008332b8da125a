//! Waits until a cluster serves: one leader known to all, every node joined, and every instance
//! known to every router.

use std::time::Duration;

use kvfleet_client::Transport;
use kvfleet_proto::pb;
use serde::Deserialize;
use tokio::time::Instant;

use super::{Child, LocalCluster};
use crate::calls::RouterCalls;
use crate::connect::client;
use crate::probe::http_request;
use crate::process::Role;
use kvfleet_net::certificates::Authority;
use kvfleet_net::secrets;

/// Longest time until a started cluster serves.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval of checks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns when the cluster serves; the error names the missing part.
pub(super) async fn until_serving(cluster: &mut LocalCluster) -> anyhow::Result<()> {
    let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
    let deadline = Instant::now() + SERVING_TIMEOUT;
    loop {
        let missing = missing(cluster, &routers).await;
        let Some(missing) = missing else { return Ok(()) };
        let crashed = cluster.crashed_children();
        if !crashed.is_empty() {
            anyhow::bail!(
                "{}; logs are in {}",
                crashed.join(", "),
                cluster.directory().join("logs").display()
            );
        }
        if Instant::now() > deadline {
            anyhow::bail!(
                "after {SERVING_TIMEOUT:?} {missing}; logs are in {}",
                cluster.directory().join("logs").display()
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns when the routers have applied all announcements of the node, including its blocks on
/// SSD.
pub(super) async fn until_settled(cluster: &LocalCluster, number: u64) -> anyhow::Result<()> {
    let Some(ready) = cluster.child((Role::Node, number)).and_then(Child::ready) else {
        anyhow::bail!("node {number} is not running");
    };
    let client = client(&cluster.running_routers(), &cluster.identity()?, Transport::Quic)?;
    let reply = client.settle(&ready.address("control"), SERVING_TIMEOUT).await?;
    if reply.flushed {
        return Ok(());
    }
    anyhow::bail!("after {SERVING_TIMEOUT:?} the routers have not applied all announcements of node {number}")
}

/// The first missing part.
async fn missing(cluster: &LocalCluster, routers: &[RouterCalls]) -> Option<String> {
    for router in routers {
        let status = match router.status().await {
            Ok(status) => status,
            Err(status) => return Some(format!("router {} does not answer: {status}", router.address)),
        };
        if let Some(what) = missing_in(cluster, &status) {
            return Some(format!("router {} {what}", status.router));
        }
    }
    if cluster.shape().openai.is_some() {
        return missing_at_gateways(cluster).await;
    }
    None
}

/// The secret of the admin API of this cluster's gateways.
fn admin_secret(cluster: &LocalCluster) -> anyhow::Result<String> {
    let file = Authority::open(&cluster.certificates())?.admin_secret()?;
    Ok(secrets::load(&file)?)
}

/// An instance to which a router's gateway sends no requests yet.
async fn missing_at_gateways(cluster: &LocalCluster) -> Option<String> {
    #[derive(Deserialize)]
    struct EndpointState {
        instance: u64,
        open: bool,
    }
    let secret = match admin_secret(cluster) {
        Ok(secret) => secret,
        Err(error) => return Some(format!("the secret of the admin API cannot be read: {error}")),
    };
    for number in cluster.expected_children(Role::Router) {
        let ready = cluster.child((Role::Router, number)).and_then(Child::ready);
        let address = ready.map(|ready| ready.address("admin")).unwrap_or_default();
        let listed = http_request(&address, "GET", "/instances", Some(&secret), SERVING_TIMEOUT).await;
        let shown: Vec<EndpointState> = match listed {
            Ok(answered) => serde_json::from_str(&answered.text).unwrap_or_default(),
            Err(cause) => return Some(format!("the gateway of router {number} does not answer: {cause}")),
        };
        let is_open = |wanted: &u64| shown.iter().any(|shown| shown.instance == *wanted && shown.open);
        if let Some(closed) = cluster.expected_children(Role::Instance).find(|wanted| !is_open(wanted)) {
            return Some(format!("router {number} sends no requests to instance {closed}"));
        }
    }
    None
}

fn missing_in(cluster: &LocalCluster, status: &pb::StatusReply) -> Option<String> {
    if status.leader == 0 {
        return Some("knows no leader".to_owned());
    }
    // By address, because a restarted process is known under its old address for a while.
    let address = |role, number, purpose| {
        cluster
            .child((role, number))
            .and_then(Child::ready)
            .map(|ready| ready.address(purpose))
            .unwrap_or_default()
    };
    let joined = |number: u64| {
        let address = address(Role::Node, number, "data");
        status
            .nodes
            .iter()
            .any(|node| u64::from(node.node) == number && node.live && node.data_address == address)
    };
    if let Some(number) = cluster.expected_children(Role::Node).find(|&number| !joined(number)) {
        return Some(format!("does not see node {number}"));
    }
    let reported =
        |number: u64| status.instances.iter().any(|instance| u64::from(instance.instance) == number);
    cluster
        .expected_children(Role::Instance)
        .find(|&number| !reported(number))
        .map(|number| format!("has no report of instance {number}"))
}
