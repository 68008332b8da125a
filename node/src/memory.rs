//! Upper bound of a node's memory for its configuration, and the peak it has used. Arithmetic only.
//!
//! Every large use is bounded at start: the arena by its tier, incoming saves by their limit, the
//! SSD tier by its buffers, bookkeeping by the number of blocks. Blocks being sent stay in the
//! arena, so fetches add no memory. Not here: enforcement (`arena`, `kvfleet-transport`,
//! `tiers/ssd`).

use kv_core::tier::{BLOCK_BYTES_MAX, Capacity};

use crate::config::NodeConfig;
use crate::copies;
use crate::drain;
use crate::start::{arena_shape, gpu_shape};
use crate::store::{BLOCK_LOCATIONS_BYTES_MAX, SlotSizes};
use crate::tiers::ssd;

/// The program and its threads, some hundred connections, and unacknowledged announcements of four
/// shards ([`crate::announce::outbox::QUEUE_BLOCKS_MAX`] each).
const BASE_BYTES: u64 = 160 << 20;

/// Maximum memory of each part of a node, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBound {
    /// The DRAM tier, with slots for blocks in flight.
    pub arena: u64,
    /// Incoming saves.
    pub saves: u64,
    /// Buffers of the SSD tier, and the location of each record.
    pub ssd: u64,
    /// Page-locked buffers for a GPU, and the location of each block there. The driver's own memory
    /// is not counted.
    pub gpu: u64,
    /// Bookkeeping of each block.
    pub bookkeeping: u64,
    /// Bounce buffers of clients on the same host.
    pub shm_buffers: u64,
    /// Bounce buffers of RDMA clients.
    pub rdma: u64,
    /// Copies from other nodes in flight, and the list of blocks while the node drains.
    pub copies: u64,
    /// Everything that does not grow with the configuration.
    pub base: u64,
}

impl MemoryBound {
    /// The bound for this configuration.
    #[must_use]
    pub fn of(config: &NodeConfig) -> MemoryBound {
        let (shape, _) = arena_shape(config);
        let slots = SlotSizes::new(&config.frame_bytes());
        let smallest = config.frame_bytes().into_iter().min().unwrap_or(1);
        let dram_share = shape.classes.share_bytes(smallest) as u64;
        let blocks_in = |capacity: Capacity, bytes: u64| match capacity {
            Capacity::Bytes(room) => room / bytes.max(1),
            Capacity::Blocks(blocks) => blocks,
        };
        let on_ssd = blocks_in(config.ssd_capacity(), u64::from(slots.largest().ssd));
        let blocks = blocks_in(config.dram_capacity(), dram_share).saturating_add(on_ssd);
        let gpu = gpu_shape(config);
        let on_gpu = gpu.capacity.amount() / dram_share.max(1);
        let blocks = blocks.saturating_add(on_gpu);
        let devices = if on_ssd == 0 { 0 } else { config.ssd_dirs().len() as u64 };
        let per_device = ssd::memory_bytes_max(config.ssd_capacity(), config.frame_bytes_max());
        MemoryBound {
            arena: shape.bytes().map_or(u64::MAX, |bytes| bytes as u64),
            saves: config.save_inflight_bytes,
            ssd: devices
                .saturating_mul(per_device)
                .saturating_add(on_ssd.saturating_mul(ssd::RECORD_BYTES_MAX)),
            gpu: gpu.shape.host_bytes_max(config.frame_bytes_max(), on_gpu),
            bookkeeping: blocks.saturating_mul(BLOCK_BYTES_MAX + BLOCK_LOCATIONS_BYTES_MAX),
            shm_buffers: config.shm.bounce_buffer_bytes_max(),
            rdma: config.rdma.memory_bytes_max(),
            copies: copies::memory_bytes_max(config.copies, config.frame_bytes_max())
                .saturating_add(drain::memory_bytes_max(config, blocks)),
            base: BASE_BYTES,
        }
    }

    /// Sum of all parts.
    #[must_use]
    pub fn total(&self) -> u64 {
        let tiers = [self.arena, self.saves, self.ssd, self.gpu, self.bookkeeping];
        let others = [self.shm_buffers, self.rdma, self.copies, self.base];
        tiers.into_iter().chain(others).fold(0, u64::saturating_add)
    }
}

/// Peak resident memory of a process in bytes, plus its current huge pages; `process` is its id or
/// `self`. `None` if the process is gone or the system does not report it.
#[must_use]
pub fn peak_bytes(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some((kib("VmHWM:")? + kib("HugetlbPages:").unwrap_or(0)) << 10)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_bound_follows_the_configuration() {
        let config = |dram_bytes, ssd_bytes| NodeConfig { dram_bytes, ssd_bytes, ..NodeConfig::default() };
        let small = MemoryBound::of(&config(1 << 30, 0));
        assert!(small.arena >= 1 << 30 && small.arena < (1 << 30) + (128 << 20), "{small:?}");
        assert_eq!((small.ssd, small.saves), (0, NodeConfig::default().save_inflight_bytes));
        let large = MemoryBound::of(&config(1 << 30, 1 << 40));
        assert_eq!((large.arena, large.base), (small.arena, small.base));
        assert!(large.ssd > 0 && large.bookkeeping > small.bookkeeping);
        // Half a million blocks of 2 MiB: their bookkeeping is a thousandth of their size.
        assert!(large.bookkeeping + large.ssd < 1 << 30, "{large:?}");
        let gpu = MemoryBound::of(&NodeConfig { gpu_bytes: 1 << 30, ..config(1 << 30, 0) });
        assert!(gpu.gpu > 16 << 20 && gpu.gpu < 64 << 20 && small.gpu == 0, "{gpu:?}");
        assert!(gpu.bookkeeping > small.bookkeeping && gpu.arena > small.arena, "{gpu:?}");
        let shm = crate::ShmSection { dir: Some("run".into()), ..Default::default() };
        let host = MemoryBound::of(&NodeConfig { shm, ..config(1 << 30, 0) });
        assert_eq!((host.shm_buffers, small.shm_buffers), (256 << 20, 0));
        assert_eq!(host.total(), small.total() + host.shm_buffers);
        let rdma = crate::RdmaSection { enabled: true, links_max: 4, ..Default::default() };
        let offering = MemoryBound::of(&NodeConfig { rdma, ..config(1 << 30, 0) });
        assert!(offering.rdma > 4 * (16 << 20) && offering.rdma < 4 * (17 << 20) && small.rdma == 0);
        assert_eq!(offering.total(), small.total() + offering.rdma);
        let endless = NodeConfig { dram_blocks: Some(u64::MAX), ..NodeConfig::default() };
        assert_eq!(MemoryBound::of(&endless).total(), u64::MAX);
    }

    #[test]
    fn peak_includes_freed_memory() {
        let before = peak_bytes("self").unwrap();
        let much = std::hint::black_box(vec![1u8; 256 << 20]);
        drop(much);
        let after = peak_bytes("self").unwrap();
        assert!(
            after >= before.max(256 << 20),
            "the peak is {after} after allocating 256 MiB, {before} before"
        );
        assert_eq!(peak_bytes("0"), None);
    }
}
