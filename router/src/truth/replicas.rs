//! The leader of a group compares its replica with all others and tells those that are wrong.
//!
//! First everybody is asked, then judged, then told: a leader whose own replica is the odd one must not silence the
//! others. It answers nothing from then on and gives the lead to one of them, who finds it wrong in turn. Not here:
//! the judgement (`judge.rs`), and how a replica takes the leader's state (`crate::raft::repair`).

use std::time::Duration;

use kvfleet_proto::pb;
use tonic::Request;

use super::judge::{Heard, Judgement, judge, like_up_to};
use super::run::{ANSWER_MAX, Meter};
use crate::groups::Group;

/// Longest the lead is waited for to be gone.
const TRANSFER_MAX: Duration = Duration::from_secs(1);

/// Another replica of a group.
struct Other {
    router: u64,
    address: String,
    votes: bool,
}

/// What it answered.
struct Compared {
    other: Other,
    heard: Heard,
    /// Whether it knew before that it differs.
    known: bool,
}

impl Meter {
    /// One round: asks all other replicas of a group, judges, tells.
    pub(super) async fn compare_replicas(&self, group: &Group) {
        let standing = group.consensus.standing();
        let voters = standing.members.iter().filter(|(_, _, learns)| !learns).count();
        let others = standing.members.into_iter().filter(|(router, _, _)| *router != group.consensus.id());
        let mut compared = Vec::new();
        for (router, address, learns) in others {
            let other = Other { router, address, votes: !learns };
            if let Some(reply) = self.ask_replica(group, &other.address, pb::Verdict::None).await {
                compared.extend(understood(other, &reply));
            }
        }
        let heard: Vec<Heard> = compared.iter().map(|one| one.heard).collect();
        if let Some(index) = heard.iter().filter(|one| !one.differs).map(|one| one.index).max() {
            group.agreed_at(index);
        }
        match judge(voters, &heard) {
            Judgement::Alike => is_alike(group, voters, &heard),
            Judgement::Later => {}
            Judgement::Wrong(routers) => {
                is_alike(group, voters, &heard);
                self.tell(group, &compared, (&routers, pb::Verdict::Wrong)).await;
            }
            Judgement::Unclear(routers) => {
                self.tell(group, &compared, (&routers, pb::Verdict::Unclear)).await;
            }
            Judgement::LeaderWrong(right) => self.step_aside(group, &heard, &right).await,
        }
    }

    /// Tells the replicas that differ. They answer nothing from then on.
    async fn tell(&self, group: &Group, compared: &[Compared], (routers, verdict): (&[u64], pb::Verdict)) {
        for Compared { other, heard, known } in
            compared.iter().filter(|one| routers.contains(&one.other.router))
        {
            let told = self.ask_replica(group, &other.address, verdict).await;
            // It may have applied more meanwhile, and agree.
            if *known || !told.is_some_and(|reply| reply.differs) {
                continue;
            }
            let (number, router, entry) = (group.number(), other.router, heard.index);
            if verdict == pb::Verdict::Wrong {
                tracing::error!(
                    group = number,
                    router,
                    entry,
                    "a replica differs from the majority's: it answers nothing and takes this one's state; if this comes \
                     again, check the memory of its machine and compare the versions of the routers"
                );
            } else {
                tracing::error!(
                    group = number,
                    router,
                    entry,
                    "a replica differs from the leader's, and no majority says which one is right: it answers nothing \
                     until more voters are heard; start those that are down, or add one"
                );
            }
            self.replica_drifted(number);
        }
    }

    /// This replica is the odd one: answers nothing and lets one of the others lead.
    async fn step_aside(&self, group: &Group, heard: &[Heard], right: &[u64]) {
        let entry = heard.iter().map(|one| one.index).max().unwrap_or(0);
        let number = group.number();
        if !group.has_diverged() {
            tracing::error!(
                group = number,
                entry,
                "this replica leads and differs from the majority's: it answers nothing and gives the lead away; if this \
                 comes again, check the memory of its machine and compare the versions of the routers"
            );
            self.replica_drifted(number);
        }
        group.compared(entry, true);
        if let Some(to) = right.first() {
            drop(tokio::time::timeout(TRANSFER_MAX, group.consensus.transfer(*to)).await);
        }
    }

    fn replica_drifted(&self, group: u16) {
        self.drifted(group);
        self.metrics.replica_drift(group);
    }

    async fn ask_replica(
        &self,
        group: &Group,
        address: &str,
        verdict: pb::Verdict,
    ) -> Option<pb::CompareReply> {
        let mut client = self.peers.client(address).ok()?;
        let frame = self.envelope.frame(Vec::new());
        let marks = group.published.marks();
        let marks = marks.iter().map(|mark| pb::Mark { index: mark.index, digest: mark.digest.to_vec() });
        let mut request = Request::new(pb::CompareRequest {
            group: group.number().into(),
            cluster: frame.cluster,
            shards: frame.shards,
            marks: marks.collect(),
            verdict: verdict.into(),
        });
        request.set_timeout(ANSWER_MAX);
        client.compare(request).await.ok().map(tonic::Response::into_inner)
    }
}

/// A majority is like this replica, which may have been told otherwise before it led: it is trusted again if they agree
/// where it differed, or later.
fn is_alike(group: &Group, voters: usize, heard: &[Heard]) {
    if let Some(index) = like_up_to(voters, heard) {
        group.compared(index, false);
    }
}

/// None when nothing was compared.
fn understood(other: Other, reply: &pb::CompareReply) -> Option<Compared> {
    let pb::CompareReply { compared_index: index, differs, digest, known } = reply;
    let digest = digest.as_slice().try_into().ok().filter(|_| *index > 0)?;
    let heard = Heard { router: other.router, votes: other.votes, index: *index, digest, differs: *differs };
    Some(Compared { other, heard, known: *known })
}
