//! Runs what the book says, and takes in how it went; an SSD that fails stops admitting for a while.

use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, Tier};
use kv_core::tier::{Action, Room};
use kvfleet_transport::MissReason;
use tokio::sync::oneshot;

use super::Store;
use crate::arena::Purpose;
use crate::tiers::ssd::{Done, ReadFault, SlotHeader, SlotId};

/// Moves in flight: enough to keep an NVMe queue full, and no more slots between two places than the
/// staging of either tier has.
pub(crate) const MOVES_MAX: usize = 48;

/// After a write error the SSD tier takes no new blocks for this long, then tries again.
pub(crate) const SSD_RETRY: Duration = Duration::from_secs(5);

/// A move on the SSD thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    key: BlockKey,
    slot: SlotId,
}

/// Readers who wait for a block.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) waiting: Vec<oneshot::Sender<Result<Bytes, MissReason>>>,
}

/// Why the SSD tier takes nothing, and until when.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) reason: String,
    until: Instant,
}

impl Store {
    /// Runs everything that can run now, then hands out the changes.
    pub(super) fn pump(&mut self) {
        while let Some(action) = self.next_action() {
            match action {
                Action::Demote { key, hash } => self.demote(key, hash),
                Action::Promote { key, hash } => self.promote(key, hash),
                Action::DropDram { key } => self.row(key).dram = None,
                Action::DropSsd { key } => self.drop_ssd(key),
            }
        }
        self.tell_changes();
    }

    fn next_action(&mut self) -> Option<Action> {
        let (free, frame) = (self.moves.len() < MOVES_MAX, self.parts.frame_bytes_max);
        let dram = free && self.parts.arena.has_room(frame, Purpose::Load);
        // While the SSD is in trouble demotions may "start": they fail at once and the blocks go.
        let space = self.parts.ssd.as_ref().is_none_or(|ssd| ssd.has_room(frame));
        let ssd = self.trouble.is_some() || (free && space);
        self.parts.book.next_action(Room { dram, ssd })
    }

    fn demote(&mut self, key: BlockKey, hash: BlockHash) {
        if let Err(cause) = self.try_demote(key, hash) {
            if self.trouble.is_none() {
                self.stop_admitting(&cause);
            }
            self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
        }
    }

    fn try_demote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<()> {
        if self.trouble.is_some() {
            return Err(io::ErrorKind::Other.into());
        }
        let frame = self.row(key).dram.clone().ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let mut traits = meta.traits;
        traits.bytes = u32::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let ssd = self.parts.ssd.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let slot = ssd.take(frame.len())?.ok_or(io::ErrorKind::QuotaExceeded)?;
        let header = SlotHeader { hash, parent: meta.parent, tenant: meta.tenant, traits, sequence: 0 };
        self.next_token += 1;
        if let Err(cause) = ssd.write(self.next_token, slot, header, frame) {
            ssd.free(slot);
            return Err(cause);
        }
        self.moves.insert(self.next_token, Move { key, slot });
        Ok(())
    }

    fn promote(&mut self, key: BlockKey, hash: BlockHash) {
        if let Err(cause) = self.try_promote(key, hash) {
            tracing::error!(%cause, %hash, "a block could not be loaded");
            self.load_failed(key, MissReason::MediumFailed);
        }
    }

    fn try_promote(&mut self, key: BlockKey, hash: BlockHash) -> io::Result<()> {
        let slot = self.row(key).ssd.ok_or(io::ErrorKind::NotFound)?;
        let meta = self.parts.book.meta(key).ok_or(io::ErrorKind::NotFound)?;
        let len = meta.traits.bytes as usize;
        let into = self.parts.arena.take(len, Purpose::Load).ok_or(io::ErrorKind::OutOfMemory)?;
        let ssd = self.parts.ssd.as_ref().ok_or(io::ErrorKind::NotFound)?;
        self.next_token += 1;
        ssd.read(self.next_token, slot, hash, into)?;
        self.moves.insert(self.next_token, Move { key, slot });
        Ok(())
    }

    fn drop_ssd(&mut self, key: BlockKey) {
        if let Some(slot) = self.row(key).ssd.take()
            && let Some(ssd) = self.parts.ssd.as_mut()
        {
            ssd.free(slot);
        }
    }

    pub(super) fn on_done(&mut self, done: Done) {
        match done {
            Done::Written { token, result } => self.on_written(token, result),
            Done::Read { token, result } => self.on_read(token, result),
        }
    }

    fn on_written(&mut self, token: u64, result: io::Result<()>) {
        let Some(Move { key, slot }) = self.moves.remove(&token) else { return };
        match result {
            Ok(()) => {
                self.row(key).ssd = Some(slot);
                self.parts.book.on_moved(key, Tier::Ssd);
            }
            Err(cause) => {
                self.stop_admitting(&cause);
                if let Some(ssd) = self.parts.ssd.as_mut() {
                    ssd.free(slot);
                }
                self.parts.book.on_move_failed(key, Tier::Ssd, self.now());
            }
        }
    }

    fn on_read(&mut self, token: u64, result: Result<Bytes, ReadFault>) {
        let Some(Move { key, .. }) = self.moves.remove(&token) else { return };
        match result {
            Ok(bytes) => {
                self.row(key).dram = Some(bytes.clone());
                self.tell_waiting(key, &Ok(bytes));
                self.parts.book.on_moved(key, Tier::Dram);
            }
            Err(fault) => {
                let hash = self.parts.book.meta(key).map(|meta| meta.hash).unwrap_or_default();
                tracing::error!(%fault, %hash, "a block on SSD is unusable and was dropped");
                self.parts.metrics.ssd_error();
                let reason = match fault {
                    ReadFault::Medium(_) => MissReason::MediumFailed,
                    ReadFault::Corrupt(_) => MissReason::Corrupt,
                };
                self.load_failed(key, reason);
            }
        }
    }

    fn load_failed(&mut self, key: BlockKey, reason: MissReason) {
        self.tell_waiting(key, &Err(reason));
        self.parts.book.on_move_failed(key, Tier::Dram, self.now());
    }

    fn tell_waiting(&mut self, key: BlockKey, result: &Result<Bytes, MissReason>) {
        for waiting in self.loads.remove(&key).unwrap_or_default().waiting {
            // A reader past its deadline is gone.
            let _ = waiting.send(result.clone());
        }
    }

    fn stop_admitting(&mut self, cause: &io::Error) {
        self.parts.metrics.ssd_error();
        let reason = format!("writing failed: {cause}; trying again every {} s", SSD_RETRY.as_secs());
        if self.trouble.is_none() {
            tracing::error!(reason, "the SSD tier stops admitting blocks");
        }
        self.trouble = Some(Trouble { reason, until: Instant::now() + SSD_RETRY });
        self.parts.book.set_admitting(Tier::Ssd, false);
    }

    pub(super) fn retry_ssd(&mut self) {
        if self.trouble.as_ref().is_some_and(|trouble| Instant::now() >= trouble.until) {
            tracing::info!("the SSD tier admits blocks again");
            self.trouble = None;
            self.parts.book.set_admitting(Tier::Ssd, true);
        }
    }
}
