//! ReportResidency: blocks in the GPU memory of an instance's engine, and the batches that this
//! router lacks.
//!
//! The whole call is validated before any of it is applied. Between two batches readers go first.
//! Not here: the effect of a batch (`crate::view::residency`).

use kv_core::id::{InstanceId, Tier};
use kv_core::index::command::Change;
use kvfleet_proto::pb::residency_reply::Body as Reply;
use kvfleet_proto::{convert, pb};
use parking_lot::RwLockWriteGuard;
use tonic::Status;

use super::{ServerState, check, millis};
use crate::view::residency::{BATCH_BLOCKS_MAX, Batch, BatchOutcome, ReporterStatus, ResidencyError};

/// Batches in one call: about a hundred a second from a reporter that stalled for seconds.
const BATCHES_MAX: usize = 1_024;

/// Blocks of all batches of one call: 1 MiB of hashes.
const CALL_BLOCKS_MAX: usize = 65_536;

/// Largest batch number, unreachable by counting.
const SEQ_MAX: u64 = 1 << 48;

/// Handles a report.
pub(super) fn report(
    shared: &ServerState,
    request: &pb::ResidencyRequest,
) -> Result<pb::ResidencyReply, Status> {
    let batches = parse_batches(request)?;
    let (instance, epoch) = (InstanceId(request.instance), request.epoch);
    let now = shared.clock.now();
    if let Some(later) = shared.fleet.started_us(instance).filter(|started| *started > epoch) {
        shared.metrics.record_residency_batches("outdated", batches.len());
        return Ok(outdated_reply(later));
    }
    let mut reply = pb::ResidencyReply::default();
    for batch in batches {
        let mut residency = shared.residency.write();
        let taken = residency.apply_batch(instance, epoch, batch, now);
        RwLockWriteGuard::unlock_fair(residency);
        let outcome = match taken.map_err(|refused| refuse_batch(shared, refused))? {
            BatchOutcome::Applied { unlisted } => {
                reply.unlisted_blocks += unlisted;
                "applied"
            }
            BatchOutcome::Duplicate => {
                reply.duplicate_batches += 1;
                "duplicate"
            }
            BatchOutcome::Gap => "gap",
            BatchOutcome::Outdated { .. } => "outdated",
        };
        shared.metrics.record_residency_batches(outcome, 1);
    }
    shared.metrics.record_unlisted_residency(reply.unlisted_blocks);
    let concluded = shared.residency.write().finish_report(instance, epoch, request.last_seq, now);
    let status = concluded.map_err(|refused| refuse_batch(shared, refused))?;
    let status = status.ok_or_else(|| Status::internal("an instance vanished during its own report"))?;
    if status.epoch > epoch {
        return Ok(outdated_reply(status.epoch));
    }
    if status.uncertain {
        shared.metrics.record_replay_request();
        reply.body = Some(Reply::Replay(pb::Replay { from: status.seq + 1 }));
    } else {
        reply.body = Some(Reply::Ack(pb::Ack { seq: status.seq }));
    }
    Ok(reply)
}

/// Status of an instance's residency reports.
pub(super) fn standing_to_pb(status: &ReporterStatus) -> pb::Residency {
    pb::Residency {
        instance: status.instance.0,
        epoch: status.epoch,
        seq: status.seq,
        age_ms: millis(status.age),
        uncertain: status.uncertain,
        blocks: status.blocks,
    }
}

fn outdated_reply(epoch: u64) -> pb::ResidencyReply {
    let body = Some(Reply::Outdated(pb::Outdated { epoch }));
    pb::ResidencyReply { body, ..pb::ResidencyReply::default() }
}

fn refuse_batch(shared: &ServerState, refused: ResidencyError) -> Status {
    shared.metrics.record_residency_batches("refused", 1);
    Status::resource_exhausted(refused.to_string())
}

/// Parses all batches, within limits.
fn parse_batches(request: &pb::ResidencyRequest) -> Result<Vec<Batch>, Status> {
    check::at_most("number of batches", request.batches.len(), BATCHES_MAX)?;
    let newest = request.batches.iter().map(|batch| batch.seq).max().unwrap_or(0);
    let last = request.last_seq;
    if last < newest {
        return Err(check::invalid(format!("last_seq is {last}, but batch {newest} was sent with it")));
    }
    if last > SEQ_MAX {
        let text = format!("last_seq is {last}, the limit is {SEQ_MAX}: number batches one by one, from 1");
        return Err(check::invalid(text));
    }
    let batches = request.batches.iter().map(parse_batch).collect::<Result<Vec<_>, _>>()?;
    let blocks = batches.iter().flat_map(|batch| &batch.changes).map(blocks_of).sum();
    check::at_most("number of blocks in one report", blocks, CALL_BLOCKS_MAX)?;
    Ok(batches)
}

fn parse_batch(batch: &pb::Batch) -> Result<Batch, Status> {
    if batch.seq == 0 {
        return Err(check::invalid("batch.seq is 0: batches are numbered from 1"));
    }
    check::at_most("number of changes in one batch", batch.changes.len(), BATCH_BLOCKS_MAX)?;
    let changes = convert::changes_from_pb(&batch.changes).map_err(check::invalid)?;
    check::at_most("number of blocks in one batch", changes.iter().map(blocks_of).sum(), BATCH_BLOCKS_MAX)?;
    match changes.iter().all(is_of_gpu_memory) {
        true => Ok(Batch { seq: batch.seq, changes }),
        false => Err(check::invalid(
            "a report of GPU memory has a change of another tier: send Stored and Dropped in tier 2 (gpu), and Cleared",
        )),
    }
}

fn is_of_gpu_memory(change: &Change) -> bool {
    match change {
        Change::Stored { tier, .. } | Change::Dropped { tier, .. } => *tier == Tier::Gpu,
        Change::Moved { .. } => false,
        Change::Cleared => true,
    }
}

fn blocks_of(change: &Change) -> usize {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len()
        }
        Change::Cleared => 0,
    }
}
