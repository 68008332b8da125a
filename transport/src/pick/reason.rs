//! Why a path is in use, as a value and as text.
//!
//! Not here: the decision (`peer.rs`).

use std::fmt::{Display, Formatter, Result};

use super::PathKind;

/// Why a path is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PickReason {
    /// It is the only configured one.
    OnlyPath,
    /// The peer is on this host.
    SameHost,
    /// The peer offers RDMA.
    RdmaOffered,
    /// The configuration prefers it on the network.
    Preferred,
    /// The preferred network path is closed or suspended.
    Fallback {
        /// The preferred path.
        preferred: PathKind,
        /// Its last failure; `None` while it is first dialed.
        failure: Option<String>,
    },
}

impl PickReason {
    /// Whether the text describes the state of this path.
    pub(super) fn names(&self, kind: PathKind) -> bool {
        matches!(self, PickReason::Fallback { preferred, .. } if *preferred == kind)
    }
}

impl Display for PickReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PickReason::OnlyPath => f.write_str("the only configured path"),
            PickReason::SameHost => f.write_str("same host"),
            PickReason::RdmaOffered => f.write_str("the node offers it"),
            PickReason::Preferred => f.write_str("preferred by configuration"),
            PickReason::Fallback { preferred, failure: Some(failure) } => {
                write!(f, "{preferred} cannot be reached, last failure: {failure}")
            }
            PickReason::Fallback { preferred, failure: None } => write!(f, "{preferred} is not open yet"),
        }
    }
}
