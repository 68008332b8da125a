//! Status: where this router stands and what it knows.
//!
//! Not here: metrics (`crate::metrics`), which are sampled; this is asked.

use std::sync::Arc;

use kv_core::index::NodeState;
use kvfleet_proto::pb;
use tonic::Status;

use super::{Shared, millis};

/// Answers a status call. The digest walks the index, so it runs on a blocking thread.
pub(super) async fn status(shared: &Arc<Shared>) -> Result<pb::StatusReply, Status> {
    let published = Arc::clone(&shared.published);
    let replicated = tokio::task::spawn_blocking(move || {
        let replica = published.read();
        let nodes: Vec<NodeState> = replica.index.nodes().cloned().collect();
        (replica.applied_index(), replica.index.digest(), replica.index.stats(), nodes)
    });
    let (applied_index, digest, stats, nodes) =
        replicated.await.map_err(|error| Status::internal(error.to_string()))?;
    let standing = shared.consensus.standing();
    let (leader, leader_address) = standing.leader.map_or((0, String::new()), |at| (at.router, at.address));
    let voters = standing.voters.into_iter().map(|(router, address)| pb::Voter {
        router,
        address,
        matched_index: standing.matched.get(&router).copied().unwrap_or(0),
    });
    Ok(pb::StatusReply {
        router: shared.consensus.id(),
        term: standing.term,
        leader,
        leader_address,
        last_log_index: standing.last_log_index,
        applied_index,
        snapshot_index: standing.snapshot_index,
        voters: voters.collect(),
        nodes: nodes.iter().map(|node| node_status(shared, node)).collect(),
        instances: instances(shared),
        index_blocks: stats.blocks,
        index_copies: stats.copies,
        digest: digest.to_vec(),
        pins: stats.pins,
    })
}

fn node_status(shared: &Shared, state: &NodeState) -> pb::NodeStatus {
    let silent = shared.silence.lock().silent(state.record.node, state.epoch, shared.clock.now());
    pb::NodeStatus {
        node: state.record.node.0,
        epoch: state.epoch.0,
        live: state.live,
        data_address: state.record.data_address.clone(),
        control_address: state.record.control_address.clone(),
        blocks: state.blocks,
        silent_ms: silent.map_or(0, millis),
        host: state.record.host.clone(),
    }
}

fn instances(shared: &Shared) -> Vec<pb::InstanceStatus> {
    let now = shared.clock.now();
    let known = shared.fleet.instances().into_iter();
    known
        .map(|known| pb::InstanceStatus {
            instance: known.instance.id.0,
            address: known.address,
            queue_tokens: known.instance.load.queue_tokens,
            running: known.instance.load.running,
            report_age_ms: millis(now.since(known.instance.reported_at)),
            node: known.instance.node.unwrap_or_default().0,
            has_node: known.instance.node.is_some(),
        })
        .collect()
}
