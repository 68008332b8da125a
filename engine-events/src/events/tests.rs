//! Payloads in every format that engines send, including truncated and hostile ones. The valid ones
//! come from the encoder that vLLM and SGLang use (msgspec), with the fields of their releases.
#![allow(clippy::unwrap_used)]

use super::*;

const VLLM_MAPS: &str = "93cb41da4909ca200000948ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657\
    392cffedcba987654321011b1706172656e74\
    5f626c6f636b5f68617368c0a9746f6b656e5f696473dc00406465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e\
    7fcc80cc81cc82cc\
    83cc84cc85cc86cc87cc88cc89cc8acc8bcc8ccc8dcc8ecc8fcc90cc91cc92cc93cc94cc95cc96cc97cc98cc99cc9acc9bcc9ccc\
    9dcc9ecc9fcca0cc\
    a1cca2cca3aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa657874\
    72615f6b65797392\
    91a774656e616e7441c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74\
    696f6e8aa4747970\
    65ab426c6f636b53746f726564ac626c6f636b5f6861736865739112b1706172656e745f626c6f636b5f6861736811a9746f6b65\
    6e5f696473dc0020\
    ce00011170ce00011171ce00011172ce00011173ce00011174ce00011175ce00011176ce00011177ce00011178ce00011179ce00\
    01117ace0001117b\
    ce0001117cce0001117dce0001117ece0001117fce00011180ce00011181ce00011182ce00011183ce00011184ce00011185ce00\
    011186ce00011187\
    ce00011188ce00011189ce0001118ace0001118bce0001118cce0001118dce0001118ece0001118faa626c6f636b5f73697a6520\
    a76c6f72615f6964\
    c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e\
    64ae66756c6c5f61\
    7474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739111a66d656469756da34750\
    55a967726f75705f\
    6964780081a474797065b0416c6c426c6f636b73436c656172656403";
const BATCH_MAP: &str = "83a27473cb41da4909ca200000a66576656e74739184a474797065ac426c6f636b52656d6f766564ac6\
    26c6f636b5f6861736865739111a66d656469\
    756da3475055a967726f75705f69647800b2646174615f706172616c6c656c5f72616e6b01";
const VLLM_BYTES: &str = "93cb41da4909ca200000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865\
    7391c420010101010101010101010101010101\
    0101010101010101010101010101010101b1706172656e745f626c6f636b5f68617368c420020202020202020202020202020202\
    0202020202020202\
    020202020202020202a9746f6b656e5f696473dc0010000102030405060708090a0b0c0d0e0faa626c6f636b5f73697a6510a76c\
    6f72615f696407a6\
    6d656469756da3475055a96c6f72615f6e616d65a9616461707465722d78aa65787472615f6b6579739191a9616461707465722d\
    78b26b765f636163\
    68655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f7769\
    6e646f77cd1000c0";
const VLLM_ARRAYS: &str = "93cb41da4909ca2000009398ab426c6f636b53746f72656492050604dc00200001020304050607080\
    90a0b0c0d0e0f101112131415161718191a1b1c\
    1d1e1f10c0a3475055c093ac426c6f636b52656d6f7665649105c091b0416c6c426c6f636b73436c6561726564c0";
const SGLANG_ARRAYS: &str = "93cb41da4909ca200000929aab426c6f636b53746f72656492fe09c0940001020302c0aa4350555\
    f50494e4e4544a774656e616e7442c0a961646170\
    7465722d799aab426c6f636b53746f72656491fdfe9292010292030402c0a3475055c0c0c001";
const SGLANG_MAPS: &str = "93cb41da4909ca2000009989a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686\
    57392d3edcba9876543211009b1706172656e74\
    5f626c6f636b5f68617368c0a9746f6b656e5f6964739800010203ccc8cd012cce0001117007aa626c6f636b5f73697a6504a76c\
    6f72615f6964c0a6\
    6d656469756da3475055aa63616368655f73616c74a774656e616e7442aa73657373696f6e5f6964a973657373696f6e2d3189a4\
    74797065ab426c6f\
    636b53746f726564ac626c6f636b5f68617368657391feb1706172656e745f626c6f636b5f6861736809a9746f6b656e5f696473\
    9408090a0baa626c\
    6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74a774656e616e7442aa736573\
    73696f6e5f6964a9\
    73657373696f6e2d3188a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739115b1706172656e745f626c\
    6f636b5f68617368\
    c0a9746f6b656e5f6964739400010203aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72\
    615f6e616d65a961\
    6461707465722d7987a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391fdb1706172656e745f626c6f\
    636b5f68617368fe\
    a9746f6b656e5f69647392920102920304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da347505587a474\
    797065ab426c6f63\
    6b53746f726564ac626c6f636b5f68617368657391d3edcba98765432110b1706172656e745f626c6f636b5f68617368c0a9746f\
    6b656e5f69647394\
    00010203aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756daa4350555f50494e4e454487a474797065ab426c\
    6f636b53746f7265\
    64ac626c6f636b5f68617368657391d3edcba98765432110b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964\
    739400010203aa62\
    6c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da44449534b83a474797065ac426c6f636b52656d6f766564ac62\
    6c6f636b5f686173\
    6865739209d3edcba98765432110a66d656469756da347505583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68\
    617368657391d3ed\
    cba98765432110a66d656469756da845585445524e414c81a474797065b0416c6c426c6f636b73436c656172656401";

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks().0.iter().map(|[high, low]| high << 4 | low).collect()
}

fn stored(event: &EngineEvent) -> &StoredBlocks {
    match event {
        EngineEvent::Stored(stored) => stored,
        other => panic!("{other:?} is not a stored event"),
    }
}

fn number(number: u64) -> EngineHash {
    EngineHash::from_u64(number)
}

/// Captured from vLLM: two prompts with a salt, one continuing the other, two prompts without,
/// removals, a reset.
#[test]
fn decodes_captured_vllm_payloads() {
    let recorded =
        include_str!("../../testdata/vllm-0.32.0.txt").lines().filter(|line| !line.starts_with('#'));
    let batches: Vec<_> = recorded.map(|line| decode(&bytes(line), Dialect::Vllm).unwrap()).collect();
    assert!(
        batches.iter().all(|batch| (batch.rank, batch.unknown_events) == (Some(0), 0) && batch.at_s > 1.7e9)
    );
    let events: Vec<_> = batches.iter().map(|batch| &batch.events[..]).collect();
    let [[first], [second], [plain], [evicted @ .., last], [EngineEvent::Cleared, after]] = &events[..]
    else {
        panic!("{events:?}")
    };
    let (first, second) = (stored(first), stored(second));
    assert_eq!(
        (first.hashes.len(), first.parent, first.block_tokens, first.medium),
        (2, None, 32, Medium::Gpu)
    );
    assert_eq!(first.tokens, Tokens::Ids((100..164).collect()));
    assert_eq!(first.extra, ExtraKeys { salt: Some("tenant-a".to_owned()), first_opaque_block: None });
    assert_eq!((second.parent, second.hashes.len()), (first.hashes.last().copied(), 1));
    assert_eq!((&second.tokens, &second.extra), (&Tokens::Ids((164..196).collect()), &ExtraKeys::default()));
    let plain = stored(plain);
    assert_eq!((plain.hashes.len(), &plain.extra, plain.is_full_attention), (4, &ExtraKeys::default(), true));
    let removed = |event: &EngineEvent| match event {
        EngineEvent::Removed(removed) => removed.hashes.clone(),
        other => panic!("{other:?}"),
    };
    let gone: Vec<_> = evicted.iter().flat_map(removed).collect();
    assert!(
        gone.starts_with(&[second.hashes[0], first.hashes[1], first.hashes[0]]),
        "the last block of a prefix goes first"
    );
    assert_eq!(stored(last).tokens, Tokens::Ids((500..692).collect()));
    assert_eq!(stored(after).hashes, plain.hashes[..1], "the same prefix has the same hash");
}

#[test]
fn decodes_vllm_maps() {
    let batch = decode(&bytes(VLLM_MAPS), Dialect::Vllm).unwrap();
    assert_eq!((batch.at_s, batch.rank, batch.unknown_events), (1_763_977_000.5, Some(3), 0));
    let [salted, chained, removed, cleared] = &batch.events[..] else { panic!("{batch:?}") };
    let salted = stored(salted);
    assert_eq!(salted.hashes, [number(0xfedc_ba98_7654_3210), number(17)]);
    assert_eq!((salted.parent, salted.block_tokens, salted.medium), (None, 32, Medium::Gpu));
    assert_eq!(salted.tokens, Tokens::Ids((100..164).collect()));
    assert_eq!(salted.extra, ExtraKeys { salt: Some("tenantA".to_owned()), first_opaque_block: None });
    assert_eq!((salted.group, salted.is_full_attention), (Some(0), true));
    let chained = stored(chained);
    assert_eq!((chained.parent, &chained.hashes[..]), (Some(number(17)), &[number(18)][..]));
    assert_eq!(chained.tokens, Tokens::Ids((70_000..70_032).collect()));
    assert_eq!(chained.extra, ExtraKeys::default());
    let gone = RemovedBlocks { hashes: vec![number(17)], medium: Medium::Gpu, group: Some(0) };
    assert_eq!((removed, cleared), (&EngineEvent::Removed(gone), &EngineEvent::Cleared));
}

#[test]
fn decodes_a_batch_map() {
    let batch = decode(&bytes(BATCH_MAP), Dialect::Vllm).unwrap();
    assert_eq!((batch.rank, batch.events.len()), (Some(1), 1));
}

#[test]
fn decodes_byte_hashes_adapter_and_window_group() {
    let batch = decode(&bytes(VLLM_BYTES), Dialect::Vllm).unwrap();
    let stored = stored(&batch.events[0]);
    assert_eq!(stored.hashes, [EngineHash::from_bytes(&[1; 32])]);
    assert_eq!(stored.parent, Some(EngineHash::from_bytes(&[2; 32])));
    assert_eq!(stored.adapter.as_deref(), Some("adapter-x"), "a name takes precedence over a number");
    assert_eq!(
        stored.extra,
        ExtraKeys::default(),
        "the adapter's name among the extra keys adds no information"
    );
    assert!(!stored.is_full_attention);
}

#[test]
fn lookahead_tokens_make_blocks_opaque() {
    let plain = bytes(VLLM_BYTES);
    // The payload holds one event. The added field is its last, before the rank at the end of the
    // batch.
    let (at, end) = (11, plain.len() - 1);
    let with = |value: &[u8]| {
        let field = [&[0xb3], &b"lookahead_token_ids"[..], value].concat();
        [&plain[..at], &[plain[at] + 1], &plain[at + 1..end], &field, &plain[end..]].concat()
    };
    let covered = |payload: &[u8]| {
        let batch = decode(payload, Dialect::Vllm).unwrap();
        stored(&batch.events[0]).extra.first_opaque_block
    };
    assert_eq!([covered(&plain), covered(&with(&[0xc0]))], [None, None]);
    assert_eq!(covered(&with(&[0x91, 7])), Some(0), "opaque from the first block on");
    assert_eq!(covered(&with(&[0x81, 1, 2])), Some(0), "whatever type a later release sends");
}

#[test]
fn decodes_arrays_of_older_releases() {
    let batch = decode(&bytes(VLLM_ARRAYS), Dialect::Vllm).unwrap();
    let [first, removed, cleared] = &batch.events[..] else { panic!("{batch:?}") };
    let first = stored(first);
    assert_eq!((first.parent, &first.hashes[..]), (Some(number(4)), &[number(5), number(6)][..]));
    assert!(first.is_full_attention && first.group.is_none());
    assert!(matches!(removed, EngineEvent::Removed(removed) if removed.hashes == [number(5)]));
    assert_eq!(cleared, &EngineEvent::Cleared);
}

#[test]
fn decodes_sglang_arrays() {
    let batch = decode(&bytes(SGLANG_ARRAYS), Dialect::Sglang).unwrap();
    let [salted, pairs] = &batch.events[..] else { panic!("{batch:?}") };
    let salted = stored(salted);
    assert_eq!(salted.hashes, [number((-2i64).cast_unsigned()), number(9)]);
    assert_eq!((salted.medium, salted.extra.salt.as_deref()), (Medium::Cpu, Some("tenantB")));
    assert_eq!(salted.adapter.as_deref(), Some("adapter-y"));
    let pairs = stored(pairs);
    assert_eq!((pairs.parent, &pairs.tokens), (Some(number((-2i64).cast_unsigned())), &Tokens::Other));
    assert_eq!(batch.rank, Some(1));
    // Decoded with the other dialect, an adapter is in the place of extra keys.
    let misread = decode(&bytes(SGLANG_ARRAYS), Dialect::Vllm);
    assert!(misread.is_err(), "{misread:?}");
}

/// The format of SGLang since 0.5.20: omitted fields are omitted by name, and hashes are signed.
#[test]
fn decodes_sglang_maps() {
    let batch = decode(&bytes(SGLANG_MAPS), Dialect::Sglang).unwrap();
    assert_eq!((batch.at_s, batch.rank, batch.unknown_events), (1_763_977_000.5, Some(1), 0));
    let [salted, child, adapted, pairs, on_host, on_disk, removed, removed_on_disk, cleared] =
        &batch.events[..]
    else {
        panic!("{batch:?}")
    };
    let signed = |number: i64| EngineHash::from_u64(number.cast_unsigned());
    let first = signed(-0x1234_5678_9abc_def0);
    let plain = StoredBlocks {
        hashes: vec![first],
        parent: None,
        tokens: Tokens::Ids(vec![0, 1, 2, 3]),
        block_tokens: 4,
        medium: Medium::Gpu,
        adapter: None,
        extra: ExtraKeys::default(),
        group: None,
        is_full_attention: true,
    };
    let of_tenant = ExtraKeys { salt: Some("tenantB".to_owned()), first_opaque_block: None };
    let two = StoredBlocks {
        hashes: vec![first, number(9)],
        tokens: Tokens::Ids(vec![0, 1, 2, 3, 200, 300, 70_000, 7]),
        extra: of_tenant.clone(),
        ..plain.clone()
    };
    assert_eq!(stored(salted), &two);
    let third = StoredBlocks {
        hashes: vec![signed(-2)],
        parent: Some(number(9)),
        tokens: Tokens::Ids(vec![8, 9, 10, 11]),
        extra: of_tenant,
        ..plain.clone()
    };
    assert_eq!(stored(child), &third, "the salt is in the event of every block of a prefix");
    let of_adapter =
        StoredBlocks { hashes: vec![number(21)], adapter: Some("adapter-y".to_owned()), ..plain.clone() };
    assert_eq!(stored(adapted), &of_adapter);
    assert_eq!((stored(pairs).parent, &stored(pairs).tokens), (Some(signed(-2)), &Tokens::Other));
    assert_eq!(stored(on_host), &StoredBlocks { medium: Medium::Cpu, ..plain.clone() });
    assert_eq!(stored(on_disk), &StoredBlocks { medium: Medium::Storage, ..plain });
    let gone = RemovedBlocks { hashes: vec![number(9), first], medium: Medium::Gpu, group: None };
    assert_eq!(removed, &EngineEvent::Removed(gone));
    let gone = RemovedBlocks { hashes: vec![first], medium: Medium::Storage, group: None };
    assert_eq!(removed_on_disk, &EngineEvent::Removed(gone));
    assert_eq!(cleared, &EngineEvent::Cleared);
    // Fields have names, so the dialect does not matter.
    assert_eq!(decode(&bytes(SGLANG_MAPS), Dialect::Vllm), Ok(batch));
}

#[test]
fn skips_unknown_fields_and_events() {
    // [0, [{"type": "BlockMoved", "x": [[1, {2: 3}]]}, {"block_hashes": [1], "later": {"a": [1]},
    // "block_size": 4, "type": "BlockStored"}]]
    let mut payload = vec![0x92, 0x00, 0x92];
    payload.extend(b"\x82\xa4type\xaaBlockMoved\xa1x\x91\x92\x01\x81\x02\x03");
    payload.extend(
        b"\x84\xacblock_hashes\x91\x01\xa5later\x81\xa1a\x91\x01\xaablock_size\x04\xa4type\xabBlockStored",
    );
    let batch = decode(&payload, Dialect::Vllm).unwrap();
    assert_eq!((batch.unknown_events, batch.events.len()), (1, 1));
    let stored = stored(&batch.events[0]);
    assert_eq!((&stored.hashes[..], &stored.tokens), (&[number(1)][..], &Tokens::Ids(Vec::new())));
}

#[test]
fn unknown_events_may_reuse_field_names() {
    let moved = b"\x92\x00\x91\x82\xacblock_hashes\xa2no\xa4type\xaaBlockMoved";
    assert_eq!(decode(moved, Dialect::Vllm).unwrap().unknown_events, 1);
    let stored = b"\x92\x00\x91\x82\xacblock_hashes\xa2no\xa4type\xabBlockStored";
    assert_eq!(
        decode(stored, Dialect::Vllm),
        Err(EventError::UnexpectedType { field: "block_hashes", got: "a text" })
    );
}

#[test]
fn truncated_events_are_errors() {
    let decode_event = |event: &[u8]| decode(&[b"\x92\x00\x92", event].concat(), Dialect::Vllm);
    let cut = Err(EventError::Truncated { field: "an event" });
    for event in
        [&b"\x93\xaaBlockMoved\x01"[..], b"\x92\xb0AllBlocksCleared", b"\x94\xacBlockRemoved\x92\x01"]
    {
        assert_eq!(decode_event(event), cut, "{event:x?}");
    }
    assert_eq!(decode_event(b"\x82\xacblock_hashes\xa2no\xa4type\xaaBlockMo"), cut);
    assert_eq!(decode_event(b"\x82\xa4type\xaaBlockMoved\xa1x\x93\x01"), cut);
    // After events of unknown kinds, known ones are decoded.
    let arrays =
        decode_event(b"\x94\xaaBlockMoved\x91\x01\xc0\xa1x\x93\xb0AllBlocksCleared\x01\x91\xc0").unwrap();
    assert_eq!((arrays.unknown_events, &arrays.events[..]), (1, &[EngineEvent::Cleared][..]));
    let maps = decode_event(
        b"\x82\xa9token_ids\x05\xa4type\xa1x\x82\xacblock_hashes\x91\x07\xa4type\xacBlockRemoved",
    );
    let removed = RemovedBlocks { hashes: vec![number(7)], medium: Medium::Gpu, group: None };
    assert_eq!(maps.unwrap().events, [EngineEvent::Removed(removed)]);
}

#[test]
fn decodes_every_number_format() {
    let ids = b"\xa9token_ids\xdc\x00\x0c\x00\x7f\xcc\x80\xcd\x01\x00\xce\x00\x01\x00\x00\xcf\x00\x00\x00\
        \x00\xff\xff\xff\xff\xcc\x05\xd0\x05\
        \xd1\x00\x05\xd2\x00\x00\x00\x05\xd3\x00\x00\x00\x00\x00\x00\x00\x05\xcd\xff\xff";
    let expected = vec![0, 127, 128, 256, 65_536, u32::MAX, 5, 5, 5, 5, 5, 65_535];
    assert_eq!(stored_with(1, ids, 1).tokens, Tokens::Ids(expected));
    for other in [
        &b"\xff"[..],
        b"\xc0",
        b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\xd0\xff",
        b"\xca\x00\x00\x00\x00",
        b"\xa1x",
    ] {
        let fields = [b"\xa9token_ids\x92\x01", other].concat();
        assert_eq!(stored_with(1, &fields, 1).tokens, Tokens::Other, "{other:x?}");
    }
    let hashes = b"\x92\x00\x91\x92\xacBlockRemoved\x95\xcf\x80\x00\x00\x00\x00\x00\x00\x01\x07\xcd\x01\x00\
        \xff\xc4\x01\x07";
    let batch = decode(hashes, Dialect::Vllm).unwrap();
    let [EngineEvent::Removed(removed)] = &batch.events[..] else { panic!("{batch:?}") };
    let bytes = EngineHash::from_bytes(&[7]);
    assert_eq!(removed.hashes, [number(1 << 63 | 1), number(7), number(256), number(u64::MAX), bytes]);
}

/// The extra of a stored block with these extra keys, in msgpack.
fn with_extra_keys(keys: &[u8]) -> ExtraKeys {
    let mut payload = vec![0x92, 0x00, 0x91];
    payload.extend(b"\x84\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaablock_size\x04\xaaextra_keys");
    payload.extend(keys);
    let batch = decode(&payload, Dialect::Vllm).unwrap();
    stored(&batch.events[0]).extra.clone()
}

#[test]
fn unknown_extra_keys_make_blocks_opaque() {
    assert_eq!(with_extra_keys(b"\x92\xc0\xc0"), ExtraKeys::default());
    // An image's hash with its position, after a salt.
    let image = with_extra_keys(b"\x92\x91\xa1s\x91\x92\xa2h1\x05");
    assert_eq!(image, ExtraKeys { salt: Some("s".to_owned()), first_opaque_block: Some(1) });
    let late = with_extra_keys(b"\x96\xc0\x90\xc0\xc0\x91\x07\x91\xa1s");
    assert_eq!(late, ExtraKeys { salt: None, first_opaque_block: Some(4) });
    // Two texts that cannot be told apart.
    let two = with_extra_keys(b"\x91\x92\xa1s\xa1t");
    assert_eq!(two.first_opaque_block, Some(0));
}

/// The decoded event with `blocks` blocks and additional fields.
fn stored_with(blocks: u8, fields: &[u8], fields_count: u8) -> StoredBlocks {
    let mut payload = vec![0x92, 0x00, 0x91, 0x83 + fields_count];
    payload.extend(b"\xa4type\xabBlockStored\xacblock_hashes");
    payload.push(0x90 | blocks);
    payload.extend(1..=blocks);
    payload.extend(b"\xaablock_size\x04");
    payload.extend(fields);
    let batch = decode(&payload, Dialect::Vllm).unwrap();
    stored(&batch.events[0]).clone()
}

#[test]
fn adapter_extra_keys_keep_blocks_plain() {
    // The adapter by its name alone, and as a tuple with tag and path. The salt is with the first
    // block of a prefix.
    let plain = b"\xa9lora_name\xa3sql\xaaextra_keys\x93\x92\xa3sql\xa4salt\x91\xa3sql\x91\xa3sql";
    let decoded = stored_with(3, plain, 2);
    assert_eq!(
        (decoded.adapter.as_deref(), decoded.extra),
        (Some("sql"), ExtraKeys { salt: Some("salt".into()), first_opaque_block: None })
    );
    let tuples =
        b"\xaaextra_keys\x92\x91\x93\xa4lora\xa3sql\xa2/a\x91\x93\xa4lora\xa3sql\xa2/a\xa9lora_name\xa3sql";
    assert_eq!(stored_with(2, tuples, 2).extra, ExtraKeys::default());
    // A salt equal to the adapter's name is still a salt.
    let alike = b"\xa9lora_name\xa3sql\xaaextra_keys\x91\x92\xa3sql\xa3sql";
    assert_eq!(
        stored_with(1, alike, 2).extra,
        ExtraKeys { salt: Some("sql".into()), first_opaque_block: None }
    );
    // The name of another adapter cannot be interpreted.
    let other = b"\xa9lora_name\xa3sql\xaaextra_keys\x92\xc0\x91\x93\xa4lora\xa3abc\xa2/a";
    assert_eq!(stored_with(2, other, 2).extra.first_opaque_block, Some(1));
    // A block with a parent states no salt.
    let behind = b"\xb1parent_block_hash\x07\xaaextra_keys\x91\x91\xa4salt";
    assert_eq!(stored_with(1, behind, 2).extra, ExtraKeys { salt: None, first_opaque_block: Some(0) });
}

#[test]
fn recognises_full_attention_and_tolerates_old_fields() {
    let kind = |name: &[u8]| {
        let fields = [b"\xb2kv_cache_spec_kind\xd9", &[name.len() as u8][..], name].concat();
        stored_with(1, &fields, 1).is_full_attention
    };
    assert!(kind(b"full_attention") && kind(b"mla_attention") && kind(b"sink_full_attention"));
    assert!(!kind(b"sliding_window") && !kind(b"mamba") && !kind(b"unknown"));
    let huge = b"\xa7lora_id\xcf\x7f\xff\xff\xff\xff\xff\xff\xff";
    assert_eq!(stored_with(1, huge, 1).adapter.as_deref(), Some("9223372036854775807"));
    assert_eq!(stored_with(1, b"\xa7lora_id\xa1x", 1).adapter, None);
}

#[test]
fn truncated_payloads_are_errors() {
    for whole in [VLLM_MAPS, VLLM_BYTES, VLLM_ARRAYS, SGLANG_ARRAYS, SGLANG_MAPS, BATCH_MAP].map(bytes) {
        for end in 0..whole.len() - 1 {
            let torn = decode(&whole[..end], Dialect::Vllm);
            // A truncated batch array still states its full length.
            assert!(torn.is_err(), "{end} of {} bytes: {torn:?}", whole.len());
        }
    }
}

#[test]
fn changed_bytes_never_panic() {
    for whole in [VLLM_MAPS, VLLM_BYTES, VLLM_ARRAYS, SGLANG_ARRAYS, SGLANG_MAPS].map(bytes) {
        for at in 0..whole.len() {
            for to in [0, 0x7f, 0x80, 0x9f, 0xc0, 0xc1, 0xc6, 0xc9, 0xd9, 0xdb, 0xdd, 0xdf, 0xff] {
                let mut changed = whole.clone();
                changed[at] = to;
                let _ = decode(&changed, Dialect::Sglang);
            }
        }
    }
}

#[test]
fn rejects_huge_lengths_and_deep_nesting() {
    // Four billion hashes announced in six bytes.
    let many = b"\x92\x00\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xdd\xff\xff\xff\xff\x01";
    assert_eq!(decode(many, Dialect::Vllm), Err(EventError::Truncated { field: "an event" }));
    assert_eq!(
        decode(b"\x92\x00\xdd\xff\xff\xff\xff", Dialect::Vllm),
        Err(EventError::TooMany { count: 0xffff_ffff })
    );
    // A million nested arrays.
    let deep = [&[0x92][..], &vec![0x91; 1 << 20][..]].concat();
    assert!(decode(&deep, Dialect::Vllm).is_err());
    let (text, empty) = (decode(b"\xa2no", Dialect::Vllm), decode(b"", Dialect::Vllm));
    assert_eq!(text, Err(EventError::UnexpectedType { field: "the batch", got: "a text" }));
    assert_eq!(empty, Err(EventError::Truncated { field: "the batch" }));
    assert_eq!(decode(b"\x91\x00", Dialect::Vllm), Err(EventError::Missing { field: "events" }));
}
