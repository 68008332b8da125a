//! Join, leave, pins, quotas, TTLs, weights: one command each in the control group, answered after commit, on its
//! leader.
//!
//! Not here: what the command does (`kv_core::index`), and how nodes hear of it (`crate::directives`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, GROUPS, Generation, GroupId, NodeId, PinId, TenantId};
use kv_core::index::command::{Applied, Command, NodeRecord, Pin, PinKind, Refusal};
use kvfleet_proto::{convert, pb};
use tonic::Status;

use super::{Shared, check, leader_only, not_proposed};
use crate::directives::told_at;
use crate::pin_ends;

/// A node that was heard this lately is there: a few of its heartbeats.
const RIVAL_HEARD: Duration = Duration::from_millis(400);

/// Proposes a checked command on the leader of the control group and gives its log index and answer.
async fn commit(shared: &Shared, command: Command) -> Result<(u64, Applied), Status> {
    let control = shared.control();
    leader_only(control)?;
    let limits = *control.published.read().index.limits();
    let command = check::within_limits(&limits, command)?;
    control.consensus.propose(&command).await.map_err(not_proposed)
}

async fn admin(shared: &Shared, command: Command) -> Result<pb::AdminReply, Status> {
    let (applied_index, applied) = commit(shared, command).await?;
    match applied {
        Applied::Refused(refusal) => Err(refused(&refusal)),
        Applied::Ignored => Ok(pb::AdminReply { applied_index, changed: false }),
        Applied::Done | Applied::Joined(_) | Applied::Announced(_) => {
            Ok(pb::AdminReply { applied_index, changed: true })
        }
    }
}

fn refused(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::Identity { .. } => Status::permission_denied(text),
        Refusal::NotOwner { .. } => Status::permission_denied(text),
        Refusal::PinExists(_) => Status::already_exists(text),
        Refusal::Generation { .. } => Status::invalid_argument(text),
        Refusal::OverLimit { .. } => Status::resource_exhausted(text),
    }
}

/// A node starts: it gets a fresh epoch and what it must respect.
pub(super) async fn join(shared: &Arc<Shared>, request: &pb::JoinRequest) -> Result<pb::JoinReply, Status> {
    let record = convert::node_record_from_pb(request).map_err(check::invalid)?;
    let (node, identity) = (record.node, record.identity);
    leader_only(shared.control())?;
    if let Some(refusal) = rival(shared, &record) {
        return Err(refusal);
    }
    let (_, applied) = commit(shared, Command::Join(record)).await?;
    match applied {
        Applied::Joined(epoch) => {
            tracing::info!(%node, %epoch, address = request.data_address, "joined");
            shared.silence.lock().heard(node, epoch, shared.clock.now());
            shared.manifests.joined(identity, request.manifest.as_ref());
            let directives = told_at(&shared.directives.borrow(), shared.unix.now_ms());
            let shards = shared.cluster.shards.into();
            // Of a later state than the join's, perhaps: then its epoch is over, and the node joins again.
            let generation = shared.control().published.read().index.generation().0;
            // Before it evicts anything: what it holds came after this.
            let fleet = shared.fits.told.borrow().as_deref().cloned();
            Ok(pb::JoinReply { epoch: epoch.0, directives: Some(directives), shards, generation, fleet })
        }
        Applied::Refused(refusal @ Refusal::Identity { .. }) => {
            Err(other_identity(shared, request, &refusal).await)
        }
        Applied::Refused(refusal) => Err(refused(&refusal)),
        other => Err(Status::internal(format!("a join was answered by {other:?}"))),
    }
}

/// Refuses a node of another identity and, if it said what that stands for, tells it the fields.
async fn other_identity(shared: &Shared, request: &pb::JoinRequest, refusal: &Refusal) -> Status {
    let fields = match refusal {
        Refusal::Identity { theirs, .. } => {
            shared.manifests.differing_as_told(*theirs, request.manifest.as_ref()).await
        }
        _ => None,
    };
    let fields = fields.map(|fields| format!("; it differs in {fields}")).unwrap_or_default();
    Status::permission_denied(format!("{refusal}{fields}"))
}

/// Whether another host has a node of this number that was heard just now. Without this the two would end each other's epochs;
/// and where numbers are made from names, two hosts may get one. A node that moved is let in once its old self is silent.
fn rival(shared: &Shared, record: &NodeRecord) -> Option<Status> {
    let (state_host, epoch) = {
        let reading = shared.control().published.read();
        let state =
            reading.index.node(record.node).filter(|state| state.live && state.record.host != record.host)?;
        (state.record.host.clone(), state.epoch)
    };
    let silent = shared.silence.lock().silent(record.node, epoch, shared.clock.now())?;
    (silent < RIVAL_HEARD).then(|| {
        Status::already_exists(format!(
            "{} serves on host {state_host:?} already, and this process says that it is on {:?}: give each node an id of its own",
            record.node, record.host
        ))
    })
}

/// A node says goodbye.
pub(super) async fn leave(shared: &Shared, request: &pb::LeaveRequest) -> Result<pb::AdminReply, Status> {
    admin(shared, Command::Leave { node: NodeId(request.node), epoch: Epoch(request.epoch) }).await
}

pub(super) async fn pin(shared: &Shared, request: pb::PinRequest) -> Result<pb::AdminReply, Status> {
    let blocks = check::hashes("blocks", &request.blocks)?;
    if blocks.is_empty() || request.owner.is_empty() {
        return Err(check::invalid("a pin needs at least one block and an owner who may end it"));
    }
    let now_ms = shared.unix.now_ms();
    let ends_ms = request.for_ms.map(|for_ms| ends_ms(now_ms, for_ms)).transpose()?;
    let kind = if request.soft { PinKind::Soft } else { PinKind::Hard };
    let pin = Pin { pin: PinId(request.pin), owner: request.owner, blocks, kind, ends_ms };
    // The number of a pin that is over is free, also before it was looked at.
    let over = pin_ends::over(&shared.control().published.read().index, pin.pin, now_ms);
    if let Some(end) = over {
        commit(shared, end).await?;
    }
    admin(shared, Command::Pin(pin)).await
}

/// When a pin is over that is to last this long.
fn ends_ms(now_ms: u64, for_ms: u64) -> Result<u64, Status> {
    if for_ms == 0 {
        return Err(check::invalid(
            "a pin for 0 ms would be over at once: name a longer time, or none for a pin without an end",
        ));
    }
    let too_long = || {
        format!(
            "a pin for {for_ms} ms would end after all times that can be told: name a shorter time, or none for a pin \
             without an end"
        )
    };
    now_ms.checked_add(for_ms).ok_or_else(|| check::invalid(too_long()))
}

pub(super) async fn unpin(shared: &Shared, request: pb::UnpinRequest) -> Result<pb::AdminReply, Status> {
    admin(shared, Command::Unpin { pin: PinId(request.pin), owner: request.owner, ends_ms: None }).await
}

pub(super) async fn set_quota(
    shared: &Shared,
    request: &pb::SetQuotaRequest,
) -> Result<pb::AdminReply, Status> {
    let bytes = (!request.lift).then_some(request.bytes);
    admin(shared, Command::SetQuota { tenant: TenantId(request.tenant), bytes }).await
}

pub(super) async fn set_ttl(shared: &Shared, request: &pb::SetTtlRequest) -> Result<pb::AdminReply, Status> {
    let ttl_ms = (!request.lift).then_some(request.ttl_ms);
    // An acknowledgement for a group that no block is in would be a promise about nothing.
    if ttl_ms.is_some() && request.group >= GROUPS {
        let text = format!(
            "there is no group {}: groups are 0 to {}, the first byte of a block's hash",
            request.group,
            GROUPS - 1
        );
        return Err(check::invalid(text));
    }
    admin(shared, Command::SetTtl { group: GroupId(request.group), ttl_ms }).await
}

/// Other weights: every node's epoch ends with it, and each hears of the generation as it joins again.
pub(super) async fn set_generation(
    shared: &Shared,
    request: pb::SetGenerationRequest,
) -> Result<pb::AdminReply, Status> {
    let reply = admin(shared, Command::SetGeneration(Generation(request.generation))).await?;
    if reply.changed {
        tracing::warn!(generation = request.generation, "other weights are in force: every node joins again");
    }
    Ok(reply)
}
