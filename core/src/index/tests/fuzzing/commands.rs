//! Bytes as commands: the index and the naive reference must answer alike, whatever the commands.
//!
//! Eight bytes form one record, so inserting or removing records leaves the others intact. A record
//! becomes a command for the current state, so most commands are valid and the rest are late, early
//! or wrong. The first record also selects the limits, and whether nodes announce true prefixes
//! only. If nodes lie about the order of blocks, the length of a prefix may be wrong, and
//! everything else must be right.

use super::super::reference::ReferenceIndex;
use super::super::*;
use super::{FuzzResult, check_structure};

/// Bytes of one record: action, node, offset, kind, end, length, parent, flags.
pub(super) const RECORD_BYTES: usize = 8;

/// Records used per case: a longer case is slow and finds no more than a shorter one.
const RECORDS_MAX: usize = 256;

const NODES: u8 = 6;

/// Blocks named: a trunk, a branch off its middle, a branch off that, both inside a block group,
/// and another prefix.
const BLOCKS: u8 = 112;

fn parent_of(number: u8) -> Option<u8> {
    match number {
        0 | 96 => None,
        48 => Some(20),
        72 => Some(60),
        other => Some(other - 1),
    }
}

/// The hash of a block. The other prefix starts with the trunk's second block group, and ends with
/// hashes without layout.
fn hash_of(number: u8) -> BlockHash {
    let wide = u64::from(number);
    match number {
        96..104 => raw_block(wide).in_chain(7, hash_of(8), usize::from(number)),
        104.. => raw_block(wide),
        _ => tree_block(wide, |number| parent_of(number as u8).map(u64::from)),
    }
}

fn path_to(number: u8) -> Vec<BlockHash> {
    let mut path: Vec<u8> = std::iter::successors(Some(number), |number| parent_of(*number)).collect();
    path.reverse();
    path.into_iter().map(hash_of).collect()
}

/// Tight or default limits, selected by the first record.
fn limits(data: &[u8]) -> IndexLimits {
    if data.first().is_some_and(|byte| byte & 0x40 != 0) {
        return IndexLimits::default();
    }
    IndexLimits {
        nodes_max: 4,
        announce_blocks_max: 160,
        announce_changes_max: 24,
        copies_max: 150,
        pin_blocks_max: 8,
        pinned_blocks_max: 16,
        pins_max: 3,
        quotas_max: 2,
        ttls_max: 2,
        text_bytes_max: 64,
    }
}

/// Whether nodes may announce arbitrary orders of blocks, selected by the first record.
fn may_lie(data: &[u8]) -> bool {
    data.first().is_some_and(|byte| byte & 0x80 != 0)
}

/// One record, byte by byte.
#[derive(Clone, Copy, Debug)]
struct CaseRecord {
    action: u8,
    node: u8,
    seq_offset: u8,
    kind: u8,
    end: u8,
    len: u8,
    parent: u8,
    flags: u8,
}

impl CaseRecord {
    fn of(bytes: &[u8; RECORD_BYTES]) -> CaseRecord {
        let [action, node, seq_offset, kind, end, len, parent, flags] = *bytes;
        CaseRecord { action, node: node % NODES, seq_offset, kind, end: end % BLOCKS, len, parent, flags }
    }

    fn is_announce(self) -> bool {
        self.action % 16 >= 6
    }

    /// Blocks of a prefix up to `end`, with their parent; flags make them reversed or sparse.
    fn prefix_part(self) -> (Option<BlockHash>, Vec<BlockHash>) {
        let path = path_to(self.end);
        let start = path.len().saturating_sub(usize::from(self.len % 40));
        let parent = start.checked_sub(1).map(|before| path[before]);
        let mut some = path[start..].to_vec();
        if self.flags & 0x30 == 0x10 {
            some.reverse();
        }
        if self.flags & 0xC0 == 0x40 {
            some = some.into_iter().step_by(2).collect();
        }
        let told = match self.parent {
            0..=199 => parent,
            200..=239 => None,
            other => Some(hash_of(other % BLOCKS)),
        };
        (told, some)
    }

    fn change(self, may_lie: bool) -> Change {
        let (parent, blocks) = match self.kind % 16 <= 8 && !may_lie {
            // In order, without gaps, with the true parent or none.
            true => {
                CaseRecord { flags: self.flags & 0x0F, parent: self.parent.min(239), ..self }.prefix_part()
            }
            false => self.prefix_part(),
        };
        let tier = |bits: u8| Tier::ALL[usize::from(bits % 3)];
        match self.kind % 16 {
            0..=8 => Change::Stored { parent, blocks, tier: tier(self.flags) },
            9..=10 => Change::Moved { blocks, from: tier(self.flags), to: tier(self.flags >> 2) },
            11..=14 => Change::Dropped { blocks, tier: tier(self.flags), cause: Default::default() },
            _ => Change::Cleared,
        }
    }

    /// Mostly zero.
    fn offset(self) -> i64 {
        if self.seq_offset < 224 { 0 } else { i64::from(self.seq_offset) - 240 }
    }

    fn command(self, now: &ReferenceIndex) -> Command {
        let node = u32::from(self.node);
        let known = now.nodes.get(&node).map(|known| known.epoch);
        let epoch = Epoch(known.unwrap_or(1).saturating_add_signed(self.offset().min(0) / 8));
        let identity = IdentityDigest([1 + u8::from(self.flags > 250); 16]);
        let number = u64::from(self.kind % 5);
        let value = (!self.end.is_multiple_of(3)).then_some(u64::from(self.len));
        let owner = if self.flags % 4 == 3 { "batch" } else { "ops" };
        match self.action % 16 {
            0 | 1 => Command::Join(NodeRecord { identity, ..record(node) }),
            2 => {
                let known = known.or(now.departed.get(&node).copied()).unwrap_or(0);
                let epoch = Epoch(known.saturating_add(u64::from(self.len % 4)).max(1));
                Command::Admit { record: NodeRecord { identity, ..record(node) }, epoch }
            }
            3 => Command::Fence { node: NodeId(node), epoch },
            4 => Command::Leave { node: NodeId(node), epoch },
            _ => match self.parent % 4 {
                0 => {
                    let kind = if self.flags & 0x10 == 0 { PinKind::Hard } else { PinKind::Soft };
                    let (pin, owner, blocks) = (PinId(number), owner.into(), self.prefix_part().1);
                    Command::Pin(Pin { pin, owner, blocks, kind, ends_ms: value })
                }
                1 => Command::Unpin { pin: PinId(number), owner: owner.into(), ends_ms: value },
                2 => Command::SetQuota { tenant: TenantId(node), bytes: value },
                _ if self.kind % 8 == 7 => {
                    Command::SetGeneration(Generation(now.generation + u32::from(self.len % 3)))
                }
                _ => Command::SetTtl { group: TtlGroupId(node), ttl_ms: value },
            },
        }
    }
}

/// One batch of consecutive records: separate announcements, or one with more changes.
fn batch(records: &[CaseRecord], may_lie: bool, now: &ReferenceIndex) -> Command {
    let mut all: Vec<Announcement> = Vec::new();
    for one in records {
        let node = u32::from(one.node);
        match all.last_mut() {
            Some(last) if one.action & 0x20 != 0 && last.node.0 == node => {
                last.changes.push(one.change(may_lie));
            }
            _ => {
                let known = now.nodes.get(&node);
                let earlier = all.iter().filter(|before| before.node.0 == node).count() as u64;
                let next = known.map_or(1, |known| known.next) + earlier;
                let epoch =
                    known.map_or(1, |known| known.epoch).saturating_sub(u64::from(one.seq_offset == 223));
                let seq = next.saturating_add_signed(one.offset());
                all.push(announcement(node, epoch, seq, vec![one.change(may_lie)]));
            }
        }
    }
    Command::Announce(all)
}

/// Calls `take` with each command and the reference; `take` must apply the command to the
/// reference.
fn each_command(
    data: &[u8],
    mut take: impl FnMut(&CaseRecord, Command, &mut ReferenceIndex) -> FuzzResult,
) -> FuzzResult {
    let (records, _) = data.as_chunks::<RECORD_BYTES>();
    let records: Vec<CaseRecord> = records.iter().take(RECORDS_MAX).map(CaseRecord::of).collect();
    let mut reference = ReferenceIndex::new(limits(data));
    let mut rest = &records[..];
    while let Some(first) = rest.first() {
        let goes_on = |one: &&CaseRecord| one.is_announce() && one.action & 0x80 != 0;
        let more = rest[1..].iter().take_while(goes_on).take(7).count();
        let count = if first.is_announce() { 1 + more } else { 1 };
        let command = match first.is_announce() {
            true => batch(&rest[..count], may_lie(data), &reference),
            false => first.command(&reference),
        };
        take(first, command, &mut reference)?;
        rest = &rest[count..];
    }
    Ok(())
}

fn check_equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, expected: &T) -> FuzzResult {
    if got == expected {
        Ok(())
    } else {
        Err(format!("{what}: {got:?}, but the naive index has {expected:?}"))
    }
}

/// Compares every answer of the index with the reference.
fn compare(index: &Index, reference: &ReferenceIndex, may_lie: bool) -> FuzzResult {
    for end in [23, 47, 71, 95, 111] {
        let path = path_to(end);
        for from in [0, path.len() / 3] {
            let asked = &path[from..];
            let got = index.longest_prefix(asked);
            if !may_lie {
                // A request from the middle of a prefix is answered only if a node announced its
                // first block without a parent.
                if from == 0 || !got.runs.is_empty() {
                    let expected = reference.longest_prefix(asked);
                    check_equal(&format!("prefix up to block {end} from {from}"), &got, &expected)?;
                }
            } else if got.union_blocks() as usize > asked.len() {
                return Err(format!("{got:?} is longer than the request: {} blocks", asked.len()));
            }
        }
    }
    for hash in (0..BLOCKS).map(hash_of) {
        check_equal("holders of a block", &index.holders_of(hash), &reference.holders_of(hash))?;
    }
    check_equal("counts", &index.stats(), &reference.stats())?;
    for (id, node) in &reference.nodes {
        let state =
            index.node(NodeId(*id)).map(|state| (state.epoch.0, state.live, state.next_seq.0, state.blocks));
        check_equal("a node", &state, &Some((node.epoch, node.live, node.next, node.blocks.len() as u64)))?;
    }
    check_structure(index);
    Ok(())
}

/// Runs the target.
pub(super) fn run(data: &[u8]) -> FuzzResult {
    let mut index = Index::new(limits(data));
    let mut count = 0u32;
    each_command(data, |record, command, reference| {
        let decoded = Command::decode(&command.encode()).map_err(|error| error.to_string())?;
        check_equal("a decoded command", &decoded, &command)?;
        let expected = reference.apply(&command);
        check_equal("the outcome", &index.apply(&command), &expected)?;
        count += 1;
        // Often enough that a failure shows close to its cause.
        if count.is_multiple_of(4) || record.action % 16 == 3 {
            compare(&index, reference, may_lie(data))?;
        }
        if record.flags == 0xFF || count.is_multiple_of(32) {
            let bytes = index.snapshot();
            let restored = Index::restore(&bytes, limits(data)).map_err(|error| error.to_string())?;
            check_equal("bytes of a restored snapshot", &restored.snapshot(), &bytes)?;
            index = restored;
        }
        Ok(())
    })?;
    // Ignored trailing records must not matter.
    let mut last = ReferenceIndex::new(limits(data));
    each_command(data, |_, command, reference| {
        reference.apply(&command);
        last = reference.clone();
        Ok(())
    })?;
    compare(&index, &last, may_lie(data))
}

/// The commands of a case, one a line.
pub(super) fn describe(data: &[u8]) -> String {
    let mut lines = vec![format!("may lie: {}, {:?}", may_lie(data), limits(data))];
    let told = each_command(data, |_, command, reference| {
        let answer = reference.apply(&command);
        lines.push(format!("{command:?} -> {answer:?}"));
        Ok(())
    });
    lines.extend(told.err());
    lines.join("\n")
}

/// Histories with joins first, so that later announcements are accepted.
pub(super) fn seeds() -> Vec<Vec<u8>> {
    let join = |node: u8| [0x40, node, 0, 0, 0, 0, 0, 0];
    let store = |node: u8, end: u8, len: u8| [6, node, 0, 0, end, len, 0, 1];
    let drop = |node: u8, end: u8, len: u8| [6, node, 0, 11, end, len, 0, 1];
    let lives: [Vec<[u8; RECORD_BYTES]>; 3] = [
        vec![join(0), join(1), store(0, 40, 30), store(1, 60, 20), drop(0, 30, 4), store(0, 30, 4)],
        vec![join(0), store(0, 20, 20), [3, 0, 0, 0, 0, 0, 0, 0], join(0), store(0, 30, 12)],
        vec![join(2), join(3), store(2, 110, 9), [0x86, 3, 0, 9, 110, 9, 0, 5], [4, 2, 0, 0, 0, 0, 0, 0]],
    ];
    let mut all: Vec<Vec<u8>> = lives.iter().map(|life| life.concat()).collect();
    // The same with tight limits, and with lying nodes.
    for first in [0, 0x80, 0xC0] {
        for life in &lives {
            let mut other = life.concat();
            other[0] = first;
            all.push(other);
        }
    }
    all
}
