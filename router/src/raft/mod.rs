//! How openraft is wired: the types one log entry is made of, and the adapters in the files beside.
//!
//! One process hosts all groups of a cluster: control and shards, each an openraft of its own with its own log
//! and state machine, over one log on disk with one writing thread and one connection per peer.
//!
//! Not here: what a command does (`kv_core::index`), who proposes (`crate::ingest`, `crate::admin`),
//! who reads (`crate::view`). No other folder of the program names openraft.

pub(crate) mod append;
pub(crate) mod append_stream;
pub(crate) mod boot;
pub(crate) mod bounded;
pub(crate) mod disk_thread;
pub(crate) mod handle;
pub(crate) mod intake;
pub(crate) mod log;
pub(crate) mod log_store;
mod making;
pub(crate) mod network;
#[cfg(feature = "probe")]
pub(crate) mod probe;
pub(crate) mod recover;
pub(crate) mod repair;
pub(crate) mod sending;
pub(crate) mod service;
pub(crate) mod snapshot_file;
pub(crate) mod state_machine;
pub(crate) mod withheld;

#[cfg(test)]
mod tests;

use std::fmt;

use bytes::Bytes;
use kv_core::index::command::{Applied, Command};
use openraft::impls::{BasicNode, leader_id_adv};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The group that knows nodes, pins and quotas. The shards of the index are the groups from 1 on.
pub(crate) const CONTROL: u16 = 0;

/// What all routers of a cluster have in common; it never changes after the first start, and every message
/// between routers names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cluster {
    pub(crate) name: String,
    pub(crate) shards: u16,
}

impl Cluster {
    /// Raft groups: control, and one per shard.
    pub(crate) fn groups(&self) -> u16 {
        self.shards + 1
    }
}

openraft::declare_raft_types!(
    /// What openraft is instantiated with: commands as bytes in, [`Answer`] out, routers as voters.
    pub(crate) TypeConfig:
        D = Proposal,
        R = Answer,
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
pub(crate) type Raft = openraft::Raft<TypeConfig, state_machine::StateMachine>;

/// A command as its encoded bytes: cheap to clone for every follower, opaque to openraft.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Proposal(pub(crate) Bytes);

impl Proposal {
    /// Encodes a command once; every replica applies these very bytes.
    pub(crate) fn of(command: &Command) -> Proposal {
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

/// What applying an entry answered; `None` for entries that carry no command. It goes back to the
/// proposer on the same router and never crosses the wire: the serde impls exist because openraft
/// bounds its response type by them, and they say so instead of inventing an encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer(pub(crate) Option<Applied>);

const ANSWERS_STAY: &str = "an answer stays on the router that proposed; it has no encoding";

impl Serialize for Answer {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(ANSWERS_STAY))
    }
}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(serde::de::Error::custom(ANSWERS_STAY))
    }
}
