//! Membership and leadership of one group: one change each, answered after commit, on the group's leader.
//!
//! A change names its group; whoever changes the whole cluster asks for control first and then for every shard
//! (`kvfleet members`), and may ask again for what was begun. Not here: the protocol (openraft).

use std::sync::Arc;
use std::time::Duration;

use kvfleet_proto::pb;
use tonic::{Request, Status};

use super::{Shared, check, leader_only, not_leader, not_proposed};
use crate::groups::Group;
use crate::raft::handle::MemberChange;

/// Time for a router that is to be added to say who it is.
const HELLO_MAX: Duration = Duration::from_secs(2);

/// Longest a transfer of leadership may take; an idle one takes under a millisecond.
const TRANSFER_MAX: Duration = Duration::from_secs(2);

/// Changes the membership of one group.
pub(super) async fn change(
    shared: &Arc<Shared>,
    request: &pb::ChangeMemberRequest,
) -> Result<pb::ChangeMemberReply, Status> {
    let group = shared.group(request.group)?;
    leader_only(group)?;
    let standing = group.consensus.standing();
    let member = standing.members.iter().find(|(id, _, _)| *id == request.router);
    let learns = member.map(|(_, _, learns)| *learns);
    let change = match (request.change, learns) {
        (1, Some(_)) | (2, Some(false)) | (3, None) => {
            let applied_index = group.published.read().applied_index();
            return Ok(pb::ChangeMemberReply { applied_index, changed: false });
        }
        (1, None) => {
            greet(shared, request).await?;
            MemberChange::Learn { router: request.router, address: request.address.clone() }
        }
        (2, Some(true)) => MemberChange::Vote(request.router),
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

/// Asks a router that is to be added who it is, and refuses one that cannot be what was meant.
async fn greet(shared: &Shared, request: &pb::ChangeMemberRequest) -> Result<(), Status> {
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
    let mut client = shared.peers.client(address).map_err(|why| silent(&why))?;
    let mut hello = Request::new(pb::HelloRequest {});
    hello.set_timeout(HELLO_MAX);
    let them = client.hello(hello).await.map_err(|status| silent(status.message()))?.into_inner();
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

/// A group must keep a voter, and its leader goes in order.
fn check_removal(group: &Group, router: u64, learns: bool) -> Result<(), Status> {
    let standing = group.consensus.standing();
    let voters = standing.members.iter().filter(|(_, _, learns)| !learns).count();
    if !learns && voters == 1 {
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

/// Gives leadership of one group to another voter.
pub(super) async fn transfer(
    shared: &Arc<Shared>,
    request: &pb::TransferLeadRequest,
) -> Result<pb::TransferLeadReply, Status> {
    let group = shared.group(request.group)?;
    let consensus = &group.consensus;
    leader_only(group)?;
    if consensus.id() == request.to {
        return Ok(pb::TransferLeadReply { changed: false });
    }
    let standing = consensus.standing();
    if !standing.members.iter().any(|(id, _, learns)| *id == request.to && !learns) {
        return Err(check::invalid(format!(
            "router {} is no voter of group {}: only a voter can lead",
            request.to, request.group
        )));
    }
    if tokio::time::timeout(TRANSFER_MAX, consensus.transfer(request.to)).await.is_err() {
        return Err(Status::unavailable(format!(
            "router {} did not take over group {} within {TRANSFER_MAX:?}; see whether it is reachable and level",
            request.to, request.group
        )));
    }
    match consensus.leader() {
        Some(leader) if leader.router == consensus.id() => Err(not_leader(None)),
        _ => Ok(pb::TransferLeadReply { changed: true }),
    }
}
