//! Random operations in random order, with moves that finish late or fail: the accounts always
//! balance.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::evict::density::Density;
use crate::id::TtlGroupId;
use crate::index::command::Change;
use crate::tier::entry::EvictionOrder;
use crate::tier::queues::MoveQueue;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum BookOp {
    Fetch { lease: u64, first: u64, count: u64, tenant: u32 },
    Offer { lease: u64, first: u64, count: u64, tenant: u32 },
    CommitOldest { frame: u32 },
    AbortOldest,
    Release { lease: u64 },
    Expire { at: u64 },
    Start { dram: bool, ssd: bool, gpu: bool },
    Finish { well: bool },
    Delay,
    Refuse,
    Pin { pins: Vec<(bool, BTreeSet<u64>, Option<u64>)> },
    ExpirePins { late: u64 },
    Quota { bytes: u64 },
    Admit { ssd: bool },
    LoseGpu,
    Window { waiting: Vec<Vec<u64>> },
    ExpireWindow { late: bool },
    Prefetch,
    Ttl { groups: BTreeMap<u32, u64> },
    ExpireBlocks { late: u64 },
    Rewrite { number: u64 },
    Refit,
    NewWeights,
    DropInvalidated,
}

fn op() -> impl Strategy<Value = BookOp> {
    let lease = 0u64..6;
    prop_oneof![
        4 => (lease.clone(), 0u64..20, 1u64..6, 0u32..2)
            .prop_map(|(lease, first, count, tenant)| BookOp::Fetch { lease, first, count, tenant }),
        6 => (lease.clone(), 0u64..20, 1u64..6, 0u32..2)
            .prop_map(|(lease, first, count, tenant)| BookOp::Offer { lease, first, count, tenant }),
        8 => (1u32..=100).prop_map(|frame| BookOp::CommitOldest { frame }),
        1 => Just(BookOp::AbortOldest),
        4 => lease.prop_map(|lease| BookOp::Release { lease }),
        1 => (0u64..30_000_000).prop_map(|at| BookOp::Expire { at }),
        8 => any::<(bool, bool, bool)>().prop_map(|(dram, ssd, gpu)| BookOp::Start { dram, ssd, gpu }),
        8 => prop::bool::weighted(0.85).prop_map(|well| BookOp::Finish { well }),
        2 => Just(BookOp::Delay),
        2 => Just(BookOp::Refuse),
        2 => prop::collection::vec(
            (any::<bool>(), prop::collection::btree_set(0u64..25, 0..3), prop::option::of(0u64..20_000)), 0..4)
            .prop_map(|pins| BookOp::Pin { pins }),
        2 => (0u64..20_000).prop_map(|late| BookOp::ExpirePins { late }),
        1 => (0u64..900).prop_map(|bytes| BookOp::Quota { bytes }),
        1 => any::<bool>().prop_map(|ssd| BookOp::Admit { ssd }),
        1 => Just(BookOp::LoseGpu),
        3 => prop::collection::vec(prop::collection::vec(0u64..25, 0..6), 0..4)
            .prop_map(|waiting| BookOp::Window { waiting }),
        1 => any::<bool>().prop_map(|late| BookOp::ExpireWindow { late }),
        6 => Just(BookOp::Prefetch),
        1 => prop::collection::btree_map(0u32..25, 0u64..20_000, 0..6).prop_map(|groups| BookOp::Ttl { groups }),
        2 => (0u64..20_000).prop_map(|late| BookOp::ExpireBlocks { late }),
        2 => (0u64..25).prop_map(|number| BookOp::Rewrite { number }),
        1 => Just(BookOp::Refit),
        2 => Just(BookOp::NewWeights),
        2 => Just(BookOp::DropInvalidated),
    ]
}

/// The book with the state of a surrounding store.
struct BookWorld {
    book: Book,
    now: u64,
    writing: Vec<BlockKey>,
    moving: Vec<Action>,
    /// State of an index that applied every change.
    index: BTreeMap<BlockHash, Tier>,
    /// Copies that a store would keep, by key.
    bytes: BTreeSet<(BlockKey, Tier)>,
    quota: Option<u64>,
    /// Bytes of refused loads: their blocks may exceed the SSD's capacity until others arrive.
    refused_bytes: u64,
}

impl BookWorld {
    fn new(dram: TierLimits, ssd: TierLimits, gpu: Option<TierLimits>) -> BookWorld {
        BookWorld {
            book: match gpu {
                Some(gpu) => book(dram, ssd).with_gpu(gpu, Box::<PlainLru>::default()),
                None => book(dram, ssd),
            },
            now: 0,
            writing: Vec::new(),
            moving: Vec::new(),
            index: BTreeMap::new(),
            bytes: BTreeSet::new(),
            quota: None,
            refused_bytes: 0,
        }
    }

    fn run(&mut self, op: &BookOp) {
        self.now += 1000;
        let now = Timestamp(self.now);
        match op.clone() {
            BookOp::Fetch { lease, first, count, tenant } => self.fetch(lease, first, count, tenant),
            BookOp::Offer { lease, first, count, tenant } => self.offer(lease, first, count, tenant),
            BookOp::CommitOldest { frame } if !self.writing.is_empty() => {
                let key = self.writing.remove(0);
                assert!(self.bytes.insert((key, Tier::Dram)), "{key:?} has bytes of another block");
                let charge = Charge { frame, dram: frame.next_multiple_of(64), ssd: 4096 };
                self.book.commit(key, charge, now);
            }
            BookOp::AbortOldest if !self.writing.is_empty() => self.book.abort(self.writing.remove(0)),
            BookOp::Release { lease } => self.book.release(LeaseId(lease), now),
            BookOp::Expire { at } => {
                self.book.expire(Timestamp(at));
            }
            BookOp::Start { dram, ssd, gpu } => {
                let (gpu_read, lower) = (dram && gpu, dram);
                self.start(MovePermits {
                    dram,
                    ssd,
                    prefetch: dram,
                    gpu_read,
                    gpu_read_back: lower,
                    gpu_promote: gpu,
                });
            }
            BookOp::Finish { well } if !self.moving.is_empty() => self.finish(well),
            BookOp::Delay if !self.moving.is_empty() => self.delay(),
            BookOp::Refuse => self.refuse(),
            BookOp::Pin { pins } => {
                let orders = (0..).zip(pins).map(|(number, (soft, numbers, left))| {
                    let kind = if soft { PinKind::Soft } else { PinKind::Hard };
                    let numbers: Vec<u64> = numbers.into_iter().collect();
                    let end = |us| PinExpiry { ends_ms: self.now + us, remaining: Duration::from_micros(us) };
                    PinDirective { end: left.map(end), ..pin_directive(number, kind, &numbers) }
                });
                let orders: Vec<PinDirective> = orders.collect();
                self.book.set_pins(orders, now);
            }
            BookOp::ExpirePins { late } => {
                self.book.expire_pins(Timestamp(self.now + late));
            }
            BookOp::Quota { bytes } => {
                self.book.set_quotas([(TenantId(1), bytes)]);
                self.quota = Some(bytes);
            }
            BookOp::Admit { ssd } => self.book.set_admitting(Tier::Ssd, ssd),
            BookOp::LoseGpu => self.lose_gpu(),
            BookOp::Rewrite { number } => {
                if let Some(key) = self.book.slab.find(&hash(number)) {
                    self.book.on_rewrite(key, now);
                }
            }
            BookOp::NewWeights => self.new_weights(),
            BookOp::DropInvalidated => self.drop_invalidated(),
            BookOp::Refit => self.refit(),
            BookOp::Window { waiting } => {
                let waiting: Vec<Vec<BlockHash>> = waiting.iter().map(|numbers| hashes(numbers)).collect();
                self.book.set_window(waiting.iter().map(Vec::as_slice), now);
            }
            BookOp::ExpireWindow { late } => {
                self.book.expire_window(if late { now.after(WINDOW_SPAN) } else { now });
            }
            BookOp::Prefetch => self.prefetch(),
            BookOp::Ttl { groups } => {
                let ttls =
                    groups.into_iter().map(|(group, us)| (TtlGroupId(group), Duration::from_micros(us)));
                self.book.set_ttls(ttls);
            }
            BookOp::ExpireBlocks { late } => {
                self.book.expire_blocks(Timestamp(self.now + late));
            }
            BookOp::CommitOldest { .. } | BookOp::AbortOldest | BookOp::Finish { .. } | BookOp::Delay => {}
        }
        self.drop_bytes();
    }

    fn refit(&mut self) {
        self.now += 60_000_000;
        self.book.refit(Timestamp(self.now));
    }

    fn drop_invalidated(&mut self) {
        assert!(self.book.drop_invalidated_blocks() <= SWEEP_DROPS_MAX);
    }

    /// Afterwards no block is found or announced, and no block was touched.
    fn new_weights(&mut self) {
        let next = Generation(self.book.generation().0 + 1);
        let of_blocks = |book: &Book| Tier::ALL.map(|tier| book.stats(tier));
        let (before, waiting) = (of_blocks(&self.book), self.book.window_blocks());
        assert!(self.book.set_generation(next, Timestamp(self.now)));
        assert!(!self.book.set_generation(next, Timestamp(self.now)), "the generation is already in force");
        if waiting == 0 {
            assert_eq!(of_blocks(&self.book), before);
        }
        assert_eq!((self.book.slab.visible_len(), self.book.announce_all()), (0, Vec::new()));
        assert_eq!(self.book.pinned_blocks(), PinnedBlocks::default());
        self.index.clear();
    }

    /// Invalidated blocks are never found, and remain only while held or before the sweep reaches
    /// them.
    fn check_invalidated(&self) {
        let slab = &self.book.slab;
        for (key, entry) in slab.iter() {
            let is_void = slab.is_invalidated(key);
            assert_eq!(is_void, entry.generation != self.book.generation());
            assert!(!is_void || slab.find(&entry.meta.hash) != Some(key));
            let is_idle = entry.leases == 0 && !entry.writing && entry.assigned_tier.is_some();
            assert!(
                !(is_void && is_idle) || self.book.scans.will_sweep(key.0 as usize),
                "{key:?} was missed by the sweep"
            );
        }
    }

    /// Invalidated blocks that leases hold, by serial number.
    fn leased_invalidated(&self) -> BTreeSet<u64> {
        let slab = &self.book.slab;
        let held = slab
            .iter()
            .filter(|(key, e)| slab.is_invalidated(*key) && e.leases > 0 && e.assigned_tier.is_some());
        held.filter(|(_, entry)| !entry.writing).map(|(_, entry)| entry.serial).collect()
    }

    /// Leases exactly the tenant's own leading blocks.
    fn fetch(&mut self, lease: u64, first: u64, count: u64, tenant: u32) {
        let all: Vec<BlockHash> = (first..first + count).map(hash).collect();
        let who = Requester { tenant: TenantId(tenant), caller: CallerId(lease % 2), ..requester(lease) };
        let others = self.others_holds(who.tenant);
        let mine: BTreeMap<BlockHash, BlockKey> = self
            .book
            .slab
            .iter()
            .filter(|(key, _)| !self.book.slab.is_invalidated(*key))
            .filter(|(_, entry)| {
                entry.assigned_tier.is_some() && !entry.writing && entry.meta.tenant == who.tenant
            })
            .map(|(key, entry)| (entry.meta.hash, key))
            .collect();
        let expected: Vec<BlockKey> = all.iter().map_while(|hash| mine.get(hash).copied()).collect();
        let reached = self.book.fetch(who, &all, Timestamp(self.now)).unwrap();
        assert_eq!(reached.iter().map(|reach| reach.key).collect::<Vec<_>>(), expected);
        self.holds_no_more(&others);
    }

    /// Number of leases on each block of other tenants.
    fn others_holds(&self, tenant: TenantId) -> BTreeMap<u64, u32> {
        let others = self.book.slab.iter().filter(|(_, entry)| entry.meta.tenant != tenant);
        others.map(|(_, entry)| (entry.serial, entry.leases)).collect()
    }

    fn holds_no_more(&self, others: &BTreeMap<u64, u32>) {
        for (_, entry) in self.book.slab.iter() {
            let before = others.get(&entry.serial);
            assert!(before.is_none_or(|leases| entry.leases <= *leases), "another tenant's block is held");
        }
    }

    /// Every answer to an offer is true of the tenant's own blocks, and no block after a foreign
    /// one is accepted.
    fn check_offer(
        &self,
        tenant: TenantId,
        all: &[BlockHash],
        answers: &[OfferOutcome],
        before: &[Option<TenantId>],
    ) {
        let is_own = |key| self.book.meta(key).is_some_and(|meta| meta.tenant == tenant);
        let mut is_behind = false;
        for ((hash, answer), before) in all.iter().zip(answers).zip(before) {
            let is_true = match *answer {
                OfferOutcome::Wanted(key) => !is_behind && is_own(key),
                OfferOutcome::Present => self.book.slab.find(hash).is_some_and(is_own),
                OfferOutcome::Refused(_) => *before != Some(tenant),
            };
            assert!(is_true, "{answer:?} is wrong for {hash}");
            is_behind |= *answer == OfferOutcome::Refused(RefusalReason::Full);
        }
    }

    fn offer(&mut self, lease: u64, first: u64, count: u64, tenant: u32) {
        let all: Vec<BlockHash> = (first..first + count).map(hash).collect();
        let parent = first.checked_sub(1).map(hash);
        let who = Requester { tenant: TenantId(tenant), caller: CallerId(lease % 2), ..requester(lease) };
        let offer = SaveOffer {
            parent,
            first_offset_blocks: u32::try_from(first).unwrap(),
            hashes: &all,
            charge: CHARGE,
        };
        let before = self.tenant_bytes(tenant);
        let owners: Vec<Option<TenantId>> = all.iter().map(|hash| self.book.owner_tenant(hash)).collect();
        let others = self.others_holds(who.tenant);
        let answers = self.book.offer(who, offer, Timestamp(self.now)).unwrap();
        self.check_offer(who.tenant, &all, &answers, &owners);
        self.holds_no_more(&others);
        for answer in answers {
            if let OfferOutcome::Wanted(key) = answer {
                self.writing.push(key);
            }
        }
        if let (1, Some(quota)) = (tenant, self.quota) {
            let after = self.tenant_bytes(1);
            assert!(after <= quota || after <= before, "{after} bytes, quota {quota}");
        }
        self.drop_bytes();
    }

    /// A prefetch takes neither the reserve nor a block that is held or needed sooner.
    fn prefetch(&mut self) {
        let before = self.book.window.dram_used;
        let in_dram = |book: &Book| -> BTreeSet<u32> {
            let here = book.slab.iter().filter(|(_, entry)| entry.assigned_tier == Some(Tier::Dram));
            here.filter_map(|(_, entry)| entry.queue_position).collect()
        };
        let (was, present) = (in_dram(&self.book), self.book.slab.visible_len());
        let begun = self.book.prefetch(Timestamp(self.now));
        let share = self.book.tiers.dram.limits.share(PREFETCH_SHARE_MAX);
        assert!(self.book.window.dram_used <= share.max(before));
        let is = in_dram(&self.book);
        let come: Vec<u32> = is.difference(&was).copied().collect();
        let gave_way = |gone: &u32| come.iter().any(|near| near < gone);
        assert!(was.difference(&is).all(gave_way), "{was:?} became {is:?}");
        assert!(begun > 0 || was == is, "{was:?} became {is:?} without a prefetch");
        if self.book.tier_state(Tier::Ssd).limits.watermark_high >= 1.0 {
            assert_eq!(self.book.slab.visible_len(), present, "a prefetch drops no block");
        }
    }

    /// Afterwards no copy is on the GPU; then a new one is enabled.
    fn lose_gpu(&mut self) {
        let now = Timestamp(self.now);
        while self.book.lose_gpu(now) {}
        self.drop_bytes();
        assert!(self.bytes.iter().all(|(_, tier)| *tier != Tier::Gpu));
        assert_eq!((self.book.stats(Tier::Gpu).blocks, self.book.gpu_residency.pending()), (0, 0));
        self.book.set_admitting(Tier::Gpu, true);
    }

    fn tenant_bytes(&self, tenant: u32) -> u64 {
        self.book.tenants().find(|row| row.0 == TenantId(tenant)).map_or(0, |row| row.1)
    }

    fn drop_bytes(&mut self) {
        while let Some(action) = self.book.next_action(MovePermits::default()) {
            self.take_drop(action);
        }
    }

    fn take_drop(&mut self, action: Action) {
        let copy = match action {
            Action::DropDram { key } => (key, Tier::Dram),
            Action::DropSsd { key, .. } => (key, Tier::Ssd),
            Action::DropGpu { key, .. } => (key, Tier::Gpu),
            other => panic!("{other:?} without a permit"),
        };
        assert!(self.bytes.remove(&copy), "{copy:?} was not there");
    }

    fn start(&mut self, room: MovePermits) {
        match self.book.next_action(room) {
            Some(Action::Demote { key, hash }) => {
                assert!(room.ssd && self.bytes.contains(&(key, Tier::Dram)));
                self.moving.push(Action::Demote { key, hash });
            }
            Some(Action::Promote { key, hash }) => {
                assert!(room.dram && self.bytes.contains(&(key, Tier::Ssd)));
                self.moving.push(Action::Promote { key, hash });
            }
            Some(Action::ReadBackFromGpu { key, hash }) => {
                assert!(room.dram && self.bytes.contains(&(key, Tier::Gpu)));
                self.moving.push(Action::ReadBackFromGpu { key, hash });
            }
            Some(Action::PromoteToGpu { key, hash }) => {
                assert!(room.gpu_promote && self.bytes.contains(&(key, Tier::Dram)));
                self.moving.push(Action::PromoteToGpu { key, hash });
            }
            Some(drop) => self.take_drop(drop),
            None => {}
        }
    }

    fn finish(&mut self, well: bool) {
        let moved = self.moving.remove(self.moving.len() / 2);
        let (key, to) = target(moved);
        // A block of a lost GPU cannot be read.
        let is_gone =
            matches!(moved, Action::ReadBackFromGpu { .. }) && !self.bytes.contains(&(key, Tier::Gpu));
        if well && !is_gone {
            assert!(self.bytes.insert((key, to)));
            self.book.on_moved(key, to);
        } else {
            self.book.on_move_failed(key, to, Timestamp(self.now));
        }
    }

    fn delay(&mut self) {
        let (key, to) = target(self.moving.remove(0));
        self.book.on_move_delayed(key, to);
    }

    /// Refuses the oldest load from SSD.
    fn refuse(&mut self) {
        let is_load = |action: &Action| matches!(action, Action::Promote { .. });
        let Some(at) = self.moving.iter().position(is_load) else { return };
        let (key, _) = target(self.moving.remove(at));
        self.book.on_load_refused(key, Timestamp(self.now));
        self.refused_bytes += 4096;
    }

    fn apply_changes(&mut self) {
        for change in self.book.take_changes() {
            apply(&mut self.index, change);
        }
    }

    fn check(&mut self) {
        let held = self.held();
        self.apply_changes();
        let told: BTreeMap<BlockHash, Tier> = self
            .book
            .slab
            .iter()
            .filter(|(key, _)| !self.book.slab.is_invalidated(*key))
            .filter_map(|(_, entry)| Some((entry.meta.hash, entry.announced?)))
            .collect();
        assert_eq!(self.index, told, "the index and the book disagree");
        for tier in Tier::ALL {
            self.check_account(tier);
        }
        if self.book.tiers.ssd.used <= self.book.tiers.ssd.limits.capacity.amount() {
            self.refused_bytes = 0;
        }
        self.check_tenants();
        let [counted, are] = self.book.leases.callers();
        assert_eq!(counted, are, "leases by caller");
        self.check_window();
        self.check_shares();
        self.check_queues();
        self.check_pins();
        self.check_quota_index();
        self.check_invalidated();
        for (key, entry) in self.book.slab.iter() {
            assert_eq!(self.bytes.contains(&(key, Tier::Dram)), entry.copies.dram);
            assert_eq!(self.bytes.contains(&(key, Tier::Ssd)), entry.copies.ssd);
            assert_eq!(self.bytes.contains(&(key, Tier::Gpu)), entry.copies.gpu);
            if entry.announced.is_some() {
                // The last read of a lost GPU may still deliver them.
                assert!(entry.copies.any() || entry.moving == Some(Tier::Dram), "announced without bytes");
            }
            let at_rest = entry.assigned_tier.is_some()
                && !entry.writing
                && entry.moving.is_none()
                && entry.queued.is_none();
            if at_rest {
                let copies = [entry.copies.dram, entry.copies.ssd, entry.copies.gpu];
                let one = copies.iter().filter(|copy| **copy).count() == 1;
                assert!(one && entry.copies.has(entry.assigned_tier.unwrap()), "{entry:?}");
                assert_eq!(entry.announced, entry.assigned_tier);
            }
        }
        assert!(held.iter().all(|hash| self.book.slab.find(hash).is_some()));
    }

    fn held(&self) -> BTreeSet<BlockHash> {
        self.book
            .slab
            .iter()
            .filter(|(key, e)| e.held() && e.assigned_tier.is_some() && !self.book.slab.is_invalidated(*key))
            .map(|(_, e)| e.meta.hash)
            .collect()
    }

    fn leased(&self) -> BTreeSet<BlockHash> {
        let slab = self
            .book
            .slab
            .iter()
            .filter(|(_, e)| (e.leases > 0 || e.pin == Some(PinKind::Hard)) && e.assigned_tier.is_some())
            .filter(|(key, _)| !self.book.slab.is_invalidated(*key));
        slab.map(|(_, e)| e.meta.hash).collect()
    }

    fn check_tenants(&self) {
        for (tenant, bytes, _) in self.book.tenants() {
            let of =
                self.book.slab.iter().filter(|(_, e)| e.assigned_tier.is_some() && e.meta.tenant == tenant);
            assert_eq!(bytes, of.map(|(_, e)| u64::from(e.meta.charge.frame)).sum::<u64>());
        }
        for (_, entry) in self.book.slab.iter().filter(|(_, entry)| entry.announced.is_some()) {
            assert_eq!(entry.meta.traits.bytes, entry.meta.charge.frame);
        }
    }

    fn check_window(&self) {
        let book = &self.book;
        let mut listed = 0;
        for (key, entry) in book.slab.iter().filter(|(_, entry)| entry.assigned_tier.is_some()) {
            let is_void = book.slab.is_invalidated(key);
            assert_eq!(
                entry.queue_position,
                book.window.queue_position(&entry.meta.hash).filter(|_| !is_void)
            );
            assert!(
                !entry.prefetch
                    || (entry.assigned_tier == Some(Tier::Dram) && !entry.copies.dram && !entry.awaited)
            );
            let is_free = entry.in_policy && !entry.held();
            let in_window = entry.queue_position.filter(|_| is_free);
            let shelf = book.tier_state(entry.assigned_tier.unwrap());
            assert_eq!(
                entry.queue_position.and_then(|near| shelf.window.get(&near).copied()),
                in_window.map(|_| key)
            );
            listed += usize::from(in_window.is_some());
            assert!(is_void || entry.pin == book.pins.kind(&entry.meta.hash));
            let may_expire = is_free
                && entry.queue_position.is_none()
                && entry.pin.is_none()
                && book.ttls.has(entry.meta.hash.ttl_group());
            let row = book.ttls.listed(entry.meta.hash.ttl_group());
            assert_eq!(row.contains(&(entry.last_use.unwrap_or_default(), key)), may_expire);
        }
        assert_eq!(
            book.tiers.dram.window.len() + book.tiers.ssd.window.len() + book.tiers.gpu.window.len(),
            listed
        );
        let groups = (0..256).map(|group| book.ttls.listed(TtlGroupId(group)).len());
        let free = book.slab.iter().filter(|(_, e)| e.assigned_tier.is_some() && e.in_policy && !e.parked());
        let in_groups = free.filter(|(_, entry)| book.ttls.has(entry.meta.hash.ttl_group())).count();
        assert_eq!(groups.sum::<usize>(), in_groups);
        let windowed = book
            .slab
            .iter()
            .filter(|(_, e)| e.assigned_tier == Some(Tier::Dram) && e.queue_position.is_some());
        assert_eq!(book.window.dram_used, windowed.map(|(_, e)| book.cost(e, Tier::Dram).0).sum::<u64>());
        let under_way = book.slab.iter().filter(|(_, entry)| entry.prefetch).count();
        assert!(book.window.in_flight == under_way && under_way <= PREFETCHES_MAX);
    }

    fn check_shares(&self) {
        for tier in Tier::ALL {
            let shelf = self.book.tier_state(tier);
            let here =
                || self.book.slab.iter().map(|(_, entry)| entry).filter(|e| e.assigned_tier == Some(tier));
            let mut used: BTreeMap<TenantId, u64> = BTreeMap::new();
            for entry in here() {
                *used.entry(entry.charged_tenant).or_default() += self.book.cost(entry, tier).0;
                assert_eq!(entry.charged_tenant, entry.meta.tenant, "there are fewer tenants than the limit");
            }
            assert_eq!(shelf.shares.rows().collect::<BTreeMap<_, _>>(), used);
            for share in used.into_keys() {
                let free = || here().filter(|e| e.charged_tenant == share && e.in_policy && !e.held());
                let waiting = free().filter(|entry| entry.queue_position.is_some()).count();
                let pinned =
                    free().filter(|entry| entry.queue_position.is_none() && entry.pin.is_some()).count();
                let wanted = here()
                    .filter(|e| e.charged_tenant == share && e.in_policy && e.is_promote_only())
                    .count();
                let listed = [free().count() - waiting - pinned, pinned, waiting, wanted];
                assert_eq!(shelf.shares.listed(share), listed);
            }
        }
    }

    fn check_quota_index(&self) {
        let free = self.book.slab.iter().filter(|(_, entry)| entry.in_policy && !entry.held());
        let expected: BTreeSet<_> = free
            .filter(|(_, entry)| self.book.tenants.is_limited(entry.meta.tenant))
            .filter_map(|(key, entry)| {
                let is_pinned = matches!(entry.order(), EvictionOrder::Pinned(_));
                Some((entry.meta.tenant, (entry.assigned_tier?, is_pinned), entry.stamp, key))
            })
            .collect();
        let listed = self.book.tenants.listed();
        assert_eq!(listed.len(), expected.len());
        assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
    }

    fn check_pins(&self) {
        let found = self.book.slab.iter().filter(|(key, e)| self.book.slab.find(&e.meta.hash) == Some(*key));
        let mut pinned = PinnedBlocks::default();
        for (_, entry) in found {
            pinned.hard += u64::from(entry.pin == Some(PinKind::Hard));
            pinned.soft += u64::from(entry.pin == Some(PinKind::Soft));
        }
        assert_eq!(self.book.pinned_blocks(), pinned);
    }

    /// Every block that needs a move is in the right queue.
    fn check_queues(&self) {
        let book = &self.book;
        for (key, _) in book.slab.iter() {
            let Some(line) = book.due_queue(key) else { continue };
            assert!(book.actions.queued(line).contains(&key), "{key:?} is not in the queue {line:?}");
        }
        assert!(
            book.actions.queued(MoveQueue::Prefetches).len() <= PREFETCHES_MAX,
            "stale keys are in the prefetch queue"
        );
        let lifting =
            book.slab.iter().filter(|(_, e)| e.assigned_tier == Some(Tier::Gpu) && !e.copies.gpu).count();
        assert!(book.gpu_residency.pending() == lifting && lifting <= GPU_PROMOTIONS_MAX);
        self.check_gpu();
    }

    /// Blocks on the GPU or moving to it fit into its memory: its capacity plus
    /// [`GPU_PROMOTIONS_MAX`] slots.
    fn check_gpu(&self) {
        let book = &self.book;
        let there = || book.slab.iter().filter(|(_, entry)| entry.copies.gpu);
        let residency = &book.gpu_residency;
        let leaving = there().filter(|(_, entry)| entry.assigned_tier != Some(Tier::Gpu)).count();
        assert_eq!(
            (residency.copies(), residency.leaving(book.stats(Tier::Gpu).blocks)),
            (there().count(), leaving)
        );
        let capacity = book.tiers.gpu.limits.capacity;
        let takes = book.slab.iter().filter(|(_, e)| e.copies.gpu || e.assigned_tier == Some(Tier::Gpu));
        let taken: u64 = takes.map(|(_, entry)| capacity.cost(entry.meta.charge.dram)).sum();
        assert!(
            taken <= capacity.amount() + GPU_PROMOTIONS_MAX as u64 * capacity.cost(CHARGE.dram),
            "{taken}"
        );
    }

    fn check_account(&self, tier: Tier) {
        let stats = self.book.stats(tier);
        let here: Vec<_> =
            self.book.slab.iter().filter(|(_, entry)| entry.assigned_tier == Some(tier)).collect();
        assert_eq!(stats.blocks, here.len() as u64);
        let bytes: u64 = here.iter().map(|(_, entry)| u64::from(book::slot_bytes(&entry.meta, tier))).sum();
        assert_eq!(stats.used_bytes, bytes);
        let shelf = self.book.tier_state(tier);
        let beyond = if tier == Tier::Ssd { self.refused_bytes } else { 0 };
        assert!(shelf.used <= shelf.limits.capacity.amount() + beyond, "{tier:?} over its capacity");
        assert_eq!(shelf.policy.len(), here.iter().filter(|(_, entry)| entry.in_policy).count());
    }
}

/// The block of a move, and its target.
fn target(action: Action) -> (BlockKey, Tier) {
    match action {
        Action::Demote { key, .. } => (key, Tier::Ssd),
        Action::Promote { key, .. } | Action::ReadBackFromGpu { key, .. } => (key, Tier::Dram),
        Action::PromoteToGpu { key, .. } => (key, Tier::Gpu),
        _ => unreachable!("only moves are kept"),
    }
}

fn apply(index: &mut BTreeMap<BlockHash, Tier>, change: Change) {
    match change {
        Change::Stored { blocks, tier, .. } => index.extend(blocks.into_iter().map(|block| (block, tier))),
        Change::Moved { blocks, from, to } => {
            for block in blocks {
                assert_eq!(index.insert(block, to), Some(from));
            }
        }
        Change::Dropped { blocks, tier, .. } => {
            for block in blocks {
                assert_eq!(index.remove(&block), Some(tier));
            }
        }
        Change::Cleared => index.clear(),
    }
}

fn limits(capacity: u64, bytes: bool, slot: u64, marks: (f64, f64)) -> TierLimits {
    let capacity =
        if bytes { Capacity::Bytes(capacity * slot + slot / 2) } else { Capacity::Blocks(capacity) };
    TierLimits { capacity, watermark_high: marks.0, watermark_low: marks.1 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn accounts_balance_under_random_operations(
        dram in 0u64..8, ssd in 0u64..8, bytes in any::<bool>(), marks in marks(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        check_all_ops(BookWorld::new(limits(dram, bytes, 128, marks), limits(ssd, bytes, 4096, marks), None), &ops)?;
    }

    #[test]
    fn accounts_of_three_tiers_balance_under_random_operations(
        gpu in 1u64..6, dram in 0u64..8, ssd in 0u64..8, bytes in any::<bool>(), marks in marks(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let gpu = Some(limits(gpu, bytes, 128, marks));
        check_all_ops(BookWorld::new(limits(dram, bytes, 128, marks), limits(ssd, bytes, 4096, marks), gpu), &ops)?;
    }

    /// Learning policies see uses in other tiers, and reject unlikely blocks.
    #[test]
    fn accounts_balance_with_learning_policies(
        gpu in 0u64..6, dram in 0u64..8, ssd in 0u64..8, marks in marks(), reuse_min in 0.0..0.999_f64,
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let gpu = (gpu > 0).then(|| limits(gpu, true, 128, marks));
        let mut world = BookWorld::new(limits(dram, true, 128, marks), limits(ssd, true, 4096, marks), gpu);
        for tier in Tier::ALL {
            world.book.tier_state_mut(tier).policy = Box::new(Density::new());
        }
        world.book.ssd_writes.set_reuse_min(reuse_min);
        check_all_ops(world, &ops)?;
    }

    /// A GPU without capacity has no effect: equal actions, answers and changes.
    #[test]
    fn gpu_without_capacity_changes_no_behaviour(
        dram in 0u64..8, ssd in 0u64..8, marks in marks(), ops in prop::collection::vec(op(), 1..100),
    ) {
        let world = |gpu| BookWorld::new(limits(dram, true, 128, marks), limits(ssd, true, 4096, marks), gpu);
        let mut worlds = [world(None), world(Some(TierLimits::exact(Capacity::Bytes(0))))];
        for op in &ops {
            let seen = worlds.each_mut().map(|world| {
                world.run(op);
                (world.book.take_changes(), world.moving.clone(), world.bytes.clone(), world.writing.clone())
            });
            prop_assert_eq!(&seen[0], &seen[1]);
        }
    }
}

fn marks() -> impl Strategy<Value = (f64, f64)> {
    prop_oneof![Just((1.0, 1.0)), Just((0.9, 0.5))]
}

fn check_all_ops(mut world: BookWorld, ops: &[BookOp]) -> Result<(), TestCaseError> {
    for op in ops {
        // The end of a write also ends its hold.
        let held = if matches!(op, BookOp::CommitOldest { .. }) { world.leased() } else { world.held() };
        let leased_void = world.leased_invalidated();
        world.run(op);
        world.check();
        // A held block is dropped only by a failed medium or the end of its hold.
        if matches!(
            op,
            BookOp::Fetch { .. }
                | BookOp::Offer { .. }
                | BookOp::CommitOldest { .. }
                | BookOp::Start { .. }
                | BookOp::Quota { .. }
                | BookOp::Window { .. }
                | BookOp::ExpireWindow { .. }
                | BookOp::Prefetch
                | BookOp::Ttl { .. }
                | BookOp::ExpireBlocks { .. }
        ) {
            prop_assert!(
                held.iter().all(|hash| world.book.slab.find(hash).is_some()),
                "{op:?} took a held block"
            );
        }
        // A change of weights does not interrupt a read either.
        if !matches!(
            op,
            BookOp::Release { .. }
                | BookOp::Expire { .. }
                | BookOp::Finish { .. }
                | BookOp::Delay
                | BookOp::LoseGpu
        ) {
            prop_assert!(
                leased_void.is_subset(&world.leased_invalidated()),
                "{op:?} dropped a block that a lease reads"
            );
        }
    }
    let full = world.book.announce_all();
    let before = std::mem::take(&mut world.index);
    full.into_iter().for_each(|change| apply(&mut world.index, change));
    prop_assert_eq!(before, world.index);
    Ok(())
}
