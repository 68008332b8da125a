//! Runs what the book says, and takes in how it went; an SSD that fails stops admitting for a while.

use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, Generation, TenantId, Tier, Timestamp};
use kv_core::tier::{Action, Room};
use kvfleet_transport::MissReason;
use tokio::sync::oneshot;

use super::Store;
use super::packing::Held;
use crate::arena::Purpose;
use crate::tiers::ssd::pace::Pace;
use crate::tiers::ssd::{Done, ReadFault, RecordHeader, Report, Ssd, SsdRecord};

/// After a write error the SSD tier takes no new blocks for this long, then tries again.
pub(crate) const SSD_RETRY: Duration = Duration::from_secs(5);

/// Each try that fails doubles the time to the next, up to this: a dead device costs next to nothing, and
/// one that comes back is noticed in minutes.
pub(crate) const SSD_RETRY_MAX: Duration = Duration::from_secs(300);

/// A move on the SSD thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    key: BlockKey,
    hash: BlockHash,
    record: SsdRecord,
    is_load: bool,
}

/// Readers who wait for a block, and of which tenant.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) waiting: Vec<(TenantId, oneshot::Sender<Result<Bytes, MissReason>>)>,
}

/// Why a tier takes nothing, and until when.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) reason: String,
    pub(super) until: Instant,
    pub(super) wait: Duration,
}

impl Store {
    /// Runs everything that can run now, then hands out the changes.
    pub(super) fn pump(&mut self) {
        let now = self.now();
        let demotions = self.parts.writes.left(now) / self.parts.frame_bytes_max.max(1) as u64;
        self.parts.book.set_demotions(usize::try_from(demotions).unwrap_or(usize::MAX));
        self.parts.book.set_ssd_room(self.parts.ssd.as_ref().map_or(usize::MAX, Ssd::writes_left));
        self.settle_gpu();
        self.parts.book.prefetch(now);
        self.weed(now);
        self.act();
        if let Some(ssd) = self.parts.ssd.as_mut() {
            ssd.go_on();
        }
        // What goes need not be moved first, and what was moved may let a load begin.
        self.pack();
        self.act();
        // What is asked next finds how it is now.
        self.parts.book.set_ssd_room(self.parts.ssd.as_ref().map_or(usize::MAX, Ssd::writes_left));
        self.tell_changes();
    }

    /// Lets go of what is not worth being written to the SSD again, where room is made there.
    fn weed(&mut self, now: Timestamp) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        for owner in ssd.next_to_move() {
            self.parts.book.on_rewrite(BlockKey(owner), now);
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.next_action() {
            match action {
                Action::Demote { key, hash } => self.demote(key, hash),
                Action::Promote { key, hash } => self.promote(key, hash),
                Action::DropDram { key } => self.row(key).dram = None,
                Action::DropSsd { key, hash, generation } => self.drop_ssd(key, (hash, generation)),
                Action::Lift { key, hash } => self.lift(key, hash),
                Action::Lower { key, hash } => self.lower(key, hash),
                Action::DropGpu { key, hash, generation } => self.drop_gpu(key, (hash, generation)),
            }
        }
    }

    fn next_action(&mut self) -> Option<Action> {
        let slow = self.parts.ssd.as_ref().map_or((0, 0), Ssd::slow_moves);
        let slots = self.slots.without(slow);
        let free = slots.load();
        let room = self.parts.arena.has_room(Purpose::Load);
        let dram = free && room;
        // While the arena has no room, demotions are what the reader waits for.
        let reader_waits = room && self.loads.len() > slow.1;
        // While the SSD is in trouble demotions may "start": they fail at once and the blocks go.
        let space = self.parts.ssd.as_ref().is_none_or(Ssd::has_room);
        let ssd = self.trouble.is_some() || (space && slots.demotion(reader_waits));
        let prefetch = free && self.parts.arena.has_room(Purpose::Prefetch);
        let gpu = self.gpu_room();
        let (gpu_read, lower, lift) = (gpu.read, gpu.lower, gpu.lift);
        self.parts.book.next_action(Room { dram, ssd, prefetch, gpu_read, lower, lift })
    }

    fn demote(&mut self, key: BlockKey, hash: BlockHash) {
        if self.trouble.is_none() && self.parts.ssd.as_ref().is_some_and(Ssd::is_behind) {
            return self.parts.book.on_write_refused(key, self.now());
        }
        if self.trouble.is_none() && !self.may_write(key) {
            self.parts.metrics.ssd_spared();
            return self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
        }
        match self.try_demote(key, hash) {
            Ok(true) => {}
            Ok(false) => self.parts.book.on_move_delayed(key, Tier::Ssd),
            Err(cause) => {
                if self.trouble.is_none() {
                    self.stop_admitting(&cause);
                }
                self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
            }
        }
    }

    /// Whether the day's budget has room for the block. A demotion that is put off asks again, and pays again;
    /// that is rare, since it begins only when there is room.
    fn may_write(&mut self, key: BlockKey) -> bool {
        let bytes = self.row(key).dram.as_ref().map_or(0, |frame| frame.len() as u64);
        let now = self.now();
        self.parts.writes.take(bytes, now)
    }

    /// What was written again for the sake of space counts against the budget, and is shown.
    pub(super) fn count_wear(&mut self, now: Timestamp) {
        let Some(wear) = self.parts.ssd.as_ref().map(Ssd::wear) else { return };
        self.parts.writes.spend(wear.rescued_bytes - self.rescued_bytes, now);
        self.rescued_bytes = wear.rescued_bytes;
        self.parts.metrics.ssd_wear(wear);
    }

    /// `Ok(false)` when there is no slot now, which is no failure.
    fn try_demote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<bool> {
        if self.trouble.is_some() {
            return Err(io::ErrorKind::Other.into());
        }
        let frame = self.row(key).dram.as_ref().map(Held::lend).ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let generation = self.generation_of(key);
        let mut traits = meta.traits;
        traits.bytes = u32::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ssd = self.parts.ssd.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let header =
            RecordHeader { hash, parent: meta.parent, tenant: meta.tenant, traits, generation, sequence: 0 };
        self.next_token += 1;
        let Some(record) = ssd.write(self.next_token, key.0, header, &frame)? else { return Ok(false) };
        self.begin(Move { key, hash, record, is_load: false });
        Ok(true)
    }

    /// A job with the newest token is on its way.
    fn begin(&mut self, move_: Move) {
        self.slots.begin(move_.is_load);
        self.moves.insert(self.next_token, move_);
    }

    fn end(&mut self, token: u64) -> Option<Move> {
        let ended = self.moves.remove(&token)?;
        self.slots.end(ended.is_load);
        Some(ended)
    }

    fn promote(&mut self, key: BlockKey, hash: BlockHash) {
        if !self.may_promote(key, hash) {
            self.parts.metrics.ssd_behind(1);
            self.tell_waiting((hash, self.generation_of(key)), &Err(MissReason::Busy));
            return self.parts.book.on_load_refused(key, self.now());
        }
        match self.try_promote(key, hash) {
            Ok(true) => {}
            Ok(false) => self.parts.book.on_move_delayed(key, Tier::Dram),
            Err(cause) => {
                tracing::error!(%cause, %hash, "a block could not be loaded");
                self.load_failed(key, hash, MissReason::MediumFailed);
            }
        }
    }

    /// Whether the block would not stand behind others on a slow device, where whoever waits rather computes it.
    fn may_promote(&mut self, key: BlockKey, hash: BlockHash) -> bool {
        let is_awaited = self.loads.contains_key(&(hash, self.generation_of(key)));
        let record = self.row(key).ssd;
        let ssd = self.parts.ssd.as_ref();
        record.zip(ssd).is_none_or(|(record, ssd)| ssd.may_read(record, is_awaited))
    }

    /// `Ok(false)` when there is no slot now, which is no failure.
    fn try_promote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<bool> {
        let record = self.row(key).ssd.ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let generation = self.generation_of(key);
        let len = meta.traits.bytes as usize;
        if len > self.parts.frame_bytes_max {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(into) = self.parts.arena.take(len, Purpose::Load) else { return Ok(false) };
        let ssd = self.parts.ssd.as_mut().ok_or(io::ErrorKind::NotFound)?;
        self.next_token += 1;
        ssd.read(self.next_token, record, (hash, generation), into)?;
        self.begin(Move { key, hash, record, is_load: true });
        Ok(true)
    }

    fn drop_ssd(&mut self, key: BlockKey, block: (BlockHash, Generation)) {
        if let Some(record) = self.row(key).ssd.take()
            && let Some(ssd) = self.parts.ssd.as_mut()
        {
            ssd.free(record);
        }
        // A block may go before its load began; whoever waits for it must hear that it will not come.
        self.tell_waiting(block, &Err(MissReason::NotHeld));
    }

    pub(super) fn on_report(&mut self, report: Report) {
        match self.parts.ssd.as_mut().and_then(|ssd| ssd.take_in(report)) {
            Some(Done::Written { token, result }) => self.on_written(token, result),
            Some(Done::Read { token, result }) => self.on_read(token, result),
            Some(Done::Lost { record, owner, fault }) => self.on_lost(record, BlockKey(owner), &fault),
            Some(Done::Checked { result }) => self.on_checked(result),
            Some(Done::Failed { cause }) => self.stop_admitting(&cause),
            None => {}
        }
    }

    /// Sees which SSDs are slow, and takes the tier for as large as it is without them.
    pub(super) fn look_at_ssds(&mut self) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        ssd.look();
        let sizes = &self.parts.capacities;
        self.parts.book.set_capacity(Tier::Ssd, ssd.usable(sizes.ssd, sizes.slots.largest().ssd));
        self.parts.metrics.slow_ssds(ssd.slow_devices());
        let unwritten = self.parts.book.stats(Tier::Dram).unwritten_blocks;
        self.parts.metrics.ssd_behind(unwritten - self.unwritten_blocks);
        self.unwritten_blocks = unwritten;
    }

    /// Has records checked that nobody asked for, at their pace.
    pub(super) fn scrub(&mut self, now: Timestamp) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        while self.parts.scrub.is_due(now)
            && let Some(bytes) = ssd.check_next(Pace::pass(now))
        {
            self.parts.scrub.spend(bytes, now);
        }
    }

    fn on_checked(&mut self, result: io::Result<u64>) {
        match result {
            Ok(bytes) => self.parts.metrics.scrubbed(bytes),
            Err(cause) => {
                tracing::warn!(%cause, "a block on SSD could not be read while it was checked; it stays until somebody asks for it; check the medium when this repeats");
                self.parts.metrics.ssd_error();
                self.parts.scrub.pause(self.now());
            }
        }
    }

    /// A block that was found to be unreadable before anybody asked: it is gone.
    fn on_lost(&mut self, record: SsdRecord, key: BlockKey, fault: &ReadFault) {
        let Some(row) = self.rows.get_mut(key.0 as usize).filter(|row| row.ssd == Some(record)) else {
            return;
        };
        row.ssd = None;
        let Some(hash) = self.parts.book.meta(key).map(|meta| meta.hash) else { return };
        self.log_unusable(fault, hash);
        self.parts.book.on_lost(key);
    }

    fn log_unusable(&self, fault: &ReadFault, hash: BlockHash) {
        tracing::error!(%fault, %hash, "a block on SSD is unusable and was dropped; check the medium when this repeats");
        self.parts.metrics.ssd_error();
    }

    fn on_written(&mut self, token: u64, result: io::Result<()>) {
        let Some(Move { key, record, .. }) = self.end(token) else { return };
        match result {
            Ok(()) => {
                self.row(key).ssd = Some(record);
                self.parts.book.on_moved(key, Tier::Ssd);
                if self.trouble.is_none() && self.probation.take().is_some() {
                    tracing::info!("the SSD tier writes again");
                }
            }
            Err(cause) => {
                self.stop_admitting(&cause);
                self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
            }
        }
    }

    fn on_read(&mut self, token: u64, result: Result<Bytes, ReadFault>) {
        let Some(Move { key, hash, .. }) = self.end(token) else { return };
        match result {
            Ok(bytes) => self.loaded(key, hash, bytes),
            Err(fault) => {
                self.log_unusable(&fault, hash);
                let reason = match fault {
                    ReadFault::Medium(_) => MissReason::MediumFailed,
                    ReadFault::Corrupt(_) => MissReason::Corrupt,
                };
                self.load_failed(key, hash, reason);
            }
        }
    }

    /// A block's bytes came to DRAM, from SSD or a GPU, and are right.
    pub(super) fn loaded(&mut self, key: BlockKey, hash: BlockHash, bytes: Bytes) {
        self.keep(key, bytes);
        let readable = self.row(key).dram.as_ref().map(Held::lend);
        let owner = self.parts.book.meta(key).map(|meta| meta.tenant);
        let block = (hash, self.generation_of(key));
        self.tell_waiting(block, &readable.zip(owner).ok_or(MissReason::NotHeld));
        self.parts.book.on_moved(key, Tier::Dram);
    }

    pub(super) fn load_failed(&mut self, key: BlockKey, hash: BlockHash, reason: MissReason) {
        self.tell_waiting((hash, self.generation_of(key)), &Err(reason));
        self.parts.book.on_move_failed(key, Tier::Dram, self.now());
    }

    /// The weights of a block that moves: the book knows its key until the move ends.
    pub(super) fn generation_of(&self, key: BlockKey) -> Generation {
        self.parts.book.generation_of(key).unwrap_or_default()
    }

    /// What became of a load: the bytes and whose they are.
    pub(super) fn tell_waiting(
        &mut self,
        block: (BlockHash, Generation),
        result: &Result<(Bytes, TenantId), MissReason>,
    ) {
        for (tenant, waiting) in self.loads.remove(&block).unwrap_or_default().waiting {
            let told = match result {
                Ok((bytes, owner)) if *owner == tenant => Ok(bytes.clone()),
                // A block that was over before its load ended, whose hash another tenant took meanwhile.
                Ok(_) => Err(MissReason::NotHeld),
                Err(reason) => Err(*reason),
            };
            // A reader past its deadline is gone.
            let _ = waiting.send(told);
        }
    }

    fn stop_admitting(&mut self, cause: &io::Error) {
        self.parts.metrics.ssd_error();
        let remedy = match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room there or lower ssd_bytes",
            _ => "check the medium",
        };
        // Blocks that were on their way when it failed say the same once more.
        let wait = self.trouble.as_ref().map_or_else(|| next_wait(self.probation), |trouble| trouble.wait);
        let reason = format!("writing failed: {cause}; {remedy}; trying again after {} s", wait.as_secs());
        if self.trouble.is_none() && self.probation.is_none() {
            tracing::error!(reason, "the SSD tier stops admitting blocks");
        }
        self.trouble = Some(Trouble { reason, until: Instant::now() + wait, wait });
        self.probation = Some(wait);
        self.parts.book.set_admitting(Tier::Ssd, false);
    }

    pub(super) fn retry_ssd(&mut self) {
        if self.trouble.as_ref().is_some_and(|trouble| Instant::now() >= trouble.until) {
            self.trouble = None;
            if let Some(ssd) = self.parts.ssd.as_mut() {
                ssd.resume();
            }
            self.parts.book.set_admitting(Tier::Ssd, true);
        }
    }
}

/// How long a device is left alone that fails, after the wait before.
pub(super) fn next_wait(before: Option<Duration>) -> Duration {
    before.map_or(SSD_RETRY, |before| (before * 2).min(SSD_RETRY_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_try_that_fails_doubles_the_wait_up_to_its_limit() {
        let mut waits = vec![next_wait(None)];
        for _ in 0..10 {
            waits.push(next_wait(waits.last().copied()));
        }
        let seconds: Vec<u64> = waits.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]);
    }
}
