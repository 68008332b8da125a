//! Linearizable reads: an answer that has seen all that was committed when it was asked for.
//!
//! The leader confirms with a quorum that it leads, and names the entry a read must have seen; a follower asks
//! it and waits until it has applied that entry itself. Without a leader it waits for one. A router that has just
//! started reads like this until it has once been level: what it found on its disk may be old. Not here: reads as
//! they usually are, from whatever the replica has applied (`lookup.rs`).

use std::sync::Arc;
use std::time::Duration;

use kvfleet_proto::tls::callers::Caller;
use parking_lot::Mutex;
use tonic::{Request, Status};

use super::{Shared, millis};
use crate::groups::Group;
use crate::raft::network::Envelope;
use crate::shares::{FreshShares, TENANT_FRESH_MAX};

/// Longest a fresh read waits, for the leader's word and for this replica to get there: an election and a
/// quorum's answer, with room.
const FRESH_WAIT_MAX: Duration = Duration::from_secs(2);

/// Longest a leader is waited for that does not answer: it may have died, and another one been elected.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// Pause before a leader is asked for again: a fraction of an election.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Whether this caller may have a fresh read, if it asks for one.
pub(super) fn may(shared: &Shared, caller: &Caller, is_fresh: bool) -> Result<(), Status> {
    let Some(tenant) = caller.share().filter(|_| is_fresh) else { return Ok(()) };
    let now = shared.clock.now();
    if shared.fresh_shares.lock().take(tenant, now) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "{TENANT_FRESH_MAX} fresh reads in a second are the limit of a tenant's certificate: ask again in {} ms, or without \
         `fresh` for what this router has",
        millis(FreshShares::again_in(now)).max(1)
    )))
}

/// Waits until this router may answer about blocks of `group`: when a fresh answer is asked for, and while the
/// router has not been level with the leaders since it started.
pub(super) async fn ready(shared: &Shared, group: &Group, is_fresh: bool) -> Result<(), Status> {
    if group.has_diverged() || shared.control().has_diverged() {
        return Err(diverged(group));
    }
    if is_fresh {
        return wait(shared, group).await.map_err(|why| no_fresh(group, &why));
    }
    if !group.was_level() || !shared.control().was_level() {
        return wait(shared, group).await.map_err(|why| just_started(group, &why));
    }
    Ok(())
}

/// Waits until this router has applied all that was committed, in the control group and in `group`; says
/// what is in the way if it takes too long.
async fn wait(shared: &Shared, group: &Group) -> Result<(), String> {
    let control = shared.control();
    let last = Mutex::new(format!("not within {FRESH_WAIT_MAX:?}"));
    let both = async {
        if group.number() == control.number() {
            level(shared, control, &last).await;
        } else {
            tokio::join!(level(shared, control, &last), level(shared, group, &last));
        }
    };
    let waited = tokio::time::timeout(FRESH_WAIT_MAX, both).await;
    waited.map_err(|_| last.into_inner())
}

/// Makes every replica level once, however long it takes, so that plain reads wait for nothing later on.
pub(super) async fn settle(shared: Arc<Shared>) {
    let stop = shared.stop.clone();
    let last = Mutex::new(String::new());
    let all = shared.groups.all().iter().map(|group| level(&shared, group, &last));
    // Cancelled when the router stops.
    let _ = stop.run_until_cancelled(futures_util::future::join_all(all)).await;
}

/// Waits until one group's replica is level with its leader; says in `last` what is in the way.
async fn level(shared: &Shared, group: &Group, last: &Mutex<String>) {
    let index = read_index(shared, group, last).await;
    let mut changes = group.published.changes();
    loop {
        changes.mark_unchanged();
        if group.published.read().applied_index() >= index {
            return group.is_level();
        }
        if changes.changed().await.is_err() {
            *last.lock() = "this router stops".into();
            return std::future::pending().await;
        }
    }
}

/// Asks whoever leads until it answers: an election may be under way.
async fn read_index(shared: &Shared, group: &Group, last: &Mutex<String>) -> u64 {
    loop {
        if let Some(index) = group.consensus.read_index_here().await {
            return index;
        }
        match read_index_there(shared, group).await {
            Ok(index) => return index,
            Err(why) => *last.lock() = why,
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

async fn read_index_there(shared: &Shared, group: &Group) -> Result<u64, String> {
    let leader = group.consensus.leader().ok_or("no leader is known")?;
    if leader.router == group.consensus.id() {
        return Err("no quorum confirms that this router leads".into());
    }
    let mut client = shared.peers.client(&leader.address)?;
    let envelope = Envelope { cluster: Arc::clone(&shared.cluster), group: group.number() };
    let mut request = Request::new(envelope.frame(Vec::new()));
    request.set_timeout(ANSWER_MAX);
    let answer = client.read_index(request).await;
    answer.map(|reply| reply.into_inner().index).map_err(|status| status.message().to_owned())
}

fn no_fresh(group: &Group, why: &str) -> Status {
    let number = group.number();
    Status::unavailable(format!(
        "a fresh read needs the leader of group {number}: {why}; ask again, or without `fresh` for what this router has"
    ))
}

fn diverged(group: &Group) -> Status {
    let number = group.number();
    Status::unavailable(format!(
        "this router's replica of group {number} or of control differs from the leader's; ask another one"
    ))
}

fn just_started(group: &Group, why: &str) -> Status {
    let number = group.number();
    Status::unavailable(format!(
        "this router has just started and is not level with the leader of group {number} yet: {why}; ask another one"
    ))
}
