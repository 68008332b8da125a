//! Reasons for cache misses: why a request finds blocks of its prompt nowhere, or not in time. A
//! closed set, one reason for each run of missing blocks.
//!
//! The decision gives the missing blocks (`mod.rs`); this file gives the reasons. Not here: the
//! history of evicted blocks (the router's view), and the results of fetches (the client).

use std::fmt;
use std::time::Duration;

use crate::id::NodeId;
use crate::index::command::DropCause;

/// Why blocks are missing. Closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// No announcement of them is remembered here.
    NeverSeen,
    /// The last node that held the first of them dropped it.
    Evicted {
        /// That node.
        node: NodeId,
        /// The cause.
        cause: DropCause,
        /// Time since.
        age: Duration,
    },
    /// The holder of the first of them is not live, or lost them in a restart.
    NodeLost {
        /// That node, if certain.
        node: Option<NodeId>,
    },
    /// Their hashes have another identity than the nodes, so no stored block matches.
    IdentityMismatch,
    /// They are held, but computing them is faster than fetching.
    SlowerThanRecompute,
    /// They are held, but the instance's engine cannot fetch.
    CannotFetch,
    /// The plan fetched them, but the fetch failed.
    NotFetched {
        /// The source.
        node: NodeId,
        /// The failure.
        failure: FetchFailure,
    },
}

/// Why a fetch from a node fell short, as reported by the instance. Closed set; the numbers are
/// those of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchFailure {
    /// The node does not hold them: the index was stale.
    NotHeld = 1,
    /// The node has rejoined since: the index was stale.
    StaleEpoch = 2,
    /// The node serves another identity.
    IdentityDiffers = 3,
    /// The bytes failed the check.
    Corrupt = 4,
    /// They would have arrived later than computing them takes.
    TooLate = 5,
    /// The node could not be reached.
    Unreachable = 6,
    /// A limit of the node was reached.
    Busy = 7,
    /// The node could not read them.
    MediumFailed = 8,
    /// The node serves the same identity with other weights.
    GenerationDiffers = 9,
}

impl FetchFailure {
    /// Every failure, in the order of its number.
    pub const ALL: [FetchFailure; 9] = [
        FetchFailure::NotHeld,
        FetchFailure::StaleEpoch,
        FetchFailure::IdentityDiffers,
        FetchFailure::Corrupt,
        FetchFailure::TooLate,
        FetchFailure::Unreachable,
        FetchFailure::Busy,
        FetchFailure::MediumFailed,
        FetchFailure::GenerationDiffers,
    ];

    /// The failure with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<FetchFailure> {
        FetchFailure::ALL.get((number as usize).checked_sub(1)?).copied()
    }
}

impl MissReason {
    /// Names for metrics, one for each result of [`MissReason::name`].
    pub const NAMES: [&'static str; 17] = [
        "never_seen",
        "evicted_room",
        "evicted_quota",
        "evicted_ttl",
        "evicted_failed",
        "node_lost",
        "slower_than_recompute",
        "fetches_nothing",
        "not_held",
        "stale_epoch",
        "identity_differs",
        "corrupt",
        "too_late",
        "unreachable",
        "busy",
        "medium_failed",
        "generation_differs",
    ];

    /// Lower-case name for metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let place = match self {
            MissReason::NeverSeen => 0,
            MissReason::Evicted { cause, .. } => 1 + *cause as usize,
            MissReason::NodeLost { .. } => 5,
            MissReason::SlowerThanRecompute => 6,
            MissReason::CannotFetch => 7,
            MissReason::IdentityMismatch => 7 + FetchFailure::IdentityDiffers as usize,
            MissReason::NotFetched { failure: told, .. } => 7 + *told as usize,
        };
        MissReason::NAMES[place]
    }
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MissReason::NeverSeen => write!(f, "never seen here, or longer ago than is remembered"),
            MissReason::Evicted { node, cause, age } => {
                let why = match cause {
                    DropCause::Capacity => "for want of room",
                    DropCause::Quota => "for its tenant's quota",
                    DropCause::Ttl => "as its group's time to live was over",
                    DropCause::Failed => "as its bytes could not be read or written",
                };
                write!(f, "{node} dropped the first of them {why}, {:.1} s ago", age.as_secs_f64())
            }
            MissReason::NodeLost { node: Some(node) } => write!(f, "{node}, which had them, is not live"),
            MissReason::NodeLost { node: None } => write!(f, "a node that has left or started anew had them"),
            MissReason::IdentityMismatch => write!(
                f,
                "hashed under another identity than the nodes': compare `engines.identity` of the router \
                 with `identity` of the nodes"
            ),
            MissReason::SlowerThanRecompute => write!(f, "held, and faster to compute than to fetch"),
            MissReason::CannotFetch => write!(f, "held, and the instance's engine fetches nothing"),
            MissReason::NotFetched { node, failure: told } => {
                let what = match told {
                    FetchFailure::NotHeld => "does not hold them any more: the index was stale",
                    FetchFailure::StaleEpoch => "has joined again since: the index was stale",
                    FetchFailure::IdentityDiffers => {
                        "serves another identity: compare `identity` of the node and of the instance"
                    }
                    FetchFailure::Corrupt => "gave bytes that are not these blocks",
                    FetchFailure::TooLate => "would have given them later than computing them takes",
                    FetchFailure::Unreachable => "could not be reached",
                    FetchFailure::Busy => "was busy",
                    FetchFailure::MediumFailed => "could not read them from its medium",
                    FetchFailure::GenerationDiffers => {
                        "serves another generation of weights: compare `kvfleet weights` with what the \
                         instance was told"
                    }
                };
                write!(f, "{node} {what}")
            }
        }
    }
}

/// Blocks that are missing for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingRun {
    /// Offset of the first block.
    pub start_blocks: u32,
    /// Number of blocks.
    pub len_blocks: u32,
    /// The reason.
    pub reason: MissReason,
}

/// Coverage of a request's prompt by served and held blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixCoverage {
    /// Leading blocks that are in GPU memory or fetched.
    pub served_blocks: u32,
    /// Leading blocks that live nodes hold, including the served ones.
    pub held_blocks: u32,
    /// Blocks of the whole prompt.
    pub blocks: u32,
    /// Whether the instance can fetch at all.
    pub can_fetch: bool,
}

/// The reasons for all blocks after the served ones. `dead_holder` gives the end offset of the
/// blocks after the held ones that a dead node held, and that node if certain. `dropped` returns,
/// for a block offset, the remembered node, cause and age of its drop. Blocks of a prefix are
/// announced from its start and dropped from its end, so a binary search finds how far the prefix
/// was once known.
#[must_use]
pub fn explain_missing(
    coverage: PrefixCoverage,
    dead_holder: Option<(u32, Option<NodeId>)>,
    dropped: impl Fn(u32) -> Option<(NodeId, DropCause, Duration)>,
) -> Vec<MissingRun> {
    let mut all = Vec::new();
    let mut push_run = |start: u32, end: u32, why: MissReason| {
        if end > start {
            all.push(MissingRun { start_blocks: start, len_blocks: end - start, reason: why });
        }
    };
    let PrefixCoverage { served_blocks, blocks, can_fetch: fetches, .. } = coverage;
    let held = coverage.held_blocks.clamp(served_blocks, blocks.max(served_blocks));
    push_run(
        served_blocks,
        held,
        if fetches { MissReason::SlowerThanRecompute } else { MissReason::CannotFetch },
    );
    let mut from = held;
    if let Some((end, node)) = dead_holder.filter(|(end, _)| *end > from) {
        push_run(from, end.min(blocks), MissReason::NodeLost { node });
        from = end.min(blocks);
    }
    if let Some((node, cause, age)) = (from < blocks).then(|| dropped(from)).flatten() {
        let (mut known, mut unknown) = (from + 1, blocks);
        while known < unknown {
            let middle = known + (unknown - known) / 2;
            if dropped(middle).is_some() { known = middle + 1 } else { unknown = middle }
        }
        push_run(from, known, MissReason::Evicted { node, cause, age });
        from = known;
    }
    push_run(from, blocks, MissReason::NeverSeen);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coverage(served_blocks: u32, held_blocks: u32) -> PrefixCoverage {
        PrefixCoverage { served_blocks, held_blocks, blocks: 10, can_fetch: true }
    }

    fn summary(all: &[MissingRun]) -> Vec<(u32, u32, &'static str)> {
        all.iter().map(|one| (one.start_blocks, one.len_blocks, one.reason.name())).collect()
    }

    #[test]
    fn every_missing_run_has_its_reason() {
        let left =
            |block| (6..8).contains(&block).then_some((NodeId(3), DropCause::Quota, Duration::from_secs(2)));
        let all = explain_missing(coverage(2, 4), Some((6, Some(NodeId(2)))), left);
        let expected = [
            (2, 2, "slower_than_recompute"),
            (4, 2, "node_lost"),
            (6, 2, "evicted_quota"),
            (8, 2, "never_seen"),
        ];
        assert_eq!(summary(&all), expected);
        assert_eq!(
            all[2].reason.to_string(),
            "node-3 dropped the first of them for its tenant's quota, 2.0 s ago"
        );
    }

    #[test]
    fn fully_served_prompt_misses_nothing() {
        assert_eq!(explain_missing(coverage(10, 10), None, |_| None), []);
        assert_eq!(
            explain_missing(PrefixCoverage { blocks: 0, ..coverage(0, 0) }, Some((4, None)), |_| None),
            []
        );
        assert_eq!(summary(&explain_missing(coverage(10, 3), None, |_| None)), []);
    }

    #[test]
    fn engine_without_fetch_misses_held_blocks() {
        let all = explain_missing(PrefixCoverage { can_fetch: false, ..coverage(1, 7) }, None, |_| None);
        assert_eq!(summary(&all), [(1, 6, "fetches_nothing"), (7, 3, "never_seen")]);
    }

    #[test]
    fn reason_names_are_distinct() {
        let node = NodeId(1);
        let age = Duration::ZERO;
        let evicted = DropCause::ALL.map(|cause| MissReason::Evicted { node, cause, age });
        let not_fetched = FetchFailure::ALL.map(|told| MissReason::NotFetched { node, failure: told });
        let others = [
            MissReason::NodeLost { node: Some(node) },
            MissReason::SlowerThanRecompute,
            MissReason::CannotFetch,
        ];
        let all: Vec<MissReason> =
            [MissReason::NeverSeen].into_iter().chain(evicted).chain(others).chain(not_fetched).collect();
        assert_eq!(all.iter().map(MissReason::name).collect::<Vec<_>>(), MissReason::NAMES);
        assert_eq!(
            MissReason::IdentityMismatch.name(),
            "identity_differs",
            "same name for a query and for a fetch"
        );
        for (number, told) in (1..).zip(FetchFailure::ALL) {
            assert_eq!((FetchFailure::from_number(number), told as u32), (Some(told), number));
        }
        assert_eq!((FetchFailure::from_number(0), FetchFailure::from_number(10)), (None, None));
    }
}
