//! Newtypes for every identity and amount the system speaks of.
//!
//! Not here: how an identity is made (hashes are made in [`crate::prefix`], epochs by
//! [`crate::index`]) and how it looks on the wire (`kvfleet-proto`).

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
    /// Number a node is given each time it joins; announcements of an older one are ignored.
    /// Given out by the index, strictly growing per node, starting at 1.
    Epoch(u64), "epoch-");
number!(
    /// Position of an announce batch in the stream of one (node, epoch); starts at 1, no gaps.
    Seq(u64), "seq-");
number!(
    /// A time-bounded promise that blocks stay, given to a reader or to a save under way.
    LeaseId(u64), "lease-");
number!(
    /// Whose requests these are at one node: the node's own name for it, that no two callers have.
    CallerId(u64), "caller-");
number!(
    /// A block's bytes that another process may read in place. Given out by the lender of one connection, strictly growing
    /// from 1 and never again.
    LoanId(u64), "loan-");
number!(
    /// A hold without a time limit, with a named owner, ended by release.
    PinId(u64), "pin-");
number!(
    /// Which weights of one model blocks were computed with, counted from 0 by those who load them. Part of the
    /// [`IdentityDigest`] that a request or a frame names, and of no block's hash.
    Generation(u32), "generation-");
number!(
    /// Prefixes with a time to live of their own: all whose first block has one root tag. Below [`GROUPS`].
    GroupId(u32), "group-");
number!(
    /// A request as the frontend counts it; names it in traces, reports and miss reasons.
    RequestId(u64), "request-");
number!(
    /// A point in time in microseconds. The caller says since when; only differences mean anything.
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
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub [u8; 16]);

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
            /// Reads the sixteen bytes, or nothing when the length is another one.
            #[must_use]
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                <[u8; 16]>::try_from(bytes).ok().map(Self)
            }

            /// Reads thirty-two hexadecimal digits, the form `Display` writes.
            #[must_use]
            pub fn from_hex(text: &str) -> Option<Self> {
                if text.len() != 32 || !text.is_ascii() {
                    return None;
                }
                let mut bytes = [0u8; 16];
                for (position, byte) in bytes.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&text[2 * position..2 * position + 2], 16).ok()?;
                }
                Some(Self(bytes))
            }
        }
    };
}

digest!(
    /// Keyed hash of a block *and everything before it*: identity manifest, tenant salt, all earlier
    /// tokens, own tokens. Equal hashes mean equal KV bytes.
    BlockHash
);
digest!(
    /// Digest of an identity manifest (weights, dtype, layout, geometry, RoPE, adapter …).
    IdentityDigest
);

impl IdentityDigest {
    /// The identity of the same manifest under these weights, if `self` is that of generation 0: the last four bytes are
    /// those with the generation, little endian, in them. So generation 0 changes nothing, and whoever knows one of the two
    /// can tell the other from it.
    #[must_use]
    pub fn of_generation(mut self, generation: Generation) -> Self {
        let [.., a, b, c, d] = &mut self.0;
        for (byte, with) in [a, b, c, d].into_iter().zip(generation.0.to_le_bytes()) {
            *byte ^= with;
        }
        self
    }

    /// The generation of this identity, if it is one of the manifest with the digest `manifest`; else they differ by
    /// more.
    #[must_use]
    pub fn generation_over(self, manifest: IdentityDigest) -> Option<Generation> {
        let (ours, own) = self.0.split_last_chunk::<4>()?;
        let (theirs, base) = manifest.0.split_last_chunk::<4>()?;
        let number = u32::from_le_bytes(*own) ^ u32::from_le_bytes(*base);
        (ours == theirs).then_some(Generation(number))
    }
}

/// Groups there are: one for each root tag.
pub const GROUPS: u32 = 256;

/// Blocks of an octet: the consecutive blocks of a chain from a position that is a multiple of this one.
pub const OCTET_BLOCKS: usize = 8;

impl BlockHash {
    /// The half that blocks of one octet do not have in common: enough to tell the blocks of one node apart where
    /// taking one for another costs a guess and no wrong byte.
    #[must_use]
    pub fn fingerprint(self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// First byte: the same for all blocks of one chain, that of the chain's first block. Who shards the
    /// index by it has all prefixes of a prompt in one place.
    #[must_use]
    pub fn root_tag(self) -> u8 {
        self.0[0]
    }

    /// The group whose time to live counts for this block: that of its root tag, so that a block's group is known from its
    /// hash alone and a prefix is in one group whole.
    #[must_use]
    pub fn group(self) -> GroupId {
        GroupId(u32::from(self.root_tag()))
    }

    /// What the blocks of one octet have in common, 40 bits: the root tag, and 29 bits of the octet's first
    /// block. An index that keeps a prefix together finds eight blocks by it at once.
    #[must_use]
    pub fn octet(self) -> u64 {
        let [tag, a, b, c, d, ..] = self.0;
        u64::from_le_bytes([tag, a & !7, b, c, d, 0, 0, 0])
    }

    /// Which block of its octet this is: its position in the chain modulo [`OCTET_BLOCKS`].
    #[must_use]
    pub fn nth_of_octet(self) -> usize {
        usize::from(self.0[1] & 7)
    }

    /// This hash as that of block `position` of a chain: with the root tag of the chain's first block and the
    /// 29 bits of the octet's first block, `octet`, whatever stood there. The other 88 bits stay.
    #[must_use]
    pub fn in_chain(mut self, root_tag: u8, octet: BlockHash, position: usize) -> Self {
        self.0[..5].copy_from_slice(&octet.0[..5]);
        self.0[0] = root_tag;
        self.0[1] = self.0[1] & !7 | (position % OCTET_BLOCKS) as u8;
        self
    }

    /// The shard of `shards` that lists this block, from 1; all blocks of a chain belong to one. Each shard
    /// has as many of the 256 tags as the next, or one more or less. Group 0 of the routers is the control
    /// group and lists no blocks.
    #[must_use]
    pub fn shard(self, shards: u16) -> u16 {
        1 + (u32::from(self.root_tag()) * u32::from(shards) / 256) as u16
    }
}

/// Where on a node a block is. Ordered from slow to fast, so `max` is the fastest tier.
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

/// What an operation on blocks is for: who goes first where not all can. Ordered from what goes first to what goes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// A request waits for the blocks.
    Fetch = 1,
    /// Blocks that were computed are kept.
    Save = 2,
    /// Blocks are copied from one node to another.
    Replicate = 3,
    /// Blocks are read before the turn of the request that needs them.
    Prefetch = 4,
}

impl Class {
    /// Every class, in the order in which they go.
    pub const ALL: [Class; 4] = [Class::Fetch, Class::Save, Class::Replicate, Class::Prefetch];

    /// The class with this number. An unknown one is the last: a newer peer is understood, and takes nobody's place.
    #[must_use]
    pub fn from_number(number: u32) -> Class {
        Class::ALL.into_iter().find(|class| *class as u32 == number).unwrap_or(Class::Prefetch)
    }

    /// The class of a fetch whose asker named this one: what no fetch is counts as the last.
    #[must_use]
    pub fn of_fetch(named: Option<Class>) -> Class {
        named.unwrap_or(Class::Fetch).or_last(Class::Save)
    }

    /// The class of a save whose asker named this one: what no save is counts as the last.
    #[must_use]
    pub fn of_save(named: Option<Class>) -> Class {
        named.unwrap_or(Class::Save).or_last(Class::Fetch)
    }

    fn or_last(self, cannot_be: Class) -> Class {
        if self == cannot_be { Class::Prefetch } else { self }
    }

    /// Its place in [`Class::ALL`], from 0.
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

/// What kind of request a block was made for; with the turn it is the [`Category`].
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

/// Request type and turn number: blocks of one category share a reuse curve (ATC '25 §3.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Category {
    /// Type of the request.
    pub kind: RequestKind,
    /// Turn of the conversation, counted from 1; 0 when unknown. Saturates at 255.
    pub turn: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: IdentityDigest = IdentityDigest([0xa5; 16]);

    #[test]
    fn a_generation_is_told_from_its_identity_and_0_changes_nothing() {
        assert_eq!(MANIFEST.of_generation(Generation(0)), MANIFEST);
        for number in [0, 1, 255, 256, 0x0102_0304, u32::MAX] {
            let identity = MANIFEST.of_generation(Generation(number));
            assert_eq!(identity.generation_over(MANIFEST), Some(Generation(number)));
            assert_eq!(identity.of_generation(Generation(number)), MANIFEST, "the way back is the same");
        }
        let next = MANIFEST.of_generation(Generation(1));
        assert_eq!(
            (next.0[11], next.0[12], next.0[13]),
            (0xa5, 0xa4, 0xa5),
            "little endian, in the last four bytes"
        );
    }

    #[test]
    fn another_manifest_is_no_generation_of_this_one() {
        for byte in 0..12 {
            let mut other = MANIFEST;
            other.0[byte] ^= 1;
            assert_eq!(other.generation_over(MANIFEST), None, "byte {byte}");
        }
    }
}
