//! Random command sequences. An intent is drawn and turned into a command for the current state, so
//! most commands are valid and the rest are late, early or wrong.

use proptest::prelude::*;

use super::reference::ReferenceIndex;
use super::*;
use crate::id::HASH_BYTES;

/// Nodes drawn: more than the limits of [`tight`] admit.
pub(super) const NODES: u32 = 6;
/// Blocks drawn: few enough to repeat, enough that the sweep does not reach all at once.
pub(super) const BLOCKS: u64 = 64;

/// Limits that random sequences exceed.
pub(super) fn tight() -> IndexLimits {
    IndexLimits {
        nodes_max: 4,
        announce_blocks_max: 40,
        announce_changes_max: 12,
        copies_max: 60,
        pin_blocks_max: 4,
        pinned_blocks_max: 8,
        pins_max: 3,
        quotas_max: 2,
        ttls_max: 2,
        text_bytes_max: 64,
    }
}

/// An intent of a node or an operator.
#[derive(Clone, Debug)]
pub(super) enum Intent {
    Join { node: u32, stranger: bool },
    Admit { node: u32, stranger: bool, ahead: i64 },
    Fence { node: u32, late: u64 },
    Leave { node: u32, late: u64 },
    Announce(Vec<AnnounceIntent>),
    Pin(Pin),
    Unpin { pin: u64, owner: String, ends_ms: Option<u64> },
    SetQuota { tenant: u32, bytes: Option<u64> },
    SetTtl { group: u32, ttl_ms: Option<u64> },
    SetGeneration { ahead: u32 },
}

/// One announcement, relative to the node's expected epoch and number.
#[derive(Clone, Debug)]
pub(super) struct AnnounceIntent {
    node: u32,
    late_epochs: u64,
    seq_offset: i64,
    changes: Vec<Change>,
}

impl Intent {
    /// The command for the current state.
    pub(super) fn command(&self, now: &ReferenceIndex) -> Command {
        let epoch = |node: u32, late: u64| {
            let known = now.nodes.get(&node).map_or(1, |known| known.epoch);
            Epoch(known.saturating_sub(late))
        };
        match self.clone() {
            Intent::Join { node, stranger } => {
                let identity = IdentityDigest([if stranger { 2 } else { 1 }; 16]);
                Command::Join(NodeRecord { identity, ..record(node) })
            }
            Intent::Admit { node, stranger, ahead } => {
                let identity = IdentityDigest([if stranger { 2 } else { 1 }; 16]);
                let known = now.nodes.get(&node).map(|known| known.epoch);
                let known = known.or(now.departed.get(&node).copied()).unwrap_or(0);
                let epoch = Epoch(known.saturating_add_signed(ahead).max(1));
                Command::Admit { record: NodeRecord { identity, ..record(node) }, epoch }
            }
            Intent::Fence { node, late } => Command::Fence { node: NodeId(node), epoch: epoch(node, late) },
            Intent::Leave { node, late } => Command::Leave { node: NodeId(node), epoch: epoch(node, late) },
            Intent::Announce(said) => {
                let mut batch: Vec<Announcement> = Vec::new();
                for AnnounceIntent { node, late_epochs, seq_offset, changes } in said {
                    let earlier = batch.iter().filter(|one| one.node.0 == node).count() as u64;
                    let next = now.nodes.get(&node).map_or(1, |known| known.next) + earlier;
                    let seq = next.saturating_add_signed(seq_offset);
                    batch.push(announcement(node, epoch(node, late_epochs).0, seq, changes));
                }
                Command::Announce(batch)
            }
            Intent::Pin(pin) => Command::Pin(pin),
            Intent::Unpin { pin, owner, ends_ms } => Command::Unpin { pin: PinId(pin), owner, ends_ms },
            Intent::SetQuota { tenant, bytes } => Command::SetQuota { tenant: TenantId(tenant), bytes },
            Intent::SetTtl { group, ttl_ms } => Command::SetTtl { group: TtlGroupId(group), ttl_ms },
            Intent::SetGeneration { ahead } => Command::SetGeneration(Generation(now.generation + ahead)),
        }
    }
}

fn tier() -> impl Strategy<Value = Tier> {
    prop::sample::select(Tier::ALL.to_vec())
}

/// The parent of a block: a trunk of 24, a branch off it, a branch off that, both inside a block
/// group, and three separate prefixes.
fn parent_of(number: u64) -> Option<u64> {
    match number {
        0 | 44 | 48 | 56 => None,
        24 => Some(4),
        36 => Some(27),
        other => Some(other - 1),
    }
}

/// The hash of a block. One prefix has no layout. Two others share groups of the trunk: its second,
/// which only the trunk has, and its first, which the branch has too.
pub(super) fn hash_of(number: u64) -> BlockHash {
    match number {
        44..48 => raw_block(number),
        48..56 => raw_block(number).in_chain(7, hash_of(8), number as usize),
        56..64 => raw_block(number).in_chain(7, hash_of(0), number as usize),
        _ => tree_block(number, parent_of),
    }
}

pub(super) fn hashes_of(numbers: impl IntoIterator<Item = u64>) -> Vec<BlockHash> {
    numbers.into_iter().map(hash_of).collect()
}

/// Whether a request with this first block starts at the start of its prefix.
pub(super) fn starts_a_prefix(first: Option<&BlockHash>) -> bool {
    (0..BLOCKS).any(|number| parent_of(number).is_none() && first == Some(&hash_of(number)))
}

/// The prefix that ends with a block.
fn path_to(number: u64) -> Vec<u64> {
    let mut path: Vec<u64> = std::iter::successors(Some(number), |number| parent_of(*number)).collect();
    path.reverse();
    path
}

/// The last blocks of a prefix, with their parent.
fn prefix_tail(end: u64, len: usize) -> (Option<BlockHash>, Vec<BlockHash>) {
    let path = path_to(end);
    let start = path.len().saturating_sub(len);
    (start.checked_sub(1).map(|before| hash_of(path[before])), hashes_of(path[start..].iter().copied()))
}

/// Parts of a prefix from either end, as policies evict them, and scattered blocks.
fn some_blocks() -> impl Strategy<Value = Vec<BlockHash>> {
    prop_oneof![
        (0..BLOCKS, 0..9usize).prop_map(|(end, len)| prefix_tail(end, len).1),
        (0..BLOCKS, 0..9usize).prop_map(|(end, len)| prefix_tail(end, len).1.into_iter().rev().collect()),
        prop::collection::vec(0..BLOCKS, 0..5).prop_map(hashes_of),
    ]
}

/// Blocks that a node stores: part of a prefix, sometimes without its parent. Liars name any blocks
/// in any order.
fn stored_blocks(who: Honesty) -> impl Strategy<Value = (Option<BlockHash>, Vec<BlockHash>)> {
    let told = (0..BLOCKS, 0..13usize, prop::bool::weighted(0.8)).prop_map(|(end, len, told)| {
        let (parent, blocks) = prefix_tail(end, len);
        (parent.filter(|_| told), blocks)
    });
    let lie = (prop::option::of((0..BLOCKS).prop_map(hash_of)), some_blocks());
    let lies = u32::from(who == Honesty::Liars) * 4;
    prop_oneof![4 => told, lies => lie]
}

/// Whether nodes always announce true prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Honesty {
    Honest,
    Liars,
}

fn change(who: Honesty) -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (stored_blocks(who), tier())
            .prop_map(|((parent, blocks), tier)| Change::Stored { parent, blocks, tier }),
        2 => (some_blocks(), tier(), tier())
            .prop_map(|(blocks, from, to)| Change::Moved { blocks, from, to }),
        3 => (some_blocks(), tier())
            .prop_map(|(blocks, tier)| Change::Dropped { blocks, tier, cause: Default::default() }),
        1 => Just(Change::Cleared),
    ]
}

/// Mostly zero.
fn rarely(others: std::ops::Range<i64>) -> impl Strategy<Value = i64> {
    prop_oneof![9 => Just(0), 1 => others]
}

fn announce_intent(who: Honesty) -> impl Strategy<Value = AnnounceIntent> {
    let changes = prop::collection::vec(change(who), 0..4);
    (0..NODES, rarely(0..2), rarely(-2..3), changes).prop_map(|(node, late, seq_offset, changes)| {
        AnnounceIntent { node, late_epochs: late as u64, seq_offset, changes }
    })
}

fn owner() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["ops".to_owned(), "batch".to_owned()])
}

fn pin_kind() -> impl Strategy<Value = PinKind> {
    prop::sample::select(vec![PinKind::Hard, PinKind::Soft])
}

fn intent(who: Honesty) -> impl Strategy<Value = Intent> {
    let late = || rarely(0..2).prop_map(|late| late as u64);
    let value = || prop::option::weighted(0.7, 0..4u64);
    let end = || prop::option::of(0..3u64);
    // Few blocks, so that a pin repeats with another kind or end.
    let pinned =
        || prop_oneof![1 => some_blocks(), 1 => (0..2u64).prop_map(|start| hashes_of(start..start + 2))];
    let pin =
        (0..5u64, owner(), pinned(), pin_kind(), end()).prop_map(|(pin, owner, blocks, kind, ends_ms)| {
            Intent::Pin(Pin { pin: PinId(pin), owner, blocks, kind, ends_ms })
        });
    prop_oneof![
        4 => (0..NODES, prop::bool::weighted(0.05))
            .prop_map(|(node, stranger)| Intent::Join { node, stranger }),
        2 => (0..NODES, prop::bool::weighted(0.05), -1..3i64)
            .prop_map(|(node, stranger, ahead)| Intent::Admit { node, stranger, ahead }),
        1 => (0..NODES, late()).prop_map(|(node, late)| Intent::Fence { node, late }),
        2 => (0..NODES, late()).prop_map(|(node, late)| Intent::Leave { node, late }),
        16 => prop::collection::vec(announce_intent(who), 1..4).prop_map(Intent::Announce),
        3 => pin,
        2 => (0..5u64, owner(), end()).prop_map(|(pin, owner, ends_ms)| Intent::Unpin { pin, owner, ends_ms }),
        1 => (0..4u32, value()).prop_map(|(tenant, bytes)| Intent::SetQuota { tenant, bytes }),
        1 => (0..4u32, value()).prop_map(|(group, ttl_ms)| Intent::SetTtl { group, ttl_ms }),
        1 => (0..3u32).prop_map(|ahead| Intent::SetGeneration { ahead }),
    ]
}

/// A history of an index: a few nodes join, then anything happens.
pub(super) fn intents(who: Honesty) -> impl Strategy<Value = Vec<Intent>> {
    (0..5u32, prop::collection::vec(intent(who), 1..80)).prop_map(|(joined, later)| {
        let joins = (0..joined).map(|node| Intent::Join { node, stranger: false });
        joins.chain(later).collect()
    })
}

/// A request: a prefix, or a part from its middle.
pub(super) fn request() -> impl Strategy<Value = Vec<BlockHash>> {
    prop_oneof![
        3 => (0..BLOCKS).prop_map(|end| hashes_of(path_to(end))),
        1 => (0..BLOCKS, 0..20usize).prop_map(|(end, len)| prefix_tail(end, len).1),
    ]
}

/// Any command with numbers of any size, for the codec.
pub(super) fn any_command() -> impl Strategy<Value = Command> {
    let hash = || any::<[u8; HASH_BYTES]>().prop_map(BlockHash);
    let hashes = move || prop::collection::vec(hash(), 0..6);
    let change = prop_oneof![
        (prop::option::of(hash()), hashes(), tier()).prop_map(|(parent, blocks, tier)| Change::Stored {
            parent,
            blocks,
            tier
        }),
        (hashes(), tier(), tier()).prop_map(|(blocks, from, to)| Change::Moved { blocks, from, to }),
        (hashes(), tier(), prop::sample::select(DropCause::ALL.to_vec()))
            .prop_map(|(blocks, tier, cause)| Change::Dropped { blocks, tier, cause }),
        Just(Change::Cleared),
    ];
    let one = (any::<u32>(), any::<u64>(), any::<u64>(), prop::collection::vec(change, 0..5))
        .prop_map(|(node, epoch, seq, changes)| announcement(node, epoch, seq, chained(changes)));
    let record = (any::<[u32; 2]>(), any::<[String; 3]>(), any::<bool>(), any::<[u8; 16]>(), any::<u64>())
        .prop_map(|([node, instance], [data_address, control_address, host], has, identity, block_bytes)| {
            NodeRecord {
                node: NodeId(node),
                data_address,
                control_address,
                host,
                instance: has.then_some(InstanceId(instance)),
                identity: IdentityDigest(identity),
                block_bytes,
            }
        });
    let value = || prop::option::of(any::<u64>());
    let pin = (any::<u64>(), any::<String>(), hashes(), pin_kind(), value()).prop_map(
        |(pin, owner, blocks, kind, ends_ms)| {
            Command::Pin(Pin { pin: PinId(pin), owner, blocks, kind, ends_ms })
        },
    );
    prop_oneof![
        2 => record.clone().prop_map(Command::Join),
        1 => (record, any::<u64>()).prop_map(|(record, epoch)| Command::Admit { record, epoch: Epoch(epoch) }),
        1 => (any::<u32>(), any::<u64>()).prop_map(|(node, epoch)| fence(node, epoch)),
        1 => (any::<u32>(), any::<u64>()).prop_map(|(node, epoch)| leave(node, epoch)),
        8 => prop::collection::vec(one, 0..4).prop_map(Command::Announce),
        2 => pin,
        1 => (any::<u64>(), any::<String>(), value())
            .prop_map(|(pin, owner, ends_ms)| Command::Unpin { pin: PinId(pin), owner, ends_ms }),
        1 => (any::<u32>(), value())
            .prop_map(|(tenant, bytes)| Command::SetQuota { tenant: TenantId(tenant), bytes }),
        1 => (any::<u32>(), value())
            .prop_map(|(group, ttl_ms)| Command::SetTtl { group: TtlGroupId(group), ttl_ms }),
        1 => any::<u32>().prop_map(|to| Command::SetGeneration(Generation(to))),
    ]
}

/// Makes every second run continue the previous one, as in real announcements.
fn chained(mut changes: Vec<Change>) -> Vec<Change> {
    let mut last = None;
    for (place, change) in changes.iter_mut().enumerate() {
        if let Change::Stored { parent, blocks, .. } = change {
            if place % 2 == 1 && last.is_some() {
                *parent = last;
            }
            last = blocks.last().copied();
        }
    }
    changes
}
