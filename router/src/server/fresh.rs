//! Linearizable reads: an answer that includes everything committed when it was requested.
//!
//! The leader confirms its leadership with a quorum and names the entry that a read must include. A
//! follower asks the leader and waits until it has applied that entry. Without a leader it waits
//! for one. A router that has just started reads like this until it has caught up once, since its
//! disk may be stale. Not here: normal reads from the applied state (`lookup.rs`).

use std::sync::Arc;
use std::time::Duration;

use kvfleet_net::tls::callers::Caller;
use parking_lot::Mutex;
use tonic::{Request, Status};

use super::{ServerState, millis};
use crate::groups::Group;
use crate::raft::network::Envelope;
use crate::tenant_shares::{FreshReadShares, TENANT_FRESH_READS_MAX};

/// Longest wait of a fresh read for the leader's answer and for this replica to apply it: an
/// election and a quorum round trip, with margin.
const FRESH_WAIT_MAX: Duration = Duration::from_secs(2);

/// Timeout of a leader's answer: it may have died, and another been elected.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Pause before the next attempt: a fraction of an election.
const ASK_INTERVAL: Duration = Duration::from_millis(20);

/// Checks that this caller may have a fresh read, if it asks for one.
pub(super) fn check_allowed(shared: &ServerState, caller: &Caller, is_fresh: bool) -> Result<(), Status> {
    let Some(tenant) = caller.share_tenant().filter(|_| is_fresh) else { return Ok(()) };
    let now = shared.clock.now();
    if shared.limits.take_fresh_read(tenant, now) {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "{TENANT_FRESH_READS_MAX} fresh reads in a second are the limit of a tenant's certificate: ask again \
         in {} ms, or without `fresh` for what this router has",
        millis(FreshReadShares::retry_after(now)).max(1)
    )))
}

/// Waits until this router may answer about blocks of `group`: on request of a fresh answer, or
/// before the router has caught up after its start.
pub(super) async fn ready(shared: &ServerState, group: &Group, is_fresh: bool) -> Result<(), Status> {
    if group.has_diverged() || shared.control().has_diverged() {
        return Err(diverged(group));
    }
    if is_fresh {
        return wait_caught_up(shared, group).await.map_err(|why| no_fresh(group, &why));
    }
    if !group.has_caught_up() || !shared.control().has_caught_up() {
        return wait_caught_up(shared, group).await.map_err(|why| just_started(group, &why));
    }
    Ok(())
}

/// Waits until this router has applied everything committed in the control group and in `group`;
/// the error names the obstacle.
async fn wait_caught_up(shared: &ServerState, group: &Group) -> Result<(), String> {
    let control = shared.control();
    let last = Mutex::new(format!("not within {FRESH_WAIT_MAX:?}"));
    let both = async {
        if group.number() == control.number() {
            catch_up(shared, control, &last).await;
        } else {
            tokio::join!(catch_up(shared, control, &last), catch_up(shared, group, &last));
        }
    };
    let waited = tokio::time::timeout(FRESH_WAIT_MAX, both).await;
    waited.map_err(|_| last.into_inner())
}

/// Catches up every replica once, without a time limit, so that later plain reads need not wait.
pub(super) async fn catch_up_all(shared: Arc<ServerState>) {
    let stop = shared.lifecycle.stop().clone();
    let last = Mutex::new(String::new());
    let all = shared.groups.all().iter().map(|group| catch_up(&shared, group, &last));
    // Cancelled when the router stops.
    let _ = stop.run_until_cancelled(futures_util::future::join_all(all)).await;
}

/// Waits until one group's replica has caught up with its leader; stores the obstacle in `last`.
async fn catch_up(shared: &ServerState, group: &Group, last: &Mutex<String>) {
    let index = read_index(shared, group, last).await;
    let mut changes = group.published.watch_entries();
    loop {
        changes.mark_unchanged();
        if group.published.read().applied_index() >= index {
            return group.mark_caught_up();
        }
        if changes.changed().await.is_err() {
            *last.lock() = "this router stops".into();
            return std::future::pending().await;
        }
    }
}

/// Asks the leader until it answers; an election may be in progress.
async fn read_index(shared: &ServerState, group: &Group, last: &Mutex<String>) -> u64 {
    loop {
        if let Some(index) = group.consensus.local_read_index().await {
            return index;
        }
        match remote_read_index(shared, group).await {
            Ok(index) => return index,
            Err(why) => *last.lock() = why,
        }
        tokio::time::sleep(ASK_INTERVAL).await;
    }
}

async fn remote_read_index(shared: &ServerState, group: &Group) -> Result<u64, String> {
    let leader = group.consensus.leader().ok_or("no leader is known")?;
    if leader.router == group.consensus.id() {
        return Err("no quorum confirms that this router leads".into());
    }
    let mut client = shared.peers.client(leader.router, &leader.address)?;
    let envelope = Envelope { cluster: Arc::clone(&shared.cluster), group: group.number() };
    let mut request = Request::new(envelope.frame(Vec::new()));
    request.set_timeout(ANSWER_TIMEOUT);
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
        "this router has just started and has not caught up with the leader of group {number} yet: {why}; \
         ask another one"
    ))
}
