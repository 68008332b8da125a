//! Which replicas are right when some differ: those of a majority of the voters. Pure.
//!
//! Not here: finding a difference (`digests.rs`), asking and telling (`replicas.rs`), repairing (`crate::raft::repair`).

/// What one replica said when it was compared with the leader's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) router: u64,
    /// Whether it has a vote: learners are compared, and decide nothing.
    pub(crate) votes: bool,
    /// The entry after which both had a digest.
    pub(crate) index: u64,
    /// Its digest there.
    pub(crate) digest: [u8; 16],
    pub(crate) differs: bool,
}

/// What follows from all that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// None differs.
    Alike,
    /// Some differ, and those that were like the leader's were so at older entries: the next round says more.
    Later,
    /// A majority was like the leader's where these differ, or later.
    Wrong(Vec<u64>),
    /// These differ, and no majority was heard that says who is right.
    Unclear(Vec<u64>),
    /// These voters are a majority, like each other and unlike the leader's.
    LeaderWrong(Vec<u64>),
}

/// Judges what was heard in one round by the leader of a group with so many voters, itself included.
pub(crate) fn judge(voters: usize, heard: &[Heard]) -> Judgement {
    let majority = voters / 2 + 1;
    let unlike: Vec<u64> = heard.iter().filter(|one| one.differs).map(|one| one.router).collect();
    if unlike.is_empty() {
        return Judgement::Alike;
    }
    let differing = || heard.iter().filter(|one| one.votes && one.differs);
    let agreeing = |with: &Heard| -> Vec<u64> {
        let same = differing().filter(|one| (one.index, one.digest) == (with.index, with.digest));
        same.map(|one| one.router).collect()
    };
    if let Some(agreed) = differing().map(agreeing).find(|routers| routers.len() >= majority) {
        return Judgement::LeaderWrong(agreed);
    }
    // Who was like the leader's before the leader's went wrong says nothing of what came then.
    let like_from =
        |index: u64| heard.iter().filter(|one| one.votes && !one.differs && one.index >= index).count();
    let wrong = heard.iter().filter(|one| one.differs && like_from(one.index) + 1 >= majority);
    let wrong: Vec<u64> = wrong.map(|one| one.router).collect();
    match wrong.is_empty() {
        false => Judgement::Wrong(wrong),
        true if like_from(0) + 1 >= majority => Judgement::Later,
        true => Judgement::Unclear(unlike),
    }
}

/// Newest entry up to which the leader's replica is known to be like a majority's: a voter that agreed earlier is no
/// witness of what came later. None while no majority was heard to agree; the only voter has nobody to be like.
pub(crate) fn like_up_to(voters: usize, heard: &[Heard]) -> Option<u64> {
    let mut like: Vec<u64> =
        heard.iter().filter(|one| one.votes && !one.differs).map(|one| one.index).collect();
    like.sort_unstable_by_key(|index| std::cmp::Reverse(*index));
    // With the leader itself, so many others are a majority.
    let others = (voters / 2).checked_sub(1)?;
    like.get(others).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADERS: u8 = 0;

    fn heard(router: u64, digest: u8) -> Heard {
        Heard { router, votes: true, index: 256, digest: [digest; 16], differs: digest != LEADERS }
    }

    #[test]
    fn a_majority_says_who_is_wrong() {
        assert_eq!(judge(3, &[heard(2, LEADERS), heard(3, LEADERS)]), Judgement::Alike);
        assert_eq!(judge(3, &[heard(2, LEADERS), heard(3, 7)]), Judgement::Wrong(vec![3]));
        assert_eq!(judge(3, &[heard(2, 7), heard(3, 7)]), Judgement::LeaderWrong(vec![2, 3]));
        let five = [heard(2, 7), heard(3, 7), heard(4, LEADERS), heard(5, 7)];
        assert_eq!(judge(5, &five), Judgement::LeaderWrong(vec![2, 3, 5]));
        let split = [heard(2, 7), heard(3, LEADERS), heard(4, LEADERS), heard(5, 8)];
        assert_eq!(judge(5, &split), Judgement::Wrong(vec![2, 5]));
    }

    #[test]
    fn who_agreed_before_the_leader_went_wrong_is_no_witness() {
        let before = Heard { index: 128, ..heard(3, LEADERS) };
        assert_eq!(judge(3, &[heard(2, 7), before]), Judgement::Later);
        let after = Heard { index: 512, ..heard(3, LEADERS) };
        assert_eq!(judge(3, &[heard(2, 7), after]), Judgement::Wrong(vec![2]));
        // Of two that differ, only the one is judged that a majority speaks against.
        let late = Heard { index: 512, ..heard(2, 7) };
        let like = [heard(3, LEADERS), heard(4, LEADERS)];
        assert_eq!(judge(5, &[late, heard(5, 8), like[0], like[1]]), Judgement::Wrong(vec![5]));
    }

    #[test]
    fn a_leader_is_like_a_majority_up_to_where_all_of_it_agreed() {
        let at = |router, index| Heard { index, ..heard(router, LEADERS) };
        assert_eq!(like_up_to(5, &[at(2, 512), at(3, 128), heard(4, 7)]), Some(128));
        assert_eq!(like_up_to(5, &[at(2, 512), at(3, 128), at(4, 256)]), Some(256));
        assert_eq!(like_up_to(5, &[at(2, 512), heard(3, 7)]), None);
        assert_eq!(like_up_to(3, &[at(2, 128), at(3, 512)]), Some(512));
        assert_eq!(like_up_to(2, &[at(2, 128)]), Some(128));
        let learner = Heard { votes: false, ..at(3, 512) };
        assert_eq!(like_up_to(3, &[learner]), None);
        assert_eq!(like_up_to(1, &[learner]), None);
    }

    #[test]
    fn without_a_majority_nobody_is_called_wrong() {
        assert_eq!(judge(3, &[heard(2, 7)]), Judgement::Unclear(vec![2]), "the third was not heard");
        assert_eq!(judge(3, &[heard(2, 7), heard(3, 8)]), Judgement::Unclear(vec![2, 3]));
        assert_eq!(judge(2, &[heard(2, 7)]), Judgement::Unclear(vec![2]));
        let elsewhere = Heard { index: 512, ..heard(3, 7) };
        assert_eq!(judge(3, &[heard(2, 7), elsewhere]), Judgement::Unclear(vec![2, 3]), "other entries");
        assert_eq!(judge(3, &[]), Judgement::Alike);
    }

    #[test]
    fn learners_are_judged_and_do_not_judge() {
        let learner = |router, digest| Heard { votes: false, ..heard(router, digest) };
        assert_eq!(judge(3, &[heard(2, LEADERS), learner(4, 7)]), Judgement::Wrong(vec![4]));
        assert_eq!(judge(3, &[heard(2, 7), learner(4, 7)]), Judgement::Unclear(vec![2, 4]));
        assert_eq!(judge(3, &[heard(2, 7), learner(4, LEADERS)]), Judgement::Unclear(vec![2]));
        assert_eq!(judge(1, &[learner(4, 7)]), Judgement::Wrong(vec![4]));
    }
}
