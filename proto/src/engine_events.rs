//! KV events as engines publish them: which blocks an engine stored, removed, or dropped altogether, in msgpack.
//!
//! vLLM and SGLang send the same events in two shapes, positional arrays before and maps since vLLM 0.24 and SGLang 0.5.20, and add fields
//! from release to release. So nothing here asks for one shape, one order of keys or a complete set of them: what is known is taken,
//! everything else is passed over, and an event of an unknown kind is counted. What a value must not be (a text for a hash, a length beyond
//! the payload) is an error that names the field.
//!
//! Which messages count, by their numbers, is in `engine_events/feed.rs`. Not here: what carries them (ZMQ), and what becomes of the blocks.

use std::num::NonZeroU128;

use xxhash_rust::xxh3::xxh3_128;

pub use feed::{Feed, Heard, Replayed};
use reader::{Kind, Reader};

mod feed;
mod reader;
#[cfg(test)]
mod tests;

/// Most events of one batch: a scheduler step stores or removes some hundred.
pub const EVENTS_MAX: usize = 65_536;

/// Whose events they are: the order of trailing fields in positional arrays differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// A block's hash as its engine makes it: a number of 64 bits, signed or not, or bytes. It means something to this engine only.
///
/// None is zero, so that where there may be none it takes no more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(NonZeroU128);

impl EngineHash {
    /// Set where the hash was bytes, so that none is taken for a number.
    const BYTES: NonZeroU128 = bit(127);

    /// Set where it was a number, all of which is below.
    const NUMBER: NonZeroU128 = bit(64);

    /// A number; one that is negative by its bits, as an engine has one kind of them only.
    #[must_use]
    #[inline]
    pub fn of_number(number: u64) -> EngineHash {
        EngineHash(EngineHash::NUMBER | u128::from(number))
    }

    /// Bytes, of any length.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> EngineHash {
        EngineHash(EngineHash::BYTES | xxh3_128(bytes))
    }
}

const fn bit(number: u32) -> NonZeroU128 {
    match NonZeroU128::new(1 << number) {
        Some(bit) => bit,
        None => NonZeroU128::MIN,
    }
}

/// Where an engine has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// GPU memory, or not said, as releases that know no other.
    Gpu,
    /// Memory of the host.
    Cpu,
    /// A disk, or a store elsewhere.
    Storage,
    /// A word that this release does not know.
    Other,
}

impl Medium {
    fn of(word: &[u8]) -> Medium {
        match word {
            b"GPU" | b"gpu" => Medium::Gpu,
            b"CPU" | b"CPU_PINNED" | b"cpu" => Medium::Cpu,
            b"STORAGE" | b"DISK" | b"EXTERNAL" => Medium::Storage,
            _ => Medium::Other,
        }
    }
}

/// What a batch says, in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// When the engine made it, in seconds since 1970 by its clock.
    pub at_s: f64,
    /// The events.
    pub events: Vec<EngineEvent>,
    /// Which data-parallel rank it is of.
    pub rank: Option<u32>,
    /// Events of kinds that this release does not know.
    pub unknown_events: u32,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks are there.
    Stored(Stored),
    /// Blocks are not there any more.
    Removed(Removed),
    /// Nothing is.
    Cleared,
}

/// Blocks that an engine stored, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// In prefix order.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; nothing at the start of a prefix.
    pub parent: Option<EngineHash>,
    /// Tokens from the first block on. There may be more than those of the blocks, where some of them are left out, and none where
    /// blocks only went to another medium.
    pub tokens: Tokens,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Where they are.
    pub medium: Medium,
    /// The adapter's name, or its number where it has no name.
    pub adapter: Option<String>,
    /// What else their hashes cover.
    pub extra: Extra,
    /// Which group of layers they are of.
    pub group: Option<u32>,
    /// Whether that group needs the whole prefix; so it is where nothing is said.
    pub is_full_attention: bool,
}

/// Tokens of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Their ids.
    Ids(Vec<u32>),
    /// Something that is no list of ids, such as pairs of them: such blocks have no hash of ours.
    Other,
}

/// What the hashes of blocks cover besides tokens and adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// The request's salt.
    pub salt: Option<String>,
    /// Of the blocks, those before this one cover nothing that is not told here. An image in a prompt, say, is in the hash of its block
    /// and of all behind it.
    pub plain_blocks: Option<usize>,
}

/// Blocks that an engine removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// In no order.
    pub hashes: Vec<EngineHash>,
    /// From where.
    pub medium: Medium,
    /// Which group of layers they are of.
    pub group: Option<u32>,
}

/// Why a payload is no batch of events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// It ends, or a length in it points behind its end.
    #[error("the payload ends in {field}")]
    Cut {
        /// In what.
        field: &'static str,
    },
    /// Something else stands there.
    #[error("{field} is {got}: this release reads the events of vLLM and SGLang in arrays and in maps")]
    Kind {
        /// What was to be read.
        field: &'static str,
        /// What is there.
        got: &'static str,
    },
    /// There is more than anybody sends.
    #[error("{count} events in one batch, the limit is {EVENTS_MAX}")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// Something is missing.
    #[error("{field} is missing")]
    Missing {
        /// What.
        field: &'static str,
    },
}

/// Reads the payload of one message.
///
/// # Errors
/// When it is no batch of events, with what is wrong with it.
pub fn decode(payload: &[u8], dialect: Dialect) -> Result<EventBatch, EventError> {
    let mut reader = Reader::new(payload);
    let mut batch = EventBatch::default();
    let mut has_events = false;
    reader.fields("the batch", &["ts", "events", "data_parallel_rank"], |reader, name| {
        match name {
            "ts" => batch.at_s = reader.number("ts")?,
            "events" => {
                has_events = true;
                read_events(reader, dialect, &mut batch)?;
            }
            // SGLang's name for the same.
            "data_parallel_rank" | "attn_dp_rank" => batch.rank = reader.optional_u32("the rank")?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if has_events { Ok(batch) } else { Err(EventError::Missing { field: "events" }) }
}

fn read_events(reader: &mut Reader<'_>, dialect: Dialect, batch: &mut EventBatch) -> Result<(), EventError> {
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

/// Positional fields behind the name of the event.
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

/// One event; nothing of a kind that is not known. It is read where it stands, and only one that cannot be read so is looked at again.
fn read_event(reader: &mut Reader<'_>, dialect: Dialect) -> Result<Option<EngineEvent>, EventError> {
    let before = reader.clone();
    match reader.kind("an event")? {
        Kind::Array => read_positional(reader, dialect).or_else(|error| {
            // One that is torn is nothing else besides.
            before.clone().whole("an event")?;
            Err(error)
        }),
        Kind::Map => {
            let partial = match Partial::named(reader) {
                Ok(partial) => partial,
                Err(error) => {
                    *reader = before;
                    let whole = reader.whole("an event")?;
                    // What another kind has under a name that we know may be something else.
                    return if is_unknown(&mut whole.clone())? { Ok(None) } else { Err(error) };
                }
            };
            match partial.name {
                b"BlockStored" => partial.stored().map(Some),
                b"BlockRemoved" => partial.removed().map(Some),
                b"AllBlocksCleared" => Ok(Some(EngineEvent::Cleared)),
                b"" => Err(EventError::Missing { field: "the type of an event" }),
                _ => Ok(None),
            }
        }
        other => Err(EventError::Kind { field: "an event", got: other.name() }),
    }
}

/// An event in an array, its name first.
fn read_positional(reader: &mut Reader<'_>, dialect: Dialect) -> Result<Option<EngineEvent>, EventError> {
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
        b"BlockStored" => Partial::positional(reader, left, stored)?.stored().map(Some),
        b"BlockRemoved" => Partial::positional(reader, left, &REMOVED)?.removed().map(Some),
        _ => {
            for _ in 0..left {
                reader.skip()?;
            }
            Ok((name == b"AllBlocksCleared").then_some(EngineEvent::Cleared))
        }
    }
}

/// Whether an event in a map is of a kind that is not known. Its name may stand anywhere.
fn is_unknown(reader: &mut Reader<'_>) -> Result<bool, EventError> {
    for _ in 0..reader.map("an event")? {
        if reader.text("a field's name")? == b"type" {
            let name = reader.text("the type of an event")?;
            return Ok(![&b"BlockStored"[..], b"BlockRemoved", b"AllBlocksCleared"].contains(&name));
        }
        reader.skip()?;
    }
    Ok(false)
}

/// What was read of an event so far.
#[derive(Default)]
struct Partial<'a> {
    name: &'a [u8],
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Option<Tokens>,
    block_tokens: Option<u32>,
    medium: Option<Medium>,
    lora_id: Option<u64>,
    lora_name: Option<String>,
    salt: Option<String>,
    /// Of the blocks that have any.
    extra_keys: Vec<BlockKeys<'a>>,
    group: Option<u32>,
    spec_kind: Option<&'a [u8]>,
    /// Tokens behind a block are in its hash.
    looks_ahead: bool,
}

/// What the hash of one block covers besides its tokens, as it came.
#[derive(Default)]
struct BlockKeys<'a> {
    /// Which block of the event it is.
    at: usize,
    /// Texts, and the names of adapters: mostly there is one.
    first: Option<&'a [u8]>,
    others: Vec<&'a [u8]>,
    /// There is something else.
    is_odd: bool,
}

impl<'a> BlockKeys<'a> {
    fn push(&mut self, text: &'a [u8]) {
        match self.first {
            None => self.first = Some(text),
            Some(_) => self.others.push(text),
        }
    }

    /// Without the adapter's name, which stands first in every block of a request with one.
    fn besides(&self, adapter: Option<&str>) -> impl Iterator<Item = &'a [u8]> {
        let is_adapter = |text: &&[u8]| adapter.is_some_and(|adapter| adapter.as_bytes() == *text);
        self.first.filter(|text| !is_adapter(text)).into_iter().chain(self.others.iter().copied())
    }
}

/// Groups of layers whose blocks need the whole prefix before them.
const NEED_ALL: [&[u8]; 3] = [b"full_attention", b"mla_attention", b"sink_full_attention"];

impl<'a> Partial<'a> {
    fn positional(reader: &mut Reader<'a>, count: usize, names: &[&'static str]) -> Result<Self, EventError> {
        let mut partial = Partial::default();
        for at in 0..count {
            match names.get(at) {
                Some(name) => partial.field(reader, name.as_bytes())?,
                None => reader.skip()?,
            }
        }
        Ok(partial)
    }

    fn named(reader: &mut Reader<'a>) -> Result<Self, EventError> {
        let mut partial = Partial::default();
        for _ in 0..reader.map("an event")? {
            let name = reader.text("a field's name")?;
            partial.field(reader, name)?;
        }
        Ok(partial)
    }

    fn field(&mut self, reader: &mut Reader<'a>, name: &[u8]) -> Result<(), EventError> {
        match name {
            b"type" => self.name = reader.text("the type of an event")?,
            b"block_hashes" => self.hashes = Some(read_hashes(reader)?),
            b"parent_block_hash" => self.parent = read_optional_hash(reader)?,
            b"token_ids" => self.tokens = Some(read_tokens(reader)?),
            b"block_size" => self.block_tokens = reader.optional_u32("block_size")?,
            b"medium" => self.medium = reader.optional_text("medium")?.map(Medium::of),
            b"lora_id" => self.lora_id = read_number_or_pass(reader)?,
            b"lora_name" => self.lora_name = reader.optional_string("lora_name")?,
            b"cache_salt" => self.salt = reader.optional_string("cache_salt")?,
            b"extra_keys" => self.extra_keys = read_extra_keys(reader)?,
            b"group_idx" => self.group = reader.optional_u32("group_idx")?,
            b"kv_cache_spec_kind" => self.spec_kind = reader.optional_text("kv_cache_spec_kind")?,
            b"lookahead_token_ids" => {
                self.looks_ahead = reader.kind("lookahead_token_ids")? != Kind::Nil;
                reader.skip()?;
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn stored(self) -> Result<EngineEvent, EventError> {
        let adapter = self.lora_name.or_else(|| self.lora_id.map(|number| number.to_string()));
        let name = adapter.as_deref();
        let mut salt = self.salt;
        let mut odd = None;
        for keys in &self.extra_keys {
            let mut besides = keys.besides(name);
            match (besides.next(), besides.next()) {
                (None, _) if !keys.is_odd => continue,
                // A salt is said with the first block of a prefix.
                (Some(text), None)
                    if keys.at == 0 && !keys.is_odd && salt.is_none() && self.parent.is_none() =>
                {
                    salt = Some(String::from_utf8_lossy(text).into_owned());
                }
                _ => {
                    odd = Some(keys.at);
                    break;
                }
            }
        }
        if self.looks_ahead {
            odd = Some(0);
        }
        Ok(EngineEvent::Stored(Stored {
            hashes: self.hashes.ok_or(EventError::Missing { field: "block_hashes" })?,
            parent: self.parent,
            tokens: self.tokens.unwrap_or(Tokens::Ids(Vec::new())),
            block_tokens: self.block_tokens.ok_or(EventError::Missing { field: "block_size" })?,
            medium: self.medium.unwrap_or(Medium::Gpu),
            adapter,
            extra: Extra { salt, plain_blocks: odd },
            group: self.group,
            is_full_attention: self.spec_kind.is_none_or(|kind| NEED_ALL.contains(&kind)),
        }))
    }

    fn removed(self) -> Result<EngineEvent, EventError> {
        Ok(EngineEvent::Removed(Removed {
            hashes: self.hashes.ok_or(EventError::Missing { field: "block_hashes" })?,
            medium: self.medium.unwrap_or(Medium::Gpu),
            group: self.group,
        }))
    }
}

fn read_hashes(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>, EventError> {
    let count = reader.array("block_hashes")?;
    let mut hashes = Vec::with_capacity(reader.plausible(count));
    for _ in 0..count {
        let hash = match reader.long() {
            Some(number) => EngineHash::of_number(number),
            None => read_hash(reader)?,
        };
        hashes.push(hash);
    }
    Ok(hashes)
}

fn read_hash(reader: &mut Reader<'_>) -> Result<EngineHash, EventError> {
    match reader.kind("a block hash")? {
        Kind::Integer => Ok(EngineHash::of_number(reader.bits("a block hash")?)),
        Kind::Bytes => Ok(EngineHash::of_bytes(reader.bytes("a block hash")?)),
        other => Err(EventError::Kind { field: "a block hash", got: other.name() }),
    }
}

fn read_optional_hash(reader: &mut Reader<'_>) -> Result<Option<EngineHash>, EventError> {
    if reader.nil("parent_block_hash")? { Ok(None) } else { read_hash(reader).map(Some) }
}

fn read_tokens(reader: &mut Reader<'_>) -> Result<Tokens, EventError> {
    let before = reader.clone();
    let count = reader.array("token_ids")?;
    if let Some(ids) = reader.tokens(count) {
        return Ok(Tokens::Ids(ids));
    }
    *reader = before;
    reader.skip()?;
    Ok(Tokens::Other)
}

/// A number of any size; nothing where there is none, or something else. For fields that decide nothing by themselves.
fn read_number_or_pass(reader: &mut Reader<'_>) -> Result<Option<u64>, EventError> {
    match reader.kind("a number")? {
        Kind::Integer => reader.bits("a number").map(Some),
        _ => reader.skip().map(|()| None),
    }
}

/// One entry for each block: nothing, or what its hash covers besides.
fn read_extra_keys<'a>(reader: &mut Reader<'a>) -> Result<Vec<BlockKeys<'a>>, EventError> {
    let mut blocks = Vec::new();
    if reader.nil("extra_keys")? {
        return Ok(blocks);
    }
    for at in 0..reader.array("extra_keys")? {
        if reader.nil("extra_keys")? {
            continue;
        }
        let mut keys = BlockKeys { at, ..BlockKeys::default() };
        for _ in 0..reader.array("extra keys of a block")? {
            match reader.kind("an extra key")? {
                Kind::Text => keys.push(reader.text("an extra key")?),
                Kind::Array => match read_adapter(&mut reader.whole("an extra key")?) {
                    Some(name) => keys.push(name),
                    None => keys.is_odd = true,
                },
                _ => {
                    reader.skip()?;
                    keys.is_odd = true;
                }
            }
        }
        if keys.first.is_some() || keys.is_odd {
            blocks.push(keys);
        }
    }
    Ok(blocks)
}

/// The name of an adapter, as later releases say it: with the word `lora` before and its path behind.
fn read_adapter<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let is_adapter = reader.array("an adapter").ok()? == 3 && reader.text("an adapter").ok()? == b"lora";
    if is_adapter { reader.text("an adapter").ok() } else { None }
}
