//! ReportResidency: what the engine of an instance has in GPU memory, and what this router is missing of it.
//!
//! The whole call is checked before any of it counts. Between two batches readers go first. Not here: what a batch
//! does (`crate::view::residency`).

use kv_core::id::{InstanceId, Tier};
use kv_core::index::command::Change;
use kvfleet_proto::pb::residency_reply::Body as Reply;
use kvfleet_proto::{convert, pb};
use parking_lot::RwLockWriteGuard;
use tonic::Status;

use super::{Shared, check, millis};
use crate::view::residency::{BATCH_BLOCKS_MAX, Batch, Refused, Standing, Taken};

/// Batches in one call: some hundred a second, of a reporter that was held up for seconds.
const BATCHES_MAX: usize = 1_024;

/// Blocks of all batches of one call: 1 MiB of hashes.
const CALL_BLOCKS_MAX: usize = 65_536;

/// Largest number of a batch: nine thousand years at a thousand a second. What is above it was never counted to.
const SEQ_MAX: u64 = 1 << 48;

/// Takes a report.
pub(super) fn report(shared: &Shared, request: &pb::ResidencyRequest) -> Result<pb::ResidencyReply, Status> {
    let batches = batches(request)?;
    let (instance, epoch) = (InstanceId(request.instance), request.epoch);
    let now = shared.clock.now();
    if let Some(later) = shared.fleet.started(instance).filter(|started| *started > epoch) {
        shared.metrics.residency_batches("outdated", batches.len());
        return Ok(outdated(later));
    }
    let mut reply = pb::ResidencyReply::default();
    for batch in batches {
        let mut residency = shared.residency.write();
        let taken = residency.take(instance, epoch, batch, now);
        RwLockWriteGuard::unlock_fair(residency);
        let outcome = match taken.map_err(|refused| refuse(shared, refused))? {
            Taken::Applied { unlisted } => {
                reply.unlisted_blocks += unlisted;
                "applied"
            }
            Taken::Duplicate => {
                reply.duplicate_batches += 1;
                "duplicate"
            }
            Taken::Gap => "gap",
            Taken::Outdated { .. } => "outdated",
        };
        shared.metrics.residency_batches(outcome, 1);
    }
    shared.metrics.residency_unlisted(reply.unlisted_blocks);
    let concluded = shared.residency.write().conclude(instance, epoch, request.last_seq, now);
    let standing = concluded.map_err(|refused| refuse(shared, refused))?;
    let standing =
        standing.ok_or_else(|| Status::internal("an instance that has just spoken is not known"))?;
    if standing.epoch > epoch {
        return Ok(outdated(standing.epoch));
    }
    if standing.uncertain {
        shared.metrics.replay_asked();
        reply.body = Some(Reply::Replay(pb::Replay { from: standing.seq + 1 }));
    } else {
        reply.body = Some(Reply::Ack(pb::Ack { seq: standing.seq }));
    }
    Ok(reply)
}

/// How fresh what is known of an instance is.
pub(super) fn standing_to_pb(standing: &Standing) -> pb::Residency {
    pb::Residency {
        instance: standing.instance.0,
        epoch: standing.epoch,
        seq: standing.seq,
        age_ms: millis(standing.age),
        uncertain: standing.uncertain,
        blocks: standing.blocks,
    }
}

fn outdated(epoch: u64) -> pb::ResidencyReply {
    let body = Some(Reply::Outdated(pb::Outdated { epoch }));
    pb::ResidencyReply { body, ..pb::ResidencyReply::default() }
}

fn refuse(shared: &Shared, refused: Refused) -> Status {
    shared.metrics.residency_batches("refused", 1);
    Status::resource_exhausted(refused.to_string())
}

/// Reads all batches, within limits.
fn batches(request: &pb::ResidencyRequest) -> Result<Vec<Batch>, Status> {
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
    let batches = request.batches.iter().map(batch).collect::<Result<Vec<_>, _>>()?;
    let blocks = batches.iter().flat_map(|batch| &batch.changes).map(blocks_of).sum();
    check::at_most("number of blocks in one report", blocks, CALL_BLOCKS_MAX)?;
    Ok(batches)
}

fn batch(batch: &pb::Batch) -> Result<Batch, Status> {
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
