//! Fair shares: the victim tenant under pressure, and the effect of a flood on others.

use super::*;
use crate::tier::share::TENANTS_MAX;
use proptest::prelude::*;

/// Offers one of a tenant's blocks under a lease. Returns `false` if it is refused.
fn offered(book: &mut Book, tenant: u32, number: u64, lease: u64, now: u64) -> bool {
    let all = [own(tenant, number)];
    let who = Requester { tenant: TenantId(tenant), ..requester(lease) };
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    let answer = book.offer(who, offer, Timestamp(now)).unwrap()[0];
    drain(book);
    if let OfferOutcome::Wanted(key) = answer {
        book.commit(key, CHARGE, Timestamp(now));
        drain(book);
    }
    !matches!(answer, OfferOutcome::Refused(_))
}

/// A whole request for one of a tenant's blocks: a read or a save.
fn used(book: &mut Book, tenant: u32, number: u64, now: u64) -> bool {
    let lease = (u64::from(tenant) << 32) | now;
    let who = Requester { tenant: TenantId(tenant), ..requester(lease) };
    let is_hit = !book.fetch(who, &[own(tenant, number)], Timestamp(now)).unwrap().is_empty();
    drain(book);
    let is_taken = is_hit || offered(book, tenant, number, lease, now);
    book.release(LeaseId(lease), Timestamp(now));
    drain(book);
    is_taken
}

fn own(tenant: u32, number: u64) -> BlockHash {
    hash((u64::from(tenant) << 32) | number)
}

fn resident(book: &Book, tenant: u32) -> u64 {
    book.tenants().find(|row| row.0 == TenantId(tenant)).map_or(0, |row| row.1 / u64::from(CHARGE.frame))
}

#[test]
fn largest_tenant_evicts_and_others_keep_their_blocks() {
    let mut book = blocks(9, 0);
    (0..3).for_each(|number| assert!(used(&mut book, 1, number, number)));
    (0..30).for_each(|number| assert!(used(&mut book, 2, number, 100 + number)));
    assert_eq!((resident(&book, 1), resident(&book, 2)), (3, 6));
    (0..30).for_each(|number| assert!(used(&mut book, 3, number, 200 + number)));
    assert_eq!([1, 2, 3].map(|tenant| resident(&book, tenant)), [3, 3, 3]);
    let left: Vec<u64> = (0..30).filter(|number| book.tier_of(&own(2, *number)).is_some()).collect();
    assert_eq!(left, [27, 28, 29], "the longest unused blocks of the tenant left");
}

#[test]
fn tenant_with_held_blocks_takes_none_from_an_equal_one() {
    let mut book = blocks(6, 0);
    (0..3).for_each(|number| assert!(used(&mut book, 1, number, number)));
    (0..3).for_each(|number| assert!(offered(&mut book, 2, number, 9, 100)));
    assert!(!offered(&mut book, 2, 3, 9, 101), "it would exceed its share");
    assert_eq!((resident(&book, 1), resident(&book, 2)), (3, 3));
    assert!(used(&mut book, 1, 7, 102), "the other tenant continues with its own blocks");
    assert_eq!((resident(&book, 1), resident(&book, 2)), (3, 3));
    assert!(book.tier_of(&own(1, 0)).is_none());
}

#[test]
fn window_orders_only_its_own_tenants_evictions() {
    let mut book = blocks(6, 0);
    (0..3).for_each(|number| assert!(used(&mut book, 1, number, number)));
    (0..3).for_each(|number| assert!(used(&mut book, 2, number, 100 + number)));
    let waiting: Vec<BlockHash> = (0..40).map(|number| own(2, number)).collect();
    book.set_window([waiting.as_slice()], Timestamp(200));
    for number in 3..20 {
        assert!(used(&mut book, 2, number, 200 + number));
    }
    assert_eq!((resident(&book, 1), resident(&book, 2)), (3, 3));
    assert!(
        book.tier_of(&own(2, 0)).is_some() && book.tier_of(&own(2, 1)).is_some(),
        "the next blocks in the queue"
    );
}

#[test]
fn tenant_at_its_share_does_not_block_others_prefetches() {
    let mut book = blocks(10, 20);
    (0..15).for_each(|number| assert!(used(&mut book, 1, number, number)));
    (0..15).for_each(|number| assert!(used(&mut book, 2, number, 100 + number)));
    let lease = Requester { tenant: TenantId(1), ..requester(7) };
    // Tenant 1 holds its half of DRAM; its blocks on SSD are nearest in the queue, but it may take
    // no more.
    let held: Vec<u64> =
        (0..15).filter(|number| book.tier_of(&own(1, *number)) == Some(Tier::Dram)).collect();
    assert_eq!(held.len(), 5);
    held.iter().for_each(|number| {
        assert_eq!(book.fetch(lease, &[own(1, *number)], Timestamp(200)).unwrap().len(), 1);
    });
    let on_ssd = |book: &Book, tenant| -> Vec<BlockHash> {
        (0..15)
            .map(|number| own(tenant, number))
            .filter(|hash| book.tier_of(hash) == Some(Tier::Ssd))
            .collect()
    };
    let (first, second) = (on_ssd(&book, 1), on_ssd(&book, 2)[..2].to_vec());
    book.set_window([first.as_slice(), second.as_slice()], Timestamp(300));
    while book.prefetch(Timestamp(300)) > 0 {
        drain(&mut book);
    }
    assert!(
        second.iter().all(|hash| book.tier_of(hash) == Some(Tier::Dram)),
        "the tenant's own blocks made room"
    );
    assert!(first.iter().all(|hash| book.tier_of(hash) == Some(Tier::Ssd)));
}

#[test]
fn tenants_beyond_the_limit_share_an_entry() {
    let room = TENANTS_MAX as u64 + 40;
    let mut book = blocks(room, 0);
    for tenant in 0..TENANTS_MAX as u32 + 30 {
        assert!(used(&mut book, tenant, 0, u64::from(tenant)));
    }
    assert_eq!(book.tiers.dram.shares.rows().count(), TENANTS_MAX + 1);
    // The shared entry has thirty blocks, so it is the victim.
    for number in 1..60 {
        assert!(used(&mut book, 5, number, 1000 + number));
    }
    assert_eq!(book.stats(Tier::Dram).blocks, room);
    let many: u64 = (TENANTS_MAX as u32..TENANTS_MAX as u32 + 30).map(|tenant| resident(&book, tenant)).sum();
    assert!((20..30).contains(&many), "{many}");
    assert!((0..TENANTS_MAX as u32).all(|tenant| resident(&book, tenant) > 0));
    book.set_quotas((0..400).map(|tenant| (TenantId(tenant), 0)));
    assert_eq!((book.stats(Tier::Dram).blocks, book.tiers.dram.shares.rows().count()), (0, 0));
}

#[test]
fn window_keeps_no_ssd_space_from_smaller_tenants() {
    for (ssd, share) in [(2, 2), (4, 3)] {
        let mut book = blocks(3, ssd);
        (0..5).for_each(|number| assert!(used(&mut book, 1, number, number)));
        (0..3).for_each(|number| assert!(used(&mut book, 2, number, 100 + number)));
        book.set_window([[own(1, 3)].as_slice()], Timestamp(200));
        book.prefetch(Timestamp(200));
        drain(&mut book);
        // The window covers all of the other tenant's blocks on SSD, but not the block demoted
        // next.
        book.set_window([[own(2, 0), own(2, 1)].as_slice()], Timestamp(300));
        (3..9).for_each(|number| assert!(used(&mut book, 2, number, 300 + number)));
        assert!(resident(&book, 1) >= share, "{} of {share} left with {ssd} on SSD", resident(&book, 1));
    }
}

#[derive(Clone, Debug)]
enum Flood {
    Use(u64),
    Window(Vec<u64>),
    /// Windows of other tenants must not help the flood either.
    OtherTenantWindow(Vec<u64>),
    Prefetch,
}

fn flood() -> impl Strategy<Value = Flood> {
    prop_oneof![
        6 => (0u64..20).prop_map(Flood::Use),
        // Long enough that a whole tier may be in it.
        1 => prop::collection::vec(0u64..20, 0..60).prop_map(Flood::Window),
        1 => prop::collection::vec(0u64..20, 0..10).prop_map(Flood::OtherTenantWindow),
        2 => Just(Flood::Prefetch),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// A flooding tenant without held blocks cannot push another one below half of each tier. Held
    /// blocks cannot be taken from any tenant: see above.
    #[test]
    fn flood_leaves_others_their_share(
        dram in 2u64..12, ssd in 0u64..12, wanted in 0u64..30,
        floods in prop::collection::vec(flood(), 1..120),
    ) {
        let mut book = blocks(dram, ssd);
        (0..wanted).for_each(|number| { used(&mut book, 1, number, number); });
        let demand = resident(&book, 1);
        // An odd block belongs to no share.
        let share = dram / 2 + ssd / 2;
        for (now, flood) in (1000u64..).zip(&floods) {
            let of = |tenant, numbers: &[u64]| numbers.iter().map(|n| own(tenant, *n)).collect::<Vec<_>>();
            match flood {
                Flood::Use(number) => { used(&mut book, 2, *number, now); }
                Flood::Window(numbers) => { book.set_window([of(2, numbers).as_slice()], Timestamp(now)); }
                Flood::OtherTenantWindow(numbers) => { book.set_window([of(1, numbers).as_slice()], Timestamp(now)); }
                Flood::Prefetch => { book.prefetch(Timestamp(now)); }
            }
            drain(&mut book);
            prop_assert!(resident(&book, 1) >= demand.min(share),
                "{} of {demand} left after {flood:?}, its share is {share}", resident(&book, 1));
        }
    }

    /// Several tenants with excess demand get equal shares.
    #[test]
    fn excess_demand_is_split_evenly(
        tenants in 2u32..6,
        each in 2u64..8,
        ssd_each in 0u64..6,
        turns in prop::collection::vec((0u32..6, 0u64..40), 0..300),
    ) {
        let count = u64::from(tenants);
        let mut book = blocks(each * count, ssd_each * count);
        let turns = turns.into_iter().map(|(tenant, number)| (tenant % tenants, number));
        let last = (0..tenants).flat_map(|tenant| (100..200).map(move |number| (tenant, number)));
        for (now, (tenant, number)) in (0u64..).zip(turns.chain(last)) {
            used(&mut book, tenant, number, now);
        }
        for tenant in 0..tenants {
            let has = resident(&book, tenant);
            prop_assert!(has.abs_diff(each + ssd_each) <= 2, "tenant {tenant} has {has} of {} each", each + ssd_each);
        }
    }
}
