//! Two tenants that know the same hash: each sees its own blocks only.

use super::*;

fn requester_of(tenant: u32, lease: u64) -> Requester {
    Requester { tenant: TenantId(tenant), ..requester(lease) }
}

fn offered(book: &mut Book, who: Requester, numbers: &[u64]) -> Vec<OfferOutcome> {
    let all = hashes(numbers);
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    book.offer(who, offer, Timestamp(1)).unwrap()
}

fn keys(answers: &[OfferOutcome]) -> Vec<BlockKey> {
    let key = |answer: &OfferOutcome| if let OfferOutcome::Wanted(key) = answer { Some(*key) } else { None };
    answers.iter().filter_map(key).collect()
}

/// Saves blocks for tenant 1 and returns their keys.
fn saved(book: &mut Book, numbers: &[u64]) -> Vec<BlockKey> {
    let keys = keys(&offered(book, requester_of(1, 1), numbers));
    keys.iter().for_each(|key| book.commit(*key, CHARGE, Timestamp(1)));
    book.release(LeaseId(1), Timestamp(1));
    assert_eq!(keys.len(), numbers.len());
    keys
}

const FULL: OfferOutcome = OfferOutcome::Refused(RefusalReason::Full);

#[test]
fn foreign_block_is_neither_hit_nor_present() {
    let mut book = blocks(8, 0);
    saved(&mut book, &[1, 2]);
    let all = hashes(&[1, 2]);
    assert!(book.readable_prefix(TenantId(2), &all).is_empty());
    assert!(book.fetch(requester_of(2, 9), &all, Timestamp(2)).unwrap().is_empty());
    assert_eq!(book.lease_count(), 0, "an empty result takes no lease");
    let answers = offered(&mut book, requester_of(2, 9), &[3, 1, 4, 3]);
    assert!(
        matches!(answers[..], [OfferOutcome::Wanted(_), FULL, FULL, OfferOutcome::Present]),
        "{answers:?}"
    );
    assert_eq!(book.leases.held_by(LeaseId(9)), 1, "the other tenant's block is not held for it");
    assert_eq!(
        book.fetch(requester_of(1, 5), &all, Timestamp(2)).unwrap().len(),
        2,
        "the owning tenant can read it"
    );
}

#[test]
fn fetch_ends_before_a_foreign_block() {
    let mut book = blocks(8, 0);
    saved(&mut book, &[2]);
    for key in keys(&offered(&mut book, requester_of(2, 9), &[1])) {
        book.commit(key, CHARGE, Timestamp(1));
    }
    for key in keys(&offered(&mut book, requester_of(2, 9), &[3])) {
        book.commit(key, CHARGE, Timestamp(1));
    }
    assert_eq!(book.fetch(requester_of(2, 9), &hashes(&[1, 2, 3]), Timestamp(2)).unwrap().len(), 1);
}

#[test]
fn block_being_written_by_another_tenant_is_refused_until_aborted() {
    let mut book = blocks(8, 0);
    let writing = keys(&offered(&mut book, requester_of(1, 1), &[1]));
    assert_eq!(offered(&mut book, requester_of(2, 9), &[1, 2]), [FULL, FULL]);
    assert_eq!(book.leases.held_by(LeaseId(9)), 0);
    book.abort(writing[0]);
    assert_eq!(keys(&offered(&mut book, requester_of(2, 9), &[1, 2])).len(), 2);
}

#[test]
fn failed_foreign_requests_hold_no_block() {
    let mut book = blocks(1, 0);
    saved(&mut book, &[1]);
    assert!(book.fetch(requester_of(2, 9), &hashes(&[1]), Timestamp(2)).unwrap().is_empty());
    assert_eq!(offered(&mut book, requester_of(2, 9), &[1]), [FULL]);
    // It is unheld and can be evicted by either tenant.
    assert_eq!(keys(&offered(&mut book, requester_of(2, 9), &[2])).len(), 1);
    assert_eq!(book.tier_of(&hash(1)), None);
}

#[test]
fn recovered_blocks_belong_to_their_tenant() {
    let mut book = blocks(2, 4);
    let found = Meta {
        hash: hash(1),
        parent: None,
        tenant: TenantId(1),
        traits: BlockTraits::default(),
        charge: CHARGE,
    };
    book.restore(found, Timestamp(0)).unwrap();
    assert!(book.fetch(requester_of(2, 9), &hashes(&[1]), Timestamp(1)).unwrap().is_empty());
    assert_eq!(book.fetch(requester_of(1, 5), &hashes(&[1]), Timestamp(1)).unwrap().len(), 1);
}
