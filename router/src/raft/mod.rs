//! The openraft integration: types of a log entry, and adapters in the sibling files.
//!
//! One process hosts all groups of a cluster: control and shards. Each is an openraft instance with
//! its own log and state machine, over one log on disk with one writer thread, and one connection
//! per peer.
//!
//! Not here: the effect of a command (`kv_core::index`), proposers (`crate::ingest`,
//! `crate::server::admin`), readers (`crate::view`). No other folder names openraft.

pub(crate) mod append;
pub(crate) mod append_stream;
pub(crate) mod boot;
pub(crate) mod bounded;
pub(crate) mod disk_room;
pub(crate) mod disk_thread;
pub(crate) mod handle;
pub(crate) mod intake;
pub(crate) mod log;
pub(crate) mod log_store;
pub(crate) mod network;
#[cfg(feature = "probe")]
pub(crate) mod probe;
pub(crate) mod recover;
pub(crate) mod repair;
pub(crate) mod service;
mod snapshot_build;
pub(crate) mod snapshot_file;
pub(crate) mod snapshot_sender;
pub(crate) mod state_machine;
mod terms;
pub(crate) mod withheld_votes;

#[cfg(test)]
mod tests;

use std::fmt;

use bytes::Bytes;
use kv_core::index::command::{Applied, Command};
use openraft::impls::{BasicNode, leader_id_adv};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The group that holds nodes, pins and quotas. Groups from 1 on are the shards of the index.
pub(crate) const CONTROL: u16 = 0;

/// Identity shared by all routers of a cluster. It is fixed at the first start, and every message
/// between routers carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterIdentity {
    pub(crate) name: String,
    pub(crate) shards: u16,
}

impl ClusterIdentity {
    /// Number of Raft groups: control, and one per shard.
    pub(crate) fn groups(&self) -> u16 {
        self.shards + 1
    }
}

openraft::declare_raft_types!(
    /// The openraft types: commands as bytes in, [`ApplyResult`] out, routers as voters.
    pub(crate) TypeConfig:
        D = Proposal,
        R = ApplyResult,
        NodeId = u64,
        Node = BasicNode,
);

pub(crate) type LeaderId = leader_id_adv::LeaderId<u64, u64>;
pub(crate) type CommittedLeaderId = <LeaderId as openraft::vote::RaftLeaderId>::Committed;
pub(crate) type LogId = openraft::LogId<CommittedLeaderId>;
pub(crate) type Vote = openraft::impls::Vote<LeaderId>;
pub(crate) type Payload = openraft::EntryPayload<Proposal, u64, BasicNode>;
pub(crate) type Entry = openraft::Entry<CommittedLeaderId, Payload>;
pub(crate) type StoredMembership = openraft::StoredMembership<CommittedLeaderId, u64, BasicNode>;
pub(crate) type SnapshotMeta = openraft::storage::SnapshotMeta<CommittedLeaderId, u64, BasicNode>;
pub(crate) type Snapshot =
    openraft::storage::Snapshot<CommittedLeaderId, u64, BasicNode, state_machine::SnapshotData>;
pub(crate) type AppendCall = openraft::raft::AppendEntriesRequest<TypeConfig>;
pub(crate) type Raft = openraft::Raft<TypeConfig, state_machine::StateMachine>;

/// A command in encoded form: cheap to clone per follower, opaque to openraft.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Proposal(pub(crate) Bytes);

impl Proposal {
    /// Encodes a command once; every replica applies exactly these bytes.
    pub(crate) fn encode(command: &Command) -> Proposal {
        Proposal(Bytes::from(command.encode()))
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "command of {} bytes", self.0.len())
    }
}

impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Proposal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Proposal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(ProposalBytes)
    }
}

struct ProposalBytes;

impl serde::de::Visitor<'_> for ProposalBytes {
    type Value = Proposal;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes of a command")
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Proposal, E> {
        Ok(Proposal(Bytes::copy_from_slice(bytes)))
    }

    fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Proposal, E> {
        Ok(Proposal(Bytes::from(bytes)))
    }
}

/// Result of applying an entry; `None` for entries without a command. It goes to the proposer on
/// the same router and is never sent. The serde impls exist because openraft requires them of its
/// response type; they return an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApplyResult(pub(crate) Option<Applied>);

const NO_ENCODING: &str = "an apply result stays on the proposing router; it has no encoding";

impl Serialize for ApplyResult {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(NO_ENCODING))
    }
}

impl<'de> Deserialize<'de> for ApplyResult {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(serde::de::Error::custom(NO_ENCODING))
    }
}
