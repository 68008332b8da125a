//! Tests of the index, one file per property, and their shared helpers.
//!
//! `reference.rs` is the naive index for comparison; `fuzzing/` holds the fuzz targets. With the
//! feature `fuzzing` alone, only these two are built.
#![allow(clippy::unwrap_used)]
#![cfg_attr(not(test), allow(dead_code))]

#[cfg(test)]
mod announce;
#[cfg(test)]
mod block_groups;
#[cfg(test)]
mod codec;
#[cfg(test)]
mod components;
#[cfg(test)]
mod concurrent_snapshot;
#[cfg(test)]
mod determinism;
#[cfg(test)]
mod digest;
pub mod fuzzing;
#[cfg(test)]
mod generations;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod lookup;
#[cfg(test)]
mod membership;
#[cfg(test)]
mod operators;
#[cfg(test)]
mod random;
mod reference;
#[cfg(test)]
mod snapshot;
#[cfg(test)]
mod structure;
#[cfg(test)]
mod sweep;

use super::command::*;
use super::*;
use crate::id::{BlockHash, Generation, IdentityDigest, InstanceId, PinId, Tier};

/// First bytes of a one-piece snapshot in these tests.
const MAGIC: [u8; 8] = *b"kvfindex";

/// One-piece snapshots for tests: magic, format, then each chunk after its length.
impl Index {
    fn snapshot(&self) -> Vec<u8> {
        join_chunks(self.snapshot_chunks())
    }

    /// The chunks of a snapshot without concurrent commands.
    fn snapshot_chunks(&self) -> Vec<Vec<u8>> {
        let mut index = self.clone();
        let mut cursor = index.prepare_snapshot();
        index.begin_snapshot(&cursor);
        let mut chunks = vec![cursor.header()];
        while !cursor.is_fully_read() {
            chunks.extend(index.snapshot_chunk(&mut cursor).unwrap());
        }
        chunks.push(cursor.end());
        chunks
    }

    fn restore(bytes: &[u8], limits: IndexLimits) -> Result<Index, SnapshotError> {
        check_snapshot_format(u32::from_le_bytes(bytes[8..12].try_into().unwrap()))?;
        let (mut restore, mut rest) = (Restore::new(limits), &bytes[12..]);
        while let Some((length, chunk)) = rest.split_first_chunk() {
            let Some((chunk, left)) = chunk.split_at_checked(u32::from_le_bytes(*length) as usize) else {
                break;
            };
            restore.push(chunk)?;
            rest = left;
        }
        restore.finish()
    }
}

fn join_chunks(chunks: Vec<Vec<u8>>) -> Vec<u8> {
    let mut out = [&MAGIC[..], &SNAPSHOT_FORMAT.to_le_bytes()].concat();
    for chunk in chunks {
        out.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
        out.extend_from_slice(&chunk);
    }
    out
}

/// A hash without our layout, except for the common root. Numbers and hashes sort differently, so
/// that sorting is tested.
fn raw_block(number: u64) -> BlockHash {
    let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    BlockHash::from_words(mixed & !0xff | 7, number.swap_bytes())
}

/// The block with this number, at that position of one long chain.
fn block(number: u64) -> BlockHash {
    raw_block(number).in_chain(7, raw_block(number & !7), number as usize)
}

/// Another block for the same position and block group as this block.
fn sibling_block(number: u64) -> BlockHash {
    raw_block(number + 1_000_000).in_chain(7, raw_block(number & !7), number as usize)
}

/// The block with this number in a tree of chains, at its depth, in the group of its ancestor.
fn tree_block(number: u64, parent_of: impl Fn(u64) -> Option<u64>) -> BlockHash {
    let mut path: Vec<u64> = std::iter::successors(Some(number), |number| parent_of(*number)).collect();
    path.reverse();
    let position = path.len() - 1;
    raw_block(number).in_chain(7, raw_block(path[position & !7]), position)
}

fn blocks(numbers: impl IntoIterator<Item = u64>) -> Vec<BlockHash> {
    numbers.into_iter().map(block).collect()
}

fn record(node: u32) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        data_address: format!("10.0.0.{node}:7000"),
        control_address: format!("10.0.0.{node}:7001"),
        host: format!("h{node}"),
        instance: node.is_multiple_of(2).then_some(InstanceId(node)),
        identity: IdentityDigest([1; 16]),
        block_bytes: 4_096,
    }
}

fn stored(numbers: impl IntoIterator<Item = u64>, tier: Tier) -> Change {
    Change::Stored { parent: None, blocks: blocks(numbers), tier }
}

fn dropped(numbers: impl IntoIterator<Item = u64>, tier: Tier) -> Change {
    Change::Dropped { blocks: blocks(numbers), tier, cause: Default::default() }
}

fn moved(numbers: impl IntoIterator<Item = u64>, from: Tier, to: Tier) -> Change {
    Change::Moved { blocks: blocks(numbers), from, to }
}

fn announcement(node: u32, epoch: u64, seq: u64, changes: Vec<Change>) -> Announcement {
    Announcement { node: NodeId(node), epoch: Epoch(epoch), seq: Seq(seq), changes }
}

fn fence(node: u32, epoch: u64) -> Command {
    Command::Fence { node: NodeId(node), epoch: Epoch(epoch) }
}

fn leave(node: u32, epoch: u64) -> Command {
    Command::Leave { node: NodeId(node), epoch: Epoch(epoch) }
}

fn pin(number: u64, owner: &str, numbers: impl IntoIterator<Item = u64>) -> Pin {
    let (kind, ends_ms) = (PinKind::Hard, None);
    Pin { pin: PinId(number), owner: owner.to_owned(), blocks: blocks(numbers), kind, ends_ms }
}

/// A run as `(start, len, [(node, tier)])`.
type PlainRun = (u32, u32, Vec<(u32, Tier)>);

/// An index with helpers for announcements and lookups.
struct Fixture(Index);

/// The outcome of a completely applied announcement.
fn applied(next: u64) -> AnnounceOutcome {
    AnnounceOutcome::Applied { next: Seq(next), unlisted: 0 }
}

impl Fixture {
    /// Nodes 1 to `nodes`, each in epoch 1.
    fn with_nodes(nodes: u32) -> Self {
        let mut fixture = Self(Index::new(IndexLimits::default()));
        for node in 1..=nodes {
            assert_eq!(fixture.join(node), Applied::Joined(Epoch(1)));
        }
        fixture
    }

    fn join(&mut self, node: u32) -> Applied {
        self.0.apply(&Command::Join(record(node)))
    }

    fn announce(&mut self, node: u32, epoch: u64, seq: u64, changes: Vec<Change>) -> AnnounceOutcome {
        match self.0.apply(&Command::Announce(vec![announcement(node, epoch, seq, changes)])) {
            Applied::Announced(outcomes) => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    /// Announces under the current epoch and the expected number.
    fn announce_next(&mut self, node: u32, changes: Vec<Change>) {
        let (epoch, seq) = self.0.next_seq(NodeId(node)).unwrap();
        let outcome = self.announce(node, epoch.0, seq.0, changes);
        assert_eq!(outcome, applied(seq.0 + 1));
    }

    fn lookup(&self, numbers: impl IntoIterator<Item = u64>) -> PrefixMatch {
        self.0.longest_prefix(&blocks(numbers))
    }

    /// Runs as plain numbers.
    fn runs(&self, numbers: impl IntoIterator<Item = u64>) -> Vec<PlainRun> {
        let run = |run: &HolderRun| {
            let holders = run.holders.iter().map(|holder| (holder.node.0, holder.tier)).collect();
            (run.start_blocks, run.len_blocks, holders)
        };
        self.lookup(numbers).runs.iter().map(run).collect()
    }

    /// Length of the prefix that has holders.
    fn prefix_blocks(&self, numbers: impl IntoIterator<Item = u64>) -> u32 {
        self.lookup(numbers).union_blocks()
    }
}
