//! Tests of reuse statistics: sums of many nodes equal those of one node in any order, and
//! impossible sums are refused.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::evict::{BlockKey, BlockTraits, by_name};
use crate::id::{Category, Timestamp};
use proptest::prelude::*;

/// Floating-point sums in different orders agree within this share.
const TOLERANCE: f64 = 1e-9;

fn sums() -> impl Strategy<Value = CategorySums> {
    let sum = || prop_oneof![Just(0.0), 0.0..10.0_f64, 0.0..1e12_f64];
    let ages = || prop::collection::vec(sum(), AGE_BANDS).prop_map(|ages| ages.try_into().unwrap());
    let clusters = (sum(), 1.0..1e5_f64).prop_map(|(sum, blocks)| (sum, sum * blocks));
    (sum(), ages(), ages(), clusters).prop_map(|(uses, reuses, exposure_s, clusters)| CategorySums {
        uses,
        reuses,
        exposure_s,
        clusters,
    })
}

fn statistics() -> impl Strategy<Value = ReuseStats> {
    let categories = prop::collection::btree_map(0..CATEGORIES_MAX as u32, sums(), 0..6);
    categories.prop_map(|categories| {
        let mut all = ReuseStats::default();
        categories.into_iter().for_each(|(number, sums)| all.add_reported(number, sums).unwrap());
        all
    })
}

fn merged<'a>(parts: impl IntoIterator<Item = &'a ReuseStats>) -> ReuseStats {
    let mut all = ReuseStats::default();
    parts.into_iter().for_each(|part| all.merge(part));
    all
}

fn is_close(left: &ReuseStats, right: &ReuseStats) -> bool {
    let near = |(a, b): (f64, f64)| (a - b).abs() <= TOLERANCE * a.max(b);
    let all_near = |(a, b): (&CategorySums, &CategorySums)| a.values().zip(b.values()).all(near);
    left.by_category.keys().eq(right.by_category.keys())
        && left.by_category.values().zip(right.by_category.values()).all(all_near)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn merging_is_commutative_and_associative(a in statistics(), b in statistics(), c in statistics()) {
        prop_assert_eq!(merged([&a, &b]), merged([&b, &a]));
        prop_assert!(is_close(&merged([&merged([&a, &b]), &c]), &merged([&a, &merged([&b, &c])])));
        prop_assert_eq!(merged([&a]), a);
    }

    #[test]
    fn weight_bounds_any_report(sums in sums()) {
        let weight = sums.weight();
        prop_assert!(weight > 0.0 && weight <= 1.0);
        prop_assert!(sums.total_reuses() * weight <= FLEET_REQUESTS_MAX * (1.0 + TOLERANCE));
        for (band, seconds) in sums.exposure_s.iter().enumerate() {
            prop_assert!(seconds * weight <= width_s(band) * FLEET_REQUESTS_MAX * (1.0 + TOLERANCE));
        }
    }

    #[test]
    fn invalid_sums_are_refused(sums in sums(), at in 0..2 * AGE_BANDS + 3, bad in 0..4_usize) {
        let mut unsound = sums.clone();
        *unsound.values_mut().nth(at).unwrap() = [f64::NAN, f64::INFINITY, -1e-30, SUM_MAX * 1.001][bad];
        let mut all = ReuseStats::default();
        prop_assert_eq!(all.add_reported(3, unsound), Err(InvalidStats::InvalidSum { category: 3 }));
        prop_assert!(all.is_empty());
        prop_assert_eq!(all.add_reported(3, sums.clone()), Ok(()));
        prop_assert_eq!(all.add_reported(3, sums.clone()), Err(InvalidStats::DuplicateCategory { category: 3 }));
        let none = CATEGORIES_MAX as u32;
        prop_assert_eq!(all.add_reported(none, sums.clone()), Err(InvalidStats::UnknownCategory { number: none }));
        prop_assert_eq!(all.add_reported(u32::MAX, sums), Err(InvalidStats::UnknownCategory { number: u32::MAX }));
    }

    /// Cluster sums of decayed requests are valid for a receiver, also after rounding on the wire.
    #[test]
    fn decayed_clusters_are_valid(
        seen in prop::collection::vec((1..=65_536_u32, 0.0..1.0_f64), 1..50),
        passed in 0.0..120.0_f64,
    ) {
        let mut clusters = (0.0, 0.0);
        let fade = |clusters: &mut (f64, f64), kept: f64| *clusters = (clusters.0 * kept, clusters.1 * kept);
        for (blocks, kept) in seen {
            fade(&mut clusters, kept);
            clusters = (clusters.0 + f64::from(blocks), clusters.1 + f64::from(blocks).powi(2));
        }
        fade(&mut clusters, (-passed).exp());
        let clusters = (f64::from(clusters.0 as f32), f64::from(clusters.1 as f32));
        let sums = CategorySums { uses: 1.0, clusters, ..CategorySums::default() };
        prop_assert_eq!(ReuseStats::default().add_reported(3, sums), Ok(()));
    }

    /// Whatever one node reports of itself, clusters included, the other nodes' sums keep their
    /// weight.
    #[test]
    fn one_node_is_one_of_many(lie in sums(), most in 1.0..1e4_f64) {
        let mut honest = CategorySums { uses: 5.0, clusters: (8.0, 64.0), ..CategorySums::default() };
        honest.reuses[7] = 5.0;
        let of = |sums: &CategorySums| {
            let mut all = ReuseStats::default();
            all.add(CategoryRole::Shared(2), sums);
            all.to_requests()
        };
        let (mut before, mut after) = (ReuseStats::default(), ReuseStats::default());
        before.merge_capped(&of(&honest), most);
        after.merge_capped(&of(&honest), most);
        after.merge_capped(&of(&lie), most);
        let [before, after] = [&before, &after].map(|all| all.get(CategoryRole::Shared(2)).unwrap());
        prop_assert!(after.reuses[7] >= before.reuses[7]);
        prop_assert!(after.requests() <= before.requests() + most * (1.0 + TOLERANCE));
        prop_assert!(after.total_reuses() <= before.total_reuses() + most * (1.0 + TOLERANCE));
        // The others' sums keep the share that their requests have.
        let others = FLEET_REQUESTS_MAX * before.requests() / (before.requests() + most).max(FLEET_REQUESTS_MAX);
        prop_assert!(before.requests() * after.weight() >= others * (1.0 - TOLERANCE));
    }

    #[test]
    fn sums_stay_numbers_however_many_are_added(sums in sums()) {
        let mut all = ReuseStats::default();
        let most = CategorySums { uses: SUM_MAX, ..sums };
        (0..100).for_each(|_| all.add(CategoryRole::Partial, &most));
        prop_assert!(all.get(CategoryRole::Partial).unwrap().values().all(|sum| (0.0..=SUM_MAX).contains(&sum)));
    }
}

#[test]
fn every_number_is_one_role_and_every_role_one_number() {
    let roles: Vec<CategoryRole> =
        (0..CATEGORIES_MAX as u16).map(|number| CategoryRole::from_number(number).unwrap()).collect();
    assert!(roles.iter().enumerate().all(|(number, role)| usize::from(role.number()) == number));
    assert_eq!(CategoryRole::from_number(CATEGORIES_MAX as u16), None);
    assert_eq!(CategoryRole::from_number(u16::MAX), None);
}

#[test]
fn distance_reflects_weighted_sums() {
    let of = |uses: f64, band: usize| {
        let mut sums = CategorySums { uses, ..CategorySums::default() };
        sums.reuses[band] = uses / 2.0;
        let mut all = ReuseStats::default();
        all.add(CategoryRole::Shared(2), &sums);
        all
    };
    assert_eq!(of(50.0, 7).distance(&of(50.0, 7)), 0.0);
    assert!(of(1e6, 7).distance(&of(2e6, 7)) < 1e-9, "more of the same must not add distance");
    assert!((of(1e6, 7).distance(&of(1e6, 9)) - 2.0).abs() < 1e-9);
    assert!(of(50.0, 7).distance(&ReuseStats::default()) > 1.0);
    let tenth = FLEET_REQUESTS_MAX / 10.0;
    assert!(of(tenth, 7).distance(&ReuseStats::default()) > 0.1);
    for seen in 0..100 {
        let (before, after) = (of(f64::from(seen), 7), of(f64::from(seen + 1), 7));
        assert!(after.distance(&before) < 0.1, "one request after {seen} must add little distance");
    }
}

/// One node reads a prompt of 65,536 blocks a hundred times; fifty nodes have 10,000 requests of 8
/// blocks: requests count.
#[test]
fn huge_prompts_of_one_node_do_not_outweigh_the_requests_of_others() {
    let node = |requests: f64, blocks: f64, band: usize| {
        let mut sums = CategorySums {
            clusters: (requests * blocks, requests * blocks * blocks),
            ..CategorySums::default()
        };
        sums.reuses[band] = requests * blocks;
        let mut all = ReuseStats::default();
        all.add(CategoryRole::Shared(2), &sums);
        all.to_requests()
    };
    let mut all = ReuseStats::default();
    all.merge_capped(&node(100.0, 65_536.0, 10), NODE_REQUESTS_MAX);
    (0..50).for_each(|_| all.merge_capped(&node(10_000.0, 8.0, 20), NODE_REQUESTS_MAX));
    let sums = all.get(CategoryRole::Shared(2)).unwrap();
    assert!((sums.reuses[10] - 100.0).abs() < 1e-6, "{}", sums.reuses[10]);
    assert!((sums.reuses[20] - 500_000.0).abs() < 1e-3, "{}", sums.reuses[20]);
    assert!((sums.total_reuses() * sums.weight() - FLEET_REQUESTS_MAX).abs() < 1e-9);
}

/// Without a reuse of a category, a node must not count each of its blocks as a request.
#[test]
fn median_cluster_size_stands_in() {
    let waits = |clusters: (f64, f64)| CategorySums { uses: 1600.0, clusters, ..CategorySums::default() };
    let (unseen, seen) = (CategoryRole::Shared(1), CategoryRole::Session(RequestKind::Text, 0, None));
    let mut all = ReuseStats::default();
    all.add(unseen, &waits((0.0, 0.0)));
    all.add(CategoryRole::Partial, &waits((0.0, 0.0)));
    let uses = |all: &ReuseStats, role: CategoryRole| all.to_requests().get(role).unwrap().uses;
    assert_eq!(
        (uses(&all, unseen), uses(&all, CategoryRole::Partial)),
        (1600.0 / CLUSTER_BLOCKS_DEFAULT, 1600.0)
    );
    all.add(seen, &waits((8.0, 64.0)));
    all.add(CategoryRole::Shared(2), &waits((8.0, 64.0)));
    all.add(CategoryRole::Shared(3), &waits((65_536.0, 65_536.0 * 65_536.0)));
    assert_eq!((uses(&all, unseen), uses(&all, seen)), (200.0, 200.0));
}

#[test]
fn decayed_categories_are_dropped() {
    let mut all = ReuseStats::default();
    all.add(CategoryRole::Shared(2), &CategorySums { uses: 64.0, ..CategorySums::default() });
    (0..6).for_each(|_| all.decay(0.5));
    assert_eq!(all.get(CategoryRole::Shared(2)).map(|sums| sums.uses), Some(1.0));
    all.decay(f64::MAX);
    assert!(!all.is_empty());
    all.decay(0.4);
    assert!(all.is_empty());
}

/// Serves sessions numbered from `from` in steps: text sessions return after 20 s, the other kind
/// never.
fn serve(policy: &mut dyn crate::evict::Policy, from: u64, step: usize, sessions: u64) {
    let traits = |block: u64, kind: RequestKind, turn: u8, offset: u32| BlockTraits {
        category: Category { kind, conversation_turn: turn },
        offset_blocks: offset,
        bytes: 1,
        is_partial: false,
        fingerprint: (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    };
    let key = |block: u64| BlockKey(u32::try_from(block).unwrap());
    for at in (from..sessions).step_by(step) {
        let now = Timestamp((at + 1) * 1_000_000);
        policy.refit(now);
        for (offset, block) in [(1, 4 * at + 1), (0, 4 * at)] {
            policy.insert(key(block), traits(block, RequestKind::Text, 1, offset), now);
            policy.settle(key(block), traits(block, RequestKind::Text, 1, offset), now);
        }
        let other = Timestamp(now.0 + 300_000);
        policy.insert(key(4 * at + 2), traits(4 * at + 2, RequestKind::File, 1, 0), other);
        policy.settle(key(4 * at + 2), traits(4 * at + 2, RequestKind::File, 1, 0), other);
        // The earlier session of the same steps that is due now.
        let back = (20_u64).next_multiple_of(step as u64);
        if let Some(before) = at.checked_sub(back).filter(|before| *before >= from) {
            let now = Timestamp(now.0 + 600_000);
            for (offset, block) in [(1, 4 * before + 1), (0, 4 * before)] {
                policy.access(key(block), traits(block, RequestKind::Text, 2, offset), now);
            }
        }
    }
}

/// Merged sums of nodes that each saw every second session equal those of one that saw all, within
/// 15 %: other neighbours in time give other slots and decay steps.
#[test]
fn merged_shards_equal_the_whole() {
    for name in ["density", "workload"] {
        let end = Timestamp(700_000_000);
        let of = |from, step| {
            let mut policy = by_name(name, 0).unwrap();
            serve(policy.as_mut(), from, step, 600);
            policy.refit(end);
            policy.reuse_stats(end)
        };
        let (whole, shards) = (of(0, 1), [of(0, 2), of(1, 2)]);
        let together = merged(&shards);
        let reused = |all: &ReuseStats| all.categories().map(|(_, sums)| sums.total_reuses()).sum::<f64>();
        let blocks = |all: &ReuseStats| all.categories().map(|(_, sums)| sums.blocks()).sum::<f64>();
        for (what, of) in [("reused", &reused as &dyn Fn(&ReuseStats) -> f64), ("seen", &blocks)] {
            let (whole, together) = (of(&whole), of(&together));
            assert!(
                whole > 100.0 && (together / whole - 1.0).abs() < 0.15,
                "{name}: {what} {together} of {whole}"
            );
        }
    }
}

/// A fresh policy with the fleet statistics of another evicts the same block: the one without
/// reuse, though it is newer.
#[test]
fn fleet_stats_transfer_the_learned_order() {
    for name in ["density", "workload"] {
        let end = Timestamp(700_000_000);
        let mut learnt = by_name(name, 0).unwrap();
        serve(learnt.as_mut(), 0, 1, 600);
        let fleet = learnt.reuse_stats(end);
        let category_of_victim = |told: bool| {
            let mut fresh = by_name(name, 0).unwrap();
            if told {
                fresh.set_fleet_stats(&fleet, Timestamp(0));
            }
            // Both are at most a second old; the one without reuse is the newer one.
            serve(fresh.as_mut(), 0, 1, 1);
            fresh.victim(Timestamp(2_000_000), &|_| false).unwrap()
        };
        assert_ne!(category_of_victim(false), BlockKey(2), "{name}: a fresh policy goes by last use");
        assert_eq!(category_of_victim(true), BlockKey(2), "{name}");
        assert!(by_name("lru", 0).unwrap().reuse_stats(end).is_empty());
    }
}

/// The fleet reports the contrary of what the node sees: the node's own requests prevail.
#[test]
fn own_observations_outweigh_fleet_stats() {
    for name in ["density", "workload"] {
        let end = Timestamp(700_000_000);
        let mut honest = by_name(name, 0).unwrap();
        serve(honest.as_mut(), 0, 1, 600);
        let mut lies = ReuseStats::default();
        for (role, sums) in honest.reuse_stats(end).roles() {
            let is_file = matches!(
                role,
                CategoryRole::Session(RequestKind::File, ..) | CategoryRole::Paper(RequestKind::File, _)
            );
            let mut lie = CategorySums { uses: 1e15, ..CategorySums::default() };
            match is_file {
                true => lie.reuses[10] = 1e15,
                false => lie.exposure_s = sums.exposure_s.map(|seconds| seconds * 1e9),
            }
            lies.add(role, &lie);
        }
        let victim = |requests: u64| {
            let mut policy = by_name(name, 0).unwrap();
            policy.set_fleet_stats(&lies, Timestamp(0));
            serve(policy.as_mut(), 0, 1, requests);
            let now = Timestamp((requests + 1) * 1_000_000);
            policy.refit(now);
            // Considers the newest session alone; key 2 of it is of the kind that does not return.
            let newest = 4 * (requests - 1);
            policy.victim(now, &|key| u64::from(key.0) < newest).unwrap().0 - newest as u32
        };
        assert_ne!(victim(1), 2, "{name}: at first the fleet statistics decide");
        assert_eq!(victim(3_000), 2, "{name}: in the end own observations decide");
    }
}
