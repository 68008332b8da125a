//! What an answer that goes by says of tokens: how many the engine counted, and how many pieces with something in them came how fast.
//!
//! It keeps no byte of it: only how far it has come in `"prompt_tokens": 123` and the like. Text that a model wrote cannot look like that, because in JSON its quotes have a
//! backslash before them. Pure. Not here: what the numbers are compared with (`openai/relay.rs`), and who is told (`under_way.rs`).

use std::time::{Duration, Instant};

/// Keys that count.
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

/// Of each byte, which keys begin with it, a bit for each: most words begin with another one.
const FIRST: [u16; 256] = {
    let mut first = [0; 256];
    let mut nth = 0;
    while nth < KEYS.len() {
        first[KEYS[nth].0[0] as usize] |= 1 << nth;
        nth += 1;
    }
    first
};

/// What stands behind a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    /// Tokens of the prompt.
    Prompt,
    /// Tokens of the answer.
    Completion,
    /// Which of several answers, or of several calls of tools, it is of.
    Choice,
    /// What a model wrote.
    Text,
    /// What went wrong: engines say it in a stream that had begun, and end that as if it were whole.
    Error,
}

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// In nothing that counts.
    Nowhere,
    /// So many bytes behind a quote, and which keys begin with these, a bit for each.
    Word { bytes: usize, like: u16 },
    /// Behind a key.
    Colon(Key),
    /// Behind its colon.
    Value(Key),
    /// In its number, as far as that goes.
    Number(Key, u32),
    /// Behind the quote of its text.
    Quote,
}

/// What engines write last in a stream: who asked may leave behind it and has heard all.
const LAST: &[u8] = b"data: [DONE]\n\n";

/// Whether these bytes end a stream of events, though its body goes on.
pub(crate) fn is_last(bytes: &[u8]) -> bool {
    bytes.ends_with(LAST)
}

/// How a request ended, as far as was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// Tokens of its answer; 0 where nobody knows.
    pub(crate) tokens: u32,
    /// Mean time between two of them, where they came one after the other.
    pub(crate) tbt: Option<Duration>,
}

/// Looks through an answer.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// Whether it comes as events, a piece of the answer in each.
    is_stream: bool,
    at: At,
    prompt: Option<u32>,
    completion: Option<u32>,
    /// Whether there is more than one answer in it: they come beside one another.
    is_several: bool,
    /// Whether an engine said that something went wrong.
    is_failed: bool,
    /// Events in which a model wrote something.
    pieces: u32,
    /// Whether this one is counted.
    is_counted: bool,
    /// When the first piece came whose time was known, and the last, each with how many there were by then.
    times: Option<[(Instant, u32); 2]>,
}

impl Tally {
    /// Of an answer of this `content-type`.
    pub(crate) fn of(content_type: Option<&str>) -> Tally {
        Tally {
            is_stream: content_type.is_some_and(|kind| kind.starts_with("text/event-stream")),
            at: At::Nowhere,
            prompt: None,
            completion: None,
            is_several: false,
            is_failed: false,
            pieces: 0,
            is_counted: false,
            times: None,
        }
    }

    /// Looks through the next bytes. `came` is when, if they were waited for: what lay there already says nothing of how fast an engine is.
    pub(crate) fn see(&mut self, bytes: &[u8], came: Option<Instant>) {
        let before = self.pieces;
        let mut rest = bytes;
        loop {
            if self.at == At::Nowhere {
                // Most of an answer is this.
                let counts = |at: &usize| match rest[*at] {
                    b'"' => rest.get(*at + 1).is_none_or(|next| FIRST[usize::from(*next)] != 0),
                    byte => byte == b'\n',
                };
                rest = (0..rest.len()).find(counts).map_or(&[], |at| &rest[at..]);
            }
            let Some((byte, behind)) = rest.split_first() else { break };
            // No text has one in JSON: it ends the event, or is of no matter.
            self.is_counted &= *byte != b'\n';
            self.at = self.next(*byte);
            rest = behind;
        }
        if let Some(came) = came.filter(|_| self.pieces > before) {
            let last = (came, self.pieces);
            let [first, _] = self.times.unwrap_or([last; 2]);
            self.times = Some([first, last]);
        }
    }

    /// Tokens of the prompt, as the engine says last.
    pub(crate) fn prompt_tokens(&self) -> Option<u32> {
        self.found(Key::Prompt, self.prompt)
    }

    /// What was said, once all of it has gone by; nothing of an answer that went wrong, which is not as long as it would have been.
    pub(crate) fn said(&self) -> Said {
        if self.is_failed {
            return Said::default();
        }
        let pieces = if self.is_stream { self.pieces } else { 0 };
        let tokens = self.found(Key::Completion, self.completion).unwrap_or(pieces);
        let Some([(first, before), (last, by_then)]) = self.times.filter(|_| !self.is_several) else {
            return Said { tokens, tbt: None };
        };
        let steps = f64::from(by_then - before);
        // Of an engine that says several at once, in each as many as on average.
        let tokens_between = steps * f64::from(tokens) / f64::from(pieces.max(1));
        let is_seen = self.is_stream && tokens_between > 0.0;
        let tbt = is_seen.then(|| last.duration_since(first).div_f64(tokens_between));
        Said { tokens, tbt }
    }

    /// The number of a key, if it is what came last as well.
    fn found(&self, of: Key, found: Option<u32>) -> Option<u32> {
        match self.at {
            At::Number(key, number) if key == of => Some(number),
            _ => found,
        }
    }

    fn next(&mut self, byte: u8) -> At {
        match self.at {
            At::Word { bytes, like } if byte == b'"' => {
                let whole = KEYS
                    .iter()
                    .enumerate()
                    .find(|(nth, (key, _))| like >> nth & 1 == 1 && key.len() == bytes);
                whole.map_or_else(|| begin(byte), |(_, (_, key))| At::Colon(*key))
            }
            At::Word { bytes, like } => match going_on(like, bytes, byte) {
                0 => At::Nowhere,
                like => At::Word { bytes: bytes + 1, like },
            },
            At::Colon(_) | At::Value(_) if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') => self.at,
            At::Colon(key) if byte == b':' => At::Value(key),
            At::Value(Key::Text) if byte == b'"' => At::Quote,
            At::Value(Key::Error) if matches!(byte, b'{' | b'"') => {
                self.is_failed = true;
                begin(byte)
            }
            At::Value(key) if byte.is_ascii_digit() && key != Key::Text => {
                At::Number(key, u32::from(byte - b'0'))
            }
            At::Number(key, number) if byte.is_ascii_digit() => {
                At::Number(key, number.saturating_mul(10).saturating_add(u32::from(byte - b'0')))
            }
            At::Number(key, number) => {
                match key {
                    Key::Prompt => self.prompt = Some(number),
                    Key::Completion => self.completion = Some(number),
                    Key::Choice => self.is_several |= number > 0,
                    Key::Text | Key::Error => {}
                }
                begin(byte)
            }
            At::Quote => {
                if byte != b'"' && !self.is_counted {
                    self.pieces = self.pieces.saturating_add(1);
                    self.is_counted = true;
                }
                At::Nowhere
            }
            At::Nowhere | At::Colon(_) | At::Value(_) => begin(byte),
        }
    }
}

/// Of these keys, which have this byte there.
fn going_on(like: u16, at: usize, byte: u8) -> u16 {
    if at == 0 {
        return FIRST[usize::from(byte)];
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

/// A quote may begin a key.
fn begin(byte: u8) -> At {
    if byte == b'"' { At::Word { bytes: 0, like: u16::MAX } } else { At::Nowhere }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(kind: &str, pieces: &[&str]) -> Tally {
        let mut tally = Tally::of(Some(kind));
        pieces.iter().for_each(|piece| tally.see(piece.as_bytes(), None));
        tally
    }

    fn found(pieces: &[&str]) -> Option<u32> {
        tally("application/json", pieces).prompt_tokens()
    }

    #[test]
    fn the_number_is_found_wherever_the_answer_is_cut() {
        let text =
            "data: {\"usage\":{\"prompt_tokens\": 1234,\"prompt_tokens_details\":{\"cached_tokens\":7}}}\n\n";
        for cut in 0..text.len() {
            let (first, second) = text.split_at(cut);
            assert_eq!(found(&[first, second]), Some(1234), "cut at {cut}");
        }
        let bytes: Vec<_> = text.split("").collect();
        assert_eq!(found(&bytes), Some(1234));
    }

    #[test]
    fn what_is_no_stream_of_events_is_looked_through_wherever_it_is_cut() {
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
                let mut tally = Tally::of(Some("text/event-stream"));
                let (first, second) = bytes.split_at(cut);
                tally.see(first, None);
                tally.see(second, None);
                let said = (tally.said(), tally.prompt_tokens());
                assert_eq!(said, (Said { tokens, tbt: None }, prompt), "{shown} cut at {cut}");
            }
        }
    }

    #[test]
    fn what_a_model_says_is_no_number_of_the_engine() {
        assert_eq!(found(&[r#"{"content":"\"prompt_tokens\": 5"}"#]), None);
        assert_eq!(found(&[r#"{"prompt_tokens_details":5,"x_prompt_tokens":6,"prompt_tokens":null}"#]), None);
        assert_eq!(found(&[r#""prompt_tokens":1 "prompt_tokens":2}"#]), Some(2), "the last one counts");
        assert_eq!(found(&[r#"""prompt_tokens":3}"#]), Some(3));
        assert_eq!(found(&[r#"{"prompt_tokens":99999999999}"#]), Some(u32::MAX));
    }

    /// Events as vLLM has them: a role, these texts, an end and, if it was asked for, usage.
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
    fn tokens_are_what_the_engine_says_or_else_events_with_text_in_them() {
        let texts = ["Pa", "ris \\\"content\\\":\\\"x", "\\n", "é"];
        for key in ["content", "text", "reasoning_content", "reasoning", "arguments"] {
            for (usage, tokens) in [(None, 4), (Some(7), 7), (Some(0), 0)] {
                let text = events(key, &texts, usage).concat();
                for kind in ["text/event-stream", "text/event-stream; charset=utf-8"] {
                    assert_eq!(tally(kind, &[&text]).said().tokens, tokens, "{key} {usage:?}");
                }
                for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
                    let (first, second) = text.split_at(cut);
                    let said = tally("text/event-stream", &[first, second]).said();
                    assert_eq!(said, Said { tokens, tbt: None }, "{key} {usage:?} cut at {cut}");
                }
            }
        }
        let whole =
            r#"{"choices":[{"index":0,"message":{"content":"Paris"}}],"usage":{"completion_tokens": 31}}"#;
        assert_eq!(tally("application/json", &[whole]).said(), Said { tokens: 31, tbt: None });
        let (unsaid, _) = whole.split_at(whole.find(",\"usage").expect("it is there"));
        assert_eq!(tally("application/json", &[unsaid]).said(), Said::default(), "it is not known");
        let cut = whole.trim_end_matches('}');
        assert_eq!(tally("application/json", &[cut]).said().tokens, 31, "a number that nothing ends");
    }

    #[test]
    fn of_an_answer_that_went_wrong_nothing_is_told() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let wrong = "data: {\"error\": {\"message\":\"out of memory\",\"code\":500}}\n\n";
        let said = |pieces: &[&str]| tally("text/event-stream", pieces).said();
        assert_eq!(said(&[event, event, wrong, "data: [DONE]\n\n"]), Said::default());
        let well = "data: {\"error\":null,\"choices\":[{\"delta\":{\"content\":\"\\\"error\\\": {\"}}]}\n\n";
        assert_eq!(said(&[event, well, "data: [DONE]\n\n"]).tokens, 2);
    }

    #[test]
    fn how_fast_tokens_come_is_seen_of_those_that_were_waited_for() {
        let begun = Instant::now();
        let ms = |ms: u64| Some(begun + Duration::from_millis(ms));
        let tbt_us = |usage, came: &dyn Fn(u64) -> Option<Instant>| {
            let mut tally = Tally::of(Some("text/event-stream"));
            for (nth, event) in (0..).zip(events("content", &["a"; 11], usage)) {
                tally.see(event.as_bytes(), came(nth));
            }
            tally.said().tbt.map(|tbt| tbt.as_micros())
        };
        // What comes before the first and behind the last says nothing of the time between two.
        let steady = |nth: u64| ms(if nth > 11 { 90_000 } else { 1_000 + 20 * nth });
        assert_eq!(tbt_us(None, &steady), Some(20_000));
        assert_eq!(tbt_us(Some(11), &steady), Some(20_000));
        assert_eq!(tbt_us(Some(22), &steady), Some(10_000), "two in each");
        assert_eq!(tbt_us(Some(0), &steady), None);
        // From the seventh on they lay there: whoever takes them takes his time.
        let slow = |nth: u64| if nth < 7 { steady(nth) } else { None };
        assert_eq!(tbt_us(None, &slow), Some(20_000));
        assert_eq!(
            tbt_us(None, &|nth| ms(nth).filter(|_| nth == 4)),
            None,
            "one alone is no time between two"
        );
        assert_eq!(tbt_us(Some(u32::MAX), &steady), Some(0));
    }

    #[test]
    fn of_answers_beside_one_another_only_how_many_tokens_is_told() {
        let begun = Instant::now();
        let mut tally = Tally::of(Some("text/event-stream"));
        for nth in 0..10 {
            let event = format!("data: {{\"choices\":[{{\"index\":{},\"text\":\"a\"}}]}}\n\n", nth % 2);
            tally.see(event.as_bytes(), Some(begun + Duration::from_millis(nth)));
        }
        assert_eq!(tally.said(), Said { tokens: 10, tbt: None });
    }
}
