//! Membership and leadership of one group: one change each, answered by the group's leader after
//! commit.
//!
//! A change names its group. A change of the whole cluster covers control first and then every
//! shard (`kvfleet members`), and may be repeated. Not here: the protocol (openraft).

use std::sync::Arc;
use std::time::Duration;

use kvfleet_proto::pb;
use tonic::{Request, Status};

use super::{ServerState, check, leader_only, not_leader, not_proposed};
use crate::groups::Group;
use crate::raft::handle::MemberChange;

/// Timeout of the handshake with a router to add.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of a leadership transfer; an idle one takes under a millisecond.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(2);

/// Changes the membership of one group.
pub(super) async fn change(
    shared: &Arc<ServerState>,
    request: &pb::ChangeMemberRequest,
) -> Result<pb::ChangeMemberReply, Status> {
    let group = shared.group(request.group)?;
    leader_only(group)?;
    let status = group.consensus.status();
    let member = status.members.iter().find(|(id, _, _)| *id == request.router);
    let is_learner = member.map(|(_, _, learns)| *learns);
    let change = match (request.change, is_learner) {
        (1, Some(_)) | (2, Some(false)) | (3, None) => {
            let applied_index = group.published.read().applied_index();
            return Ok(pb::ChangeMemberReply { applied_index, changed: false });
        }
        (1, None) => {
            handshake(shared, request).await?;
            MemberChange::AddLearner { router: request.router, address: request.address.clone() }
        }
        (2, Some(true)) => MemberChange::PromoteVoter(request.router),
        (2, None) => {
            return Err(check::invalid(format!(
                "router {} is no member of group {}: add it as a learner first",
                request.router, request.group
            )));
        }
        (3, Some(learns)) => {
            check_removal(group, request.router, learns)?;
            MemberChange::Remove(request.router)
        }
        (other, _) => {
            return Err(check::invalid(format!(
                "change is {other}, expected 1 (learn), 2 (vote) or 3 (remove)"
            )));
        }
    };
    let applied_index = group.consensus.change_member(change).await.map_err(not_proposed)?;
    tracing::info!(
        group = request.group,
        router = request.router,
        change = request.change,
        "members changed"
    );
    Ok(pb::ChangeMemberReply { applied_index, changed: true })
}

/// Asks a router to add for its identity, and refuses one that does not match.
async fn handshake(shared: &ServerState, request: &pb::ChangeMemberRequest) -> Result<(), Status> {
    let (router, address) = (request.router, &request.address);
    let refuse = |why: String| Err(check::invalid(why));
    if router == 0 || address.is_empty() {
        return Err(check::invalid(
            "to add a router, give its number (at least 1) and its address (host:port)",
        ));
    }
    let silent = |why: &str| {
        check::invalid(format!(
            "router {router} at {address} does not answer: {why}; start it with `join = true` and check the address"
        ))
    };
    let mut client = shared.peers.new_client(address).map_err(|why| silent(&why))?;
    let mut hello = Request::new(pb::HandshakeRequest {});
    hello.set_timeout(HANDSHAKE_TIMEOUT);
    let them = client.handshake(hello).await.map_err(|status| silent(status.message()))?.into_inner();
    if them.router != router {
        let got = them.router;
        return refuse(format!(
            "the router at {address} has number {got}, not {router}: correct one of them"
        ));
    }
    let (name, shards) = (&shared.cluster.name, shared.cluster.shards);
    if &them.cluster != name {
        return refuse(format!(
            "router {router} is of cluster {:?}, this is {name:?}: start it with `cluster = {name:?}` and an empty \
             data_dir",
            them.cluster
        ));
    }
    if them.shards != u32::from(shards) {
        return refuse(format!(
            "router {router} cuts the index into {} shards, this cluster into {shards}: start it with `shards = \
             {shards}` and an empty data_dir",
            them.shards
        ));
    }
    Ok(())
}

/// A group must keep a voter, and its leader must transfer first.
fn check_removal(group: &Group, router: u64, is_learner: bool) -> Result<(), Status> {
    let status = group.consensus.status();
    let voters = status.members.iter().filter(|(_, _, learns)| !learns).count();
    if !is_learner && voters == 1 {
        return Err(check::invalid(format!(
            "router {router} is the only voter of group {}: add another one first",
            group.number()
        )));
    }
    if router == group.consensus.id() {
        return Err(check::invalid(format!(
            "router {router} leads group {}: transfer it first",
            group.number()
        )));
    }
    Ok(())
}

/// Transfers leadership of one group to another voter.
pub(super) async fn transfer(
    shared: &Arc<ServerState>,
    request: &pb::TransferLeadRequest,
) -> Result<pb::TransferLeadReply, Status> {
    let group = shared.group(request.group)?;
    let consensus = &group.consensus;
    leader_only(group)?;
    if consensus.id() == request.to {
        return Ok(pb::TransferLeadReply { changed: false });
    }
    let status = consensus.status();
    if !status.members.iter().any(|(id, _, learns)| *id == request.to && !learns) {
        return Err(check::invalid(format!(
            "router {} is no voter of group {}: only a voter can lead",
            request.to, request.group
        )));
    }
    if tokio::time::timeout(TRANSFER_TIMEOUT, consensus.transfer(request.to)).await.is_err() {
        return Err(Status::unavailable(format!(
            "router {} did not take over group {} within {TRANSFER_TIMEOUT:?}; check that it is reachable \
             and has caught up",
            request.to, request.group
        )));
    }
    match consensus.leader() {
        Some(leader) if leader.router == consensus.id() => Err(not_leader(None)),
        _ => Ok(pb::TransferLeadReply { changed: true }),
    }
}
