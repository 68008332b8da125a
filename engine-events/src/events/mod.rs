//! KV events as engines publish them, in msgpack: blocks that an engine stored, blocks that it
//! removed, and a full clear.
//!
//! vLLM and SGLang send the same events in two encodings: positional arrays, and maps since vLLM
//! 0.24 and SGLang 0.5.20. Both add fields from release to release. The decoder therefore requires
//! no fixed encoding, key order or complete set of fields. It reads the fields it knows, skips the
//! rest, and counts events of unknown kinds. An invalid value (a text as a hash, a length beyond
//! the payload) is an error that names the field.
//!
//! Sequence numbers decide which messages count: `engine_events/feed.rs`. Not here: the transport
//! of messages (`zmtp.rs`), and the effect of events on the index.

use std::num::NonZeroU128;

use xxhash_rust::xxh3::xxh3_128;

pub use feed::{EventSequence, LiveOutcome, ReplayOutcome};
use reader::{MsgpackReader, ValueType};

mod feed;
mod reader;
#[cfg(test)]
mod tests;

/// Most events in one batch. A scheduler step stores or removes a few hundred.
pub const EVENTS_MAX: usize = 65_536;

/// The engine that sent the events. The order of trailing fields in positional arrays differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// A block hash as its engine computes it: a 64-bit number, signed or not, or bytes. It has a
/// meaning for this engine only.
///
/// `None` is zero, so an `Option` takes no more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(NonZeroU128);

impl EngineHash {
    /// Set if the hash was bytes, so that such a hash never equals a number.
    const BYTES: NonZeroU128 = bit(127);

    /// Set if the hash was a number, which occupies the lower 64 bits.
    const NUMBER: NonZeroU128 = bit(64);

    /// The hash of a number. A negative number is given by its bits; an engine uses only one sign
    /// convention.
    #[must_use]
    #[inline]
    pub fn from_u64(number: u64) -> EngineHash {
        EngineHash(EngineHash::NUMBER | u128::from(number))
    }

    /// The hash of bytes of any length.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> EngineHash {
        EngineHash(EngineHash::BYTES | xxh3_128(bytes))
    }
}

const fn bit(number: u32) -> NonZeroU128 {
    match NonZeroU128::new(1 << number) {
        Some(bit) => bit,
        None => NonZeroU128::MIN,
    }
}

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// GPU memory, or not stated, as in releases that know no other medium.
    Gpu,
    /// Host memory.
    Cpu,
    /// A disk or a remote store.
    Storage,
    /// A medium unknown to this release.
    Other,
}

impl Medium {
    fn parse(word: &[u8]) -> Medium {
        match word {
            b"GPU" | b"gpu" => Medium::Gpu,
            b"CPU" | b"CPU_PINNED" | b"cpu" => Medium::Cpu,
            b"STORAGE" | b"DISK" | b"EXTERNAL" => Medium::Storage,
            _ => Medium::Other,
        }
    }
}

/// One batch of events, in the engine's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// Time at which the engine made the batch, in seconds since 1970 by its clock.
    pub at_s: f64,
    /// The events.
    pub events: Vec<EngineEvent>,
    /// Data-parallel rank that sent the batch; `None` if not stated.
    pub rank: Option<u32>,
    /// Number of events of kinds unknown to this release.
    pub unknown_events: u32,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// The engine stored blocks.
    Stored(StoredBlocks),
    /// The engine removed blocks.
    Removed(RemovedBlocks),
    /// The engine removed all its blocks.
    Cleared,
}

/// Blocks that an engine stored, consecutive in one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// In prefix order.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the start of a prefix.
    pub parent: Option<EngineHash>,
    /// Tokens from the first block on. There may be more tokens than the blocks cover, if some
    /// blocks are left out. There are none if the blocks only moved to another medium.
    pub tokens: Tokens,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Where the blocks are.
    pub medium: Medium,
    /// The adapter's name, or its number if it has no name.
    pub adapter: Option<String>,
    /// Other inputs of the block hashes.
    pub extra: ExtraKeys,
    /// Group of layers that the blocks belong to; `None` if not stated.
    pub group: Option<u32>,
    /// Whether that group needs the whole prefix. True if the event does not state it.
    pub is_full_attention: bool,
}

/// Tokens of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Token ids.
    Ids(Vec<u32>),
    /// Something other than a list of ids, such as pairs. kvfleet cannot hash such blocks.
    Other,
}

/// Inputs of the engine's block hashes besides tokens and adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtraKeys {
    /// The request's cache salt.
    pub salt: Option<String>,
    /// Index of the first block with a hash that covers an input missing from this event. All
    /// blocks from there on are opaque too: an image, for example, enters the hash of its block and
    /// of every later one.
    pub first_opaque_block: Option<usize>,
}

/// Blocks that an engine removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedBlocks {
    /// In no particular order.
    pub hashes: Vec<EngineHash>,
    /// The medium that the blocks were removed from.
    pub medium: Medium,
    /// Group of layers that the blocks belong to; `None` if not stated.
    pub group: Option<u32>,
}

/// Why a payload is not a batch of events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The payload ends early, or a length in it points beyond its end.
    #[error("the payload ends in {field}")]
    Truncated {
        /// The field being read.
        field: &'static str,
    },
    /// A value has another type than expected.
    #[error("{field} is {got}: this release reads the events of vLLM and SGLang in arrays and in maps")]
    UnexpectedType {
        /// The field being read.
        field: &'static str,
        /// The type found.
        got: &'static str,
    },
    /// More events than any engine sends.
    #[error("{count} events in one batch, the limit is {EVENTS_MAX}")]
    TooMany {
        /// Events in the batch.
        count: usize,
    },
    /// A required field is missing.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
}

/// Decodes the payload of one message.
///
/// # Errors
/// If the payload is not a batch of events; the error names the field.
pub fn decode(payload: &[u8], dialect: Dialect) -> Result<EventBatch, EventError> {
    let mut reader = MsgpackReader::new(payload);
    let mut batch = EventBatch::default();
    let mut has_events = false;
    reader.fields("the batch", &["ts", "events", "data_parallel_rank"], |reader, name| {
        match name {
            "ts" => batch.at_s = reader.number("ts")?,
            "events" => {
                has_events = true;
                read_events(reader, dialect, &mut batch)?;
            }
            // SGLang's name for the same field.
            "data_parallel_rank" | "attn_dp_rank" => batch.rank = reader.optional_u32("the rank")?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if has_events { Ok(batch) } else { Err(EventError::Missing { field: "events" }) }
}

fn read_events(
    reader: &mut MsgpackReader<'_>,
    dialect: Dialect,
    batch: &mut EventBatch,
) -> Result<(), EventError> {
    let count = reader.array("events")?;
    if count > EVENTS_MAX {
        return Err(EventError::TooMany { count });
    }
    for _ in 0..count {
        match read_event(reader, dialect)? {
            Some(event) => batch.events.push(event),
            None => batch.unknown_events += 1,
        }
    }
    Ok(())
}

/// Positional fields after the event's name.
const STORED_VLLM: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const STORED_SGLANG: [&str; 9] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "cache_salt",
    "session_id",
    "lora_name",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// Reads one event; `None` if its kind is unknown. The fast path reads in place; only if it fails
/// is the event read again.
fn read_event(reader: &mut MsgpackReader<'_>, dialect: Dialect) -> Result<Option<EngineEvent>, EventError> {
    let before = reader.clone();
    match reader.peek_type("an event")? {
        ValueType::Array => read_positional(reader, dialect).or_else(|error| {
            // A truncated event stays a truncation error, whatever its kind.
            before.clone().take_value("an event")?;
            Err(error)
        }),
        ValueType::Map => {
            let partial = match PartialEvent::from_map(reader) {
                Ok(partial) => partial,
                Err(error) => {
                    *reader = before;
                    let whole = reader.take_value("an event")?;
                    // An event of an unknown kind may use a known field name for another type.
                    return if is_unknown(&mut whole.clone())? { Ok(None) } else { Err(error) };
                }
            };
            match partial.name {
                b"BlockStored" => partial.into_stored().map(Some),
                b"BlockRemoved" => partial.into_removed().map(Some),
                b"AllBlocksCleared" => Ok(Some(EngineEvent::Cleared)),
                b"" => Err(EventError::Missing { field: "the type of an event" }),
                _ => Ok(None),
            }
        }
        other => Err(EventError::UnexpectedType { field: "an event", got: other.name() }),
    }
}

/// Reads an event encoded as an array, its name first.
fn read_positional(
    reader: &mut MsgpackReader<'_>,
    dialect: Dialect,
) -> Result<Option<EngineEvent>, EventError> {
    let stored: &[&str] = match dialect {
        Dialect::Vllm => &STORED_VLLM,
        Dialect::Sglang => &STORED_SGLANG,
    };
    let fields = reader.array("an event")?;
    if fields == 0 {
        return Err(EventError::Missing { field: "the name of an event" });
    }
    let name = reader.text("the name of an event")?;
    let left = fields - 1;
    match name {
        b"BlockStored" => PartialEvent::from_array(reader, left, stored)?.into_stored().map(Some),
        b"BlockRemoved" => PartialEvent::from_array(reader, left, &REMOVED)?.into_removed().map(Some),
        _ => {
            for _ in 0..left {
                reader.skip()?;
            }
            Ok((name == b"AllBlocksCleared").then_some(EngineEvent::Cleared))
        }
    }
}

/// Whether an event encoded as a map is of an unknown kind. The `type` field may be anywhere in the
/// map.
fn is_unknown(reader: &mut MsgpackReader<'_>) -> Result<bool, EventError> {
    for _ in 0..reader.map("an event")? {
        if reader.text("a field's name")? == b"type" {
            let name = reader.text("the type of an event")?;
            return Ok(![&b"BlockStored"[..], b"BlockRemoved", b"AllBlocksCleared"].contains(&name));
        }
        reader.skip()?;
    }
    Ok(false)
}

/// The fields of an event read so far.
#[derive(Default)]
struct PartialEvent<'a> {
    name: &'a [u8],
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Option<Tokens>,
    block_tokens: Option<u32>,
    medium: Option<Medium>,
    lora_id: Option<u64>,
    lora_name: Option<String>,
    salt: Option<String>,
    /// Only the blocks that have extra keys.
    extra_keys: Vec<BlockExtraKeys<'a>>,
    group: Option<u32>,
    spec_kind: Option<&'a [u8]>,
    /// The hash of a block covers tokens after it.
    has_lookahead: bool,
}

/// Extra keys of one block as received: inputs of its hash besides its tokens.
#[derive(Default)]
struct BlockExtraKeys<'a> {
    /// Index of the block within the event.
    block: usize,
    /// Texts and adapter names. Mostly there is only one, so it needs no allocation.
    first: Option<&'a [u8]>,
    others: Vec<&'a [u8]>,
    /// There is a key that is neither a text nor an adapter.
    has_unknown_key: bool,
}

impl<'a> BlockExtraKeys<'a> {
    fn push(&mut self, text: &'a [u8]) {
        match self.first {
            None => self.first = Some(text),
            Some(_) => self.others.push(text),
        }
    }

    /// The keys without the adapter's name, which comes first in every block of a request with an
    /// adapter.
    fn without_adapter(&self, adapter: Option<&str>) -> impl Iterator<Item = &'a [u8]> {
        let is_adapter = |text: &&[u8]| adapter.is_some_and(|adapter| adapter.as_bytes() == *text);
        self.first.filter(|text| !is_adapter(text)).into_iter().chain(self.others.iter().copied())
    }
}

/// Kinds of layer groups that need every block of the prefix.
const FULL_ATTENTION_KINDS: [&[u8]; 3] = [b"full_attention", b"mla_attention", b"sink_full_attention"];

impl<'a> PartialEvent<'a> {
    fn from_array(
        reader: &mut MsgpackReader<'a>,
        count: usize,
        names: &[&'static str],
    ) -> Result<Self, EventError> {
        let mut partial = PartialEvent::default();
        for at in 0..count {
            match names.get(at) {
                Some(name) => partial.field(reader, name.as_bytes())?,
                None => reader.skip()?,
            }
        }
        Ok(partial)
    }

    fn from_map(reader: &mut MsgpackReader<'a>) -> Result<Self, EventError> {
        let mut partial = PartialEvent::default();
        for _ in 0..reader.map("an event")? {
            let name = reader.text("a field's name")?;
            partial.field(reader, name)?;
        }
        Ok(partial)
    }

    fn field(&mut self, reader: &mut MsgpackReader<'a>, name: &[u8]) -> Result<(), EventError> {
        match name {
            b"type" => self.name = reader.text("the type of an event")?,
            b"block_hashes" => self.hashes = Some(read_hashes(reader)?),
            b"parent_block_hash" => self.parent = read_optional_hash(reader)?,
            b"token_ids" => self.tokens = Some(read_tokens(reader)?),
            b"block_size" => self.block_tokens = reader.optional_u32("block_size")?,
            b"medium" => self.medium = reader.optional_text("medium")?.map(Medium::parse),
            b"lora_id" => self.lora_id = read_number_or_skip(reader)?,
            b"lora_name" => self.lora_name = reader.optional_string("lora_name")?,
            b"cache_salt" => self.salt = reader.optional_string("cache_salt")?,
            b"extra_keys" => self.extra_keys = read_extra_keys(reader)?,
            b"group_idx" => self.group = reader.optional_u32("group_idx")?,
            b"kv_cache_spec_kind" => self.spec_kind = reader.optional_text("kv_cache_spec_kind")?,
            b"lookahead_token_ids" => {
                self.has_lookahead = reader.peek_type("lookahead_token_ids")? != ValueType::Nil;
                reader.skip()?;
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn into_stored(self) -> Result<EngineEvent, EventError> {
        let adapter = self.lora_name.or_else(|| self.lora_id.map(|number| number.to_string()));
        let name = adapter.as_deref();
        let mut salt = self.salt;
        let mut first_opaque = None;
        for keys in &self.extra_keys {
            let mut besides = keys.without_adapter(name);
            match (besides.next(), besides.next()) {
                (None, _) if !keys.has_unknown_key => continue,
                // A salt comes with the first block of a prefix.
                (Some(text), None)
                    if keys.block == 0
                        && !keys.has_unknown_key
                        && salt.is_none()
                        && self.parent.is_none() =>
                {
                    salt = Some(String::from_utf8_lossy(text).into_owned());
                }
                _ => {
                    first_opaque = Some(keys.block);
                    break;
                }
            }
        }
        if self.has_lookahead {
            first_opaque = Some(0);
        }
        Ok(EngineEvent::Stored(StoredBlocks {
            hashes: self.hashes.ok_or(EventError::Missing { field: "block_hashes" })?,
            parent: self.parent,
            tokens: self.tokens.unwrap_or(Tokens::Ids(Vec::new())),
            block_tokens: self.block_tokens.ok_or(EventError::Missing { field: "block_size" })?,
            medium: self.medium.unwrap_or(Medium::Gpu),
            adapter,
            extra: ExtraKeys { salt, first_opaque_block: first_opaque },
            group: self.group,
            is_full_attention: self.spec_kind.is_none_or(|kind| FULL_ATTENTION_KINDS.contains(&kind)),
        }))
    }

    fn into_removed(self) -> Result<EngineEvent, EventError> {
        Ok(EngineEvent::Removed(RemovedBlocks {
            hashes: self.hashes.ok_or(EventError::Missing { field: "block_hashes" })?,
            medium: self.medium.unwrap_or(Medium::Gpu),
            group: self.group,
        }))
    }
}

fn read_hashes(reader: &mut MsgpackReader<'_>) -> Result<Vec<EngineHash>, EventError> {
    let count = reader.array("block_hashes")?;
    let mut hashes = Vec::with_capacity(reader.capped_count(count));
    for _ in 0..count {
        let hash = match reader.full_u64() {
            Some(number) => EngineHash::from_u64(number),
            None => read_hash(reader)?,
        };
        hashes.push(hash);
    }
    Ok(hashes)
}

fn read_hash(reader: &mut MsgpackReader<'_>) -> Result<EngineHash, EventError> {
    match reader.peek_type("a block hash")? {
        ValueType::Integer => Ok(EngineHash::from_u64(reader.int_bits("a block hash")?)),
        ValueType::Bytes => Ok(EngineHash::from_bytes(reader.bytes("a block hash")?)),
        other => Err(EventError::UnexpectedType { field: "a block hash", got: other.name() }),
    }
}

fn read_optional_hash(reader: &mut MsgpackReader<'_>) -> Result<Option<EngineHash>, EventError> {
    if reader.take_nil("parent_block_hash")? { Ok(None) } else { read_hash(reader).map(Some) }
}

fn read_tokens(reader: &mut MsgpackReader<'_>) -> Result<Tokens, EventError> {
    let before = reader.clone();
    let count = reader.array("token_ids")?;
    if let Some(ids) = reader.tokens(count) {
        return Ok(Tokens::Ids(ids));
    }
    *reader = before;
    reader.skip()?;
    Ok(Tokens::Other)
}

/// A number of any size; `None` if the value is absent or of another type. For optional fields.
fn read_number_or_skip(reader: &mut MsgpackReader<'_>) -> Result<Option<u64>, EventError> {
    match reader.peek_type("a number")? {
        ValueType::Integer => reader.int_bits("a number").map(Some),
        _ => reader.skip().map(|()| None),
    }
}

/// Extra keys, one entry per block: nil, or the further inputs of its hash.
fn read_extra_keys<'a>(reader: &mut MsgpackReader<'a>) -> Result<Vec<BlockExtraKeys<'a>>, EventError> {
    let mut blocks = Vec::new();
    if reader.take_nil("extra_keys")? {
        return Ok(blocks);
    }
    for at in 0..reader.array("extra_keys")? {
        if reader.take_nil("extra_keys")? {
            continue;
        }
        let mut keys = BlockExtraKeys { block: at, ..BlockExtraKeys::default() };
        for _ in 0..reader.array("extra keys of a block")? {
            match reader.peek_type("an extra key")? {
                ValueType::Text => keys.push(reader.text("an extra key")?),
                ValueType::Array => match read_adapter(&mut reader.take_value("an extra key")?) {
                    Some(name) => keys.push(name),
                    None => keys.has_unknown_key = true,
                },
                _ => {
                    reader.skip()?;
                    keys.has_unknown_key = true;
                }
            }
        }
        if keys.first.is_some() || keys.has_unknown_key {
            blocks.push(keys);
        }
    }
    Ok(blocks)
}

/// An adapter's name in the form of later releases: the word `lora`, the name, the path.
fn read_adapter<'a>(reader: &mut MsgpackReader<'a>) -> Option<&'a [u8]> {
    let is_adapter = reader.array("an adapter").ok()? == 3 && reader.text("an adapter").ok()? == b"lora";
    if is_adapter { reader.text("an adapter").ok() } else { None }
}
