//! Encoding of append calls: a small head, with the commands out of line.
//!
//! A command can be megabytes and a head is tens of bytes. Commands move between log and message
//! without passing through a serializer. Not here: sending and receiving (`append_stream.rs`;
//! heartbeats: `network.rs`, `service.rs`).

use bytes::Bytes;
use kvfleet_proto::pb;
use openraft::Membership;
use openraft::impls::BasicNode;
use openraft::raft::AppendEntriesRequest;
use serde::{Deserialize, Serialize};

use super::network::Envelope;
use super::{Entry, LogId, Payload, Proposal, TypeConfig, Vote};

/// An append call without its commands.
#[derive(Serialize, Deserialize)]
struct AppendHead {
    vote: Vote,
    prev_log_id: Option<LogId>,
    leader_commit: Option<LogId>,
    entries: Vec<(LogId, EntryKind)>,
}

/// Contents of an entry.
#[derive(Serialize, Deserialize)]
enum EntryKind {
    Blank,
    Membership(Membership<u64, BasicNode>),
    /// The next of the message's commands.
    Command,
}

/// Encodes a call as a message.
///
/// # Errors
/// If a part of openraft's does not encode.
pub(super) fn to_frame(
    envelope: &Envelope,
    call: AppendEntriesRequest<TypeConfig>,
) -> Result<pb::RaftFrame, rmp_serde::encode::Error> {
    let AppendEntriesRequest { vote, prev_log_id, leader_commit, entries } = call;
    let mut commands = Vec::with_capacity(entries.len());
    let entries = entries.into_iter().map(|entry| (entry.log_id, kind_of(entry.payload, &mut commands)));
    let head = AppendHead { vote, prev_log_id, leader_commit, entries: entries.collect() };
    Ok(pb::RaftFrame { commands, ..envelope.frame(rmp_serde::to_vec(&head)?) })
}

fn kind_of(payload: Payload, commands: &mut Vec<Bytes>) -> EntryKind {
    match payload {
        Payload::Blank => EntryKind::Blank,
        Payload::Membership(members) => EntryKind::Membership(members),
        Payload::Normal(Proposal(command)) => {
            commands.push(command);
            EntryKind::Command
        }
    }
}

/// Decodes a call from a message.
///
/// # Errors
/// If the head does not decode, or the number of commands does not match it.
pub(super) fn from_frame(frame: pb::RaftFrame) -> Result<AppendEntriesRequest<TypeConfig>, String> {
    let head: AppendHead = rmp_serde::from_slice(&frame.payload).map_err(|error| error.to_string())?;
    let given = frame.commands.len();
    let mut commands = frame.commands.into_iter();
    let entries = head.entries.into_iter().map(|(log_id, kind)| {
        let payload = match kind {
            EntryKind::Blank => Payload::Blank,
            EntryKind::Membership(members) => Payload::Membership(members),
            EntryKind::Command => Payload::Normal(Proposal(commands.next()?)),
        };
        Some(Entry { log_id, payload })
    });
    let entries: Option<Vec<Entry>> = entries.collect();
    match entries {
        Some(entries) if commands.len() == 0 => Ok(AppendEntriesRequest {
            vote: head.vote,
            prev_log_id: head.prev_log_id,
            leader_commit: head.leader_commit,
            entries,
        }),
        _ => Err(format!("{given} commands do not match the number in its entries")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use openraft::vote::RaftLeaderIdExt;

    use super::super::{ClusterIdentity, LeaderId};
    use super::*;

    fn log_id(index: u64) -> LogId {
        LogId::new(LeaderId::new_committed(3, 1), index)
    }

    fn call() -> AppendEntriesRequest<TypeConfig> {
        let members = BTreeMap::from([(1, BasicNode::new("a:1"))]);
        let membership = Membership::new(vec![BTreeSet::from([1])], members).unwrap();
        let command = |bytes: &[u8]| Payload::Normal(Proposal(Bytes::copy_from_slice(bytes)));
        let payloads = [
            Payload::Blank,
            command(b"first"),
            Payload::Membership(membership),
            command(b""),
            command(&[7; 9_000]),
        ];
        let entries = (5..).zip(payloads).map(|(index, payload)| Entry { log_id: log_id(index), payload });
        AppendEntriesRequest {
            vote: Vote::new_committed(3, 1),
            prev_log_id: Some(log_id(4)),
            leader_commit: None,
            entries: entries.collect(),
        }
    }

    fn frame() -> pb::RaftFrame {
        let envelope =
            Envelope { cluster: Arc::new(ClusterIdentity { name: "test".into(), shards: 2 }), group: 1 };
        to_frame(&envelope, call()).unwrap()
    }

    #[test]
    fn a_call_roundtrips_through_its_message() {
        let AppendEntriesRequest { vote, prev_log_id, leader_commit, entries } = from_frame(frame()).unwrap();
        let sent = call();
        assert_eq!((vote, prev_log_id, leader_commit), (sent.vote, sent.prev_log_id, sent.leader_commit));
        assert_eq!(entries, sent.entries);
    }

    #[test]
    fn commands_too_few_or_too_many_are_refused() {
        let mut few = frame();
        few.commands.pop();
        let mut many = frame();
        many.commands.push(Bytes::from_static(b"more"));
        for (frame, given) in [(few, 2), (many, 4)] {
            let error = from_frame(frame).unwrap_err();
            assert_eq!(error, format!("{given} commands do not match the number in its entries"));
        }
    }

    #[test]
    fn a_truncated_head_is_refused() {
        let whole = frame();
        for bytes in 0..whole.payload.len() {
            let cut = pb::RaftFrame { payload: whole.payload.slice(..bytes), ..whole.clone() };
            from_frame(cut).unwrap_err();
        }
    }
}
