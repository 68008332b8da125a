//! Status: state and knowledge of this router.
//!
//! Not here: metrics (`crate::metrics`), which are sampled; a status is requested.

use std::sync::Arc;

use kv_core::index::command::PinKind;
use kv_core::index::{Index, NodeState};
use kvfleet_net::tls::Role;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::residency::standing_to_pb;
use super::{ServerState, millis};
use crate::groups::Group;
use crate::view::holders;
use crate::view::links::LinkRate;

/// Answers a status call: in full for administrators, and otherwise with the leaders only.
pub(super) async fn status(shared: &Arc<ServerState>, caller: &Caller) -> Result<pb::StatusReply, Status> {
    match caller.role() {
        Role::Admin => full_status(shared).await,
        _ => Ok(leaders(shared)),
    }
}

/// The leader of each group.
fn leaders(shared: &ServerState) -> pb::StatusReply {
    let groups: Vec<pb::GroupStatus> = shared
        .groups
        .all()
        .iter()
        .map(|group| {
            let status = group.consensus.status();
            let (leader, leader_address) =
                status.leader.map_or((0, String::new()), |at| (at.router, at.address));
            let (group, term) = (group.number().into(), status.term);
            pb::GroupStatus { group, term, leader, leader_address, ..pb::GroupStatus::default() }
        })
        .collect();
    let control = groups.first().cloned().unwrap_or_default();
    pb::StatusReply {
        router: shared.control().consensus.id(),
        term: control.term,
        leader: control.leader,
        leader_address: control.leader_address,
        groups,
        cluster: shared.cluster.name.clone(),
        ..pb::StatusReply::default()
    }
}

/// State and knowledge. Digests walk the index, so it runs on a blocking thread.
async fn full_status(shared: &Arc<ServerState>) -> Result<pb::StatusReply, Status> {
    let here = Arc::clone(shared);
    let looked = tokio::task::spawn_blocking(move || {
        let groups: Vec<pb::GroupStatus> =
            here.groups.all().iter().map(|group| group_status(&here, group)).collect();
        let now_ms = here.unix.now_ms();
        let (nodes, pins, generation) = here.control().published.read_whole(|replica| {
            let index = &replica.index;
            (index.nodes().cloned().collect::<Vec<_>>(), summarize_pins(index, now_ms), index.generation())
        });
        let nodes = nodes.iter().map(|node| node_status(&here, node)).collect::<Vec<_>>();
        (groups, nodes, pins, generation)
    });
    let (groups, nodes, pins, generation) =
        looked.await.map_err(|error| Status::internal(error.to_string()))?;
    let control = groups.first().cloned().unwrap_or_default();
    Ok(pb::StatusReply {
        router: shared.control().consensus.id(),
        term: control.term,
        leader: control.leader,
        leader_address: control.leader_address,
        last_log_index: control.last_log_index,
        applied_index: control.applied_index,
        snapshot_index: control.snapshot_index,
        voters: control.members,
        index_blocks: groups.iter().map(|group| group.blocks).sum(),
        index_copies: nodes.iter().map(|node| node.blocks).sum(),
        nodes,
        instances: instances(shared),
        digest: control.digest,
        pins: pins.all,
        soft_pins: pins.soft,
        next_pin_end_ms: pins.next_end_ms,
        groups,
        cluster: shared.cluster.name.clone(),
        links: links(shared),
        generation: generation.0,
    })
}

/// Pins in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PinSummary {
    all: u64,
    soft: u64,
    /// Milliseconds until the next pin expires; `None` if none does.
    next_end_ms: Option<u64>,
}

/// Summary of the pins in force at this Unix time in milliseconds; expired pins in the index do not
/// count.
fn summarize_pins(index: &Index, now_ms: u64) -> PinSummary {
    let mut pins = PinSummary::default();
    for pin in index.pins().filter(|pin| !pin.is_expired(now_ms)) {
        pins.all += 1;
        pins.soft += u64::from(pin.kind == PinKind::Soft);
        let left_ms = pin.ends_ms.map(|ends_ms| ends_ms - now_ms);
        pins.next_end_ms = pins.next_end_ms.into_iter().chain(left_ms).min();
    }
    pins
}

fn group_status(shared: &ServerState, group: &Group) -> pb::GroupStatus {
    let (applied_index, digest, stats) = group
        .published
        .read_whole(|replica| (replica.applied_index(), replica.index.digest(), replica.index.stats()));
    let status = group.consensus.status();
    let (leader, leader_address) = status.leader.map_or((0, String::new()), |at| (at.router, at.address));
    let members = status.members.into_iter().map(|(router, address, learner)| pb::Voter {
        router,
        address,
        learner,
        matched_index: status.matched.get(&router).copied().unwrap_or(0),
    });
    pb::GroupStatus {
        group: group.number().into(),
        term: status.term,
        leader,
        leader_address,
        last_log_index: status.last_log_index,
        applied_index,
        snapshot_index: status.snapshot_index,
        digest: digest.to_vec(),
        blocks: stats.blocks,
        copies: stats.copies,
        members: members.collect(),
        age_ms: group.consensus.contact_age().map_or(u64::MAX, millis),
        agreed_index: group.agreed_index(),
        diverged: group.has_diverged(),
        drifts: shared.nodes.anti_entropy().drifts(group.number()),
        repairs_failed: group.repairs_failed(),
    }
}

fn node_status(shared: &ServerState, state: &NodeState) -> pb::NodeStatus {
    let silent = shared.nodes.silence_of(state.record.node, state.epoch, shared.clock.now());
    pb::NodeStatus {
        node: state.record.node.0,
        epoch: state.epoch.0,
        live: state.live,
        data_address: state.record.data_address.clone(),
        control_address: state.record.control_address.clone(),
        blocks: holders::node_blocks(&shared.groups, state),
        silent_ms: silent.map_or(0, millis),
        host: state.record.host.clone(),
        audit: shared.nodes.anti_entropy().score(state.record.node).map(|score| pb::AuditStats {
            claimed_blocks: score.claimed,
            claimed_wrong: score.claimed_wrong,
            held_blocks: score.held,
            held_unknown: score.held_unknown,
            drifts: score.drifts,
        }),
    }
}

fn links(shared: &ServerState) -> Vec<pb::LinkStatus> {
    let status = |LinkRate { node, is_own, key, stats: lane }: LinkRate| pb::LinkStatus {
        node: node.0,
        own: is_own,
        path: key.path.map_or(0, |path| path as u32),
        tier: key.tier.map_or(0, |tier| tier as u32 + 1),
        latency_us: lane.latency_ns / 1_000,
        bytes_per_s: lane.bytes_per_s,
    };
    shared.fleet.link_rates(shared.clock.now()).into_iter().map(status).collect()
}

fn instances(shared: &ServerState) -> Vec<pb::InstanceStatus> {
    let now = shared.clock.now();
    let residency = shared.residency.read();
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
            residency: residency.status(known.instance.id, now).as_ref().map(standing_to_pb),
        })
        .collect()
}
