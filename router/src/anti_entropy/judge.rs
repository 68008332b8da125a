//! Decides which replicas are right if some differ: those of a majority of the voters. Pure.
//!
//! Not here: comparison (`digests.rs`), calls (`replicas.rs`), repair (`crate::raft::repair`).

/// One replica's report in the comparison with the leader's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaReport {
    pub(crate) router: u64,
    /// Whether it is a voter: learners are compared but do not decide.
    pub(crate) votes: bool,
    /// The entry after which both had a digest.
    pub(crate) index: u64,
    /// Its digest there.
    pub(crate) digest: [u8; 16],
    pub(crate) differs: bool,
}

/// Result of one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// No replica differs.
    AllEqual,
    /// Some differ, and the others agreed only at older entries: the next round decides.
    Pending,
    /// A majority agreed with the leader at the entry where these differ, or later.
    Wrong(Vec<u64>),
    /// These differ, and no majority answered.
    Unclear(Vec<u64>),
    /// These voters are a majority that agrees with each other and not with the leader.
    LeaderWrong(Vec<u64>),
}

/// Judges one round of reports to the leader of a group with this number of voters, itself
/// included.
pub(crate) fn judge(voters: usize, reports: &[ReplicaReport]) -> Judgement {
    let majority = voters / 2 + 1;
    let unlike: Vec<u64> = reports.iter().filter(|one| one.differs).map(|one| one.router).collect();
    if unlike.is_empty() {
        return Judgement::AllEqual;
    }
    let differing = || reports.iter().filter(|one| one.votes && one.differs);
    let agreeing = |with: &ReplicaReport| -> Vec<u64> {
        let same = differing().filter(|one| (one.index, one.digest) == (with.index, with.digest));
        same.map(|one| one.router).collect()
    };
    if let Some(agreed) = differing().map(agreeing).find(|routers| routers.len() >= majority) {
        return Judgement::LeaderWrong(agreed);
    }
    // Agreement at an earlier entry is no evidence for later ones.
    let like_from =
        |index: u64| reports.iter().filter(|one| one.votes && !one.differs && one.index >= index).count();
    let wrong = reports.iter().filter(|one| one.differs && like_from(one.index) + 1 >= majority);
    let wrong: Vec<u64> = wrong.map(|one| one.router).collect();
    match wrong.is_empty() {
        false => Judgement::Wrong(wrong),
        true if like_from(0) + 1 >= majority => Judgement::Pending,
        true => Judgement::Unclear(unlike),
    }
}

/// Newest entry up to which the leader's replica agrees with a majority: a voter that agreed
/// earlier is no evidence for later entries. `None` without a majority, and for a single voter.
pub(crate) fn agreed_up_to(voters: usize, reports: &[ReplicaReport]) -> Option<u64> {
    let mut like: Vec<u64> =
        reports.iter().filter(|one| one.votes && !one.differs).map(|one| one.index).collect();
    like.sort_unstable_by_key(|index| std::cmp::Reverse(*index));
    // A majority without the leader itself.
    let others = (voters / 2).checked_sub(1)?;
    like.get(others).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADERS: u8 = 0;

    fn heard(router: u64, digest: u8) -> ReplicaReport {
        ReplicaReport { router, votes: true, index: 256, digest: [digest; 16], differs: digest != LEADERS }
    }

    #[test]
    fn the_majority_decides_which_replica_is_wrong() {
        assert_eq!(judge(3, &[heard(2, LEADERS), heard(3, LEADERS)]), Judgement::AllEqual);
        assert_eq!(judge(3, &[heard(2, LEADERS), heard(3, 7)]), Judgement::Wrong(vec![3]));
        assert_eq!(judge(3, &[heard(2, 7), heard(3, 7)]), Judgement::LeaderWrong(vec![2, 3]));
        let five = [heard(2, 7), heard(3, 7), heard(4, LEADERS), heard(5, 7)];
        assert_eq!(judge(5, &five), Judgement::LeaderWrong(vec![2, 3, 5]));
        let split = [heard(2, 7), heard(3, LEADERS), heard(4, LEADERS), heard(5, 8)];
        assert_eq!(judge(5, &split), Judgement::Wrong(vec![2, 5]));
    }

    #[test]
    fn an_earlier_agreement_is_no_evidence() {
        let before = ReplicaReport { index: 128, ..heard(3, LEADERS) };
        assert_eq!(judge(3, &[heard(2, 7), before]), Judgement::Pending);
        let after = ReplicaReport { index: 512, ..heard(3, LEADERS) };
        assert_eq!(judge(3, &[heard(2, 7), after]), Judgement::Wrong(vec![2]));
        // Only the one with a majority against it is judged.
        let late = ReplicaReport { index: 512, ..heard(2, 7) };
        let like = [heard(3, LEADERS), heard(4, LEADERS)];
        assert_eq!(judge(5, &[late, heard(5, 8), like[0], like[1]]), Judgement::Wrong(vec![5]));
    }

    #[test]
    fn agreement_reaches_to_the_oldest_entry_of_a_majority() {
        let at = |router, index| ReplicaReport { index, ..heard(router, LEADERS) };
        assert_eq!(agreed_up_to(5, &[at(2, 512), at(3, 128), heard(4, 7)]), Some(128));
        assert_eq!(agreed_up_to(5, &[at(2, 512), at(3, 128), at(4, 256)]), Some(256));
        assert_eq!(agreed_up_to(5, &[at(2, 512), heard(3, 7)]), None);
        assert_eq!(agreed_up_to(3, &[at(2, 128), at(3, 512)]), Some(512));
        assert_eq!(agreed_up_to(2, &[at(2, 128)]), Some(128));
        let learner = ReplicaReport { votes: false, ..at(3, 512) };
        assert_eq!(agreed_up_to(3, &[learner]), None);
        assert_eq!(agreed_up_to(1, &[learner]), None);
    }

    #[test]
    fn without_a_majority_the_result_is_unclear() {
        assert_eq!(judge(3, &[heard(2, 7)]), Judgement::Unclear(vec![2]), "the third did not answer");
        assert_eq!(judge(3, &[heard(2, 7), heard(3, 8)]), Judgement::Unclear(vec![2, 3]));
        assert_eq!(judge(2, &[heard(2, 7)]), Judgement::Unclear(vec![2]));
        let elsewhere = ReplicaReport { index: 512, ..heard(3, 7) };
        assert_eq!(judge(3, &[heard(2, 7), elsewhere]), Judgement::Unclear(vec![2, 3]), "other entries");
        assert_eq!(judge(3, &[]), Judgement::AllEqual);
    }

    #[test]
    fn learners_are_judged_but_have_no_vote() {
        let learner = |router, digest| ReplicaReport { votes: false, ..heard(router, digest) };
        assert_eq!(judge(3, &[heard(2, LEADERS), learner(4, 7)]), Judgement::Wrong(vec![4]));
        assert_eq!(judge(3, &[heard(2, 7), learner(4, 7)]), Judgement::Unclear(vec![2, 4]));
        assert_eq!(judge(3, &[heard(2, 7), learner(4, LEADERS)]), Judgement::Unclear(vec![2]));
        assert_eq!(judge(1, &[learner(4, 7)]), Judgement::Wrong(vec![4]));
    }
}
