//! A fetch: bytes that are in DRAM at once, the others as they are loaded.

use bytes::Bytes;
use kv_core::id::{BlockHash, Tier};
use kv_core::tier::{Asker, Reach};
use kvfleet_transport::MissReason;
use tokio::sync::oneshot;

use super::Store;

/// The task's answer to a fetch.
#[derive(Debug)]
pub enum FetchPlan {
    /// Too many leases.
    Busy,
    /// The leading blocks that are held; empty for none.
    Blocks(Vec<Planned>),
}

/// One block of a fetch.
#[derive(Debug)]
pub struct Planned {
    /// Where it is read from.
    pub tier: Tier,
    /// Encoded size in bytes.
    pub frame_bytes: u32,
    /// Its bytes, now or later.
    pub bytes: PlannedBytes,
}

/// Bytes of a planned block.
#[derive(Debug)]
pub enum PlannedBytes {
    /// In DRAM, shared without copying.
    Ready(Bytes),
    /// Being loaded from SSD and verified.
    Loading(oneshot::Receiver<Result<Bytes, MissReason>>),
}

impl Store {
    pub(super) fn fetch(&mut self, asker: Asker, hashes: &[BlockHash]) -> FetchPlan {
        let now = self.now();
        match self.parts.book.fetch(asker, hashes, now) {
            Ok(reached) => FetchPlan::Blocks(reached.into_iter().map(|reach| self.plan(reach)).collect()),
            Err(full) => {
                tracing::debug!(%full, "fetch told to come again");
                FetchPlan::Busy
            }
        }
    }

    fn plan(&mut self, reach: Reach) -> Planned {
        let frame_bytes = self.parts.book.meta(reach.key).map_or(0, |meta| meta.charge.frame);
        self.parts.metrics.hit(reach.tier);
        let bytes = match (reach.tier, self.row(reach.key).dram.clone()) {
            (Tier::Dram, Some(bytes)) => PlannedBytes::Ready(bytes),
            _ => {
                let (tell, told) = oneshot::channel();
                self.loads.entry(reach.key).or_default().waiting.push(tell);
                PlannedBytes::Loading(told)
            }
        };
        Planned { tier: reach.tier, frame_bytes, bytes }
    }
}
