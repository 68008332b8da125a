//! Encodes commands as log records and decodes them.
//!
//! A record is a format number, a tag and a body. An announce keeps its headers together and all
//! hashes in one column behind them. So a block costs its nineteen bytes and a run two or three
//! more. A run that continues the previous one does not repeat its parent. Not here: the meaning of
//! commands, and their limits ([`super::IndexLimits`]).

use super::bytes::{ByteReader, CodecError, invalid, put_option, put_text, put_varint, tier};
use super::command::{Announcement, Change, Command, DropCause, NodeRecord, Pin, PinKind};
use crate::id::{
    BlockHash, Epoch, Generation, HASH_BYTES, InstanceId, NodeId, PinId, Seq, TenantId, Tier, TtlGroupId,
};

/// Record format that this release writes and reads. 2: pins with a kind and an end. 3: drops with
/// a cause. 4: generations of weights. 5: block hashes of nineteen bytes.
const FORMAT: u8 = 5;
/// Longest record: four times an announce of the default limits.
pub const COMMAND_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Announcements and changes in one record. A header takes one or two bytes, but 64 bytes in
/// memory, so this bounds the memory that a small record can demand: 64 MiB.
const HEADERS_MAX: usize = 1024 * 1024;

const JOIN: u8 = 1;
const FENCE: u8 = 2;
const LEAVE: u8 = 3;
const ANNOUNCE: u8 = 4;
const PIN: u8 = 5;
const UNPIN: u8 = 6;
const SET_QUOTA: u8 = 7;
const SET_TTL: u8 = 8;
const ADMIT: u8 = 9;
const SET_GENERATION: u8 = 10;

/// Kind of a change: the lowest two bits of its header. Two bits of tier follow, then two bits of
/// target tier or drop cause.
const CLEARED: u8 = 0;
const STORED: u8 = 1;
const MOVED: u8 = 2;
const DROPPED: u8 = 3;
/// A `Stored` run with its parent in the column before its blocks.
const PARENT_GIVEN: u8 = 1 << 6;
/// A `Stored` run; its parent is the previous hash in the column.
const PARENT_BEFORE: u8 = 1 << 7;

impl Command {
    /// The command as one log record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![FORMAT];
        match self {
            Command::Join(record) => {
                out.push(JOIN);
                put_record(&mut out, record);
            }
            Command::Admit { record, epoch } => {
                out.push(ADMIT);
                put_record(&mut out, record);
                put_varint(&mut out, epoch.0);
            }
            Command::Fence { node, epoch } => put_node_epoch(&mut out, FENCE, *node, *epoch),
            Command::Leave { node, epoch } => put_node_epoch(&mut out, LEAVE, *node, *epoch),
            Command::Announce(batch) => {
                out.push(ANNOUNCE);
                put_announce(&mut out, batch);
            }
            Command::Pin(pin) => {
                out.push(PIN);
                put_pin(&mut out, pin);
            }
            Command::Unpin { pin, owner, ends_ms } => {
                out.push(UNPIN);
                put_varint(&mut out, pin.0);
                put_text(&mut out, owner);
                put_option(&mut out, *ends_ms);
            }
            Command::SetQuota { tenant, bytes } => put_setting(&mut out, SET_QUOTA, tenant.0, *bytes),
            Command::SetTtl { group, ttl_ms } => put_setting(&mut out, SET_TTL, group.0, *ttl_ms),
            Command::SetGeneration(to) => {
                out.push(SET_GENERATION);
                put_varint(&mut out, to.0.into());
            }
        }
        out
    }

    /// Decodes one log record.
    ///
    /// # Errors
    /// Refuses all bytes except the output of [`Command::encode`], with the position and the
    /// reason.
    pub fn decode(bytes: &[u8]) -> Result<Command, CodecError> {
        if bytes.len() > COMMAND_BYTES_MAX {
            return Err(CodecError::TooLong { got: bytes.len() as u64, limit: COMMAND_BYTES_MAX as u64 });
        }
        let mut reader = ByteReader::new(bytes);
        let format = reader.byte()?;
        if format != FORMAT {
            return Err(CodecError::Format { got: format.into(), known: FORMAT.into() });
        }
        let command = read_body(&mut reader)?;
        reader.finish()?;
        Ok(command)
    }
}

fn read_body(reader: &mut ByteReader<'_>) -> Result<Command, CodecError> {
    let at = reader.position();
    let tag = reader.byte()?;
    Ok(match tag {
        JOIN => Command::Join(read_record(reader)?),
        ADMIT => {
            let record = read_record(reader)?;
            Command::Admit { record, epoch: Epoch(reader.varint("epoch")?) }
        }
        FENCE => {
            let (node, epoch) = read_node_epoch(reader)?;
            Command::Fence { node, epoch }
        }
        LEAVE => {
            let (node, epoch) = read_node_epoch(reader)?;
            Command::Leave { node, epoch }
        }
        ANNOUNCE => Command::Announce(read_announce(reader)?),
        PIN => Command::Pin(read_pin(reader)?),
        UNPIN => Command::Unpin {
            pin: PinId(reader.varint("pin")?),
            owner: reader.text("owner")?,
            ends_ms: reader.option("end")?,
        },
        SET_QUOTA => Command::SetQuota {
            tenant: TenantId(reader.varint_u32("tenant")?),
            bytes: reader.option("quota")?,
        },
        SET_TTL => Command::SetTtl {
            group: TtlGroupId(reader.varint_u32("group")?),
            ttl_ms: reader.option("time to live")?,
        },
        SET_GENERATION => Command::SetGeneration(Generation(reader.varint_u32("generation")?)),
        other => return Err(invalid("command tag", at, other.into())),
    })
}

fn put_node_epoch(out: &mut Vec<u8>, tag: u8, node: NodeId, epoch: Epoch) {
    out.push(tag);
    put_varint(out, node.0.into());
    put_varint(out, epoch.0);
}

fn read_node_epoch(reader: &mut ByteReader<'_>) -> Result<(NodeId, Epoch), CodecError> {
    Ok((NodeId(reader.varint_u32("node")?), Epoch(reader.varint("epoch")?)))
}

fn put_setting(out: &mut Vec<u8>, tag: u8, key: u32, value: Option<u64>) {
    out.push(tag);
    put_varint(out, key.into());
    put_option(out, value);
}

pub(super) fn put_record(out: &mut Vec<u8>, record: &NodeRecord) {
    let NodeRecord { node, data_address, control_address, host, instance, identity, block_bytes } = record;
    put_varint(out, node.0.into());
    put_text(out, data_address);
    put_text(out, control_address);
    put_text(out, host);
    put_option(out, instance.map(|instance| instance.0.into()));
    out.extend_from_slice(&identity.0);
    put_varint(out, *block_bytes);
}

pub(super) fn read_record(reader: &mut ByteReader<'_>) -> Result<NodeRecord, CodecError> {
    Ok(NodeRecord {
        node: NodeId(reader.varint_u32("node")?),
        data_address: reader.text("data address")?,
        control_address: reader.text("control address")?,
        host: reader.text("host name")?,
        instance: reader.option_u32("instance")?.map(InstanceId),
        identity: reader.identity()?,
        block_bytes: reader.varint("block size")?,
    })
}

pub(super) fn put_pin(out: &mut Vec<u8>, pin: &Pin) {
    put_varint(out, pin.pin.0);
    put_text(out, &pin.owner);
    out.push(u8::from(pin.kind == PinKind::Soft));
    put_option(out, pin.ends_ms);
    put_varint(out, pin.blocks.len() as u64);
    put_hashes(out, &pin.blocks);
}

pub(super) fn read_pin(reader: &mut ByteReader<'_>) -> Result<Pin, CodecError> {
    let pin = PinId(reader.varint("pin")?);
    let owner = reader.text("owner")?;
    let kind = if reader.flag("soft")? { PinKind::Soft } else { PinKind::Hard };
    let ends_ms = reader.option("end")?;
    let count = reader.count("pinned blocks", HASH_BYTES)?;
    Ok(Pin { pin, owner, blocks: reader.hashes(count)?, kind, ends_ms })
}

fn put_hashes(out: &mut Vec<u8>, hashes: &[BlockHash]) {
    out.reserve(HASH_BYTES * hashes.len());
    for hash in hashes {
        out.extend_from_slice(&hash.0);
    }
}

/// The last hash of the column, if there is one.
fn last_hash(column: &[u8]) -> Option<BlockHash> {
    BlockHash::from_slice(column.last_chunk::<HASH_BYTES>()?)
}

fn put_announce(out: &mut Vec<u8>, batch: &[Announcement]) {
    let mut column = Vec::new();
    put_varint(out, batch.len() as u64);
    for one in batch {
        put_varint(out, one.node.0.into());
        put_varint(out, one.epoch.0);
        put_varint(out, one.seq.0);
        put_varint(out, one.changes.len() as u64);
        for change in &one.changes {
            put_change(out, &mut column, change);
        }
    }
    out.extend_from_slice(&column);
}

fn put_change(out: &mut Vec<u8>, column: &mut Vec<u8>, change: &Change) {
    let (head, blocks) = match change {
        Change::Cleared => return out.push(CLEARED),
        Change::Stored { parent, blocks, tier } => {
            let tier = (*tier as u8) << 2;
            let head = match parent {
                None => STORED | tier,
                Some(parent) if last_hash(column) == Some(*parent) => STORED | tier | PARENT_BEFORE,
                Some(parent) => {
                    column.extend_from_slice(&parent.0);
                    STORED | tier | PARENT_GIVEN
                }
            };
            (head, blocks)
        }
        Change::Moved { blocks, from, to } => (MOVED | (*from as u8) << 2 | (*to as u8) << 4, blocks),
        Change::Dropped { blocks, tier, cause } => {
            (DROPPED | (*tier as u8) << 2 | (*cause as u8) << 4, blocks)
        }
    };
    out.push(head);
    put_varint(out, blocks.len() as u64);
    put_hashes(column, blocks);
}

/// A change before its hashes are read.
struct ChangeHeader {
    at: usize,
    bits: u8,
    blocks: usize,
}

/// An announcement before its hashes are read.
struct AnnouncementHeader {
    node: NodeId,
    epoch: Epoch,
    seq: Seq,
    changes: Vec<ChangeHeader>,
}

fn read_announce(reader: &mut ByteReader<'_>) -> Result<Vec<Announcement>, CodecError> {
    let mut heads_left = HEADERS_MAX;
    let announcements = read_header_count(reader, "announcements", 4, &mut heads_left)?;
    let mut batch = Vec::new();
    for _ in 0..announcements {
        batch.push(read_announcement_header(reader, &mut heads_left)?);
    }
    let column = ByteReader::clone(reader);
    let mut hashes = HashColumn { bytes: column, before: None };
    let announcements = batch
        .into_iter()
        .map(|heads| hashes.read_announcement(heads))
        .collect::<Result<Vec<Announcement>, CodecError>>()?;
    *reader = hashes.bytes;
    Ok(announcements)
}

fn read_header_count(
    reader: &mut ByteReader<'_>,
    what: &'static str,
    bytes_each: usize,
    heads_left: &mut usize,
) -> Result<usize, CodecError> {
    let at = reader.position();
    let count = reader.count(what, bytes_each)?;
    *heads_left = heads_left.checked_sub(count).ok_or(invalid(what, at, count as u64))?;
    Ok(count)
}

fn read_announcement_header(
    reader: &mut ByteReader<'_>,
    heads_left: &mut usize,
) -> Result<AnnouncementHeader, CodecError> {
    let (node, epoch) = read_node_epoch(reader)?;
    let seq = Seq(reader.varint("sequence number")?);
    let changes = read_header_count(reader, "changes", 1, heads_left)?;
    let changes = (0..changes)
        .map(|_| read_change_header(reader))
        .collect::<Result<Vec<ChangeHeader>, CodecError>>()?;
    Ok(AnnouncementHeader { node, epoch, seq, changes })
}

fn read_change_header(reader: &mut ByteReader<'_>) -> Result<ChangeHeader, CodecError> {
    let at = reader.position();
    let bits = reader.byte()?;
    let blocks = if bits == CLEARED { 0 } else { reader.count("blocks", HASH_BYTES)? };
    Ok(ChangeHeader { at, bits, blocks })
}

/// The hashes of an announce, read in the order of its heads.
struct HashColumn<'a> {
    bytes: ByteReader<'a>,
    before: Option<BlockHash>,
}

impl HashColumn<'_> {
    fn read_announcement(&mut self, heads: AnnouncementHeader) -> Result<Announcement, CodecError> {
        let AnnouncementHeader { node, epoch, seq, changes } = heads;
        let changes =
            changes.iter().map(|head| self.change(head)).collect::<Result<Vec<Change>, CodecError>>()?;
        Ok(Announcement { node, epoch, seq, changes })
    }

    fn change(&mut self, head: &ChangeHeader) -> Result<Change, CodecError> {
        let ChangeHeader { at, bits, blocks } = *head;
        let first = tier(bits >> 2 & 3, at)?;
        let parent_bits = bits & (PARENT_GIVEN | PARENT_BEFORE);
        let plain = |used: u8| {
            if bits & !used == 0 { Ok(()) } else { Err(invalid("change", at, bits.into())) }
        };
        match bits & 3 {
            STORED => {
                plain(3 | 3 << 2 | parent_bits)?;
                let parent = self.parent(parent_bits, at)?;
                Ok(Change::Stored { parent, blocks: self.hashes(blocks)?, tier: first })
            }
            MOVED => {
                plain(3 | 3 << 2 | 3 << 4)?;
                let to: Tier = tier(bits >> 4 & 3, at)?;
                Ok(Change::Moved { blocks: self.hashes(blocks)?, from: first, to })
            }
            DROPPED => {
                plain(3 | 3 << 2 | 3 << 4)?;
                let cause = DropCause::from_number((bits >> 4 & 3).into()).unwrap_or_default();
                Ok(Change::Dropped { blocks: self.hashes(blocks)?, tier: first, cause })
            }
            _ => plain(0).map(|()| Change::Cleared),
        }
    }

    /// Refuses an explicit parent that equals the previous hash: the short form is the only valid
    /// one.
    fn parent(&mut self, bits: u8, at: usize) -> Result<Option<BlockHash>, CodecError> {
        let parent = match bits {
            0 => return Ok(None),
            PARENT_BEFORE => self.before,
            PARENT_GIVEN => Some(self.bytes.hash()?).filter(|parent| Some(*parent) != self.before),
            _ => None,
        };
        let parent = parent.ok_or(invalid("parent", at, bits.into()))?;
        self.before = Some(parent);
        Ok(Some(parent))
    }

    fn hashes(&mut self, count: usize) -> Result<Vec<BlockHash>, CodecError> {
        let hashes = self.bytes.hashes(count)?;
        self.before = hashes.last().copied().or(self.before);
        Ok(hashes)
    }
}
