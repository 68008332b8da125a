//! Join, leave, pins, quotas, TTLs, weights: one command each in the control group, answered by its
//! leader after commit.
//!
//! Not here: the effect of a command (`kv_core::index`), and its delivery to nodes
//! (`crate::directives`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, Generation, NodeId, PinId, TTL_GROUPS, TenantId, TtlGroupId};
use kv_core::index::command::{Applied, Command, NodeRecord, Pin, PinKind, Refusal};
use kvfleet_proto::{convert, pb};
use tonic::Status;

use super::{ServerState, check, leader_only, not_proposed};
use crate::directives::at_time;
use crate::pin_expiry;

/// Silence up to which a node counts as present: a few heartbeats.
const RIVAL_SILENCE_MAX: Duration = Duration::from_millis(400);

/// Proposes a checked command on the leader of the control group; returns its log index and result.
async fn commit(shared: &ServerState, command: Command) -> Result<(u64, Applied), Status> {
    let control = shared.control();
    leader_only(control)?;
    let limits = *control.published.read().index.limits();
    let command = check::within_limits(&limits, command)?;
    control.consensus.propose(&command).await.map_err(not_proposed)
}

async fn admin(shared: &ServerState, command: Command) -> Result<pb::AdminReply, Status> {
    let (applied_index, applied) = commit(shared, command).await?;
    match applied {
        Applied::Refused(refusal) => Err(refusal_status(&refusal)),
        Applied::Ignored => Ok(pb::AdminReply { applied_index, changed: false }),
        Applied::Done | Applied::Joined(_) | Applied::Announced(_) => {
            Ok(pb::AdminReply { applied_index, changed: true })
        }
    }
}

fn refusal_status(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::Identity { .. } => Status::permission_denied(text),
        Refusal::NotOwner { .. } => Status::permission_denied(text),
        Refusal::PinExists(_) => Status::already_exists(text),
        Refusal::Generation { .. } => Status::invalid_argument(text),
        Refusal::OverLimit { .. } => Status::resource_exhausted(text),
    }
}

/// Admits a starting node: returns a new epoch and its directives.
pub(super) async fn join(
    shared: &Arc<ServerState>,
    request: &pb::JoinRequest,
) -> Result<pb::JoinReply, Status> {
    let record = convert::node_record_from_pb(request).map_err(check::invalid)?;
    let (node, identity) = (record.node, record.identity);
    leader_only(shared.control())?;
    if let Some(refusal) = rival_node(shared, &record) {
        return Err(refusal);
    }
    let (_, applied) = commit(shared, Command::Join(record)).await?;
    match applied {
        Applied::Joined(epoch) => {
            tracing::info!(%node, %epoch, address = request.data_address, "joined");
            shared.nodes.record_heard(node, epoch, shared.clock.now());
            shared.manifests.record_node(identity, request.manifest.as_ref());
            let directives = at_time(&shared.nodes.directives().borrow(), shared.unix.now_ms());
            let shards = shared.cluster.shards.into();
            // Possibly from a state after the join: then the epoch is over, and the node joins
            // again.
            let generation = shared.control().published.read().index.generation().0;
            // Before it evicts anything: all its blocks come later.
            let fleet = shared.nodes.reuse_stats().published.borrow().as_deref().cloned();
            Ok(pb::JoinReply { epoch: epoch.0, directives: Some(directives), shards, generation, fleet })
        }
        Applied::Refused(refusal @ Refusal::Identity { .. }) => {
            Err(identity_refusal(shared, request, &refusal).await)
        }
        Applied::Refused(refusal) => Err(refusal_status(&refusal)),
        other => Err(Status::internal(format!("a join got an unexpected result: {other:?}"))),
    }
}

/// Refuses a node of another identity; describes the differing fields if it sent its manifest.
async fn identity_refusal(shared: &ServerState, request: &pb::JoinRequest, refusal: &Refusal) -> Status {
    let fields = match refusal {
        Refusal::Identity { theirs, .. } => {
            shared.manifests.reported_differences_from_nodes(*theirs, request.manifest.as_ref()).await
        }
        _ => None,
    };
    let fields = fields.map(|fields| format!("; it differs in {fields}")).unwrap_or_default();
    Status::permission_denied(format!("{refusal}{fields}"))
}

/// Detects a live node with the same number on another host. Two such nodes would end each other's
/// epochs, and numbers derived from names may collide. A node that moved is admitted once its old
/// process is silent.
fn rival_node(shared: &ServerState, record: &NodeRecord) -> Option<Status> {
    let (state_host, epoch) = {
        let reading = shared.control().published.read();
        let state =
            reading.index.node(record.node).filter(|state| state.live && state.record.host != record.host)?;
        (state.record.host.clone(), state.epoch)
    };
    let silent = shared.nodes.silence_of(record.node, epoch, shared.clock.now())?;
    (silent < RIVAL_SILENCE_MAX).then(|| {
        Status::already_exists(format!(
            "{} serves on host {state_host:?} already, and this process says that it is on {:?}: give each \
             node an id of its own",
            record.node, record.host
        ))
    })
}

/// Removes a node that leaves.
pub(super) async fn leave(
    shared: &ServerState,
    request: &pb::LeaveRequest,
) -> Result<pb::AdminReply, Status> {
    admin(shared, Command::Leave { node: NodeId(request.node), epoch: Epoch(request.epoch) }).await
}

pub(super) async fn pin(shared: &ServerState, request: pb::PinRequest) -> Result<pb::AdminReply, Status> {
    let blocks = check::hashes("blocks", &request.blocks)?;
    if blocks.is_empty() || request.owner.is_empty() {
        return Err(check::invalid("a pin needs at least one block and an owner that may end it"));
    }
    let now_ms = shared.unix.now_ms();
    let ends_ms = request.for_ms.map(|for_ms| ends_ms(now_ms, for_ms)).transpose()?;
    let kind = if request.soft { PinKind::Soft } else { PinKind::Hard };
    let pin = Pin { pin: PinId(request.pin), owner: request.owner, blocks, kind, ends_ms };
    // The number of an expired pin is free, also before the periodic removal.
    let over = pin_expiry::unpin_if_expired(&shared.control().published.read().index, pin.pin, now_ms);
    if let Some(end) = over {
        commit(shared, end).await?;
    }
    admin(shared, Command::Pin(pin)).await
}

/// End of a pin with this duration, as Unix time in milliseconds.
fn ends_ms(now_ms: u64, for_ms: u64) -> Result<u64, Status> {
    if for_ms == 0 {
        return Err(check::invalid(
            "a pin for 0 ms would be over at once: name a longer time, or none for a pin without an end",
        ));
    }
    let too_long = || {
        format!(
            "a pin for {for_ms} ms would end after the largest representable time: name a shorter time, or \
             none for a pin without an end"
        )
    };
    now_ms.checked_add(for_ms).ok_or_else(|| check::invalid(too_long()))
}

pub(super) async fn unpin(shared: &ServerState, request: pb::UnpinRequest) -> Result<pb::AdminReply, Status> {
    admin(shared, Command::Unpin { pin: PinId(request.pin), owner: request.owner, ends_ms: None }).await
}

pub(super) async fn set_quota(
    shared: &ServerState,
    request: &pb::SetQuotaRequest,
) -> Result<pb::AdminReply, Status> {
    let bytes = (!request.clear).then_some(request.bytes);
    admin(shared, Command::SetQuota { tenant: TenantId(request.tenant), bytes }).await
}

pub(super) async fn set_ttl(
    shared: &ServerState,
    request: &pb::SetTtlRequest,
) -> Result<pb::AdminReply, Status> {
    let ttl_ms = (!request.clear).then_some(request.ttl_ms);
    // No block is in such a group, so an acknowledgement would be meaningless.
    if ttl_ms.is_some() && request.group >= TTL_GROUPS {
        let text = format!(
            "there is no group {}: groups are 0 to {}, the first byte of a block's hash",
            request.group,
            TTL_GROUPS - 1
        );
        return Err(check::invalid(text));
    }
    admin(shared, Command::SetTtl { group: TtlGroupId(request.group), ttl_ms }).await
}

/// Sets the generation of the weights. Every node's epoch ends, and each learns the generation when
/// it joins again.
pub(super) async fn set_generation(
    shared: &ServerState,
    request: pb::SetGenerationRequest,
) -> Result<pb::AdminReply, Status> {
    let reply = admin(shared, Command::SetGeneration(Generation(request.generation))).await?;
    if reply.changed {
        tracing::warn!(generation = request.generation, "other weights are in force: every node joins again");
    }
    Ok(reply)
}
