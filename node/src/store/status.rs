//! Status replies, audits and gauges.

use std::sync::atomic::Ordering;

use kv_core::id::{BlockHash, Tier};
use kv_core::tier::{Capacity, DurationHistogram, RemovalReason};
use kvfleet_proto::{convert, pb};

use super::Store;
use super::saving::SlotSizes;
use crate::arena::ArenaStats;

/// Configured sizes, for status.
#[derive(Clone, Debug)]
pub(crate) struct Capacities {
    pub(crate) dram: Capacity,
    pub(crate) ssd: Capacity,
    /// GPU memory for blocks; 0 without a GPU.
    pub(crate) gpu: Capacity,
    /// Cost of a block in each tier.
    pub(crate) slots: SlotSizes,
}

/// Sizes of the reported miss-ratio curve, in sixteenths of the current size.
const CURVE_SIXTEENTHS: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

fn histogram(spans: &DurationHistogram) -> Option<pb::Spans> {
    Some(pb::Spans {
        count: spans.count(),
        mean_us: spans.mean_us()?,
        p50_us: spans.quantile_us(0.5)?,
        p90_us: spans.quantile_us(0.9)?,
        p99_us: spans.quantile_us(0.99)?,
    })
}

fn bytes(capacity: Capacity, slot: u32) -> u64 {
    match capacity {
        Capacity::Bytes(bytes) => bytes,
        Capacity::Blocks(blocks) => blocks.saturating_mul(u64::from(slot)),
    }
}

fn arena(numbers: &ArenaStats) -> pb::ArenaStatus {
    let classes = numbers.classes.iter().map(|(class, uses)| pb::SizeClassStatus {
        slot_bytes: class.slot_bytes as u64,
        slots_per_slab: class.slots_per_slab as u64,
        slabs: uses.slabs as u64,
        used_slots: uses.used_slots as u64,
        frame_bytes: uses.frame_bytes as u64,
    });
    pb::ArenaStatus {
        slab_bytes: numbers.slab_bytes as u64,
        slabs: numbers.slabs as u64,
        empty_slabs: numbers.empty_slabs as u64,
        reserve_slabs: numbers.reserve_slabs as u64,
        moved_frames: numbers.moved_frames,
        moved_bytes: numbers.moved_bytes,
        classes: classes.collect(),
    }
}

impl Store {
    pub(super) fn status(&self) -> pb::NodeStatusReply {
        let outboxes = self.parts.shared.outboxes.lock();
        let pinned = self.parts.book.pinned_blocks();
        let next_pin_end = self.parts.book.next_pin_end(self.now());
        pb::NodeStatusReply {
            node: self.parts.shared.node.0,
            epoch: self.parts.shared.epoch().0,
            announced_seq: outboxes.last(),
            acknowledged_seq: outboxes.acked().seqs.iter().map(|seq| seq.0).sum(),
            tiers: self.tiers().map(|tier| self.tier_status(tier)).collect(),
            leases: self.parts.book.lease_count() as u64,
            tenants: self.tenants(),
            quarantined_files: self.parts.quarantined,
            pinned_blocks: pinned.hard + pinned.soft,
            soft_pinned_blocks: pinned.soft,
            next_pin_end_ms: next_pin_end.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            policy: self.parts.policy.clone(),
            classes: self.tiers().flat_map(|tier| self.classes(tier)).collect(),
            curve: self.curve(),
            arena: Some(arena(&self.parts.arena.stats())),
            window_blocks: self.parts.book.window_blocks() as u64,
            prefetched_blocks: self.parts.book.prefetched_blocks(),
            ttl_groups: self.parts.book.ttl_groups() as u64,
            memory_bytes_max: self.parts.memory_bytes_max,
            seen_categories: self.parts.shared.reuse_stats.borrow().categories().count() as u64,
            fleet_categories: self.fleet_categories as u64,
            memory_peak_bytes: crate::memory::peak_bytes("self").unwrap_or(0),
            // Unknown to the store; the caller adds it.
            manifest: None,
        }
    }

    /// The configured tiers; the GPU only if configured.
    fn tiers(&self) -> impl Iterator<Item = Tier> + use<> {
        let gpu = (self.parts.capacities.gpu.amount() > 0).then_some(Tier::Gpu);
        [Tier::Dram, Tier::Ssd].into_iter().chain(gpu)
    }

    fn classes(&self, tier: Tier) -> impl Iterator<Item = pb::ClassStatus> + '_ {
        let classes = self.parts.book.counters(tier).categories();
        classes.map(move |(category, class)| pb::ClassStatus {
            tier: tier as u32,
            kind: category.kind as u32,
            turn: u32::from(category.conversation_turn),
            hits: class.hits,
            reuse_gap: histogram(&class.reuse_gap),
            demoted: class.removals[RemovalReason::Demoted as usize],
            dropped: class.removals[RemovalReason::Dropped as usize],
            quota: class.removals[RemovalReason::Quota as usize],
            failed: class.removals[RemovalReason::Failed as usize],
            ttl: class.removals[RemovalReason::Ttl as usize],
            age_at_eviction: histogram(&class.age_at_eviction),
        })
    }

    /// The miss-ratio curve at the current size and at its halves and doubles.
    fn curve(&self) -> Vec<pb::CurvePoint> {
        let sizes = &self.parts.capacities;
        let largest = sizes.slots.largest();
        let slot = u64::from(largest.dram.max(1));
        let both = bytes(sizes.dram, largest.dram).saturating_add(bytes(sizes.ssd, largest.ssd));
        let now = both.saturating_add(bytes(sizes.gpu, largest.dram)) / slot;
        let curve = self.parts.book.miss_curve();
        if curve.uses() <= 0.0 {
            return Vec::new();
        }
        let capacities = CURVE_SIXTEENTHS.map(|sixteenths| (now.saturating_mul(sixteenths) / 16).max(1));
        let point = |blocks: u64| pb::CurvePoint {
            blocks,
            bytes: blocks.saturating_mul(slot),
            hit_rate: curve.hit_rate(blocks),
        };
        capacities.into_iter().map(point).collect()
    }

    /// The readable blocks now, with the batch that announces all of them.
    pub(super) fn audit(
        &mut self,
        shard: u16,
        blocks: &[BlockHash],
        sample: usize,
        seed: u64,
    ) -> Option<pb::AuditReply> {
        self.publish_changes();
        let (shards, (epoch, seq)) = {
            let mut outboxes = self.parts.shared.outboxes.lock();
            (outboxes.count(), outboxes.shard(shard)?.position()?)
        };
        let of_shard = |block: &BlockHash| block.shard(shards) == shard;
        let sample = self.parts.book.sample(seed, sample, of_shard);
        Some(pb::AuditReply {
            epoch: epoch.0,
            seq: seq.0,
            held: blocks.iter().map(|block| self.parts.book.tier_of(block).is_some()).collect(),
            sample: convert::hashes_to_bytes(&sample),
        })
    }

    fn tier_status(&self, tier: Tier) -> pb::TierStatus {
        let stats = self.parts.book.stats(tier);
        let sizes = &self.parts.capacities;
        let capacity_bytes = match tier {
            Tier::Ssd => bytes(sizes.ssd, sizes.slots.largest().ssd),
            Tier::Dram => bytes(sizes.dram, sizes.slots.largest().dram),
            Tier::Gpu => bytes(sizes.gpu, sizes.slots.largest().dram),
        };
        pb::TierStatus {
            tier: tier as u32,
            capacity_bytes,
            used_bytes: stats.used_bytes,
            blocks: stats.blocks,
            admitting: stats.admitting && capacity_bytes > 0,
            reject_reason: self.unavailable_reason(tier, capacity_bytes),
        }
    }

    fn unavailable_reason(&self, tier: Tier, capacity_bytes: u64) -> String {
        match &self.outage {
            Some(trouble) if tier == Tier::Ssd => trouble.reason.clone(),
            _ if capacity_bytes == 0 => "switched off".to_owned(),
            _ if tier == Tier::Ssd => self.slow_ssds(),
            _ if tier == Tier::Gpu => {
                self.parts.gpu.as_ref().and_then(super::Gpu::outage_reason).unwrap_or_default().to_owned()
            }
            _ => String::new(),
        }
    }

    /// Description of slow devices; empty if there are none.
    fn slow_ssds(&self) -> String {
        let Some(ssd) = &self.parts.ssd else { return String::new() };
        match (ssd.slow_devices(), ssd.devices()) {
            (0, _) => String::new(),
            (slow, all) if slow < all => format!("{slow} of {all} SSDs slow: new blocks go to the others"),
            _ => "slow: only as many new blocks as the SSD can write".to_owned(),
        }
    }

    fn tenants(&self) -> Vec<pb::TenantUse> {
        let row = |(tenant, bytes, quota): (kv_core::id::TenantId, u64, Option<u64>)| pb::TenantUse {
            tenant: tenant.0,
            bytes,
            quota_bytes: quota.unwrap_or(0),
            has_quota: quota.is_some(),
        };
        self.parts.book.tenants().map(row).collect()
    }

    /// Updates gauges and heartbeat figures.
    pub(super) fn update_metrics(&self) {
        let (dram, ssd) = (self.parts.book.stats(Tier::Dram), self.parts.book.stats(Tier::Ssd));
        self.parts.shared.dram_bytes.store(dram.used_bytes, Ordering::Relaxed);
        self.parts.shared.ssd_bytes.store(ssd.used_bytes, Ordering::Relaxed);
        for tier in self.tiers() {
            self.parts.metrics.tier(tier, &self.parts.book.stats(tier));
        }
        self.parts.metrics.leases(self.parts.book.lease_count());
        self.parts.metrics.moves(self.moves.len() + self.parts.gpu.as_ref().map_or(0, super::Gpu::moves));
        self.parts.metrics.window(self.parts.book.window_blocks(), self.parts.book.prefetched_blocks());
    }
}
