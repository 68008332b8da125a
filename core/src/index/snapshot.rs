//! The index as bytes and back: equal logical states give equal bytes, whatever lies behind them.
//!
//! Nodes, pins and settings come in the order of their numbers, blocks in the order of their hashes;
//! slots, incarnations and stale holds stay out. A snapshot ends with a BLAKE3 digest of everything
//! before it: bytes that are not whole are refused, never read in part. Not here: files, and the log
//! position a snapshot stands for (the router keeps both).

use smallvec::SmallVec;

use super::bytes::{CodecError, Reader, invalid, put_number};
use super::codec::{put_pin, put_record, read_pin, read_record};
use super::holders::{Held, TierSet};
use super::nodes::{DEPARTED_MAX, NodeState, SLOTS_MAX};
use super::{Index, IndexLimits};
use crate::id::{BlockHash, Epoch, GroupId, NodeId, Seq, TenantId};

/// First bytes of every snapshot.
const MAGIC: [u8; 8] = *b"kvfindex";
/// Format this release writes and reads.
const FORMAT: u32 = 1;
/// Magic, format, length of the body.
const HEAD_BYTES: usize = 8 + 4 + 8;
/// The digest at the end.
const DIGEST_BYTES: usize = 32;
/// Least bytes of one block: hash, count, node, tiers.
const BLOCK_BYTES_MIN: usize = 19;

/// Why bytes cannot be restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// The bytes are something else.
    #[error("not an index snapshot: it does not start with \"kvfindex\"")]
    NotASnapshot,
    /// Written by another release.
    #[error("snapshot format {got} is not known here, only {known}: use the release that wrote it")]
    Format {
        /// Number found.
        got: u32,
        /// Number this release writes and reads.
        known: u32,
    },
    /// Not all bytes are there, or more than all.
    #[error("snapshot has {got} bytes instead of {expected}: it was cut off or something was appended")]
    Torn {
        /// Bytes given.
        got: u64,
        /// Bytes that its head announces.
        expected: u64,
    },
    /// Some byte changed since it was written.
    #[error("snapshot is damaged: its digest does not match; take it from another router")]
    Corrupt,
    /// The digest matches, but the contents make no sense: a bug or a forgery.
    #[error("snapshot has invalid contents: {0}")]
    Invalid(#[from] CodecError),
}

impl Index {
    /// The logical state as bytes.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4_096 + 20 * self.table.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        self.put_small(&mut out);
        self.put_pins(&mut out);
        self.put_blocks(&mut out);
        let body_bytes = (out.len() - HEAD_BYTES) as u64;
        out[HEAD_BYTES - 8..HEAD_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
        let digest = blake3::hash(&out);
        out.extend_from_slice(digest.as_bytes());
        out
    }

    /// Sixteen bytes that are equal on two replicas exactly when their logical states are (up to
    /// collisions nobody meets by accident). Costs O(nodes + pinned blocks), not O(blocks): the part
    /// of each node's blocks is kept up to date by every change.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        let mut state = Vec::new();
        self.put_small(&mut state);
        self.put_pins(&mut state);
        for node in self.nodes.iter() {
            state.extend_from_slice(&node.digest_sum.to_le_bytes());
            state.extend_from_slice(&node.blocks.to_le_bytes());
        }
        let full = blake3::hash(&state);
        std::array::from_fn(|position| full.as_bytes()[position])
    }

    /// Reads what [`Index::snapshot`] wrote. Later commands are held to `limits`; what is in the
    /// snapshot is kept even above them.
    ///
    /// # Errors
    /// See [`SnapshotError`]. Nothing is reserved that the bytes given do not justify.
    pub fn restore(bytes: &[u8], limits: IndexLimits) -> Result<Index, SnapshotError> {
        let mut reader = Reader::new(checked_body(bytes)?);
        let mut index = Index::new(limits);
        index.read_small(&mut reader)?;
        index.read_pins(&mut reader)?;
        index.read_blocks(&mut reader)?;
        reader.finish()?;
        Ok(index)
    }

    /// Everything that is small: epochs, nodes, quotas, times to live.
    fn put_small(&self, out: &mut Vec<u8>) {
        put_number(out, self.nodes.epoch_floor.0);
        put_number(out, self.nodes.departed.len() as u64);
        for (node, epoch) in &self.nodes.departed {
            put_number(out, node.0.into());
            put_number(out, epoch.0);
        }
        put_number(out, self.nodes.len() as u64);
        for node in self.nodes.iter() {
            put_record(out, &node.record);
            put_number(out, node.epoch.0);
            out.push(u8::from(node.live));
            put_number(out, node.next_seq.0);
        }
        put_settings(out, self.directives.quotas.iter().map(|(key, value)| (key.0, *value)));
        put_settings(out, self.directives.ttls.iter().map(|(key, value)| (key.0, *value)));
    }

    fn read_small(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        self.nodes.epoch_floor = Epoch(reader.number("epoch floor")?);
        self.read_departed(reader)?;
        self.read_nodes(reader)?;
        let quotas = read_settings(reader, "quotas")?;
        self.directives.quotas = quotas.into_iter().map(|(key, value)| (TenantId(key), value)).collect();
        let ttls = read_settings(reader, "times to live")?;
        self.directives.ttls = ttls.into_iter().map(|(key, value)| (GroupId(key), value)).collect();
        Ok(())
    }

    fn read_departed(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let departed = read_settings(reader, "departed nodes")?;
        if departed.len() > DEPARTED_MAX {
            return Err(invalid("departed nodes", reader.at(), departed.len() as u64));
        }
        self.nodes.departed =
            departed.into_iter().map(|(node, epoch)| (NodeId(node), Epoch(epoch))).collect();
        Ok(())
    }

    fn read_nodes(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let at = reader.at();
        let count = reader.count("nodes", 16)?;
        if count > SLOTS_MAX as usize {
            return Err(invalid("nodes", at, count as u64));
        }
        let mut before = None;
        for _ in 0..count {
            let at = reader.at();
            let state = read_node(reader)?;
            let node = state.record.node;
            let strange = self.nodes.identity().is_some_and(|ours| ours != state.record.identity);
            if before >= Some(node) || strange || self.nodes.departed.contains_key(&node) {
                return Err(invalid("node", at, node.0.into()));
            }
            before = Some(node);
            self.nodes.insert(state);
        }
        Ok(())
    }

    fn put_pins(&self, out: &mut Vec<u8>) {
        put_number(out, self.directives.pins.len() as u64);
        for pin in self.directives.pins.values() {
            put_pin(out, pin);
        }
    }

    fn read_pins(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let mut before = None;
        for _ in 0..reader.count("pins", 3)? {
            let at = reader.at();
            let pin = read_pin(reader)?;
            if before >= Some(pin.pin) {
                return Err(invalid("pin", at, pin.pin.0));
            }
            before = Some(pin.pin);
            self.directives.insert_pin(pin);
        }
        Ok(())
    }

    /// Each block: its hash, how many nodes hold it, and for each the node's place in the list of
    /// nodes and the tiers.
    fn put_blocks(&self, out: &mut Vec<u8>) {
        let places = self.node_places();
        let incarnations = self.nodes.incarnations();
        let lives = |holds: &[Held]| holds.iter().any(|held| held.is_current(incarnations));
        let mut blocks: Vec<(BlockHash, &[Held])> =
            self.table.iter().filter(|(_, holds)| lives(holds)).collect();
        blocks.sort_unstable_by_key(|(hash, _)| *hash);
        put_number(out, blocks.len() as u64);
        for (hash, holds) in blocks {
            let mut holders: SmallVec<[(u32, TierSet); 8]> = holds
                .iter()
                .filter(|held| held.is_current(incarnations))
                .filter_map(|held| Some((*places.get(usize::from(held.slot))?, held.tiers)))
                .collect();
            holders.sort_unstable();
            out.extend_from_slice(&hash.0);
            put_number(out, holders.len() as u64);
            for (place, tiers) in holders {
                put_number(out, place.into());
                out.push(tiers.bits());
            }
        }
    }

    /// Place of each slot's node among all nodes by ascending id.
    fn node_places(&self) -> Vec<u32> {
        let mut places = vec![0; self.nodes.incarnations().len()];
        for (place, state) in (0u32..).zip(self.nodes.iter()) {
            if let Some(slot) = self.nodes.slot_of(state.record.node) {
                places[usize::from(slot)] = place;
            }
        }
        places
    }

    /// Nodes were restored in order, so that a place is a slot.
    fn read_blocks(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let count = reader.count("blocks", BLOCK_BYTES_MIN)?;
        self.table.reserve(count);
        let mut before = None;
        for _ in 0..count {
            let at = reader.at();
            let hash = reader.hash()?;
            if before >= Some(hash) {
                return Err(invalid("block", at, hash.0[0].into()));
            }
            before = Some(hash);
            self.read_holders(hash, reader)?;
        }
        Ok(())
    }

    fn read_holders(&mut self, hash: BlockHash, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let at = reader.at();
        let holders = reader.count("holders", 2)?;
        if holders == 0 {
            return Err(invalid("holders", at, 0));
        }
        let mut before = None;
        for _ in 0..holders {
            let at = reader.at();
            let place = reader.number_u32("holder")?;
            let bits = reader.byte()?;
            let slot = u16::try_from(place).ok().filter(|slot| before < Some(*slot));
            let slot = slot.filter(|&slot| self.nodes.state(slot).is_some_and(|state| state.live));
            let slot = slot.ok_or(invalid("holder", at, place.into()))?;
            let tiers = TierSet::from_bits(bits).filter(|tiers| !tiers.is_empty());
            let tiers = tiers.ok_or(invalid("tiers", at, bits.into()))?;
            before = Some(slot);
            self.change_blocks(slot, &[hash], (TierSet::NONE, tiers), u64::MAX);
        }
        Ok(())
    }
}

/// The body, when magic, format, length and digest are right.
fn checked_body(bytes: &[u8]) -> Result<&[u8], SnapshotError> {
    let got = bytes.len() as u64;
    let mut reader = Reader::new(bytes);
    let whole = HEAD_BYTES + DIGEST_BYTES;
    if reader.array() != Ok(MAGIC) {
        let cut_off = MAGIC.starts_with(bytes) && !bytes.is_empty();
        return Err(if cut_off {
            SnapshotError::Torn { got, expected: whole as u64 }
        } else {
            SnapshotError::NotASnapshot
        });
    }
    let torn = |_| SnapshotError::Torn { got, expected: whole as u64 };
    let format = u32::from_le_bytes(reader.array().map_err(torn)?);
    if format != FORMAT {
        return Err(SnapshotError::Format { got: format, known: FORMAT });
    }
    let body_bytes = u64::from_le_bytes(reader.array().map_err(torn)?);
    let expected = body_bytes.saturating_add(whole as u64);
    if expected != got {
        return Err(SnapshotError::Torn { got, expected });
    }
    let (written, digest) = bytes.split_at(bytes.len() - DIGEST_BYTES);
    if blake3::hash(written).as_bytes()[..] != *digest {
        return Err(SnapshotError::Corrupt);
    }
    Ok(&written[HEAD_BYTES..])
}

fn read_node(reader: &mut Reader<'_>) -> Result<NodeState, CodecError> {
    let record = read_record(reader)?;
    let epoch = Epoch(reader.number("epoch")?);
    let live = reader.flag("live")?;
    let next_seq = Seq(reader.number("sequence number")?);
    Ok(NodeState { live, next_seq, ..NodeState::new(record, epoch) })
}

fn put_settings(out: &mut Vec<u8>, settings: impl ExactSizeIterator<Item = (u32, u64)>) {
    put_number(out, settings.len() as u64);
    for (key, value) in settings {
        put_number(out, key.into());
        put_number(out, value);
    }
}

/// Pairs by strictly ascending key.
fn read_settings(reader: &mut Reader<'_>, what: &'static str) -> Result<Vec<(u32, u64)>, CodecError> {
    let mut settings: Vec<(u32, u64)> = Vec::new();
    for _ in 0..reader.count(what, 2)? {
        let at = reader.at();
        let key = reader.number_u32(what)?;
        if settings.last().is_some_and(|(before, _)| *before >= key) {
            return Err(invalid(what, at, key.into()));
        }
        settings.push((key, reader.number(what)?));
    }
    Ok(settings)
}
