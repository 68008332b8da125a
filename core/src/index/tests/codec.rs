//! Log records: encoding and decoding are exact inverses, and all other bytes are refused.

use proptest::prelude::*;

use super::random::any_command;
use super::*;
use crate::id::HASH_BYTES;

fn decode_error(bytes: &[u8]) -> CodecError {
    Command::decode(bytes).unwrap_err()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

proptest! {
    #[test]
    fn records_round_trip(command in any_command()) {
        prop_assert_eq!(Command::decode(&command.encode()), Ok(command));
    }

    #[test]
    fn truncated_records_are_refused(command in any_command()) {
        let record = command.encode();
        for end in 0..record.len() {
            prop_assert!(Command::decode(&record[..end]).is_err(), "{end} of {}", record.len());
        }
    }

    #[test]
    fn trailing_bytes_are_refused(
        command in any_command(), more in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let record = [command.encode(), more].concat();
        prop_assert!(Command::decode(&record).is_err());
    }

    /// Every valid record is the one encoding of its command: two replicas cannot read the same
    /// bytes differently, and no two records mean the same.
    #[test]
    fn mutated_records_are_refused_or_canonical(
        command in any_command(), changes in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
    ) {
        let mut record = command.encode();
        for (place, flip) in changes {
            let place = place.index(record.len());
            record[place] ^= flip;
        }
        if let Ok(other) = Command::decode(&record) {
            prop_assert_eq!(other.encode(), record);
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_canonical(
        mut bytes in prop::collection::vec(any::<u8>(), 2..200),
        tag in 0u8..10,
    ) {
        (bytes[0], bytes[1]) = (5, tag);
        if let Ok(command) = Command::decode(&bytes) {
            prop_assert_eq!(command.encode(), bytes);
        }
    }
}

#[test]
fn the_format_is_pinned() {
    // If this changes, routers can no longer read their logs: raise the format number.
    let a = block(1);
    let command = Command::Announce(vec![
        announcement(
            300,
            2,
            1,
            vec![
                Change::Cleared,
                Change::Stored { parent: None, blocks: vec![a], tier: Tier::Dram },
                Change::Stored { parent: Some(a), blocks: vec![block(2)], tier: Tier::Ssd },
                Change::Stored { parent: Some(a), blocks: vec![], tier: Tier::Gpu },
            ],
        ),
        announcement(1, 1, 1, vec![moved([3], Tier::Dram, Tier::Ssd), dropped([4], Tier::Gpu)]),
    ]);
    let heads = "0504".to_owned()
        + "02"
        + "ac020201"
        + "04"
        + "00"
        + "0501"
        + "8101"
        + "4900"
        + "01010102"
        + "0601"
        + "0b01";
    let hashes = hex(&[a.0, block(2).0, a.0, block(3).0, block(4).0].concat());
    assert_eq!(hex(&command.encode()), heads + &hashes);
    let unpin = |ends_ms| Command::Unpin { pin: PinId(9), owner: "ops".to_owned(), ends_ms };
    let small = [
        (fence(5, 128), "0502058001"),
        (leave(0, 1), "05030001"),
        (Command::SetQuota { tenant: TenantId(1), bytes: Some(0) }, "0507010100"),
        (Command::SetTtl { group: TtlGroupId(1), ttl_ms: None }, "05080100"),
        (Command::SetGeneration(Generation(300)), "050aac02"),
        (unpin(None), "050609036f707300"),
        (unpin(Some(300)), "050609036f707301ac02"),
        (Command::Pin(pin(9, "", [])), "05050900000000"),
        (
            Command::Pin(Pin { kind: PinKind::Soft, ends_ms: Some(300), ..pin(9, "", []) }),
            "050509000101ac0200",
        ),
    ];
    for (command, expected) in small {
        assert_eq!(hex(&command.encode()), expected);
    }
}

#[test]
fn a_run_costs_little_more_than_its_hashes() {
    let runs = 64u64;
    let run = |number: u64| Change::Stored {
        parent: (number > 0).then(|| block(number * 16 - 1)),
        blocks: blocks(number * 16..(number + 1) * 16),
        tier: Tier::Dram,
    };
    let record = Command::Announce(vec![announcement(1, 1, 1, (0..runs).map(run).collect())]).encode();
    assert!(record.len() as u64 <= runs * (16 * HASH_BYTES as u64 + 2) + 16, "{} bytes", record.len());
}

#[test]
fn errors_name_position_and_reason() {
    let text = |bytes: &[u8]| decode_error(bytes).to_string();
    assert_eq!(text(&[]), "ends at byte 0, but 1 more bytes must follow");
    assert_eq!(text(&[1, 1]), "format 1 is unknown, this release reads 5: use the release that wrote it");
    assert_eq!(text(&[5, 99]), "command tag at byte 1 is 99, which is not valid");
    assert_eq!(text(&[5, 2, 5]), "ends at byte 3, but 1 more bytes must follow");
    assert_eq!(text(&[5, 2, 5, 1, 0, 0]), "ends at byte 4, but 2 more bytes follow");
    assert_eq!(text(&[5, 8, 1, 7]), "time to live at byte 3 is 7, which is not valid");
    assert_eq!(text(&[5, 6, 1, 2, b'a', 0xff]), "owner at byte 5 is 255, which is not valid");
    let long = vec![1; COMMAND_BYTES_MAX + 1];
    assert_eq!(decode_error(&long), CodecError::TooLong { got: 16_777_217, limit: 16_777_216 });
}

#[test]
fn varints_have_one_encoding() {
    // 5 as two bytes, a number above 64 bits, and an unterminated number.
    let longer = |number: &[u8]| [&[5, 2, 1], number].concat();
    assert_eq!(decode_error(&longer(&[0x85, 0])), CodecError::Invalid { what: "epoch", at: 3, got: 5 });
    let above = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
    assert!(matches!(decode_error(&longer(&above)), CodecError::Invalid { what: "epoch", at: 3, .. }));
    assert!(matches!(decode_error(&longer(&[0xff; 11])), CodecError::Invalid { what: "epoch", at: 3, .. }));
    let most = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    assert_eq!(Command::decode(&longer(&most)), Ok(fence(1, u64::MAX)));
    // A node number above 32 bits.
    let node = [5, 2, 0xff, 0xff, 0xff, 0xff, 0x1f, 1];
    assert_eq!(decode_error(&node), CodecError::Invalid { what: "node", at: 2, got: (1 << 33) - 1 });
}

#[test]
fn counts_do_not_reserve_memory() {
    // Each count claims far more than is present; reserving memory for it would abort the process.
    let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let claims: [(&str, Vec<u8>); 5] = [
        ("announcements", vec![5, 4]),
        ("changes", vec![5, 4, 1, 1, 1, 1]),
        ("blocks", vec![5, 4, 1, 1, 1, 1, 1, 1]),
        ("pinned blocks", vec![5, 5, 1, 0, 0, 0]),
        ("text", vec![5, 6, 1]),
    ];
    for (what, start) in claims {
        let error = decode_error(&[start, huge.to_vec()].concat());
        assert!(matches!(error, CodecError::Truncated { .. }), "{what}: {error:?}");
    }
}

#[test]
fn headers_of_one_record_are_bounded() {
    // A change takes one byte here and sixty in memory.
    let mut record = vec![5, 4, 1, 1, 1, 1, 0x81, 0x80, 0x40];
    record.resize(record.len() + (1 << 20) + 1, 0);
    assert!(matches!(decode_error(&record), CodecError::Invalid { what: "changes", .. }));
}

#[test]
fn changes_have_one_encoding() {
    let change = |head: u8, rest: &[u8]| {
        let record = [&[5, 4, 1, 1, 1, 1, 1, head], rest].concat();
        Command::decode(&record).map(|_| ())
    };
    let invalid = |what, got| Err(CodecError::Invalid { what, at: 7, got });
    assert_eq!(change(0, &[]), Ok(()));
    assert_eq!(change(1, &[0]), Ok(()));
    assert_eq!(change(1 | 3 << 2, &[0]), invalid("tier", 3), "there is no fourth tier");
    assert_eq!(change(2 | 3 << 4, &[0]), invalid("tier", 3));
    assert_eq!(change(1 | 1 << 4, &[0]), invalid("change", 17), "stored has no target tier");
    assert_eq!(change(3 | 1 << 6, &[0]), invalid("change", 67), "dropped has no parent");
    assert_eq!(change(3 | 3 << 4, &[0]), Ok(()), "dropped has a cause");
    assert_eq!(change(1 << 2, &[0]), invalid("change", 4), "cleared has no tier");
    assert_eq!(change(1 | 1 << 7, &[0]), invalid("parent", 128), "no hash precedes it");
    assert_eq!(change(1 | 3 << 6, &[0]), invalid("parent", 192), "two parents");
    // An explicit parent that equals the previous hash: only the short form is valid.
    let a = block(1).0;
    let twice = [&[5, 4, 1, 1, 1, 1, 2, 1, 1, 1 | 1 << 6, 0][..], &a, &a].concat();
    assert_eq!(decode_error(&twice), CodecError::Invalid { what: "parent", at: 9, got: 64 });
}
