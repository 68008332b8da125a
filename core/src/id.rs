//! Newtypes for every identity and amount in the system.
//!
//! Not here: how an identity is made (hashes in [`crate::prefix`], epochs in [`crate::index`]) and
//! its wire form (`kvfleet-proto`).

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, "{}"), self.0)
            }
        }
    };
}

number!(
    /// A storage node: one process that keeps blocks. Chosen by the operator, unique in a cluster.
    NodeId(u32), "node-");
number!(
    /// An instance: one process that runs the model.
    InstanceId(u32), "instance-");
number!(
    /// A router: one voter of the replicated index.
    RouterId(u64), "router-");
number!(
    /// A tenant. Tenant 0 is the default tenant of a cluster that does not separate tenants.
    TenantId(u32), "tenant-");
number!(
    /// Number that a node gets each time it joins; announcements of an older epoch are ignored. The
    /// index assigns it: strictly growing per node, from 1.
    Epoch(u64), "epoch-");
number!(
    /// Position of an announce batch in the stream of one (node, epoch); starts at 1, no gaps.
    Seq(u64), "seq-");
number!(
    /// A time-limited promise that blocks stay, given to a reader or to a save in flight.
    LeaseId(u64), "lease-");
number!(
    /// The node's own name for a caller, unique per caller.
    CallerId(u64), "caller-");
number!(
    /// A shared lease on the bytes of one block, which another process may read in place. Assigned
    /// by the grant server of one connection: strictly growing from 1, never reused.
    GrantId(u64), "loan-");
number!(
    /// A hold without a time limit, with a named owner, ended by release.
    PinId(u64), "pin-");
number!(
    /// Generation of the weights that blocks were computed with, counted from 0 by the operator
    /// that loads them. Part of the [`IdentityDigest`] that a request or a frame names; not part of
    /// any block hash.
    Generation(u32), "generation-");
number!(
    /// A group of prefixes that share one time to live: all those with the same root tag in the
    /// first block. Below [`TTL_GROUPS`].
    TtlGroupId(u32), "group-");
number!(
    /// A request as the frontend counts it; names it in traces, reports and miss reasons.
    RequestId(u64), "request-");
number!(
    /// A point in time in microseconds. The caller picks the origin; only differences have a
    /// meaning.
    Timestamp(u64), "t+");

impl Timestamp {
    /// Time from `earlier` to `self`; zero when `earlier` is later (clocks may step back).
    #[must_use]
    pub fn since(self, earlier: Timestamp) -> std::time::Duration {
        std::time::Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// The point `span` after this one, saturating at the end of time.
    #[must_use]
    pub fn after(self, span: std::time::Duration) -> Timestamp {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        Timestamp(self.0.saturating_add(micros))
    }
}

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident, $bytes:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub [u8; $bytes]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl $name {
            /// Reads its bytes; `None` if the length differs.
            #[must_use]
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                <[u8; $bytes]>::try_from(bytes).ok().map(Self)
            }

            /// Reads two hexadecimal digits for each byte, the form `Display` writes.
            #[must_use]
            pub fn from_hex(text: &str) -> Option<Self> {
                if text.len() != 2 * $bytes || !text.is_ascii() {
                    return None;
                }
                let mut bytes = [0u8; $bytes];
                for (position, byte) in bytes.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&text[2 * position..2 * position + 2], 16).ok()?;
                }
                Some(Self(bytes))
            }
        }
    };
}

/// Bytes of a [`BlockHash`]: [`PLACE_BYTES`], then the digest.
pub const HASH_BYTES: usize = PLACE_BYTES + DIGEST_BYTES;

/// Bytes of a block hash that give the place of the block and what it shares with its neighbours.
pub const PLACE_BYTES: usize = 5;

/// Bytes of a block hash that are its digest.
pub const DIGEST_BYTES: usize = 14;

/// Bytes of an [`IdentityDigest`].
const IDENTITY_BYTES: usize = 16;

digest!(
    /// Keyed hash of a block *and everything before it*: identity manifest, tenant salt, all earlier
    /// tokens, own tokens. Equal hashes mean equal KV bytes. [`PLACE_BYTES`] that blocks near each
    /// other share, then a digest of 112 bits (docs/reference/hash.md).
    BlockHash, HASH_BYTES
);
digest!(
    /// Digest of an identity manifest (weights, dtype, layout, geometry, RoPE, adapter …).
    IdentityDigest, IDENTITY_BYTES
);

impl IdentityDigest {
    /// The identity of the same manifest under these weights; `self` must be that of generation 0.
    /// XORs the generation, little endian, into the last four bytes. So generation 0 changes
    /// nothing, and the function is its own inverse.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Self {
        let [.., a, b, c, d] = &mut self.0;
        for (byte, with) in [a, b, c, d].into_iter().zip(generation.0.to_le_bytes()) {
            *byte ^= with;
        }
        self
    }

    /// The generation of this identity, if it belongs to the manifest with the digest `manifest`;
    /// `None` if they differ outside the last four bytes.
    #[must_use]
    pub fn generation_relative_to(self, manifest: IdentityDigest) -> Option<Generation> {
        let (ours, own) = self.0.split_last_chunk::<4>()?;
        let (theirs, base) = manifest.0.split_last_chunk::<4>()?;
        let number = u32::from_le_bytes(*own) ^ u32::from_le_bytes(*base);
        (ours == theirs).then_some(Generation(number))
    }
}

/// Number of TTL groups: one for each root tag.
pub const TTL_GROUPS: u32 = 256;

/// Blocks of a block group: consecutive blocks of a chain from a position that is a multiple of
/// this number.
pub const BLOCK_GROUP_BLOCKS: usize = 8;

/// A block hash as numbers, for tables and sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashWords {
    /// Its first eight bytes, little endian: the place, and three bytes of the digest.
    pub first: u64,
    /// The next three bytes.
    pub middle: u64,
    /// Its last eight bytes.
    pub last: u64,
}

impl BlockHash {
    /// The hash as numbers, which together are all of it.
    #[inline]
    #[must_use]
    pub fn words(self) -> HashWords {
        let [a, b, c, d, e, f, g, h, i, j, k, rest @ ..] = self.0;
        HashWords {
            first: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            middle: u64::from_le_bytes([i, j, k, 0, 0, 0, 0, 0]),
            last: u64::from_le_bytes(rest),
        }
    }

    /// The hash with these first and last eight bytes, little endian, and zeros between: for tests
    /// and tools that make hashes without a prompt.
    #[must_use]
    pub fn from_words(first: u64, last: u64) -> Self {
        let mut hash = Self::default();
        hash.0[..8].copy_from_slice(&first.to_le_bytes());
        hash.0[HASH_BYTES - 8..].copy_from_slice(&last.to_le_bytes());
        hash
    }

    /// The last eight bytes of the digest, little endian. They identify a block of one node where a
    /// collision costs a wrong guess and never a wrong byte.
    #[must_use]
    pub fn fingerprint(self) -> u64 {
        self.words().last
    }

    /// The digest: what tells this block from all others.
    #[must_use]
    pub fn digest(self) -> [u8; DIGEST_BYTES] {
        let [_, _, _, _, _, digest @ ..] = self.0;
        digest
    }

    /// First byte, equal for all blocks of a chain. An index that is sharded by it has all prefixes
    /// of a prompt in one shard.
    #[must_use]
    pub fn root_tag(self) -> u8 {
        self.0[0]
    }

    /// The group that sets this block's time to live, derived from the root tag. So the hash alone
    /// gives the group, and a prefix lies in one group as a whole.
    #[must_use]
    pub fn ttl_group(self) -> TtlGroupId {
        TtlGroupId(u32::from(self.root_tag()))
    }

    /// The part that all blocks of a block group share, 40 bits: the root tag and 29 bits of the
    /// group's first block. The index finds up to eight blocks by it at once.
    #[must_use]
    pub fn block_group(self) -> u64 {
        let [tag, a, b, c, d, ..] = self.0;
        u64::from_le_bytes([tag, a & !7, b, c, d, 0, 0, 0])
    }

    /// Position of this block within its block group: its position in the chain modulo
    /// [`BLOCK_GROUP_BLOCKS`].
    #[must_use]
    pub fn position_in_group(self) -> usize {
        usize::from(self.0[1] & 7)
    }

    /// This hash as block `position` of a chain: overwrites the root tag with `root_tag`, and the
    /// 29 bits of the block group with those of `group_first`, the group's first block. The digest
    /// stays.
    #[must_use]
    pub fn in_chain(mut self, root_tag: u8, group_first: BlockHash, position: usize) -> Self {
        self.0[..PLACE_BYTES].copy_from_slice(&group_first.0[..PLACE_BYTES]);
        self.0[0] = root_tag;
        self.0[1] = self.0[1] & !7 | (position % BLOCK_GROUP_BLOCKS) as u8;
        self
    }

    /// The shard of `shards` that lists this block, from 1; all blocks of a chain belong to one
    /// shard. The 256 tags are spread evenly, give or take one. Group 0 is the control group and
    /// lists no blocks.
    #[must_use]
    pub fn shard(self, shards: u16) -> u16 {
        1 + (u32::from(self.root_tag()) * u32::from(shards) / 256) as u16
    }
}

/// The memory tier of a node that holds a block. Ordered from slow to fast, so `max` is the fastest
/// tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// Local flash, read with direct I/O.
    Ssd = 0,
    /// Host memory of the node.
    Dram = 1,
    /// Memory of the accelerator.
    Gpu = 2,
}

impl Tier {
    /// All tiers, slow to fast.
    pub const ALL: [Tier; 3] = [Tier::Ssd, Tier::Dram, Tier::Gpu];

    /// The tier with this number, if there is one.
    #[must_use]
    pub fn from_u8(number: u8) -> Option<Tier> {
        Tier::ALL.get(usize::from(number)).copied()
    }

    /// Lower-case name as used in metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["ssd", "dram", "gpu"][self as usize]
    }
}

/// Traffic class of an operation on blocks; decides the order when not all operations can run.
/// Ordered from first to last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum TrafficClass {
    /// A request waits for the blocks.
    Fetch = 1,
    /// Newly computed blocks are stored.
    Save = 2,
    /// Blocks are copied from one node to another.
    Replicate = 3,
    /// Blocks are read before the request that needs them is scheduled.
    Prefetch = 4,
}

impl TrafficClass {
    /// Every class, highest priority first.
    pub const ALL: [TrafficClass; 4] =
        [TrafficClass::Fetch, TrafficClass::Save, TrafficClass::Replicate, TrafficClass::Prefetch];

    /// The class with this number. An unknown number is the lowest class, so that a newer peer is
    /// understood and displaces no other traffic.
    #[must_use]
    pub fn from_number(number: u32) -> TrafficClass {
        TrafficClass::ALL.into_iter().find(|class| *class as u32 == number).unwrap_or(TrafficClass::Prefetch)
    }

    /// The class of a fetch that asked for class `requested`. A class that no fetch can have counts
    /// as the lowest.
    #[must_use]
    pub fn for_fetch(requested: Option<TrafficClass>) -> TrafficClass {
        requested.unwrap_or(TrafficClass::Fetch).or_lowest(TrafficClass::Save)
    }

    /// The class of a save that asked for class `requested`. A class that no save can have counts
    /// as the lowest.
    #[must_use]
    pub fn for_save(requested: Option<TrafficClass>) -> TrafficClass {
        requested.unwrap_or(TrafficClass::Save).or_lowest(TrafficClass::Fetch)
    }

    fn or_lowest(self, excluded: TrafficClass) -> TrafficClass {
        if self == excluded { TrafficClass::Prefetch } else { self }
    }

    /// Its position in [`TrafficClass::ALL`], from 0.
    #[must_use]
    pub fn rank(self) -> usize {
        self as usize - 1
    }

    /// Lower-case name as used in metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["fetch", "save", "replicate", "prefetch"][self.rank()]
    }
}

/// Kind of request that a block was made for; together with the conversation turn it forms the
/// [`Category`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum RequestKind {
    /// Unknown or plain chat text.
    #[default]
    Text = 0,
    /// Chat about an uploaded file.
    File = 1,
    /// Image, audio or video in the prompt.
    Multimodal = 2,
    /// Retrieval or web search.
    Search = 3,
    /// Programmatic single-turn call.
    Api = 4,
    /// Tool-calling agent loop.
    Agent = 5,
    /// Reasoning ("thinking") chat.
    Thinking = 6,
}

impl RequestKind {
    /// Every kind, in the order of its number.
    pub const ALL: [RequestKind; 7] = [
        RequestKind::Text,
        RequestKind::File,
        RequestKind::Multimodal,
        RequestKind::Search,
        RequestKind::Api,
        RequestKind::Agent,
        RequestKind::Thinking,
    ];

    /// The kind with this number; unknown numbers are `Text`, so that a newer peer is understood.
    #[must_use]
    pub fn from_u8(number: u8) -> RequestKind {
        RequestKind::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }

    /// Lower-case name as used in metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["text", "file", "multimodal", "search", "api", "agent", "thinking"][self as usize]
    }
}

/// Request kind and conversation turn: blocks of one category share a reuse curve (ATC '25 §3.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Category {
    /// Kind of the request.
    pub kind: RequestKind,
    /// Turn of the conversation, counted from 1; 0 when unknown. Saturates at 255.
    pub conversation_turn: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: IdentityDigest = IdentityDigest([0xa5; 16]);

    #[test]
    fn generation_round_trips_and_generation_0_is_the_base_identity() {
        assert_eq!(MANIFEST.with_generation(Generation(0)), MANIFEST);
        for number in [0, 1, 255, 256, 0x0102_0304, u32::MAX] {
            let identity = MANIFEST.with_generation(Generation(number));
            assert_eq!(identity.generation_relative_to(MANIFEST), Some(Generation(number)));
            assert_eq!(
                identity.with_generation(Generation(number)),
                MANIFEST,
                "applying the generation twice gives the manifest back"
            );
        }
        let next = MANIFEST.with_generation(Generation(1));
        assert_eq!(
            (next.0[11], next.0[12], next.0[13]),
            (0xa5, 0xa4, 0xa5),
            "little endian, in the last four bytes"
        );
    }

    #[test]
    fn another_manifest_has_no_relative_generation() {
        for byte in 0..12 {
            let mut other = MANIFEST;
            other.0[byte] ^= 1;
            assert_eq!(other.generation_relative_to(MANIFEST), None, "byte {byte}");
        }
    }
}
