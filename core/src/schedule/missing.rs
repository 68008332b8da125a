//! Why a request finds blocks of its prompt nowhere, or not in time: a closed set, one reason for each stretch of blocks.
//!
//! What was decided says which blocks are missing (`mod.rs`); here is why. Not here: remembering what left (the router's view), and what fetches
//! came to (the client).

use std::fmt;
use std::time::Duration;

use crate::id::NodeId;
use crate::index::command::DropCause;

/// Why blocks are missing. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nobody announced them here, as far as is remembered.
    NeverSeen,
    /// The last node that had the first of them dropped it.
    Evicted {
        /// Which.
        node: NodeId,
        /// Why.
        cause: DropCause,
        /// How long ago.
        age: Duration,
    },
    /// Whoever had the first of them is not live, or lost them with a start.
    NodeLost {
        /// Which, if that is certain.
        node: Option<NodeId>,
    },
    /// Their hashes are of another identity than the nodes', so nothing that is held is found by them.
    OtherIdentity,
    /// They are held, and are faster to compute than to fetch.
    SlowerThanRecompute,
    /// They are held, and the instance's engine cannot fetch.
    FetchesNothing,
    /// They were to be fetched, and did not come.
    NotFetched {
        /// From whom.
        node: NodeId,
        /// What came instead.
        told: Told,
    },
}

/// Why a fetch from a node fell short, as the instance told. Closed; numbers are those of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The node does not hold them: the index was stale.
    NotHeld = 1,
    /// The node has joined again since: the index was stale.
    StaleEpoch = 2,
    /// The node serves another identity.
    IdentityDiffers = 3,
    /// The bytes did not prove to be those blocks.
    Corrupt = 4,
    /// They would have come later than computing them takes.
    TooLate = 5,
    /// The node could not be reached.
    Unreachable = 6,
    /// A limit of the node was reached.
    Busy = 7,
    /// The node could not read them.
    MediumFailed = 8,
    /// The node serves the same identity under other weights.
    GenerationDiffers = 9,
}

impl Told {
    /// Every one, in the order of its number.
    pub const ALL: [Told; 9] = [
        Told::NotHeld,
        Told::StaleEpoch,
        Told::IdentityDiffers,
        Told::Corrupt,
        Told::TooLate,
        Told::Unreachable,
        Told::Busy,
        Told::MediumFailed,
        Told::GenerationDiffers,
    ];

    /// The one of this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Told> {
        Told::ALL.get((number as usize).checked_sub(1)?).copied()
    }
}

impl Why {
    /// Names for metrics, one for each that [`Why::name`] gives.
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

    /// Lower-case name, for metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let place = match self {
            Why::NeverSeen => 0,
            Why::Evicted { cause, .. } => 1 + *cause as usize,
            Why::NodeLost { .. } => 5,
            Why::SlowerThanRecompute => 6,
            Why::FetchesNothing => 7,
            Why::OtherIdentity => 7 + Told::IdentityDiffers as usize,
            Why::NotFetched { told, .. } => 7 + *told as usize,
        };
        Why::NAMES[place]
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::NeverSeen => write!(f, "never seen here, or longer ago than is remembered"),
            Why::Evicted { node, cause, age } => {
                let why = match cause {
                    DropCause::Room => "for want of room",
                    DropCause::Quota => "for its tenant's quota",
                    DropCause::Ttl => "as its group's time to live was over",
                    DropCause::Failed => "as its bytes could not be read or written",
                };
                write!(f, "{node} dropped the first of them {why}, {:.1} s ago", age.as_secs_f64())
            }
            Why::NodeLost { node: Some(node) } => write!(f, "{node}, which had them, is not live"),
            Why::NodeLost { node: None } => write!(f, "a node that has left or started anew had them"),
            Why::OtherIdentity => write!(
                f,
                "hashed under another identity than the nodes': compare `engines.identity` of the router with `identity` of the nodes"
            ),
            Why::SlowerThanRecompute => write!(f, "held, and faster to compute than to fetch"),
            Why::FetchesNothing => write!(f, "held, and the instance's engine fetches nothing"),
            Why::NotFetched { node, told } => {
                let what = match told {
                    Told::NotHeld => "does not hold them any more: the index was stale",
                    Told::StaleEpoch => "has joined again since: the index was stale",
                    Told::IdentityDiffers => {
                        "serves another identity: compare `identity` of the node and of the instance"
                    }
                    Told::Corrupt => "gave bytes that are not these blocks",
                    Told::TooLate => "would have given them later than computing them takes",
                    Told::Unreachable => "could not be reached",
                    Told::Busy => "was busy",
                    Told::MediumFailed => "could not read them from its medium",
                    Told::GenerationDiffers => {
                        "serves another generation of weights: compare `kvfleet weights` with what the instance was told"
                    }
                };
                write!(f, "{node} {what}")
            }
        }
    }
}

/// Blocks that are missing for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Offset of the first.
    pub start_blocks: u32,
    /// How many.
    pub len_blocks: u32,
    /// Why.
    pub why: Why,
}

/// How far along its prompt a request finds what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Blocks in GPU memory or fetched, from the first on.
    pub served_blocks: u32,
    /// Blocks that live nodes hold, those included.
    pub held_blocks: u32,
    /// The whole prompt's.
    pub blocks: u32,
    /// Whether the instance fetches at all.
    pub fetches: bool,
}

/// Why all behind what is served is missing. `lost` is who had the blocks from the end of what is held up to some offset and is not live; `left`
/// tells of one block who dropped it, why and how long ago, where that is remembered. Blocks of a prefix leave from its end and are
/// announced from its start, so a few looks tell how far it was once known.
#[must_use]
pub fn missing(
    found: Found,
    lost: Option<(u32, Option<NodeId>)>,
    left: impl Fn(u32) -> Option<(NodeId, DropCause, Duration)>,
) -> Vec<Missing> {
    let mut all = Vec::new();
    let mut add = |start: u32, end: u32, why: Why| {
        if end > start {
            all.push(Missing { start_blocks: start, len_blocks: end - start, why });
        }
    };
    let Found { served_blocks, blocks, fetches, .. } = found;
    let held = found.held_blocks.clamp(served_blocks, blocks.max(served_blocks));
    add(served_blocks, held, if fetches { Why::SlowerThanRecompute } else { Why::FetchesNothing });
    let mut from = held;
    if let Some((end, node)) = lost.filter(|(end, _)| *end > from) {
        add(from, end.min(blocks), Why::NodeLost { node });
        from = end.min(blocks);
    }
    if let Some((node, cause, age)) = (from < blocks).then(|| left(from)).flatten() {
        let (mut known, mut unknown) = (from + 1, blocks);
        while known < unknown {
            let middle = known + (unknown - known) / 2;
            if left(middle).is_some() { known = middle + 1 } else { unknown = middle }
        }
        add(from, known, Why::Evicted { node, cause, age });
        from = known;
    }
    add(from, blocks, Why::NeverSeen);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(served_blocks: u32, held_blocks: u32) -> Found {
        Found { served_blocks, held_blocks, blocks: 10, fetches: true }
    }

    fn told(all: &[Missing]) -> Vec<(u32, u32, &'static str)> {
        all.iter().map(|one| (one.start_blocks, one.len_blocks, one.why.name())).collect()
    }

    #[test]
    fn every_stretch_behind_what_is_served_has_its_reason() {
        let left =
            |block| (6..8).contains(&block).then_some((NodeId(3), DropCause::Quota, Duration::from_secs(2)));
        let all = missing(found(2, 4), Some((6, Some(NodeId(2)))), left);
        let expected = [
            (2, 2, "slower_than_recompute"),
            (4, 2, "node_lost"),
            (6, 2, "evicted_quota"),
            (8, 2, "never_seen"),
        ];
        assert_eq!(told(&all), expected);
        assert_eq!(
            all[2].why.to_string(),
            "node-3 dropped the first of them for its tenant's quota, 2.0 s ago"
        );
    }

    #[test]
    fn what_is_served_to_the_end_misses_nothing() {
        assert_eq!(missing(found(10, 10), None, |_| None), []);
        assert_eq!(missing(Found { blocks: 0, ..found(0, 0) }, Some((4, None)), |_| None), []);
        assert_eq!(told(&missing(found(10, 3), None, |_| None)), []);
    }

    #[test]
    fn an_engine_that_fetches_nothing_misses_what_is_held() {
        let all = missing(Found { fetches: false, ..found(1, 7) }, None, |_| None);
        assert_eq!(told(&all), [(1, 6, "fetches_nothing"), (7, 3, "never_seen")]);
    }

    #[test]
    fn every_reason_has_a_name_of_its_own() {
        let node = NodeId(1);
        let age = Duration::ZERO;
        let evicted = DropCause::ALL.map(|cause| Why::Evicted { node, cause, age });
        let not_fetched = Told::ALL.map(|told| Why::NotFetched { node, told });
        let others = [Why::NodeLost { node: Some(node) }, Why::SlowerThanRecompute, Why::FetchesNothing];
        let all: Vec<Why> =
            [Why::NeverSeen].into_iter().chain(evicted).chain(others).chain(not_fetched).collect();
        assert_eq!(all.iter().map(Why::name).collect::<Vec<_>>(), Why::NAMES);
        assert_eq!(Why::OtherIdentity.name(), "identity_differs", "asked for or fetched");
        for (number, told) in (1..).zip(Told::ALL) {
            assert_eq!((Told::from_number(number), told as u32), (Some(told), number));
        }
        assert_eq!((Told::from_number(0), Told::from_number(10)), (None, None));
    }
}
