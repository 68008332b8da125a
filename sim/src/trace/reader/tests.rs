//! Tests of the readers: valid lines of both formats, and every kind of invalid line with its
//! message.

#![allow(clippy::unwrap_used)]

use super::super::Writer;
use super::*;
use kv_core::id::{Category, RequestKind};
use kvfleet_errors_doc::says;
use proptest::prelude::*;

const GOOD: &str = r#"{"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 4, 9]}"#;
const CHAT: &str = concat!(
    r#"{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132, "#,
    r#""type": "search", "turn": 2, "hash_ids": [7, 7, 8]}"#
);

fn strict(text: &str) -> Result<Vec<Request>, TraceError> {
    read(text.as_bytes(), Format::Detect, Strictness::Strict).collect()
}

/// The message for a file that ends in an invalid line.
fn message(text: &str) -> String {
    strict(text).unwrap_err().to_string()
}

fn lenient(text: &str) -> (Vec<Request>, Skipped) {
    let mut reader = read(text.as_bytes(), Format::Detect, Strictness::Lenient);
    let requests = reader.by_ref().map(Result::unwrap).collect();
    (requests, reader.skipped().clone())
}

#[test]
fn a_line_of_mooncake() {
    let requests = strict(&format!("{GOOD}\n")).unwrap();
    let expected = Request {
        arrival_us: 1_500_000,
        input_tokens: 1025,
        output_tokens: 7,
        block_tokens: 512,
        blocks: vec![0, 4, 9],
        ..Request::default()
    };
    assert_eq!(requests, [expected]);
}

#[test]
fn a_line_of_bailian_is_chained() {
    let mut reader = read(CHAT.as_bytes(), Format::Detect, Strictness::Strict);
    let request = reader.next().unwrap().unwrap();
    assert!(reader.next().is_none());
    assert_eq!(reader.format(), Format::Bailian);
    assert_eq!((request.arrival_us, request.chat, request.parent), (61_114_000, Some(159), Some(55)));
    assert_eq!(request.category, Category { kind: RequestKind::Search, conversation_turn: 2 });
    assert_eq!(request.blocks, bailian::chain(&[7, 7, 8]));
}

#[test]
fn a_root_has_no_parent_and_an_unknown_type_is_counted_as_text() {
    let line = CHAT.replace("55", "-1").replace("search", "hologram");
    let mut reader = read(line.as_bytes(), Format::Bailian, Strictness::Strict);
    let request = reader.next().unwrap().unwrap();
    assert_eq!((request.parent, request.category.kind), (None, RequestKind::Text));
    assert_eq!(reader.unknown_kinds(), 1);
}

#[test]
fn blank_lines_and_a_last_line_without_line_end_are_fine() {
    assert_eq!(strict(&format!("\n{GOOD}\n  \r\n{GOOD}")).unwrap().len(), 2);
}

#[test]
fn invalid_lines_are_described() {
    let bad = |from: &str, to: &str| message(&format!("{GOOD}\n{}\n", GOOD.replace(from, to)));
    says("a line that is no JSON", &bad("{", "{{"), &[]);
    says("a line of JSON that is no object", &message("[1, 2]\n"), &[]);
    says("a line without a key of its format", &bad("\"output_length\": 7, ", ""), &[]);
    says("a key that the format does not have", &bad("\"hash_ids\"", "\"extra\": 1, \"hash_ids\""), &[]);
    says("the same block twice in one request", &bad("[0, 4, 9]", "[0, 4, 0]"), &[]);
    says("fewer blocks than the input has", &bad("[0, 4, 9]", "[0, 4]"), &[]);
    says("a timestamp before the one above", &bad("1500", "1499"), &[]);
    says("a trace without a line", &message(""), &[]);
}

#[test]
fn a_repeated_chat_is_named_with_its_first_line() {
    let second = CHAT.replace("159", "160");
    let twice = format!("{CHAT}\n{second}\n{CHAT}\n");
    says("a line that repeats another one", &message(&twice), &[]);
    let (requests, skipped) = lenient(&twice);
    assert_eq!((requests.len(), skipped), (2, [(Reason::DuplicateRequest, 1)].into()));
    // Even if it is out of order, as in a file that was written twice.
    let later = second.replace("61.114", "99.5");
    let text = message(&format!("{CHAT}\n{later}\n{CHAT}\n"));
    assert!(text.contains("which line 1 has"), "{text}");
    let roots = [CHAT.replace("159", "-1"), second.replace("160", "-1")].join("\n");
    assert_eq!(strict(&roots).unwrap().len(), 2, "-1 means no number, so it can repeat");
}

/// Mooncake's format has no number to distinguish requests, and its public trace contains such a
/// pair.
#[test]
fn a_repeated_line_without_a_chat_number_is_another_request() {
    assert_eq!(strict(&format!("{GOOD}\n{GOOD}\n")).unwrap().len(), 2);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let bad = |from: &str, to: &str| message(&GOOD.replace(from, to));
    let lengths = "expected a whole number from 1 to 16777216 as \"input_length\", found";
    for (value, found) in
        [("-5", "-5"), ("0", "0"), ("1e300", "1e+300"), ("\"many\"", "\"many\""), ("1.5", "1.5")]
    {
        assert!(bad("1025", value).starts_with(&format!("trace line 1: {lengths} {found};")), "{value}");
    }
    says("a length out of range", &bad("1025", "0"), &[]);
    says("a length that is no number", &bad("1025", "\"many\""), &[]);
    says("a timestamp out of range", &bad("1500", "-1"), &[]);
    says("a block id that is no whole number", &bad("[0, 4, 9]", "[0, -4, 9]"), &[]);
    says("block ids that are no list", &bad("[0, 4, 9]", "7"), &[]);
    assert!(bad("1500", "1e99").contains("as \"timestamp\", found 1e+99"));
    assert!(bad("\"output_length\": 7", "\"output_length\": null").contains("found null"));
}

#[test]
fn a_long_foreign_value_is_shortened() {
    let text = message(&GOOD.replace("1025", &format!("\"{}\"", "x".repeat(10_000))));
    assert!(text.len() < 200, "{text}");
}

#[test]
fn a_file_cut_inside_its_last_line_says_so() {
    for cut in [1, 20, GOOD.len() - 1] {
        let text = message(&format!("{GOOD}\n{}", &GOOD[..cut]));
        assert!(text.starts_with("trace line 2: the file ends inside this line"), "{text}");
        assert!(text.contains("--lenient"), "{text}");
    }
    says("the file ends inside a line", &message(&format!("{GOOD}\n{}", &GOOD[..20])), &[]);
    // The same bytes followed by another line are malformed, not truncated.
    let text = message(&format!("{}\n{GOOD}\n", &GOOD[..20]));
    assert!(text.contains("expected one JSON object"), "{text}");
}

#[test]
fn non_text_bytes_are_malformed() {
    let error = read(&b"\xff\xfe\x00\n"[..], Format::Detect, Strictness::Strict).next().unwrap().unwrap_err();
    assert_eq!(error.problem.reason(), Reason::Malformed);
    says("a line of bytes that are no text", &error, &[]);
}

#[test]
fn a_strict_reader_ends_after_its_error() {
    let text = format!("{GOOD}\nnonsense\n{GOOD}\n");
    let mut reader = read(text.as_bytes(), Format::Detect, Strictness::Strict);
    assert!(reader.next().unwrap().is_ok());
    assert!(reader.next().unwrap().is_err());
    assert!(reader.next().is_none());
}

#[test]
fn a_lenient_reader_skips_and_counts_each_reason() {
    let text = [
        "nonsense".to_owned(),
        GOOD.to_owned(),
        GOOD.replace("1500", "3"),
        GOOD.replace("[0, 4, 9]", "[1, 1, 1]"),
        GOOD.replace("[0, 4, 9]", "[1]"),
        GOOD.replace("1025", "-1"),
        GOOD.replace("timestamp", "time"),
        GOOD.replace("{", "{\"more\": 1, "),
        GOOD.to_owned(),
        GOOD[..30].to_owned(),
    ]
    .join("\n");
    let (requests, skipped) = lenient(&text);
    assert_eq!(requests.len(), 2);
    let expected = [
        (Reason::Malformed, 1),
        (Reason::Truncated, 1),
        (Reason::MissingKey, 1),
        (Reason::UnknownKey, 1),
        (Reason::BadValue, 1),
        (Reason::DuplicateBlock, 1),
        (Reason::BlockCount, 1),
        (Reason::Unsorted, 1),
    ];
    assert_eq!(skipped, expected.into_iter().collect());
}

/// A reader with an endless line.
struct Endless;

impl Read for Endless {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        into.fill(b'[');
        Ok(into.len())
    }
}

#[test]
fn a_line_without_end_is_refused_even_by_a_lenient_reader() {
    let endless = std::io::BufReader::new(Endless);
    let mut reader = read(endless, Format::Detect, Strictness::Lenient);
    let error = reader.next().unwrap().unwrap_err();
    assert_eq!(error.problem.reason(), Reason::TooLong);
    says("a line without end, also with --lenient", &error, &[]);
    assert!(reader.next().is_none());
}

#[test]
fn deep_nesting_does_not_crash() {
    let text = "[".repeat(100_000) + "\n";
    assert!(message(&text).contains("expected one JSON object"));
}

fn any_request() -> impl Strategy<Value = Request> {
    let ids = prop::collection::btree_set(any::<u64>(), 1..20);
    (ids, 0..16_u32, 0..9000_u32, 0..7_u8, 1..300_u32, any::<u32>()).prop_map(
        |(ids, short, output_tokens, kind, turn, chat)| Request {
            input_tokens: ids.len() as u32 * 16 - short,
            output_tokens,
            block_tokens: 16,
            blocks: ids.into_iter().collect(),
            category: Category {
                kind: RequestKind::from_u8(kind),
                conversation_turn: u8::try_from(turn).unwrap_or(u8::MAX),
            },
            chat: Some(u64::from(chat)),
            parent: (turn > 1).then_some(u64::from(chat) + 1),
            turn,
            ..Request::default()
        },
    )
}

fn round_trip(requests: &[Request], format: Format) -> Vec<Request> {
    let mut writer = Writer::new(Vec::new(), format);
    requests.iter().for_each(|request| writer.write(request).unwrap());
    let bytes = writer.finish().unwrap();
    read(&bytes[..], Format::Detect, Strictness::Strict).map(Result::unwrap).collect()
}

proptest! {
    #[test]
    fn bailian_lines_round_trip(
        mut requests in prop::collection::vec(any_request(), 1..10), gaps in prop::collection::vec(0..1_u64 << 40, 10),
    ) {
        let mut now = 0;
        for (request, gap) in requests.iter_mut().zip(gaps) {
            now += gap;
            request.arrival_us = now;
        }
        let mut expected = requests.clone();
        expected.iter_mut().for_each(|request| request.blocks = bailian::chain(&request.blocks));
        prop_assert_eq!(round_trip(&requests, Format::Bailian), expected);
    }

    #[test]
    fn mooncake_lines_round_trip_without_conversations(request in any_request(), ms in 0..1_u64 << 40) {
        let tokens = request.blocks.len() as u32 * 512;
        let request =
            Request { arrival_us: ms * 1000, block_tokens: 512, input_tokens: tokens, ..request };
        let expected = Request { category: Category::default(), chat: None, parent: None, turn: 0, ..request.clone() };
        prop_assert_eq!(round_trip(&[request], Format::Mooncake), [expected]);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&bytes[..], Format::Detect, Strictness::Lenient).count();
        let _ = read(&bytes[..], Format::Bailian, Strictness::Strict).count();
    }

    #[test]
    fn damaged_lines_never_panic(at in 0..150_usize, byte in any::<u8>()) {
        for line in [GOOD, CHAT] {
            let mut bytes = line.as_bytes().to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = read(&bytes[..], Format::Detect, Strictness::Lenient).count();
        }
    }
}

#[test]
fn a_request_of_another_block_size_is_not_written() {
    let request = Request { block_tokens: 64, ..Request::default() };
    let error = Writer::new(Vec::new(), Format::Mooncake).write(&request).unwrap_err();
    assert!(error.to_string().contains("blocks of 512 tokens, the request has 64"));
}
