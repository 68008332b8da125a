//! Executes the book's actions and reports their results. A failing SSD stops admitting blocks for
//! a while.

use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, Generation, TenantId, Tier, Timestamp};
use kv_core::tier::{Action, MovePermits};
use kvfleet_transport::MissReason;
use tokio::sync::oneshot;

use super::Store;
use super::compaction::DramBlock;
use crate::arena::Purpose;
use crate::tiers::BlockVersion;
use crate::tiers::ssd::pace::ScrubPace;
use crate::tiers::ssd::{ReadFault, RecordHeader, Report, SsdCompletion, SsdRecord, SsdTier};

/// After a write error the SSD tier accepts no new blocks for this long, then tries again.
pub(crate) const SSD_RETRY: Duration = Duration::from_secs(5);

/// Each failed retry doubles the wait up to this: a dead device costs little, and a repaired one is
/// noticed within minutes.
pub(crate) const SSD_RETRY_MAX: Duration = Duration::from_secs(300);

/// A move on the SSD thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct SsdMove {
    key: BlockKey,
    hash: BlockHash,
    record: SsdRecord,
    is_load: bool,
}

/// Readers that wait for a block, with their tenants.
#[derive(Debug, Default)]
pub(super) struct PendingLoad {
    pub(super) waiting: Vec<(TenantId, oneshot::Sender<Result<Bytes, MissReason>>)>,
}

/// Outage of a tier: the reason, its end and the wait.
#[derive(Clone, Debug)]
pub(super) struct TierOutage {
    pub(super) reason: String,
    pub(super) until: Instant,
    pub(super) wait: Duration,
}

impl Store {
    /// Runs all actions that can run now, then publishes the changes.
    pub(super) fn pump(&mut self) {
        let now = self.now();
        let demotions = self.parts.writes.remaining(now) / self.parts.frame_bytes_max.max(1) as u64;
        self.parts.book.set_demotions_max(usize::try_from(demotions).unwrap_or(usize::MAX));
        self.parts
            .book
            .set_ssd_queue_max(self.parts.ssd.as_ref().map_or(usize::MAX, SsdTier::write_capacity));
        self.continue_gpu_loss();
        self.parts.book.prefetch(now);
        self.filter_rewrites(now);
        self.run_actions();
        if let Some(ssd) = self.parts.ssd.as_mut() {
            ssd.relocate_offered();
        }
        // Dropped blocks need no compaction, and compaction may free a slot for a load.
        self.compact();
        self.run_actions();
        // The next request must see the current queue length.
        self.parts
            .book
            .set_ssd_queue_max(self.parts.ssd.as_ref().map_or(usize::MAX, SsdTier::write_capacity));
        self.publish_changes();
    }

    /// Drops blocks that are not worth a rewrite when the SSD frees segments.
    fn filter_rewrites(&mut self, now: Timestamp) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        for owner in ssd.next_to_relocate() {
            self.parts.book.on_rewrite(BlockKey(owner), now);
        }
    }

    fn run_actions(&mut self) {
        while let Some(action) = self.next_action() {
            match action {
                Action::Demote { key, hash } => self.demote(key, hash),
                Action::Promote { key, hash } => self.promote(key, hash),
                Action::DropDram { key } => self.locations_mut(key).dram = None,
                Action::DropSsd { key, hash, generation } => {
                    self.drop_ssd(key, BlockVersion { hash, generation });
                }
                Action::PromoteToGpu { key, hash } => self.promote_to_gpu(key, hash),
                Action::ReadBackFromGpu { key, hash } => self.read_back_from_gpu(key, hash),
                Action::DropGpu { key, hash, generation } => {
                    self.drop_gpu(key, BlockVersion { hash, generation });
                }
            }
        }
    }

    fn next_action(&mut self) -> Option<Action> {
        let (slow_demotions, slow_loads) = self.parts.ssd.as_ref().map_or((0, 0), SsdTier::slow_device_jobs);
        let slots = self.slots.excluding(slow_demotions, slow_loads);
        let free = slots.may_load();
        let room = self.parts.arena.has_room(Purpose::Load);
        let dram = free && room;
        // While the arena has no free slot, the reader waits for demotions.
        let reader_waits = room && self.loads.len() > slow_loads;
        // During an SSD outage demotions may "start": they fail at once and the blocks are dropped.
        let space = self.parts.ssd.as_ref().is_none_or(SsdTier::has_room);
        let ssd = self.outage.is_some() || (space && slots.may_demote(reader_waits));
        let prefetch = free && self.parts.arena.has_room(Purpose::Prefetch);
        let gpu = self.gpu_permits();
        let (gpu_read, lower, lift) = (gpu.read, gpu.read_back, gpu.promote);
        self.parts.book.next_action(MovePermits {
            dram,
            ssd,
            prefetch,
            gpu_read,
            gpu_read_back: lower,
            gpu_promote: lift,
        })
    }

    fn demote(&mut self, key: BlockKey, hash: BlockHash) {
        if self.outage.is_none() && self.parts.ssd.as_ref().is_some_and(SsdTier::is_overloaded) {
            return self.parts.book.on_write_refused(key, self.now());
        }
        if self.outage.is_none() && !self.may_write(key) {
            self.parts.metrics.ssd_over_budget();
            return self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
        }
        match self.try_demote(key, hash) {
            Ok(true) => {}
            Ok(false) => self.parts.book.on_move_delayed(key, Tier::Ssd),
            Err(cause) => {
                if self.outage.is_none() {
                    self.stop_admitting(&cause);
                }
                self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
            }
        }
    }

    /// Whether the daily write budget covers the block. A delayed demotion pays again; this is
    /// rare, since it only begins if there is space.
    fn may_write(&mut self, key: BlockKey) -> bool {
        let bytes = self.locations_mut(key).dram.as_ref().map_or(0, |frame| frame.len() as u64);
        let now = self.now();
        self.parts.writes.try_take(bytes, now)
    }

    /// Charges rewritten bytes to the write budget and updates the metric.
    pub(super) fn count_wear(&mut self, now: Timestamp) {
        let Some(wear) = self.parts.ssd.as_ref().map(SsdTier::wear) else { return };
        self.parts.writes.charge(wear.rewritten_bytes - self.rescued_bytes, now);
        self.rescued_bytes = wear.rewritten_bytes;
        self.parts.metrics.ssd_wear(wear);
    }

    /// `Ok(false)` if there is no slot now, which is no failure.
    fn try_demote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<bool> {
        if self.outage.is_some() {
            return Err(io::ErrorKind::Other.into());
        }
        let frame =
            self.locations_mut(key).dram.as_ref().map(DramBlock::share).ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let generation = self.generation_of(key);
        let mut traits = meta.traits;
        traits.bytes = u32::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ssd = self.parts.ssd.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let header =
            RecordHeader { hash, parent: meta.parent, tenant: meta.tenant, traits, generation, sequence: 0 };
        self.next_token += 1;
        let Some(record) = ssd.write(self.next_token, key.0, header, &frame)? else { return Ok(false) };
        self.begin_move(SsdMove { key, hash, record, is_load: false });
        Ok(true)
    }

    /// Records a job sent with the newest token.
    fn begin_move(&mut self, move_: SsdMove) {
        self.slots.begin(move_.is_load);
        self.moves.insert(self.next_token, move_);
    }

    fn end_move(&mut self, token: u64) -> Option<SsdMove> {
        let ended = self.moves.remove(&token)?;
        self.slots.end(ended.is_load);
        Some(ended)
    }

    fn promote(&mut self, key: BlockKey, hash: BlockHash) {
        if !self.may_promote(key, hash) {
            self.parts.metrics.ssd_overloaded(1);
            self.notify_waiting(self.version_of(key, hash), &Err(MissReason::Busy));
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

    /// Whether the load would start without queueing on a slow device; otherwise the reader
    /// recomputes the block.
    fn may_promote(&mut self, key: BlockKey, hash: BlockHash) -> bool {
        let is_awaited = self.loads.contains_key(&self.version_of(key, hash));
        let record = self.locations_mut(key).ssd;
        let ssd = self.parts.ssd.as_ref();
        record.zip(ssd).is_none_or(|(record, ssd)| ssd.may_read(record, is_awaited))
    }

    /// `Ok(false)` if there is no slot now, which is no failure.
    fn try_promote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<bool> {
        let record = self.locations_mut(key).ssd.ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let block = self.version_of(key, hash);
        let len = meta.traits.bytes as usize;
        if len > self.parts.frame_bytes_max {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let Some(into) = self.parts.arena.take(len, Purpose::Load) else { return Ok(false) };
        let ssd = self.parts.ssd.as_mut().ok_or(io::ErrorKind::NotFound)?;
        self.next_token += 1;
        ssd.read(self.next_token, record, block, into)?;
        self.begin_move(SsdMove { key, hash, record, is_load: true });
        Ok(true)
    }

    fn drop_ssd(&mut self, key: BlockKey, block: BlockVersion) {
        if let Some(record) = self.locations_mut(key).ssd.take()
            && let Some(ssd) = self.parts.ssd.as_mut()
        {
            ssd.free(record);
        }
        // A block may be dropped before its load began; its readers must learn that it will not
        // arrive.
        self.notify_waiting(block, &Err(MissReason::NotHeld));
    }

    pub(super) fn on_report(&mut self, report: Report) {
        match self.parts.ssd.as_mut().and_then(|ssd| ssd.complete(report)) {
            Some(SsdCompletion::Written { token, result }) => self.on_written(token, result),
            Some(SsdCompletion::Read { token, result }) => self.on_read(token, result),
            Some(SsdCompletion::Lost { record, owner, fault }) => {
                self.on_record_lost(record, BlockKey(owner), &fault);
            }
            Some(SsdCompletion::Checked { result }) => self.on_checked(result),
            Some(SsdCompletion::Failed { cause }) => self.stop_admitting(&cause),
            None => {}
        }
    }

    /// Detects slow SSDs, and reduces the tier's capacity to the other ones.
    pub(super) fn update_slow_ssds(&mut self) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        ssd.update_health();
        let sizes = &self.parts.capacities;
        self.parts.book.set_capacity(Tier::Ssd, ssd.usable_capacity(sizes.ssd, sizes.slots.largest().ssd));
        self.parts.metrics.slow_ssds(ssd.slow_devices());
        let unwritten = self.parts.book.stats(Tier::Dram).unwritten_blocks;
        self.parts.metrics.ssd_overloaded(unwritten - self.unwritten_blocks);
        self.unwritten_blocks = unwritten;
    }

    /// Runs the scrubber at its configured rate.
    pub(super) fn scrub(&mut self, now: Timestamp) {
        let Some(ssd) = self.parts.ssd.as_mut() else { return };
        while self.parts.scrub.is_due(now)
            && let Some(bytes) = ssd.check_next(ScrubPace::pass(now))
        {
            self.parts.scrub.charge(bytes, now);
        }
    }

    fn on_checked(&mut self, result: io::Result<u64>) {
        match result {
            Ok(bytes) => self.parts.metrics.scrubbed(bytes),
            Err(cause) => {
                tracing::warn!(%cause, "the scrubber could not read a block on SSD; the block stays until it \
                    is read; check the medium if this repeats");
                self.parts.metrics.ssd_error();
                self.parts.scrub.pause(self.now());
            }
        }
    }

    /// Handles a record that was found unreadable before a reader asked for it.
    fn on_record_lost(&mut self, record: SsdRecord, key: BlockKey, fault: &ReadFault) {
        let Some(row) = self.locations.get_mut(key.0 as usize).filter(|row| row.ssd == Some(record)) else {
            return;
        };
        row.ssd = None;
        let Some(hash) = self.parts.book.meta(key).map(|meta| meta.hash) else { return };
        self.log_unusable(fault, hash);
        self.parts.book.on_ssd_copy_lost(key);
    }

    fn log_unusable(&self, fault: &ReadFault, hash: BlockHash) {
        tracing::error!(%fault, %hash, "a block on SSD is unusable and was dropped; check the medium when \
            this repeats");
        self.parts.metrics.ssd_error();
    }

    fn on_written(&mut self, token: u64, result: io::Result<()>) {
        let Some(SsdMove { key, record, .. }) = self.end_move(token) else { return };
        match result {
            Ok(()) => {
                self.locations_mut(key).ssd = Some(record);
                self.parts.book.on_moved(key, Tier::Ssd);
                if self.outage.is_none() && self.probation.take().is_some() {
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
        let Some(SsdMove { key, hash, .. }) = self.end_move(token) else { return };
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

    /// Handles bytes that arrived in DRAM, from SSD or a GPU, and are verified.
    pub(super) fn loaded(&mut self, key: BlockKey, hash: BlockHash, bytes: Bytes) {
        self.store_dram(key, bytes);
        let readable = self.locations_mut(key).dram.as_ref().map(DramBlock::share);
        let owner = self.parts.book.meta(key).map(|meta| meta.tenant);
        let block = self.version_of(key, hash);
        self.notify_waiting(block, &readable.zip(owner).ok_or(MissReason::NotHeld));
        self.parts.book.on_moved(key, Tier::Dram);
    }

    pub(super) fn load_failed(&mut self, key: BlockKey, hash: BlockHash, reason: MissReason) {
        self.notify_waiting(self.version_of(key, hash), &Err(reason));
        self.parts.book.on_move_failed(key, Tier::Dram, self.now());
    }

    /// Weights generation of a moving block: the book knows its key until the move ends.
    pub(super) fn generation_of(&self, key: BlockKey) -> Generation {
        self.parts.book.generation_of(key).unwrap_or_default()
    }

    /// The version of a moving block.
    pub(super) fn version_of(&self, key: BlockKey, hash: BlockHash) -> BlockVersion {
        BlockVersion { hash, generation: self.generation_of(key) }
    }

    /// Sends the result of a load to its readers: the bytes and their owner.
    pub(super) fn notify_waiting(
        &mut self,
        block: BlockVersion,
        result: &Result<(Bytes, TenantId), MissReason>,
    ) {
        for (tenant, waiting) in self.loads.remove(&block).unwrap_or_default().waiting {
            let told = match result {
                Ok((bytes, owner)) if *owner == tenant => Ok(bytes.clone()),
                // The loaded block ended meanwhile, and another tenant saved a block with the same
                // hash.
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
        // Moves in flight at the time of the failure report it again.
        let wait = self.outage.as_ref().map_or_else(|| next_wait(self.probation), |trouble| trouble.wait);
        let reason = format!("writing failed: {cause}; {remedy}; trying again after {} s", wait.as_secs());
        if self.outage.is_none() && self.probation.is_none() {
            tracing::error!(reason, "the SSD tier stops admitting blocks");
        }
        self.outage = Some(TierOutage { reason, until: Instant::now() + wait, wait });
        self.probation = Some(wait);
        self.parts.book.set_admitting(Tier::Ssd, false);
    }

    pub(super) fn retry_ssd(&mut self) {
        if self.outage.as_ref().is_some_and(|trouble| Instant::now() >= trouble.until) {
            self.outage = None;
            if let Some(ssd) = self.parts.ssd.as_mut() {
                ssd.resume();
            }
            self.parts.book.set_admitting(Tier::Ssd, true);
        }
    }
}

/// Wait before the next retry, from the previous wait.
pub(super) fn next_wait(before: Option<Duration>) -> Duration {
    before.map_or(SSD_RETRY, |before| (before * 2).min(SSD_RETRY_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_retries_double_the_wait_up_to_the_limit() {
        let mut waits = vec![next_wait(None)];
        for _ in 0..10 {
            waits.push(next_wait(waits.last().copied()));
        }
        let seconds: Vec<u64> = waits.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]);
    }
}
