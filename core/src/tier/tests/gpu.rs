//! The GPU's shelf: what comes up, what leaves, what a reader gets, and what is left when the GPU is gone.

use super::*;
use crate::index::command::Change;
use crate::tier::{LIFTS_MAX, LOST_PLACES_MAX};

/// Blocks of each tier, GPU first.
fn places(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> [Vec<u64>; 3] {
    [Tier::Gpu, Tier::Dram, Tier::Ssd]
        .map(|tier| numbers.clone().filter(|number| book.tier_of(&hash(*number)) == Some(tier)).collect())
}

/// Blocks 1 to `count` saved at their numbers, each by a request of its own.
fn filled(gpu: u64, dram: u64, ssd: u64, count: u64) -> Book {
    let mut book = three(gpu, dram, ssd);
    (1..=count).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book
}

/// Uses each of them once more and runs all moves.
fn use_again(book: &mut Book, numbers: &[u64], now: u64) {
    for number in numbers {
        assert_eq!(request(book, &[*number], now), 1);
    }
}

/// The first action of this kind, everything else done as it comes.
fn until(book: &mut Book, wanted: fn(&Action) -> bool) -> Action {
    loop {
        let action = book.next_action(ALL_ROOM).expect("it comes");
        if wanted(&action) {
            return action;
        }
        match action {
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::Promote { key, .. } | Action::Lower { key, .. } => book.on_moved(key, Tier::Dram),
            Action::Lift { key, .. } => book.on_moved(key, Tier::Gpu),
            _ => {}
        }
    }
}

fn key(action: Action) -> BlockKey {
    match action {
        Action::Lift { key, .. } | Action::Lower { key, .. } => key,
        other => panic!("{other:?} moves nothing from or to a GPU"),
    }
}

fn is_lift(action: &Action) -> bool {
    matches!(action, Action::Lift { .. })
}

fn is_lower(action: &Action) -> bool {
    matches!(action, Action::Lower { .. })
}

fn read(book: &mut Book, lease: u64, number: u64, now: u64) -> Tier {
    book.fetch(asker(lease), &[hash(number)], Timestamp(now)).unwrap()[0].tier
}

#[test]
fn what_is_used_again_comes_up_and_what_is_saved_does_not() {
    let mut book = filled(2, 4, 0, 3);
    assert_eq!(places(&book, 1..=3), [vec![], vec![1, 2, 3], vec![]]);
    book.take_changes();
    use_again(&mut book, &[2], 10);
    assert_eq!(places(&book, 1..=3), [vec![2], vec![1, 3], vec![]]);
    let moved = Change::Moved { blocks: vec![hash(2)], from: Tier::Dram, to: Tier::Gpu };
    assert_eq!(book.take_changes(), vec![moved]);
    let stats = book.stats(Tier::Gpu);
    assert_eq!((stats.blocks, stats.used_bytes, stats.promoted_blocks), (1, 128, 1));
    assert_eq!(book.stats(Tier::Dram).blocks, 2, "its room in DRAM is free");
}

#[test]
fn one_that_is_worth_more_takes_the_place_of_one_that_is_worth_less() {
    let mut book = filled(1, 4, 0, 3);
    use_again(&mut book, &[1], 10);
    assert_eq!(places(&book, 1..=3)[0], [1]);
    // Unused for 90, and block 2 came back after 98: nothing moves.
    use_again(&mut book, &[2], 100);
    assert_eq!(places(&book, 1..=3)[0], [1]);
    // Now it came back after 20.
    use_again(&mut book, &[2], 120);
    assert_eq!(places(&book, 1..=3), [vec![2], vec![1, 3], vec![]], "one for one");
    let stats = book.stats(Tier::Gpu);
    assert_eq!((stats.promoted_blocks, stats.demoted_blocks, stats.dropped_blocks), (2, 1, 0));
}

#[test]
fn a_loop_longer_than_the_gpu_moves_nothing() {
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
fn what_leaves_the_gpu_pushes_on_into_ssd() {
    let mut book = filled(1, 2, 4, 3);
    assert_eq!(places(&book, 1..=3), [vec![], vec![2, 3], vec![1]]);
    use_again(&mut book, &[2], 10);
    use_again(&mut book, &[3], 11);
    request(&mut book, &[4], 12);
    assert_eq!(places(&book, 1..=4), [vec![2], vec![3, 4], vec![1]]);
    // 3 came back after 19 and 2 has not been used for 20.
    request(&mut book, &[3], 30);
    assert_eq!(places(&book, 1..=4), [vec![3], vec![2, 4], vec![1]]);
    request(&mut book, &[5], 32);
    assert_eq!(places(&book, 1..=5), [vec![3], vec![2, 5], vec![1, 4]], "DRAM's oldest went on to SSD");
}

#[test]
fn a_block_that_goes_from_the_gpu_right_on_to_ssd_passes_through_dram() {
    let mut book = filled(1, 1, 4, 1);
    use_again(&mut book, &[1], 10);
    request(&mut book, &[2], 20);
    // 2 comes up for 1, which has its place in DRAM; before its bytes are there a save pushes it out.
    book.fetch(asker(7), &[hash(2)], Timestamp(21)).unwrap();
    book.release(LeaseId(7), Timestamp(21));
    offer(&mut book, 8, &[3], 22);
    let lowered = until(&mut book, is_lower);
    assert_eq!(book.stats(Tier::Ssd).blocks, 1, "decided already");
    book.on_moved(key(lowered), Tier::Dram);
    drain(&mut book);
    assert_eq!(places(&book, 1..=2), [vec![2], vec![], vec![1]]);
}

#[test]
fn a_block_on_the_gpu_is_read_by_way_of_dram_and_keeps_its_place() {
    let mut book = filled(2, 4, 0, 2);
    use_again(&mut book, &[1], 10);
    let all = hashes(&[1]);
    assert_eq!(book.bytes_to_load(&book.readable_prefix(TenantId(0), &all)), 100);
    assert_eq!(read(&mut book, 7, 1, 20), Tier::Gpu);
    // Nothing of a GPU is used for it but a reader's place.
    let room = Room { gpu_read: true, ..Room::default() };
    let Some(Action::Lower { key, .. }) = book.next_action(room) else { panic!("no read") };
    book.on_moved(key, Tier::Dram);
    assert_eq!(book.next_action(ALL_ROOM), Some(Action::DropDram { key }));
    assert_eq!(places(&book, 1..=2), [vec![1], vec![2], vec![]]);
    assert_eq!(book.numbers(Tier::Gpu).classes().map(|(_, class)| class.hits).sum::<u64>(), 1);
}

#[test]
fn a_read_goes_before_demotions_and_lifts_and_lowering_goes_last() {
    let mut book = filled(1, 3, 4, 3);
    use_again(&mut book, &[1], 10);
    // 2 comes up for 1; 1 is asked for while it is on its way down; a save has DRAM push one out.
    book.fetch(asker(7), &[hash(2)], Timestamp(1000)).unwrap();
    book.release(LeaseId(7), Timestamp(1000));
    book.fetch(asker(8), &[hash(2)], Timestamp(1001)).unwrap();
    book.release(LeaseId(8), Timestamp(1001));
    assert_eq!(book.stats(Tier::Gpu).demoted_blocks, 1);
    assert!(matches!(offer(&mut book, 9, &[4, 5], 1002)[..], [Offered::Wanted(_), Offered::Wanted(_)]));
    assert!(book.next_action(Room { dram: true, ..Room::default() }).is_none());
    let room = Room { gpu_read: false, ..ALL_ROOM };
    let mut order = Vec::new();
    let mut copy = Vec::new();
    while let Some(action) = book.next_action(room) {
        order.push(match action {
            Action::Demote { .. } => "demote",
            Action::Lower { .. } => "lower",
            Action::Lift { .. } => "lift",
            _ => "drop",
        });
        copy.push(action);
    }
    assert_eq!(order, ["demote", "lower", "lift"]);
    // The same with a reader for what is on its way down.
    copy.iter().for_each(|action| match *action {
        Action::Demote { key, .. } => book.on_move_delayed(key, Tier::Ssd),
        Action::Lower { key, .. } => book.on_move_delayed(key, Tier::Dram),
        Action::Lift { key, .. } => book.on_move_delayed(key, Tier::Gpu),
        _ => {}
    });
    assert_eq!(read(&mut book, 10, 1, 1003), Tier::Gpu);
    assert!(
        matches!(book.next_action(ALL_ROOM), Some(Action::Lower { hash: first, .. }) if first == hash(1))
    );
}

#[test]
fn a_lift_that_fails_leaves_the_block_in_dram() {
    let mut book = filled(2, 4, 4, 4);
    book.take_changes();
    book.fetch(asker(7), &[hash(2)], Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    let lift = key(until(&mut book, is_lift));
    // Its room in DRAM was taken meanwhile.
    request(&mut book, &[5], 11);
    book.on_move_failed(lift, Tier::Gpu, Timestamp(12));
    drain(&mut book);
    assert_eq!(places(&book, 1..=5), [vec![], vec![2, 3, 4, 5], vec![1]], "the oldest made room");
    let moved = book.take_changes().into_iter().filter(|change| matches!(change, Change::Moved { .. }));
    let expected = Change::Moved { blocks: vec![hash(1)], from: Tier::Dram, to: Tier::Ssd };
    assert_eq!(moved.collect::<Vec<_>>(), vec![expected], "nobody was told of a GPU");
    assert_eq!((book.stats(Tier::Gpu).blocks, book.lifting), (0, 0));
    assert_eq!(read(&mut book, 9, 2, 13), Tier::Dram);
}

#[test]
fn a_block_read_while_it_is_lifted_is_served_from_dram() {
    let mut book = filled(2, 4, 0, 2);
    book.fetch(asker(7), &[hash(2)], Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    assert_eq!(read(&mut book, 8, 2, 11), Tier::Dram);
    let lift = key(until(&mut book, is_lift));
    assert_eq!(read(&mut book, 9, 2, 11), Tier::Dram);
    book.on_moved(lift, Tier::Gpu);
    assert_eq!(book.next_action(ALL_ROOM), Some(Action::DropDram { key: lift }));
    assert_eq!(read(&mut book, 10, 2, 12), Tier::Gpu);
}

#[test]
fn a_bounded_number_is_on_its_way_up_and_the_head_of_a_prefix_first() {
    let mut book = three(100, 100, 0);
    let all: Vec<u64> = (1..=30).collect();
    request(&mut book, &all, 1);
    book.fetch(asker(7), &hashes(&all), Timestamp(10)).unwrap();
    book.release(LeaseId(7), Timestamp(10));
    let mut lifted = Vec::new();
    while let Some(action) = book.next_action(ALL_ROOM) {
        if let Action::Lift { hash, .. } = action {
            lifted.push(hash);
        }
    }
    lifted.sort_unstable();
    let mut head = hashes(&all[..LIFTS_MAX]);
    head.sort_unstable();
    assert_eq!(lifted, head);
}

/// The memory of a GPU has slots for so many more blocks than have their place there, and what leaves has its slot until
/// it was read.
#[test]
fn what_comes_up_waits_for_what_leaves() {
    let mut book = filled(16, 80, 0, 80);
    (1..=16).for_each(|number| use_again(&mut book, &[number], 100 + number));
    assert_eq!(book.stats(Tier::Gpu).blocks, 16);
    // DRAM has no room beside the reserve: nothing comes down, and what comes up takes no DRAM.
    let room = Room { lower: false, ..ALL_ROOM };
    let mut most = 0;
    for number in 17..=80 {
        let now = 1000 * number;
        for lease in [now, now + 1] {
            book.fetch(asker(lease), &[hash(number)], Timestamp(lease)).unwrap();
            book.release(LeaseId(lease), Timestamp(lease));
        }
        while let Some(action) = book.next_action(room) {
            if is_lift(&action) {
                book.on_moved(key(action), Tier::Gpu);
            }
        }
        most = most.max(book.slab.iter().filter(|(_, entry)| entry.copies.gpu).count());
    }
    assert_eq!((most, book.leaving()), (16 + LIFTS_MAX, LIFTS_MAX));
    // Now they come down, and others come up for them.
    drain(&mut book);
    assert_eq!((book.leaving(), book.stats(Tier::Gpu).promoted_blocks), (0, 16 + LIFTS_MAX as u64));
    for now in [100_000, 100_001] {
        use_again(&mut book, &[80], now);
    }
    assert_eq!(book.tier_of(&hash(80)), Some(Tier::Gpu));
}

#[test]
fn what_somebody_holds_or_waits_for_does_not_come_up() {
    let mut book = filled(4, 8, 0, 4);
    // Another request uses it still.
    book.fetch(asker(100), &[hash(1)], Timestamp(10)).unwrap();
    request(&mut book, &[1], 11);
    // A waiting request will read it from DRAM.
    let waits = hashes(&[2]);
    book.set_window([waits.as_slice()], Timestamp(12));
    request(&mut book, &[2], 13);
    // A hard pin keeps it where it is.
    pin(&mut book, &[3], Timestamp(14));
    request(&mut book, &[3], 15);
    assert_eq!(places(&book, 1..=4)[0], []);
    book.release(LeaseId(100), Timestamp(16));
    drain(&mut book);
    assert_eq!(places(&book, 1..=4)[0], [1]);
}

#[test]
fn a_hard_pin_keeps_a_block_on_the_gpu_and_a_soft_one_before_all_others() {
    for kind in [PinKind::Hard, PinKind::Soft] {
        let mut book = filled(2, 8, 0, 4);
        use_again(&mut book, &[1], 10);
        use_again(&mut book, &[2], 20);
        book.set_pins([order(1, kind, &[1])], Timestamp(21));
        // 3 is used often, and so is 4: of 1 and 2 only 2 leaves, though 1 is older.
        for now in [200, 201] {
            use_again(&mut book, &[3], now);
        }
        assert_eq!(places(&book, 1..=4)[0], [1, 3], "{kind:?}");
        for now in [400, 401] {
            use_again(&mut book, &[4], now);
        }
        assert_eq!(places(&book, 1..=4)[0], [1, 4], "{kind:?}");
        book.set_pins([order(1, kind, &[1, 4])], Timestamp(402));
        for now in [600, 601] {
            use_again(&mut book, &[3], now);
        }
        assert_eq!(places(&book, 1..=4)[0], [1, 4], "{kind:?}: a lift is a wish, and no pin gives way to it");
        assert_eq!(read(&mut book, 9, 1, 700), Tier::Gpu);
    }
}

#[test]
fn a_quota_takes_what_is_on_the_gpu_last() {
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
fn a_time_to_live_ends_a_block_on_the_gpu() {
    let mut book = filled(2, 8, 0, 2);
    use_again(&mut book, &[1], 10);
    book.take_changes();
    book.set_ttls([(hash(1).group(), Duration::from_micros(100))]);
    assert_eq!(book.expire_blocks(Timestamp(109)), 0, "it counts from its last use");
    assert_eq!(book.expire_blocks(Timestamp(110)), 1);
    let dropped = Change::Dropped {
        blocks: vec![hash(1)],
        tier: Tier::Gpu,
        cause: crate::index::command::DropCause::Ttl,
    };
    assert_eq!(book.take_changes(), vec![dropped]);
    assert!(matches!(book.next_action(ALL_ROOM), Some(Action::DropGpu { .. })));
    assert_eq!(book.stats(Tier::Gpu).expired_blocks, 1);
}

#[test]
fn a_window_that_names_a_block_on_the_gpu_keeps_it_there() {
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
    assert_eq!(places(&book, 1..=3)[0], [2], "nobody waits for it any more");
}

#[test]
fn a_tenant_with_less_on_the_gpu_takes_of_one_with_more() {
    let mut book = filled(2, 8, 0, 2);
    use_again(&mut book, &[1], 10);
    use_again(&mut book, &[2], 11);
    let who = |lease| Asker { tenant: TenantId(7), ..asker(lease) };
    let all = hashes(&[3]);
    let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    for answer in book.offer(who(50), offer, Timestamp(50)).unwrap() {
        let Offered::Wanted(key) = answer else { panic!("{answer:?}") };
        book.commit(key, CHARGE, Timestamp(50));
    }
    book.release(LeaseId(50), Timestamp(50));
    book.fetch(who(60), &all, Timestamp(60)).unwrap();
    book.release(LeaseId(60), Timestamp(60));
    drain(&mut book);
    assert_eq!(places(&book, 1..=3)[0], [2, 3]);
}

#[test]
fn a_gpu_that_is_lost_takes_what_was_only_there() {
    let mut book = filled(4, 8, 4, 5);
    use_again(&mut book, &[1], 10);
    use_again(&mut book, &[2], 11);
    assert_eq!(read(&mut book, 7, 2, 12), Tier::Gpu);
    let reading = key(until(&mut book, is_lower));
    // One is on its way up, one waits for it, and one is nowhere near.
    for number in [3, 4] {
        book.fetch(asker(10 + number), &[hash(number)], Timestamp(13)).unwrap();
        book.release(LeaseId(10 + number), Timestamp(13));
    }
    let lifting = key(until(&mut book, is_lift));
    book.take_changes();
    assert!(!book.lose_gpu(Timestamp(20)));
    let dropped = |number| Change::Dropped {
        blocks: vec![hash(number)],
        tier: Tier::Gpu,
        cause: crate::index::command::DropCause::Failed,
    };
    assert_eq!(book.take_changes(), vec![dropped(1)]);
    assert_eq!(places(&book, 1..=5), [vec![2], vec![3, 4, 5], vec![]]);
    // The moves that were under way end, badly.
    book.on_move_failed(reading, Tier::Dram, Timestamp(21));
    book.on_move_failed(lifting, Tier::Gpu, Timestamp(21));
    assert_eq!(book.take_changes(), vec![dropped(2)]);
    drain(&mut book);
    assert_eq!(places(&book, 1..=5), [vec![], vec![3, 4, 5], vec![]]);
    assert_eq!((book.stats(Tier::Gpu).blocks, book.lifting), (0, 0));
    book.release(LeaseId(7), Timestamp(22));
    // Nothing comes up until it is back.
    use_again(&mut book, &[3], 30);
    assert_eq!(places(&book, 1..=5)[0], []);
    book.set_admitting(Tier::Gpu, true);
    use_again(&mut book, &[3], 31);
    assert_eq!(places(&book, 1..=5)[0], [3]);
}

#[test]
fn a_block_that_is_dropped_while_its_bytes_are_lost_is_taken_off_its_account_once() {
    let mut book = filled(1, 1, 0, 1);
    use_again(&mut book, &[1], 10);
    // DRAM is held, so what a lost GPU had cannot go there.
    for answer in offer(&mut book, 5, &[2], 11) {
        let Offered::Wanted(key) = answer else { panic!("{answer:?}") };
        book.commit(key, CHARGE, Timestamp(11));
    }
    assert_eq!(read(&mut book, 6, 1, 12), Tier::Gpu);
    let reading = key(until(&mut book, is_lower));
    while book.lose_gpu(Timestamp(13)) {}
    assert_eq!(book.tenants().next(), Some((TenantId(0), 100, None)));
    book.on_move_delayed(reading, Tier::Dram);
    assert_eq!(book.tenants().next(), Some((TenantId(0), 100, None)));
    drain(&mut book);
    assert_eq!(book.slab.iter().count(), 1);
}

#[test]
fn a_lost_gpu_is_worked_off_in_steps() {
    let count = 2 * LOST_PLACES_MAX as u64;
    let mut book = three(count, count, 0);
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
    assert_eq!(book.stats(Tier::Gpu).blocks, count - LOST_PLACES_MAX as u64);
    assert!(!book.lose_gpu(Timestamp(now)));
    drain(&mut book);
    assert_eq!((book.stats(Tier::Gpu).blocks, book.slab.iter().count()), (0, 0));
}
