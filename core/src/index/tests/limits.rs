//! Every limit: the last value that fits, the first that does not, and that a refusal leaves the
//! state unchanged.

use super::*;

fn refused(what: &str, got: u64, limit: u64) -> Applied {
    Applied::Refused(Refusal::OverLimit { what: what.to_owned(), got, limit })
}

/// An index with node 1 and these limits.
fn index_with_limits(limits: IndexLimits) -> Index {
    let mut index = Index::new(limits);
    assert_eq!(index.apply(&Command::Join(record(1))), Applied::Joined(Epoch(1)));
    index
}

/// The first command fits; the second is refused and leaves the state unchanged.
fn check_limit_boundary(index: &mut Index, fits: &Command, not: &Command, answer: &Applied) {
    assert!(!matches!(index.apply(fits), Applied::Refused(_) | Applied::Ignored), "{fits:?}");
    let before = (index.snapshot(), index.digest());
    assert_eq!(index.apply(not), *answer);
    assert_eq!((index.snapshot(), index.digest()), before);
}

fn announce(seq: u64, changes: Vec<Change>) -> Command {
    Command::Announce(vec![announcement(1, 1, seq, changes)])
}

#[test]
fn blocks_of_one_announce() {
    let mut index = index_with_limits(IndexLimits { announce_blocks_max: 4, ..IndexLimits::default() });
    let fits =
        announce(1, vec![stored([1, 2], Tier::Dram), dropped([1], Tier::Dram), dropped([2], Tier::Dram)]);
    let not = announce(2, vec![stored([1, 2, 3], Tier::Dram), moved([4, 5], Tier::Dram, Tier::Ssd)]);
    check_limit_boundary(&mut index, &fits, &not, &refused("blocks in one announce", 5, 4));
    assert_eq!(index.next_seq(NodeId(1)), Some((Epoch(1), Seq(2))), "the sequence number is not used up");
}

#[test]
fn changes_of_one_announce() {
    let mut index = index_with_limits(IndexLimits { announce_changes_max: 3, ..IndexLimits::default() });
    let fits = announce(1, vec![Change::Cleared, Change::Cleared]);
    let not = announce(2, vec![Change::Cleared, Change::Cleared, Change::Cleared]);
    check_limit_boundary(&mut index, &fits, &not, &refused("changes in one announce", 4, 3));
    let empty = Command::Announce((2..6).map(|seq| announcement(1, 1, seq, vec![])).collect());
    assert_eq!(index.apply(&empty), refused("changes in one announce", 4, 3));
}

#[test]
fn full_index_keeps_working() {
    let mut index = Fixture(index_with_limits(IndexLimits { copies_max: 3, ..IndexLimits::default() }));
    let unlisted = |index: &mut Fixture, seq, changes| match index.announce(1, 1, seq, changes) {
        AnnounceOutcome::Applied { next, unlisted } => {
            assert_eq!(next, Seq(seq + 1));
            unlisted
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(unlisted(&mut index, 1, vec![stored(1..6, Tier::Dram)]), 2);
    assert_eq!(index.0.stats().copies, 3);
    assert_eq!(index.prefix_blocks(1..6), 3, "the start of a prefix is listed first");
    // Listed blocks may change tiers; unlisted ones stay out, whatever is announced of them.
    let told = vec![moved([1, 4], Tier::Dram, Tier::Ssd), stored([2], Tier::Ssd), dropped([5], Tier::Dram)];
    assert_eq!(unlisted(&mut index, 2, told), 1);
    assert_eq!(index.0.stats().copies, 3);
    // Space freed by one change serves the next change of the same announcement.
    assert_eq!(unlisted(&mut index, 3, vec![dropped([3], Tier::Dram), stored([4, 5], Tier::Dram)]), 1);
    assert_eq!(index.0.stats().copies, 3);
}

#[test]
fn nodes_known() {
    let mut index = index_with_limits(IndexLimits { nodes_max: 2, ..IndexLimits::default() });
    check_limit_boundary(
        &mut index,
        &Command::Join(record(2)),
        &Command::Join(record(3)),
        &refused("nodes", 3, 2),
    );
    assert_eq!(index.apply(&Command::Join(record(1))), Applied::Joined(Epoch(2)), "known nodes may return");
    index.apply(&fence(2, 1));
    assert_eq!(index.apply(&Command::Join(record(3))), refused("nodes", 3, 2), "fenced nodes are known");
    index.apply(&leave(2, 1));
    assert_eq!(index.apply(&Command::Join(record(3))), Applied::Joined(Epoch(1)));
}

#[test]
fn pins() {
    let limits =
        IndexLimits { pin_blocks_max: 3, pinned_blocks_max: 4, pins_max: 3, ..IndexLimits::default() };
    let mut index = index_with_limits(limits);
    let pin = |number, blocks| Command::Pin(pin(number, "ops", blocks));
    check_limit_boundary(&mut index, &pin(1, 0..3), &pin(2, 0..4), &refused("blocks of one pin", 4, 3));
    check_limit_boundary(&mut index, &pin(2, 0..1), &pin(3, 0..1), &refused("blocks of all pins", 5, 4));
    check_limit_boundary(&mut index, &pin(3, 0..0), &pin(4, 0..0), &refused("pins", 4, 3));
    index.apply(&Command::Unpin { pin: PinId(1), owner: "ops".to_owned(), ends_ms: None });
    assert_eq!(index.apply(&pin(4, 0..3)), Applied::Done, "ended pins free their blocks");
}

#[test]
fn quotas_and_times_to_live() {
    let mut index = index_with_limits(IndexLimits { quotas_max: 1, ttls_max: 1, ..IndexLimits::default() });
    let quota = |tenant| Command::SetQuota { tenant: TenantId(tenant), bytes: Some(7) };
    check_limit_boundary(&mut index, &quota(1), &quota(2), &refused("tenants with a quota", 2, 1));
    let ttl = |group| Command::SetTtl { group: TtlGroupId(group), ttl_ms: Some(7) };
    check_limit_boundary(&mut index, &ttl(1), &ttl(2), &refused("groups with a time to live", 2, 1));
    let other = Command::SetTtl { group: TtlGroupId(1), ttl_ms: Some(8) };
    assert_eq!(index.apply(&other), Applied::Done, "a value may be replaced at the limit");
}

#[test]
fn texts() {
    let mut index = index_with_limits(IndexLimits { text_bytes_max: 14, ..IndexLimits::default() });
    let join = |change: &dyn Fn(&mut NodeRecord)| {
        let mut record = record(2);
        change(&mut record);
        Command::Join(record)
    };
    let long = || "x".repeat(15);
    let cases = [
        (join(&|record| record.data_address = long()), "data address length in bytes"),
        (join(&|record| record.control_address = long()), "control address length in bytes"),
        (join(&|record| record.host = long()), "host name length in bytes"),
        (Command::Pin(pin(1, &long(), [])), "owner length in bytes"),
        (Command::Unpin { pin: PinId(1), owner: long(), ends_ms: None }, "owner length in bytes"),
    ];
    for (command, what) in cases {
        assert_eq!(index.apply(&command), refused(what, 15, 14));
        assert!(index.limits().check(&command).is_err(), "a router refuses it before it proposes");
    }
    assert_eq!(index.apply(&join(&|record| record.host = "x".repeat(14))), Applied::Joined(Epoch(1)));
}

#[test]
fn a_full_command_within_the_default_limits_is_a_valid_record() {
    let limits = IndexLimits::default();
    let per_change = 4;
    let changes = limits.announce_blocks_max / per_change;
    let change = |number: u32| Change::Stored {
        parent: Some(block(u64::from(number) + 1_000_000)),
        blocks: blocks((0..u64::from(per_change)).map(|one| u64::from(number * per_change) + one)),
        tier: Tier::Dram,
    };
    let full = announce(1, (0..changes).map(change).collect());
    assert_eq!(limits.check(&full), Ok(()));
    let record = full.encode();
    assert!(record.len() < COMMAND_BYTES_MAX, "{} bytes", record.len());
    assert!(Command::decode(&record) == Ok(full));
    let widest = Command::Pin(pin(1, "ops", 0..u64::from(limits.pin_blocks_max)));
    assert_eq!(limits.check(&widest), Ok(()));
    assert!(Command::decode(&widest.encode()) == Ok(widest));
}
