//! Announcements, changes, join records and hash lists, to and from the wire.
//!
//! Not here: their effect on the index (`kv_core::index`), and their encoding in the log (its
//! codec).

use kv_core::id::{BlockHash, Epoch, IdentityDigest, InstanceId, NodeId, Seq, Tier};
use kv_core::index::command::{Announcement, Change, DropCause, NodeRecord};

use super::{ConvertError, HASH_BYTES};
use crate::pb;

/// Bytes of an identity, and of a node's digest.
const DIGEST_BYTES: usize = 16;

/// Reads a list of hashes, [`HASH_BYTES`] each.
///
/// # Errors
/// When the length is not a multiple of [`HASH_BYTES`]; the error names `field`.
pub fn hashes_from_bytes(field: &'static str, bytes: &[u8]) -> Result<Vec<BlockHash>, ConvertError> {
    let (whole, rest) = bytes.as_chunks::<HASH_BYTES>();
    if rest.is_empty() {
        Ok(whole.iter().map(|hash| BlockHash(*hash)).collect())
    } else {
        Err(ConvertError::HashList { field, bytes: bytes.len() })
    }
}

/// Writes a list of hashes, [`HASH_BYTES`] each.
#[must_use]
pub fn hashes_to_bytes(hashes: &[BlockHash]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(hashes.len() * HASH_BYTES);
    for hash in hashes {
        bytes.extend_from_slice(&hash.0);
    }
    bytes
}

/// Reads one hash.
///
/// # Errors
/// When the length is not [`HASH_BYTES`].
pub fn hash_field(field: &'static str, bytes: &[u8]) -> Result<BlockHash, ConvertError> {
    BlockHash::from_slice(bytes).ok_or_else(|| wrong_length(field, bytes, HASH_BYTES))
}

/// Reads an identity digest.
///
/// # Errors
/// When the length is not 16.
pub fn identity_field(field: &'static str, bytes: &[u8]) -> Result<IdentityDigest, ConvertError> {
    IdentityDigest::from_slice(bytes).ok_or_else(|| wrong_length(field, bytes, DIGEST_BYTES))
}

fn wrong_length(field: &'static str, bytes: &[u8], expected: usize) -> ConvertError {
    ConvertError::Digest { field, bytes: bytes.len(), expected }
}

/// Reads a node's digest over its announcements; empty bytes mean that the node does not know it.
///
/// # Errors
/// When the length is neither 0 nor 16.
pub fn node_digest_from_bytes(field: &'static str, bytes: &[u8]) -> Result<Option<u128>, ConvertError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let whole =
        <[u8; DIGEST_BYTES]>::try_from(bytes).map_err(|_| wrong_length(field, bytes, DIGEST_BYTES))?;
    Ok(Some(u128::from_le_bytes(whole)))
}

/// Writes a node's digest over its announcements.
#[must_use]
pub fn node_digest_to_bytes(digest: Option<u128>) -> Vec<u8> {
    digest.map(|digest| digest.to_le_bytes().to_vec()).unwrap_or_default()
}

/// Reads the hash before a run; empty bytes mean the start of a prefix.
///
/// # Errors
/// When the length is neither 0 nor [`HASH_BYTES`].
pub fn parent_from_bytes(field: &'static str, bytes: &[u8]) -> Result<Option<BlockHash>, ConvertError> {
    if bytes.is_empty() { Ok(None) } else { hash_field(field, bytes).map(Some) }
}

/// Writes the hash before a run; empty at the start of a prefix.
#[must_use]
pub fn parent_to_bytes(parent: Option<BlockHash>) -> Vec<u8> {
    parent.map(|hash| hash.0.to_vec()).unwrap_or_default()
}

/// Reads a tier number.
///
/// # Errors
/// When no tier has this number.
pub fn tier_field(field: &'static str, number: u32) -> Result<Tier, ConvertError> {
    u8::try_from(number).ok().and_then(Tier::from_u8).ok_or(ConvertError::Tier { field, number })
}

/// Reads one change.
///
/// # Errors
/// Names the field that is absent or malformed.
pub fn change_from_pb(change: &pb::Change) -> Result<Change, ConvertError> {
    use pb::change::Change as Wire;
    match change.change.as_ref().ok_or(ConvertError::Absent { field: "change" })? {
        Wire::Stored(stored) => Ok(Change::Stored {
            parent: parent_from_bytes("stored.parent", &stored.parent)?,
            blocks: hashes_from_bytes("stored.blocks", &stored.blocks)?,
            tier: tier_field("stored.tier", stored.tier)?,
        }),
        Wire::Moved(moved) => Ok(Change::Moved {
            blocks: hashes_from_bytes("moved.blocks", &moved.blocks)?,
            from: tier_field("moved.from", moved.from)?,
            to: tier_field("moved.to", moved.to)?,
        }),
        Wire::Dropped(dropped) => Ok(Change::Dropped {
            blocks: hashes_from_bytes("dropped.blocks", &dropped.blocks)?,
            tier: tier_field("dropped.tier", dropped.tier)?,
            // An unknown cause of a later release counts as the default.
            cause: DropCause::from_number(dropped.cause).unwrap_or_default(),
        }),
        Wire::Cleared(pb::Cleared {}) => Ok(Change::Cleared),
    }
}

/// Reads changes in order.
///
/// # Errors
/// Of the first change that does not convert.
pub fn changes_from_pb(changes: &[pb::Change]) -> Result<Vec<Change>, ConvertError> {
    changes.iter().map(change_from_pb).collect()
}

/// Writes one change.
#[must_use]
pub fn change_to_pb(change: &Change) -> pb::Change {
    use pb::change::Change as Wire;
    let wire = match change {
        Change::Stored { parent, blocks, tier } => Wire::Stored(pb::Stored {
            parent: parent_to_bytes(*parent),
            blocks: hashes_to_bytes(blocks),
            tier: *tier as u32,
        }),
        Change::Moved { blocks, from, to } => {
            Wire::Moved(pb::Moved { blocks: hashes_to_bytes(blocks), from: *from as u32, to: *to as u32 })
        }
        Change::Dropped { blocks, tier, cause } => Wire::Dropped(pb::Dropped {
            blocks: hashes_to_bytes(blocks),
            tier: *tier as u32,
            cause: *cause as u32,
        }),
        Change::Cleared => Wire::Cleared(pb::Cleared {}),
    };
    pb::Change { change: Some(wire) }
}

/// Reads the batch a node sent under its `node` and `epoch`.
///
/// # Errors
/// Names the field that is absent or malformed.
pub fn announcement_from_pb(node: u32, epoch: u64, batch: &pb::Batch) -> Result<Announcement, ConvertError> {
    Ok(Announcement {
        node: NodeId(node),
        epoch: Epoch(epoch),
        seq: Seq(batch.seq),
        changes: changes_from_pb(&batch.changes)?,
    })
}

/// Writes an announcement as a message of the announce stream. The caller sets the group.
#[must_use]
pub fn announcement_to_pb(announcement: &Announcement) -> pb::AnnounceRequest {
    let batch = pb::Batch {
        seq: announcement.seq.0,
        changes: announcement.changes.iter().map(change_to_pb).collect(),
        digest: Vec::new(),
    };
    pb::AnnounceRequest {
        node: announcement.node.0,
        epoch: announcement.epoch.0,
        group: 0,
        body: Some(pb::announce_request::Body::Batch(batch)),
    }
}

/// Reads the record of a joining node.
///
/// # Errors
/// When an address is absent or the identity is not 16 bytes.
pub fn node_record_from_pb(join: &pb::JoinRequest) -> Result<NodeRecord, ConvertError> {
    Ok(NodeRecord {
        node: NodeId(join.node),
        data_address: present("join.data_address", &join.data_address)?,
        control_address: present("join.control_address", &join.control_address)?,
        host: join.host.clone(),
        instance: join.has_instance.then_some(InstanceId(join.instance)),
        identity: identity_field("join.identity", &join.identity)?,
        block_bytes: join.block_bytes,
    })
}

/// Writes the record of a joining node.
#[must_use]
pub fn join_to_pb(record: &NodeRecord) -> pb::JoinRequest {
    pb::JoinRequest {
        node: record.node.0,
        data_address: record.data_address.clone(),
        control_address: record.control_address.clone(),
        host: record.host.clone(),
        instance: record.instance.unwrap_or_default().0,
        has_instance: record.instance.is_some(),
        identity: record.identity.0.to_vec(),
        block_bytes: record.block_bytes,
        // The record holds only the digest of the manifest.
        manifest: None,
    }
}

fn present(field: &'static str, text: &str) -> Result<String, ConvertError> {
    if text.is_empty() { Err(ConvertError::Absent { field }) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn hashes() -> impl Strategy<Value = Vec<BlockHash>> {
        prop::collection::vec(any::<[u8; HASH_BYTES]>().prop_map(BlockHash), 0..20)
    }

    fn tier() -> impl Strategy<Value = Tier> {
        prop::sample::select(Tier::ALL.to_vec())
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (prop::option::of(any::<[u8; HASH_BYTES]>().prop_map(BlockHash)), hashes(), tier())
                .prop_map(|(parent, blocks, tier)| Change::Stored { parent, blocks, tier }),
            (hashes(), tier(), tier()).prop_map(|(blocks, from, to)| Change::Moved { blocks, from, to }),
            (hashes(), tier(), prop::sample::select(DropCause::ALL.to_vec()))
                .prop_map(|(blocks, tier, cause)| Change::Dropped { blocks, tier, cause }),
            Just(Change::Cleared),
        ]
    }

    proptest! {
        #[test]
        fn announcements_round_trip(
            changes in prop::collection::vec(change(), 0..6), node: u32, epoch: u64, seq: u64
        ) {
            let announcement =
                Announcement { node: NodeId(node), epoch: Epoch(epoch), seq: Seq(seq), changes };
            let wire = announcement_to_pb(&announcement);
            let Some(pb::announce_request::Body::Batch(batch)) = &wire.body else { panic!("no batch") };
            prop_assert_eq!(announcement_from_pb(wire.node, wire.epoch, batch).unwrap(), announcement);
        }

        #[test]
        fn hash_lists_refuse_other_lengths(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            match hashes_from_bytes("f", &bytes) {
                Ok(hashes) => prop_assert_eq!(hashes_to_bytes(&hashes), bytes),
                Err(error) => {
                    prop_assert_eq!(error, ConvertError::HashList { field: "f", bytes: bytes.len() });
                    prop_assert!(bytes.len() % HASH_BYTES != 0);
                }
            }
        }
    }

    #[test]
    fn errors_name_the_field() {
        let bad = pb::Stored { parent: vec![1], blocks: vec![], tier: 0 };
        let bad = pb::Change { change: Some(pb::change::Change::Stored(bad)) };
        assert_eq!(change_from_pb(&bad).unwrap_err().to_string(), "stored.parent has 1 bytes, expected 19");
        let bad = pb::Dropped { blocks: vec![], tier: 7, cause: 0 };
        let bad = pb::Change { change: Some(pb::change::Change::Dropped(bad)) };
        assert!(change_from_pb(&bad).unwrap_err().to_string().starts_with("dropped.tier is 7"));
        assert_eq!(
            change_from_pb(&pb::Change { change: None }),
            Err(ConvertError::Absent { field: "change" })
        );
    }

    #[test]
    fn node_records_round_trip() {
        let mut record = NodeRecord {
            node: NodeId(3),
            data_address: "h:1".into(),
            control_address: "h:2".into(),
            host: "h".into(),
            instance: Some(InstanceId(0)),
            identity: IdentityDigest([5; 16]),
            block_bytes: 4096,
        };
        assert_eq!(node_record_from_pb(&join_to_pb(&record)).unwrap(), record);
        record.instance = None;
        assert_eq!(node_record_from_pb(&join_to_pb(&record)).unwrap(), record);
        record.data_address.clear();
        assert_eq!(
            node_record_from_pb(&join_to_pb(&record)),
            Err(ConvertError::Absent { field: "join.data_address" })
        );
    }
}
