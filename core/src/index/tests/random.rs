//! Random command sequences: what is drawn is an intent, turned into a command against the state of
//! the moment, so that most commands mean something and the rest are late, early or wrong.

use proptest::prelude::*;

use super::reference::Reference;
use super::*;

/// Nodes drawn: more than the limits of [`tight`] let in.
pub(super) const NODES: u32 = 6;
/// Blocks drawn: few enough to meet again, enough that the sweep does not see all at once.
pub(super) const BLOCKS: u64 = 48;

/// Limits that random sequences run into.
pub(super) fn tight() -> IndexLimits {
    IndexLimits {
        nodes_max: 4,
        announce_blocks_max: 24,
        announce_changes_max: 12,
        copies_max: 12,
        pin_blocks_max: 4,
        pinned_blocks_max: 8,
        pins_max: 3,
        quotas_max: 2,
        ttls_max: 2,
        text_bytes_max: 64,
    }
}

/// Something that a node or an operator may want.
#[derive(Clone, Debug)]
pub(super) enum Intent {
    Join { node: u32, stranger: bool },
    Admit { node: u32, stranger: bool, ahead: i64 },
    Fence { node: u32, late: u64 },
    Leave { node: u32, late: u64 },
    Announce(Vec<Said>),
    Pin(Pin),
    Unpin { pin: u64, owner: String },
    SetQuota { tenant: u32, bytes: Option<u64> },
    SetTtl { group: u32, ttl_ms: Option<u64> },
}

/// One announcement, relative to what is expected of the node.
#[derive(Clone, Debug)]
pub(super) struct Said {
    node: u32,
    late_epochs: u64,
    seq_offset: i64,
    changes: Vec<Change>,
}

impl Intent {
    /// The command it is now.
    pub(super) fn command(&self, now: &Reference) -> Command {
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
                for Said { node, late_epochs, seq_offset, changes } in said {
                    let earlier = batch.iter().filter(|one| one.node.0 == node).count() as u64;
                    let next = now.nodes.get(&node).map_or(1, |known| known.next) + earlier;
                    let seq = next.saturating_add_signed(seq_offset);
                    batch.push(announcement(node, epoch(node, late_epochs).0, seq, changes));
                }
                Command::Announce(batch)
            }
            Intent::Pin(pin) => Command::Pin(pin),
            Intent::Unpin { pin, owner } => Command::Unpin { pin: PinId(pin), owner },
            Intent::SetQuota { tenant, bytes } => Command::SetQuota { tenant: TenantId(tenant), bytes },
            Intent::SetTtl { group, ttl_ms } => Command::SetTtl { group: GroupId(group), ttl_ms },
        }
    }
}

fn tier() -> impl Strategy<Value = Tier> {
    prop::sample::select(Tier::ALL.to_vec())
}

/// Runs of neighbours, as prefixes are, and scattered blocks, as victims are.
fn some_blocks() -> impl Strategy<Value = Vec<BlockHash>> {
    prop_oneof![
        (0..BLOCKS, 0..8u64).prop_map(|(start, len)| blocks(start..(start + len).min(BLOCKS))),
        prop::collection::vec(0..BLOCKS, 0..5).prop_map(blocks),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    let parent = prop::option::of((0..BLOCKS).prop_map(block));
    prop_oneof![
        6 => (parent, some_blocks(), tier())
            .prop_map(|(parent, blocks, tier)| Change::Stored { parent, blocks, tier }),
        2 => (some_blocks(), tier(), tier())
            .prop_map(|(blocks, from, to)| Change::Moved { blocks, from, to }),
        3 => (some_blocks(), tier()).prop_map(|(blocks, tier)| Change::Dropped { blocks, tier }),
        1 => Just(Change::Cleared),
    ]
}

/// Mostly zero.
fn rarely(others: std::ops::Range<i64>) -> impl Strategy<Value = i64> {
    prop_oneof![9 => Just(0), 1 => others]
}

fn said() -> impl Strategy<Value = Said> {
    let changes = prop::collection::vec(change(), 0..4);
    (0..NODES, rarely(0..2), rarely(-2..3), changes).prop_map(|(node, late, seq_offset, changes)| Said {
        node,
        late_epochs: late as u64,
        seq_offset,
        changes,
    })
}

fn owner() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["ops".to_owned(), "batch".to_owned()])
}

fn intent() -> impl Strategy<Value = Intent> {
    let late = || rarely(0..2).prop_map(|late| late as u64);
    let value = || prop::option::weighted(0.7, 0..4u64);
    let pin = (0..5u64, owner(), some_blocks())
        .prop_map(|(pin, owner, blocks)| Intent::Pin(Pin { pin: PinId(pin), owner, blocks }));
    prop_oneof![
        4 => (0..NODES, prop::bool::weighted(0.05))
            .prop_map(|(node, stranger)| Intent::Join { node, stranger }),
        2 => (0..NODES, prop::bool::weighted(0.05), -1..3i64)
            .prop_map(|(node, stranger, ahead)| Intent::Admit { node, stranger, ahead }),
        1 => (0..NODES, late()).prop_map(|(node, late)| Intent::Fence { node, late }),
        2 => (0..NODES, late()).prop_map(|(node, late)| Intent::Leave { node, late }),
        16 => prop::collection::vec(said(), 1..4).prop_map(Intent::Announce),
        1 => pin,
        1 => (0..5u64, owner()).prop_map(|(pin, owner)| Intent::Unpin { pin, owner }),
        1 => (0..4u32, value()).prop_map(|(tenant, bytes)| Intent::SetQuota { tenant, bytes }),
        1 => (0..4u32, value()).prop_map(|(group, ttl_ms)| Intent::SetTtl { group, ttl_ms }),
    ]
}

/// A life of an index: a few nodes join, then anything happens.
pub(super) fn intents() -> impl Strategy<Value = Vec<Intent>> {
    (0..5u32, prop::collection::vec(intent(), 1..80)).prop_map(|(joined, later)| {
        let joins = (0..joined).map(|node| Intent::Join { node, stranger: false });
        joins.chain(later).collect()
    })
}

/// A request: a run of neighbours or scattered blocks.
pub(super) fn request() -> impl Strategy<Value = Vec<BlockHash>> {
    prop_oneof![
        (0..BLOCKS).prop_map(|start| blocks(start..BLOCKS)),
        prop::collection::vec(0..BLOCKS, 0..12).prop_map(blocks),
    ]
}

/// Any command at all, of any size of number, for the codec.
pub(super) fn any_command() -> impl Strategy<Value = Command> {
    let hash = || any::<[u8; 16]>().prop_map(BlockHash);
    let hashes = move || prop::collection::vec(hash(), 0..6);
    let change = prop_oneof![
        (prop::option::of(hash()), hashes(), tier()).prop_map(|(parent, blocks, tier)| Change::Stored {
            parent,
            blocks,
            tier
        }),
        (hashes(), tier(), tier()).prop_map(|(blocks, from, to)| Change::Moved { blocks, from, to }),
        (hashes(), tier()).prop_map(|(blocks, tier)| Change::Dropped { blocks, tier }),
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
    let pin = (any::<u64>(), any::<String>(), hashes())
        .prop_map(|(pin, owner, blocks)| Command::Pin(Pin { pin: PinId(pin), owner, blocks }));
    let value = || prop::option::of(any::<u64>());
    prop_oneof![
        2 => record.clone().prop_map(Command::Join),
        1 => (record, any::<u64>()).prop_map(|(record, epoch)| Command::Admit { record, epoch: Epoch(epoch) }),
        1 => (any::<u32>(), any::<u64>()).prop_map(|(node, epoch)| fence(node, epoch)),
        1 => (any::<u32>(), any::<u64>()).prop_map(|(node, epoch)| leave(node, epoch)),
        8 => prop::collection::vec(one, 0..4).prop_map(Command::Announce),
        2 => pin,
        1 => (any::<u64>(), any::<String>())
            .prop_map(|(pin, owner)| Command::Unpin { pin: PinId(pin), owner }),
        1 => (any::<u32>(), value())
            .prop_map(|(tenant, bytes)| Command::SetQuota { tenant: TenantId(tenant), bytes }),
        1 => (any::<u32>(), value())
            .prop_map(|(group, ttl_ms)| Command::SetTtl { group: GroupId(group), ttl_ms }),
    ]
}

/// Makes every second run continue the one before, as a node's runs do.
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
