//! Refuses terms that no honest router can have reached.
//!
//! A replica that stored a term near the largest number would never see a later one, and its group
//! would have no leader again. Terms grow by one in an election, so a jump of this size is an error
//! or an attack. A message also names its sender, with the number of the certificate. Not here: the
//! permission of routers to send Raft messages (`kvfleet_net::tls::access`).

use kv_core::id::RouterId;
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::append_stream::malformed;
use super::{AppendCall, LogId, Vote, append};

/// Largest difference between a term in a message and the local one: more elections than a cluster
/// can hold in a thousand years.
const TERM_STEP_MAX: u64 = 1 << 32;

/// Refuses a vote for another router than the caller, and one with a term too far above the local
/// one.
pub(super) fn check_vote(caller: &Caller, local_term: u64, vote: &Vote) -> Result<(), Status> {
    caller.require_router(RouterId(vote.leader_id.node_id))?;
    let term = vote.leader_id.term;
    if term <= local_term.saturating_add(TERM_STEP_MAX) {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "term {term} is more than {TERM_STEP_MAX} above this router's: no election leads there, so the sender's data \
         is damaged or forged; give that router an empty data_dir"
    )))
}

/// Decodes an append call and checks its sender and terms.
pub(super) fn decode_append(
    caller: &Caller,
    local_term: u64,
    frame: pb::RaftFrame,
) -> Result<AppendCall, Status> {
    let call = append::from_frame(frame).map_err(|error| malformed(&error))?;
    check_append(caller, local_term, &call)?;
    Ok(call)
}

/// Refuses an append call of another router, with a term too far ahead, or with an entry of a later
/// term than the vote's. A leader only sends entries of its own and of earlier terms.
fn check_append(caller: &Caller, local_term: u64, call: &AppendCall) -> Result<(), Status> {
    check_vote(caller, local_term, &call.vote)?;
    let named = call.entries.iter().map(|entry| entry.log_id);
    check_log_ids(&call.vote, named.chain(call.prev_log_id).chain(call.leader_commit))
}

/// Refuses a position of a later term than the vote's.
pub(super) fn check_log_ids(vote: &Vote, named: impl IntoIterator<Item = LogId>) -> Result<(), Status> {
    let term = vote.leader_id.term;
    match named.into_iter().map(|log_id| log_id.leader_id.term).find(|later| *later > term) {
        Some(later) => Err(Status::invalid_argument(format!(
            "a leader of term {term} names an entry of term {later}: the sender's data is damaged or forged; give that \
             router an empty data_dir"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::LeaderId;
    use super::*;
    use kvfleet_errors_doc::says;
    use kvfleet_net::tls::Role;
    use openraft::vote::RaftLeaderIdExt;
    use tonic::Code;

    fn router(number: u64) -> Caller {
        Caller::new(Role::Router(Some(RouterId(number))))
    }

    #[test]
    fn only_the_named_router_sends_a_vote() {
        let vote = Vote::new_committed(5, 2);
        assert!(check_vote(&router(2), 4, &vote).is_ok());
        assert!(
            check_vote(&Caller::new(Role::Router(None)), 4, &vote).is_ok(),
            "a certificate without a number"
        );
        let foreign = check_vote(&router(1), 4, &vote).unwrap_err();
        assert_eq!(foreign.code(), Code::PermissionDenied);
        says("a Raft message in the name of another router", &foreign.message(), &[]);
    }

    fn log_id(term: u64) -> LogId {
        LogId::new(LeaderId::new_committed(term, 1), 7)
    }

    #[test]
    fn terms_far_ahead_are_refused() {
        for (local, term, is_accepted) in [
            (0, 0, true),
            (7, 3, true),
            (7, 7 + TERM_STEP_MAX, true),
            (7, 8 + TERM_STEP_MAX, false),
            (0, u64::MAX, false),
            (u64::MAX - 1, u64::MAX, true),
        ] {
            let checked = check_vote(&router(1), local, &Vote::new_committed(term, 1));
            assert_eq!(checked.is_ok(), is_accepted, "{term} at {local}");
        }
    }

    #[test]
    fn entries_are_not_of_later_terms_than_their_leader() {
        let vote = Vote::new_committed(5, 1);
        let call = |prev: u64, commit: u64, entry: u64| AppendCall {
            vote,
            prev_log_id: Some(log_id(prev)),
            leader_commit: Some(log_id(commit)),
            entries: vec![super::super::Entry {
                log_id: log_id(entry),
                payload: super::super::Payload::Blank,
            }],
        };
        assert!(check_append(&router(1), 1, &call(4, 3, 5)).is_ok());
        let foreign = check_append(&router(2), 1, &call(4, 3, 5)).unwrap_err();
        assert_eq!(foreign.code(), Code::PermissionDenied);
        for later in [call(6, 3, 5), call(4, 6, 5), call(4, 3, u64::MAX)] {
            assert!(check_append(&router(1), 1, &later).is_err());
        }
    }
}
