//! Two tenants that know one hash: each sees its own blocks only.

use super::*;

fn of(tenant: u32, lease: u64) -> Asker {
    Asker { tenant: TenantId(tenant), ..asker(lease) }
}

fn offered(book: &mut Book, who: Asker, numbers: &[u64]) -> Vec<Offered> {
    let all = hashes(numbers);
    let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    book.offer(who, offer, Timestamp(1)).unwrap()
}

fn keys(answers: &[Offered]) -> Vec<BlockKey> {
    let key = |answer: &Offered| if let Offered::Wanted(key) = answer { Some(*key) } else { None };
    answers.iter().filter_map(key).collect()
}

/// Blocks that tenant 1 saved, with their keys.
fn saved(book: &mut Book, numbers: &[u64]) -> Vec<BlockKey> {
    let keys = keys(&offered(book, of(1, 1), numbers));
    keys.iter().for_each(|key| book.commit(*key, CHARGE, Timestamp(1)));
    book.release(LeaseId(1), Timestamp(1));
    assert_eq!(keys.len(), numbers.len());
    keys
}

const FULL: Offered = Offered::Refused(RefusedBy::Full);

#[test]
fn another_tenants_block_is_no_hit_and_never_present() {
    let mut book = blocks(8, 0);
    saved(&mut book, &[1, 2]);
    let all = hashes(&[1, 2]);
    assert!(book.readable_prefix(TenantId(2), &all).is_empty());
    assert!(book.fetch(of(2, 9), &all, Timestamp(2)).unwrap().is_empty());
    assert_eq!(book.lease_count(), 0, "nothing was reached, so nothing is held");
    let answers = offered(&mut book, of(2, 9), &[3, 1, 4, 3]);
    assert!(matches!(answers[..], [Offered::Wanted(_), FULL, FULL, Offered::Present]), "{answers:?}");
    assert_eq!(book.held_by(LeaseId(9)), 1, "the other tenant's block is not held for it");
    assert_eq!(book.fetch(of(1, 5), &all, Timestamp(2)).unwrap().len(), 2, "whose it is has it");
}

#[test]
fn a_fetch_ends_before_another_tenants_block() {
    let mut book = blocks(8, 0);
    saved(&mut book, &[2]);
    for key in keys(&offered(&mut book, of(2, 9), &[1])) {
        book.commit(key, CHARGE, Timestamp(1));
    }
    for key in keys(&offered(&mut book, of(2, 9), &[3])) {
        book.commit(key, CHARGE, Timestamp(1));
    }
    assert_eq!(book.fetch(of(2, 9), &hashes(&[1, 2, 3]), Timestamp(2)).unwrap().len(), 1);
}

#[test]
fn a_block_that_another_tenant_is_writing_is_refused_and_comes_once_that_gave_up() {
    let mut book = blocks(8, 0);
    let writing = keys(&offered(&mut book, of(1, 1), &[1]));
    assert_eq!(offered(&mut book, of(2, 9), &[1, 2]), [FULL, FULL]);
    assert_eq!(book.held_by(LeaseId(9)), 0);
    book.abort(writing[0]);
    assert_eq!(keys(&offered(&mut book, of(2, 9), &[1, 2])).len(), 2);
}

#[test]
fn what_another_tenant_asks_for_in_vain_keeps_no_block() {
    let mut book = blocks(1, 0);
    saved(&mut book, &[1]);
    assert!(book.fetch(of(2, 9), &hashes(&[1]), Timestamp(2)).unwrap().is_empty());
    assert_eq!(offered(&mut book, of(2, 9), &[1]), [FULL]);
    // Nobody holds it: it gives way to the next one, of either tenant.
    assert_eq!(keys(&offered(&mut book, of(2, 9), &[2])).len(), 1);
    assert_eq!(book.tier_of(&hash(1)), None);
}

#[test]
fn blocks_found_at_start_are_their_tenants() {
    let mut book = blocks(2, 4);
    let found = Meta {
        hash: hash(1),
        parent: None,
        tenant: TenantId(1),
        traits: BlockTraits::default(),
        charge: CHARGE,
    };
    book.restore(found, Timestamp(0)).unwrap();
    assert!(book.fetch(of(2, 9), &hashes(&[1]), Timestamp(1)).unwrap().is_empty());
    assert_eq!(book.fetch(of(1, 5), &hashes(&[1]), Timestamp(1)).unwrap().len(), 1);
}
