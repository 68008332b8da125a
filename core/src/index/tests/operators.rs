//! Pins, quotas, times to live.

use super::*;

fn quota(tenant: u32, bytes: Option<u64>) -> Command {
    Command::SetQuota { tenant: TenantId(tenant), bytes }
}

fn ttl(group: u32, ttl_ms: Option<u64>) -> Command {
    Command::SetTtl { group: TtlGroupId(group), ttl_ms }
}

fn unpin(number: u64, owner: &str) -> Command {
    Command::Unpin { pin: PinId(number), owner: owner.to_owned(), ends_ms: None }
}

#[test]
fn a_pin_lasts_until_its_owner_ends_it() {
    let mut index = Fixture::with_nodes(1);
    assert_eq!(index.0.apply(&Command::Pin(pin(1, "ops", [1, 2]))), Applied::Done);
    let refusal = Refusal::NotOwner { pin: PinId(1), owner: "ops".to_owned() };
    assert_eq!(index.0.apply(&unpin(1, "eve")), Applied::Refused(refusal));
    assert_eq!(index.0.pins().collect::<Vec<_>>(), [&pin(1, "ops", [1, 2])]);
    assert_eq!(index.0.stats().pinned_blocks, 2);
    assert_eq!(index.0.apply(&unpin(1, "ops")), Applied::Done);
    assert_eq!(index.0.apply(&unpin(1, "ops")), Applied::Ignored);
    assert_eq!((index.0.stats().pins, index.0.stats().pinned_blocks), (0, 0));
}

#[test]
fn repeated_pin_is_ignored_and_conflicting_pin_refused() {
    let mut index = Fixture::with_nodes(0);
    let first = pin(1, "ops", [1, 2]);
    index.0.apply(&Command::Pin(first.clone()));
    assert_eq!(index.0.apply(&Command::Pin(first)), Applied::Ignored);
    for other in [pin(1, "eve", [1, 2]), pin(1, "ops", [2, 1]), pin(1, "ops", [1])] {
        let refused = Applied::Refused(Refusal::PinExists(PinId(1)));
        assert_eq!(index.0.apply(&Command::Pin(other)), refused);
    }
    assert_eq!(index.0.stats().pinned_blocks, 2);
}

#[test]
fn owner_changes_kind_and_end() {
    let mut index = Fixture::with_nodes(0);
    let first = pin(1, "ops", [1, 2]);
    index.0.apply(&Command::Pin(first.clone()));
    for (kind, ends_ms) in [(PinKind::Soft, None), (PinKind::Soft, Some(7)), (PinKind::Hard, Some(5))] {
        let next = Pin { kind, ends_ms, ..first.clone() };
        assert_eq!(index.0.apply(&Command::Pin(next.clone())), Applied::Done);
        assert_eq!(index.0.apply(&Command::Pin(next.clone())), Applied::Ignored);
        assert_eq!(index.0.pins().collect::<Vec<_>>(), [&next]);
        let eve = Pin { owner: "eve".to_owned(), ..first.clone() };
        assert_eq!(index.0.apply(&Command::Pin(eve)), Applied::Refused(Refusal::PinExists(PinId(1))));
    }
    assert_eq!((index.0.stats().pins, index.0.stats().pinned_blocks), (1, 2));
}

#[test]
fn renewed_pin_is_not_ended_as_expired() {
    let mut index = Fixture::with_nodes(0);
    let until = |ends_ms| Pin { ends_ms: Some(ends_ms), ..pin(1, "ops", [1]) };
    let over = Command::Unpin { pin: PinId(1), owner: "ops".to_owned(), ends_ms: Some(5) };
    assert!(until(5).is_expired(5) && !until(5).is_expired(4) && !pin(1, "ops", [1]).is_expired(u64::MAX));
    index.0.apply(&Command::Pin(until(5)));
    index.0.apply(&Command::Pin(until(9)));
    assert_eq!(index.0.apply(&over), Applied::Ignored);
    assert_eq!(index.0.stats().pins, 1);
    index.0.apply(&Command::Pin(until(5)));
    assert_eq!(index.0.apply(&over), Applied::Done);
    index.0.apply(&Command::Pin(until(9)));
    assert_eq!(index.0.apply(&unpin(1, "ops")), Applied::Done, "the owner may omit the end");
}

#[test]
fn pins_outlive_nodes() {
    let mut index = Fixture::with_nodes(1);
    index.0.apply(&Command::Pin(pin(1, "ops", [1])));
    index.0.apply(&leave(1, 1));
    assert_eq!(index.0.stats().pins, 1);
}

#[test]
fn quotas_and_ttls_are_set_replaced_and_removed() {
    let mut index = Fixture::with_nodes(0);
    assert_eq!(index.0.apply(&quota(2, Some(10))), Applied::Done);
    assert_eq!(index.0.apply(&quota(1, Some(0))), Applied::Done);
    assert_eq!(index.0.apply(&quota(2, Some(20))), Applied::Done);
    assert_eq!(index.0.apply(&quota(2, Some(20))), Applied::Ignored);
    assert_eq!(index.0.quotas().collect::<Vec<_>>(), [(TenantId(1), 0), (TenantId(2), 20)]);
    assert_eq!(index.0.apply(&quota(1, None)), Applied::Done);
    assert_eq!(index.0.apply(&quota(1, None)), Applied::Ignored);
    assert_eq!(index.0.apply(&ttl(4, Some(5_000))), Applied::Done);
    assert_eq!(index.0.ttls().collect::<Vec<_>>(), [(TtlGroupId(4), 5_000)]);
    assert_eq!(index.0.apply(&ttl(4, None)), Applied::Done);
    assert_eq!((index.0.stats().quotas, index.0.stats().ttls), (1, 0));
}

#[test]
fn refusals_name_the_remedy() {
    let text = Refusal::NotOwner { pin: PinId(3), owner: "ops".to_owned() }.to_string();
    assert_eq!(text, "pin-3 belongs to \"ops\": only its owner may end it");
    let text = Refusal::PinExists(PinId(3)).to_string();
    assert_eq!(text, "pin-3 exists with other blocks or another owner: choose another number");
    let text = Refusal::OverLimit { what: "nodes".to_owned(), got: 5, limit: 4 }.to_string();
    assert_eq!(text, "nodes is 5, the limit is 4: send less");
}
