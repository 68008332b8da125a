//! The GPU tier: promotion, demotion, reads, and the loss of the GPU.

use super::*;
use crate::index::command::Change;
use crate::tier::{GPU_LOSS_SLOTS_MAX, GPU_PROMOTIONS_MAX};

/// Blocks of each tier, GPU first.
fn places(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> [Vec<u64>; 3] {
    [Tier::Gpu, Tier::Dram, Tier::Ssd]
        .map(|tier| numbers.clone().filter(|number| book.tier_of(&hash(*number)) == Some(tier)).collect())
}

/// Blocks 1 to `count`, saved at these times by one request each.
fn filled(gpu: u64, dram: u64, ssd: u64, count: u64) -> Book {
    let mut book = blocks_with_gpu(gpu, dram, ssd);
    (1..=count).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book
}

/// Uses each block once more and runs all moves.
fn use_again(book: &mut Book, numbers: &[u64], now: u64) {
    for number in numbers {
        assert_eq!(request(book, &[*number], now), 1);
    }
}

/// The first matching action; all earlier ones are completed.
fn run_until(book: &mut Book, wanted: fn(&Action) -> bool) -> Action {
    loop {
        let action = book.next_action(ALL_PERMITS).expect("a matching action");
        if wanted(&action) {
            return action;
        }
        match action {
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::Promote { key, .. } | Action::ReadBackFromGpu { key, .. } => {
                book.on_moved(key, Tier::Dram);
            }
            Action::PromoteToGpu { key, .. } => book.on_moved(key, Tier::Gpu),
            _ => {}
        }
    }
}

fn key(action: Action) -> BlockKey {
    match action {
        Action::PromoteToGpu { key, .. } | Action::ReadBackFromGpu { key, .. } => key,
        other => panic!("{other:?} is no move from or to a GPU"),
    }
}

fn is_promotion(action: &Action) -> bool {
    matches!(action, Action::PromoteToGpu { .. })
}

fn is_read_back(action: &Action) -> bool {
    matches!(action, Action::ReadBackFromGpu { .. })
}

fn read(book: &mut Book, lease: u64, number: u64, now: u64) -> Tier {
    book.fetch(requester(lease), &[hash(number)], Timestamp(now)).unwrap()[0].tier
}

#[test]
fn reused_blocks_are_promoted_and_saved_ones_are_not() {
    let mut book = filled(2, 4, 0, 3);
    assert_eq!(places(&book, 1..=3), [vec![], vec![1, 2, 3], vec![]]);
    book.take_changes();
    use_again(&mut book, &[2], 10);
    assert_eq!(places(&book, 1..=3), [vec![2], vec![1, 3], vec![]]);
    let moved = Change::Moved { blocks: vec![hash(2)], from: Tier::Dram, to: Tier::Gpu };
    assert_eq!(book.take_changes(), vec![moved]);
    let stats = book.stats(Tier::Gpu);
    assert_eq!((stats.blocks, stats.used_bytes, stats.promoted_blocks), (1, 128, 1));
    assert_eq!(book.stats(Tier::Dram).blocks, 2, "its space in DRAM is free");
}

#[test]
fn better_block_replaces_a_worse_one_on_the_gpu() {
    let mut book = filled(1, 4, 0, 3);
    use_again(&mut book, &[1], 10);
    assert_eq!(places(&book, 1..=3)[0], [1]);
    // Unused for 90, while block 2 was reused after 98: no block moves.
    use_again(&mut book, &[2], 100);
    assert_eq!(places(&book, 1..=3)[0], [1]);
    // Now it was reused after 20.
    use_again(&mut book, &[2], 120);
    assert_eq!(places(&book, 1..=3), [vec![2], vec![1, 3], vec![]], "one block replaces one");
    let stats = book.stats(Tier::Gpu);
    assert_eq!((stats.promoted_blocks, stats.demoted_blocks, stats.dropped_blocks), (2, 1, 0));
}

#[test]
fn loop_longer_than_the_gpu_moves_no_block() {
    let mut book = filled(4, 20, 0, 20);
    let all: Vec<u64> = (1..=20).collect();
    let mut now = 100;
    for number in all.iter().copied().cycle().take(200) {
        assert_eq!(request(&mut book, &[number], now), 1);
        now += 10;
    }
    let stats = book.stats(Tier::Gpu);
    assert_eq!((stats.promoted_blocks, stats.demoted_blocks), (4, 0));
}

#[test]
fn demotions_from_the_gpu_cascade_to_ssd() {
    let mut book = filled(1, 2, 4, 3);
    assert_eq!(places(&book, 1..=3), [vec![], vec![2, 3], vec![1]]);
    use_again(&mut book, &[2], 10);
    use_again(&mut book, &[3], 11);
    request(&mut book, &[4], 12);
    assert_eq!(places(&book, 1..=4), [vec![2], vec![3, 4], vec![1]]);
    // 3 was reused after 19, and 2 has been unused for 20.
    request(&mut book, &[3], 30);
    assert_eq!(places(&book, 1..=4), [vec![3], vec![2, 4], vec![1]]);
    request(&mut book, &[5], 32);
    assert_eq!(
        places(&book, 1..=5),
        [vec![3], vec![2, 5], vec![1, 4]],
        "the oldest block in DRAM was demoted to SSD"
    );
}

#[test]
fn gpu_to_ssd_demotion_passes_through_dram() {
    let mut book = filled(1, 1, 4, 1);
    use_again(&mut book, &[1], 10);
    request(&mut book, &[2], 20);
    // 2 is promoted in place of 1, which is assigned to DRAM; before its bytes arrive, a save
    // demotes it further.
    book.fetch(requester(7), &[hash(2)], Timestamp(21)).unwrap();
    book.release(LeaseId(7), Timestamp(21));
    offer(&mut book, 8, &[3], 22);
    let lowered = run_until(&mut book, is_read_back);
    assert_eq!(book.stats(Tier::Ssd).blocks, 1, "the assignment is immediate");
    book.on_moved(key(lowered), Tier::Dram);
    drain(&mut book);
    assert_eq!(places(&book, 1..=2), [vec![2], vec![], vec![1]]);
}

#[test]
fn gpu_block_is_read_through_dram_and_stays() {
    let mut book = filled(2, 4, 0, 2);
    use_again(&mut book, &[1], 10);
    let all = hashes(&[1]);
    assert_eq!(book.bytes_to_load(&book.readable_prefix(TenantId(0), &all)), 100);
    assert_eq!(read(&mut book, 7, 1, 20), Tier::Gpu);
    // Only the permit for GPU reads is given.
    let room = MovePermits { gpu_read: true, ..MovePermits::default() };
    let Some(Action::ReadBackFromGpu { key, .. }) = book.next_action(room) else { panic!("no read") };
    book.on_moved(key, Tier::Dram);
    assert_eq!(book.next_action(ALL_PERMITS), Some(Action::DropDram { key }));
    assert_eq!(places(&book, 1..=2), [vec![1], vec![2], vec![]]);
    assert_eq!(book.counters(Tier::Gpu).categories().map(|(_, class)| class.hits).sum::<u64>(), 1);
}

#[test]
fn gpu_reads_come_first_and_promotions_last() {
    let mut book = filled(1, 3, 4, 3);
    use_again(&mut book, &[1], 10);
    // 2 is promoted for 1; 1 is requested during its demotion; a save demotes a block from DRAM.
    book.fetch(requester(7), &[hash(2)], Timestamp(1000)).unwrap();
    book.release(LeaseId(7), Timestamp(1000));
    book.fetch(requester(8), &[hash(2)], Timestamp(1001)).unwrap();
    book.release(LeaseId(8), Timestamp(1001));
    assert_eq!(book.stats(Tier::Gpu).demoted_blocks, 1);
    assert!(matches!(
        offer(&mut book, 9, &[4, 5], 1002)[..],
        [OfferOutcome::Wanted(_), OfferOutcome::Wanted(_)]
    ));
    assert!(book.next_action(MovePermits { dram: true, ..MovePermits::default() }).is_none());
    let room = MovePermits { gpu_read: false, ..ALL_PERMITS };
    let mut order = Vec::new();
    let mut copy = Vec::new();
    while let Some(action) = book.next_action(room) {
        order.push(match action {
            Action::Demote { .. } => "demote",
            Action::ReadBackFromGpu { .. } => "lower",
            Action::PromoteToGpu { .. } => "lift",
            _ => "drop",
        });
        copy.push(action);
    }
    assert_eq!(order, ["demote", "lower", "lift"]);
    // The same with a reader waiting for the block being demoted.
    copy.iter().for_each(|action| match *action {
        Action::Demote { key, .. } => book.on_move_delayed(key, Tier::Ssd),
        Action::ReadBackFromGpu { key, .. } => book.on_move_delayed(key, Tier::Dram),
        Action::PromoteToGpu { key, .. } => book.on_move_delayed(key, Tier::Gpu),
        _ => {}
    });
    assert_eq!(read(&mut book, 10, 1, 1003), Tier::Gpu);
    assert!(
        matches!(book.next_action(ALL_PERMITS), Some(Action::ReadBackFromGpu { hash: first, .. }) if first == hash(1))
    );
}

#[test]
fn failed_promotion_leaves_the_block_in_dram() {
    let mut book = filled(2, 4, 4, 4);
    book.take_changes();
    book.fetch(requester(7), &[hash(2)], Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    let lift = key(run_until(&mut book, is_promotion));
    // Its space in DRAM was taken meanwhile.
    request(&mut book, &[5], 11);
    book.on_move_failed(lift, Tier::Gpu, Timestamp(12));
    drain(&mut book);
    assert_eq!(places(&book, 1..=5), [vec![], vec![2, 3, 4, 5], vec![1]], "the oldest block made room");
    let moved = book.take_changes().into_iter().filter(|change| matches!(change, Change::Moved { .. }));
    let expected = Change::Moved { blocks: vec![hash(1)], from: Tier::Dram, to: Tier::Ssd };
    assert_eq!(moved.collect::<Vec<_>>(), vec![expected], "no GPU was announced");
    assert_eq!((book.stats(Tier::Gpu).blocks, book.gpu_residency.pending()), (0, 0));
    assert_eq!(read(&mut book, 9, 2, 13), Tier::Dram);
}

#[test]
fn block_read_during_promotion_is_served_from_dram() {
    let mut book = filled(2, 4, 0, 2);
    book.fetch(requester(7), &[hash(2)], Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    assert_eq!(read(&mut book, 8, 2, 11), Tier::Dram);
    let lift = key(run_until(&mut book, is_promotion));
    assert_eq!(read(&mut book, 9, 2, 11), Tier::Dram);
    book.on_moved(lift, Tier::Gpu);
    assert_eq!(book.next_action(ALL_PERMITS), Some(Action::DropDram { key: lift }));
    assert_eq!(read(&mut book, 10, 2, 12), Tier::Gpu);
}

#[test]
fn promotions_are_bounded_and_start_at_the_prefix_head() {
    let mut book = blocks_with_gpu(100, 100, 0);
    let all: Vec<u64> = (1..=30).collect();
    request(&mut book, &all, 1);
    book.fetch(requester(7), &hashes(&all), Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    let mut lifted = Vec::new();
    while let Some(action) = book.next_action(ALL_PERMITS) {
        if let Action::PromoteToGpu { hash, .. } = action {
            lifted.push(hash);
        }
    }
    lifted.sort_unstable();
    let mut head = hashes(&all[..GPU_PROMOTIONS_MAX]);
    head.sort_unstable();
    assert_eq!(lifted, head);
}

/// The GPU memory has extra slots beyond its capacity; a leaving block keeps its slot until it is
/// read.
#[test]
fn promotions_wait_for_demotions() {
    let mut book = filled(16, 80, 0, 80);
    (1..=16).for_each(|number| use_again(&mut book, &[number], 100 + number));
    assert_eq!(book.stats(Tier::Gpu).blocks, 16);
    // DRAM has no slot beyond the reserve: no block is read back, and promotions need no DRAM.
    let room = MovePermits { gpu_read_back: false, ..ALL_PERMITS };
    let mut most = 0;
    for number in 17..=80 {
        let now = 1000 * number;
        for lease in [now, now + 1] {
            book.fetch(requester(lease), &[hash(number)], Timestamp(lease)).unwrap();
            book.release(LeaseId(lease), Timestamp(lease));
        }
        while let Some(action) = book.next_action(room) {
            if is_promotion(&action) {
                book.on_moved(key(action), Tier::Gpu);
            }
        }
        most = most.max(book.slab.iter().filter(|(_, entry)| entry.copies.gpu).count());
    }
    assert_eq!(
        (most, book.gpu_residency.leaving(book.stats(Tier::Gpu).blocks)),
        (16 + GPU_PROMOTIONS_MAX, GPU_PROMOTIONS_MAX)
    );
    // With read-backs, further promotions follow.
    drain(&mut book);
    assert_eq!(
        (book.gpu_residency.leaving(book.stats(Tier::Gpu).blocks), book.stats(Tier::Gpu).promoted_blocks),
        (0, 16 + GPU_PROMOTIONS_MAX as u64)
    );
    for now in [100_000, 100_001] {
        use_again(&mut book, &[80], now);
    }
    assert_eq!(book.tier_of(&hash(80)), Some(Tier::Gpu));
}

#[test]
fn held_or_needed_blocks_are_not_promoted() {
    let mut book = filled(4, 8, 0, 4);
    // Another request still uses it.
    book.fetch(requester(100), &[hash(1)], Timestamp(10)).unwrap();
    request(&mut book, &[1], 11);
    // A queued request will read it from DRAM.
    let waits = hashes(&[2]);
    book.set_window([waits.as_slice()], Timestamp(12));
    request(&mut book, &[2], 13);
    // A hard pin keeps it in its tier.
    pin(&mut book, &[3], Timestamp(14));
    request(&mut book, &[3], 15);
    assert_eq!(places(&book, 1..=4)[0], []);
    book.release(LeaseId(100), Timestamp(16));
    drain(&mut book);
    assert_eq!(places(&book, 1..=4)[0], [1]);
}

#[test]
fn pinned_blocks_stay_on_the_gpu() {
    for kind in [PinKind::Hard, PinKind::Soft] {
        let mut book = filled(2, 8, 0, 4);
        use_again(&mut book, &[1], 10);
        use_again(&mut book, &[2], 20);
        book.set_pins([pin_directive(1, kind, &[1])], Timestamp(21));
        // 3 and 4 are reused often: only 2 leaves, although 1 is older.
        for now in [200, 201] {
            use_again(&mut book, &[3], now);
        }
        assert_eq!(places(&book, 1..=4)[0], [1, 3], "{kind:?}");
        for now in [400, 401] {
            use_again(&mut book, &[4], now);
        }
        assert_eq!(places(&book, 1..=4)[0], [1, 4], "{kind:?}");
        book.set_pins([pin_directive(1, kind, &[1, 4])], Timestamp(402));
        for now in [600, 601] {
            use_again(&mut book, &[3], now);
        }
        assert_eq!(
            places(&book, 1..=4)[0],
            [1, 4],
            "{kind:?}: a promotion is optional and evicts no pinned block"
        );
        assert_eq!(read(&mut book, 9, 1, 700), Tier::Gpu);
    }
}

#[test]
fn quota_drops_gpu_blocks_last() {
    let mut book = filled(1, 8, 0, 3);
    use_again(&mut book, &[1], 10);
    use_again(&mut book, &[2], 11);
    book.set_quotas([(TenantId(0), 200)]);
    assert_eq!(places(&book, 1..=3), [vec![1], vec![2], vec![]]);
    book.set_quotas([(TenantId(0), 0)]);
    drain(&mut book);
    assert_eq!(places(&book, 1..=3), [vec![], vec![], vec![]]);
    assert_eq!((book.stats(Tier::Gpu).used_bytes, book.slab.iter().count()), (0, 0));
}

#[test]
fn ttl_expires_a_gpu_block() {
    let mut book = filled(2, 8, 0, 2);
    use_again(&mut book, &[1], 10);
    book.take_changes();
    book.set_ttls([(hash(1).ttl_group(), Duration::from_micros(100))]);
    assert_eq!(book.expire_blocks(Timestamp(109)), 0, "the time counts from its last use");
    assert_eq!(book.expire_blocks(Timestamp(110)), 1);
    let dropped = Change::Dropped {
        blocks: vec![hash(1)],
        tier: Tier::Gpu,
        cause: crate::index::command::DropCause::Ttl,
    };
    assert_eq!(book.take_changes(), vec![dropped]);
    assert!(matches!(book.next_action(ALL_PERMITS), Some(Action::DropGpu { .. })));
    assert_eq!(book.stats(Tier::Gpu).expired_blocks, 1);
}

#[test]
fn window_keeps_its_blocks_on_the_gpu() {
    let mut book = filled(1, 8, 4, 3);
    use_again(&mut book, &[1], 10);
    let waits = hashes(&[1]);
    let taken = book.set_window([waits.as_slice()], Timestamp(20));
    assert_eq!((taken.dram_blocks, taken.ssd_blocks), (1, 0), "it need not be loaded from SSD");
    assert_eq!(book.prefetch(Timestamp(20)), 0);
    for now in [200, 201] {
        use_again(&mut book, &[2], now);
    }
    assert_eq!(places(&book, 1..=3)[0], [1]);
    assert!(book.expire_window(Timestamp(20).after(WINDOW_SPAN)));
    let late = 20 + 2 * WINDOW_SPAN.as_micros() as u64;
    for now in [late, late + 1] {
        use_again(&mut book, &[2], now);
    }
    assert_eq!(places(&book, 1..=3)[0], [2], "no queued request needs it any more");
}

#[test]
fn smaller_tenant_displaces_a_larger_one_on_the_gpu() {
    let mut book = filled(2, 8, 0, 2);
    use_again(&mut book, &[1], 10);
    use_again(&mut book, &[2], 11);
    let who = |lease| Requester { tenant: TenantId(7), ..requester(lease) };
    let all = hashes(&[3]);
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    for answer in book.offer(who(50), offer, Timestamp(50)).unwrap() {
        let OfferOutcome::Wanted(key) = answer else { panic!("{answer:?}") };
        book.commit(key, CHARGE, Timestamp(50));
    }
    book.release(LeaseId(50), Timestamp(50));
    book.fetch(who(60), &all, Timestamp(60)).unwrap();
    book.release(LeaseId(60), Timestamp(60));
    drain(&mut book);
    assert_eq!(places(&book, 1..=3)[0], [2, 3]);
}

#[test]
fn lost_gpu_drops_only_its_sole_copies() {
    let mut book = filled(4, 8, 4, 5);
    use_again(&mut book, &[1], 10);
    use_again(&mut book, &[2], 11);
    assert_eq!(read(&mut book, 7, 2, 12), Tier::Gpu);
    let reading = key(run_until(&mut book, is_read_back));
    // One block is being promoted, one is queued for it, and one is unaffected.
    for number in [3, 4] {
        book.fetch(requester(10 + number), &[hash(number)], Timestamp(13)).unwrap();
        book.release(LeaseId(10 + number), Timestamp(13));
    }
    let lifting = key(run_until(&mut book, is_promotion));
    book.take_changes();
    assert!(!book.lose_gpu(Timestamp(20)));
    let dropped = |number| Change::Dropped {
        blocks: vec![hash(number)],
        tier: Tier::Gpu,
        cause: crate::index::command::DropCause::Failed,
    };
    assert_eq!(book.take_changes(), vec![dropped(1)]);
    assert_eq!(places(&book, 1..=5), [vec![2], vec![3, 4, 5], vec![]]);
    // The moves in flight fail.
    book.on_move_failed(reading, Tier::Dram, Timestamp(21));
    book.on_move_failed(lifting, Tier::Gpu, Timestamp(21));
    assert_eq!(book.take_changes(), vec![dropped(2)]);
    drain(&mut book);
    assert_eq!(places(&book, 1..=5), [vec![], vec![3, 4, 5], vec![]]);
    assert_eq!((book.stats(Tier::Gpu).blocks, book.gpu_residency.pending()), (0, 0));
    book.release(LeaseId(7), Timestamp(22));
    // No promotion until the GPU is back.
    use_again(&mut book, &[3], 30);
    assert_eq!(places(&book, 1..=5)[0], []);
    book.set_admitting(Tier::Gpu, true);
    use_again(&mut book, &[3], 31);
    assert_eq!(places(&book, 1..=5)[0], [3]);
}

#[test]
fn block_lost_during_a_read_is_discharged_once() {
    let mut book = filled(1, 1, 0, 1);
    use_again(&mut book, &[1], 10);
    // DRAM is held, so blocks of a lost GPU cannot go there.
    for answer in offer(&mut book, 5, &[2], 11) {
        let OfferOutcome::Wanted(key) = answer else { panic!("{answer:?}") };
        book.commit(key, CHARGE, Timestamp(11));
    }
    assert_eq!(read(&mut book, 6, 1, 12), Tier::Gpu);
    let reading = key(run_until(&mut book, is_read_back));
    while book.lose_gpu(Timestamp(13)) {}
    assert_eq!(book.tenants().next(), Some((TenantId(0), 100, None)));
    book.on_move_delayed(reading, Tier::Dram);
    assert_eq!(book.tenants().next(), Some((TenantId(0), 100, None)));
    drain(&mut book);
    assert_eq!(book.slab.iter().count(), 1);
}

#[test]
fn lost_gpu_is_processed_in_steps() {
    let count = 2 * GPU_LOSS_SLOTS_MAX as u64;
    let mut book = blocks_with_gpu(count, count, 0);
    let all: Vec<u64> = (1..=count).collect();
    request(&mut book, &all, 1);
    let mut now = 10;
    while book.stats(Tier::Gpu).blocks < count {
        let left: Vec<u64> = all
            .iter()
            .copied()
            .filter(|number| book.tier_of(&hash(*number)) == Some(Tier::Dram))
            .take(8)
            .collect();
        use_again(&mut book, &left, now);
        now += 1;
    }
    assert!(book.lose_gpu(Timestamp(now)));
    assert_eq!(book.stats(Tier::Gpu).blocks, count - GPU_LOSS_SLOTS_MAX as u64);
    assert!(!book.lose_gpu(Timestamp(now)));
    drain(&mut book);
    assert_eq!((book.stats(Tier::Gpu).blocks, book.slab.iter().count()), (0, 0));
}
