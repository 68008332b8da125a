//! A fetch: bytes that are in DRAM at once, the others as they are loaded.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::{BlockHash, TenantId, Tier};
use kv_core::tier::{Asker, Reach};
use kvfleet_transport::MissReason;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::Store;

/// Loaded bytes are counted in units of this many, so that large limits fit the counter.
const PERMIT_BYTES: u64 = 1024;

/// Bytes being loaded from SSD or a GPU for readers at once; blocks in DRAM are only referred to and cost nothing.
#[derive(Clone, Debug)]
pub(crate) struct LoadBudget {
    permits: Arc<Semaphore>,
    permits_max: u32,
}

impl LoadBudget {
    pub(crate) fn new(bytes: u64) -> LoadBudget {
        let permits_max = u32::try_from(bytes / PERMIT_BYTES).unwrap_or(u32::MAX).max(1);
        LoadBudget { permits: Arc::new(Semaphore::new(permits_max as usize)), permits_max }
    }

    /// Room for `bytes`, given back when the permit is dropped. A request larger than the whole budget
    /// takes all of it and runs alone. `None` while there is no room.
    pub(crate) fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let count = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX).min(self.permits_max);
        Arc::clone(&self.permits).try_acquire_many_owned(count).ok()
    }
}

/// The task's answer to a fetch.
#[derive(Debug)]
pub enum FetchPlan {
    /// Too many leases, or too much being loaded. Nothing is leased.
    Busy,
    /// Other weights are in force than those it was let in for. Nothing is leased.
    OtherWeights,
    /// What there is.
    Blocks {
        /// The leading blocks that are held; empty for none.
        blocks: Vec<Planned>,
        /// Part of the budget for what must be loaded, kept while it is.
        permit: OwnedSemaphorePermit,
    },
}

/// One block of a fetch.
#[derive(Debug)]
pub struct Planned {
    /// Where it is read from.
    pub tier: Tier,
    /// It has its place in DRAM as long as the lease lasts. What is read past DRAM, or on its way out, lies in room that
    /// is meant for what passes, and must not stay there.
    pub stays: bool,
    /// Its bytes, now or later.
    pub bytes: PlannedBytes,
}

/// Bytes of a planned block.
#[derive(Debug)]
pub enum PlannedBytes {
    /// In DRAM, shared without copying.
    Ready(Bytes),
    /// Being loaded from SSD or a GPU and verified.
    Loading(oneshot::Receiver<Result<Bytes, MissReason>>),
}

impl Store {
    pub(super) fn fetch(&mut self, asker: Asker, hashes: &[BlockHash]) -> FetchPlan {
        let now = self.now();
        // The room first: a fetch told to come again must not leave a lease and running loads behind.
        let found = self.parts.book.readable_prefix(asker.tenant, hashes);
        let Some(permit) = self.parts.budget.take(self.parts.book.bytes_to_load(&found)) else {
            return FetchPlan::Busy;
        };
        match self.parts.book.fetch_found(asker, &found, now) {
            Ok(reached) => {
                let blocks = reached
                    .into_iter()
                    .zip(hashes)
                    .map(|(reach, hash)| self.plan(asker.tenant, reach, *hash));
                FetchPlan::Blocks { blocks: blocks.collect(), permit }
            }
            Err(full) => {
                tracing::debug!(%full, "fetch told to come again");
                FetchPlan::Busy
            }
        }
    }

    fn plan(&mut self, tenant: TenantId, reach: Reach, hash: BlockHash) -> Planned {
        if reach.is_new {
            self.parts.metrics.hit(reach.tier);
        }
        let bytes = match (reach.tier, &self.row(reach.key).dram) {
            (Tier::Dram, Some(held)) => PlannedBytes::Ready(held.lend()),
            _ => {
                let (tell, told) = oneshot::channel();
                let block = (hash, self.parts.book.generation());
                self.loads.entry(block).or_default().waiting.push((tenant, tell));
                PlannedBytes::Loading(told)
            }
        };
        let stays = self.parts.book.place(reach.key) == Some(Tier::Dram);
        Planned { tier: reach.tier, stays, bytes }
    }
}
