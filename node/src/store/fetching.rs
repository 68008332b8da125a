//! Fetches: bytes in DRAM are returned at once, others when loaded.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::{BlockHash, TenantId, Tier};
use kv_core::tier::{FetchHit, Requester};
use kvfleet_transport::MissReason;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::Store;
use crate::tiers::BlockVersion;

/// Unit of the load budget in bytes, so that large limits fit the counter.
const PERMIT_BYTES: u64 = 1024;

/// Limits the bytes being loaded from SSD or a GPU for readers. Blocks in DRAM are only referenced
/// and cost no budget.
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

    /// Reserves `bytes` until the permit is dropped. A request above the whole budget takes all of
    /// it and runs alone. `None` while the budget is used up.
    pub(crate) fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let count = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX).min(self.permits_max);
        Arc::clone(&self.permits).try_acquire_many_owned(count).ok()
    }
}

/// The store's answer to a fetch.
#[derive(Debug)]
pub enum FetchPlan {
    /// Too many leases, or too much being loaded. No block is leased.
    Busy,
    /// The weights changed since admission. No block is leased.
    GenerationMismatch,
    /// The readable blocks.
    Blocks {
        /// The leading blocks that are held; may be empty.
        blocks: Vec<PlannedBlock>,
        /// Budget for the loads, kept while they run.
        permit: OwnedSemaphorePermit,
    },
}

/// One block of a fetch.
#[derive(Debug)]
pub struct PlannedBlock {
    /// Tier it is read from.
    pub tier: Tier,
    /// Whether it is assigned to DRAM as long as the lease lasts. Otherwise its bytes are in a slot
    /// for blocks in flight and must be copied out soon.
    pub is_dram_resident: bool,
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
    pub(super) fn fetch(&mut self, asker: Requester, hashes: &[BlockHash]) -> FetchPlan {
        let now = self.now();
        // Reserve the budget first: a fetch answered with `Busy` must not leave a lease and running
        // loads behind.
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
                tracing::debug!(%full, "fetch answered with Busy");
                FetchPlan::Busy
            }
        }
    }

    fn plan(&mut self, tenant: TenantId, reach: FetchHit, hash: BlockHash) -> PlannedBlock {
        if reach.is_first_use {
            self.parts.metrics.hit(reach.tier);
        }
        let bytes = match (reach.tier, &self.locations_mut(reach.key).dram) {
            (Tier::Dram, Some(held)) => PlannedBytes::Ready(held.share()),
            _ => {
                let (tell, told) = oneshot::channel();
                let block = BlockVersion { hash, generation: self.parts.book.generation() };
                self.loads.entry(block).or_default().waiting.push((tenant, tell));
                PlannedBytes::Loading(told)
            }
        };
        let stays = self.parts.book.assigned_tier(reach.key) == Some(Tier::Dram);
        PlannedBlock { tier: reach.tier, is_dram_resident: stays, bytes }
    }
}
