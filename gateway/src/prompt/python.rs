//! Formats values as Python does, with `json.dumps` and `str`, because chat templates are written
//! for Python.
//!
//! Pure. Not here: the templates (`template.rs`).

use std::fmt::{self, Write};

use minijinja::Value;
use minijinja::value::ValueKind;

/// Deepest nesting; the JSON parser's own limit is lower.
const NESTING_DEPTH: usize = 200;

/// Most spaces at the start of a line. No template indents by more than a few spaces a level.
const INDENT_MAX: usize = 4_096;

/// Options of `json.dumps`.
#[derive(Clone, Debug)]
pub(super) struct JsonStyle {
    /// Spaces per level; `None` writes one line.
    pub(super) indent: Option<usize>,
    /// Separator between two items.
    pub(super) item_separator: String,
    /// Separator between a key and its value.
    pub(super) key_separator: String,
    /// Whether characters outside of ASCII are written as `\u` escapes.
    pub(super) ensure_ascii: bool,
    /// Whether keys are sorted.
    pub(super) sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        JsonStyle {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// Why a value cannot be written as JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum JsonError {
    /// It is longer than the writer takes.
    #[error("the text is too long")]
    TooLong,
    /// Text of Python's exception.
    #[error("{0}")]
    Python(String),
}

impl From<fmt::Error> for JsonError {
    fn from(_: fmt::Error) -> JsonError {
        JsonError::TooLong
    }
}

impl From<minijinja::Error> for JsonError {
    fn from(error: minijinja::Error) -> JsonError {
        JsonError::Python(error.to_string())
    }
}

/// `json.dumps` into `out`. An error of `out` means that the text is too long.
pub(super) fn write_json(out: &mut impl Write, value: &Value, style: &JsonStyle) -> Result<(), JsonError> {
    write_value(out, value, style, 0)
}

fn write_value<W: Write>(
    out: &mut W,
    value: &Value,
    style: &JsonStyle,
    depth: usize,
) -> Result<(), JsonError> {
    if depth > NESTING_DEPTH {
        return Err(JsonError::Python("values are nested too deeply".into()));
    }
    match value.kind() {
        ValueKind::None => out.write_str("null")?,
        ValueKind::Bool => out.write_str(if value.is_true() { "true" } else { "false" })?,
        ValueKind::Number => out.write_str(&repr_number(value))?,
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default(), style.ensure_ascii)?,
        ValueKind::Seq | ValueKind::Iterable => {
            write_items(out, style, depth, ['[', ']'], value.try_iter()?, |out, item| {
                write_value(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<_> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_items(out, style, depth, ['{', '}'], keys.into_iter(), |out, key| {
                write_key(out, key, style)?;
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        kind => {
            return Err(JsonError::Python(format!("Object of type {kind} is not JSON serializable")));
        }
    }
    Ok(())
}

/// The key of an entry, and the separator behind it.
pub(super) fn write_key(out: &mut impl Write, key: &Value, style: &JsonStyle) -> Result<(), JsonError> {
    let name = key.as_str().map_or_else(|| to_str(key), str::to_owned);
    write_json_text(out, &name, style.ensure_ascii)?;
    Ok(out.write_str(&style.key_separator)?)
}

/// The items of a list or map between its brackets.
pub(super) fn write_items<W: Write>(
    out: &mut W,
    style: &JsonStyle,
    depth: usize,
    [open, close]: [char; 2],
    items: impl Iterator<Item = Value>,
    mut write: impl FnMut(&mut W, &Value) -> Result<(), JsonError>,
) -> Result<(), JsonError> {
    let line = |out: &mut W, depth: usize| -> fmt::Result {
        let Some(indent) = style.indent else { return Ok(()) };
        write!(out, "\n{:1$}", "", indent.saturating_mul(depth).min(INDENT_MAX))
    };
    // With an indent, Python writes no space at the end of a line.
    let item_end = if style.indent.is_some() {
        style.item_separator.trim_end_matches(' ')
    } else {
        &style.item_separator
    };
    out.write_char(open)?;
    let mut is_empty = true;
    for item in items {
        if !is_empty {
            out.write_str(item_end)?;
        }
        is_empty = false;
        line(out, depth + 1)?;
        write(out, &item)?;
    }
    if !is_empty {
        line(out, depth)?;
    }
    Ok(out.write_char(close)?)
}

fn write_json_text(out: &mut impl Write, text: &str, ascii: bool) -> fmt::Result {
    out.write_char('"')?;
    let mut rest = text;
    // Runs without a special character are written at once.
    let is_special =
        |letter: char| matches!(letter, '"' | '\\') || letter < ' ' || (ascii && !letter.is_ascii());
    while let Some(at) = rest.find(is_special) {
        let (plain, from) = rest.split_at(at);
        out.write_str(plain)?;
        let letter = from.chars().next().unwrap_or_default();
        rest = &from[letter.len_utf8()..];
        match letter {
            '"' => out.write_str("\\\"")?,
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\u{8}' => out.write_str("\\b")?,
            '\u{c}' => out.write_str("\\f")?,
            _ => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
    }
    out.write_str(rest)?;
    out.write_char('"')
}

/// `str`, which `{{ value }}` writes.
pub(super) fn to_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value, 0),
    }
}

/// `repr`.
fn repr(value: &Value, depth: usize) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => repr_number(value),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable if depth < NESTING_DEPTH => {
            let items: Vec<_> =
                value.try_iter().into_iter().flatten().map(|item| repr(&item, depth + 1)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map if depth < NESTING_DEPTH => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key, depth + 1), repr(&item, depth + 1))
            };
            let pairs: Vec<_> = value.try_iter().into_iter().flatten().map(pair).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => out.extend(['\\', quote]),
            letter if letter.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(letter));
            }
            letter => out.push(letter),
        }
    }
    out.push(quote);
    out
}

/// Formats a number as `repr` does: integers exactly, floats with the fewest digits that
/// round-trip.
fn repr_number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    if !number.is_finite() {
        let name = if number.is_nan() { "NaN" } else { "Infinity" };
        return if number < 0.0 { format!("-{name}") } else { name.into() };
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn json(value: &Value, style: &JsonStyle) -> Result<String, JsonError> {
        let mut out = String::new();
        write_json(&mut out, value, style).map(|()| out)
    }

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    /// Expected values were written by Python 3.11.
    #[test]
    fn output_matches_python() {
        let cases = [
            (
                r#"{"b":1,"a":[true,null,1.0]}"#,
                r#"{"b": 1, "a": [true, null, 1.0]}"#,
                "{'b': 1, 'a': [True, None, 1.0]}",
            ),
            (
                r#"[1e16,1e-5,0.0001,123456789.25,-0.0]"#,
                "[1e+16, 1e-05, 0.0001, 123456789.25, -0.0]",
                "[1e+16, 1e-05, 0.0001, 123456789.25, -0.0]",
            ),
            (
                r#"{"é\n":"it's <b>","q":"\"'"}"#,
                "{\"é\\n\": \"it's <b>\", \"q\": \"\\\"'\"}",
                r#"{'é\n': "it's <b>", 'q': '"\''}"#,
            ),
            (r#"[]"#, "[]", "[]"),
            (r#"{}"#, "{}", "{}"),
            (r#"18446744073709551615"#, "18446744073709551615", "18446744073709551615"),
        ];
        for (input, dumped, written) in cases {
            let value = value(input);
            assert_eq!(json(&value, &JsonStyle::default()).unwrap(), dumped);
            assert_eq!(to_str(&value), written);
        }
        assert_eq!(to_str(&value("\"as it is\"")), "as it is");
        let style =
            JsonStyle { indent: Some(2), sort_keys: true, ensure_ascii: true, ..JsonStyle::default() };
        let dumped = json(&value(r#"{"b":[1,{}],"a":"é😀"}"#), &style).unwrap();
        assert_eq!(dumped, "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\",\n  \"b\": [\n    1,\n    {}\n  ]\n}");
    }
}
