//! The soft plane: which blocks the engine of each instance has in GPU memory, as it reports them.
//!
//! Reports are numbered batches under an epoch, the start of the instance. A later epoch voids everything before
//! it; what was here before is ignored; what is missing is asked for again. Pure: the time is an argument. Not
//! here: the messages (`crate::server::residency`), and the blocks that nodes announce, which are in the log
//! (`published.rs`). Lost on restart, and sent again on request (`docs/adr/0021`).
//!
//! While batches of an instance are missing, what it said before goes on counting and is called uncertain. The
//! blocks named by the missing batches are few against all it has: dropping everything would cost every one of its
//! prefixes a worse choice, keeping it costs a recompute for those few that are gone. Both are bounded: what stays
//! uncertain for [`UNCERTAIN_MAX`] without progress is dropped.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{BlockHash, IdentityDigest, InstanceId, NodeId, Timestamp};
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Change, Command, NodeRecord};
use kv_core::index::{Index, IndexLimits, PrefixMatch};
use kv_core::schedule::REPORT_STALE_AFTER;

use super::fleet::{FORGOTTEN_AFTER, INSTANCES_MAX};

/// Blocks of one batch: what is applied while readers wait, well below a millisecond.
pub(crate) const BATCH_BLOCKS_MAX: usize = 4_096;

/// Blocks of one instance: sixteen million tokens in blocks of sixteen. An engine that has more in GPU memory does
/// not exist, and a reporter gone mad must not fill the memory of the routers.
pub(crate) const INSTANCE_BLOCKS_MAX: u64 = 1_048_576;

/// (instance, block) pairs in all: about 700 MiB at 22 bytes each. Above it blocks are not listed, which is said.
pub(crate) const RESIDENT_BLOCKS_MAX: u64 = 33_554_432;

/// Silence that ends what an instance said: the same after which no request is sent there.
pub(crate) const SILENCE: Duration = REPORT_STALE_AFTER;

/// Longest that blocks count while batches are missing and none comes: the missing ones are sent with the next
/// report, a fifth of a second later.
pub(crate) const UNCERTAIN_MAX: Duration = REPORT_STALE_AFTER;

/// How often silence is looked at; the caller's task keeps to it.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Instances that one look ends or forgets: each costs some tens of microseconds, while readers wait.
const LOOK_MOST: usize = 16;

/// A look that comes this much late means that this process was held up and may have unread reports.
const HELD_UP: Duration = Duration::from_millis(500);

/// One numbered batch of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) seq: u64,
    pub(crate) changes: Vec<Change>,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It counts; so many of its blocks found no room.
    Applied { unlisted: u64 },
    /// It was here before.
    Duplicate,
    /// Batches before it are missing.
    Gap,
    /// A later epoch of the instance was heard of.
    Outdated { epoch: u64 },
}

/// Why a batch was not taken. What the instance said before is void with the first, and untouched by the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error(
        "{instance} reports more than {INSTANCE_BLOCKS_MAX} blocks in GPU memory, which is the limit: what it said is \
         void; send Cleared and at most so many"
    )]
    Blocks { instance: InstanceId },
    #[error("{INSTANCES_MAX} instances are known, which is the limit")]
    Instances,
}

/// Where the reports of an instance stand, for answers and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) instance: InstanceId,
    pub(crate) epoch: u64,
    /// Batches up to this one count.
    pub(crate) seq: u64,
    /// Since the last report.
    pub(crate) age: Duration,
    /// There are later batches.
    pub(crate) uncertain: bool,
    /// Leading blocks of the prefix asked for; all, where there is none.
    pub(crate) blocks: u64,
}

/// What became void since the look before, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Instances that said nothing for [`SILENCE`].
    pub(crate) silent: u64,
    /// Instances of which batches were missing for [`UNCERTAIN_MAX`].
    pub(crate) unrepaired: u64,
    /// Instances that started anew, or left.
    pub(crate) restarted: u64,
    /// There may be others: look again.
    pub(crate) more: bool,
}

/// One instance as it reports.
#[derive(Clone, Copy, Debug)]
struct Reporter {
    epoch: u64,
    /// Number of the batch that is wanted next.
    next: u64,
    /// Number of the newest batch there is, as far as it said.
    last: u64,
    heard: Timestamp,
    /// When the last batch was applied, or the first one was missed after a time when none was.
    moved: Timestamp,
}

impl Reporter {
    fn new(epoch: u64, now: Timestamp) -> Reporter {
        Reporter { epoch, next: 1, last: 0, heard: now, moved: now }
    }

    fn is_uncertain(&self) -> bool {
        self.next <= self.last
    }

    /// Learns that there are batches up to this number: a word that comes late knows of fewer.
    fn hears_of(&mut self, last: u64, now: Timestamp) {
        if !self.is_uncertain() {
            self.moved = now;
        }
        self.last = self.last.max(last);
    }
}

/// What the engines of all instances have in GPU memory.
#[derive(Default)]
pub(crate) struct Residency {
    /// Instances stand in it as nodes, under epochs of its own.
    index: Index,
    known: BTreeMap<InstanceId, Reporter>,
    looked: Timestamp,
    ended: Ended,
}

impl Residency {
    pub(crate) fn new(blocks_max: u64, now: Timestamp) -> Residency {
        let limits = IndexLimits { copies_max: blocks_max, ..IndexLimits::default() };
        Residency { index: Index::new(limits), looked: now, ..Residency::default() }
    }

    /// Takes one batch of an instance, if it is the next one or begins anew.
    pub(crate) fn take(
        &mut self,
        instance: InstanceId,
        epoch: u64,
        batch: Batch,
        now: Timestamp,
    ) -> Result<Taken, Refused> {
        if let Some(epoch) = self.hear(instance, epoch, now)? {
            return Ok(Taken::Outdated { epoch });
        }
        let Some(known) = self.known.get_mut(&instance) else { return Ok(Taken::Gap) };
        if batch.seq < known.next {
            return Ok(Taken::Duplicate);
        }
        if batch.seq > known.last {
            known.hears_of(batch.seq, now);
        }
        let begins_anew = matches!(batch.changes.first(), Some(Change::Cleared));
        if batch.seq > known.next && !begins_anew {
            return Ok(Taken::Gap);
        }
        let stored = batch.changes.iter().map(stored_blocks).sum::<u64>();
        let held = if begins_anew { 0 } else { self.blocks_of(instance) };
        if held + stored > INSTANCE_BLOCKS_MAX {
            self.void(instance, now);
            return Err(Refused::Blocks { instance });
        }
        if let Some(known) = self.known.get_mut(&instance) {
            (known.next, known.moved) = (batch.seq.saturating_add(1), now);
        }
        Ok(Taken::Applied { unlisted: self.apply(instance, batch.changes) })
    }

    /// Ends a report: the instance has batches up to `last`. Answers where it stands, under the later epoch if it
    /// is known under one.
    pub(crate) fn conclude(
        &mut self,
        instance: InstanceId,
        epoch: u64,
        last: u64,
        now: Timestamp,
    ) -> Result<Option<Standing>, Refused> {
        if self.hear(instance, epoch, now)?.is_none()
            && let Some(known) = self.known.get_mut(&instance)
        {
            known.hears_of(last, now);
        }
        Ok(self.standing(instance, now))
    }

    /// Notes that an instance speaks. Answers the later epoch it is known under, if there is one.
    fn hear(&mut self, instance: InstanceId, epoch: u64, now: Timestamp) -> Result<Option<u64>, Refused> {
        match self.known.get_mut(&instance) {
            Some(known) if known.epoch > epoch => return Ok(Some(known.epoch)),
            Some(known) if known.epoch == epoch => {
                let was_silent = now.since(known.heard) >= SILENCE;
                known.heard = now;
                if was_silent && !self.was_held_up(now) {
                    self.ended.silent += u64::from(self.void(instance, now));
                }
            }
            Some(_) => self.begin(instance, epoch, now),
            None => {
                if self.known.len() >= INSTANCES_MAX {
                    self.forget(now);
                }
                if self.known.len() >= INSTANCES_MAX {
                    return Err(Refused::Instances);
                }
                self.begin(instance, epoch, now);
            }
        }
        Ok(None)
    }

    /// An instance starts (or starts anew) under this epoch: nothing it said before counts.
    fn begin(&mut self, instance: InstanceId, epoch: u64, now: Timestamp) {
        self.ended.restarted += u64::from(self.clear(instance));
        self.known.insert(instance, Reporter::new(epoch, now));
    }

    /// A load report tells of a start: what was said under an earlier one is void.
    pub(crate) fn started(&mut self, instance: InstanceId, epoch: u64, now: Timestamp) {
        if self.known.get(&instance).is_some_and(|known| known.epoch < epoch) {
            self.begin(instance, epoch, now);
        }
    }

    /// Voids what an instance said under its epoch, and answers whether anything was: it must send everything again.
    fn void(&mut self, instance: InstanceId, now: Timestamp) -> bool {
        let counted = self.clear(instance);
        if let Some(known) = self.known.get_mut(&instance).filter(|_| counted) {
            (known.next, known.moved) = (1, now);
        }
        counted
    }

    /// Whether this process did not get to listen lately: then nobody else is to blame for silence.
    fn was_held_up(&self, now: Timestamp) -> bool {
        now.since(self.looked) > LOOK_EVERY + HELD_UP
    }

    fn clear(&mut self, instance: InstanceId) -> bool {
        let counted = self.blocks_of(instance) > 0;
        if counted {
            self.apply(instance, vec![Change::Cleared]);
        }
        counted
    }

    /// Ends what silent instances said, and what was uncertain for too long; forgets those that are long gone.
    pub(crate) fn look(&mut self, now: Timestamp) -> Ended {
        let held_up = self.was_held_up(now);
        self.looked = now;
        if held_up {
            self.known.values_mut().for_each(|known| (known.heard, known.moved) = (now, now));
        }
        let mut ended = std::mem::take(&mut self.ended);
        let holding = self.known.iter().filter(|(instance, _)| self.blocks_of(**instance) > 0);
        let mut over = Vec::new();
        for (instance, known) in holding {
            if now.since(known.heard) >= SILENCE {
                ended.silent += 1;
            } else if known.is_uncertain() && now.since(known.moved) >= UNCERTAIN_MAX {
                ended.unrepaired += 1;
            } else {
                continue;
            }
            over.push(*instance);
            if over.len() == LOOK_MOST {
                ended.more = true;
                break;
            }
        }
        for instance in over {
            self.void(instance, now);
        }
        self.forget(now);
        ended
    }

    /// Forgets instances that fell silent long ago. Until then a late word of an earlier epoch is known to be one.
    fn forget(&mut self, now: Timestamp) {
        let gone = |(_, known): &(&InstanceId, &Reporter)| now.since(known.heard) >= FORGOTTEN_AFTER;
        let gone: Vec<_> = self.known.iter().filter(gone).map(|(id, _)| *id).take(LOOK_MOST).collect();
        for instance in gone {
            self.known.remove(&instance);
            if let Some(state) = self.index.node(node_of(instance)) {
                let leave = Command::Leave { node: state.record.node, epoch: state.epoch };
                self.index.apply(&leave);
            }
        }
    }

    /// Makes changes of an instance; answers how many blocks found no room.
    fn apply(&mut self, instance: InstanceId, changes: Vec<Change>) -> u64 {
        let node = node_of(instance);
        if self.index.node(node).is_none() {
            self.index.apply(&Command::Join(record_of(node)));
        }
        let (epoch, seq) = self.index.next_seq(node).unwrap_or_default();
        let one = Announcement { node, epoch, seq, changes };
        match self.index.apply(&Command::Announce(vec![one])) {
            Applied::Announced(outcomes) => outcomes.iter().map(unlisted).sum(),
            // Does not happen: a batch is far below the limits of an index.
            other => {
                debug_assert!(false, "{other:?}");
                0
            }
        }
    }

    fn blocks_of(&self, instance: InstanceId) -> u64 {
        self.index.node(node_of(instance)).map_or(0, |state| state.blocks)
    }

    /// Every instance that has the first of these blocks, with how many of them it has without a gap, by ascending
    /// number. Silent ones are left out.
    pub(crate) fn resident(&self, hashes: &[BlockHash], now: Timestamp) -> Vec<Standing> {
        let of = |(node, blocks): (NodeId, u32)| {
            let standing = self.standing(InstanceId(node.0), now)?;
            Some(Standing { blocks: blocks.into(), ..standing })
        };
        let led = leading_blocks(&self.index.longest_prefix(hashes));
        led.into_iter().filter_map(of).filter(|standing| standing.age < SILENCE).collect()
    }

    /// Where the reports of an instance stand.
    pub(crate) fn standing(&self, instance: InstanceId, now: Timestamp) -> Option<Standing> {
        let known = self.known.get(&instance)?;
        Some(Standing {
            instance,
            epoch: known.epoch,
            seq: known.next - 1,
            age: now.since(known.heard),
            uncertain: known.is_uncertain(),
            blocks: self.blocks_of(instance),
        })
    }

    /// Of every instance that is known, by ascending number.
    pub(crate) fn standings(&self, now: Timestamp) -> Vec<Standing> {
        self.known.keys().filter_map(|instance| self.standing(*instance, now)).collect()
    }
}

/// Every node that holds the first block, with how many it holds without a gap, by ascending number; in one pass over
/// the runs.
fn leading_blocks(matched: &PrefixMatch) -> Vec<(NodeId, u32)> {
    let mut led: Vec<(NodeId, u32)> = matched.nodes().map(|node| (node, 0)).collect();
    // Ranks in it of those that hold every run so far.
    let mut holding: Vec<usize> = (0..led.len()).collect();
    for run in &matched.runs {
        let mut holders = run.holders.iter().map(|holder| holder.node).peekable();
        holding.retain(|rank| {
            let (node, blocks) = &mut led[*rank];
            while holders.next_if(|holder| holder < node).is_some() {}
            let holds = holders.peek() == Some(node);
            if holds {
                *blocks = run.end_blocks();
            }
            holds
        });
        if holding.is_empty() {
            break;
        }
    }
    led
}

fn unlisted(outcome: &AnnounceOutcome) -> u64 {
    match outcome {
        AnnounceOutcome::Applied { unlisted, .. } => *unlisted,
        _ => 0,
    }
}

fn stored_blocks(change: &Change) -> u64 {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } => blocks.len() as u64,
        Change::Dropped { .. } | Change::Cleared => 0,
    }
}

/// Instances are the nodes of this index.
fn node_of(instance: InstanceId) -> NodeId {
    NodeId(instance.0)
}

fn record_of(node: NodeId) -> NodeRecord {
    NodeRecord {
        node,
        data_address: String::new(),
        control_address: String::new(),
        host: String::new(),
        instance: None,
        identity: IdentityDigest::default(),
        block_bytes: 0,
    }
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
