//! One line as a JSON object with checked access: every error names the key, the expected value,
//! and the found one.
//!
//! Not here: the keys of each format ([`super::mooncake`], [`super::bailian`]).

use super::{ARRIVAL_US_MAX, Problem, TOKENS_MAX};
use serde_json::{Map, Value};

/// Maximum characters of a foreign value in a message.
const SHOWN_CHARS_MAX: usize = 40;

/// A parsed line and the format it is read as.
pub(super) struct Line {
    values: Map<String, Value>,
    format: &'static str,
}

/// Text of a value, shortened.
pub(super) fn display_value(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= SHOWN_CHARS_MAX {
        return text.to_owned();
    }
    let start: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    format!("{start}…")
}

/// The parser's message with the column. Its line number is dropped, because it only ever gets one
/// line.
fn parser_message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    format!("{what} at column {}", error.column())
}

/// The start of an invalid line, quoted, so that control bytes cannot affect a terminal.
fn quoted(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * SHOWN_CHARS_MAX)]);
    format!("{:?}", shortened(text.trim()))
}

/// Parses a line as a JSON object. `ended` says whether the line had its line end.
pub(super) fn parse(bytes: &[u8], ended: bool) -> Result<Map<String, Value>, Problem> {
    match serde_json::from_slice::<Value>(bytes) {
        Ok(Value::Object(values)) => Ok(values),
        Ok(other) => Err(Problem::Malformed { found: display_value(&other) }),
        Err(error) if error.is_eof() && !ended => Err(Problem::Truncated { found: parser_message(&error) }),
        Err(error) => {
            Err(Problem::Malformed { found: format!("{} ({})", quoted(bytes), parser_message(&error)) })
        }
    }
}

impl Line {
    /// A line that has exactly the keys of its format.
    pub(super) fn new(
        values: Map<String, Value>,
        format: &'static str,
        keys: &[&'static str],
    ) -> Result<Self, Problem> {
        if let Some(key) = keys.iter().find(|key| !values.contains_key(**key)) {
            let found = values.keys().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
            let found = if found.is_empty() { "no key".to_owned() } else { found };
            return Err(Problem::MissingKey { key, format, found });
        }
        if let Some(key) = values.keys().find(|key| !keys.contains(&key.as_str())) {
            let expected = keys.join(", ");
            return Err(Problem::UnknownKey {
                key: key.chars().take(SHOWN_CHARS_MAX).collect(),
                format,
                expected,
            });
        }
        Ok(Line { values, format })
    }

    fn value(&self, key: &'static str) -> Result<&Value, Problem> {
        let missing = || Problem::MissingKey { key, format: self.format, found: String::new() };
        self.values.get(key).ok_or_else(missing)
    }

    fn bad(&self, key: &'static str, expected: impl Into<String>) -> Problem {
        let found = self.values.get(key).map_or_else(|| "nothing".to_owned(), display_value);
        Problem::BadValue { key, expected: expected.into(), found }
    }

    /// A whole number in `least..=most`. Accepts `3.0`, which some writers emit.
    pub(super) fn whole(&self, key: &'static str, least: u64, most: u64) -> Result<u64, Problem> {
        let value = self.value(key)?;
        let from_float =
            || value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=9e15).contains(n)).map(|n| n as u64);
        let number = value.as_u64().or_else(from_float);
        number
            .filter(|number| (least..=most).contains(number))
            .ok_or_else(|| self.bad(key, format!("a whole number from {least} to {most}")))
    }

    /// A length in tokens, at least `least`.
    pub(super) fn tokens(&self, key: &'static str, least: u64) -> Result<u32, Problem> {
        let tokens = self.whole(key, least, TOKENS_MAX)?;
        u32::try_from(tokens).map_err(|_| self.bad(key, "fewer tokens"))
    }

    /// A point in time given in units of `unit_us` microseconds.
    pub(super) fn time_us(&self, key: &'static str, unit_us: f64) -> Result<u64, Problem> {
        let us = self.value(key)?.as_f64().map(|units| (units * unit_us).round());
        let in_range = us.filter(|us| (0.0..=ARRIVAL_US_MAX as f64).contains(us));
        in_range.map(|us| us as u64).ok_or_else(|| {
            self.bad(key, format!("a number from 0 to {:.0}", ARRIVAL_US_MAX as f64 / unit_us))
        })
    }

    /// A chat number, or `None` for −1.
    pub(super) fn chat(&self, key: &'static str) -> Result<Option<u64>, Problem> {
        if self.value(key)?.as_i64() == Some(-1) {
            return Ok(None);
        }
        let number = self.value(key)?.as_u64();
        number.map(Some).ok_or_else(|| self.bad(key, "a chat number, or -1 for none"))
    }

    /// A text.
    pub(super) fn text(&self, key: &'static str) -> Result<&str, Problem> {
        self.value(key)?.as_str().ok_or_else(|| self.bad(key, "a text"))
    }

    /// A list of block ids.
    pub(super) fn ids(&self, key: &'static str) -> Result<Vec<u64>, Problem> {
        let list = self.value(key)?.as_array().ok_or_else(|| self.bad(key, "a list of block ids"))?;
        let expected = "only whole numbers from 0";
        let id = |value: &Value| {
            let found = display_value(value);
            value.as_u64().ok_or_else(|| Problem::BadValue { key, expected: expected.into(), found })
        };
        list.iter().map(id).collect()
    }
}

/// Refuses a list of blocks that does not match the input length.
pub(super) fn check_count(ids: &[u64], input_tokens: u32, block_tokens: u32) -> Result<(), Problem> {
    let expected = u64::from(input_tokens.div_ceil(block_tokens));
    if ids.len() as u64 == expected {
        return Ok(());
    }
    Err(Problem::BlockCount { expected, found: ids.len(), input_tokens, block_tokens })
}
