//! Scans an answer while it is relayed: token counts that the engine reports, and how fast events
//! with text arrive.
//!
//! It stores no bytes of the answer, only the parser's state within keys such as `"prompt_tokens":
//! 123`. Generated text cannot imitate a key, because JSON escapes its quotes with a backslash.
//! Pure.
//!
//! Not here: the check of prompt tokens (`openai/relay.rs`), and the report to the router
//! (`in_flight.rs`).

use std::time::{Duration, Instant};

/// Keys that the scanner recognises.
const KEYS: [(&[u8], Key); 9] = [
    (b"prompt_tokens", Key::Prompt),
    (b"completion_tokens", Key::Completion),
    (b"index", Key::Choice),
    (b"content", Key::Text),
    (b"text", Key::Text),
    (b"reasoning_content", Key::Text),
    (b"reasoning", Key::Text),
    (b"arguments", Key::Text),
    (b"error", Key::Error),
];

/// For each byte, a bit set of the keys that begin with it. Most strings in an answer are ruled out
/// by this first byte.
const KEYS_BY_FIRST_BYTE: [u16; 256] = {
    let mut first = [0; 256];
    let mut nth = 0;
    while nth < KEYS.len() {
        first[KEYS[nth].0[0] as usize] |= 1 << nth;
        nth += 1;
    }
    first
};

/// Meaning of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    /// Tokens of the prompt.
    Prompt,
    /// Tokens of the answer.
    Completion,
    /// Index of one of several choices or tool calls.
    Choice,
    /// Generated text.
    Text,
    /// An error. Engines report it inside a stream that had begun, and then end the stream
    /// normally.
    Error,
}

/// State of the parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanState {
    /// In bytes that do not matter.
    Outside,
    /// `bytes` after a quote; `candidates` is the bit set of keys that match so far.
    InKey { bytes: usize, candidates: u16 },
    /// After a key.
    AfterKey(Key),
    /// After the colon of a key.
    BeforeValue(Key),
    /// In a number, with the value of its digits so far.
    InNumber(Key, u32),
    /// After the opening quote of a text.
    TextStart,
}

/// Last event of a stream. A caller may disconnect after it without missing anything.
const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";

/// Whether these bytes end the stream of events, even if its body continues.
pub(crate) fn ends_with_done(bytes: &[u8]) -> bool {
    bytes.ends_with(DONE_EVENT)
}

/// Token counts and pace of a finished answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerUsage {
    /// Tokens of the answer; 0 if unknown.
    pub(crate) tokens: u32,
    /// Mean time between two tokens; `None` if unknown, or if the answer has several choices.
    pub(crate) tbt: Option<Duration>,
}

/// Incremental scanner of one answer.
#[derive(Clone, Debug)]
pub(crate) struct UsageScanner {
    /// Whether the answer is a stream of server-sent events.
    is_stream: bool,
    state: ScanState,
    prompt: Option<u32>,
    completion: Option<u32>,
    /// Whether the answer has several choices, which interleave.
    has_several_choices: bool,
    /// Whether the engine reported an error.
    has_error: bool,
    /// Events with generated text.
    pieces: u32,
    /// Whether the current event is counted in `pieces`.
    event_counted: bool,
    /// First and last arrival of text with a known time, each with the number of pieces by then.
    arrivals: Option<[(Instant, u32); 2]>,
}

impl UsageScanner {
    /// Scanner for an answer of this `content-type`.
    pub(crate) fn new(content_type: Option<&str>) -> UsageScanner {
        UsageScanner {
            is_stream: content_type.is_some_and(|kind| kind.starts_with("text/event-stream")),
            state: ScanState::Outside,
            prompt: None,
            completion: None,
            has_several_choices: false,
            has_error: false,
            pieces: 0,
            event_counted: false,
            arrivals: None,
        }
    }

    /// Scans the next bytes. `arrived` is their arrival time, or `None` if they were already
    /// buffered: the time would not reflect the engine's speed.
    pub(crate) fn scan(&mut self, bytes: &[u8], arrived: Option<Instant>) {
        let before = self.pieces;
        let mut rest = bytes;
        loop {
            if self.state == ScanState::Outside {
                // Skips to the next relevant byte; most of an answer is skipped here.
                let counts = |at: &usize| match rest[*at] {
                    b'"' => rest.get(*at + 1).is_none_or(|next| KEYS_BY_FIRST_BYTE[usize::from(*next)] != 0),
                    byte => byte == b'\n',
                };
                rest = (0..rest.len()).find(counts).map_or(&[], |at| &rest[at..]);
            }
            let Some((byte, tail)) = rest.split_first() else { break };
            // JSON escapes line breaks, so one in the bytes ends an event.
            self.event_counted &= *byte != b'\n';
            self.state = self.next_state(*byte);
            rest = tail;
        }
        if let Some(came) = arrived.filter(|_| self.pieces > before) {
            let last = (came, self.pieces);
            let [first, _] = self.arrivals.unwrap_or([last; 2]);
            self.arrivals = Some([first, last]);
        }
    }

    /// Tokens of the prompt, by the engine's last count.
    pub(crate) fn prompt_tokens(&self) -> Option<u32> {
        self.latest(Key::Prompt, self.prompt)
    }

    /// Usage after the whole answer; the default if the engine reported an error, because the
    /// answer is then cut short.
    pub(crate) fn usage(&self) -> AnswerUsage {
        if self.has_error {
            return AnswerUsage::default();
        }
        let pieces = if self.is_stream { self.pieces } else { 0 };
        let tokens = self.latest(Key::Completion, self.completion).unwrap_or(pieces);
        let Some([(first, before), (last, by_then)]) = self.arrivals.filter(|_| !self.has_several_choices)
        else {
            return AnswerUsage { tokens, tbt: None };
        };
        let steps = f64::from(by_then - before);
        // If an engine sends several tokens in an event, each event counts as the mean number.
        let tokens_between = steps * f64::from(tokens) / f64::from(pieces.max(1));
        let is_seen = self.is_stream && tokens_between > 0.0;
        let tbt = is_seen.then(|| last.duration_since(first).div_f64(tokens_between));
        AnswerUsage { tokens, tbt }
    }

    /// Latest number of a key, including one that the end of the bytes cut off.
    fn latest(&self, of: Key, found: Option<u32>) -> Option<u32> {
        match self.state {
            ScanState::InNumber(key, number) if key == of => Some(number),
            _ => found,
        }
    }

    fn next_state(&mut self, byte: u8) -> ScanState {
        match self.state {
            ScanState::InKey { bytes, candidates: like } if byte == b'"' => {
                let whole = KEYS
                    .iter()
                    .enumerate()
                    .find(|(nth, (key, _))| like >> nth & 1 == 1 && key.len() == bytes);
                whole.map_or_else(|| state_after(byte), |(_, (_, key))| ScanState::AfterKey(*key))
            }
            ScanState::InKey { bytes, candidates: like } => match narrow(like, bytes, byte) {
                0 => ScanState::Outside,
                like => ScanState::InKey { bytes: bytes + 1, candidates: like },
            },
            ScanState::AfterKey(_) | ScanState::BeforeValue(_)
                if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') =>
            {
                self.state
            }
            ScanState::AfterKey(key) if byte == b':' => ScanState::BeforeValue(key),
            ScanState::BeforeValue(Key::Text) if byte == b'"' => ScanState::TextStart,
            ScanState::BeforeValue(Key::Error) if matches!(byte, b'{' | b'"') => {
                self.has_error = true;
                state_after(byte)
            }
            ScanState::BeforeValue(key) if byte.is_ascii_digit() && key != Key::Text => {
                ScanState::InNumber(key, u32::from(byte - b'0'))
            }
            ScanState::InNumber(key, number) if byte.is_ascii_digit() => {
                ScanState::InNumber(key, number.saturating_mul(10).saturating_add(u32::from(byte - b'0')))
            }
            ScanState::InNumber(key, number) => {
                match key {
                    Key::Prompt => self.prompt = Some(number),
                    Key::Completion => self.completion = Some(number),
                    Key::Choice => self.has_several_choices |= number > 0,
                    Key::Text | Key::Error => {}
                }
                state_after(byte)
            }
            ScanState::TextStart => {
                if byte != b'"' && !self.event_counted {
                    self.pieces = self.pieces.saturating_add(1);
                    self.event_counted = true;
                }
                ScanState::Outside
            }
            ScanState::Outside | ScanState::AfterKey(_) | ScanState::BeforeValue(_) => state_after(byte),
        }
    }
}

/// Keys of the bit set `candidates` that have `byte` at position `at`.
fn narrow(like: u16, at: usize, byte: u8) -> u16 {
    if at == 0 {
        return KEYS_BY_FIRST_BYTE[usize::from(byte)];
    }
    let (mut rest, mut found) = (like, 0);
    while rest != 0 {
        let nth = rest.trailing_zeros();
        if KEYS[nth as usize].0.get(at) == Some(&byte) {
            found |= 1 << nth;
        }
        rest &= rest - 1;
    }
    found
}

/// State after `byte` outside of a value: a quote may begin a key.
fn state_after(byte: u8) -> ScanState {
    if byte == b'"' { ScanState::InKey { bytes: 0, candidates: u16::MAX } } else { ScanState::Outside }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(kind: &str, pieces: &[&str]) -> UsageScanner {
        let mut scanner = UsageScanner::new(Some(kind));
        pieces.iter().for_each(|piece| scanner.scan(piece.as_bytes(), None));
        scanner
    }

    fn prompt_tokens_in(pieces: &[&str]) -> Option<u32> {
        scanned("application/json", pieces).prompt_tokens()
    }

    #[test]
    fn finds_prompt_tokens_across_any_split() {
        let text =
            "data: {\"usage\":{\"prompt_tokens\": 1234,\"prompt_tokens_details\":{\"cached_tokens\":7}}}\n\n";
        for cut in 0..text.len() {
            let (first, second) = text.split_at(cut);
            assert_eq!(prompt_tokens_in(&[first, second]), Some(1234), "split at {cut}");
        }
        let bytes: Vec<_> = text.split("").collect();
        assert_eq!(prompt_tokens_in(&bytes), Some(1234));
    }

    #[test]
    fn scans_malformed_streams_across_any_split() {
        let nines = [&b"{\"prompt_tokens\":"[..], &[b'9'; 200], b"}"].concat();
        let cases: [(&[u8], u32, Option<u32>); 9] = [
            (b"data: {\"content\":\"\xff\xfe\xc3(\"}\n\n", 1, None),
            (b"{\"content\":\"a\"}\n\n: \n\n{\"content\":\"b\"}\n\n", 2, None),
            (b"data: {\"content\":\"a\"}\r\n\r\ndata: {\"content\":\"b\"}\n\r\n\rdata: {}\r", 2, None),
            (b"data: {\"content\":\"a\"},\"usage\":{\"prompt_tokens\":12", 1, Some(12)),
            (b"{\"prompt_tokens\":\xff7,\"completion_tokens\":\0", 0, None),
            (b"{\"content\":\xff\"content\":\"\xff", 1, None),
            (b"\"\"\"\"\"\"\xff\"\"\"\\\"", 0, None),
            (&nines, 0, Some(u32::MAX)),
            (&[0_u8; 100], 0, None),
        ];
        for (bytes, tokens, prompt) in cases {
            let shown = String::from_utf8_lossy(bytes);
            for cut in 0..=bytes.len() {
                let mut scanner = UsageScanner::new(Some("text/event-stream"));
                let (first, second) = bytes.split_at(cut);
                scanner.scan(first, None);
                scanner.scan(second, None);
                let result = (scanner.usage(), scanner.prompt_tokens());
                assert_eq!(result, (AnswerUsage { tokens, tbt: None }, prompt), "{shown} split at {cut}");
            }
        }
    }

    #[test]
    fn ignores_numbers_inside_generated_text() {
        assert_eq!(prompt_tokens_in(&[r#"{"content":"\"prompt_tokens\": 5"}"#]), None);
        assert_eq!(
            prompt_tokens_in(&[r#"{"prompt_tokens_details":5,"x_prompt_tokens":6,"prompt_tokens":null}"#]),
            None
        );
        assert_eq!(
            prompt_tokens_in(&[r#""prompt_tokens":1 "prompt_tokens":2}"#]),
            Some(2),
            "the last number counts"
        );
        assert_eq!(prompt_tokens_in(&[r#"""prompt_tokens":3}"#]), Some(3));
        assert_eq!(prompt_tokens_in(&[r#"{"prompt_tokens":99999999999}"#]), Some(u32::MAX));
    }

    /// Events in vLLM's form: a role, the texts, an end and, on request, usage.
    fn events(key: &str, texts: &[&str], usage: Option<u32>) -> Vec<String> {
        let delta =
            |delta: String| format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{{delta}}}}}]}}\n\n");
        let mut all = vec![delta("\"role\":\"assistant\",\"content\":\"\"".to_owned())];
        all.extend(texts.iter().map(|text| delta(format!("\"{key}\":\"{text}\""))));
        all.push(delta(String::new()));
        all.extend(usage.map(|tokens| {
            format!("data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{tokens}}}}}\n\n")
        }));
        all.push("data: [DONE]\n\n".to_owned());
        all
    }

    #[test]
    fn uses_engine_count_or_counts_text_events() {
        let texts = ["Pa", "ris \\\"content\\\":\\\"x", "\\n", "é"];
        for key in ["content", "text", "reasoning_content", "reasoning", "arguments"] {
            for (usage, tokens) in [(None, 4), (Some(7), 7), (Some(0), 0)] {
                let text = events(key, &texts, usage).concat();
                for kind in ["text/event-stream", "text/event-stream; charset=utf-8"] {
                    assert_eq!(scanned(kind, &[&text]).usage().tokens, tokens, "{key} {usage:?}");
                }
                for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
                    let (first, second) = text.split_at(cut);
                    let said = scanned("text/event-stream", &[first, second]).usage();
                    assert_eq!(said, AnswerUsage { tokens, tbt: None }, "{key} {usage:?} split at {cut}");
                }
            }
        }
        let whole =
            r#"{"choices":[{"index":0,"message":{"content":"Paris"}}],"usage":{"completion_tokens": 31}}"#;
        assert_eq!(scanned("application/json", &[whole]).usage(), AnswerUsage { tokens: 31, tbt: None });
        let (without_usage, _) = whole.split_at(whole.find(",\"usage").expect("the answer has usage"));
        assert_eq!(
            scanned("application/json", &[without_usage]).usage(),
            AnswerUsage::default(),
            "unknown without usage"
        );
        let cut = whole.trim_end_matches('}');
        assert_eq!(
            scanned("application/json", &[cut]).usage().tokens,
            31,
            "a number cut off by the end of the bytes"
        );
    }

    #[test]
    fn reports_no_usage_after_an_error_event() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let wrong = "data: {\"error\": {\"message\":\"out of memory\",\"code\":500}}\n\n";
        let usage = |pieces: &[&str]| scanned("text/event-stream", pieces).usage();
        assert_eq!(usage(&[event, event, wrong, "data: [DONE]\n\n"]), AnswerUsage::default());
        let no_error =
            "data: {\"error\":null,\"choices\":[{\"delta\":{\"content\":\"\\\"error\\\": {\"}}]}\n\n";
        assert_eq!(usage(&[event, no_error, "data: [DONE]\n\n"]).tokens, 2);
    }

    #[test]
    fn measures_tbt_only_from_awaited_events() {
        let begun = Instant::now();
        let ms = |ms: u64| Some(begun + Duration::from_millis(ms));
        let tbt_us = |usage, came: &dyn Fn(u64) -> Option<Instant>| {
            let mut tally = UsageScanner::new(Some("text/event-stream"));
            for (nth, event) in (0..).zip(events("content", &["a"; 11], usage)) {
                tally.scan(event.as_bytes(), came(nth));
            }
            tally.usage().tbt.map(|tbt| tbt.as_micros())
        };
        // Delays before the first and after the last text do not count.
        let steady = |nth: u64| ms(if nth > 11 { 90_000 } else { 1_000 + 20 * nth });
        assert_eq!(tbt_us(None, &steady), Some(20_000));
        assert_eq!(tbt_us(Some(11), &steady), Some(20_000));
        assert_eq!(tbt_us(Some(22), &steady), Some(10_000), "two tokens in each event");
        assert_eq!(tbt_us(Some(0), &steady), None);
        // From the seventh on, events were already buffered because the reader was slow.
        let slow = |nth: u64| if nth < 7 { steady(nth) } else { None };
        assert_eq!(tbt_us(None, &slow), Some(20_000));
        assert_eq!(tbt_us(None, &|nth| ms(nth).filter(|_| nth == 4)), None, "one arrival gives no interval");
        assert_eq!(tbt_us(Some(u32::MAX), &steady), Some(0));
    }

    #[test]
    fn reports_no_tbt_for_several_choices() {
        let begun = Instant::now();
        let mut scanner = UsageScanner::new(Some("text/event-stream"));
        for nth in 0..10 {
            let event = format!("data: {{\"choices\":[{{\"index\":{},\"text\":\"a\"}}]}}\n\n", nth % 2);
            scanner.scan(event.as_bytes(), Some(begun + Duration::from_millis(nth)));
        }
        assert_eq!(scanner.usage(), AnswerUsage { tokens: 10, tbt: None });
    }
}
