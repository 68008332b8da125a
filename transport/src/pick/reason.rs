//! Why a path is the one in use, in figures and in words.
//!
//! Not here: how it came to that (`choice.rs`).

use std::fmt::{Display, Formatter, Result};
use std::time::Duration;

use super::PathKind;

/// Why a path is the one in use.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// It is of a better class than the network, which nothing is compared with.
    Nearer,
    /// It is the first, and nothing was compared yet.
    Default,
    /// The one that is better, as far as is known, is not open or left alone.
    StandsIn {
        /// Which.
        other: PathKind,
    },
    /// Another one was tried with too few fetches to say anything.
    TooFew {
        /// Which.
        other: PathKind,
        /// Fetches that counted.
        fetches: u32,
    },
    /// Another one failed while it was tried.
    Failed {
        /// Which.
        other: PathKind,
    },
    /// Two were compared.
    Compared(Compared),
}

/// What two paths would take for the same fetch, and what followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// What followed.
    pub outcome: Outcome,
    /// Size of the fetch: what is usual for this peer, in bytes.
    pub bytes: u64,
    /// The path that was in use, and the time over it.
    pub used: (PathKind, Duration),
    /// The other one, and the time over it.
    pub other: (PathKind, Duration),
}

/// What followed from a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The other one is not clearly better.
    Stays,
    /// The other one is clearly better, and has to be so once more.
    Ahead,
    /// The other one was clearly better often enough: it is the one in use now.
    Changed,
}

impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Reason::Nearer => f.write_str("nearer than the network"),
            Reason::Default => f.write_str("the default, nothing was compared yet"),
            Reason::StandsIn { other } => write!(f, "in place of {other}, which is not open or left alone"),
            Reason::TooFew { other, fetches } => {
                write!(f, "{other} was tried with {fetches} fetches from memory, too few to compare")
            }
            Reason::Failed { other } => write!(f, "{other} failed when it was tried"),
            Reason::Compared(compared) => compared.fmt(f),
        }
    }
}

impl Display for Compared {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Compared { bytes, used: (used, used_takes), other: (other, other_takes), .. } = self;
        write!(f, "{bytes} bytes take {used_takes:.1?} over {used} and {other_takes:.1?} over {other}: ")?;
        match self.outcome {
            Outcome::Stays => write!(f, "not clearly better, {used} stays"),
            Outcome::Ahead => write!(f, "clearly better, {other} has to show it once more"),
            Outcome::Changed => write!(f, "clearly better again, {other} is used from now on"),
        }
    }
}
