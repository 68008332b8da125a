//! Why a path is in use, with figures and as text.
//!
//! Not here: the decision (`choice.rs`).

use std::fmt::{Display, Formatter, Result};
use std::time::Duration;

use super::PathKind;

/// Why a path is in use.
#[derive(Clone, Debug, PartialEq)]
pub enum PickReason {
    /// It is of a better class than the network, without a comparison.
    Preferred,
    /// It is the first, and there was no comparison yet.
    Default,
    /// The path measured as better is closed or suspended.
    Fallback {
        /// The better path.
        other: PathKind,
    },
    /// Another one was tried with too few fetches for a comparison.
    TooFewFetches {
        /// The other path.
        other: PathKind,
        /// Measured fetches.
        fetches: u32,
    },
    /// Another one failed during its trial.
    TrialFailed {
        /// The other path.
        other: PathKind,
    },
    /// Result of a comparison.
    Compared(Comparison),
}

/// Expected times of two paths for the same fetch, and the conclusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// The conclusion.
    pub outcome: ComparisonOutcome,
    /// Size of the fetch in bytes: the peer's average.
    pub bytes: u64,
    /// The path in use then, and its time.
    pub used: (PathKind, Duration),
    /// The other path, and its time.
    pub other: (PathKind, Duration),
}

/// Conclusion of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparisonOutcome {
    /// The other path is not clearly better.
    Kept,
    /// The other path is clearly better, and must be so once more.
    Leading,
    /// The other path was clearly better often enough and is now in use.
    Switched,
}

impl Display for PickReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PickReason::Preferred => f.write_str("preferred over the network"),
            PickReason::Default => f.write_str("the default, no comparison yet"),
            PickReason::Fallback { other } => write!(f, "in place of {other}, which is closed or suspended"),
            PickReason::TooFewFetches { other, fetches } => {
                write!(f, "{other} was tried with {fetches} fetches from memory, too few to compare")
            }
            PickReason::TrialFailed { other } => write!(f, "{other} failed in its trial"),
            PickReason::Compared(compared) => compared.fmt(f),
        }
    }
}

impl Display for Comparison {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Comparison { bytes, used: (used, used_takes), other: (other, other_takes), .. } = self;
        write!(f, "{bytes} bytes take {used_takes:.1?} over {used} and {other_takes:.1?} over {other}: ")?;
        match self.outcome {
            ComparisonOutcome::Kept => write!(f, "not clearly better, {used} stays"),
            ComparisonOutcome::Leading => write!(f, "clearly better, {other} must win once more"),
            ComparisonOutcome::Switched => write!(f, "clearly better again, {other} is used from now on"),
        }
    }
}
