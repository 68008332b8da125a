//! Linearizable reads: an answer that has seen all that was committed when it was asked for.
//!
//! The leader confirms with a quorum that it leads, and names the entry a read must have seen; a follower asks
//! it and waits until it has applied that entry itself. Not here: reads as they usually are, from whatever the
//! replica has applied (`lookup.rs`).

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Status};

use super::Shared;
use crate::groups::Group;
use crate::raft::network::Envelope;

/// Longest a fresh read waits, for the leader's word and for this replica to get there: an election and a
/// quorum's answer, with room.
const FRESH_WAIT_MAX: Duration = Duration::from_secs(2);

/// Waits until this router has applied all that was committed, in the control group and in `group`.
pub(super) async fn wait(shared: &Shared, group: &Group) -> Result<(), Status> {
    let both = async {
        let control = shared.control();
        if group.number() == control.number() {
            return level(shared, control).await;
        }
        tokio::try_join!(level(shared, control), level(shared, group)).map(drop)
    };
    let late = |_| unavailable(group, &format!("not within {FRESH_WAIT_MAX:?}"));
    tokio::time::timeout(FRESH_WAIT_MAX, both).await.map_err(late)?
}

/// Waits until one group's replica is level with its leader.
async fn level(shared: &Shared, group: &Group) -> Result<(), Status> {
    let index = match group.consensus.read_index_here().await {
        Some(index) => index,
        None => read_index_there(shared, group).await?,
    };
    let mut changes = group.published.changes();
    loop {
        changes.mark_unchanged();
        if group.published.read().applied_index() >= index {
            return Ok(());
        }
        if changes.changed().await.is_err() {
            return Err(unavailable(group, "this router stops"));
        }
    }
}

async fn read_index_there(shared: &Shared, group: &Group) -> Result<u64, Status> {
    let leader = group.consensus.leader().ok_or_else(|| unavailable(group, "no leader is known"))?;
    let mut client = shared.peers.client(&leader.address).map_err(|why| unavailable(group, &why))?;
    let envelope = Envelope { cluster: Arc::clone(&shared.cluster), group: group.number() };
    let mut request = Request::new(envelope.frame(Vec::new()));
    request.set_timeout(FRESH_WAIT_MAX);
    let answer = client.read_index(request).await;
    answer.map(|reply| reply.into_inner().index).map_err(|status| unavailable(group, status.message()))
}

fn unavailable(group: &Group, why: &str) -> Status {
    let number = group.number();
    Status::unavailable(format!(
        "a fresh read needs the leader of group {number}: {why}; ask again, or without `fresh` for what this router has"
    ))
}
