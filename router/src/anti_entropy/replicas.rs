//! The leader of a group compares its replica with all others and notifies those that are wrong.
//!
//! It asks all first, then judges, then notifies: a leader with the wrong replica must not silence
//! the others. Such a leader stops answering and transfers leadership to one of them, which then
//! finds its replica wrong. Not here: the judgement (`judge.rs`), and how a replica takes the
//! leader's state (`crate::raft::repair`).

use std::time::Duration;

use kvfleet_proto::pb;
use tonic::Request;

use super::judge::{Judgement, ReplicaReport, agreed_up_to, judge};
use super::run::{ANSWER_TIMEOUT, AntiEntropyTask};
use crate::groups::Group;

/// Timeout of the leadership transfer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(1);

/// Another replica of a group.
struct PeerReplica {
    router: u64,
    address: String,
    votes: bool,
}

/// Its comparison with this replica.
struct ComparedReplica {
    other: PeerReplica,
    heard: ReplicaReport,
    /// Whether it already knew that it differs.
    known: bool,
}

impl AntiEntropyTask {
    /// One round: asks all other replicas of a group, judges, notifies.
    pub(super) async fn compare_replicas(&self, group: &Group) {
        let status = group.consensus.status();
        let voters = status.members.iter().filter(|(_, _, learns)| !learns).count();
        let others = status.members.into_iter().filter(|(router, _, _)| *router != group.consensus.id());
        let mut compared = Vec::new();
        for (router, address, learns) in others {
            let other = PeerReplica { router, address, votes: !learns };
            if let Some(reply) = self.ask_replica(group, &other, pb::Verdict::None).await {
                compared.extend(parse_reply(other, &reply));
            }
        }
        let reports: Vec<ReplicaReport> = compared.iter().map(|one| one.heard).collect();
        if let Some(index) = reports.iter().filter(|one| !one.differs).map(|one| one.index).max() {
            group.record_agreement(index);
        }
        match judge(voters, &reports) {
            Judgement::AllEqual => record_agreement(group, voters, &reports),
            Judgement::Pending => {}
            Judgement::Wrong(routers) => {
                record_agreement(group, voters, &reports);
                self.notify(group, &compared, &routers, pb::Verdict::Wrong).await;
            }
            Judgement::Unclear(routers) => {
                self.notify(group, &compared, &routers, pb::Verdict::Unclear).await;
            }
            Judgement::LeaderWrong(right) => self.hand_over_lead(group, &reports, &right).await,
        }
    }

    /// Notifies the replicas that differ; they stop answering.
    async fn notify(
        &self,
        group: &Group,
        compared: &[ComparedReplica],
        routers: &[u64],
        verdict: pb::Verdict,
    ) {
        for ComparedReplica { other, heard, known } in
            compared.iter().filter(|one| routers.contains(&one.other.router))
        {
            let told = self.ask_replica(group, other, verdict).await;
            // It may have applied more entries since, and agree now.
            if *known || !told.is_some_and(|reply| reply.differs) {
                continue;
            }
            let (number, router, entry) = (group.number(), other.router, heard.index);
            if verdict == pb::Verdict::Wrong {
                tracing::error!(
                    group = number,
                    router,
                    entry,
                    "a replica differs from the majority's: it stops answering and takes this one's state; \
                     if this recurs, check the memory of its machine and compare the versions of the \
                     routers"
                );
            } else {
                tracing::error!(
                    group = number,
                    router,
                    entry,
                    "a replica differs from the leader's, and no majority decides which one is right: it \
                     stops answering until more voters respond; start those that are down, or add one"
                );
            }
            self.count_replica_drift(number);
        }
    }

    /// This replica is the wrong one: it stops answering and transfers leadership.
    async fn hand_over_lead(&self, group: &Group, reports: &[ReplicaReport], right: &[u64]) {
        let entry = reports.iter().map(|one| one.index).max().unwrap_or(0);
        let number = group.number();
        if !group.has_diverged() {
            tracing::error!(
                group = number,
                entry,
                "this replica leads and differs from the majority's: it stops answering and transfers \
                 leadership; if this recurs, check the memory of its machine and compare the versions of the \
                 routers"
            );
            self.count_replica_drift(number);
        }
        group.record_comparison(entry, true);
        if let Some(to) = right.first() {
            drop(tokio::time::timeout(TRANSFER_TIMEOUT, group.consensus.transfer(*to)).await);
        }
    }

    fn count_replica_drift(&self, group: u16) {
        self.count_drift(group);
        self.metrics.record_replica_drift(group);
    }

    async fn ask_replica(
        &self,
        group: &Group,
        other: &PeerReplica,
        verdict: pb::Verdict,
    ) -> Option<pb::CompareReply> {
        let mut client = self.peers.client(other.router, &other.address).ok()?;
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
        request.set_timeout(ANSWER_TIMEOUT);
        client.compare(request).await.ok().map(tonic::Response::into_inner)
    }
}

/// Records agreement with a majority. If another leader had called this replica wrong, it is
/// trusted again once they agree at that entry or later.
fn record_agreement(group: &Group, voters: usize, reports: &[ReplicaReport]) {
    if let Some(index) = agreed_up_to(voters, reports) {
        group.record_comparison(index, false);
    }
}

/// `None` if no digest was compared.
fn parse_reply(other: PeerReplica, reply: &pb::CompareReply) -> Option<ComparedReplica> {
    let pb::CompareReply { compared_index: index, differs, digest, known } = reply;
    let digest = digest.as_slice().try_into().ok().filter(|_| *index > 0)?;
    let reports =
        ReplicaReport { router: other.router, votes: other.votes, index: *index, digest, differs: *differs };
    Some(ComparedReplica { other, heard: reports, known: *known })
}
