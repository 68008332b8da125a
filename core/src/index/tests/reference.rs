//! A naive reference index: ordered maps, computed eagerly. It shares only the command list with
//! the real index.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use super::*;
use crate::index::nodes::DEPARTED_MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReferenceNode {
    pub(super) record: NodeRecord,
    pub(super) epoch: u64,
    pub(super) live: bool,
    pub(super) next: u64,
    pub(super) blocks: BTreeMap<BlockHash, BTreeSet<Tier>>,
}

#[derive(Clone, Debug)]
pub(super) struct ReferenceIndex {
    pub(super) limits: IndexLimits,
    pub(super) nodes: BTreeMap<u32, ReferenceNode>,
    pub(super) departed: BTreeMap<u32, u64>,
    pub(super) floor: u64,
    pub(super) pins: BTreeMap<u64, Pin>,
    pub(super) quotas: BTreeMap<u32, u64>,
    pub(super) ttls: BTreeMap<u32, u64>,
    pub(super) generation: u32,
}

type ApplyResult = Result<Applied, Refusal>;

fn limit(what: &str, got: usize, limit: u64) -> Result<(), Refusal> {
    let got = got as u64;
    if got > limit { Err(Refusal::OverLimit { what: what.to_owned(), got, limit }) } else { Ok(()) }
}

fn set(map: &mut BTreeMap<u32, u64>, key: u32, value: Option<u64>, what: &str, most: u32) -> ApplyResult {
    let mut wanted = map.clone();
    match value {
        Some(value) => wanted.insert(key, value),
        None => wanted.remove(&key),
    };
    if wanted == *map {
        return Ok(Applied::Ignored);
    }
    if wanted.len() > map.len() {
        limit(what, wanted.len(), most.into())?;
    }
    *map = wanted;
    Ok(Applied::Done)
}

impl ReferenceIndex {
    pub(super) fn new(limits: IndexLimits) -> Self {
        Self {
            limits,
            nodes: BTreeMap::new(),
            departed: BTreeMap::new(),
            floor: 0,
            pins: BTreeMap::new(),
            quotas: BTreeMap::new(),
            ttls: BTreeMap::new(),
            generation: 0,
        }
    }

    pub(super) fn apply(&mut self, command: &Command) -> Applied {
        self.try_apply(command).unwrap_or_else(Applied::Refused)
    }

    fn try_apply(&mut self, command: &Command) -> ApplyResult {
        let limits = self.limits;
        match command {
            Command::Join(record) => self.join(record),
            Command::Admit { record, epoch } => self.admit(record, epoch.0),
            Command::Fence { node, epoch } => Ok(self.fence(node.0, epoch.0)),
            Command::Leave { node, epoch } => Ok(self.leave(node.0, epoch.0)),
            Command::Announce(batch) => self.announce(batch),
            Command::Pin(pin) => self.pin(pin),
            Command::Unpin { pin, owner, ends_ms } => match self.pins.get(&pin.0) {
                None => Ok(Applied::Ignored),
                Some(known) if known.owner != *owner => {
                    Err(Refusal::NotOwner { pin: *pin, owner: known.owner.clone() })
                }
                Some(known) if ends_ms.is_some_and(|ends_ms| known.ends_ms != Some(ends_ms)) => {
                    Ok(Applied::Ignored)
                }
                Some(_) => {
                    self.pins.remove(&pin.0);
                    Ok(Applied::Done)
                }
            },
            Command::SetQuota { tenant, bytes } => {
                set(&mut self.quotas, tenant.0, *bytes, "tenants with a quota", limits.quotas_max)
            }
            Command::SetTtl { group, ttl_ms } => {
                set(&mut self.ttls, group.0, *ttl_ms, "groups with a time to live", limits.ttls_max)
            }
            Command::SetGeneration(to) if to.0 == self.generation => Ok(Applied::Ignored),
            Command::SetGeneration(to) if u64::from(to.0) == u64::from(self.generation) + 1 => {
                self.generation = to.0;
                self.nodes.values_mut().for_each(ReferenceNode::end);
                Ok(Applied::Done)
            }
            Command::SetGeneration(to) => {
                Err(Refusal::Generation { now: Generation(self.generation), to: *to })
            }
        }
    }

    fn admit(&mut self, record: &NodeRecord, epoch: u64) -> ApplyResult {
        self.check_identity(record)?;
        let id = record.node.0;
        let known = self.nodes.get(&id).map(|node| node.epoch).or(self.departed.get(&id).copied());
        if known.is_some_and(|known| known >= epoch) {
            return Ok(Applied::Ignored);
        }
        self.enter(record, epoch)?;
        Ok(Applied::Done)
    }

    fn check_identity(&self, record: &NodeRecord) -> Result<(), Refusal> {
        if let Some(ours) = self.nodes.values().map(|node| node.record.identity).next()
            && ours != record.identity
        {
            return Err(Refusal::Identity { ours, theirs: record.identity });
        }
        Ok(())
    }

    fn join(&mut self, record: &NodeRecord) -> ApplyResult {
        self.check_identity(record)?;
        let id = record.node.0;
        let last = self.nodes.get(&id).map(|node| node.epoch);
        let last = last.unwrap_or_else(|| self.departed.get(&id).copied().unwrap_or(0).max(self.floor));
        self.enter(record, last + 1)?;
        Ok(Applied::Joined(Epoch(last + 1)))
    }

    fn enter(&mut self, record: &NodeRecord, epoch: u64) -> Result<(), Refusal> {
        let id = record.node.0;
        let others = self.nodes.keys().filter(|&&node| node != id).count();
        limit("nodes", others + 1, self.limits.nodes_max.into())?;
        self.departed.remove(&id);
        let (live, next) = (true, 1);
        let entered = ReferenceNode { record: record.clone(), epoch, live, next, blocks: BTreeMap::new() };
        self.nodes.insert(id, entered);
        Ok(())
    }

    fn fence(&mut self, id: u32, epoch: u64) -> Applied {
        match self.nodes.get_mut(&id) {
            Some(node) if node.live && node.epoch == epoch => {
                node.end();
                Applied::Done
            }
            _ => Applied::Ignored,
        }
    }

    fn leave(&mut self, id: u32, epoch: u64) -> Applied {
        if self.nodes.get(&id).is_none_or(|node| node.epoch != epoch) {
            return Applied::Ignored;
        }
        self.nodes.remove(&id);
        self.departed.insert(id, epoch);
        if self.departed.len() > DEPARTED_MAX {
            let mut by_epoch: Vec<(u64, u32)> =
                self.departed.iter().map(|(&id, &epoch)| (epoch, id)).collect();
            by_epoch.sort_unstable();
            self.departed.remove(&by_epoch[0].1);
            self.floor = self.floor.max(by_epoch[0].0);
        }
        Applied::Done
    }

    fn announce(&mut self, batch: &[Announcement]) -> ApplyResult {
        let mut changes = batch.len();
        let mut named = 0;
        for change in batch.iter().flat_map(|one| &one.changes) {
            changes += 1;
            named += match change {
                Change::Stored { blocks, .. }
                | Change::Moved { blocks, .. }
                | Change::Dropped { blocks, .. } => blocks.len(),
                Change::Cleared => 0,
            };
        }
        limit("changes in one announce", changes, self.limits.announce_changes_max.into())?;
        limit("blocks in one announce", named, self.limits.announce_blocks_max.into())?;
        Ok(Applied::Announced(batch.iter().map(|one| self.announce_one(one)).collect()))
    }

    fn announce_one(&mut self, one: &Announcement) -> AnnounceOutcome {
        let others: usize =
            self.nodes.iter().filter(|(id, _)| **id != one.node.0).map(|(_, node)| node.blocks.len()).sum();
        let room = (self.limits.copies_max as usize).saturating_sub(others);
        let Some(node) = self.nodes.get_mut(&one.node.0) else { return AnnounceOutcome::Fenced };
        if !node.live || node.epoch != one.epoch.0 {
            return AnnounceOutcome::Fenced;
        }
        if one.seq.0 < node.next {
            return AnnounceOutcome::Duplicate { next: Seq(node.next) };
        }
        if one.seq.0 > node.next {
            return AnnounceOutcome::Gap { expected: Seq(node.next) };
        }
        node.next += 1;
        let unlisted = one.changes.iter().map(|change| node.change(change, room)).sum();
        AnnounceOutcome::Applied { next: Seq(node.next), unlisted }
    }

    fn pin(&mut self, pin: &Pin) -> ApplyResult {
        limit("blocks of one pin", pin.blocks.len(), self.limits.pin_blocks_max.into())?;
        match self.pins.get(&pin.pin.0) {
            Some(known) if known == pin => return Ok(Applied::Ignored),
            Some(known) if known.owner == pin.owner && known.blocks == pin.blocks => {
                self.pins.insert(pin.pin.0, pin.clone());
                return Ok(Applied::Done);
            }
            Some(_) => return Err(Refusal::PinExists(pin.pin)),
            None => {}
        }
        limit("pins", self.pins.len() + 1, self.limits.pins_max.into())?;
        let blocks = self.pins.values().map(|pin| pin.blocks.len()).sum::<usize>() + pin.blocks.len();
        limit("blocks of all pins", blocks, self.limits.pinned_blocks_max.into())?;
        self.pins.insert(pin.pin.0, pin.clone());
        Ok(Applied::Done)
    }

    fn holders(&self, hash: BlockHash) -> Vec<Holder> {
        let hold = |(&id, node): (&u32, &ReferenceNode)| {
            let tier = *node.blocks.get(&hash)?.last()?;
            Some(Holder { node: NodeId(id), epoch: Epoch(node.epoch), tier })
        };
        self.nodes.iter().filter_map(hold).collect()
    }

    /// The holders of a block.
    pub(super) fn holders_of(&self, hash: BlockHash) -> SmallVec<[Holder; 4]> {
        self.longest_prefix(&[hash]).runs.pop().map_or_else(SmallVec::new, |run| run.holders)
    }

    pub(super) fn longest_prefix(&self, hashes: &[BlockHash]) -> PrefixMatch {
        let mut runs: Vec<HolderRun> = Vec::new();
        for (offset, &hash) in hashes.iter().enumerate() {
            let holders = self.holders(hash);
            if holders.is_empty() {
                break;
            }
            match runs.last_mut() {
                Some(run) if run.holders.to_vec() == holders => run.len_blocks += 1,
                _ => {
                    let start_blocks = offset as u32;
                    runs.push(HolderRun { start_blocks, len_blocks: 1, holders: holders.into() });
                }
            }
        }
        PrefixMatch { runs }
    }

    pub(super) fn stats(&self) -> IndexStats {
        let held = || self.nodes.values().flat_map(|node| node.blocks.keys());
        IndexStats {
            blocks: held().collect::<BTreeSet<_>>().len() as u64,
            copies: held().count() as u64,
            pins: self.pins.len() as u64,
            pinned_blocks: self.pins.values().map(|pin| pin.blocks.len() as u64).sum(),
            nodes: self.nodes.len() as u64,
            live_nodes: self.nodes.values().filter(|node| node.live).count() as u64,
            quotas: self.quotas.len() as u64,
            ttls: self.ttls.len() as u64,
        }
    }

    /// The logical state as text: equal exactly if two states are equal.
    pub(super) fn state(&self) -> String {
        let Self { limits: _, nodes, departed, floor, pins, quotas, ttls, generation } = self;
        format!("{nodes:?} {departed:?} {floor} {pins:?} {quotas:?} {ttls:?} {generation}")
    }

    /// Another history that ends in the same state: nodes join in reverse order, and every block is
    /// announced alone and dropped once on the way. `None` if epochs were folded into the floor,
    /// because no short history repeats that.
    pub(super) fn other_history(&self) -> Option<Vec<Command>> {
        if self.floor > 0 {
            return None;
        }
        let mut log: Vec<Command> =
            (1..=self.generation).map(|to| Command::SetGeneration(Generation(to))).collect();
        let ghost = |node: u32| NodeRecord { node: NodeId(node), ..self.any_record() };
        for (&node, &epoch) in self.departed.iter().rev() {
            log.extend((0..epoch).map(|_| Command::Join(ghost(node))));
            log.push(leave(node, epoch));
        }
        for (&id, node) in self.nodes.iter().rev() {
            log.extend((0..node.epoch).map(|_| Command::Join(node.record.clone())));
            node.announce_blocks(id, &mut log);
            log.extend((!node.live).then(|| fence(id, node.epoch)));
        }
        log.extend(self.pins.values().rev().cloned().map(Command::Pin));
        let quota = |(&tenant, &bytes)| Command::SetQuota { tenant: TenantId(tenant), bytes: Some(bytes) };
        log.extend(self.quotas.iter().rev().map(quota));
        let ttl = |(&group, &ttl_ms)| Command::SetTtl { group: TtlGroupId(group), ttl_ms: Some(ttl_ms) };
        log.extend(self.ttls.iter().rev().map(ttl));
        Some(log)
    }

    fn any_record(&self) -> NodeRecord {
        self.nodes.values().next().map_or_else(|| record(0), |node| node.record.clone())
    }
}

impl ReferenceNode {
    fn end(&mut self) {
        self.live = false;
        self.blocks.clear();
    }

    /// Returns the number of blocks not listed for lack of space.
    fn change(&mut self, change: &Change, room: usize) -> u64 {
        let mut unlisted = 0;
        match change {
            Change::Stored { blocks, tier, .. } => {
                for hash in blocks {
                    if self.blocks.contains_key(hash) || self.blocks.len() < room {
                        self.blocks.entry(*hash).or_default().insert(*tier);
                    } else {
                        unlisted += 1;
                    }
                }
            }
            Change::Moved { blocks, from, to } => {
                for hash in blocks {
                    if self.blocks.contains_key(hash) || self.blocks.len() < room {
                        let tiers = self.blocks.entry(*hash).or_default();
                        tiers.remove(from);
                        tiers.insert(*to);
                    } else {
                        unlisted += 1;
                    }
                }
            }
            Change::Dropped { blocks, tier, .. } => {
                for hash in blocks {
                    self.blocks.entry(*hash).or_default().remove(tier);
                }
                self.blocks.retain(|_, tiers| !tiers.is_empty());
            }
            Change::Cleared => self.blocks.clear(),
        }
        unlisted
    }

    /// Exactly `next - 1` announcements that end in this node's blocks.
    fn announce_blocks(&self, id: u32, log: &mut Vec<Command>) {
        let mut changes = vec![Change::Cleared];
        for (&hash, tiers) in self.blocks.iter().rev() {
            let blocks = || vec![hash];
            changes.push(Change::Stored { parent: None, blocks: blocks(), tier: Tier::Gpu });
            for &tier in tiers {
                changes.push(Change::Stored { parent: Some(hash), blocks: blocks(), tier });
            }
            if !tiers.contains(&Tier::Gpu) {
                changes.push(Change::Dropped {
                    blocks: blocks(),
                    tier: Tier::Gpu,
                    cause: Default::default(),
                });
            }
        }
        for seq in 1..self.next {
            let now = if seq + 1 == self.next { std::mem::take(&mut changes) } else { Vec::new() };
            log.push(Command::Announce(vec![announcement(id, self.epoch, seq, now)]));
        }
    }
}
